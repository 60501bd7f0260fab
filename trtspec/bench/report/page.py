"""The report of bench, prove and the demo: one self-contained page without scripts, for a desktop, a phone, paper and
the dark.

A page is a sentence, at most three figures with their ranges, then sections: plots first, tables behind them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

import jinja2

from trtspec.errors import Problem
from trtspec.report import Table

# of a curve: 420 units wide, so that its text is as large as the page's on a phone and on paper
WIDTH, HEIGHT, BOTTOM, TOP, MARGIN = 420, 262, 38, 26, 44
COLORS = 6


@dataclass(frozen=True)
class Figure:
    """One figure at the top. `range` says how sure it is, such as "1.24 to 1.57"; empty where that is not known."""

    value: str
    range: str
    label: str


@dataclass(frozen=True)
class Bar:
    """`value` in words; `width`, and the ends of the interval where there is one, in percent of the longest."""

    color: int
    value: str
    width: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Plot:
    """The `svg` of `curve`, or `bars` by their label; one without either is not shown. `names`: of the colours."""

    caption: str
    names: Sequence[str] = ()
    svg: str = ""
    bars: Mapping[str, Sequence[Bar]] = field(default_factory=dict)


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
        plots = any(plot.svg or plot.bars for plot in self.plots)
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


# --- plots, in the colours of the page ---

Value = tuple[
    float, float | None, float | None
]  # value, and the ends of its interval where it has one


@dataclass(frozen=True)
class Point:
    """A point of a curve, named by `label`; `low` and `high` are the interval of `y`, where it has one."""

    x: float
    y: float
    label: str
    low: float | None
    high: float | None


def bars(series: Mapping[str, Mapping[str, Value]], baseline: float) -> dict[str, list[Bar]]:
    """Horizontal bars from `baseline` on by label, a colour for each name of `series`."""
    longest = max(
        (high or value for values in series.values() for value, _, high in values.values()),
        default=0.0,
    )

    def percent(value: float) -> float:
        return round(100 * max(0.0, value - baseline) / max(longest - baseline, 1e-9), 1)

    found: dict[str, list[Bar]] = {}
    for number, values in enumerate(series.values()):
        for label, (value, low, high) in values.items():
            interval = None if low is None or high is None else (percent(low), percent(high))
            found.setdefault(label, []).append(
                Bar(number % COLORS + 1, f"{value:,.2f}", percent(value), interval)
            )
    return found


def curve(series: Mapping[str, Sequence[Point]], xlabel: str, ylabel: str) -> str:
    """One line per name, with a dot at each point; "" without points."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    xs, ys = (
        _ticks([p.x for p in points]),
        _ticks([e for p in points for e in (p.y, p.low, p.high) if e is not None]),
    )
    found, top, bottom = list[str](), TOP, HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        share = (x - xs[0]) / (xs[-1] - xs[0]), (y - ys[0]) / (ys[-1] - ys[0])
        return MARGIN + share[0] * (WIDTH - MARGIN - 14), bottom - share[1] * (bottom - top)

    for tick in ys:
        level = at(xs[0], tick)[1]
        found.append(_line(MARGIN, level, WIDTH - 14, level, "var(--rule)"))
        found.append(_text(MARGIN - 5, level + 4, f"{tick:g}", "end"))
    found += [_text(at(tick, ys[0])[0], bottom + 15, f"{tick:g}", "middle") for tick in xs]
    found += [_text(MARGIN - 38, top - 12, ylabel), _text(WIDTH - 14, bottom + 31, xlabel, "end")]
    for number, line in enumerate(series.values()):
        color = f"var(--series-{number % COLORS + 1})"
        path = " ".join("{:.1f},{:.1f}".format(*at(point.x, point.y)) for point in line)
        found.append(
            f'<polyline points="{path}" fill="none" style="stroke:{color}" stroke-width="1.8"/>'
        )
        for point in line:
            x, y = at(point.x, point.y)
            if point.low is not None and point.high is not None:
                found.append(
                    _line(x, at(point.x, point.low)[1], x, at(point.x, point.high)[1], color)
                )
            found.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" style="fill:{color}"/>')
            found.append(
                _text(
                    min(x + 6, WIDTH - 12), y - 5, point.label, "start" if x < WIDTH - 60 else "end"
                )
            )
    return f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(found)}</svg>'


def _ticks(values: Sequence[float]) -> list[float]:
    """Three to six round numbers that hold all values, from 0 on if that is near."""
    low, high = min(values), max(values)
    low = 0.0 if 0 <= low < 0.6 * high else low
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(m * power for m in (1, 2, 5, 10) if span / (m * power) <= 5)
    first = math.floor(low / step)
    return [
        round(number * step, 10)
        for number in range(first, max(math.ceil(high / step), first + 1) + 1)
    ]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" style="stroke:{color}"/>'
