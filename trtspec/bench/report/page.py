"""The report of bench, prove and the demo: one self-contained page without scripts, for a desktop, a phone, paper and
the dark.

A page is a sentence, at most three figures with their ranges, then sections: plots first, tables behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import jinja2

from trtspec.errors import Problem
from trtspec.report import Table


@dataclass(frozen=True)
class Figure:
    """One figure at the top. `range` says how sure it is, such as "1.24 to 1.57"."""

    value: str
    range: str
    label: str


@dataclass(frozen=True)
class Plot:
    """`svg` of plots.py; an empty one is not shown."""

    svg: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """Shown in this order: text, plots, tables, problems, then `code` as it is."""

    title: str
    text: str = ""
    plots: Sequence[Plot] = ()
    tables: Sequence[Table | None] = ()
    problems: Sequence[Problem] = ()
    code: str = ""

    @property
    def empty(self) -> bool:
        plots = any(plot.svg for plot in self.plots)
        return not (self.text or plots or any(t and t.rows for t in self.tables) or self.problems or self.code)


def render(
    title: str,
    sentence: str,
    figures: Sequence[Figure | None],
    sections: Sequence[Section],
    *,
    about: str = "",
    verdict: Literal["pass", "fail", "unmeasured", ""] = "",
    created: str = "",
    versions: Mapping[str, str] | None = None,
) -> str:
    """The page. A figure that is None and a section without content are left out: what was not measured is not shown.

    `sentence` says the result, `verdict` colours it; `about` says what was asked of what, in small print.
    """
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=title,
            sentence=sentence,
            figures=[figure for figure in figures if figure is not None][:3],
            sections=[section for section in sections if not section.empty],
            about=about,
            verdict=verdict,
            created=created,
            versions=versions or {},
        )
    )


@cache
def _environment() -> jinja2.Environment:
    """Everything is escaped unless the template marks it safe."""

    def load(name: str) -> str:
        return (resources.files("trtspec.bench.report") / name).read_text(encoding="utf-8")

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(load), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
