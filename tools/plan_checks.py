"""Writes docs/reference/plan-checks.md from plan_published.yaml and the model.

`python tools/plan_checks.py` writes it again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trtspec.checkpoint.hub import find_target, load_head
from trtspec.planning.acceptance import Acceptance, Decay, lengths, other_decays
from trtspec.planning.layout import Layout
from trtspec.planning.memory import checkpoint_bytes, memory
from trtspec.planning.points import HOST_US, Setting, Workload, assumptions, plan_layout
from trtspec.planning.step import StepModel, kernels
from trtspec.specs import gpu_spec

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs" / "reference"
HEAD = """<!-- Written by tools/plan_checks.py from plan_published.yaml. -->

# Predictions beside measurements

Tables behind [the step model of plan](../plan-model.md). Groups marked "held out" were looked \
at only after the model
was finished. "Under other assumptions" is the range over even routing, more uneven routing, 1 ms \
of host time, twice
the context and CUTLASS kernels.

"""


PUBLISHED = yaml.safe_load((HERE / "plan_published.yaml").read_text(encoding="utf-8"))
CURVES: dict[str, list[float]] = PUBLISHED["curves"]
KIMI = [name for name in CURVES if name.startswith("kimi")]
KNOWN = 3  # draft positions that the extrapolation is shown; the further ones score it
# the first draft length that decides the ratio; below it the shape passes through the curve itself
FITTED_FROM = 4
RATIOS = [step / 1000 for step in range(850, 1101)]


def rates_of(curve: Sequence[float]) -> list[float]:
    """Conditional rates by position, from acceptance lengths for 1, 2, .. drafts that rise."""
    reached = [after - before for before, after in zip([1.0, *curve], curve, strict=False)]
    return [here / before for before, here in zip([1.0, *reached], reached, strict=False)]


def fit(curve: Sequence[float]) -> Decay:
    """The shape of acceptance lengths for 1, 2, .. drafts.

    `first` and the middle of the next two positions are those of the curve, and the ratio is the
    one that, from there on, comes closest to its further lengths (least squares of their
    logarithms).
    """
    known = rates_of(curve[: FITTED_FROM - 1])
    middle = math.prod(known[1:]) ** (
        1 / len(known[1:])
    )  # lies half way between the second and the third

    def distance(ratio: float) -> float:
        shape = Decay(known[0], middle / math.sqrt(ratio), ratio)
        found = lengths(
            [*known, *(shape.rate(position) for position in range(FITTED_FROM, len(curve) + 1))]
        )
        pairs = zip(found[FITTED_FROM - 1 :], curve[FITTED_FROM - 1 :], strict=True)
        return sum(math.log(ours / theirs) ** 2 for ours, theirs in pairs)

    ratio = min(RATIOS, key=distance)
    return Decay(known[0], middle / math.sqrt(ratio), ratio)


def mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*curves, strict=True)]


def steps(
    target: str, head: str | None, gpu: str, layout: Layout, context: int, kernel: str | None = None
) -> StepModel:
    model = find_target(target).spec
    found = kernels(gpu_spec(gpu), model.quant.format)
    assert found is not None
    found = replace(found, moe_kernel=kernel or found.moe_kernel)
    return StepModel(model, load_head(head).spec if head else None, layout, found, context)


def error(predicted: float, published: float) -> str:
    return f"{100 * (predicted / published - 1):+.1f} %"


def header(*names: str) -> list[str]:
    """The first two lines of a table."""
    return [row_of(*names).replace("|  |", "| |"), "|---" * len(names) + "|"]


def row_of(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def sizes(data: dict[str, Any]) -> list[str]:
    lines = [
        "## Checkpoint sizes",
        "",
        *header("checkpoint", "format", "published", "predicted", "error"),
    ]
    for row in data["sizes"]:
        found = checkpoint_bytes(find_target(row["checkpoint"]).spec)
        said, size = (
            f"{row['said']} ({row['source']})",
            f"{found / 1e9:.2f} GB, {found / 2**30:.2f} GiB",
        )
        off = f"{100 * (found / row['bytes'] - 1):+.2f} %"
        lines.append(row_of(row["checkpoint"], row["format"], said, size, off))
    return lines


def cache(data: dict[str, Any]) -> list[str]:
    lines = [
        "## Cache capacity",
        "",
        *header("target", "on", "published tokens", "predicted", "error"),
    ]
    for row in data["cache"]:
        room = memory(
            find_target(row["target"]).spec, None, gpu_spec(row["gpu"]), Layout(row["gpus"])
        )
        found = (0.9 * room.capacity - room.weights_total - room.reserve) / room.kv_bytes_per_token
        where = f"{row['gpus']} x {row['gpu'].upper()} ({row['source']})"
        off = error(found, row["tokens"])
        lines.append(row_of(row["target"], where, f"{row['tokens']:,}", f"{found:,.0f}", off))
    model, head = (
        find_target("nvidia/Kimi-K2.6-NVFP4").spec,
        load_head("nvidia/Kimi-K2.6-Eagle3").spec,
    )
    rooms = {gpu: memory(model, head, gpu_spec(gpu), Layout(4)) for gpu in ("b200", "h200")}
    held, left = rooms["b200"].sequences(8192), rooms["h200"].free / 1e9
    lines += [
        "",
        (
            f"Four B200 hold Kimi-K2.6-NVFP4 with its head and {held} requests of 8,192 tokens; "
            "four H200 lack"
        ),
    ]
    lines += [f"{-left:.1f} GB each before the first token of cache."]
    return lines


def speedups(data: dict[str, Any]) -> list[str]:
    lines = []
    for group in data["speedups"]:
        lines += [f"## {group['name']}", "", f"Source: {group['source']}.", ""]
        columns = (
            "concurrency",
            "tokens per step",
            "published",
            "predicted",
            "error",
            "under other assumptions",
        )
        lines += header("", *columns)
        found = steps(
            group["target"],
            group["head"],
            group["gpu"],
            Layout(4),
            group["isl"] + group["osl"] // 2,
        )
        errors = []
        for row in group["rows"]:
            published = row["published"] / row.get("base", 1)
            batch, length = row["concurrency"], row["acceptance"]
            predicted = length / found.cost_ratio(batch, 3)
            errors.append(abs(predicted / published - 1))
            range_ = [length / item.cost_ratio(batch, 3) for item in assumptions(found).values()]
            cells = (
                row["label"],
                str(batch),
                f"{length:.2f}",
                f"{published:.2f}x",
                f"{predicted:.2f}x",
            )
            spread = f"{min(range_):.2f} to {max(range_):.2f}"
            lines.append(row_of(*cells, error(predicted, published), spread))
        lines += [
            "",
            (
                f"Mean absolute error {100 * sum(errors) / len(errors):.1f} %, "
                f"largest {100 * max(errors):.1f} %."
            ),
            "",
        ]
    return lines


def sensitivities(data: dict[str, Any]) -> list[str]:
    """The first group under each assumption by name."""
    group = data["speedups"][0]
    found = steps(
        group["target"], group["head"], group["gpu"], Layout(4), group["isl"] + group["osl"] // 2
    )
    models = {"as planned": found, **assumptions(found)}
    lines = ["## The same under each assumption", "", *header("concurrency", *models, "published")]
    for row in group["rows"]:
        cells = [
            f"{row['acceptance'] / item.cost_ratio(row['concurrency'], 3):.2f}"
            for item in models.values()
        ]
        lines.append(row_of(str(row["concurrency"]), *cells, str(row["published"])))
    return lines


def single_steps(data: dict[str, Any]) -> list[str]:
    columns = ("published", "predicted", "error", "with 1 ms of host time")
    lines = ["## Steps in milliseconds", "", *header("", *columns)]
    for row in data["steps"]:
        found = steps("nvidia/Kimi-K2.6-NVFP4", None, row["gpu"], Layout(row["gpus"]), 2048)
        slow = replace(found, host_us=HOST_US)
        values = []
        for item in (found, slow):
            extra = row["queries"] - 1
            plain = item.step(1) / 1000
            values.append((item.step(1, row["queries"]) / 1000 - plain) / extra if extra else plain)
        published, (ours, slower) = row["published_ms"], values
        said, off = f"{published} ({row['source']})", error(ours, published)
        lines.append(
            row_of(
                row["name"], said, f"{ours:.2f}", off, f"{slower:.2f}, {error(slower, published)}"
            )
        )
    return lines


def rates(data: dict[str, Any]) -> list[str]:
    group = data["rates"]
    lines = [
        f"## {group['name']}",
        "",
        f"Source: {group['source']}. Tokens per second and user; the last two columns add, for",
        "every answer, one prefill that stops all others.",
        "",
    ]
    lines += header(
        "GPU", "concurrency", "published", "decode alone", "error", "with prefill", "error"
    )
    errors: dict[str, list[float]] = {"decode alone": [], "with prefill": []}
    for gpu, row in group["rows"].items():
        found = steps(group["target"], None, gpu, Layout(8), group["isl"] + group["osl"] // 2)
        for concurrency, published in zip(group["concurrency"], row, strict=True):
            step = found.step(concurrency)
            stalled = step + concurrency * found.prefill(group["isl"]) / group["osl"]
            cells = [gpu.upper(), str(concurrency), str(published)]
            for name, duration in (("decode alone", step), ("with prefill", stalled)):
                predicted = 1e6 / duration
                errors[name].append(abs(predicted / published - 1))
                cells += [f"{predicted:.1f}", error(predicted, published)]
            lines.append(row_of(*cells))
    summary = "; ".join(
        f"{name} {100 * sum(e) / len(e):.0f} %, largest {100 * max(e):.0f} %"
        for name, e in errors.items()
    )
    return [*lines, "", f"Mean absolute error: {summary}."]


def agentic(data: dict[str, Any]) -> list[str]:
    group = data["agentic"]
    lines = [f"## {group['name']}", "", f"Source: {group['source']}.", ""]
    lines += header("GPU", "concurrency", "published tokens/s per user", "decode alone", "error")
    for gpu, row in group["rows"].items():
        found = steps(
            group["target"], group["head"], gpu, Layout(4), group["isl"] + group["osl"] // 2
        )
        for concurrency, published_rate in zip(group["concurrency"], row, strict=True):
            ours = 1e6 * group["acceptance"] / found.speculative_step(concurrency, 3)
            cells = (
                gpu.upper(),
                str(concurrency),
                f"{published_rate}",
                f"{ours:.0f}",
                error(ours, published_rate),
            )
            lines.append(row_of(*cells))
    return lines


def decode_steps(data: dict[str, Any]) -> list[str]:
    group = data["aiconfigurator"]
    lines = [f"## {group['name']}", "", f"Source: {group['source']}.", ""]
    columns = (
        "target",
        "GPU",
        "layout",
        "MoE kernel",
        "context",
        "concurrency: theirs, ours in ms, difference",
        "largest",
    )
    lines += header(*columns)
    for row in group["rows"]:
        name = row["layout"]
        layout = Layout(int(name.lstrip("TDEP")), "E" in name, "D" in name)
        found = steps(row["target"], None, row["gpu"], layout, row["isl"] + 32, row["kernel"])
        pairs = [
            (c, theirs, found.step(c) / 1000)
            for c, theirs in zip(row["concurrency"], row["ms"], strict=True)
        ]
        cells = [
            f"{c}: {theirs:.2f}, {ours:.2f}, {error(ours, theirs)}" for c, theirs, ours in pairs
        ]
        worst = max((ours / theirs - 1 for _, theirs, ours in pairs), key=abs)
        where = (
            row["target"].rpartition("/")[2],
            row["gpu"].upper(),
            name,
            row["kernel"],
            f"{row['isl']:,}",
        )
        lines.append(row_of(*where, "; ".join(cells), f"{100 * worst:+.1f} %"))
    return lines


def held_out_decays() -> dict[str, dict[str, Decay]]:
    """By Kimi curve and name: a decay fitted without that curve."""
    others = fit(mean([curve for name, curve in CURVES.items() if name not in KIMI]))
    return {
        name: {"the four MiniMax-M3 curves": others}
        | {
            f"the other Kimi curve, {other[10:]}": other_decays()[other]
            for other in KIMI
            if other != name
        }
        for name in KIMI
    }


def extrapolation(data: dict[str, Any]) -> list[str]:
    """Each Kimi curve predicted from its first positions.

    By decays fitted without it, and from the other curve.
    """
    lines = ["## Acceptance beyond the measured positions", ""]
    lines += [
        (
            "Error of the acceptance length by draft length. "
            "No decay saw the curve that it is scored on."
        ),
        "",
    ]
    lines += header(
        "curve", "known of it", "decay from", *(f"K={k}" for k in range(1, 9)), "largest"
    )
    for name, decays in held_out_decays().items():
        curve, known = CURVES[name], rates_of(CURVES[name][:KNOWN])
        for source, decay in decays.items():
            by_position = lengths([*known, *decay.beyond(known, len(curve))])
            one_length = Acceptance("", length_at=(curve[KNOWN - 1], KNOWN))
            by_length = lengths(one_length.rates(len(curve), decay))
            lines.append(extrapolated_row(name, f"K = 1 to {KNOWN}", source, by_position, curve))
            lines.append(
                extrapolated_row(
                    name, f"one length, {curve[KNOWN - 1]}@{KNOWN}", source, by_length, curve
                )
            )
    for name, decays in held_out_decays().items():
        known = rates_of(CURVES[name][:KNOWN])
        grown = fit(lengths([*known, *next(iter(decays.values())).beyond(known, 8)]))
        (other,) = (item for item in KIMI if item != name)
        start = rates_of(CURVES[other][:KNOWN])
        source = f"K = 1 to {KNOWN} of {name.partition(' ')[2]}, beyond by MiniMax-M3"
        carried = lengths([*start, *grown.beyond(start, 8)])
        lines.append(extrapolated_row(other, f"K = 1 to {KNOWN}", source, carried, CURVES[other]))
    return lines


def extrapolated_row(
    name: str, known: str, source: str, found: list[float], curve: list[float]
) -> str:
    errors = [ours / theirs - 1 for ours, theirs in zip(found, curve, strict=True)]
    cells = [f"{100 * value:+.1f} %" for value in errors]
    return row_of(name, known, source, *cells, f"{100 * max(errors, key=abs):+.1f} %")


def draft_lengths(data: dict[str, Any]) -> list[str]:
    """The draft length recommended from K <= 3 against the best by published lengths."""
    model, head = (
        find_target("nvidia/Kimi-K2.5-NVFP4").spec,
        load_head("lightseekorg/kimi-k2.5-eagle3-mla").spec,
    )
    lines = ["## Draft lengths recommended from K = 1 to 3", ""]
    lines += [
        (
            "Loss against the best draft length by the published acceptance lengths; "
            "1024 tokens in and out. Beyond"
        )
    ]
    lines += ["K = 3 the recommendation rests on the MiniMax-M3 curves alone.", ""]
    lines += header("curve", "on", *(f"concurrency {c}" for c in (1, 4, 16, 64)), "largest loss")
    for name, decays in held_out_decays().items():
        for gpu, layout in (
            ("b200", Layout(4)),
            ("b300", Layout(4)),
            ("b200", Layout(8)),
            ("b300", Layout(8, True)),
        ):
            acceptance = Acceptance(
                "", tuple(rates_of(CURVES[name][:KNOWN])), decay=next(iter(decays.values()))
            )
            workload = Workload(1024, 1024, (1, 4, 16, 64))
            setting = Setting(
                "", model, "", head, gpu_spec(gpu), workload, acceptance, longest_draft=8
            )
            plan, cells, losses = plan_layout(layout, setting), [], []
            for concurrency in workload.concurrency:
                rate = {
                    p.draft_len: [1.0, *CURVES[name]][p.draft_len] / p.step_ms
                    for p in plan.at(concurrency)
                }
                chosen, best = (
                    plan.best(concurrency).draft_len,
                    max(rate, key=lambda length: rate[length]),
                )
                losses.append(1 - rate[chosen] / rate[best])
                cells.append(f"{chosen}, best {best}, {100 * losses[-1]:.1f} %")
            lines.append(
                row_of(name, f"{gpu.upper()}, {layout.short}", *cells, f"{100 * max(losses):.1f} %")
            )
    return lines


def tables() -> str:
    parts = (
        sizes,
        cache,
        speedups,
        sensitivities,
        single_steps,
        rates,
        agentic,
        decode_steps,
        extrapolation,
        draft_lengths,
    )
    return "\n\n".join("\n".join(part(PUBLISHED)).strip() for part in parts)


def main() -> None:
    path, wanted = DOCS / "plan-checks.md", f"{HEAD}{tables()}\n"
    if "--check" in sys.argv:
        current = path.is_file() and path.read_text(encoding="utf-8") == wanted
        sys.exit(
            0
            if current
            else "docs/reference/plan-checks.md is not up to date: python tools/plan_checks.py"
        )
    path.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
