"""Plots as small inline SVG that follows the page's light or dark colours. Needs matplotlib (the `report` extra).

Figures are drawn with placeholder colours, which are then replaced by CSS variables of the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDE = 6.0  # inches; on a phone such a plot is scrolled, not shrunk
INK, GRID = "#010101", "#020202"
SERIES = ("#030301", "#030302", "#030303", "#030304", "#030305", "#030306")
CSS = {INK: "currentColor", GRID: "var(--rule)"} | {color: f"var(--series-{i})" for i, color in enumerate(SERIES, 1)}


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
