"""Fetches from the hub into its cache, and opens a checkpoint on the hub by its headers.

The small files of such a checkpoint come into the cache. Ranged reads fetch
the header of each shard. For a terabyte of weights that is a few megabytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trtspec import machine, report
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
CONNECTIONS = 8
TIMEOUT_S = 60.0
Result = TypeVar("Result")


def open_remote(hub_id: HubId) -> Checkpoint:
    """Opens a checkpoint on the hub as `Checkpoint.open` does, with `remote` set.

    `path` is the cache's snapshot with the small files. Raises TrtspecError if the checkpoint is
    absent, not public or damaged.
    """
    from huggingface_hub import HfApi

    require_online(hub_id)
    ask = partial(
        HfApi().model_info,
        hub_id.name,
        revision=hub_id.revision,
        files_metadata=True,
        timeout=TIMEOUT_S,
    )
    info = hub_errors(hub_id, ask)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    weights = {}
    for name, size in sizes.items():
        if name.endswith(".safetensors") and "/" not in name:
            weights[plain_name(name, str(hub_id))] = size
    commit = replace(hub_id, revision=str(info.sha))
    path = download(commit, SMALL_PATTERNS)
    if not weights and not (path / INDEX_NAME).is_file():
        raise TrtspecError(
            f"{hub_id} has no *.safetensors file", "pass a repository that holds the weights"
        )
    files = HubFiles(commit, weights)
    checkpoint = Checkpoint.open(path, names=tuple(sorted(weights)), headers=files.headers)
    return replace(checkpoint, remote=files)


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
        """The headers of all shards, in their order."""
        absent = [shard for shard in shards if shard not in self.sizes]
        if absent:
            message = f"shard {absent[0]} is missing in {self.hub_id}"
            raise TrtspecError(message, "ask its publisher", "TS-SHARD-MISSING")
        from concurrent.futures import ThreadPoolExecutor  # here, because it loads logging

        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="headers") as pool:
            return list(pool.map(self._header, shards))

    def _header(self, shard: PlainName) -> dict[str, TensorInfo]:
        from huggingface_hub import HfApi

        read = partial(
            HfApi().parse_safetensors_file_metadata,
            self.hub_id.name,
            shard,
            revision=self.hub_id.revision,
        )
        tensors = hub_errors(self.hub_id, partial(read, timeout=TIMEOUT_S)).tensors
        # The data fill the file.
        ends = [tensor.data_offsets[1] for tensor in tensors.values()]
        start = self.sizes[shard] - max(ends, default=0)
        entries = (
            (name, tensor.dtype, tensor.shape, tensor.data_offsets)
            for name, tensor in tensors.items()
        )
        return tensors_of(shard, start, entries)

    def bytes_at(self, shard: str, begin: int, size: int) -> bytes:
        """Reads `size` bytes from offset `begin` of a shard file."""
        from huggingface_hub import HfFileSystem

        read = partial(HfFileSystem().cat_file, f"{self.hub_id}/{shard}", begin, begin + size)
        return bytes(hub_errors(self.hub_id, read))


def download(hub_id: HubId, patterns: list[str]) -> Path:
    """Fetches the files of these patterns into the hub's own cache. Returns the snapshot's path."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    require_online(hub_id)
    if not report.wanted():
        disable_progress_bars()
    fetch = partial(
        snapshot_download, hub_id.name, revision=hub_id.revision, allow_patterns=patterns
    )
    return Path(hub_errors(hub_id, fetch))


def is_online() -> bool:
    """Whether the hub may be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() not in ("1", "true", "yes", "on")


def require_online(hub_id: HubId) -> None:
    if not is_online():
        message = f"{hub_id} is not in the hub cache and HF_HUB_OFFLINE is set"
        raise MissingDependency(message, _suggest(hub_id, f"unset it and {ELSEWHERE}"))


# The fault and the remedy by the hub's error or status.
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
    """Returns what `ask` gets from the hub.

    Raises TrtspecError. Messages never repeat the library's text, which may hold a token.
    """
    try:
        return ask()
    except TrtspecError:
        raise
    # No network, full disk, hub errors: whatever the transport raised.
    except Exception as error:
        name = type(error).__name__
        status = getattr(getattr(error, "response", None), "status_code", None)
        if name == "SafetensorsParsingError":
            message = f"{hub_id} holds a damaged shard: {error}"
            raise TrtspecError(message, "tell its publisher", "TS-SHARD-DAMAGED") from None
        later = (f"could not be fetched (HTTP {status})", "try again later, or pass a directory")
        message, remedy = FAILURES.get(name) or FAILURES.get(status, later)
        raise TrtspecError(f"{hub_id} {message}", _suggest(hub_id, remedy)) from None


def _suggest(hub_id: HubId, remedy: str) -> str:
    """The remedy, after the published id that is spelled nearly so."""
    close = similar_id(hub_id.name)
    remedy = remedy.format(download=hub_id.download)
    if close:
        return f"did you mean {close}? Otherwise {remedy}"
    if "k2" in hub_id.name.casefold():
        return remedy
    return f"by its name it is of another family; trtspec takes Kimi-K2. Otherwise {remedy}"


def cache_directory() -> Path:
    """The directory of huggingface_hub's repositories.

    It is HF_HUB_CACHE, else hub/ under HF_HOME, else hub/ under the user's cache.
    """
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return user_path(os.path.expandvars(named))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return user_path(os.path.expandvars(home)) / "hub"
