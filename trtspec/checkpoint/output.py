"""Checks, claims, resumes and finishes the output of every long command.

    directory = OutputDirectory(path, "quantize", names, size)
    # or OutputDirectory.beside(file, "calibrate")
    with directory.claim(header, output_options) as journal:
        ...                                    # shards that `journal.done` records are kept
        carry_files(source, path)              # the files beside the source's weights

The journal is the lock and records the finished work. A command writes config.json last, because no
loader accepts a directory without it as a checkpoint.
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

SPARE_BYTES = 64 << 20  # room for configs, tokenizer and headers
OWN_PREFIX = ".trtspec-"  # of journals and work files
TEMPORARY = (".partial", ".tmp")  # suffixes of unfinished files
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
CONFIG_NAME = PlainName("config.json")
PROVENANCE_NAME = PlainName("provenance.json")
CARD_NAME = PlainName("README.md")
SINGLE_SHARD = PlainName("model.safetensors")
HEAD_FILES = (CONFIG_NAME, SINGLE_SHARD, PROVENANCE_NAME, CARD_NAME)
# files that commands write beside the shards
WRITTEN = (
    CONFIG_NAME,
    PlainName(HF_QUANT_NAME),
    PlainName(INDEX_NAME),
    CARD_NAME,
    PROVENANCE_NAME,
)


@dataclass(frozen=True)
class OutputDirectory:
    """Output of a command in a directory, or in a work directory if the output is one file.

    path: the directory.
    command: name of the command, which its journal has.
    names: names of the files that the command will write.
    size: bytes of the weights among these files.
    file: the output, if it is one file. Its work directory is `path`.
    folders: names of the folders that the command will write.
    """

    path: Path
    command: str
    names: frozenset[PlainName]
    size: int
    file: Path | None = None
    folders: frozenset[PlainName] = frozenset()

    @staticmethod
    def beside(file: Path, command: str, size: int = 0) -> OutputDirectory:
        """Returns the work directory, beside `file`, of a command whose only output is `file`."""
        path = file.with_name(f".{file.name}.{command}")
        return OutputDirectory(path, command, frozenset(), size, file)

    @property
    def journal(self) -> Path:
        """Path of the command's journal."""
        return self.path / f"{OWN_PREFIX}{self.command}.jsonl"

    @contextmanager
    def claim(self, header: Mapping[str, Any], output_options: OutputOptions) -> Iterator[Journal]:
        """Yields the journal, which is locked until the end of the `with` block.

        Removes half-written files of a killed process. A start that does not resume also removes
        earlier weights. Raises UsageError if the directory contains foreign files, if another
        process writes it, or if the earlier `header` differs. Raises TrtspecError if the directory
        cannot be written or the disk is full.
        """
        resumes = self.check(output_options)
        restart = output_options.restart
        with writing(self.path), Journal(self.journal, header, restart=restart) as journal:
            self._clear(resumes)
            yield journal

    def check(self, output_options: OutputOptions) -> bool:
        """Returns whether earlier work would be resumed. Only reads, so that a dry run can call it.

        Raises UsageError if the directory contains files that the command did not write, or a
        finished output that `force` does not allow to replace. Raises TrtspecError if the directory
        cannot be written or has not enough room.
        """
        is_link = self.file is not None and self.path.is_symlink()
        if is_link or self.path.is_file():
            raise UsageError(f"{self.path} is a file or a link", "choose another `output`")
        has_journal = self.journal.exists()
        parent = machine.existing(self.path)
        if self.file is not None:
            refuse_existing(self.file, output_options.force or has_journal, "output")
        if not has_journal:
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
        # Earlier output is overwritten, so its room counts as free.
        replaced = sum(path.lstat().st_size for path in self.path.rglob("*"))
        if free + replaced < self.size + SPARE_BYTES:
            message = f"{self.path} needs {self.size:,} bytes and its disk has {free:,} free"
            raise TrtspecError(message, "free space, or choose an `output` on another disk")
        return has_journal and not output_options.restart

    def finish(self) -> None:
        """Removes the journal or the work directory, which only unfinished work needs."""
        if self.file is None:
            self.journal.unlink(missing_ok=True)
        else:
            # The output is complete, so a work directory that stays is not an error.
            with suppress(OSError):
                remove_folder(self.path.parent, PlainName(self.path.name))

    def refuse_other(self, header: Mapping[str, Any]) -> None:
        """Raises UsageError, naming the differences, if the journal has another header."""
        earlier = read_journal(self.journal)[0]
        if earlier is not None:
            refuse_changed(self.journal, earlier, header)

    def _refuse_foreign(self, force: bool) -> None:
        """Raises UsageError if the directory holds a file that the command did not write.

        Also raises it if the directory holds a finished output and `force` is False.
        """
        if not self.path.is_dir():
            return
        present = set()
        folders = set()
        for path in self.path.iterdir():
            name = path.name
            # Another process that starts now, or was killed, leaves temporary files.
            temporary = name.startswith(".") and name.endswith(TEMPORARY)
            if not temporary and not name.startswith(OWN_PREFIX):
                present.add(name)
                if path.is_dir():
                    folders.add(name)
        # Without provenance.json of this command, no file counts as its own.
        ours = self._ours() if self._provenance() else set()
        foreign_files = present - ours
        foreign_folders = folders - self.folders
        foreign = sorted(foreign_files | foreign_folders)
        if foreign:
            fault = f"which `trtspec {self.command}` did not write"
            message = f"{self.path} holds {listed(foreign)}, {fault}"
            raise UsageError(message, "choose another `output`, or move that away")
        if present:
            refuse_overwrite(self.path, force)

    def _ours(self) -> set[PlainName]:
        """Returns the names of the files and folders that the command writes or wrote.

        Earlier names come from the journal and provenance.json.
        """
        if self.file is not None:
            return set()
        earlier = self._provenance()
        source = str(self.path / PROVENANCE_NAME)
        recorded_names = plain_names(read_journal(self.journal)[1], str(self.journal))
        recorded_names |= plain_names(earlier.get("shards", {}), source)
        recorded_names |= plain_names(earlier.get("carried", []), source)
        return {*self.names, *self.folders, *recorded_names}

    def _provenance(self) -> dict[str, Any]:
        """Returns provenance.json of earlier output of this command.

        {} if it is absent or another command wrote it.
        """
        record = recorded(self.path)
        return record if record.get("command") == self.command else {}

    def _clear(self, resumes: bool) -> None:
        """Removes half-written files, and earlier output if the work is not resumed.

        provenance.json stays.
        """
        patterns = [f".{name}.*.tmp" for name in {*WRITTEN, *self.names}]
        leftovers: set[Path] = set()
        for pattern in (".*.partial", *patterns):
            leftovers.update(self.path.glob(pattern))
        for path in leftovers:
            # Only a command that writes folders leaves unfinished folders.
            if self.folders or not path.is_dir():
                remove_folder(self.path, PlainName(path.name))
        if resumes:
            return
        # Removed first, so that no loader accepts a directory with some of the weights.
        remove_file(self.path, CONFIG_NAME)
        for name in sorted(self._ours() - self.folders - {PROVENANCE_NAME}):
            remove_file(self.path, name)
        for name in self.folders:
            remove_folder(self.path, name)


def carried_names(source: Path, pattern: str = "*") -> list[PlainName]:
    """Returns the names of a checkpoint's other files that match `pattern`.

    They are tokenizer, template, remote code, generation config and licences. Weights and files
    that commands write themselves are left out. Raises TrtspecError if a file is as large as
    weights, if a link leaves the checkpoint, or if a name cannot be printed.
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
    """Copies these files of the checkpoint `source` to `output`, byte for byte."""
    for name in names:
        refuse_outside(source / name, source)
        write_atomic(output / name, read_bytes(source / name))
