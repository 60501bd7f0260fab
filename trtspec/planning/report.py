"""A decision as JSON and as text: the ranked table and the command; the sweep and what it rests on on request."""

from __future__ import annotations

from typing import Any

from trtspec.errors import Problem
from trtspec.planning.acceptance import EXAMPLE
from trtspec.planning.decision import Decision, Row, command, remedies
from trtspec.planning.points import LayoutPlan, Point, Setting, sensitivity
from trtspec.specs import HeadSpec, ModelSpec

GB = 1e9
CHECKED = (
    "three announced speed-ups on 4 GB200 within 7 %, ten held-out ones at concurrency 16 within 18 % (9 % on "
    "average), plain decode steps within 10 % of aiconfigurator's; nothing fitted: docs/plan-model.md has every "
    "prediction beside its measurement"
)
ASSUMES = (
    "experts chosen as a power law of exponent 1.01",
    "draft tokens touch experts as independently as any other tokens, so verification is not cheaper than it seems",
    "one chain of drafts, all sequences in the same phase, no host time; tokens/s per user is 1 / TPOT",
    "one layer of draft cache; releases without TensorRT-LLM#15017 keep one for each draft token",
    "in time to first token and per output token, every prompt is whole, not cached, and stops the others' decoding",
)
HEADINGS = ("load", "layout", "draft", "tok/s/user", "tokens/s", "speed-up (range)", "trust")  # 76 columns


def to_dict(decision: Decision, model: ModelSpec, names: tuple[str, str | None], setting: Setting) -> dict[str, Any]:
    """The JSON contract for the recommended layout, else the first, with `layouts` for all and what everything rests
    on. `names` are those of target and head."""
    first = decision.best.plan if decision.best else decision.plans[0]
    ranges = [c for c in first.workload.concurrency if first.acceptance is not None and first.points]
    return {
        "target": names[0],
        "head": names[1],
        "gpu": setting.gpu.name,
        "gpus": first.layout.gpus,
        **plan_dict(first),
        "recommended": {str(c): row_dict(decision.of_concurrency(c)) for c in first.workload.concurrency},
        "best": best_dict(decision, names, setting),
        "targets": {"ttft_ms": decision.targets.ttft_ms, "tpot_ms": decision.targets.tpot_ms},
        "refused": [problem.to_dict() for problem in decision.refused],
        "layouts": [plan_dict(plan, short=True) for plan in decision.plans],
        "acceptance": acceptance_dict(first),
        "sensitivity": {str(c): sensitivity(first, best_drafting(first, c)) for c in ranges},
        "assumes": assumptions(model, first, setting),
        "checked": CHECKED,
        "sources": sources(first, setting),
    }


def row_dict(row: Row | None) -> dict[str, Any] | None:
    return row.to_dict() if row else None


def best_dict(decision: Decision, names: tuple[str, str | None], setting: Setting) -> dict[str, Any] | None:
    """The choice with its command; None where nothing can be served or nothing meets the targets."""
    row = decision.best
    if row is None:
        return None
    return {"concurrency": row.concurrency, **row.to_dict(), "command": command(row, *names, setting)}


def plan_dict(plan: LayoutPlan, short: bool = False) -> dict[str, Any]:
    room = plan.memory
    found: dict[str, Any] = {
        "layout": room.layout.name,
        "fits": plan.fits,
        "per_gpu": {
            "weights": round(room.weights_total),
            "head": round(room.head),
            "kv": round(room.kv),
            "reserve": round(room.reserve),
        },
        "kv_tokens": room.kv_tokens,
        "max_sequences": room.sequences(plan.workload.tokens),
    }
    if short:
        best = {str(c): plan.best(c).to_dict() for c in plan.workload.concurrency} if plan.points else {}
        return found | {"best": best}
    found["per_gpu"]["weights_by_class"] = {key: round(value) for key, value in room.weights.items()}
    found |= {"kv_dtype": room.kv_dtype, "kv_bytes_per_token": room.kv_bytes_per_token}
    found["points"] = [point.to_dict() for point in plan.points]
    found["by_workload"] = {name: [p.to_dict() for p in points] for name, points in plan.by_workload.items()}
    if plan.steps is not None:
        found["prefill_ms"] = round(plan.steps.prefill(plan.workload.isl) / 1000, 1)
        found["step_parts_us"] = {
            str(c): {key: round(value, 1) for key, value in plan.steps.parts(c, 1).items()}
            for c in plan.workload.concurrency
        }
    return found


def acceptance_dict(plan: LayoutPlan) -> dict[str, Any] | None:
    found = plan.acceptance
    if found is None:
        return None
    drafts = found.length_at[1] if found.length_at else len(found.known)
    longest = max(point.draft_len for point in plan.points)
    return {
        "source": found.source,
        "conditional": [round(rate, 6) for rate in found.rates(drafts)],
        "measured_drafts": drafts,
        "by_position": found.length_at is None,
        "extrapolated": [round(rate, 6) for rate in found.rates(longest)[drafts:]],
        "rests_on": found.rests_on(),
        "doubts": list(found.doubts),
    }


def best_drafting(plan: LayoutPlan, concurrency: int) -> Point:
    """The best point that drafts at all."""
    points = [point for point in plan.at(concurrency) if point.draft_len]
    return max(points, key=lambda point: point.speedup or 0)


def assumptions(model: ModelSpec, plan: LayoutPlan, setting: Setting) -> list[str]:
    found = [f"each request holds {plan.workload.context} tokens on average: all of its prompt and half of its answer"]
    if plan.steps is None:
        where = f"of {model.quant.format} weights in this shape and layout on {setting.gpu.name.upper()}"
        return [*found, f"memory alone: no kernels {where} are in the tables"]
    found += [f"{plan.steps.kernels.moe_kernel} kernels for the experts", *ASSUMES]
    return [*found, f"acceptance {plan.acceptance.rests_on()}"] if plan.acceptance is not None else found


def sources(plan: LayoutPlan, setting: Setting) -> list[str]:
    return [setting.gpu.source, *(plan.steps.kernels.sources if plan.steps else [])]


def text(
    decision: Decision, model: ModelSpec, names: tuple[str, str | None], setting: Setting, *, head: HeadSpec | None,
    verbose: bool = False,
) -> str:  # fmt: skip
    """The same for reading: title, memory in a line, the table, the command; everything with `verbose`."""
    first = decision.best.plan if decision.best else decision.plans[0]
    title = f"{names[0]}{f' with {names[1]}' if names[1] else ''} on {first.layout.gpus} x {setting.gpu.name.upper()}"
    lines = [f"{title}, {first.workload.isl:,} tokens in and {first.workload.osl:,} out", ""]
    lines += memory_lines(first) if verbose or not decision.fits else [memory_line(first)]
    if decision.fits:
        if shown(decision):
            lines += ["", *table_lines(decision, setting)]
        lines += ["", *choice_lines(decision, names, setting, head)]
    if verbose:
        lines += ["", *sweep_lines(decision), "", "Assumes:"]
        lines += [f"  {line}" for line in assumptions(model, first, setting)]
        lines += [f"Checked: {CHECKED}", "Sources: " + "; ".join(sources(first, setting))]
    return "\n".join(lines) + "\n"


def memory_line(plan: LayoutPlan) -> str:
    room = plan.memory
    fixed = (room.weights_total + room.head + room.reserve) / GB
    return (
        f"Memory per GPU, {room.layout.short}: {fixed:.0f} of {room.capacity / GB:.0f} GB without the KV cache, which "
        f"holds {room.kv_tokens:,} tokens: {room.sequences(plan.workload.tokens):,} requests"
    )


def memory_lines(plan: LayoutPlan) -> list[str]:
    room, tokens = plan.memory, plan.workload.tokens
    largest = ", ".join(f"{key} {value / GB:.1f}" for key, value in room.weights.items() if value >= 0.5 * GB)
    lines = [
        f"Memory per GPU in GB, {room.layout.name}: {room.capacity / GB:.1f}",
        f"  weights  {room.weights_total / GB:7.1f}  ({largest})",
        f"  head     {room.head / GB:7.1f}",
        f"  reserve  {room.reserve / GB:7.1f}  (communicators, context, activations, workspace, graphs)",
        f"  KV cache {room.kv / GB:7.1f}  ({room.fraction:g} of what is left, {room.kv_dtype.upper()}, "
        f"{room.kv_bytes_per_token:,.0f} bytes per token on each GPU)",
    ]
    if plan.fits:
        lines.append(f"  holds {room.kv_tokens:,} tokens in all: {room.sequences(tokens):,} requests of {tokens:,}")
    elif room.free < 0:
        lines.append(f"  does NOT fit: {-room.free / GB:.1f} GB per GPU too much before the first token of cache")
    else:
        lines.append(f"  does NOT fit: the cache holds {room.kv_tokens:,} tokens, one request needs {tokens:,}")
    return lines


def shown(decision: Decision) -> list[Row]:
    """The best row of each concurrency, in rank order; of a search, those around the choice."""
    rows = [row for row in decision.rows if row.held and row.point]
    firsts = [row for at, row in enumerate(rows) if row.concurrency not in {r.concurrency for r in rows[:at]}]
    firsts = [row for row in firsts if row.refused is None] or firsts
    return firsts[:8] if decision.targets.any else firsts


def table_lines(decision: Decision, setting: Setting) -> list[str]:
    """The ranked table; with targets, two columns more."""
    rows, targets = shown(decision), decision.targets
    headings = (*HEADINGS, "TTFT ms", "TPOT ms") if targets.any else HEADINGS
    cells = [list(headings)]
    for row in rows:
        cells.append(row_cells(row, row is decision.best))
        if targets.any:
            cells[-1] += [mark(row.ttft_ms, targets.ttft_ms), mark(row.tpot_ms, targets.tpot_ms)]
    lines = aligned(cells)
    names = {row.layout.short: row.layout.name for row in rows}
    lines += ["; ".join(f"{short}: {name}" for short, name in names.items()) + "."]
    for concurrency in decision.plans[0].workload.concurrency:
        if not targets.any and concurrency not in {row.concurrency for row in rows}:
            other = decision.of_concurrency(concurrency)
            reason = f"{other.layout.short} holds it, its speed is not known" if other else "no layout's cache holds it"
            lines.append(f"Concurrency {concurrency}: {reason}.")
    acceptance = next((plan.acceptance for plan in decision.plans if plan.acceptance), None)
    if acceptance is not None:
        lines += [f"Acceptance: {acceptance.source}.", f"  {acceptance.rests_on()}."]
        lines += [f"  bench doubted this measurement: {doubt}" for doubt in acceptance.doubts]
    return lines


def row_cells(row: Row, best: bool) -> list[str]:
    point = row.point
    assert point is not None
    spread = row.plan.speedup_range(point)
    gain = f"{point.speedup:.2f}x ({spread[0]:.2f} to {spread[1]:.2f})" if spread and point.speedup else "-"
    gain = "plain decoding" if point.draft_len == 0 else gain
    return [
        f"{row.concurrency} best" if best else str(row.concurrency),
        row.layout.short,
        str(point.draft_len),
        f"{1000 / row.tpot_ms:.0f}" if row.tpot_ms else "-",
        f"{row.tokens_per_s or 0:,.0f}",
        gain,
        row.trust,
    ]


def mark(value: float | None, target: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}{' too long' if target is not None and value > target else ''}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Columns of equal width, two spaces between them."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def choice_lines(
    decision: Decision, names: tuple[str, str | None], setting: Setting, head: HeadSpec | None
) -> list[str]:
    """The one command, with what it leaves open; or why there is none."""
    row = decision.best
    if row is None:
        return no_choice_lines(decision)
    lines = ["Next:", f"  {command(row, *names, setting)}"]
    if row.plan.acceptance is None and head is not None:
        lines += break_even_lines(row)
    elif row.point is not None and row.point.draft_len == 0 and head is not None:
        lines += ["Without the head: no draft length is worth its cost at this concurrency."]
    return lines


def break_even_lines(row: Row) -> list[str]:
    """With a head and no acceptance: what each draft length costs at the chosen row."""
    points = [point for point in row.plan.at(row.concurrency) if point.draft_len in (1, 2, 3, 4, 5)]
    costs = ", ".join(f"{point.draft_len}: {point.cost_ratio:.2f}" for point in points)
    return [
        f"Speculation wins there above this many tokens per step, by draft length: {costs}.",
        f"A speed-up needs your acceptance, which is never assumed: {EXAMPLE}.",
    ]


def no_choice_lines(decision: Decision) -> list[str]:
    if decision.refused:
        return [f"No command: {problem.message}" for problem in unique(decision.refused)]
    row = next(iter(decision.able), None)
    if row is None:
        return ["No command: no layout's cache holds that many requests."]
    if row.point is None:
        return [
            f"No command: {row.layout.short} holds it, but its speed is not known: no kernels of this format, shape "
            "and layout are in the tables, which end at 8 ranks."
        ]
    asked = [f"TTFT {decision.targets.ttft_ms:g} ms" if decision.targets.ttft_ms else ""]
    asked += [f"TPOT {decision.targets.tpot_ms:g} ms" if decision.targets.tpot_ms else ""]
    lines = [
        f"No command: nothing meets {' and '.join(word for word in asked if word)}. Nearest: {row.layout.short} at "
        f"concurrency {row.concurrency} with {row.point.draft_len} drafts, TTFT {row.ttft_ms:.0f} ms, "
        f"TPOT {row.tpot_ms:.1f} ms."
    ]
    lines += [f"  That row would meet it with {remedy}." for remedy in remedies(row, decision.targets)]
    if decision.wider is not None:
        wide = decision.wider
        lines.append(f"  {wide.layout.gpus} GPUs would: {wide.layout.short}, up to concurrency {wide.concurrency}.")
    return lines


def unique(problems: list[Problem]) -> list[Problem]:
    return list({problem.message: problem for problem in problems}.values())


def sweep_lines(decision: Decision) -> list[str]:
    """Every layout, concurrency and draft length, with the speed-up under other assumptions."""
    lines = []
    for plan in decision.plans:
        room = plan.memory
        lines.append(f"{room.layout.name} ({room.sequences(plan.workload.tokens):,} requests held)")
        if plan.steps is None:
            lines.append("  no kernels were measured for this format, shape and layout")
            continue
        for concurrency in plan.workload.concurrency:
            lines += [f"  {line}" for line in concurrency_lines(plan, concurrency)]
        lines += workload_lines(plan)
    return lines


def concurrency_lines(plan: LayoutPlan, concurrency: int) -> list[str]:
    points = plan.at(concurrency)
    note = "" if points[0].held else "  (the cache does not hold that many requests)"
    plain, best = points[0].plain_ms, plan.best(concurrency)
    lines = [f"concurrency {concurrency}: plain step {plain:.2f} ms{note}"]
    lines += [f"  {point_line(plan, point, point is best)}" for point in points[1:]]
    if plan.acceptance is not None and len(points) > 1:
        point = best_drafting(plan, concurrency)
        others = ", ".join(f"{value:.2f}x with {name}" for name, value in sensitivity(plan, point).items())
        lines.append(f"  draft {point.draft_len} would give {others}")
    return lines


def point_line(plan: LayoutPlan, point: Point, best: bool) -> str:
    cost = f"draft {point.draft_len}: step {point.step_ms:6.2f} ms, costs {point.cost_ratio:.2f} plain steps"
    touched = f", {point.experts:.0f} experts per layer"
    if point.acceptance_length is None or point.speedup is None:
        return f"{cost}{touched}; wins above {point.cost_ratio:.2f} tokens per step"
    rate = point.decode_rate or 0
    gain = f"; {point.acceptance_length:.2f} tokens per step, {rate:.0f} tokens/s decoding, {point.speedup:.2f}x"
    known = plan.acceptance is not None and plan.acceptance.measured(point.draft_len)
    return f"{cost}{touched}{gain}{'' if known else ', extrapolated'}{'  <- best' if best else ''}"


def workload_lines(plan: LayoutPlan) -> list[str]:
    lines = []
    for name, points in plan.by_workload.items():
        cells = []
        for concurrency in plan.workload.concurrency:
            here = [point for point in points if point.concurrency == concurrency]
            best = max(here, key=lambda point: point.speedup or 0)
            cells.append(f"{concurrency}: draft {best.draft_len}, {best.speedup:.2f}x")
        lines.append(f"    {name}: " + "; ".join(cells))
    return ["  by category of your measurement, best draft length at each concurrency:", *lines] if lines else []
