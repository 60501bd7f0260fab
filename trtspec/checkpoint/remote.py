"""A checkpoint on the hub by its headers: small files into the hub's cache, of each shard only the header, by ranged
reads. For a terabyte of weights that is a few megabytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trtspec import machine
from trtspec.checkpoint.headers import INDEX_NAME, Checkpoint, TensorInfo, tensors_of
from trtspec.checkpoint.hub import (
    SMALL_PATTERNS,
    cache_directory,
    cached_snapshot,
    download,
    hub_errors,
    hub_id_and_record,
    local_directory,
    require_online,
)
from trtspec.errors import TrtspecError
from trtspec.foreign import HubId, PlainName, plain_name

AT_ONCE = 8  # connections
TIMEOUT = 60.0


def open_headers(name_or_path: str) -> Checkpoint:
    """The checkpoint by its headers: a directory, a complete snapshot in the hub cache, else the hub itself, of which
    no weights are fetched."""
    hub_id, _ = hub_id_and_record(name_or_path)
    if hub_id is None:
        return Checkpoint.open(local_directory(name_or_path) or Path(name_or_path))
    path = cached_snapshot(hub_id, complete=True)
    return Checkpoint.open(path) if path is not None else open_remote(hub_id)


def open_remote(hub_id: HubId) -> Checkpoint:
    """The checkpoint as `Checkpoint.open` reads it, with `remote` set; `path` is the cache's snapshot with the small
    files. Raises TrtspecError for what is not there, not public or damaged."""
    from huggingface_hub import HfApi

    require_online(hub_id)
    ask = partial(
        HfApi().model_info,
        hub_id.name,
        revision=hub_id.revision,
        files_metadata=True,
        timeout=TIMEOUT,
    )
    info = hub_errors(hub_id, ask)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    weights = {
        plain_name(name, f"{hub_id}"): size
        for name, size in sizes.items()
        if name.endswith(".safetensors") and "/" not in name
    }
    commit = replace(hub_id, revision=str(info.sha))
    path = download(commit, SMALL_PATTERNS)
    if not weights and not (path / INDEX_NAME).is_file():
        raise TrtspecError(
            f"{hub_id} has no *.safetensors file", "pass a repository that holds the weights"
        )
    files = HubFiles(commit, weights)
    return replace(
        Checkpoint.open(path, names=tuple(sorted(weights)), headers=files.headers), remote=files
    )


@dataclass(frozen=True)
class HubFiles:
    """The weight files of a repository at one commit, with their sizes in bytes."""

    hub_id: HubId
    sizes: dict[PlainName, int]

    def to_dict(self) -> dict[str, Any]:
        """The `hub` object of JSON reports: what a download would take, and the room for it."""
        return {
            "id": self.hub_id.name,
            "revision": self.hub_id.revision,
            "weight_bytes": sum(self.sizes.values()),
            "cache_free_bytes": machine.free_disk(cache_directory()),
        }

    def headers(self, shards: tuple[PlainName, ...]) -> list[dict[str, TensorInfo]]:
        """Of all shards, in their order."""
        absent = [shard for shard in shards if shard not in self.sizes]
        if absent:
            message = f"shard {absent[0]} is missing in {self.hub_id}"
            raise TrtspecError(message, "ask its publisher", "TS-SHARD-MISSING")
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="headers") as pool:
            return list(pool.map(self._header, shards))

    def _header(self, shard: PlainName) -> dict[str, TensorInfo]:
        from huggingface_hub import HfApi

        read = partial(
            HfApi().parse_safetensors_file_metadata,
            self.hub_id.name,
            shard,
            revision=self.hub_id.revision,
        )
        tensors = hub_errors(self.hub_id, partial(read, timeout=TIMEOUT)).tensors
        data_bytes = max(
            (tensor.data_offsets[1] for tensor in tensors.values()), default=0
        )  # they fill the file
        places = ((name, one.dtype, one.shape, one.data_offsets) for name, one in tensors.items())
        return tensors_of(shard, self.sizes[shard] - data_bytes, places)

    def bytes_at(self, shard: str, begin: int, size: int) -> bytes:
        """Some bytes of a shard."""
        from huggingface_hub import HfFileSystem

        read = partial(HfFileSystem().cat_file, f"{self.hub_id}/{shard}", begin, begin + size)
        return bytes(hub_errors(self.hub_id, read))
