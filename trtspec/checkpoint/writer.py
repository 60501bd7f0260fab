"""Writes files that a kill at any moment leaves whole: safetensors shards and journals.

A reader sees a whole shard or none: temporary name, fsync, rename. `ShardFile` writes one whose
layout is known in advance, one tensor at a time, so that a converter never holds more than one
tensor. The journal is append-only: its first line holds the header (what the work depends on), each
further line one finished key. Every line is fsynced before the work counts as done. A line torn by
a kill is cut off on the next start.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from trtspec.checkpoint.headers import DTYPE_BITS, INDEX_NAME
from trtspec.errors import TrtspecError, UsageError
from trtspec.files import first_fault, open_regular, parse_json
from trtspec.report import CREATE, PRIVATE, announce, fsync, write_json, writing

if TYPE_CHECKING:
    import torch
    from filelock import BaseFileLock

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
T = TypeVar("T")
# Errors of file systems without flock. OPNOTSUPP and NOTSUP are one number on Linux.
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
STALE_SECONDS = 2.0  # to find out that the holder of a lock file is dead
APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
REPEAT = "repeat the command as it was, or pass `restart` to start over"


def byte_count(code: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor with that safetensors dtype and shape."""
    return math.prod(shape) * DTYPE_BITS[code] // 8


class ShardFile:
    """One shard under construction. `layout`: safetensors dtype code and shape by tensor name.

    Wider dtypes come first, so that every tensor starts at a multiple of its item size. `finish`
    renames the temporary file into place only when all tensors have been written. `abandon` removes
    it. The end of a `with` block finishes, and after an error abandons.
    """

    def __init__(
        self, path: Path, layout: Layout, metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        # The process id keeps a killed run's straggler out of the file that its successor writes.
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._layout = layout
        self._missing = {name: byte_count(*entry) for name, entry in layout.items()}
        header, self._ends, self.size = _header(layout, metadata)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.temporary, CREATE, 0o644)
        try:
            self._write(header, 0)
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor. Raises ValueError if dtype or shape is not the layout's."""
        import torch

        from trtspec.checkpoint.tensors import CODES

        code, shape = self._layout[name]
        if CODES.get(tensor.dtype) != code or tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, "
                f"the layout says {code} {list(shape)}"
            )
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self.append(name, flat.view(torch.uint8).numpy().data)

    def append(self, name: str, chunk: memoryview) -> None:
        """Writes the next bytes of a tensor."""
        if len(chunk) > self._missing[name]:
            code, shape = self._layout[name]
            raise ValueError(f"{name} has more bytes than the layout says: {code} {list(shape)}")
        self._write(chunk, self._ends[name] - self._missing[name])
        self._missing[name] -= len(chunk)

    def close(self) -> None:
        """Ends writing. The name stays temporary until `publish`.

        Raises ValueError if bytes are missing.
        """
        missing = sorted(name for name, count in self._missing.items() if count)
        if missing:
            raise ValueError(f"{len(missing)} tensors were not written whole, first {missing[0]}")
        handle, self._file = self._file, -1
        with writing(self.path):
            os.close(handle)

    def finish(self) -> None:
        """Makes the shard durable and gives it its name. Raises ValueError if bytes are missing."""
        self.close()
        publish(self.temporary, self.path)

    def abandon(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.abandon()  # of a finished one nothing is left

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        with writing(self.path):
            while view:
                count = os.pwrite(self._file, view[: 1 << 30], offset)
                view = view[count:]
                offset += count


def publish(temporary: Path, path: Path) -> None:
    """Makes a finished shard durable and gives it its name."""
    with writing(path):
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)


def _header(
    layout: Layout, metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int], int]:
    """(head of the file, end of each tensor in the file, size of the file), in bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    ends = {}
    offset = 0
    for name in sorted(layout, key=lambda key: -DTYPE_BITS[layout[key][0]]):
        code, shape = layout[name]
        end = offset + byte_count(code, shape)
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        ends[name] = end
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    head = struct.pack("<Q", len(text)) + text
    file_ends = {name: start + end for name, end in ends.items()}
    return head, file_ends, start + offset


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype codes and shapes of tensors in memory."""
    from trtspec.checkpoint.tensors import CODES

    return {name: (CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def write_shard(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one safetensors file: all of it or nothing, fsynced."""
    with ShardFile(path, layout_of(tensors), metadata) as shard:
        for name, tensor in tensors.items():
            shard.write(name, tensor)


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Writes model.safetensors.index.json. `total_size`: bytes of tensors, without headers."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX_NAME, index)


class Journal:
    """A file of finished keys, `done`, with their records. It is locked while open.

    `servers` holds facts about the servers that gave the records, by their names in the command.

    Raises UsageError if `header` is not the header that the file was begun with (naming what
    changed), if the file is not a journal, and if another process holds it. `restart` forgets what
    the file records, once it is locked. `private`: only its owner may read the file.
    """

    done: dict[str, Any]
    servers: dict[str, dict[str, str]]

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        *,
        restart: bool = False,
        remedy: str = REPEAT,
        private: bool = False,
    ) -> None:
        self.path = path
        self.remedy = remedy
        self._lock: BaseFileLock | None = None
        self._appending = threading.Lock()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, APPEND, PRIVATE if private else 0o644)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise UsageError(f"{path} is not a regular file", "move it away")
            self._lock = lock_file(self._file, path)
            with writing(path):
                if restart:
                    os.ftruncate(self._file, 0)
                if private:  # also if another umask or release began it
                    os.fchmod(self._file, PRIVATE)
                self._load(header)
        except BaseException:
            self.close()
            raise

    def _load(self, header: Mapping[str, Any]) -> None:
        """Cuts off a torn line, and begins or reads the file."""
        whole = self.path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._file, whole)
        if not whole:
            self._append({"header": header})
            fsync(self.path.parent)
        begun, self.servers, self.done, self._lines = _parse(self.path, self.remedy)
        refuse_changed(self.path, begun, header, self.remedy)

    def answered_by(self, servers: dict[str, dict[str, str]]) -> None:
        """Adds to the header the facts about each server. An unknown fact is no difference.

        Raises UsageError, naming what differs, if other servers gave the records.
        """
        begun = self.servers
        self.servers = {name: begun.get(name, {}) | facts for name, facts in servers.items()}
        if begun or self.done:
            old = {name: self.servers.get(name, {}) | facts for name, facts in begun.items()}
            refuse_changed(self.path, old, self.servers, self.remedy)
        if self.servers != begun:
            self._append({"servers": self.servers})

    def entries(self, entry_type: type[T]) -> dict[str, T]:
        """Returns every record as a value of this type.

        Raises UsageError, naming line and field, if a record is not of the type.
        """
        from pydantic import TypeAdapter, ValidationError

        adapter = TypeAdapter(entry_type)
        values = {}
        for key, record in self.done.items():
            try:
                values[key] = adapter.validate_python(record)
            except ValidationError as error:
                text = f"{self.path}, line {self._lines[key]}: {first_fault(error)}"
                raise UsageError(text, self.remedy) from None
        return values

    def record(self, key: str, **fields: Any) -> None:
        """Appends and fsyncs a record. After it returns, a rerun has `key` in `done`."""
        entry = {**fields, "key": key}
        self._append(entry)
        self.done[key] = entry

    def _append(self, value: dict[str, Any]) -> None:
        line = json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n"
        with writing(self.path):
            with self._appending:
                # A disk that is nearly full takes a part, and the next call says so.
                while line:
                    line = line[os.write(self._file, line) :]
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_changed(
    path: Path, old: Mapping[str, Any], new: Mapping[str, Any], remedy: str = REPEAT
) -> None:
    """Raises UsageError naming what differs between a journal's header and this run's."""
    changed = differences(old, new)
    if changed:
        raise UsageError(f"{path} was begun with something else: {'; '.join(changed)}", remedy)


class JournalContent(NamedTuple):
    """The lines of a journal. `done`, `lines`: each record and its line number, by key."""

    header: dict[str, Any]
    servers: dict[str, dict[str, str]]
    done: dict[str, Any]
    lines: dict[str, int]


def read_journal(path: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Returns a journal's header and its records by key, without its lock.

    (None, {}) if the file is absent or not a journal.
    """
    try:
        header, _, done, _ = _parse(path)
    except (FileNotFoundError, UsageError):
        return None, {}
    return header, done


def _parse(path: Path, remedy: str = "") -> JournalContent:
    """Reads the whole lines of a journal. Raises UsageError, naming the line, for other files."""
    content = JournalContent({}, {}, {}, {})
    header, servers, done, lines = content
    with open_regular(path, remedy) as stream:
        data = stream.read().rpartition(b"\n")[0]
    for number, text in enumerate(data.split(b"\n"), 1):
        try:
            entry = parse_json(text)
            if number == 1:
                header |= entry["header"]
            elif "key" in entry:
                key = entry["key"]
                done[key] = entry
                lines[key] = number
            else:
                servers |= {name: dict(facts) for name, facts in entry["servers"].items()}
        except (ValueError, LookupError, TypeError, AttributeError):
            message = f"{path} is not a journal of this command (line {number})"
            raise UsageError(message, remedy) from None
    return content


def differences(old: Any, new: Any) -> list[str]:
    """`key.key was OLD, now NEW` for each value that differs, however deep.

    Five at most, then their number.
    """
    lines = _differences(old, json.loads(json.dumps(new)), "")
    return lines if len(lines) <= 5 else [*lines[:5], f"and {len(lines) - 5} more"]


def _differences(old: Any, new: Any, where: str) -> list[str]:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f"{where} was {_short(old)}, now {_short(new)}"]
    keys = sorted(old.keys() | new.keys())
    if old.get("name") != new.get("name"):
        # Further differences of two things with different names say nothing.
        keys = ["name"]
    lines: list[str] = []
    for key in keys:
        path = f"{where}.{key}" if where else key
        lines += _differences(old.get(key), new.get(key), path)
    return lines


def lock_file(file: int, path: Path) -> BaseFileLock | None:
    """Locks `path`, open as `file`, until it is closed.

    On a file system without flock it returns a lock file beside it, which the caller releases. The
    lock file of a process that was killed on this machine is replaced. Raises UsageError while
    another process holds the lock.
    """
    from filelock import SoftFileLock, Timeout, lock_descriptor  # here, because `--help` needs none

    remedy = "wait for it to end, or choose another output"
    beside = path.with_name(f"{path.name}.lock")
    try:
        if lock_descriptor(file, blocking=False):
            return None
        holder = path.name
    except OSError as error:
        if error.errno not in NO_FLOCK:
            text = f"{path} cannot be locked: {error.strerror}"
            raise TrtspecError(text, "choose an output on another file system") from None
        lock = SoftFileLock(beside, timeout=STALE_SECONDS)
        try:
            lock.acquire()
        except Timeout:
            holder = f"{beside.name}, as process {lock.pid}"
            remedy = f"wait for it to end; if it was killed on another machine, remove {beside}"
        else:
            announce(
                f"{path.parent} lies on a file system without flock; "
                f"{beside.name} is the lock instead"
            )
            return lock
    directory = path.absolute().parent
    raise UsageError(f"another run is writing {directory} (it holds {holder})", remedy)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
