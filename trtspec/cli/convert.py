"""`trtspec convert`: its place is taken, its work is not built yet."""

from __future__ import annotations

from trtspec.errors import MissingDependency


def convert() -> None:
    """Rewrites an Eagle3 head from one dialect to another (not built yet)."""
    raise MissingDependency(
        "`trtspec convert` is not built yet in this version", "run `trtspec --help` for the commands that are"
    )
