"""The JUnit file of a command: a run that fails before its verdict leaves its reason there, not the last run's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtspec.errors import Interrupted, TrtspecError


@contextmanager
def failure_in(junit: Path | None, command: str) -> Iterator[None]:
    """A run that fails before it has results leaves its reason in the JUnit file; one that is stopped did not fail."""
    try:
        yield
    except TrtspecError as error:
        if junit is not None and not isinstance(error, Interrupted):
            from trtspec import report
            from trtspec.bench.report import ci

            report.write_atomic(junit, ci.failed_xml(error, f"trtspec {command}"))
        raise


def is_failure(path: Path) -> bool:
    """Whether `path` is what a run without results left of --junit."""
    if not path.is_file():
        return False
    from trtspec.bench.report.ci import nothing_measured

    return nothing_measured(path)
