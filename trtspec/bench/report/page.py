"""The report of bench, prove and the demo: one self-contained page without scripts, for a desktop, a phone, paper and
the dark.

A page is a sentence, at most three figures with their ranges, then sections: plots first, tables behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Literal

import jinja2

from trtspec.errors import Problem
from trtspec.report import Table

# of plots: all are 420 units wide, so that their text is as large as the page's on a phone and on paper
WIDTH, ROW, LEFT, RIGHT = 420, 19, 112, 46
COLORS = 6


@dataclass(frozen=True)
class Figure:
    """One figure at the top. `range` says how sure it is, such as "1.24 to 1.57"; empty where that is not known."""

    value: str
    range: str
    label: str


@dataclass(frozen=True)
class Plot:
    """`svg` of `bars`; an empty one is not shown."""

    svg: str
    caption: str


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
        plots = any(plot.svg for plot in self.plots)
        return not (self.text or plots or any(table.rows for table in self.tables) or self.problems or self.code)


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
    return _template().render(
        title=title,
        sentence=sentence,
        figures=figures,
        sections=[section for section in sections if not section.empty],
        about=about,
        verdict=verdict,
        created=created,
        versions=versions or {},
    )


@cache
def _template() -> jinja2.Template:
    """Everything is escaped unless the template marks it safe."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trtspec.bench", "report"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template("report.html.j2")


# --- plots as inline SVG, in the colours of the page ---

Value = tuple[float, float | None, float | None]  # value, and the ends of its interval where it has one


def bars(series: Mapping[str, Mapping[str, Value]], baseline: float = 0.0) -> str:
    """Horizontal bars from `baseline` on with the value behind each, a colour for each name of `series`, grouped by
    label; "" without values."""
    series = {name: values for name, values in series.items() if values}
    labels = list(dict.fromkeys(label for values in series.values() for label in values))
    if not labels:
        return ""
    top = max(max(value, high or value) for values in series.values() for value, _, high in values.values())
    scale = (WIDTH - LEFT - RIGHT) / max(top - baseline, 1e-9)
    found, y = _legend(list(series)) if len(series) > 1 else (list[str](), 2.0)
    for label in labels:
        rows = [(number, values[label]) for number, values in enumerate(series.values()) if label in values]
        found.append(_text(LEFT - 6, y + ROW * len(rows) / 2 + 4, _short(label), "end"))
        for number, (value, low, high) in rows:
            width = max(0.0, value - baseline) * scale
            fill = f'style="fill:var(--series-{number % COLORS + 1})"'
            found.append(f'<rect x="{LEFT}" y="{y + 3:.1f}" width="{width:.1f}" height="{ROW - 6}" {fill}/>')
            end = LEFT + width
            if low is not None and high is not None:
                ends = [LEFT + max(0.0, edge - baseline) * scale for edge in (low, high)]
                found.append(_line(ends[0], y + ROW / 2, ends[1], y + ROW / 2, "currentColor"))
                end = max(end, ends[1])
            found.append(_text(end + 5, y + ROW / 2 + 4, f"{value:,.2f}"))
            y += ROW
        y += 5
    return f'<svg role="img" viewBox="0 0 {WIDTH} {y:.0f}">{"".join(found)}</svg>'


def _legend(names: Sequence[str]) -> tuple[list[str], float]:
    """A line for each name that does not fit beside the one before; returns where the plot begins."""
    found, x, y = list[str](), 0.0, 2.0
    for number, name in enumerate(names):
        width = 26 + 6.2 * len(name)
        if x and x + width > WIDTH:
            x, y = 0.0, y + 16
        fill = f'style="fill:var(--series-{number % COLORS + 1})"'
        found += [f'<rect x="{x:.0f}" y="{y + 2:.0f}" width="10" height="10" {fill}/>', _text(x + 15, y + 11, name)]
        x += width
    return found, y + 22


def _short(label: str) -> str:
    return label if len(label) <= 18 else f"{label[:17]}\u2026"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" style="stroke:{color}"/>'
