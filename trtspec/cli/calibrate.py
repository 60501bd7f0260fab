"""`trtspec calibrate`: its place is taken, its work is not built yet."""

from __future__ import annotations

from trtspec.errors import MissingDependency


def calibrate() -> None:
    """Measures activation scales for NVFP4, one decoder layer in memory at a time (not built yet)."""
    raise MissingDependency(
        "`trtspec calibrate` is not built yet in this version", "run `trtspec --help` for the commands that are"
    )
