"""Bytes of a checkpoint's tensors, read by offset; nothing is mapped, so memory is what the caller holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from trtspec import files
from trtspec.checkpoint.headers import TensorInfo
from trtspec.errors import TrtspecError


class ShardReader:
    """Shard files are opened once and kept.

    Plain reads instead of a memory map: resident memory stays at the tensors in use whatever the shard size, and a
    file that shrank meanwhile is an error message, not a bus error.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, int] = {}

    def read_bytes(self, info: TensorInfo, begin: int, target: memoryview) -> None:
        """Fills `target` with the tensor's bytes from `begin` on, counted from the file's start as `info.begin` is."""
        file, offset, path = self._open(info.shard), begin, self.directory / info.shard
        while target:
            try:
                count = os.preadv(file, [target[: 1 << 30]], offset)
            except OSError as error:
                raise TrtspecError(f"cannot read {path}: {error.strerror}", "check the disk it lies on") from error
            if not count:
                raise TrtspecError(
                    f"shard {path} ends before {info.name} does",
                    "the file changed while it was read; download it again",
                )
            target, offset = target[count:], offset + count

    def pieces(self, info: TensorInfo, size: int) -> Iterator[memoryview]:
        """The tensor's bytes in order, `size` at a time, through one reused buffer."""
        begin, end = info.begin, info.end
        buffer = memoryview(bytearray(min(size, max(end - begin, 1))))
        for first in range(begin, end, size):
            part = buffer[: min(size, end - first)]
            self.read_bytes(info, first, part)
            yield part

    def _open(self, shard: str) -> int:
        if shard not in self._files:
            with files.open_regular(self.directory / shard) as stream:
                file = os.dup(stream.fileno())
            if self._files.setdefault(shard, file) != file:  # another thread was first
                os.close(file)
        return self._files[shard]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
