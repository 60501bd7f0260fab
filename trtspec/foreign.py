"""The boundary for what others wrote: file names, links, code references and ids of a checkpoint, journal,
provenance file, hub answer, server or data row.

Each has a type afterwards, and functions that write, delete, carry or launch take only that type. Text that is
printed passes `errors.printable`.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import NewType

from trtspec.errors import TrtspecError

MAX_NAME_BYTES = 255  # of a file name on Linux file systems
PlainName = NewType("PlainName", str)  # one component of a path: a file directly in its directory


def plain_name(name: object, source: str) -> PlainName:
    """The name of a file directly in a directory, as `source` states it.

    Raises TrtspecError for a path, `.`, `..`, a control character, and a name that no file system takes.
    """
    if isinstance(name, str) and _is_plain(name):
        return PlainName(name)
    shown = ascii(name)[:80]
    message = f"{source} names the file {shown}, which is not a plain name inside its directory"
    raise TrtspecError(message, f"remove that name from {source}", "TS-NAME-NOT-PLAIN")


def plain_names(names: object, source: str) -> set[PlainName]:
    """The names of a list, or of the keys of a mapping. Raises TrtspecError for anything else."""
    if not isinstance(names, list | dict):
        names = [names]
    return {plain_name(name, source) for name in names}


def refuse_outside(path: Path, directory: Path) -> None:
    """Raises TrtspecError if `path` is a link out of the checkpoint `directory`, but for the blobs of the hub's cache.

    For files that are carried into an output: weights are only read and may be links anywhere.
    """
    home, target = directory.resolve(), path.resolve()
    is_snapshot = home.parent.name == "snapshots"
    blobs = home.parent.parent / "blobs"
    if target.is_relative_to(home) or (is_snapshot and target.parent == blobs):
        return
    message = (
        f"{path} is a link to {target}, outside the checkpoint, and would be copied into the output"
    )
    raise TrtspecError(message, "put the file itself there, or remove the link", "TS-NAME-OUTSIDE")


def _is_plain(name: str) -> bool:
    """Whether `name` is one printable path component that can be encoded."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        return False
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return False
    return len(name.encode()) <= MAX_NAME_BYTES
