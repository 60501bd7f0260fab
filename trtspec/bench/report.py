"""The HTML report of `bench`: one self-contained file, inline CSS and SVG, no scripts, light and dark.

Plots are small and need matplotlib (the `report` extra). They are drawn with placeholder colours, which are then
replaced by CSS variables of the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import jinja2

from trtspec.bench import tables
from trtspec.bench.results import BenchResults, EndpointResult

WIDE = 6.0  # inches; on a phone such a plot is scrolled, not shrunk
INK, GRID = "#010101", "#020202"
SERIES = ("#030301", "#030302", "#030303", "#030304", "#030305", "#030306")
CSS = {INK: "currentColor", GRID: "var(--rule)"} | {color: f"var(--series-{i})" for i, color in enumerate(SERIES, 1)}


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
    drawn, endpoints = can_plot(), {endpoint.name: endpoint for endpoint in results.all}
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
            draft_table=tables.draft_table(results, results.draft_choice) if results.draft_choice else None,
            comparison_table=tables.comparison_table(results, results.comparison) if results.comparison else None,
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
        at = levels[level].label
        if tables.is_degenerate_at(results, at):
            found.append({"value": "\u2014", "label": f"tokens/s at {at}: not shown, the output was degenerate"})
            continue
        speed = tables.mean(tables.speed_of(results, results, levels[level]))
        found.append({"value": tables.number(speed, 1), "label": f"tokens/s at {at}"})
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


def category_plot(groups: Mapping[str, EndpointResult], degenerate: bool = False) -> str:
    """Acceptance length by category for several measurements; "" when none tells it. What was measured on degenerate
    output is left out as in the tables, unless `degenerate` asks for it."""
    series = []
    for color, (name, group) in enumerate(groups.items()):
        values = {
            label: (entry.acceptance_length, *(entry.acceptance_length_interval or (None, None)))
            for label, entry in tables.groups_of(group).items()
            if entry.acceptance_length is not None and (degenerate or not tables.is_degenerate(group, label))
        }
        if values and group.drafted != 0:
            series.append(PlotSeries(name, values, color))
    return bar_plot(series, "tokens per step", baseline=1.0) if series else ""


def position_plot(groups: Mapping[str, EndpointResult], degenerate: bool = False) -> str:
    """Cumulative acceptance by draft position; "" when no server gives a histogram. `degenerate` as above."""
    series = [
        PlotSeries(
            name, {f"position {k}": (share, None, None) for k, share in enumerate(group.cumulative, start=1)}, color
        )
        for color, (name, group) in enumerate(groups.items())
        if group.cumulative and group.drafted and (degenerate or not tables.is_degenerate(group, tables.ALL))
    ]
    return bar_plot(series, "share of steps") if series else ""


def speed_plot(results: BenchResults, endpoints: Sequence[EndpointResult], degenerate: bool = False) -> str:
    """Tokens/s by load, the figures of the tables; one colour per endpoint, and a bar's line spans its rounds; "" where
    none is left to show. `degenerate` as above."""
    series = []
    for color, endpoint in enumerate(endpoints):
        values: dict[str, tuple[float, float | None, float | None]] = {}
        for level in endpoint.concurrency:
            if tables.is_degenerate_at(endpoint, level.label) and not degenerate:
                continue
            rounds = tables.speed_of(results, endpoint, level)
            ends = (min(rounds), max(rounds)) if len(rounds) > 1 else (None, None)
            values[level.label] = (tables.mean(rounds) or 0.0, *ends)
        if values:
            series.append(PlotSeries(endpoint.name, values, color))
    return bar_plot(series, "output tokens/s", digits=0) if series else ""


@dataclass(frozen=True)
class PlotSeries:
    """One colour of a plot: label -> (value, low, high); low and high may be None."""

    name: str
    values: dict[str, tuple[float, float | None, float | None]]
    color: int = 0  # which of the page's series colours


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def bar_plot(series: Sequence[PlotSeries], ylabel: str, baseline: float = 0.0, digits: int = 2) -> str:
    """Bars per label, one colour per series, with intervals where known and the value above each bar."""
    labels = list(dict.fromkeys(label for entry in series for label in entry.values))
    width = 0.8 / max(1, len(series))
    figure, axes = _figure(max(4.6, min(9.2, 1.1 + 0.55 * len(labels) * max(1.2, 0.75 * len(series)))), 2.9)
    for index, entry in enumerate(series):
        shown = [(position, entry.values[label]) for position, label in enumerate(labels) if label in entry.values]
        xs = [position + (index - (len(series) - 1) / 2) * width for position, _ in shown]
        heights = [value - baseline for _, (value, _, _) in shown]
        axes.bar(xs, heights, width * 0.92, bottom=baseline, color=SERIES[entry.color % len(SERIES)], label=entry.name)
        for x, (_, (value, low, high)) in zip(xs, shown, strict=True):
            top = value if high is None else high
            if low is not None and high is not None:
                axes.plot([x, x], [low, high], color=INK, linewidth=1)
            axes.annotate(f"{value:.{digits}f}", (x, top), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=baseline)
    axes.margins(y=0.12)
    return _svg(figure, axes, len(series) > 1)


def line_plot(series: Mapping[str, Sequence[tuple[float, float]]], xlabel: str, ylabel: str) -> str:
    """One line per name from (x, y) points."""
    figure, axes = _figure(4.6, 2.7)
    for index, (name, points) in enumerate(series.items()):
        xs, ys = [point[0] for point in points], [point[1] for point in points]
        axes.plot(xs, ys, color=SERIES[index % len(SERIES)], linewidth=1.6, label=name)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return _svg(figure, axes, len(series) > 1)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8, length=0)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(INK)
    return figure, axes


def _svg(figure: Any, axes: Any, legend: bool) -> str:
    """The figure as an inline <svg>: text stays text, colours become variables, ids of groups are dropped."""
    import matplotlib

    axes.yaxis.label.set(color=INK, fontsize=8)
    axes.xaxis.label.set(color=INK, fontsize=8)
    for text in axes.texts:
        text.set_color(INK)
    if legend:
        figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=8, labelcolor=INK)
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "trtspec"}
    buffer = io.StringIO()
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?:figure|axes|patch|text|line2d|xtick|ytick|legend|matplotlib\.axis)_\d+"', "", text)
    text = re.sub(r"font: (\d[\d.]*)px [^;\"]*", r"font-size: \1px", text)
    for placeholder, variable in CSS.items():
        text = text.replace(placeholder, variable)
    return re.sub(r'<svg ([^>]*?)width="[^"]*" ([^>]*?)height="[^"]*"', r"<svg \1\2", text, count=1).replace(
        "<svg ", '<svg role="img" class="wide" ' if figure.get_figwidth() > WIDE else '<svg role="img" ', 1
    )
