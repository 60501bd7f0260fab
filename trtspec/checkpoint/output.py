"""Checks, claims, resumes and finishes the output of every long command.

    directory = OutputDirectory(path, "quantize", names, size)
    # or OutputDirectory.beside(file, "calibrate")
    with directory.claim(header, output_options) as journal:
        ...                                    # shards that `journal.done` records are kept
        carry_files(source, path)              # the files beside the source's weights

The journal is the lock and says what is finished. A command writes config.json last: a directory
without it is no checkpoint to any loader.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec import machine
from trtspec.checkpoint.headers import HF_QUANT_NAME, INDEX_NAME
from trtspec.checkpoint.identity import recorded
from trtspec.checkpoint.writer import Journal, read_journal, refuse_changed
from trtspec.errors import TrtspecError, UsageError, listed
from trtspec.files import MOST_JSON, read_bytes, unreadable
from trtspec.foreign import PlainName, plain_name, plain_names, refuse_outside
from trtspec.report import (
    OutputOptions,
    refuse_existing,
    refuse_overwrite,
    remove_file,
    remove_folder,
    write_atomic,
    writing,
)

SPARE_BYTES = 64 << 20  # configs, tokenizer and headers
OWN_PREFIX = ".trtspec-"
TEMPORARY = (".partial", ".tmp")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
CONFIG_NAME = PlainName("config.json")
PROVENANCE_NAME = PlainName("provenance.json")
CARD_NAME = PlainName("README.md")
SINGLE_SHARD = PlainName("model.safetensors")
HEAD_FILES = (CONFIG_NAME, SINGLE_SHARD, PROVENANCE_NAME, CARD_NAME)
# Written beside the shards.
WRITTEN = (
    CONFIG_NAME,
    PlainName(HF_QUANT_NAME),
    PlainName(INDEX_NAME),
    CARD_NAME,
    PROVENANCE_NAME,
)


@dataclass(frozen=True)
class OutputDirectory:
    """The output of `command` in the directory `path`.

    `names`, `folders`: files and folders that the command will write. `size`: bytes of the weights
    among them. An output that is one `file` has a work directory beside it, which is `path`.
    """

    path: Path
    command: str
    names: frozenset[PlainName]
    size: int
    file: Path | None = None
    folders: frozenset[PlainName] = frozenset()

    @staticmethod
    def beside(file: Path, command: str, size: int = 0) -> OutputDirectory:
        """The work directory of a run that writes `file`."""
        path = file.with_name(f".{file.name}.{command}")
        return OutputDirectory(path, command, frozenset(), size, file)

    @property
    def journal(self) -> Path:
        return self.path / f"{OWN_PREFIX}{self.command}.jsonl"

    @contextmanager
    def claim(self, header: Mapping[str, Any], output_options: OutputOptions) -> Iterator[Journal]:
        """Yields the locked journal.

        Removes what a killed run left half-written and, for a new run, earlier weights. Raises
        UsageError if the directory contains foreign files, another run writes it or `header`
        differs from the earlier run's. Raises TrtspecError if it cannot be written, now or when its
        disk is full.
        """
        resumes = self.check(output_options)
        restart = output_options.restart
        with writing(self.path), Journal(self.journal, header, restart=restart) as journal:
            self._clear(resumes)
            yield journal

    def check(self, output_options: OutputOptions) -> bool:
        """Whether an earlier run would be resumed. Reads only, so a dry run does it too.

        Raises UsageError if the directory contains files that the command did not write. Raises
        TrtspecError if it cannot be written or has no room.
        """
        is_link = self.file is not None and self.path.is_symlink()
        if is_link or self.path.is_file():
            raise UsageError(f"{self.path} is a file or a link", "choose another `output`")
        begun = self.journal.exists()
        parent = machine.existing(self.path)
        if self.file is not None:
            refuse_existing(self.file, output_options.force or begun, "output")
        if not begun:
            self._refuse_foreign(output_options.force)
        if not os.access(parent, os.W_OK | os.X_OK):
            message = f"cannot write {self.path}: no permission in {parent}"
            raise TrtspecError(message, "choose another `output`")
        present = {path.name for path in self.path.glob("*.safetensors")}
        strays = sorted(present - self._ours())
        if strays:
            fault = "which a loader would take for part of the checkpoint"
            message = f"{self.path} also holds {listed(strays)}, {fault}"
            raise UsageError(message, "move it away, or choose another `output`")
        free = machine.free_disk(self.path)
        replaced = sum(path.lstat().st_size for path in self.path.rglob("*"))
        if free + replaced < self.size + SPARE_BYTES:
            message = f"{self.path} needs {self.size:,} bytes and its disk has {free:,} free"
            raise TrtspecError(message, "free space, or choose an `output` on another disk")
        return begun and not output_options.restart

    def finish(self) -> None:
        """Removes the journal, or the work directory, which only an unfinished run needs."""
        if self.file is None:
            self.journal.unlink(missing_ok=True)
        else:
            with suppress(OSError):  # the output is complete
                remove_folder(self.path.parent, PlainName(self.path.name))

    def refuse_other(self, header: Mapping[str, Any]) -> None:
        """Raises UsageError naming what differs between `header` and the journal's."""
        begun = read_journal(self.journal)[0]
        if begun is not None:
            refuse_changed(self.journal, begun, header)

    def _refuse_foreign(self, force: bool) -> None:
        """Raises UsageError for a foreign file, and without `force` for a finished output."""
        if not self.path.is_dir():
            return
        present = set()
        folders = set()
        for path in self.path.iterdir():
            name = path.name
            # A run that begins beside this one, or was killed, has temporary files.
            temporary = name.startswith(".") and name.endswith(TEMPORARY)
            if not temporary and not name.startswith(OWN_PREFIX):
                present.add(name)
                if path.is_dir():
                    folders.add(name)
        ours = self._ours() if self._provenance() else set()
        foreign = sorted(present - ours | folders - self.folders)
        if foreign:
            fault = f"which `trtspec {self.command}` did not write"
            message = f"{self.path} holds {listed(foreign)}, {fault}"
            raise UsageError(message, "choose another `output`, or move that away")
        if present:
            refuse_overwrite(self.path, force)

    def _ours(self) -> set[PlainName]:
        """The names that this run writes, and earlier runs by their journal and provenance.json."""
        if self.file is not None:
            return set()
        earlier = self._provenance()
        source = str(self.path / PROVENANCE_NAME)
        recorded_names = plain_names(read_journal(self.journal)[1], str(self.journal))
        recorded_names |= plain_names(earlier.get("shards", {}), source)
        recorded_names |= plain_names(earlier.get("carried", []), source)
        return {*self.names, *self.folders, *recorded_names}

    def _provenance(self) -> dict[str, Any]:
        """provenance.json of an earlier run. {} if it is absent."""
        record = recorded(self.path)
        return record if record.get("command") == self.command else {}

    def _clear(self, resumes: bool) -> None:
        """Removes half-written files of a killed run, and for a new run earlier output."""
        patterns = [f".{name}.*.tmp" for name in {*WRITTEN, *self.names}]
        leftovers: set[Path] = set()
        for pattern in (".*.partial", *patterns):
            leftovers.update(self.path.glob(pattern))
        for path in leftovers:
            if self.folders or not path.is_dir():
                remove_folder(self.path, PlainName(path.name))
        if resumes:
            return
        remove_file(self.path, CONFIG_NAME)  # first: without it the directory is no checkpoint
        for name in sorted(self._ours() - self.folders - {PROVENANCE_NAME}):
            remove_file(self.path, name)
        for name in self.folders:
            remove_folder(self.path, name)


def carried_names(source: Path, pattern: str = "*") -> list[PlainName]:
    """Names of tokenizer, template, remote code, generation config and licences.

    Weights and files that are written here are left out. Raises TrtspecError for a file as large as
    weights, a link that leaves the checkpoint and a name that cannot be printed.
    """
    not_carried = (*WEIGHT_SUFFIXES, ".index.json")
    paths = []
    for path in sorted(source.glob(pattern)):
        name = path.name
        left_out = name.startswith(".") or name in WRITTEN or name.endswith(not_carried)
        if path.is_file() and not left_out:
            paths.append(path)
    for path in paths:
        refuse_outside(path, source)
        size = path.stat().st_size
        if size > MOST_JSON:
            reason = f"it has {size:,} bytes, and no file beside weights is as large"
            raise unreadable(path, reason, "move it away")
    return [plain_name(path.name, str(source)) for path in paths]


def carry_files(source: Path, output: Path, names: Iterable[PlainName]) -> None:
    """Copies files of the checkpoint `source` byte for byte."""
    for name in names:
        refuse_outside(source / name, source)
        write_atomic(output / name, read_bytes(source / name))
