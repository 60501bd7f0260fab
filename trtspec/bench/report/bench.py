"""The report of `bench`: its sentence, its figures and its sections, for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from trtspec.bench.report import tables
from trtspec.bench.report.page import Figure, Plot, Section, render
from trtspec.bench.report.plots import Bars, Point, bars, curve
from trtspec.bench.results import BenchResults, EndpointResult, user_speed
from trtspec.report import Table


def subject(results: BenchResults) -> EndpointResult:
    """The endpoint that the sentence is about: the first that speculates, else the first."""
    return next((endpoint for endpoint in results.all if endpoint.speculates), results)


def sentence(results: BenchResults) -> str:
    """The result in one sentence: speed-up or speed with its range, acceptance, on what."""
    about, first = subject(results), results.concurrency[0].label
    best = next((found for found in tables.shown_speedups(results) if found.of == about.name), None)
    speed, parts = user_speed(about, first), list[str]()
    if best:
        parts.append(f"{best.ratio:.2f} times as fast as {best.over} ({best.words}) at {best.level}")
    elif speed:
        parts.append(f"{speed.value:,.1f} tokens/s for a user ({speed.low:,.1f} to {speed.high:,.1f}) at {first}")
    if about.degenerate():
        parts.append("no figure of acceptance, because the output is degenerate")
    elif about.speculates:
        ends = about.acceptance_length_interval
        sure = f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""
        parts.append(f"{tables.number(about.acceptance_length)} tokens per step{sure}")
    what = f"on {max(results.workload.questions)} questions of {results.workload.dataset}"
    return f"{about.name}: {', '.join(parts) or 'nothing was measured'}, {what}, {tables.condition(results)}."


def figures(results: BenchResults) -> list[Figure | None]:
    """For the top, each with its range: speed-up, acceptance, speed of a user, time to the first token."""
    about, at = subject(results), results.concurrency[0].label
    level = about.at(at)
    user, wait = user_speed(about, at), level.throughput.ttft_s if level else None
    found = next((found for found in tables.shown_speedups(results) if found.of == about.name), None)
    ends, length = about.acceptance_length_interval, about.acceptance_length
    return [
        Figure(f"{found.ratio:.2f}x", found.words, f"as fast as {found.over}, {found.level}") if found else None,
        Figure(f"{length:.2f}", f"{ends[0]:.2f} to {ends[1]:.2f}", "tokens per verification step")
        if length and ends and not about.degenerate()
        else None,
        Figure(f"{user.value:,.1f}", f"{user.low:,.1f} to {user.high:,.1f}", f"tokens/s for a user, {at}")
        if user
        else None,
        Figure(f"{1000 * wait.p50:,.0f} ms", f"p99 {1000 * wait.p99:,.0f} ms", f"to the first token, {at}")
        if wait
        else None,
    ]


def sections(results: BenchResults) -> list[Section]:
    speculating = [endpoint for endpoint in results.all if endpoint.speculates]
    condition = tables.condition(results)
    comparison, choice = results.comparison, results.draft_choice
    return [
        Section(
            title="Speed",
            plots=[
                Plot(speed_curve(results), f"Each dot is a load, {condition}; lines at the dots are 95 % intervals.")
            ],
            tables=[tables.speedup_table(results), tables.speed_table(results), tables.latency_table(results)],
        ),
        Section(
            title="Acceptance",
            text=tables.quality_line(results),
            plots=[
                Plot(category_bars(speculating), f"Tokens per step by category, {condition}, with 95 % intervals."),
                Plot(
                    position_bars(speculating), "Share of verification steps that accepted the draft at each position."
                ),
            ],
            tables=[
                *(tables.acceptance_table(results, endpoint) for endpoint in speculating),
                tables.position_table(results, speculating),
                tables.side_by_side_table(results, speculating),
            ],
        ),
        Section(title="Draft length", tables=[tables.draft_table(results, choice) if choice else None]),
        Section(title="Comparison", tables=[tables.comparison_table(results, comparison) if comparison else None]),
        Section(title="Findings", problems=results.problems),
    ]


def all_tables(results: BenchResults) -> list[Table]:
    """Those of the sections, for the terminal."""
    return [table for section in sections(results) for table in section.tables if table and table.rows]


def bench_html(results: BenchResults) -> str:
    return render(
        f"trtspec bench: {results.server.model} on {results.server.kind}",
        sentence(results),
        figures(results),
        sections(results),
        about=tables.workload_line(results),
        created=results.created,
        versions=results.versions,
    )


def speed_curve(results: BenchResults) -> str:
    """Tokens per second of a user over those of all users together, a dot for each load; "" for one load."""
    found = {}
    for endpoint in results.all:
        points = [
            Point(level.throughput.tokens_per_s, user.value, level.load, user.low, user.high)
            for level in endpoint.concurrency
            if level.throughput.tokens_per_s and (user := user_speed(endpoint, level.label))
        ]
        if points:
            found[endpoint.name] = points
    return (
        curve(found, "output tokens/s, all users", "tokens/s for a user")
        if any(len(p) > 1 for p in found.values())
        else ""
    )


def category_bars(endpoints: Sequence[EndpointResult]) -> str:
    series = [
        Bars(endpoint.name, {
            name: (group.acceptance_length, *(group.acceptance_length_interval or (None, None)))
            for name, group in endpoint.groups.items()
            if group.acceptance_length is not None and not endpoint.degenerate(name)
        })
        for endpoint in endpoints
    ]  # fmt: skip
    return bars([one for one in series if one.values], baseline=1.0)


def position_bars(endpoints: Sequence[EndpointResult]) -> str:
    return bars([
        Bars(endpoint.name, {f"position {k}": (share, None, None) for k, share in enumerate(endpoint.cumulative, 1)})
        for endpoint in endpoints
        if endpoint.cumulative and not endpoint.degenerate()
    ])  # fmt: skip
