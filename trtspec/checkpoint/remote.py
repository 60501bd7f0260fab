"""The hub: what is fetched into its cache, and a checkpoint there by its headers.

Of such a checkpoint the small files come into the cache, and of each shard the header is read, by ranged reads. For a
terabyte of weights that is a few megabytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trtspec import machine
from trtspec.checkpoint.headers import HF_QUANT_NAME, INDEX_NAME, Checkpoint, TensorInfo, tensors_of
from trtspec.checkpoint.published import similar_id
from trtspec.errors import MissingDependency, TrtspecError
from trtspec.foreign import HubId, PlainName, plain_name, user_path

METADATA_PATTERNS = ["config.json", HF_QUANT_NAME]
SMALL_PATTERNS = [
    "*.json",
    "*.jinja",
    "*.py",
    "tiktoken.model",
    "LICENSE*",
    "NOTICE*",
    "THIRD_PARTY*",
]
CHECKPOINT_PATTERNS = [*SMALL_PATTERNS, "*.safetensors"]
AT_ONCE = 8  # connections
TIMEOUT = 60.0
Result = TypeVar("Result")


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
        from concurrent.futures import ThreadPoolExecutor  # here, because it loads logging

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


def download(hub_id: HubId, patterns: list[str]) -> Path:
    """Fetches the files of these patterns into the hub's own cache. Returns the directory of the snapshot."""
    from huggingface_hub import snapshot_download

    require_online(hub_id)
    fetch = partial(
        snapshot_download, hub_id.name, revision=hub_id.revision, allow_patterns=patterns
    )
    return Path(hub_errors(hub_id, fetch))


def is_online() -> bool:
    """Whether the hub may be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() not in ("1", "true", "yes", "on")


def require_online(hub_id: HubId) -> None:
    if not is_online():
        raise MissingDependency(
            f"{hub_id} is not in the hub cache and HF_HUB_OFFLINE is set",
            _suggest(hub_id, f"unset it and {ELSEWHERE}"),
        )


# what is wrong with a repository by the hub's error or status, and what to do
ELSEWHERE = "run `{download}`, or pass the directory of a copy that was downloaded elsewhere"
LOGIN = "run `hf auth login` with an account that may read it"
FAILURES = {
    "GatedRepoError": ("is gated", f"accept its licence on the hub, then {LOGIN}"),
    "RepositoryNotFoundError": ("is not on the hub, or is private", f"check the id, or {LOGIN}"),
    "RevisionNotFoundError": ("is no commit, tag or branch on the hub", "write a whole commit"),
    401: ("is refused by the hub (HTTP 401)", LOGIN),
    403: ("is refused by the hub (HTTP 403)", LOGIN),
    None: (
        "is not on this machine, and the hub does not answer",
        ELSEWHERE,
    ),
}


def hub_errors(hub_id: HubId, ask: Callable[[], Result]) -> Result:
    """What `ask` gets from the hub. Messages never repeat the library's text: it may hold a token."""
    try:
        return ask()
    except TrtspecError:
        raise
    except Exception as error:  # no network, full disk, hub errors: whatever the transport raised
        kind = type(error).__name__
        status = getattr(getattr(error, "response", None), "status_code", None)
        if kind == "SafetensorsParsingError":
            message = f"{hub_id} holds a damaged shard: {error}"
            raise TrtspecError(message, "tell its publisher", "TS-SHARD-DAMAGED") from None
        later = (f"could not be fetched (HTTP {status})", "try again later, or pass a directory")
        message, remedy = FAILURES.get(kind) or FAILURES.get(status, later)
        raise TrtspecError(f"{hub_id} {message}", _suggest(hub_id, remedy)) from None


def _suggest(hub_id: HubId, remedy: str) -> str:
    close, remedy = similar_id(hub_id.name), remedy.format(download=hub_id.download)
    if not close and "k2" not in hub_id.name.casefold():
        return f"by its name it is of another family; trtspec takes Kimi-K2. Otherwise {remedy}"
    return f"did you mean {close}? Otherwise {remedy}" if close else remedy


def cache_directory() -> Path:
    """Where huggingface_hub keeps repositories: HF_HUB_CACHE, else hub/ under HF_HOME, else under the user's cache."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return user_path(os.path.expandvars(named))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return user_path(os.path.expandvars(home)) / "hub"
