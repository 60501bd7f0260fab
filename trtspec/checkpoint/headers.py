"""What a checkpoint directory holds, from config.json and safetensors headers alone, and its tensors' bytes, read by
offset without torch.

A safetensors file is an 8-byte little-endian header length, a JSON header, then the data. The header gives, for each
tensor, a dtype code, a shape and byte offsets relative to the data (https://github.com/huggingface/safetensors#format).
Nothing is mapped, so memory is what the caller holds.
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
MOST_SHARDS = 100_000
PIECE = 1 << 20  # bytes read at a time; they stay in the cache while they are looked at
DOWNLOAD_AGAIN = "download the checkpoint again, or check the disk it lies on"
POINTER = b"version https://git-lfs"
DOWNLOAD_SUFFIXES = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".tmp")
NUMBERED = re.compile(r"(.*-)(\d+)-of-(\d+)\.safetensors")  # model-00007-of-000064, model-7-of-61

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
# safetensors code -> the bits without the sign, and the least of them that is not finite
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
    """One tensor's place. `dtype` is the safetensors code; `begin` and `end` are absolute byte offsets in the shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: PlainName
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class RangedFiles(Protocol):
    """Shard files that are read by ranges, and what was read of them for reports."""

    def bytes_at(self, shard: str, begin: int, size: int) -> bytes: ...

    def to_dict(self) -> dict[str, Any]: ...


Headers = Callable[[tuple[PlainName, ...]], Iterable[dict[str, TensorInfo]]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory, opened by its headers. `tensors` is ordered by shard, then by offset. Of a `remote` one
    the weights are on the hub, and `path` has the other files."""

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
        """Reads config.json, the index (or the single file, or every *.safetensors) and all shard headers. `names` and
        `headers` replace the shard files and their headers when these are elsewhere.

        Raises TrtspecError for a missing directory, config or shard, a pickle-only checkpoint, a truncated or corrupt
        shard, and an index that disagrees with the files.
        """
        path = Path(path)
        if not path.is_dir():
            raise TrtspecError(
                f"{path} is not a directory",
                "pass a checkpoint directory or a hub id such as org/name",
            )
        config = read_config(path / "config.json")
        quant_path = path / HF_QUANT_NAME
        hf_quant = read_config(quant_path) if quant_path.is_file() else None
        shard_of = weight_map(path)
        if shard_of is not None:
            names = tuple(sorted(set(shard_of.values())))
        shards = names or _loose_shards(path)
        tensors = _all_headers(
            path,
            shards,
            headers(shards) if headers else map(read_header, map(path.joinpath, shards)),
        )
        if shard_of is not None:
            _check_index(path, shard_of, tensors)
        return Checkpoint(path, config, hf_quant, tensors, shards)

    @property
    def shard_bytes(self) -> dict[PlainName, int]:
        """Size of each shard file: its tensors fill it to the end."""
        sizes = dict.fromkeys(self.shards, 0)
        for tensor in self.tensors.values():
            sizes[tensor.shard] = max(sizes[tensor.shard], tensor.end)
        return sizes

    def bytes_at(self, shard: str, begin: int, size: int) -> bytes:
        """Some bytes of a shard file, wherever it is."""
        if self.remote is not None:
            return self.remote.bytes_at(shard, begin, size)
        with open_regular(self.path / shard, DOWNLOAD_AGAIN) as stream:
            stream.seek(begin)
            return stream.read(size)


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object; raises TrtspecError naming the file when it is absent, not JSON or not an object."""
    try:
        return read_object(path, remedy=DOWNLOAD_AGAIN)
    except FileNotFoundError:
        inner = [*path.parent.glob(f"*/{path.name}"), *path.parent.glob(f"snapshots/*/{path.name}")]
        remedy = f"pass {listed(str(file.parent) for file in inner)}" if inner else ""
        raise TrtspecError(
            f"{path.parent} has no {path.name}",
            remedy or "pass the directory that holds config.json",
        ) from None


def read_config(path: Path) -> dict[str, Any]:
    """config.json or hf_quant_config.json; raises TrtspecError also where a key holds another kind of value than
    readers rely on."""
    return check_kinds(read_json(path), str(path))


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, in the order of their bytes. The library checks the header, but does not
    tell the offsets. Raises TrtspecError with a code for anything else at `path`."""
    from safetensors import (
        SafetensorError,
        safe_open,
    )  # here, because it loads numpy, and lint needs neither

    try:
        with open_regular(path, DOWNLOAD_AGAIN) as stream:
            if stream.read(len(POINTER)) == POINTER:
                message = f"{path} is a Git LFS pointer, a small text in place of the weights"
                remedy = "run `git lfs pull` there, or `hf download` the checkpoint"
                raise TrtspecError(message, remedy, "TS-SHARD-POINTER")
            with safe_open(path, "np"):
                pass
            stream.seek(0)
            start = 8 + struct.unpack("<Q", stream.read(8))[0]
            header = files.parse_json(
                stream.read(start - 8)
            )  # a name twice is damage, which the library lets pass
    except FileNotFoundError:
        raise _missing_shard(path) from None
    except (SafetensorError, ValueError) as error:
        message = f"{path} is truncated, damaged or no safetensors file ({path.stat().st_size:,} bytes): {error}"
        raise TrtspecError(message, DOWNLOAD_AGAIN, "TS-SHARD-DAMAGED") from None
    except (
        OSError,
        MemoryError,
    ) as error:  # MemoryError: the library maps the file, however large it says it is
        raise unreadable(
            path, getattr(error, "strerror", None) or str(error), DOWNLOAD_AGAIN
        ) from None
    header.pop("__metadata__", None)
    places = (
        (name, entry["dtype"], entry["shape"], entry["data_offsets"])
        for name, entry in header.items()
    )
    return tensors_of(PlainName(path.name), start, places)


Place = tuple[
    str, str, Sequence[int], Sequence[int]
]  # name, dtype, shape, offsets from the end of the header


def tensors_of(shard: PlainName, start: int, places: Iterable[Place]) -> dict[str, TensorInfo]:
    """The tensors of a shard whose data begin at `start`, in the order of their bytes."""
    ordered = sorted(places, key=itemgetter(3))
    return {
        name: TensorInfo(name, dtype, tuple(shape), shard, start + first, start + last)
        for name, dtype, shape, (first, last) in ordered
    }


def _missing_shard(path: Path) -> TrtspecError:
    """A shard that is not there, or not yet."""
    unfinished = downloads_in(path.parent, path.name)
    if unfinished:
        message = f"shard {path.name} of {path.parent} is still being downloaded ({unfinished[0]} is there)"
        return TrtspecError(
            message, "wait for the download to end, or start it again", "TS-SHARD-PARTIAL"
        )
    return TrtspecError(
        f"shard {path.name} is missing in {path.parent}", DOWNLOAD_AGAIN, "TS-SHARD-MISSING"
    )


def downloads_in(directory: Path, shard: str) -> list[str]:
    """Names of files that a download leaves while it runs: of this shard, or in the hub's own folders of any."""
    beside = [directory / f"{shard}{suffix}" for suffix in DOWNLOAD_SUFFIXES]
    folders = [directory / ".cache" / "huggingface" / "download"]
    folders += [directory.parent.parent / "blobs"] if directory.parent.name == "snapshots" else []
    hub = [
        path
        for folder in folders
        if folder.is_dir()
        for path in sorted(folder.glob("*.incomplete"))
    ]
    return [path.name for path in (*beside, *hub) if path.is_file()]


def weight_map(path: Path) -> dict[str, PlainName] | None:
    """Tensor name -> shard, as the index states it; None if there is no index."""
    index = path / INDEX_NAME
    if not index.is_file():
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TrtspecError(f"{index} has no weight_map", DOWNLOAD_AGAIN, "TS-INDEX-MALFORMED")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        message = f"{index} places a tensor in something else than a file name"
        raise TrtspecError(message, DOWNLOAD_AGAIN, "TS-INDEX-MALFORMED")
    shards = {shard: plain_name(shard, f"{index}") for shard in set(weight_map.values())}
    return {name: shards[shard] for name, shard in weight_map.items()}


def _loose_shards(path: Path) -> tuple[PlainName, ...]:
    if (path / "model.safetensors").is_file():
        return (PlainName("model.safetensors"),)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    found = tuple(plain_name(name, f"{path}") for name in names)
    if found:
        if numbered := next((match for name in found if (match := NUMBERED.fullmatch(name))), None):
            stem, first, count = numbered.groups()
            for number in range(1, min(int(count), MOST_SHARDS) + 1):
                name = f"{stem}{number:0{len(first)}d}-of-{count}.safetensors"
                if name not in found:
                    raise _missing_shard(path / name)
        return found
    pickles = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)
    )
    if pickles:
        raise TrtspecError(
            f"{path} holds weights only as pickle files ({pickles[0]}), which run code when they are opened",
            "convert them to safetensors where you trust them, then pass that directory",
        )
    raise TrtspecError(
        f"{path} has no *.safetensors file", "pass a directory that holds the weights"
    )


def _all_headers(
    path: Path, shards: tuple[PlainName, ...], headers: Iterable[dict[str, TensorInfo]]
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard, header in zip(shards, headers, strict=True):
        for name, info in header.items():
            if name in tensors:
                message = f"{path}: {name} is in both {tensors[name].shard} and {shard}"
                raise TrtspecError(message, DOWNLOAD_AGAIN, "TS-SHARD-DUPLICATE")
            tensors[name] = info
    return tensors


def _check_index(path: Path, weight_map: Mapping[str, str], tensors: dict[str, TensorInfo]) -> None:
    shards = {name: info.shard for name, info in tensors.items()}
    wrong = [name for name, shard in weight_map.items() if shards.get(name) != shard]
    unlisted = [name for name in tensors if name not in weight_map]
    if wrong:
        message = f"{path / INDEX_NAME} lists {len(wrong)} tensors that are not in the named shard, first {wrong[0]}"
        raise TrtspecError(message, DOWNLOAD_AGAIN, "TS-INDEX-TENSOR")
    if unlisted:
        message = f"{path / INDEX_NAME} does not list {len(unlisted)} tensors that the shards hold, first {unlisted[0]}"
        raise TrtspecError(message, DOWNLOAD_AGAIN, "TS-INDEX-UNLISTED")


@dataclass
class ShardReader:
    """Shard files are opened once and kept.

    Plain reads instead of a memory map: resident memory stays at the tensors in use whatever the shard size, and a
    file that shrank meanwhile is an error message, not a bus error.
    """

    directory: Path
    _files: dict[str, int] = field(default_factory=dict, init=False)

    def read_bytes(self, info: TensorInfo, begin: int, target: memoryview) -> None:
        """Fills `target` with the tensor's bytes from `begin` on, counted from the file's start as `info.begin` is."""
        file, offset, path = self._open(info.shard), begin, self.directory / info.shard
        while target:
            try:
                count = os.preadv(file, [target[: 1 << 30]], offset)
            except OSError as error:
                raise TrtspecError(
                    f"cannot read {path}: {error.strerror}", "check the disk it lies on"
                ) from error
            if not count:
                raise TrtspecError(
                    f"shard {path} ends before {info.name} does",
                    "the file changed while it was read; download it again",
                )
            target, offset = target[count:], offset + count

    def pieces(self, info: TensorInfo, size: int) -> Iterator[memoryview]:
        """The tensor's bytes in order, `size` at a time, through one reused buffer."""
        buffer = memoryview(bytearray(min(size, info.nbytes)))
        for first in range(info.begin, info.end, size):
            part = buffer[: info.end - first]
            self.read_bytes(info, first, part)
            yield part

    def _open(self, shard: str) -> int:
        if shard not in self._files:
            try:
                with open_regular(self.directory / shard, DOWNLOAD_AGAIN) as stream:
                    file = os.dup(stream.fileno())  # the `with` closes the other one
            except FileNotFoundError:
                raise _missing_shard(self.directory / shard) from None
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


def same_bytes(one: Checkpoint, ours: TensorInfo, other: Checkpoint, theirs: TensorInfo) -> bool:
    """Whether two tensors are equal byte for byte, read in pieces."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    with ShardReader(one.path) as a, ShardReader(other.path) as b:
        pairs = zip(a.pieces(ours, PIECE), b.pieces(theirs, PIECE), strict=True)
        return all(bytes(mine) == bytes(their) for mine, their in pairs)
