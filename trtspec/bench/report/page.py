"""Renders the reports of bench, prove and the demo as one self-contained HTML page.

The page has no scripts, and suits a desktop, a phone, paper and a dark theme. It contains a
sentence, at most three figures with their ranges, and sections with plots and tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jinja2

from trtspec.errors import Problem
from trtspec.report import Table


@dataclass(frozen=True)
class Page:
    """Contents of a report.

    sentence: result in one sentence
    figures: figures at the top
    sections: sections of the page. Empty sections are not shown
    subtitle: description of the workload, in small print
    verdict: verdict that colours the sentence, "" for none
    created: time of the measurement
    versions: versions of programs by name
    """

    title: str
    sentence: str
    figures: Sequence[Figure]
    sections: Sequence[Section]
    subtitle: str = ""
    verdict: Literal["pass", "fail", "unmeasured", ""] = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def html(self) -> str:
        """Returns the page as HTML."""
        loader = jinja2.PackageLoader("trtspec.bench", "report")
        environment = jinja2.Environment(
            loader=loader,
            # texts of servers and data sets may contain HTML
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        template = environment.get_template("report.html.j2")
        shown = [section for section in self.sections if not section.empty]
        return template.render(vars(self) | {"sections": shown})


@dataclass(frozen=True)
class Figure:
    """Figure at the top of a page.

    value: figure as text
    range: confidence interval as text, such as "1.24 to 1.57", "" if it is not known
    label: description of the figure
    """

    value: str
    range: str
    label: str


@dataclass(frozen=True)
class PlotBar:
    """Bar of a plot.

    color: number of the colour, from 1
    value: text at the end of the bar
    width: length of the bar in percent of the axis
    interval: ends of the confidence interval in percent of the axis, None without an interval
    """

    color: int
    value: str
    width: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Plot:
    """Plot of horizontal bars. A plot without bars is not shown.

    unit: unit of the axis
    names: legend, one name per colour
    bars: bars by label
    ticks: labels of the axis at equal distances, the first and last at its ends
    """

    caption: str
    unit: str = ""
    names: Sequence[str] = ()
    bars: Mapping[str, Sequence[PlotBar]] = field(default_factory=dict)
    ticks: Sequence[str] = ("", "")


@dataclass(frozen=True, kw_only=True)
class Section:
    """Section of a page: text, plots, tables, problems and `code`, in this order.

    code: text in a fixed-width font
    """

    title: str
    text: str = ""
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    problems: Sequence[Problem] = ()
    code: str = ""

    @property
    def empty(self) -> bool:
        """Whether the section has no content."""
        if any(plot.bars for plot in self.plots) or any(table.rows for table in self.tables):
            return False
        return not (self.text or self.problems or self.code)


# --- bars, in the colours of the page ---

COLORS = 6  # colours in report.html.j2, which repeat after the last
MAX_TICKS = 5
TICK_STEPS = (0.2, 0.5, 1.0, 2.0)  # possible distances of ticks, times a power of ten
# value with the ends of its confidence interval, which are None without an interval
Value = tuple[float, float | None, float | None]


def plot(
    caption: str, unit: str, series: Mapping[str, Mapping[str, Value]], baseline: float
) -> Plot:
    """Returns a plot of horizontal bars.

    Args:
        series: Values by name in the legend, and by label of the bar.
        baseline: Value at the beginning of the axis.
    """
    largest = baseline
    for values in series.values():
        ends = [high or value for value, _, high in values.values()]
        largest = max([largest, *ends])
    span = max(1e-9, largest - baseline)
    # ticks at multiples of 1, 2 or 5 times a power of ten, at most MAX_TICKS along the axis
    power = 10.0 ** math.floor(math.log10(span))
    tick = next(power * step for step in TICK_STEPS if span <= MAX_TICKS * power * step)
    count = math.ceil(span / tick)

    def percent(value: float) -> float:
        above = max(0.0, value - baseline)
        return round(100 * above / (count * tick), 1)

    bars: dict[str, list[PlotBar]] = {}
    for number, values in enumerate(series.values()):
        color = number % COLORS + 1
        for label, (value, low, high) in values.items():
            interval = None if low is None or high is None else (percent(low), percent(high))
            bar = PlotBar(color, f"{value:,.2f}", percent(value), interval)
            bars.setdefault(label, []).append(bar)
    ticks = [f"{baseline + index * tick:g}" for index in range(count + 1)]
    return Plot(caption, unit, list(series), bars, ticks)
