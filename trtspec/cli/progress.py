"""The progress bar of the commands that know how much there is to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str, unit: str | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """Yields `show(done, total)`, in bytes or in `unit`: a bar on stderr for a person; None in a pipe and with -q."""
    if not sys.stderr.isatty() or os.environ.get("TRTSPEC_QUIET") == "1":
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    amount = (rich.MofNCompleteColumn(), unit) if unit else (rich.DownloadColumn(), rich.TransferSpeedColumn())
    columns = (title, rich.BarColumn(), *amount, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
