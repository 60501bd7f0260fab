"""What `bench` and `demo` found, as rows of text: the same rows stand on the terminal and in the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """A titled table; `note` says what the figures mean. The first column is text, the others are set to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: frozenset[int] = field(default=frozenset({0}))


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure, or an em dash where there is none."""
    return "\u2014" if value is None else f"{value:,.{digits}f}{unit}"


def interval(value: float | None, low_high: Sequence[float] | None, digits: int = 2) -> str:
    if value is None or not low_high:
        return number(value, digits)
    return f"{value:.{digits}f} [{low_high[0]:.{digits}f}, {low_high[1]:.{digits}f}]"


def milliseconds(spread: dict[str, float] | None, key: str) -> str:
    return number(1000 * spread[key], 1) if spread else "\u2014"


def acceptance_by_category(results: dict[str, Any]) -> Table:
    """Acceptance length with its interval, the per-turn mean, and N, per category and for all."""
    groups = {**results["categories"], "all": results}
    rows = [
        [
            name,
            str(group["questions"]),
            str(group["turns"]),
            number(group["steps"], 0),
            interval(group["acceptance_length"], group["acceptance_length_interval"]),
            interval_sd(group["per_turn_mean"], group["per_turn_sd"]),
            " / ".join(number(p) for p in group["cumulative"]) if group["cumulative"] else "\u2014",
        ]
        for name, group in groups.items()
    ]
    work = results["workload"]
    note = (
        f"{work['dataset']}, temperature {work['temperature']:g}, at most {work['max_tokens']} tokens, "
        f"{work['template']}; source: {results['source']}. Acceptance length = 1 + accepted / steps with a 95 % "
        "bootstrap interval over questions; per turn = mean and standard deviation of tokens per iteration."
    )
    columns = [
        "category",
        "questions",
        "turns",
        "steps",
        "acceptance length",
        "per turn",
        "accepted at position 1 / 2 / \u2026",
    ]
    return Table(f"Acceptance of {results['name']}", columns, rows, note)


def interval_sd(mean: float | None, deviation: float | None) -> str:
    return number(mean) if mean is None or deviation is None else f"{mean:.2f} \u00b1 {deviation:.2f}"


def throughput_table(results: dict[str, Any]) -> Table:
    """Speed per concurrency for the endpoint and the ones measured beside it."""
    rows = []
    for endpoint in [results, *results["endpoints"].values()]:
        for level in endpoint["concurrency"]:
            speed = level["throughput"]
            user = speed["tokens_per_s_per_user"]
            rows.append(
                [
                    endpoint["name"],
                    str(level["concurrency"]),
                    number(speed["tokens_per_s"], 1),
                    number(speed["steady_tokens_per_s"], 1),
                    number(user["p50"] if user else None, 1),
                    milliseconds(speed["ttft_s"], "p50"),
                    milliseconds(speed["ttft_s"], "p99"),
                    milliseconds(speed["inter_token_s"], "p50"),
                    number(level["acceptance_length"]),
                    f"{speed['requests']} / {speed['errors']}",
                ]
            )
    columns = [
        "endpoint",
        "concurrency",
        "tokens/s",
        "steady",
        "per user",
        "TTFT ms",
        "p99",
        "per token ms",
        "acceptance",
    ]
    note = (
        "steady = while every slot was busy (two conversations per slot or more); per user, TTFT, per token: medians."
    )
    return Table("Speed", [*columns, "requests / errors"], rows, note)


def ratio_table(results: dict[str, Any], over: str) -> Table | None:
    """Ratios over one endpoint of an interleaved run, median and range over rounds."""
    levels = results.get("interleaved") or []
    rows = [
        [
            pair["of"],
            str(level["concurrency"]),
            number(_mean(level["tokens_per_s"][over]), 1),
            number(_mean(level["tokens_per_s"][pair["of"]]), 1),
            number(pair["median"], 2, "x"),
            f"{number(pair['low'])} \u2013 {number(pair['high'])}",
            str(len(pair["per_round"])),
        ]
        for level in levels
        for pair in level["ratios"]
        if pair["over"] == over
    ]
    if not rows:
        return None
    note = (
        "Rounds alternate between endpoints, one loaded at a time, same questions in each; median and range of ratios."
    )
    columns = ["endpoint", "concurrency", f"{over} tokens/s", "its tokens/s", "ratio", "range", "rounds"]
    return Table(f"Speed over {over}", columns, rows, note)


def comparison_table(comparison: dict[str, Any]) -> Table:
    """`--compare`: new over old."""
    rows = [
        [f"acceptance, {name}", number(r["ratio"], 3), f"{r['low']:.3f} \u2013 {r['high']:.3f}"]
        for name, r in comparison["acceptance"].items()
    ]
    rows += [
        [f"tokens/s at concurrency {r['concurrency']}", number(r["ratio"], 3), f"{r['low']:.3f} \u2013 {r['high']:.3f}"]
        for r in comparison["speed"]
    ]
    note = (
        "Acceptance: per-turn means with a 95 % bootstrap interval; speed: extremes over rounds, two different moments."
    )
    return Table(f"This run over {comparison['old']['name']}", ["figure", "new / old", "spread"], rows, note)


def quality_line(results: dict[str, Any]) -> str:
    """One sentence on the output itself; printed wherever acceptance is."""
    d = results["degeneration"]
    verdict = "DEGENERATE OUTPUT, acceptance on it says little: " if d["degenerate"] else "output: "
    return (
        f"{verdict}{d['answers']} answers, {d['loop']} loops, {d['empty']} empty, {d['noise']} noise; "
        f"distinct 4-grams {number(d['distinct_4gram_ratio'])}"
    )


def print_tables(tables: Sequence[Table], lines: Sequence[str] = ()) -> None:
    """To stdout, as rich tables; plain text when stdout is not a terminal."""
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=160, no_color=True)
    for table in tables:
        drawn = RichTable(title=table.title, caption=table.note or None, title_justify="left", caption_justify="left")
        for index, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if index in table.text_columns else "right")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
    for line in lines:
        console.print(line, markup=False)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
