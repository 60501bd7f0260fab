"""Opens a checkpoint directory by config.json and safetensors headers, and reads bytes of tensors.

A safetensors file is an 8-byte little-endian header length, a JSON header and the data. The header
gives a dtype code, a shape and byte offsets for each tensor. The offsets are relative to the data
(https://github.com/huggingface/safetensors#format). No file is mapped into memory and torch is not
needed, so the process needs memory only for the bytes that a caller keeps.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from trtspec import files
from trtspec.errors import TrtspecError, listed
from trtspec.files import open_regular, read_object, unreadable
from trtspec.foreign import PlainName, plain_name
from trtspec.specs import check_kinds

INDEX_NAME = "model.safetensors.index.json"
HF_QUANT_NAME = "hf_quant_config.json"
MAX_SHARDS = 100_000
# Bytes of a chunk, few enough to stay in the CPU's cache while they are compared.
PIECE = 1 << 20
DOWNLOAD_AGAIN = "download the checkpoint again, or check the disk it lies on"
# first bytes of the text that Git LFS leaves in place of a file
POINTER = b"version https://git-lfs"
# suffixes that download tools give a file until it is complete
DOWNLOAD_SUFFIXES = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".tmp")
# model-00007-of-000064.safetensors or model-7-of-61.safetensors
NUMBERED = re.compile(r"(.*-)(\d+)-of-(\d+)\.safetensors")

# bits of an element by safetensors code
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
# For each safetensors code, a mask of all bits without the sign, and the smallest masked value that
# is infinite or NaN.
NOT_FINITE_BITS = {
    "BF16": (0x7FFF, 0x7F80),
    "F16": (0x7FFF, 0x7C00),
    "F32": (0x7FFFFFFF, 0x7F800000),
    "F64": (0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "F8_E4M3": (0x7F, 0x7F),  # has no infinity
    "F8_E5M2": (0x7F, 0x7C),
    "F8_E8M0": (0xFF, 0xFF),
}


class TensorInfo(NamedTuple):
    """Entry of a tensor in the header of its shard.

    dtype: safetensors code.
    shard: name of the file that holds the tensor.
    begin, end: byte offsets in that file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: PlainName
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the stored tensor in bytes."""
        return self.end - self.begin

    @property
    def numel(self) -> int:
        """Number of stored elements."""
        return math.prod(self.shape)


class RangedFiles(Protocol):
    """Shard files that are read by byte ranges, such as files on the hub.

    bytes_at: reads `size` bytes from offset `begin` of a shard.
    to_dict: facts about the files for JSON reports.
    """

    def bytes_at(self, shard: str, begin: int, size: int) -> bytes: ...

    def to_dict(self) -> dict[str, Any]: ...


# function that reads the headers of shards, in their order
Headers = Callable[[tuple[PlainName, ...]], Iterable[dict[str, TensorInfo]]]


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint directory, opened by its headers.

    path: directory of all files, or of all but the weights if they are on the hub.
    config: contents of config.json.
    hf_quant_config: contents of ModelOpt's file. None if the file does not exist.
    tensors: header entries by tensor name, ordered by shard and offset.
    shards: names of the weight files.
    remote: weight files on the hub. None if the weights are in `path`.
    """

    path: Path
    config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None
    tensors: dict[str, TensorInfo]
    shards: tuple[PlainName, ...]
    remote: RangedFiles | None = None

    @staticmethod
    def open(
        path: Path | str, names: tuple[PlainName, ...] | None = None, headers: Headers | None = None
    ) -> Checkpoint:
        """Reads config.json, hf_quant_config.json and the headers of all shards.

        The index names the shards. Without an index the shards are the single file or every
        *.safetensors file. Raises TrtspecError if the directory, config.json or a shard is missing,
        or if all weights are pickled. Also raises it if a shard is truncated or damaged, or if the
        index disagrees with the shards.

        Args:
            names: names of the shards, if they are not in the directory and no index names them.
            headers: function that reads the headers of shards that are not in the directory.
        """
        path = Path(path)
        if not path.is_dir():
            remedy = "pass a checkpoint directory or a hub id such as org/name"
            raise TrtspecError(f"{path} is not a directory", remedy)
        config = read_config(path / "config.json")
        hf_quant = None
        quant_path = path / HF_QUANT_NAME
        if quant_path.is_file():
            hf_quant = read_config(quant_path)
        shard_of = weight_map(path)
        if shard_of is not None:
            names = tuple(sorted(set(shard_of.values())))
        shards = names or _loose_shards(path)
        shard_headers: Iterable[dict[str, TensorInfo]]
        shard_headers = map(read_header, map(path.joinpath, shards))
        if headers:
            shard_headers = headers(shards)
        tensors = _all_headers(path, shards, shard_headers)
        if shard_of is not None:
            _check_index(path, shard_of, tensors)
        return Checkpoint(path, config, hf_quant, tensors, shards)

    @property
    def shard_bytes(self) -> dict[PlainName, int]:
        """Size of each shard file in bytes, by its name.

        The size is the end of the last tensor, because safetensors allows no bytes after the data.
        """
        sizes = dict.fromkeys(self.shards, 0)
        for tensor in self.tensors.values():
            sizes[tensor.shard] = max(sizes[tensor.shard], tensor.end)
        return sizes

    def bytes_at(self, shard: str, begin: int, size: int) -> bytes:
        """Reads `size` bytes from offset `begin` of a shard, on this machine or on the hub."""
        if self.remote is not None:
            return self.remote.bytes_at(shard, begin, size)
        with open_regular(self.path / shard, DOWNLOAD_AGAIN) as stream:
            stream.seek(begin)
            return stream.read(size)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises TrtspecError if the file is absent or not a JSON object."""
    try:
        return read_object(path, remedy=DOWNLOAD_AGAIN)
    except FileNotFoundError:
        # Users often pass the folder above: of a clone, or of a repository in the hub's cache.
        directory = path.parent
        inner = [*directory.glob(f"*/{path.name}"), *directory.glob(f"snapshots/*/{path.name}")]
        remedy = "pass the directory that holds config.json"
        if inner:
            remedy = f"pass {listed(str(file.parent) for file in inner)}"
        raise TrtspecError(f"{directory} has no {path.name}", remedy) from None


def read_config(path: Path) -> dict[str, Any]:
    """Reads config.json or hf_quant_config.json.

    Raises TrtspecError if the file is absent or not a JSON object, or if a value does not have the
    type that readers rely on.
    """
    return check_kinds(read_json(path), str(path))


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of one safetensors file by name, in the order of their bytes.

    Raises TrtspecError if the file is absent, a Git LFS pointer, damaged or not readable.
    """
    # Imported late, because it loads numpy, which many commands do not need.
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path, DOWNLOAD_AGAIN) as stream:
            if stream.read(len(POINTER)) == POINTER:
                message = f"{path} is a Git LFS pointer, a small text in place of the weights"
                remedy = "run `git lfs pull` there, or `hf download` the checkpoint"
                raise TrtspecError(message, remedy, "TS-SHARD-POINTER")
            # The library checks the header, but does not give the offsets.
            with safe_open(path, "np"):
                pass
            stream.seek(0)
            start = 8 + struct.unpack("<Q", stream.read(8))[0]
            # This also refuses a repeated name, which the library accepts.
            header = files.parse_json(stream.read(start - 8))
    except FileNotFoundError:
        raise _missing_shard(path) from None
    except (SafetensorError, ValueError) as error:
        size = path.stat().st_size
        damage = f"truncated, damaged or not a safetensors file ({size:,} bytes)"
        message = f"{path} is {damage}: {error}"
        raise TrtspecError(message, DOWNLOAD_AGAIN, "TS-SHARD-DAMAGED") from None
    except (OSError, MemoryError) as error:
        # MemoryError: the library maps the file, however large it says it is.
        reason = getattr(error, "strerror", None) or str(error)
        raise unreadable(path, reason, DOWNLOAD_AGAIN) from None
    header.pop("__metadata__", None)
    entries = (
        (name, entry["dtype"], entry["shape"], entry["data_offsets"])
        for name, entry in header.items()
    )
    return tensors_of(PlainName(path.name), start, entries)


# name, dtype, shape, and the two offsets from the end of the header
HeaderEntry = tuple[str, str, Sequence[int], Sequence[int]]


def tensors_of(
    shard: PlainName, start: int, entries: Iterable[HeaderEntry]
) -> dict[str, TensorInfo]:
    """Returns the tensors of a shard by name, in the order of their bytes.

    `start`: file offset at which the data begin.
    """
    tensors = {}
    for name, dtype, shape, (first, end) in sorted(entries, key=itemgetter(3)):
        tensors[name] = TensorInfo(name, dtype, tuple(shape), shard, start + first, start + end)
    return tensors


def _missing_shard(path: Path) -> TrtspecError:
    """Returns the error for a shard that is absent or still being downloaded."""
    name = path.name
    directory = path.parent
    unfinished = downloads_in(directory, name)
    if unfinished:
        state = f"is still being downloaded ({unfinished[0]} is there)"
        message = f"shard {name} of {directory} {state}"
        remedy = "wait for the download to end, or start it again"
        return TrtspecError(message, remedy, "TS-SHARD-PARTIAL")
    message = f"shard {name} is missing in {directory}"
    return TrtspecError(message, DOWNLOAD_AGAIN, "TS-SHARD-MISSING")


def downloads_in(directory: Path, shard: str) -> list[str]:
    """Returns the names of files that show an unfinished download of a shard.

    The names are the shard's name with a tool's suffix, and unfinished files in the hub's own
    folders. The hub's unfinished files have other names, so they may be of any shard.
    """
    paths = [directory / f"{shard}{suffix}" for suffix in DOWNLOAD_SUFFIXES]
    folders = [directory / ".cache" / "huggingface" / "download"]
    if directory.parent.name == "snapshots":
        folders.append(directory.parent.parent / "blobs")
    for folder in folders:
        if folder.is_dir():
            paths += sorted(folder.glob("*.incomplete"))
    return [path.name for path in paths if path.is_file()]


def weight_map(path: Path) -> dict[str, PlainName] | None:
    """Returns the shard of each tensor as the index states it. None without an index.

    Raises TrtspecError if the index has no such map, or maps a tensor to something other than a
    file name.
    """
    index = path / INDEX_NAME
    if not index.is_file():
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TrtspecError(f"{index} has no weight_map", DOWNLOAD_AGAIN, "TS-INDEX-MALFORMED")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        message = f"{index} maps a tensor to something other than a file name"
        raise TrtspecError(message, DOWNLOAD_AGAIN, "TS-INDEX-MALFORMED")
    shards = {shard: plain_name(shard, str(index)) for shard in set(weight_map.values())}
    return {name: shards[shard] for name, shard in weight_map.items()}


def _loose_shards(path: Path) -> tuple[PlainName, ...]:
    """Returns the names of the shards of a directory without an index.

    Raises TrtspecError if a number in a series is missing, or if the directory has no safetensors
    file.
    """
    if (path / "model.safetensors").is_file():
        return (PlainName("model.safetensors"),)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    shards = tuple(plain_name(name, str(path)) for name in names)
    numbered = list(filter(None, map(NUMBERED.fullmatch, shards)))
    # Only the names show that a shard is missing, because no index lists them.
    if numbered:
        stem, first_number, count = numbered[0].groups()
        digits = len(first_number)
        for number in range(1, min(int(count), MAX_SHARDS) + 1):
            name = f"{stem}{number:0{digits}d}-of-{count}.safetensors"
            if name not in shards:
                raise _missing_shard(path / name)
    if shards:
        return shards
    pickles: list[str] = []
    for pattern in ("*.bin", "*.pt", "*.pth"):
        pickles += (file.name for file in path.glob(pattern))
    if pickles:
        files_found = f"only as pickle files ({min(pickles)}), which run code when they are opened"
        message = f"{path} holds weights {files_found}"
        remedy = "convert them to safetensors if you trust them, then pass that directory"
        raise TrtspecError(message, remedy)
    message = f"{path} has no *.safetensors file"
    raise TrtspecError(message, "pass a directory that holds the weights")


def _all_headers(
    path: Path, shards: tuple[PlainName, ...], headers: Iterable[dict[str, TensorInfo]]
) -> dict[str, TensorInfo]:
    """Returns the tensors of all shards by name.

    Raises TrtspecError if two shards hold a tensor of the same name.
    """
    tensors: dict[str, TensorInfo] = {}
    for shard, header in zip(shards, headers, strict=True):
        for name, info in header.items():
            if name in tensors:
                message = f"{path}: {name} is in both {tensors[name].shard} and {shard}"
                raise TrtspecError(message, DOWNLOAD_AGAIN, "TS-SHARD-DUPLICATE")
            tensors[name] = info
    return tensors


def _check_index(path: Path, weight_map: Mapping[str, str], tensors: dict[str, TensorInfo]) -> None:
    """Raises TrtspecError if the index and the shards disagree about a tensor."""
    index = path / INDEX_NAME
    shards = {name: info.shard for name, info in tensors.items()}
    wrong = [name for name, shard in weight_map.items() if shards.get(name) != shard]
    if wrong:
        fault = f"lists {len(wrong)} tensors that are not in the named shard, first {wrong[0]}"
        raise TrtspecError(f"{index} {fault}", DOWNLOAD_AGAIN, "TS-INDEX-TENSOR")
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        fault = f"does not list {len(unlisted)} tensors that the shards hold, first {unlisted[0]}"
        raise TrtspecError(f"{index} {fault}", DOWNLOAD_AGAIN, "TS-INDEX-UNLISTED")


@dataclass
class ShardReader:
    """Reader of tensors from shard files, which stay open after their first use.

    It reads files instead of mapping them into memory, so memory does not grow with the size of a
    shard. If a file shrinks meanwhile, the reader reports an error, where a memory map would crash.

    directory: folder of the shard files.
    """

    directory: Path
    _files: dict[str, int] = field(default_factory=dict, init=False)

    def read_bytes(self, info: TensorInfo, begin: int, target: memoryview) -> None:
        """Fills `target` with bytes of the tensor, starting at the file offset `begin`.

        Raises TrtspecError if the file cannot be read or ends too early.
        """
        file = self._open(info.shard)
        path = self.directory / info.shard
        while target:
            try:
                # Linux reads at most 2 GiB at once.
                count = os.preadv(file, [target[: 1 << 30]], begin)
            except OSError as error:
                message = f"cannot read {path}: {error.strerror}"
                raise TrtspecError(message, "check the disk it lies on") from error
            if not count:
                message = f"shard {path} ends before {info.name} does"
                remedy = "download it again, because the file changed while it was read"
                raise TrtspecError(message, remedy)
            target = target[count:]
            begin += count

    def pieces(self, info: TensorInfo, size: int) -> Iterator[memoryview]:
        """Yields the tensor's bytes in chunks of `size`. The last chunk may be shorter.

        All chunks share a buffer, so each overwrites the chunk before it.
        """
        buffer = memoryview(bytearray(min(size, info.nbytes)))
        for begin in range(info.begin, info.end, size):
            chunk = buffer[: info.end - begin]
            self.read_bytes(info, begin, chunk)
            yield chunk

    def _open(self, shard: str) -> int:
        """Returns the file descriptor of a shard, which is opened at its first use."""
        if shard not in self._files:
            path = self.directory / shard
            try:
                with open_regular(path, DOWNLOAD_AGAIN) as stream:
                    file = os.dup(stream.fileno())  # the `with` closes the other one
            except FileNotFoundError:
                raise _missing_shard(path) from None
            if self._files.setdefault(shard, file) != file:
                # Another thread opened the shard first.
                os.close(file)
        return self._files[shard]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all shard files. The next read opens them again."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def same_bytes(
    checkpoint: Checkpoint, info: TensorInfo, other: Checkpoint, other_info: TensorInfo
) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if (info.dtype, info.shape) != (other_info.dtype, other_info.shape):
        return False
    with ShardReader(checkpoint.path) as reader, ShardReader(other.path) as other_reader:
        chunks = reader.pieces(info, PIECE)
        other_chunks = other_reader.pieces(other_info, PIECE)
        pairs = zip(chunks, other_chunks, strict=True)
        return all(bytes(chunk) == bytes(other_chunk) for chunk, other_chunk in pairs)
