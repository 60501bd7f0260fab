"""What a checkpoint directory holds, from config.json and safetensors headers alone: no tensor is read, no torch.

A safetensors file is an 8-byte little-endian header length, a JSON header, then the data. The header gives, for each
tensor, a dtype code, a shape and byte offsets relative to the data (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.files import open_regular, parse_json, read_object, unreadable
from trtspec.specs import check_kinds

INDEX_NAME = "model.safetensors.index.json"
HF_QUANT_NAME = "hf_quant_config.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
DOWNLOAD_AGAIN = "download the checkpoint again, or check the disk it lies on"

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place. `dtype` is the safetensors code; `begin` and `end` are absolute byte offsets in the shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory, opened by its headers. `tensors` is ordered by shard, then by offset."""

    path: Path
    config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None
    tensors: dict[str, TensorInfo]
    shards: tuple[str, ...]

    @staticmethod
    def open(path: Path | str) -> Checkpoint:
        """Reads config.json, the index (or the single file, or every *.safetensors) and all shard headers.

        Raises TrtspecError for a missing directory, config or shard, a pickle-only checkpoint, a truncated or corrupt
        shard, and an index that disagrees with the files.
        """
        path = Path(path)
        if not path.is_dir():
            raise TrtspecError(f"{path} is not a directory", "pass a checkpoint directory or a hub id such as org/name")
        config = read_config(path / "config.json")
        quant_path = path / HF_QUANT_NAME
        hf_quant = read_config(quant_path) if quant_path.is_file() else None
        weight_map = _weight_map(path)
        shards = tuple(sorted(set(weight_map.values()))) if weight_map is not None else _loose_shards(path)
        tensors = _all_headers(path, shards)
        if weight_map is not None:
            _check_index(path, weight_map, tensors)
        return Checkpoint(path, config, hf_quant, tensors, shards)

    @property
    def bytes(self) -> int:
        """Bytes of tensor data, without headers."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object; raises TrtspecError naming the file when it is absent, not JSON or not an object."""
    try:
        return read_object(path, remedy=DOWNLOAD_AGAIN)
    except FileNotFoundError:
        raise TrtspecError(f"{path.parent} has no {path.name}", "pass the directory that holds config.json") from None


def read_config(path: Path) -> dict[str, Any]:
    """config.json or hf_quant_config.json; raises TrtspecError also where a key holds another kind of value than
    readers rely on."""
    return check_kinds(read_json(path), str(path))


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, in the order of their bytes, checked against the file's size."""
    try:
        with open_regular(path, DOWNLOAD_AGAIN) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise TrtspecError(f"{path} is truncated or not a safetensors file ({size} bytes)", DOWNLOAD_AGAIN)
            header = parse_json(stream.read(length))
    except FileNotFoundError:
        raise TrtspecError(f"shard {path.name} is missing in {path.parent}", DOWNLOAD_AGAIN) from None
    except OSError as error:
        raise unreadable(path, error.strerror or str(error), DOWNLOAD_AGAIN) from None
    except ValueError:
        raise TrtspecError(f"{path} has a corrupt safetensors header", DOWNLOAD_AGAIN) from None
    if not isinstance(header, dict):
        raise TrtspecError(f"{path} has a corrupt safetensors header", DOWNLOAD_AGAIN)
    header.pop("__metadata__", None)
    tensors = [_tensor_info(path, name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    data_end = max((tensor.end for tensor in tensors), default=8 + length)
    if data_end != size:
        kind = "truncated" if size < data_end else "longer than its header says"
        raise TrtspecError(f"shard {path} is {kind}: {size} bytes where the header needs {data_end}", DOWNLOAD_AGAIN)
    return {tensor.name: tensor for tensor in tensors}


def _tensor_info(path: Path, name: str, entry: dict[str, Any], data_start: int) -> TensorInfo:
    try:
        dtype, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
        begin, end = (data_start + int(offset) for offset in entry["data_offsets"])
        expected = math.prod(shape) * DTYPE_BITS[dtype] // 8
        if min((*shape, begin - data_start, end - begin)) < 0:
            raise ValueError("a negative size")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TrtspecError(f"{path}: the header entry of {name} is malformed ({error!r})", DOWNLOAD_AGAIN) from None
    if end - begin != expected:
        raise TrtspecError(
            f"{path}: {name} takes {end - begin} bytes where {dtype} {list(shape)} needs {expected}", DOWNLOAD_AGAIN
        )
    return TensorInfo(name, dtype, shape, path.name, begin, end)


def _weight_map(path: Path) -> dict[str, str] | None:
    index = path / INDEX_NAME
    if not index.is_file():
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TrtspecError(f"{index} has no weight_map", DOWNLOAD_AGAIN)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise TrtspecError(
                f"{index} places {name} in {shard!r}, which is not a file of this directory", DOWNLOAD_AGAIN
            )
    return weight_map


def _loose_shards(path: Path) -> tuple[str, ...]:
    if (path / "model.safetensors").is_file():
        return ("model.safetensors",)
    found = tuple(sorted(file.name for file in path.glob("*.safetensors")))
    if found:
        return found
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        raise TrtspecError(
            f"{path} holds weights only as pickle files ({pickles[0]}), which run code when they are opened",
            "convert them to safetensors where you trust them, then pass that directory",
        )
    raise TrtspecError(f"{path} has no *.safetensors file", "pass a directory that holds the weights")


def _all_headers(path: Path, shards: tuple[str, ...]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(path / shard).items():
            if name in tensors:
                raise TrtspecError(f"{path}: {name} is in both {tensors[name].shard} and {shard}", DOWNLOAD_AGAIN)
            tensors[name] = info
    return tensors


def _check_index(path: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    wrong = [name for name, shard in weight_map.items() if name not in tensors or tensors[name].shard != shard]
    unlisted = [name for name in tensors if name not in weight_map]
    if wrong:
        raise TrtspecError(
            f"{path / INDEX_NAME} lists {len(wrong)} tensors that are not in the named shard, first {wrong[0]}",
            DOWNLOAD_AGAIN,
        )
    if unlisted:
        raise TrtspecError(
            f"{path / INDEX_NAME} does not list {len(unlisted)} tensors that the shards hold, first {unlisted[0]}",
            DOWNLOAD_AGAIN,
        )
