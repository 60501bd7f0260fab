"""One progress bar on stderr with rate and ETA: for people; silent in pipes and with -q."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

Advance = Callable[..., None]
BLOCKS = "▁▂▃▄▅▆▇█"


@contextmanager
def progress_bar(title: str, total: float, unit: str = "") -> Iterator[Advance]:
    """Yields `advance(amount, note="")`; the note stands on a line of its own, so that both fit 80 columns.

    Shown on a terminal or with TRTSPEC_PROGRESS=1, never with TRTSPEC_QUIET.
    """
    wanted = sys.stderr.isatty() or os.environ.get("TRTSPEC_PROGRESS") == "1"
    if not wanted or os.environ.get("TRTSPEC_QUIET") == "1":
        yield lambda amount, note="": None
        return
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Noted(Progress):
        note = ""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            if self.note:
                yield Text(f"  {self.note}", no_wrap=True, overflow="ellipsis")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Noted(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task(title, total=total)

        def advance(amount: float, note: str = "") -> None:
            progress.note = note or progress.note
            progress.update(task, advance=amount)

        yield advance


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The course of `values` in at most `width` blocks, each the mean of its part, lowest to highest."""
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * part // count for part in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((mean - low) / span * len(BLOCKS)))] for mean in means)
