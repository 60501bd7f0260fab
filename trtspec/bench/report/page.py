"""The report of bench, prove and the demo: one self-contained page without scripts, for a desktop, a phone, paper and
the dark.

A page is a sentence, at most three figures with their ranges, then sections: plots first, tables behind them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jinja2

from trtspec.errors import Problem
from trtspec.report import Table

COLORS = 6
MAX_TICKS, TICK_SHARES = 5, (0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Figure:
    """One figure at the top. `range` says how sure it is, such as "1.24 to 1.57"; empty where that is not known."""

    value: str
    range: str
    label: str


@dataclass(frozen=True)
class Bar:
    """`value` in words; `width`, and the ends of the interval where there is one, in percent of the axis."""

    color: int
    value: str
    width: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Plot:
    """`bars` by their label; a plot without any is not shown. `names`: of the colours. `ticks`: words at equal
    distances from the beginning of the axis to its end, in `unit`."""

    caption: str
    unit: str = ""
    names: Sequence[str] = ()
    bars: Mapping[str, Sequence[Bar]] = field(default_factory=dict)
    ticks: Sequence[str] = ("", "")


@dataclass(frozen=True, kw_only=True)
class Section:
    """Shown in this order: text, plots, tables, problems, then `code` as it is."""

    title: str
    text: str = ""
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    problems: Sequence[Problem] = ()
    code: str = ""

    @property
    def empty(self) -> bool:
        plots = any(plot.bars for plot in self.plots)
        return not (
            self.text
            or plots
            or any(table.rows for table in self.tables)
            or self.problems
            or self.code
        )


def render(
    title: str,
    sentence: str,
    figures: Sequence[Figure],
    sections: Sequence[Section],
    *,
    about: str = "",
    verdict: Literal["pass", "fail", "unmeasured", ""] = "",
    created: str = "",
    versions: Mapping[str, str] | None = None,
) -> str:
    """The page. A section without content is left out: what was not measured is not shown.

    `sentence` says the result, `verdict` colours it; `about` says what was asked of what, in small print.
    """
    # everything is escaped unless the template marks it safe
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trtspec.bench", "report"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template("report.html.j2").render(
        title=title,
        sentence=sentence,
        figures=figures,
        sections=[section for section in sections if not section.empty],
        about=about,
        verdict=verdict,
        created=created,
        versions=versions or {},
    )


# --- bars, in the colours of the page ---

Value = tuple[
    float, float | None, float | None
]  # value, and the ends of its interval where it has one


def plot(
    caption: str, unit: str, series: Mapping[str, Mapping[str, Value]], baseline: float
) -> Plot:
    """Horizontal bars from `baseline` on by label, a colour for each name of `series`."""
    ends = [high or value for values in series.values() for value, _, high in values.values()]
    distance = max(1e-9, max(ends, default=baseline) - baseline)
    step = _tick_distance(distance)
    count = math.ceil(distance / step)

    def percent(value: float) -> float:
        return round(100 * max(0.0, value - baseline) / (count * step), 1)

    bars: dict[str, list[Bar]] = {}
    for number, values in enumerate(series.values()):
        for label, (value, low, high) in values.items():
            interval = None if low is None or high is None else (percent(low), percent(high))
            bars.setdefault(label, []).append(
                Bar(number % COLORS + 1, f"{value:,.2f}", percent(value), interval)
            )
    ticks = [f"{baseline + index * step:g}" for index in range(count + 1)]
    return Plot(caption, unit, list(series), bars, ticks)


def _tick_distance(length: float) -> float:
    """1, 2 or 5 times a power of ten, with at most MAX_TICKS of it along an axis."""
    power = 10.0 ** math.floor(math.log10(length))
    return next(power * share for share in TICK_SHARES if length <= MAX_TICKS * power * share)
