"""A checkpoint on the hub by its headers: small files into the hub's cache, of each shard only the header, by ranged
reads. For a terabyte of weights that is a few megabytes."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec import machine
from trtspec.checkpoint.headers import INDEX_NAME, Checkpoint, TensorInfo, data_start, header_tensors
from trtspec.checkpoint.hub import (
    SMALL_PATTERNS,
    cache_directory,
    cached_snapshot,
    hub_errors,
    hub_id_and_entry,
    local_directory,
    require_online,
)
from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    import httpx

FIRST_READ = 1 << 16  # bytes; the headers of small shards end within it
AT_ONCE = 8  # connections
TIMEOUT = 60.0
DOWNLOAD = "run `hf download` and pass the directory"
TOTAL = re.compile(r"bytes \d+-\d+/(\d+)")


def open_headers(name_or_path: str) -> Checkpoint:
    """The checkpoint by its headers: a directory, a whole snapshot in the hub cache, else the hub itself, of which no
    weights are fetched."""
    hub_id, _ = hub_id_and_entry(name_or_path)
    path = cached_snapshot(hub_id, complete=True) if hub_id else local_directory(name_or_path)
    return Checkpoint.open(path) if path is not None else open_remote(hub_id or name_or_path)


def open_remote(hub_id: str) -> Checkpoint:
    """The checkpoint as `Checkpoint.open` reads it, with `remote` set; `path` is the cache's snapshot with the small
    files. Raises TrtspecError for what is not there, not public or not readable by ranges."""
    from huggingface_hub import HfApi, snapshot_download

    require_online(hub_id)
    info = hub_errors(hub_id, lambda: HfApi().model_info(hub_id, files_metadata=True, timeout=TIMEOUT))
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    weights = {name: size for name, size in sizes.items() if name.endswith(".safetensors") and "/" not in name}
    snapshot = partial(snapshot_download, hub_id, revision=info.sha, allow_patterns=SMALL_PATTERNS)
    path = Path(hub_errors(hub_id, snapshot))
    small = sum(size for name, size in sizes.items() if (path / name).is_file() and name not in weights)
    files = HubFiles(hub_id, str(info.sha), weights, small)
    if not weights and not (path / INDEX_NAME).is_file():
        raise TrtspecError(f"{hub_id} has no *.safetensors file", "pass a repository that holds the weights")
    return replace(Checkpoint.open(path, names=tuple(sorted(weights)), headers=partial(_headers, files)), remote=files)


def _headers(files: HubFiles, shards: tuple[str, ...]) -> list[dict[str, TensorInfo]]:
    """Of all shards, in their order."""
    absent = [shard for shard in shards if shard not in files.sizes]
    if absent:
        raise TrtspecError(f"shard {absent[0]} is missing in {files.hub_id}", "ask its publisher", "TS-SHARD-MISSING")
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="headers") as pool:
        return list(pool.map(files.header, shards))


@dataclass
class HubFiles:
    """A repository at one commit, read by ranges. `read` counts the bytes of weight files that were fetched, `small`
    those of the small files, `total` what a download of the weights would take."""

    hub_id: str
    revision: str
    sizes: dict[str, int]
    small: int
    read: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    def to_dict(self) -> dict[str, Any]:
        """The `hub` object of JSON reports; the last figure is the room for a download."""
        return {
            "id": self.hub_id,
            "revision": self.revision,
            "bytes_read": self.read + self.small,
            "weight_bytes_read": self.read,
            "weight_bytes": self.total,
            "cache_free_bytes": machine.free_disk(cache_directory()),
        }

    def header(self, shard: str) -> dict[str, TensorInfo]:
        """`headers.read_header` of a shard that is not here."""
        size, where = self.sizes[shard], Path(self.hub_id) / shard
        first = self.bytes_at(shard, 0, min(FIRST_READ, size))
        first += self.bytes_at(shard, len(first), max(data_start(first, size) - len(first), 0))
        return header_tensors(where, first, size)

    def bytes_at(self, shard: str, begin: int, size: int) -> bytes:
        """Some bytes of a shard. Raises TrtspecError where the server sends another range or the whole file."""
        if not size:
            return b""
        wanted = {"Range": f"bytes={begin}-{begin + size - 1}"}
        data = hub_errors(self.hub_id, partial(self._get, shard, wanted, size))
        with self.lock:
            self.read += len(data)
        return data

    def _get(self, shard: str, wanted: dict[str, str], size: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self.hub_id, shard, revision=self.revision)
        stream = get_session().stream
        with stream("GET", url, headers=build_hf_headers() | wanted, follow_redirects=True, timeout=TIMEOUT) as answer:
            hf_raise_for_status(answer)
            self._check_range(shard, answer)
            data: bytes = answer.read()
        if len(data) != size:
            raise TrtspecError(f"{self.hub_id}: {shard} came as {len(data)} bytes, asked for {size}", DOWNLOAD)
        return data

    def _check_range(self, shard: str, answer: httpx.Response) -> None:
        """Before the body is read, which may be a whole shard."""
        total = TOTAL.fullmatch(answer.headers.get("Content-Range", ""))
        if answer.status_code != 206 or total is None:
            text = f"the server of {self.hub_id} sends {shard} whole where a part of it was asked for"
            raise TrtspecError(text, DOWNLOAD)
        if int(total[1]) != self.sizes[shard]:
            text = f"{self.hub_id}: {shard} has {total[1]} bytes, its listing says {self.sizes[shard]}"
            raise TrtspecError(text, "run the command again: the repository may just have been changed")
