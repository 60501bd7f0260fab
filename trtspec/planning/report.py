"""The plan as JSON and as text: every figure with what it rests on."""

from __future__ import annotations

from typing import Any

from trtspec.planning.acceptance import EXAMPLE
from trtspec.planning.planner import Plan, Point, recommend, sensitivity
from trtspec.specs import GpuSpec, HeadSpec

GB = 1e9
CHECKED = (
    "three announced speed-ups on 4 GB200 within 7 %, ten held-out ones at concurrency 16 within 18 % (9 % on "
    "average); nothing fitted: docs/plan-model.md has every prediction beside its measurement"
)
ASSUMES = (
    "the MoE backend that build-config names (TRTLLM for NVFP4), experts chosen as a power law of exponent 1.01",
    "draft tokens touch experts as independently as any other tokens, so verification is not cheaper than it seems",
    "one chain of drafts, all sequences in the same phase, no prefill between steps, no host time",
)


def to_dict(name: str, head_name: str | None, gpu: GpuSpec, plans: list[Plan]) -> dict[str, Any]:
    """The JSON contract for the first plan, with `layouts` for all and what everything rests on."""
    first = plans[0]
    report: dict[str, Any] = {
        "target": name,
        "head": head_name,
        "gpu": gpu.name,
        "gpus": first.memory.layout.gpus,
        **plan_dict(first),
        "recommended": recommend(plans),
        "layouts": [plan_dict(item, short=True) for item in plans],
        "acceptance": acceptance_dict(first),
        "sensitivity": {str(c): sensitivity(first, best_drafting(first, c)) for c in drafted(first)},
        "assumes": assumptions(first, gpu),
        "checked": CHECKED,
        "sources": [gpu.source, *(first.model.kernels.sources if first.model else [])],
    }
    return report


def plan_dict(item: Plan, short: bool = False) -> dict[str, Any]:
    room = item.memory
    found: dict[str, Any] = {
        "layout": room.layout.name,
        "fits": item.fits,
        "per_gpu": {
            "weights": round(room.weights_total),
            "head": round(room.head),
            "kv": round(room.kv),
            "reserve": round(room.reserve),
        },
        "kv_tokens": room.kv_tokens,
        "max_sequences": room.sequences(item.workload.tokens),
    }
    if short:
        best = {str(c): item.best(c).to_dict() for c in item.workload.concurrency} if item.points else {}
        return found | {"best": best}
    found["per_gpu"]["weights_by_class"] = {key: round(value) for key, value in room.weights.items()}
    found |= {"kv_dtype": room.kv_dtype, "kv_bytes_per_token": room.kv_bytes_per_token}
    found["points"] = [point.to_dict() for point in item.points]
    found["by_workload"] = {name: [p.to_dict() for p in points] for name, points in item.by_workload.items()}
    if item.model is not None:
        found["prefill_ms"] = round(item.model.prefill(item.workload.isl) / 1000, 1)
        found["step_parts_us"] = {
            str(c): {key: round(value, 1) for key, value in item.model.parts(c, 1).items()}
            for c in item.workload.concurrency
        }
    return found


def acceptance_dict(item: Plan) -> dict[str, Any] | None:
    if item.acceptance is None:
        return None
    found = item.acceptance
    return {
        "source": found.source,
        "conditional": list(found.conditional),
        "measured_drafts": found.measured,
        "doubts": list(found.doubts),
    }


def drafted(item: Plan) -> list[int]:
    return list(item.workload.concurrency) if item.acceptance is not None and item.points else []


def best_drafting(item: Plan, concurrency: int) -> Point:
    """The best point that drafts at all."""
    points = [point for point in item.at(concurrency) if point.draft_len]
    return max(points, key=lambda point: point.speedup or 0)


def assumptions(item: Plan, gpu: GpuSpec) -> list[str]:
    found = [f"each request holds {item.workload.context} tokens on average: all of its prompt and half of its answer"]
    if item.format == "int4":
        found.append(
            "vLLM's kernels for INT4 weights: TensorRT-LLM does not load them (`trtspec quantize` makes NVFP4)"
        )
    if item.format == "nvfp4" and not gpu.fp4_flops:
        found.append(
            f"memory alone: {gpu.name.upper()} has no FP4 tensor cores, and TensorRT-LLM serves no NVFP4 on it"
        )
    if item.model is None:
        return found
    found += ASSUMES
    if item.acceptance is not None and item.acceptance.flat:
        found.append("one acceptance rate at every position: long drafts come out 2 to 10 % too good")
    elif item.acceptance is not None:
        measured = item.acceptance.measured
        found.append(f"positions beyond the {measured} measured ones are accepted like the last of them")
    return found


def text(name: str, head: HeadSpec | None, head_name: str | None, gpu: GpuSpec, plans: list[Plan]) -> str:
    """The same for reading."""
    first = plans[0]
    lines = [
        f"{name}{f' with {head_name}' if head_name else ''} on {first.memory.layout.gpus} x {gpu.name.upper()}",
        "",
    ]
    lines += memory_lines(first)
    if first.model is None:
        lines += [
            "",
            f"Speed: not known. No kernels were measured for this shape, format and layout on {gpu.name.upper()}.",
        ]
    elif first.fits:
        lines += ["", *speed_lines(first)]
        if len(plans) > 1:
            lines += ["", *layout_lines(plans)]
        lines += ["", *next_lines(name, head_name, gpu, plans)]
    lines += ["", "Assumes:", *(f"  {line}" for line in assumptions(first, gpu))]
    if first.model is not None:
        lines += [f"Checked: {CHECKED}"]
        lines += ["Sources: " + "; ".join([gpu.source, *first.model.kernels.sources])]
    return "\n".join(lines) + "\n"


def memory_lines(item: Plan) -> list[str]:
    room, tokens = item.memory, item.workload.tokens
    largest = ", ".join(f"{key} {value / GB:.1f}" for key, value in room.weights.items() if value >= 0.5 * GB)
    held = room.sequences(tokens)
    lines = [
        f"Memory per GPU in GB, {room.layout.name}: {room.capacity / GB:.1f}",
        f"  weights  {room.weights_total / GB:7.1f}  ({largest})",
        f"  head     {room.head / GB:7.1f}",
        f"  reserve  {room.reserve / GB:7.1f}  (communicators, context, activations, workspace, graphs)",
        f"  KV cache {room.kv / GB:7.1f}  ({room.fraction:g} of what is left, {room.kv_dtype.upper()}, "
        f"{room.kv_bytes_per_token:,.0f} bytes per token on each GPU)",
    ]
    if item.fits:
        lines.append(f"  holds {room.kv_tokens:,} tokens in all: {held} requests of {tokens:,} tokens")
    elif room.free < 0:
        lines.append(f"  does NOT fit: {-room.free / GB:.1f} GB per GPU too much before the first token of cache")
    else:
        lines.append(f"  does NOT fit: the cache holds {room.kv_tokens:,} tokens, one request needs {tokens:,}")
    return lines


def speed_lines(item: Plan) -> list[str]:
    assert item.model is not None
    lines = []
    for concurrency in item.workload.concurrency:
        points = item.at(concurrency)
        note = "" if points[0].held else "  (the cache does not hold that many requests)"
        plain = points[0].plain_ms
        lines.append(
            f"Concurrency {concurrency}: plain step {plain:.2f} ms, {1000 / plain:.0f} tokens/s per user{note}"
        )
        for point in points[1:]:
            lines.append("  " + point_line(point, point is item.best(concurrency)))
        lines += sensitivity_lines(item, concurrency)
    lines += workload_lines(item)
    if item.model.head is not None and item.acceptance is None:
        lines += [
            "Speed-up needs your acceptance, which is never assumed: give --acceptance,",
            f"  {EXAMPLE}",
        ]
    elif item.acceptance is not None:
        lines.append(f"Acceptance: {item.acceptance.source}")
        lines += [f"  bench doubted this measurement: {doubt}" for doubt in item.acceptance.doubts]
    return lines


def point_line(point: Point, best: bool) -> str:
    cost = f"draft {point.draft_len}: step {point.step_ms:6.2f} ms, costs {point.cost_ratio:.2f} plain steps"
    touched = f", {point.experts:.0f} experts per layer"
    if point.acceptance_length is None or point.speedup is None:
        return f"{cost}{touched}; wins above {point.cost_ratio:.2f} tokens per step"
    rate = point.tokens_per_s_per_user or 0
    gain = f"; {point.acceptance_length:.2f} tokens per step, {rate:.0f} tokens/s per user, {point.speedup:.2f}x"
    return f"{cost}{touched}{gain}{'  <- best' if best else ''}"


def sensitivity_lines(item: Plan, concurrency: int) -> list[str]:
    if concurrency not in drafted(item) or not any(point.draft_len for point in item.at(concurrency)):
        return []
    point = best_drafting(item, concurrency)
    others = ", ".join(f"{value:.2f}x with {name}" for name, value in sensitivity(item, point).items())
    return [f"  draft {point.draft_len} would give {others}"]


def workload_lines(item: Plan) -> list[str]:
    lines = []
    for name, points in item.by_workload.items():
        cells = []
        for concurrency in item.workload.concurrency:
            here = [point for point in points if point.concurrency == concurrency]
            best = max(here, key=lambda point: point.speedup or 0)
            cells.append(f"{concurrency}: draft {best.draft_len}, {best.speedup:.2f}x")
        lines.append(f"  {name}: " + "; ".join(cells))
    return ["By category of your measurement, best draft length at each concurrency:", *lines] if lines else []


def layout_lines(plans: list[Plan]) -> list[str]:
    """The layouts beside each other, at each one's best draft length."""
    lines = ["Layouts, tokens/s per user at the best draft length (requests that the cache holds):"]
    for item in plans:
        if item.model is None or not item.fits:
            lines.append(f"  {item.memory.layout.name}: {'not measured' if item.fits else 'does not fit'}")
            continue
        cells = []
        for concurrency in item.workload.concurrency:
            best = item.best(concurrency)
            held = "" if best.held else "!"
            cells.append(f"{concurrency}: {best.tokens_per_s_per_user or 0:.0f} (draft {best.draft_len}){held}")
        held_at_all = item.memory.sequences(item.workload.tokens)
        lines.append(f"  {item.memory.layout.name} ({held_at_all}): " + ", ".join(cells))
    return lines


def next_lines(name: str, head_name: str | None, gpu: GpuSpec, plans: list[Plan]) -> list[str]:
    """The command that writes the engine's file for the best plan of each concurrency."""
    lines = ["Next, for the best of these at each concurrency:"]
    for concurrency, row in recommend(plans).items():
        if row is None:
            lines.append(f"  {concurrency}: no layout holds that many requests of this length")
            continue
        words = ["trtspec build-config", name]
        drafting = row["draft_len"] != 0
        words += ["--head", head_name] if head_name and drafting else []
        words += ["--gpu", gpu.name, "--tp-size", str(row["tp_size"]), "--ep-size", str(row["ep_size"])]
        words += ["--attention-dp"] if row["attention_dp"] else ["--no-attention-dp"]
        words += [
            "--isl",
            str(plans[0].workload.isl),
            "--osl",
            str(plans[0].workload.osl),
            "--concurrency",
            concurrency,
        ]
        words += ["--draft-len", str(row["draft_len"])] if head_name and row["draft_len"] else []
        lines.append(f"  {concurrency}: {' '.join(words)}")
    return lines
