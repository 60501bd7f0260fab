"""The output of a long command: checked, claimed, resumed after a kill, finished. The same for all of them.

    directory = OutputDirectory(path, "quantize", names, size)     # or OutputDirectory.beside(file, "calibrate")
    with directory.claim(header, again) as journal:
        ...                                    # shards that `journal.done` records are kept
        carry_files(source, path)              # what the source has beside its weights

The journal is the lock and says what is finished. A command writes config.json last: a directory without it is no
checkpoint to any loader.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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
CONFIG_NAME, PROVENANCE_NAME = PlainName("config.json"), PlainName("provenance.json")
CARD_NAME, SINGLE_SHARD = PlainName("README.md"), PlainName("model.safetensors")
HEAD_FILES = (CONFIG_NAME, SINGLE_SHARD, PROVENANCE_NAME, CARD_NAME)
WRITTEN = (
    CONFIG_NAME,
    PlainName(HF_QUANT_NAME),
    PlainName(INDEX_NAME),
    CARD_NAME,
    PROVENANCE_NAME,
)  # beside the shards


@dataclass(frozen=True)
class OutputDirectory:
    """`names` are the files and `folders` the folders that `command` will write into `path`, `size` is the bytes of the
    weights among them. An output that is one `file` has a work directory beside it, which is `path`."""

    path: Path
    command: str
    names: frozenset[PlainName]
    size: int
    file: Path | None = None
    folders: frozenset[PlainName] = frozenset()

    @staticmethod
    def beside(file: Path, command: str, size: int = 0) -> OutputDirectory:
        """The work directory of a run that writes `file`."""
        return OutputDirectory(
            file.with_name(f".{file.name}.{command}"), command, frozenset(), size, file
        )

    @property
    def journal(self) -> Path:
        return self.path / f"{OWN_PREFIX}{self.command}.jsonl"

    @contextmanager
    def claim(self, header: dict[str, Any], again: OutputOptions) -> Iterator[Journal]:
        """The journal, locked. Removes what a killed run left half-written and, for a new run, earlier weights.

        Raises UsageError if the directory contains foreign files, another run writes it or `header` differs from the
        earlier run's; TrtspecError if it cannot be written, now or when its disk is full.
        """
        resumes = self.check(again)
        with (
            writing(self.path),
            Journal(self.journal, header, restart=again.restart) as journal,
        ):
            self._clear(resumes)
            yield journal

    def check(self, again: OutputOptions) -> bool:
        """Whether an earlier run would be resumed; reads only, so a dry run does it too.

        Raises UsageError if the directory contains files that the command did not write, TrtspecError if there is no
        room.
        """
        is_link = self.file is not None and self.path.is_symlink()
        if is_link or self.path.is_file():
            raise UsageError(f"{self.path} is a file or a link", "choose another `output`")
        begun, parent = self.journal.exists(), machine.existing(self.path)
        if self.file is not None:
            refuse_existing(self.file, again.force or begun, "output")
        if not begun:
            self._refuse_foreign(again.force)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise TrtspecError(
                f"cannot write {self.path}: no permission in {parent}", "choose another `output`"
            )
        present = {path.name for path in self.path.glob("*.safetensors")}
        if strays := sorted(present - self._ours()):
            raise UsageError(
                f"{self.path} also holds {listed(strays)}, which a loader would take for part of the checkpoint",
                "move it away, or choose another `output`",
            )
        free, replaced = (
            machine.free_disk(self.path),
            sum(path.lstat().st_size for path in self.path.rglob("*")),
        )
        if free + replaced < self.size + SPARE_BYTES:
            raise TrtspecError(
                f"{self.path} needs {self.size:,} bytes and its disk has {free:,} free",
                "free space, or choose an `output` on another disk",
            )
        return begun and not again.restart

    def finish(self) -> None:
        """Removes what only an unfinished run needs: the journal, or the work directory."""
        if self.file is None:
            self.journal.unlink(missing_ok=True)
        else:
            with suppress(OSError):  # the output is complete
                remove_folder(self.path.parent, PlainName(self.path.name))

    def refuse_other(self, header: dict[str, Any]) -> None:
        """Raises UsageError naming what differs between `header` and the journal's."""
        if (begun := read_journal(self.journal)[0]) is not None:
            refuse_changed(self.journal, begun, header)

    def _refuse_foreign(self, force: bool) -> None:
        """Raises UsageError for a file of others, and without `force` for what a finished run left."""
        if not self.path.is_dir():
            return
        present = self._present()
        ours = self._ours() if self._provenance() else set()
        folders = {path.name for path in self.path.iterdir() if path.is_dir()} - self.folders
        if foreign := sorted(present - ours | present & folders):
            raise UsageError(
                f"{self.path} holds {listed(foreign)}, which `trtspec {self.command}` did not write",
                "choose another `output`, or move that away",
            )
        if present:
            refuse_overwrite(self.path, force)

    def _present(self) -> set[str]:
        """The names in the directory but those of a run that begins beside this one, or was killed."""
        return {path.name for path in self.path.iterdir() if not _is_temporary(path.name)}

    def _ours(self) -> set[PlainName]:
        """The names that this run, and earlier ones by their journal and provenance.json, write."""
        if self.file is not None:
            return set()
        earlier, source = self._provenance(), f"{self.path / PROVENANCE_NAME}"
        recorded_names = plain_names(read_journal(self.journal)[1], f"{self.journal}")
        recorded_names |= plain_names(earlier.get("shards", {}), source)
        recorded_names |= plain_names(earlier.get("carried", []), source)
        return {*self.names, *self.folders, *recorded_names}

    def _provenance(self) -> dict[str, Any]:
        """provenance.json of an earlier run; empty if there is none."""
        record = recorded(self.path)
        return record if record.get("command") == self.command else {}

    def _clear(self, resumes: bool) -> None:
        """Removes what a killed run left half-written; for a new run also what an earlier one wrote."""
        patterns = (".*.partial", *(f".{name}.*.tmp" for name in {*WRITTEN, *self.names}))
        for path in {path for pattern in patterns for path in self.path.glob(pattern)}:
            if self.folders or not path.is_dir():
                remove_folder(self.path, PlainName(path.name))
        if resumes:
            return
        remove_file(self.path, CONFIG_NAME)  # first: without it the directory is no checkpoint
        for name in sorted(self._ours() - self.folders - {PROVENANCE_NAME}):
            remove_file(self.path, name)
        for name in self.folders:
            remove_folder(self.path, name)


def _is_temporary(name: str) -> bool:
    """Of a run that begins beside this one, or of one that was killed."""
    return name.startswith(".") and (name.startswith(OWN_PREFIX) or name.endswith(TEMPORARY))


def carried_names(source: Path, pattern: str = "*") -> list[PlainName]:
    """Tokenizer, template, remote code, generation config, licences: what is neither weights nor written here.

    Raises TrtspecError for a file as large as weights, a link that leaves the checkpoint and a name
    that cannot be printed.
    """
    paths = [
        path
        for path in sorted(source.glob(pattern))
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in WRITTEN
        and not path.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
    ]
    for path in paths:
        refuse_outside(path, source)
        if (size := path.stat().st_size) > MOST_JSON:
            reason = f"it has {size:,} bytes, and no file beside weights is as large"
            raise unreadable(path, reason, "move it away")
    return [plain_name(path.name, f"{source}") for path in paths]


def carry_files(source: Path, output: Path, names: Iterable[PlainName]) -> None:
    """Copies files of the checkpoint `source` byte for byte."""
    for name in names:
        refuse_outside(source / name, source)
        write_atomic(output / name, read_bytes(source / name))
