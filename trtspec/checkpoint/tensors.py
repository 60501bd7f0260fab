"""Tensors of a checkpoint, read one at a time by offset; nothing is mapped, so memory is what the caller holds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from trtspec import files
from trtspec.checkpoint.headers import Checkpoint, TensorInfo
from trtspec.errors import TrtspecError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class LazyTensors:
    """`lazy[name]` reads that tensor (CPU, its own dtype) from its shard; files are opened once and kept.

    Plain reads instead of a memory map: resident memory stays at the tensors in use whatever the shard size, and a
    file that shrank meanwhile is an error message, not a bus error.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._files: dict[str, int] = {}

    def names(self) -> Iterator[str]:
        return iter(self.checkpoint.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint.tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        info = self.info(name)
        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        self.read_bytes(info, info.begin, raw.numpy().data)
        return raw.view(self.dtype(info)).reshape(info.shape)

    def info(self, name: str) -> TensorInfo:
        try:
            return self.checkpoint.tensors[name]
        except KeyError:
            raise TrtspecError(
                f"{self.checkpoint.path} has no tensor {name}", "compare the names with `trtspec inspect --json`"
            ) from None

    def dtype(self, info: TensorInfo) -> torch.dtype:
        try:
            return DTYPES[info.dtype]
        except KeyError:
            raise TrtspecError(
                f"{info.name} in {self.checkpoint.path} has dtype {info.dtype}, which torch cannot hold",
                "Kimi-K2 checkpoints use BF16, F32, F8_E4M3, U8, I32 and I64",
            ) from None

    def read_into(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Reads into the front of a reusable flat uint8 `buffer` and returns the view of it; spares page faults."""
        info = self.info(name)
        if buffer.numel() < info.nbytes:
            raise ValueError(f"{name} needs {info.nbytes} bytes, the buffer has {buffer.numel()}")
        raw = buffer[: info.nbytes]
        self.read_bytes(info, info.begin, raw.numpy().data)
        return raw.view(self.dtype(info)).reshape(info.shape)

    def chunks(self, name: str, size: int = 1 << 24) -> Iterator[memoryview]:
        """The tensor's bytes in order, `size` at a time, through one reused buffer: for copying what is not decoded."""
        info = self.info(name)
        buffer = memoryview(bytearray(min(size, max(info.nbytes, 1))))
        for begin in range(info.begin, info.end, size):
            part = buffer[: min(size, info.end - begin)]
            self.read_bytes(info, begin, part)
            yield part

    def read_bytes(self, info: TensorInfo, begin: int, target: memoryview) -> None:
        """Fills `target` with the tensor's bytes from `begin` on, counted from the file's start as `info.begin` is."""
        file, offset, path = self._open(info.shard), begin, self.checkpoint.path / info.shard
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

    def _open(self, shard: str) -> int:
        if shard not in self._files:
            with files.open_regular(self.checkpoint.path / shard) as stream:
                file = os.dup(stream.fileno())
            if self._files.setdefault(shard, file) != file:  # another thread was first
                os.close(file)
        return self._files[shard]

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def __enter__(self) -> LazyTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
