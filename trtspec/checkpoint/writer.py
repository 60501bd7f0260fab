"""safetensors files written so that a reader sees a whole shard or none: temporary name, fsync, rename.

`ShardFile` writes a shard whose layout is known in advance, one tensor at a time, so that a converter never holds more
than the tensor at hand.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.checkpoint.headers import DTYPE_BITS
from trtspec.errors import TrtspecError
from trtspec.report import fsync_directory, write_json

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
VECTOR = 512  # views in one pwritev; the limit of Linux is 1024
Layout = Mapping[str, tuple[str, tuple[int, ...]]]


def byte_count(code: str, shape: tuple[int, ...]) -> int:
    """Of a tensor with that safetensors dtype."""
    return math.prod(shape) * DTYPE_BITS[code] // 8


class ShardFile:
    """One shard under construction. `layout` maps each name to its safetensors dtype code and shape.

    Wider dtypes come first, so that every tensor starts at a multiple of its item size. `finish` renames the
    temporary file into place only when all tensors have been written; `abandon` removes it.
    """

    def __init__(self, path: Path, layout: Layout, metadata: Mapping[str, str] | None = None) -> None:
        # the process id keeps a killed run's straggler out of the file that its successor is writing
        self.path, self.temporary = path, path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._layout = layout
        self._missing = {name: byte_count(code, shape) for name, (code, shape) in layout.items()}
        header, self._offsets, self.size = _header(layout, metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            self._write(header, 0)
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor at its place; dtype and shape must be those of the layout."""
        import torch

        from trtspec.checkpoint.tensors import CODES

        code, shape = self._layout[name]
        if CODES.get(tensor.dtype) != code or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, the layout says {code} {list(shape)}")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._write(data.numpy().data, self._offsets[name])
        self._missing.pop(name, None)

    def write_parts(self, parts: list[tuple[str, int, memoryview]]) -> None:
        """Writes pieces of tensors (name, byte offset in the tensor, bytes); neighbours in the file go together."""
        placed = sorted(((self._offsets[name] + at, name, data) for name, at, data in parts), key=lambda part: part[0])
        run: list[memoryview] = []
        begin = end = 0
        for offset, name, data in placed:
            if run and (offset != end or len(run) == VECTOR):
                self._write_vector(run, begin)
                run = []
            if not run:
                begin = offset
            run.append(data)
            end = offset + len(data)
            self._missing[name] -= len(data)
            if not self._missing[name]:
                del self._missing[name]
        if run:
            self._write_vector(run, begin)

    def write_chunks(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Writes a tensor from its bytes in order; their number must be the layout's."""
        code, shape = self._layout[name]
        begin = offset = self._offsets[name]
        for chunk in chunks:
            self._write(chunk, offset)
            offset += len(chunk)
        if offset - begin != byte_count(code, shape):
            raise ValueError(f"{name} came as {offset - begin} bytes, the layout says {code} {list(shape)}")
        self._missing.pop(name, None)

    def close(self) -> None:
        """Ends writing; the name stays temporary until `publish`. Raises ValueError when a tensor is missing."""
        if self._missing:
            raise ValueError(f"{len(self._missing)} tensors were not written, first {sorted(self._missing)[0]}")
        os.close(self._file)
        self._file = -1

    def finish(self) -> None:
        """Makes the shard durable and gives it its name. Raises ValueError when a tensor was never written."""
        self.close()
        publish(self.temporary, self.path)

    def abandon(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.temporary.unlink(missing_ok=True)

    def _write_vector(self, run: list[memoryview], offset: int) -> None:
        """Neighbours in one call; what a full disk or a signal cut short goes on byte by byte to its message."""
        try:
            count = os.pwritev(self._file, run, offset)
        except OSError:
            count = 0
        for view in run:
            done = min(count, len(view))
            self._write(view[done:], offset + done)
            count, offset = count - done, offset + len(view)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._file, view[: 1 << 30], offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise _cannot_write(self.path, error) from error


def _cannot_write(path: Path, error: OSError) -> TrtspecError:
    return TrtspecError(f"cannot write {path}: {error.strerror}", "free space on that disk, then run the command again")


def publish(temporary: Path, path: Path) -> None:
    """Makes a finished shard durable and gives it its name."""
    handle = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        os.close(handle)
    os.replace(temporary, path)
    fsync_directory(path.parent)


def _header(layout: Layout, metadata: Mapping[str, str] | None) -> tuple[bytes, dict[str, int], int]:
    """The file's head, absolute offsets by name, and the file's size."""
    entries: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    relative, offset = {}, 0
    for name in sorted(layout, key=lambda key: -DTYPE_BITS[layout[key][0]]):
        code, shape = layout[name]
        end = offset + byte_count(code, shape)
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        relative[name], offset = offset, end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + at for name, at in relative.items()}, start + offset


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype codes and shapes of tensors at hand."""
    from trtspec.checkpoint.tensors import CODES

    return {name: (CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes one safetensors file: all of it or nothing, fsynced."""
    shard = ShardFile(path, layout_of(tensors), metadata)
    try:
        for name, tensor in tensors.items():
            shard.write(name, tensor)
        shard.finish()
    except BaseException:
        shard.temporary.unlink(missing_ok=True)
        raise


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Writes model.safetensors.index.json; `total_size` counts tensor bytes, not headers."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX_NAME, index)
