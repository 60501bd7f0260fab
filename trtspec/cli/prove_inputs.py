"""What a proof is begun with, as its journal notes it: the options, the files that they name, and the engine. A proof
that went on with another head would mix the figures of two in one verdict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trtspec.bench.datasets import NANO
from trtspec.bench.prove import ProveSetup
from trtspec.bench.prove_redaction import without_secrets
from trtspec.report import file_sha256, package_versions

SMALL = 8 * 2**20  # bytes; up to this size a file is known by its hash, above by its size and the time of its change


def proof_header(setup: ProveSetup) -> dict[str, Any]:
    """The header of the journal. Secrets among the words for the servers are hashed; a checkpoint or data set that the
    hub names has no files of its own here, and is known by its name."""
    noted = asdict(replace(setup, serve_words=tuple(without_secrets(setup.serve_words))))
    named = {"target": setup.target, "head": setup.head, "dataset": data_file(setup.dataset)}
    files = {what: files_of(place) for what, place in named.items()}
    if options := files_of_words(setup.serve_words):
        files["options"] = options
    return {"proof": noted, "engine": engine_version(setup.backend), "files": files}


def engine_version(backend: str) -> str | None:
    """Of the engine that is installed here; the reference backend is trtspec itself."""
    from trtspec.trtllm.deployment import installed_version
    from trtspec.vllm import installed_vllm

    versions = {"trtllm": installed_version, "vllm": installed_vllm}
    return versions[backend]() if backend in versions else package_versions()["trtspec"]


def files_of(place: str) -> dict[str, str]:
    """By name, what tells each file at `place`, a file or the top of a directory, from another; {} of no path."""
    path = Path(place).expanduser()
    if not place or not path.exists():
        return {}
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: _mark(file) for file in found if file.is_file() and not file.name.startswith(".")}


def files_of_words(words: Sequence[str]) -> dict[str, str]:
    """The same of every file that words for the servers name, such as a chat template; by its place as given."""
    found = {}
    for word in words:
        place = word.partition("=")[2] if word.startswith("-") else word
        if os.path.isfile(os.path.expanduser(place)):  # Path's own methods raise for a long text
            found[place] = _mark(Path(place).expanduser())
    return found


def _mark(file: Path) -> str:
    try:
        about = file.stat()
        if about.st_size <= SMALL:
            return f"sha256 {file_sha256(file)[:16]}"
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return f"{about.st_size} bytes, changed at {about.st_mtime_ns} ns"


def data_file(name: str) -> str:
    """The local part of `FILE` or `NAME=FILE`; "" of a data set that is known by name."""
    if name == NANO:
        return ""
    return name if Path(name).expanduser().exists() else name.partition("=")[2]


def absolute(place: str) -> str:
    """A checkpoint's path as an absolute one, by which it is known in every output; a hub id as it is."""
    path = Path(place).expanduser()
    return os.path.abspath(path) if place and path.exists() else place


def absolute_data(name: str) -> str:
    """The same of a data set, which may also be `NAME=FILE`."""
    file = data_file(name)
    return name.removesuffix(file) + absolute(file) if file else name
