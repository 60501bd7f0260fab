"""The boundary for foreign names: file names, links, code references and ids.

They come from a checkpoint, journal, provenance file, hub answer, server or data row. Each has a
type afterwards, and functions that write, delete, carry or launch take only that type. Text that is
printed passes `errors.printable`.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NewType

from trtspec.data_files import DATA
from trtspec.errors import TrtspecError, UsageError

MAX_NAME_BYTES = 255  # of a file name on Linux file systems
PlainName = NewType("PlainName", str)  # one component of a path: a file directly in its directory


def plain_name(name: object, source: str) -> PlainName:
    """The name of a file directly in a directory, as `source` states it.

    Raises TrtspecError for a path, `.`, `..`, a control character, and a name that no file system
    takes.
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


def stays_inside(path: Path, directory: Path) -> bool:
    """Whether a path, behind links, is in the directory.

    For a snapshot in the hub's cache, the cache's blobs count as inside.
    """
    home = directory.resolve()
    target = path.resolve()
    is_blob = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    return is_blob or target.is_relative_to(home)


def refuse_outside(path: Path, directory: Path) -> None:
    """Raises TrtspecError if a file to be carried into an output links out of its checkpoint.

    Weights are only read, and may be links anywhere.
    """
    if not stays_inside(path, directory):
        message = (
            f"{path} is a link to a file outside the checkpoint, and would be copied from there"
        )
        remedy = "put the file itself there, or remove the link"
        raise TrtspecError(message, remedy, "TS-NAME-OUTSIDE")


def _is_plain(name: str) -> bool:
    """Whether `name` is one printable path component that can be encoded."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        return False
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return False
    return len(name.encode()) <= MAX_NAME_BYTES


AUTO_MAP = "auto_map"  # transformers' key for references to code, at any depth of a file


@dataclass(frozen=True)
class CodeReference:
    """A Python class that a configuration file names, made by `code_reference` alone.

    `where` is that file and its key, `module` the file of the class in the same directory.
    """

    where: str
    module: PlainName


def code_reference(value: object, where: str) -> CodeReference:
    """Parses `module.Class`.

    Raises TrtspecError for a class of another repository, written `org/repo--module.Class`, and for
    any other value.
    """
    shown = ascii(value)[:80]
    text = ""
    if isinstance(value, str):
        text = value
    if "--" in text:
        message = f"{shown} is code of another repository, which no check of this one sees"
        raise TrtspecError(message, code="TS-CODE-REPOSITORY")
    module, _, name = text.partition(".")
    if not module or not name.isidentifier():
        message = f"{shown} is not a reference to code such as `module.Class`"
        raise TrtspecError(message, code="TS-CODE-REFERENCE")
    return CodeReference(where, plain_name(f"{module}.py", where))


def named_code(value: object, where: str, in_map: bool = False) -> Iterator[tuple[str, object]]:
    """Yields every reference in every `auto_map` of a parsed JSON file, with its path.

    A null refers to nothing.
    """
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            shown = ascii(key)[:80].strip("'")
            yield from named_code(item, f"{where}:{shown}", in_map or key == AUTO_MAP)
    elif in_map and value is not None:
        yield where, value


def without_code(value: Any) -> Any:
    """Returns a parsed JSON value without any `auto_map`."""
    if isinstance(value, dict):
        return {key: without_code(item) for key, item in value.items() if key != AUTO_MAP}
    if isinstance(value, list):
        return [without_code(item) for item in value]
    return value


HUB_PAGE = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/(?:models/)?([\w.-]+/[\w.-]+).*")


def user_path(text: str | Path) -> Path:
    """The path that a user wrote, with `~` and `~name` replaced as a shell does.

    The name of an unknown user stays.
    """
    return Path(os.path.expanduser(text))  # Path.expanduser raises RuntimeError for such a name


def what_is(text: str) -> str:
    """Names what a user's argument is, for the error of a command that needs something else."""
    path = user_path(text)
    if HUB_PAGE.fullmatch(text):
        return "a page of the hub"
    if "://" in text:
        return "a URL"
    if path.is_dir():
        return "a checkpoint" if (path / "config.json").exists() else "a directory"
    if path.exists():
        return "an engine YAML" if path.suffix in (".yml", ".yaml") else "a file"
    if (DATA / text / "config.json").is_file():
        return "a checkpoint"
    return "a hub id" if parse_hub_id(text) else "not there"


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# A commit, tag or branch. No part begins like an option or leads upwards.
REVISION = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
MAX_REVISION_CHARACTERS = 255


@dataclass(frozen=True)
class HubId:
    """A repository on the hub, `org/name`.

    `revision` is a commit, tag or branch. None is `main`.
    """

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        if self.revision is None:
            return self.name
        return f"{self.name}@{self.revision}"

    @property
    def download(self) -> str:
        """The command that fetches it."""
        command = f"hf download {self.name}"
        if self.revision is not None:
            command += f" --revision {self.revision}"
        return command

    @property
    def folder(self) -> str:
        """Its folder in a hub cache."""
        return f"models--{self.name.replace('/', '--')}"


def parse_hub_id(text: str) -> HubId | None:
    """The id that `org/name` or `org/name@revision` is. None for any other text.

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
