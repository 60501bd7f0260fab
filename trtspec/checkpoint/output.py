"""The output of a long command: checked, claimed, resumed after a kill, finished. The same for all of them.

    directory = OutputDirectory(path, "quantize", names, size)     # or OutputDirectory.beside(file, "calibrate")
    with directory.claim(header, again) as journal:
        ...                                    # shards that `journal.done` records are kept
        carry_files(source, path)              # what the source has beside its weights

The journal is the lock and says what is finished. A command writes config.json last: a directory without it is no
checkpoint to any loader.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec import machine
from trtspec.checkpoint.headers import HF_QUANT_NAME, INDEX_NAME
from trtspec.checkpoint.identity import recorded
from trtspec.checkpoint.writer import Journal, read_journal, refuse_changed
from trtspec.errors import TrtspecError, UsageError
from trtspec.files import MOST_JSON, read_bytes, unreadable
from trtspec.report import OutputOptions, refuse_overwrite, write_atomic

SPARE_BYTES = 64 << 20  # configs, tokenizer and headers
OWN_PREFIX = ".trtspec-"
TEMPORARY = (".partial", ".tmp")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
HEAD_FILES = ("config.json", "model.safetensors", "provenance.json", "README.md")
WRITTEN = (
    "config.json",
    HF_QUANT_NAME,
    INDEX_NAME,
    "README.md",
    "provenance.json",
)  # beside the shards
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
MOST_NAMES = 5  # of files that a message lists


@dataclass(frozen=True)
class OutputDirectory:
    """`names` are the files and folders that `command` will write into `path`, `size` is the bytes of the weights among
    them. An output that is one `file` has a work directory beside it, which is `path`."""

    path: Path
    command: str
    names: frozenset[str]
    size: int
    file: Path | None = None

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
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f"{OWN_PREFIX}{os.getpid()}.partial"
            probe.touch()
            probe.unlink(missing_ok=True)  # another run that begins there may have tidied up
        except OSError as error:
            raise TrtspecError(
                f"cannot write {self.path}: {error.strerror}", "choose another `output`"
            ) from None
        resumes = self.check(again)
        try:
            with Journal(self.journal, header, restart=again.restart) as journal:
                self._clear(resumes)
                yield journal
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            remedy = "free space on that disk, then run the command again: finished shards are kept"
            raise TrtspecError(f"cannot write {self.path}: {error.strerror}", remedy) from error

    def check(self, again: OutputOptions) -> bool:
        """Whether an earlier run would be resumed; reads only, so a dry run does it too.

        Raises UsageError if the directory contains files that the command did not write, TrtspecError if there is no
        room.
        """
        begun, parent = self.journal.exists(), machine.existing(self.path)
        if self.file is not None and self.file.is_dir():
            raise UsageError(
                f"{self.file} is a directory",
                f"pass a file name, for example {self.file / 'output'}",
            )
        if not begun and self.file is not None:
            refuse_overwrite(self.file, again.force)
        elif not begun:
            self._refuse_foreign(again.force)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise TrtspecError(
                f"cannot write {self.path}: no permission in {parent}", "choose another `output`"
            )
        present = {path.name for path in self.path.glob("*.safetensors")}
        if strays := sorted(present - self._ours()):
            raise UsageError(
                f"{self.path} also holds {_listed(strays)}, which a loader would take for part of the checkpoint",
                "move it away, or choose another `output`",
            )
        free, replaced = (
            machine.free_disk(self.path),
            sum(path.stat().st_size for path in self.path.rglob("*")),
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
            shutil.rmtree(self.path, ignore_errors=True)

    def refuse_other(self, header: dict[str, Any]) -> None:
        """Raises UsageError naming what differs between `header` and the journal's."""
        if (begun := read_journal(self.journal)[0]) is not None:
            refuse_changed(self.journal, begun, header)

    def _refuse_foreign(self, force: bool) -> None:
        """Without a journal the directory must be empty, or `force` given for what a finished run left."""
        if not self.path.is_dir():
            refuse_overwrite(self.path, force)
            return
        present = [path.name for path in self.path.iterdir() if not _is_temporary(path.name)]
        if present and not force:
            raise UsageError(
                f"{self.path} already exists and would be overwritten",
                "pass `force`, or choose another `output`",
            )
        if foreign := sorted(set(present) - (self._ours() if self._provenance() else set())):
            raise UsageError(
                f"{self.path} holds {_listed(foreign)}, which `trtspec {self.command}` did not write",
                f"move that away, or choose another `output`; `force` replaces only what {self.command} wrote",
            )

    def _ours(self) -> set[str]:
        """The names that this run, and earlier ones by their journal and provenance.json, write."""
        earlier = self._provenance()
        return {
            *self.names,
            *read_journal(self.journal)[1],
            *earlier.get("shards", ()),
            *earlier.get("carried", ()),
        }

    def _provenance(self) -> dict[str, Any]:
        """provenance.json of an earlier run; empty where there is none."""
        found = recorded(self.path)
        return found if found.get("command") == self.command else {}

    def _clear(self, resumes: bool) -> None:
        patterns = (".*.partial", *(f".{name}.*.tmp" for name in {*WRITTEN, *self.names}))
        stale = [path for pattern in patterns for path in self.path.glob(pattern)]
        if (
            not resumes
        ):  # config.json first; not provenance.json, which tells the names of an earlier run
            names = ["config.json", *sorted(self._ours() - {"config.json", "provenance.json"})]
            stale += [self.path / name for name in names]
        for path in stale:
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)


def _is_temporary(name: str) -> bool:
    """Of a run that begins beside this one, or of one that was killed."""
    return name.startswith(".") and (name.startswith(OWN_PREFIX) or name.endswith(TEMPORARY))


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def carried_names(source: Path) -> list[str]:
    """Tokenizer, template, remote code, generation config, licences: what is neither weights nor written here. Raises
    UsageError for one that is as large as weights."""
    found = [
        path
        for path in sorted(source.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in WRITTEN
        and not path.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
    ]
    for path in found:
        if (size := path.stat().st_size) > MOST_JSON:
            raise unreadable(
                path,
                f"it has {size:,} bytes, and no file beside weights is as large",
                "move it away",
            )
    return [path.name for path in found]


def carry_files(source: Path, output: Path) -> list[str]:
    """Copies them byte for byte and returns their names."""
    names = carried_names(source)
    for name in names:
        write_atomic(output / name, read_bytes(source / name))
    return names
