"""Checks names that others wrote: file names, links, code references and hub ids.

These names come from a checkpoint, journal, provenance file, hub answer, server or data row. A
checked name has a type of its own. Functions that write, delete, copy or launch accept only that
type. `errors.printable` makes names safe to print.
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
PlainName = NewType("PlainName", str)  # one path component: a file directly in its directory


def plain_name(name: object, source: str) -> PlainName:
    """Returns `name` if it is one path component.

    Raises TrtspecError for a path, `.`, `..`, a control character or more than MAX_NAME_BYTES.
    `source`: file that contains the name, for the message.
    """
    if isinstance(name, str) and _is_plain(name):
        return PlainName(name)
    shown = ascii(name)[:80]
    message = f"{source} names the file {shown}, which is not a plain name inside its directory"
    raise TrtspecError(message, f"remove that name from {source}", "TS-NAME-NOT-PLAIN")


def plain_names(names: object, source: str) -> set[PlainName]:
    """Returns the names in a list, or the keys of a dict.

    Raises TrtspecError if one of them is not one path component. `source`: file that contains them.
    """
    if not isinstance(names, list | dict):
        names = [names]  # a plain text is checked too, and another type is refused with its value
    return {plain_name(name, source) for name in names}


def stays_inside(path: Path, directory: Path) -> bool:
    """Whether the file that `path` links to is in the directory.

    If the directory is a snapshot in the hub cache, the cache's blobs count as inside.
    """
    home = directory.resolve()
    target = path.resolve()
    is_blob = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    return is_blob or target.is_relative_to(home)


def refuse_outside(path: Path, directory: Path) -> None:
    """Raises TrtspecError if `path` links to a file outside its checkpoint `directory`.

    Only files that are copied into an output are checked. Weights may be links to any place.
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
    """Reference to a Python class in a configuration file. Only `code_reference` creates it.

    where: configuration file and key that contain the reference.
    module: name of the Python file with the class, in the directory of the configuration file.
    """

    where: str
    module: PlainName


def code_reference(value: object, where: str) -> CodeReference:
    """Parses a reference of the form `module.Class`.

    Raises TrtspecError for any other value. A class of another repository has the form
    `org/repo--module.Class` and an error of its own. `where`: file and key of the reference.
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
    """Yields the path and the value of every reference in every `auto_map` of a JSON value.

    where: path of `value`, which begins with the file's name.
    in_map: whether `value` is inside an `auto_map`.
    """
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            shown = ascii(key)[:80].strip("'")
            yield from named_code(item, f"{where}:{shown}", in_map or key == AUTO_MAP)
    elif in_map and value is not None:  # a null refers to no code
        yield where, value


def without_code(value: Any) -> Any:
    """Returns a parsed JSON value without its `auto_map` entries, at any depth."""
    if isinstance(value, dict):
        return {key: without_code(item) for key, item in value.items() if key != AUTO_MAP}
    if isinstance(value, list):
        return [without_code(item) for item in value]
    return value


HUB_PAGE = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/(?:models/)?([\w.-]+/[\w.-]+).*")


def user_path(text: str | Path) -> Path:
    """Returns the path that a user wrote, with `~` and `~name` replaced by home directories.

    A `~name` of an unknown user stays.
    """
    return Path(os.path.expanduser(text))  # Path.expanduser raises RuntimeError for such a name


def what_is(text: str) -> str:
    """Returns a noun for the type of a user's argument, such as "a URL" or "a checkpoint".

    Errors of commands that need another type contain the noun.
    """
    path = user_path(text)
    if HUB_PAGE.fullmatch(text):
        return "a page of the hub"
    if "://" in text:
        return "a URL"
    if path.is_dir():
        return "a checkpoint" if (path / "config.json").exists() else "a directory"
    if path.exists() and path.suffix in (".yml", ".yaml"):
        return "an engine YAML"
    if path.exists():
        return "a file"
    if (DATA / text / "config.json").is_file():
        return "a checkpoint"
    return "a hub id" if parse_hub_id(text) else "not there"


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# A commit, tag or branch. No part begins like an option or leads upwards.
REVISION = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
MAX_REVISION_CHARACTERS = 255


@dataclass(frozen=True)
class HubId:
    """Id of a repository on the Hugging Face hub.

    name: `org/name`.
    revision: commit, tag or branch. None for `main`.
    """

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        if self.revision is None:
            return self.name
        return f"{self.name}@{self.revision}"

    @property
    def download(self) -> str:
        """Command line that downloads the repository."""
        command = f"hf download {self.name}"
        if self.revision is not None:
            command += f" --revision {self.revision}"
        return command

    @property
    def folder(self) -> str:
        """Name of the repository's folder in a hub cache."""
        return f"models--{self.name.replace('/', '--')}"


def parse_hub_id(text: str) -> HubId | None:
    """Parses `org/name` or `org/name@revision`. None for any other text.

    Raises UsageError if the revision is not a valid name of a commit, tag or branch.
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
