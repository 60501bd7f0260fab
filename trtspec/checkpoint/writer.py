"""Writes files that stay valid if the process is killed: safetensors shards and journals.

A shard gets its name only after all bytes are written and fsynced. `ShardFile` writes a shard whose
layout is known in advance, one tensor at a time, so that a converter holds one tensor in memory. A
journal only grows. Its first line is the header (facts that the work depends on). Each further line
is a finished key, or facts about servers. A line is fsynced before the work counts as done. A line
that a kill cut short is removed at the next start.
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

# safetensors dtype code and shape by tensor name
Layout = Mapping[str, tuple[str, tuple[int, ...]]]
T = TypeVar("T")
# Errors of file systems without flock. EOPNOTSUPP and ENOTSUP are one number on Linux.
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
STALE_SECONDS = 2.0  # to find out that the process of a lock file is dead
APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
REPEAT = "repeat the command as it was, or pass `restart` to start over"


def byte_count(code: str, shape: tuple[int, ...]) -> int:
    """Returns the size in bytes of a tensor with this safetensors dtype and shape."""
    return math.prod(shape) * DTYPE_BITS[code] // 8


class ShardFile:
    """Safetensors shard that is being written under a temporary name.

    `finish` renames the file to `path` if all tensors are complete, and `abandon` removes it. The
    end of a `with` block finishes the shard, or abandons it after an error.

    layout: safetensors dtype code and shape by tensor name.
    metadata: texts for the header. None: the format that transformers requires.
    """

    def __init__(
        self, path: Path, layout: Layout, metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        # The process id separates the files of a killed process and of the next one.
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
        """Writes one tensor.

        Raises ValueError if its dtype or shape is not the layout's.
        """
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
        """Writes the next bytes of a tensor.

        Raises ValueError if the tensor would become longer than the layout says.
        """
        if len(chunk) > self._missing[name]:
            code, shape = self._layout[name]
            raise ValueError(f"{name} has more bytes than the layout says: {code} {list(shape)}")
        self._write(chunk, self._ends[name] - self._missing[name])
        self._missing[name] -= len(chunk)

    def close(self) -> None:
        """Ends the writing and keeps the temporary name until `publish`.

        Raises ValueError if bytes of a tensor are missing.
        """
        missing = sorted(name for name, count in self._missing.items() if count)
        if missing:
            raise ValueError(f"{len(missing)} tensors were not written whole, first {missing[0]}")
        # -1 first, so that `abandon` does not close the file again if closing fails.
        handle, self._file = self._file, -1
        with writing(self.path):
            os.close(handle)

    def finish(self) -> None:
        """Makes the shard durable and gives it its name.

        Raises ValueError if bytes of a tensor are missing.
        """
        self.close()
        publish(self.temporary, self.path)

    def abandon(self) -> None:
        """Closes and removes the temporary file if it exists."""
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
            self.abandon()  # This does nothing to a finished shard.

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        """Writes all of `data` at a byte offset of the file."""
        view = memoryview(data)
        with writing(self.path):
            while view:
                # Linux writes at most 2 GiB at once.
                count = os.pwrite(self._file, view[: 1 << 30], offset)
                view = view[count:]
                offset += count


def publish(temporary: Path, path: Path) -> None:
    """Makes a complete temporary file durable and renames it to `path`."""
    with writing(path):
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)


def _header(
    layout: Layout, metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int], int]:
    """Returns the header's bytes, the end offset of each tensor, and the size of the file in bytes.

    Tensors of wider dtypes come first, so that each starts at a multiple of its item size.
    """
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
    # The data must begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    head = struct.pack("<Q", len(text)) + text
    file_ends = {name: start + end for name, end in ends.items()}
    return head, file_ends, start + offset


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype code and shape of each tensor, by name."""
    from trtspec.checkpoint.tensors import CODES

    return {name: (CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def write_shard(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors to a safetensors file and fsyncs it.

    A file of this name is replaced only after all tensors are written.
    """
    with ShardFile(path, layout_of(tensors), metadata) as shard:
        for name, tensor in tensors.items():
            shard.write(name, tensor)


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Writes model.safetensors.index.json. `total_size`: bytes of all tensors, without headers."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX_NAME, index)


class Journal:
    """File of finished keys and their records, which is locked while it is open.

    done: records by key.
    servers: facts about the servers that gave the records, by their names in the command.
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
        """Opens, locks and reads the journal at `path`, or starts it.

        Raises UsageError if the file has another header (naming the differences), if it is not a
        journal, or if another process holds it.

        Args:
            header: facts that the records depend on.
            restart: whether the earlier records are deleted.
            remedy: advice of the error for another header.
            private: whether only the owner may read the file.
        """
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
                # The file may be older than the option.
                if private:
                    os.fchmod(self._file, PRIVATE)
                self._load(header)
        except BaseException:
            self.close()
            raise

    def _load(self, header: Mapping[str, Any]) -> None:
        """Removes an incomplete last line, starts a new file with the header, and reads records."""
        complete_bytes = self.path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._file, complete_bytes)
        if not complete_bytes:
            self._append({"header": header})
            fsync(self.path.parent)
        earlier, self.servers, self.done, self._lines = _parse(self.path, self.remedy)
        refuse_changed(self.path, earlier, header, self.remedy)

    def answered_by(self, servers: dict[str, dict[str, str]]) -> None:
        """Records facts about the servers that give the records.

        Raises UsageError, naming the differences, if other servers gave the earlier records.
        """
        earlier = self.servers
        self.servers = {name: earlier.get(name, {}) | facts for name, facts in servers.items()}
        if earlier or self.done:
            # A fact that one side lacks is filled in there, so that it is not a difference.
            old = {name: self.servers.get(name, {}) | facts for name, facts in earlier.items()}
            refuse_changed(self.path, old, self.servers, self.remedy)
        if self.servers != earlier:
            self._append({"servers": self.servers})

    def entries(self, entry_type: type[T]) -> dict[str, T]:
        """Returns every record as a value of `entry_type`, by key.

        Raises UsageError, naming line and field, if a record does not have the type.
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
        """Appends a record and fsyncs it. After a restart of the command, `done` has the key."""
        entry = {**fields, "key": key}
        self._append(entry)
        self.done[key] = entry

    def _append(self, value: dict[str, Any]) -> None:
        """Appends an object as one JSON line and fsyncs the file."""
        line = json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n"
        with writing(self.path):
            with self._appending:
                # A nearly full disk accepts fewer bytes, and the next call raises the error.
                while line:
                    line = line[os.write(self._file, line) :]
            os.fsync(self._file)

    def close(self) -> None:
        """Closes the file and releases its lock."""
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
    """Raises UsageError, naming the differences, if `new` is not the earlier header `old`."""
    changed = differences(old, new)
    if changed:
        raise UsageError(f"{path} was started with something else: {'; '.join(changed)}", remedy)


class JournalContent(NamedTuple):
    """Contents of a journal.

    header: facts that the records depend on.
    servers: facts about the servers, by name.
    done: records by key.
    lines: line numbers by key.
    """

    header: dict[str, Any]
    servers: dict[str, dict[str, str]]
    done: dict[str, Any]
    lines: dict[str, int]


def read_journal(path: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Returns a journal's header, and its records by key. Does not lock the file.

    The header is None and the records are empty if the file is absent or not a journal.
    """
    try:
        header, _, done, _ = _parse(path)
    except (FileNotFoundError, UsageError):
        return None, {}
    return header, done


def _parse(path: Path, remedy: str = "") -> JournalContent:
    """Reads the complete lines of a journal.

    Raises UsageError, naming the line, if the file is not a journal.
    """
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
    """Returns `KEY.KEY was OLD, now NEW` for each value that differs at any depth.

    At most five differences are listed, and a last text gives the number of the others.
    """
    # JSON turns tuples and enums into the lists and texts that a file holds.
    lines = _differences(old, json.loads(json.dumps(new)), "")
    return lines if len(lines) <= 5 else [*lines[:5], f"and {len(lines) - 5} more"]


def _differences(old: Any, new: Any, where: str) -> list[str]:
    """Returns a text for each differing value at any depth. `where`: path of the two values."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f"{where} was {_short(old)}, now {_short(new)}"]
    keys = sorted(old.keys() | new.keys())
    if old.get("name") != new.get("name"):
        # If the names differ, the two are different objects, so all other keys differ too.
        keys = ["name"]
    lines: list[str] = []
    for key in keys:
        path = f"{where}.{key}" if where else key
        lines += _differences(old.get(key), new.get(key), path)
    return lines


def lock_file(file: int, path: Path) -> BaseFileLock | None:
    """Locks `path`, which is open as `file`, until the file is closed.

    Returns None with flock. On a file system without flock, returns a lock file beside `path`,
    which the caller must release. A lock file of a process that was killed on this machine is
    replaced. Raises UsageError if another process holds the lock.
    """
    # Imported late, because most commands need no lock.
    from filelock import SoftFileLock, Timeout, lock_descriptor

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
        # It replaces the lock file of a dead process within this time.
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
    """Returns a value as JSON, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
