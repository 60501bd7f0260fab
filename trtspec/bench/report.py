"""The HTML report of `bench`: one self-contained file, inline CSS and SVG, no scripts, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

import jinja2

from trtspec.bench import plots, tables
from trtspec.bench.acceptance import AcceptanceSummary
from trtspec.bench.plots import PlotSeries
from trtspec.bench.results import BenchResults, EndpointResult


@cache
def environment() -> jinja2.Environment:
    """Templates of this package; everything is escaped unless marked safe."""

    def load(name: str) -> str:
        return (resources.files("trtspec.bench") / "templates" / name).read_text(encoding="utf-8")

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def bench_html(results: BenchResults, others: Sequence[BenchResults] = ()) -> str:
    """The report of one run; `others` are runs on other data sets, whose acceptance stands beside it."""
    ratios = [table for name in results.endpoints if (table := tables.ratio_table(results, name))]
    drawn, endpoints = plots.can_plot(), {endpoint.name: endpoint for endpoint in results.all}
    return (
        environment()
        .get_template("bench.html.j2")
        .render(
            title=f"{results.name}: {results.server.model} on {results.server.kind}",
            workload=tables.workload_line(results),
            keys=key_figures(results),
            quality=tables.quality_line(results),
            problems=results.problems,
            acceptance_tables=[tables.acceptance_by_category(results, e) for e in tables.speculating(results)],
            condition=tables.condition(results),
            card_tables=tables.card_tables(results, others),
            published_tables=tables.published_tables(results, others),
            speed_tables=[tables.throughput_table(results), *ratios],
            draft_table=tables.draft_table(results.draft_choice) if results.draft_choice else None,
            comparison_table=tables.comparison_table(results.comparison) if results.comparison else None,
            category_plot=category_plot(endpoints) if drawn else "",
            position_plot=position_plot(endpoints) if drawn else "",
            speed_plot=speed_plot(results, results.all) if drawn else "",
            plots=drawn,
            created=results.created,
            versions=results.versions,
        )
    )


def key_figures(results: BenchResults) -> list[dict[str, str]]:
    """The figures at the top: acceptance and speed at the lowest and the highest load; none of degenerate output."""
    found = [acceptance_key(results, "acceptance length")]
    levels = results.concurrency
    for level in dict.fromkeys((0, len(levels) - 1)):
        speed = tables.mean(tables.speed_of(results, results, levels[level]))
        found.append({"value": tables.number(speed, 1), "label": f"tokens/s at {levels[level].label}"})
    first = levels[0].throughput.ttft_s
    label = f"median ms to the first token at {levels[0].label}"
    return [*found, {"value": tables.milliseconds(first.p50 if first else None), "label": label}]


def acceptance_key(results: BenchResults, title: str) -> dict[str, str]:
    """Acceptance with its condition and N, or why there is none: on loops every draft is right."""
    quality, condition = results.degeneration, tables.condition(results)
    if quality.degenerate:
        bad = f"{quality.loop + quality.empty + quality.noise} of {quality.answers}"
        return {"value": "\u2014", "label": f"{title}, {condition}: not shown, {bad} answers loop, are empty or noise"}
    label = f"{title}, {condition}, over {results.turns} answers to {results.questions} questions"
    return {"value": tables.number(results.acceptance_length), "label": label}


def category_plot(groups: Mapping[str, EndpointResult]) -> str:
    """Acceptance length by category for several measurements; "" when none tells it."""
    series = []
    for color, (name, group) in enumerate(groups.items()):
        entries: dict[str, AcceptanceSummary] = {**group.categories, "all": group}
        values = {
            label: (entry.acceptance_length, *(entry.acceptance_length_interval or (None, None)))
            for label, entry in entries.items()
            if entry.acceptance_length is not None
        }
        if values and group.drafted != 0:
            series.append(PlotSeries(name, values, color))
    return plots.bar_plot(series, "tokens per step", baseline=1.0) if series else ""


def position_plot(groups: Mapping[str, EndpointResult]) -> str:
    """Cumulative acceptance by draft position; "" when no server gives a histogram."""
    series = [
        PlotSeries(
            name, {f"position {k}": (share, None, None) for k, share in enumerate(group.cumulative, start=1)}, color
        )
        for color, (name, group) in enumerate(groups.items())
        if group.cumulative and group.drafted
    ]
    return plots.bar_plot(series, "share of steps") if series else ""


def speed_plot(results: BenchResults, endpoints: Sequence[EndpointResult]) -> str:
    """Tokens/s by load, the figures of the tables; one colour per endpoint, and a bar's line spans its rounds."""
    series = []
    for color, endpoint in enumerate(endpoints):
        values: dict[str, tuple[float, float | None, float | None]] = {}
        for level in endpoint.concurrency:
            rounds = tables.speed_of(results, endpoint, level)
            ends = (min(rounds), max(rounds)) if len(rounds) > 1 else (None, None)
            values[level.label] = (tables.mean(rounds) or 0.0, *ends)
        series.append(PlotSeries(endpoint.name, values, color))
    return plots.bar_plot(series, "output tokens/s", digits=0)
