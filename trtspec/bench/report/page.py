"""The report of bench, prove and the demo: one self-contained page without scripts.

It is read on a desktop, a phone, on paper and in the dark.

A page is a sentence, at most three figures with their ranges, then sections: plots first, tables
behind them.
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
    """A report. A section without content is left out: what was not measured is not shown.

    `sentence` says the result, and `verdict` colours it. `subtitle`: the workload, in small print.
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
        # everything is escaped unless the template marks it safe
        loader = jinja2.PackageLoader("trtspec.bench", "report")
        environment = jinja2.Environment(
            loader=loader,
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
    """One figure at the top.

    `range`: its interval, such as "1.24 to 1.57". "" if it is not known.
    """

    value: str
    range: str
    label: str


@dataclass(frozen=True)
class PlotBar:
    """A bar.

    `value`: in words. `width`, and the ends of the interval if it has one: in percent of the axis.
    """

    color: int
    value: str
    width: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Plot:
    """Horizontal bars. A plot without bars is not shown.

    `names`: of the colours. `bars`: by label. `ticks`: words at equal distances from the beginning
    of the axis to its end, in `unit`.
    """

    caption: str
    unit: str = ""
    names: Sequence[str] = ()
    bars: Mapping[str, Sequence[PlotBar]] = field(default_factory=dict)
    ticks: Sequence[str] = ("", "")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section shows text, plots, tables, problems, then `code` as it is."""

    title: str
    text: str = ""
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    problems: Sequence[Problem] = ()
    code: str = ""

    @property
    def empty(self) -> bool:
        if any(plot.bars for plot in self.plots) or any(table.rows for table in self.tables):
            return False
        return not (self.text or self.problems or self.code)


# --- bars, in the colours of the page ---

COLORS = 6
MAX_TICKS = 5
TICK_SHARES = (0.2, 0.5, 1.0, 2.0)  # of a power of ten
# value, and the ends of its interval if it has one
Value = tuple[float, float | None, float | None]


def plot(
    caption: str, unit: str, series: Mapping[str, Mapping[str, Value]], baseline: float
) -> Plot:
    """Returns horizontal bars from `baseline` on.

    `series`: values by the name of their colour and by label.
    """
    end = baseline
    for values in series.values():
        ends = [high or value for value, _, high in values.values()]
        end = max([end, *ends])
    distance = max(1e-9, end - baseline)
    # 1, 2 or 5 times a power of ten, at most MAX_TICKS times along the axis
    power = 10.0 ** math.floor(math.log10(distance))
    step = next(power * share for share in TICK_SHARES if distance <= MAX_TICKS * power * share)
    count = math.ceil(distance / step)

    def percent(value: float) -> float:
        above = max(0.0, value - baseline)
        return round(100 * above / (count * step), 1)

    bars: dict[str, list[PlotBar]] = {}
    for number, values in enumerate(series.values()):
        color = number % COLORS + 1
        for label, (value, low, high) in values.items():
            interval = None if low is None or high is None else (percent(low), percent(high))
            bar = PlotBar(color, f"{value:,.2f}", percent(value), interval)
            bars.setdefault(label, []).append(bar)
    ticks = [f"{baseline + index * step:g}" for index in range(count + 1)]
    return Plot(caption, unit, list(series), bars, ticks)
