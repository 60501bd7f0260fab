"""The boundary for what others wrote: file names, links, code references and ids of a checkpoint, journal,
provenance file, hub answer, server or data row.

Each has a type afterwards, and functions that write, delete, carry or launch take only that type. Text that is
printed passes `errors.printable`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import NewType

from trtspec.errors import TrtspecError, UsageError

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


def _is_plain(name: str) -> bool:
    """Whether `name` is one printable path component that can be encoded."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        return False
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return False
    return len(name.encode()) <= MAX_NAME_BYTES


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# A commit, tag or branch. No part begins like an option or leads upwards.
REVISION = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
MAX_REVISION_CHARACTERS = 255


@dataclass(frozen=True)
class HubId:
    """A repository on the hub, `org/name`. `revision` is a commit, tag or branch of it; None is `main`."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def download(self) -> str:
        """The command that fetches it."""
        command = f"hf download {self.name}"
        return command if self.revision is None else f"{command} --revision {self.revision}"

    @property
    def folder(self) -> str:
        """Its folder in a hub cache."""
        return f"models--{self.name.replace('/', '--')}"


def parse_hub_id(text: str) -> HubId | None:
    """The id that `org/name` or `org/name@revision` is; None for any other text.

    Raises UsageError if no hub has such a revision.
    """
    name, at, revision = text.partition("@")
    if not HUB_NAME.fullmatch(name):
        return None
    if not at:
        return HubId(name)
    if len(revision) > MAX_REVISION_CHARACTERS or not REVISION.fullmatch(revision):
        message = f"{ascii(revision)[:80]} is not a commit, tag or branch of {name}"
        raise UsageError(message, f"write {name}@COMMIT")
    return HubId(name, revision)
