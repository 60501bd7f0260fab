"""What `bench` and `demo` found, as rows of text: the same rows stand on the terminal and in the HTML report."""

from __future__ import annotations

from collections.abc import Sequence

from trtspec.bench.acceptance import AcceptanceSummary, RatioSpread
from trtspec.bench.results import BenchResults, Comparison, EndpointResult, SpeedRatio
from trtspec.report import Table


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure, or an em dash where there is none."""
    return "\u2014" if value is None else f"{value:,.{digits}f}{unit}"


def interval(value: float | None, low_high: Sequence[float] | None, digits: int = 2) -> str:
    if value is None or not low_high:
        return number(value, digits)
    return f"{value:.{digits}f} [{low_high[0]:.{digits}f}, {low_high[1]:.{digits}f}]"


def milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1000 * seconds, 1)


def acceptance_by_category(results: BenchResults, endpoint: EndpointResult) -> Table:
    """Acceptance length with its interval, the per-turn mean, and N, per category and for all, of one endpoint."""
    groups: dict[str, AcceptanceSummary] = {**endpoint.categories, "all": endpoint}
    rows = [
        [
            name,
            str(group.questions),
            str(group.turns),
            number(group.steps, 0),
            interval(group.acceptance_length, group.acceptance_length_interval),
            interval_sd(group.per_turn_mean, group.per_turn_sd),
            " / ".join(number(p) for p in group.cumulative) if group.cumulative else "\u2014",
        ]
        for name, group in groups.items()
    ]
    work = results.workload
    note = (
        f"{work['dataset']}, {sampling_words(results)}, at most {work['max_tokens']} tokens, "
        f"{work['template']}; source: {endpoint.source}. Acceptance length = 1 + accepted / steps with a 95 % "
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
    return Table(f"Acceptance of {endpoint.name}", columns, rows, note)


def sampling_words(results: BenchResults) -> str:
    """The temperature and, above 0, how drafts were chosen: without that a sampled acceptance means little."""
    temperature = results.workload["temperature"]
    if not temperature:
        return "temperature 0"
    mode = results.server.draft_sampling
    return f"temperature {temperature:g} ({f'{mode} drafts' if mode else 'how drafts are chosen is not known'})"


def interval_sd(mean: float | None, deviation: float | None) -> str:
    return number(mean) if mean is None or deviation is None else f"{mean:.2f} \u00b1 {deviation:.2f}"


def throughput_table(results: BenchResults) -> Table:
    """Speed per concurrency for the endpoint and the ones measured beside it."""
    rows = []
    for endpoint in results.all:
        for level in endpoint.concurrency:
            speed = level.throughput
            user, first, gap = speed.tokens_per_s_per_user, speed.ttft_s, speed.inter_token_s
            rows.append(
                [
                    endpoint.name,
                    str(level.concurrency),
                    number(speed.tokens_per_s, 1),
                    number(speed.steady_tokens_per_s, 1),
                    number(user.p50 if user else None, 1),
                    milliseconds(first.p50 if first else None),
                    milliseconds(first.p99 if first else None),
                    milliseconds(gap.p50 if gap else None),
                    number(level.acceptance_length),
                    f"{speed.requests} / {speed.errors}",
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


def ratio_table(results: BenchResults, over: str) -> Table | None:
    """Ratios over one endpoint of an interleaved run, median and range over rounds."""
    rows = [
        [
            pair.of,
            str(level.concurrency),
            number(mean(level.tokens_per_s[over]), 1),
            number(mean(level.tokens_per_s[pair.of]), 1),
            number(pair.median, 2, "x"),
            f"{number(pair.low)} \u2013 {number(pair.high)}",
            str(len(pair.per_round)),
        ]
        for level in results.interleaved or []
        for pair in level.ratios
        if pair.over == over
    ]
    if not rows:
        return None
    note = (
        "Rounds alternate between endpoints, one loaded at a time, same questions in each; median and range of ratios."
    )
    columns = ["endpoint", "concurrency", f"{over} tokens/s", "its tokens/s", "ratio", "range", "rounds"]
    return Table(f"Speed over {over}", columns, rows, note)


def comparison_table(comparison: Comparison) -> Table:
    """`--compare`: new over old."""
    ratios: dict[str, RatioSpread | SpeedRatio] = {f"acceptance, {n}": r for n, r in comparison.acceptance.items()}
    ratios |= {f"tokens/s at concurrency {r.concurrency}": r for r in comparison.speed}
    rows = [[name, number(r.ratio, 3), f"{r.low:.3f} \u2013 {r.high:.3f}"] for name, r in ratios.items()]
    note = (
        "Acceptance: per-turn means with a 95 % bootstrap interval; speed: extremes over rounds, two different moments."
    )
    return Table(f"This run over {comparison.old['name']}", ["figure", "new / old", "spread"], rows, note)


def quality_line(endpoint: EndpointResult) -> str:
    """One sentence on the output itself; printed wherever acceptance is."""
    d = endpoint.degeneration
    verdict = "DEGENERATE OUTPUT, acceptance on it says little: " if d.degenerate else "output: "
    return (
        f"{verdict}{d.answers} answers, {d.loop} loops, {d.empty} empty, {d.noise} noise; "
        f"distinct 4-grams {number(d.distinct_4gram_ratio)}"
    )


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
