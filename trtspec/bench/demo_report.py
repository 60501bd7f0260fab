"""The report of `trtspec demo`: the chain, what each link made, and the figures with what they are worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtspec.bench import report, tables
from trtspec.bench.acceptance import AcceptanceSummary
from trtspec.bench.assembly import pair_ratio
from trtspec.bench.results import BenchResults, EndpointResult, InterleavedLevel, PairRatio, from_dict
from trtspec.bench.tables import number
from trtspec.report import Table

TITLES = {
    "greedy": "BF16 target, greedy",
    "sampled": "BF16 target, temperature 1, argmax drafts",
    "nvfp4-greedy": "NVFP4 target, greedy",
    "nvfp4-sampled": "NVFP4 target, temperature 1, argmax drafts",
}
SMOOTH = 40  # points per training curve
BASELINE = (
    "This server is the baseline, not gated. A model as small as kimi-nano repeats itself when it is greedy and "
    "calls few tools; the speculating server is judged by whether it does the same, not for these."
)


def demo_html(data: dict[str, Any]) -> str:
    """One self-contained page from demo.json. A stage that is missing from the data is left out, never invented."""
    data, drawn = with_records(data), report.can_plot()
    greedy = data["bench"].get("greedy")
    endpoints = in_order(greedy.all) if greedy else []
    return (
        report.environment()
        .get_template("demo.html.j2")
        .render(
            title="From BF16 weights to a speculating endpoint",
            quick=data["quick"],
            machine=data["machine"],
            keys=key_figures(data),
            steps=data["steps"],
            seconds=data["seconds"],
            size_table=size_table(data),
            error_table=error_table(data),
            training=data.get("training"),
            loss_plot=loss_plot(data) if drawn else "",
            accuracy_plot=accuracy_plot(data) if drawn else "",
            acceptance_table=acceptance_table(data),
            category_plot=report.category_plot(titled(data), degenerate=True) if drawn else "",
            position_plot=report.position_plot(titled(data), degenerate=True) if drawn else "",
            position_table=position_table(data),
            quality=[(TITLES[name], tables.quality_line(found)) for name, found in data["bench"].items()],
            speed_tables=speed_tables(data),
            speed_plot=report.speed_plot(greedy, endpoints, degenerate=True) if drawn and greedy else "",
            honesty_table=honesty_table(data),
            checks=data["checks"],
            baseline=BASELINE,
            config=data.get("config"),
            findings=findings(data),
            plots=drawn,
            created=data["created"],
            versions=data["versions"],
        )
    )


def with_records(data: dict[str, Any]) -> dict[str, Any]:
    """demo.json with the records of its measurements; the functions below take it so."""
    return {**data, "bench": {name: from_dict(found) for name, found in data["bench"].items()}}


def all_tables(data: dict[str, Any]) -> list[Table]:
    """What the terminal shows: the report's tables without the chain."""
    data = with_records(data)
    found = [size_table(data), error_table(data), acceptance_table(data), position_table(data), *speed_tables(data)]
    return [table for table in [*found, honesty_table(data)] if table is not None and table.rows]


def verdict_lines(data: dict[str, Any]) -> list[str]:
    """check's verdicts and the word on the output, one line each."""
    bench = with_records(data)["bench"]
    lines = [f"{TITLES[name]}: {tables.quality_line(found)}" for name, found in bench.items()]
    for entry in data["checks"]:
        for result in entry["verdict"]["results"]:
            lines.append(f"{entry['title']}: {result['status']} {result['name']}: {result['message']}")
    return lines


def titled(data: dict[str, Any]) -> dict[str, BenchResults]:
    return {TITLES[name]: found for name, found in data["bench"].items()}


def in_order(endpoints: Sequence[EndpointResult]) -> list[EndpointResult]:
    """Speculation first, so that it keeps the page's first colour."""
    rank = {"eagle3": 0, "plain": 1}
    return sorted(endpoints, key=lambda endpoint: rank.get(endpoint.name, 2))


def key_figures(data: dict[str, Any]) -> list[dict[str, str]]:
    found = []
    greedy, quantized = data["bench"].get("greedy"), data["bench"].get("nvfp4-greedy")
    if greedy:
        found.append(report.acceptance_key(greedy, "tokens per step"))
        if sampled := data["bench"].get("sampled"):
            found.append(report.acceptance_key(sampled, "tokens per step"))
        for name in ("greedy", "sampled"):
            measured = data["bench"].get(name)
            title = tables.condition(measured) if measured else ""
            for level in (measured.interleaved or [] if measured else [])[:2]:
                if level.pair("eagle3", "plain"):
                    ratio, mark = ratio_of(level, "eagle3", "plain")
                    label = f"tokens/s with Eagle3 over none, {title}, concurrency {level.concurrency}{mark}"
                    found.append({"value": number(ratio.median, 2, "x"), "label": label})
    if quantized:
        found.append(report.acceptance_key(quantized, "tokens per step on the NVFP4 target"))
    lossless = [r for entry in data["checks"] for r in entry["verdict"]["results"] if r["name"] == "lossless"]
    for result in lossless:
        if result["status"] != "skipped":
            detail = result["detail"]
            rare = f", {detail['rare']} rare ones" if detail["rare"] else ""
            label = (
                f"greedy answers unchanged, {detail['near_ties']} near-ties{rare}, {detail['real']} real divergences"
            )
            found.append({"value": f"{detail['identical']} / {detail['compared']}", "label": label})
    return found


def size_table(data: dict[str, Any]) -> Table | None:
    rows = []
    for name, key in (("target", "target"), ("quantized target", "quantized"), ("draft head", "head")):
        entry = data.get(key)
        if entry:
            shape = entry.get("format", "")
            if key == "head":
                shape = f"Eagle {entry.get('eagle', '')}, {str(entry.get('attention', '')).upper()}"
            rows.append([name, str(shape), number(entry["parameters"], 0), megabytes(entry["bytes"])])
    if not rows:
        return None
    note = "A model this small keeps embeddings, attention and head in BF16, as the policy does, so it shrinks less."
    columns = ["checkpoint", "format", "parameters", "size"]
    return Table("Checkpoints", columns, rows, note, frozenset({0, 1}))


def megabytes(size: int | None) -> str:
    return "\u2014" if size is None else f"{size / 1e6:,.1f} MB"


def error_table(data: dict[str, Any]) -> Table | None:
    """Quantization error by tensor class, as `inspect --against` measured it."""
    comparison = (data.get("quantized") or {}).get("comparison") or {}
    classes = comparison.get("classes") or {}
    if not classes:
        return None
    figures = list(dict.fromkeys(key for entry in classes.values() for key in entry))
    rows = [[name, *(figure(entry.get(key)) for key in figures)] for name, entry in classes.items()]
    return Table("Quantization error by tensor class", ["class", *(key.replace("_", " ") for key in figures)], rows)


def figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "\u2014" if value is None else str(value)


def loss_plot(data: dict[str, Any]) -> str:
    """Training and held-out loss over steps."""
    curve = data.get("training") or []
    series = {"training": thinned([(row["step"], row["loss"]) for row in curve if "loss" in row])}
    held = [(row["step"], row["held_out"]["loss"]) for row in curve if "held_out" in row]
    return report.line_plot(series | ({"held out": held} if held else {}), "step", "loss") if curve else ""


def accuracy_plot(data: dict[str, Any]) -> str:
    """Top-1 agreement with the target by draft step, on held-out samples where there are some, else in training."""
    curve = data.get("training") or []
    held = [(row["step"], row["held_out"]["accuracy"]) for row in curve if "held_out" in row]
    points = held or [(row["step"], row["accuracy"]) for row in curve if "accuracy" in row]
    if not points:
        return ""
    series = {
        f"draft step {k + 1}": thinned([(step, accuracy[k]) for step, accuracy in points if len(accuracy) > k])
        for k in range(len(points[-1][1]))
    }
    return report.line_plot(series, "step", "top-1 agreement" + (", held out" if held else ""))


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most SMOOTH points, each the mean of its neighbours."""
    size = max(1, -(-len(points) // SMOOTH))
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def acceptance_table(data: dict[str, Any]) -> Table | None:
    """Acceptance length by category, one column per measurement."""
    bench: dict[str, BenchResults] = data["bench"]
    if not bench:
        return None
    names = list(dict.fromkeys(name for found in bench.values() for name in found.categories))
    rows = []
    for label in [*names, "all"]:
        cells = [label]
        for found in bench.values():
            group = found if label == "all" else found.categories.get(label)
            cells.append(with_n(group) if group else "\u2014")
        rows.append(cells)
    rows.append(["per turn, all", *(tables.interval_sd(f.per_turn_mean, f.per_turn_sd) for f in bench.values())])
    work = next(iter(bench.values())).workload
    note = (
        f"Held-out prompts of kimi-nano ({work['dataset']}), {work['template']}, at most {work['max_tokens']} "
        "tokens, draft length 3. Acceptance length = 1 + accepted / steps, bonus token included, with a 95 % "
        "bootstrap interval over questions; n = answers. Per turn: mean and deviation of tokens per iteration, "
        "the prefill counted, as NVIDIA's cards have it."
    )
    return Table("Acceptance length by category", ["category", *(TITLES[name] for name in bench)], rows, note)


def with_n(group: AcceptanceSummary) -> str:
    return f"{tables.interval(group.acceptance_length, group.acceptance_length_interval)}, n {group.turns}"


def position_table(data: dict[str, Any]) -> Table | None:
    """Conditional and cumulative acceptance by draft position."""
    bench = {name: found for name, found in data["bench"].items() if found.cumulative}
    if not bench:
        return None
    depth = max(len(found.cumulative) for found in bench.values())
    rows = [
        [TITLES[name], kind, *map(number, shares), *([""] * (depth - len(shares)))]
        for name, found in bench.items()
        for kind, shares in (("of all steps", found.cumulative), ("once reached", found.conditional))
    ]
    columns = ["measurement", "accepted", *(f"position {k}" for k in range(1, depth + 1))]
    return Table("Acceptance by draft position", columns, rows, "", frozenset({0, 1}))


def speed_tables(data: dict[str, Any]) -> list[Table]:
    """Tokens/s without speculation and with Eagle3, with the ratio, greedy and sampled."""
    found = []
    for name in ("greedy", "sampled"):
        results = data["bench"].get(name)
        if not results or not results.interleaved:
            continue
        rows = []
        for level in results.interleaved:
            rates = level.tokens_per_s
            cells = [str(level.concurrency), number(tables.mean(rates["plain"]), 1)]
            ratio, mark = ratio_of(level, "eagle3", "plain")
            cells += [number(tables.mean(rates["eagle3"]), 1), spread(ratio) + mark]
            steady = level.metric.startswith("steady")
            rows.append([*cells, str(len(rates["plain"])), "steady" if steady else "whole round"])
        columns = ["concurrency", "none tokens/s", "Eagle3 tokens/s"]
        note = (
            f"Same engine, same prompts, computed in {computed_in(data)}, draft length 3. Rounds alternate between the "
            "two servers, one loaded at a time; ratio = median over rounds with its range. steady = while all slots "
            "were busy."
        )
        found.append(
            Table(
                f"Output tokens/s, {tables.condition(results)}",
                [*columns, "over none", "rounds", "measured"],
                rows,
                note,
            )
        )
    return found


def computed_in(data: dict[str, Any]) -> str:
    """The type of computation that the servers chose on this machine."""
    return str((data.get("honesty") or {}).get("dtype", "the machine's own type"))


def ratio_of(level: InterleavedLevel, of: str, over: str) -> tuple[PairRatio, str]:
    """The ratio, also where the results hold none because the output was degenerate, and the words that say so."""
    stored, ratio = level.pair(of, over), pair_ratio(of, over, level.tokens_per_s)
    degenerate = ratio.median is not None and stored is not None and stored.median is None
    return ratio, ", degenerate output" if degenerate else ""


def spread(ratio: PairRatio) -> str:
    if ratio.median is None:
        return "\u2014"
    return f"{ratio.median:.2f}x ({ratio.low:.2f} \u2013 {ratio.high:.2f})"


def honesty_table(data: dict[str, Any]) -> Table | None:
    """The figures without which a small model's speed-up means nothing, beside what is asked of them."""
    found = data.get("honesty")
    if not found:
        return None
    held = found.get("distinct_heldout")

    def over_held_out(key: str) -> float | None:
        return found[key] / held if held and found.get(key) is not None else None

    rows = [
        ["draft step over target step", number(found.get("draft_over_target"), 3), "0.05 or more",
         "a free drafter would flatter speculation; "
         f"{number(found.get('draft_step_ms'))} over {number(found.get('target_step_ms'))} ms"],
        ["verifying 4 tokens over 1", number(found.get("verify_over_target"), 2), "", "what one verification costs"],
        ["experts touched by 4 tokens over 1", number(found.get("experts_4_over_1"), 2), "2 or more",
         "consecutive tokens go to different experts, as in the large model"],
        ["distinct 4-grams, sampled over held-out text", number(over_held_out("distinct_sampled")), "0.8 or more",
         "temperature 1 writes nearly as freely as people do"],
        ["distinct 4-grams, greedy over held-out text", number(over_held_out("distinct_greedy")), "",
         "greedy output of a small model repeats itself, which helps every drafter: read greedy figures with this"],
        ["bits per byte on held-out text", number(found.get("heldout_bits_per_byte")), "",
         f"over {number(found.get('heldout_bytes'), 0)} bytes of answers that training never saw"],
    ]  # fmt: skip
    columns = ["figure", "measured", "asked", "why"]
    return Table("What the figures are worth", columns, rows, "", frozenset({0, 3}))


def findings(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Problems that the commands reported on the way, each with the link of the chain that reported it."""
    found = []
    for key in ("target", "quantized", "head"):
        found += [{**problem, "stage": f"inspect {key}"} for problem in (data.get(key) or {}).get("problems", [])]
    for name, results in data["bench"].items():
        found += [{**problem.to_dict(), "stage": f"bench {name}"} for problem in results.problems]
    return [problem for problem in found if problem["severity"] != "info"]
