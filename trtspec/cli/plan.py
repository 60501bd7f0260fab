"""`trtspec plan`: its place is taken, its work is not built yet."""

from __future__ import annotations

from trtspec.errors import MissingDependency


def plan() -> None:
    """Says whether a target fits, how fast it will run, with which parallelism and draft length (not built yet)."""
    raise MissingDependency(
        "`trtspec plan` is not built yet in this version", "run `trtspec --help` for the commands that are"
    )
