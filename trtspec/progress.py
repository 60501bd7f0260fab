"""The one progress bar, on stderr with rate and remaining time: for people; silent in pipes and with -q."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trtspec.report import say, wanted

if TYPE_CHECKING:
    from rich.progress import Progress

BLOCKS = "▁▂▃▄▅▆▇█"


class Bar:
    """What a running command reports to. This one shows nothing but the messages that are wanted without a bar."""

    def advance(self, amount: float, note: str = "") -> None:
        """`amount` more is done; the note has a line of its own, so that both fit 80 columns."""

    def show(self, done: float, total: float) -> None:
        """`done` of `total` is done."""

    def say(self, text: str) -> None:
        """A line above the bar."""
        say(text)


class _Drawn(Bar):
    def __init__(self, progress: Progress, title: str, total: float | None) -> None:
        self.progress = progress
        self.task = progress.add_task(title, total=total)

    def advance(self, amount: float, note: str = "") -> None:
        self.progress.note = note or self.progress.note  # type: ignore[attr-defined]
        self.progress.update(self.task, advance=amount)

    def show(self, done: float, total: float) -> None:
        self.progress.update(self.task, completed=done, total=total)

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)


@contextmanager
def progress_bar(title: str, total: float | None = None, unit: str = "") -> Iterator[Bar]:
    """A bar of `total` in `unit`, or in bytes without one, while the block runs. `total` None: `show` gives it."""
    if not wanted():
        yield Bar()
        return
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Noted(Progress):
        note = ""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            if self.note:
                yield Text(f"  {self.note}", no_wrap=True, overflow="ellipsis")

    amount = (MofNCompleteColumn(), TextColumn(unit)) if unit else (DownloadColumn(), TransferSpeedColumn())
    times = (TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), *amount, *times)
    with Noted(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        yield _Drawn(progress, title, total)


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The course of `values` in at most `width` blocks, each the mean of its part, lowest to highest."""
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * part // count for part in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((mean - low) / span * len(BLOCKS)))] for mean in means)
