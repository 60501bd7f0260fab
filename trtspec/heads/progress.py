"""One progress bar on stderr with rate and ETA: for people; silent in pipes and with -q."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[..., None]


@contextmanager
def progress_bar(title: str, total: float, unit: str = "") -> Iterator[Advance]:
    """Yields `advance(amount, note="")`. Shown on a terminal or with TRTSPEC_PROGRESS=1, never with TRTSPEC_QUIET."""
    wanted = sys.stderr.isatty() or os.environ.get("TRTSPEC_PROGRESS") == "1"
    if not wanted or os.environ.get("TRTSPEC_QUIET") == "1":
        yield lambda amount, note="": None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(amount: float, note: str = "") -> None:
            progress.update(task, advance=amount)
            if note:
                progress.update(task, note=note)

        yield advance
