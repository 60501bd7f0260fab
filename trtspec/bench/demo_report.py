"""The report of `trtspec demo`: the chain, what each link made, and the figures with what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtspec.bench.report import tables
from trtspec.bench.report.bench import category_bars, figures, sentence, speed_curve
from trtspec.bench.report.page import Plot, Section, render
from trtspec.bench.report.plots import Point, curve
from trtspec.bench.report.tables import number
from trtspec.bench.results import BenchResults, from_dict
from trtspec.bench.statistics import AcceptanceSummary
from trtspec.errors import Problem
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
    data = with_records(data)
    greedy, config = data["bench"].get("greedy"), data.get("config")
    chain = [[step["stage"], step["command"], f"{step['seconds']:.1f} s"] for step in data["steps"]]
    verdicts = [
        Table(entry["title"], [], [[r["status"], r["name"], r["message"]] for r in entry["verdict"]["results"]],
              "" if entry["gate"] else BASELINE, frozenset({0, 1, 2}))
        for entry in data["checks"]
    ]  # fmt: skip
    bars = Plot(category_bars(greedy.all), "Tokens per step by category.") if greedy else Plot("", "")
    return render(
        "trtspec demo: from BF16 weights to a speculating endpoint",
        sentence(greedy) if greedy else "The chain ran; nothing was measured.",
        figures(greedy) if greedy else [],
        [
            Section(title="Speed", plots=[Plot(speed_curve(greedy), "A dot for each load.")] if greedy else [],
                    tables=speed_tables(data)),
            Section(title="Acceptance", plots=[bars], tables=[acceptance_table(data), position_table(data)]),
            Section(title="Verdicts of check", tables=verdicts),
            Section(title="Training the head", plots=[Plot(loss_plot(data), "Loss over optimizer steps."),
                                                      Plot(accuracy_plot(data), "Top-1 agreement by draft step.")]),
            Section(title="Checkpoints", tables=[size_table(data), error_table(data)]),
            Section(title="What the figures are worth", tables=[honesty_table(data)]),
            Section(title="The chain", tables=[Table("The chain", ["stage", "command", "took"],
                                                     [[str(c) for c in row] for row in chain], "", frozenset({0, 1}))]),
            Section(title="Findings", problems=[Problem(**{k: v for k, v in p.items() if k != "stage"})
                                                for p in findings(data)]),
            Section(title="Engine YAML", code=config["yaml"] if config else ""),
        ],
        about="kimi-nano is Kimi-K2.5's architecture at a size that a CPU can run: its figures are not Kimi-K2.5's.",
        created=data["created"],
        versions=data["versions"],
    )  # fmt: skip


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
    rows = data.get("training") or []
    series = {"training": thinned([(row["step"], row["loss"]) for row in rows if "loss" in row])}
    held = [(row["step"], row["held_out"]["loss"]) for row in rows if "held_out" in row]
    return lines(series | ({"held out": held} if held else {}), "loss") if rows else ""


def accuracy_plot(data: dict[str, Any]) -> str:
    """Top-1 agreement with the target by draft step, on held-out samples where there are some, else in training."""
    rows = data.get("training") or []
    held = [(row["step"], row["held_out"]["accuracy"]) for row in rows if "held_out" in row]
    points = held or [(row["step"], row["accuracy"]) for row in rows if "accuracy" in row]
    if not points:
        return ""
    series = {
        f"draft step {k + 1}": thinned([(step, accuracy[k]) for step, accuracy in points if len(accuracy) > k])
        for k in range(len(points[-1][1]))
    }
    return lines(series, "top-1 agreement" + (", held out" if held else ""))


def lines(series: Mapping[str, Sequence[tuple[float, float]]], ylabel: str) -> str:
    return curve({name: [Point(*point) for point in points] for name, points in series.items()}, "step", ylabel)


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
    rows.append(["per turn, all", *(number(found.per_turn_mean) for found in bench.values())])
    work = next(iter(bench.values())).workload
    note = (
        f"Held-out prompts of kimi-nano ({work.dataset}), {work.template}, at most {work.max_tokens} "
        "tokens, draft length 3. Acceptance length = 1 + accepted / steps, bonus token included, with a 95 % "
        "interval over questions; n = answers. Per turn: mean of tokens per iteration, "
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
    """Tokens/s and speed-ups, greedy and sampled."""
    measured = [found for name in ("greedy", "sampled") if (found := data["bench"].get(name))]
    found = [table for results in measured for table in (tables.speedup_table(results), tables.speed_table(results))]
    return [table for table in found if table]


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
