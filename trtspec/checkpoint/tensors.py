"""Reads tensors of a checkpoint into torch, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trtspec.checkpoint.headers import Checkpoint, ShardReader, TensorInfo
from trtspec.errors import TrtspecError

# torch's dtype by safetensors code
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
# safetensors code by torch's dtype
CODES = {dtype: code for code, dtype in DTYPES.items()}


class LazyTensors(ShardReader):
    """Mapping from names to the tensors of a checkpoint.

    `lazy[name]` reads the tensor from its shard, to the CPU and in its stored dtype.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path)
        self.checkpoint = checkpoint

    def names(self) -> Iterator[str]:
        """Returns the names of all tensors, in the order of shards and offsets."""
        return iter(self.checkpoint.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint.tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        info = self.info(name)
        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        self.read_bytes(info, info.begin, raw.numpy().data)
        return raw.view(self.dtype(info)).reshape(info.shape)

    def info(self, name: str) -> TensorInfo:
        """Returns the header entry of a tensor. Raises TrtspecError if no tensor has this name."""
        try:
            return self.checkpoint.tensors[name]
        except KeyError:
            message = f"{self.checkpoint.path} has no tensor {name}"
            raise TrtspecError(message, "compare the names with `trtspec inspect --json`") from None

    def dtype(self, info: TensorInfo) -> torch.dtype:
        """Returns torch's dtype of a tensor. Raises TrtspecError if DTYPES does not list it."""
        try:
            return DTYPES[info.dtype]
        except KeyError:
            fault = f"has dtype {info.dtype}, which trtspec does not read"
            message = f"{info.name} in {self.checkpoint.path} {fault}"
            remedy = "pass a Kimi-K2 checkpoint, which has BF16, F32, F8_E4M3, U8, I32 and I64"
            raise TrtspecError(message, remedy) from None
