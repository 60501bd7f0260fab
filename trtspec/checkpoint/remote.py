"""Fetches files from the hub into its cache, and opens a checkpoint on the hub by its headers.

The small files of the checkpoint are downloaded to the cache. Ranged reads fetch the header of each
shard, which is a few megabytes for a terabyte of weights.
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

# patterns of file names: the two configs, all files but the weights, and all files
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
CONNECTIONS = 8  # headers that are fetched at the same time
TIMEOUT_S = 60.0  # of one request
Result = TypeVar("Result")


def open_remote(hub_id: HubId) -> Checkpoint:
    """Opens a checkpoint on the hub as `Checkpoint.open` does, with `remote` set.

    `path` of the result is the snapshot in the cache that holds the small files. Raises
    TrtspecError if the checkpoint is absent, not public or damaged.
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
        # Weights in folders belong to other variants of the model.
        if name.endswith(".safetensors") and "/" not in name:
            weights[plain_name(name, str(hub_id))] = size
    # All later requests name the commit, so that a push meanwhile does not mix versions.
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
    """Weight files of a repository on the hub at one commit.

    sizes: bytes of each file by its name.
    """

    hub_id: HubId
    sizes: dict[PlainName, int]

    def to_dict(self) -> dict[str, Any]:
        """Returns the `hub` object of JSON reports.

        It has id and revision, the bytes that a download would take, and the free bytes of the
        cache's disk.
        """
        return {
            "id": self.hub_id.name,
            "revision": self.hub_id.revision,
            "weight_bytes": sum(self.sizes.values()),
            "cache_free_bytes": machine.free_disk(cache_directory()),
        }

    def headers(self, shards: tuple[PlainName, ...]) -> list[dict[str, TensorInfo]]:
        """Returns the tensors of each shard by name, in the order of `shards`.

        Raises TrtspecError if a shard is missing.
        """
        absent = [shard for shard in shards if shard not in self.sizes]
        if absent:
            message = f"shard {absent[0]} is missing in {self.hub_id}"
            raise TrtspecError(message, "ask its publisher", "TS-SHARD-MISSING")
        from concurrent.futures import ThreadPoolExecutor  # Late, because it loads logging.

        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="headers") as pool:
            return list(pool.map(self._header, shards))

    def _header(self, shard: PlainName) -> dict[str, TensorInfo]:
        """Fetches the header of one shard. Returns its tensors by name."""
        from huggingface_hub import HfApi

        read = partial(
            HfApi().parse_safetensors_file_metadata,
            self.hub_id.name,
            shard,
            revision=self.hub_id.revision,
        )
        tensors = hub_errors(self.hub_id, partial(read, timeout=TIMEOUT_S)).tensors
        # The library does not return the header's length, but the data end with the file.
        ends = [tensor.data_offsets[1] for tensor in tensors.values()]
        start = self.sizes[shard] - max(ends, default=0)
        entries = (
            (name, tensor.dtype, tensor.shape, tensor.data_offsets)
            for name, tensor in tensors.items()
        )
        return tensors_of(shard, start, entries)

    def bytes_at(self, shard: str, begin: int, size: int) -> bytes:
        """Reads `size` bytes from offset `begin` of a shard on the hub."""
        from huggingface_hub import HfFileSystem

        read = partial(HfFileSystem().cat_file, f"{self.hub_id}/{shard}", begin, begin + size)
        return bytes(hub_errors(self.hub_id, read))


def download(hub_id: HubId, patterns: list[str]) -> Path:
    """Fetches the files that match `patterns` into the hub's cache and returns their directory."""
    from huggingface_hub import snapshot_download

    require_online(hub_id)
    fetch = partial(
        snapshot_download, hub_id.name, revision=hub_id.revision, allow_patterns=patterns
    )
    return Path(hub_errors(hub_id, fetch))


def is_online() -> bool:
    """Whether HF_HUB_OFFLINE allows requests to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() not in ("1", "true", "yes", "on")


def require_online(hub_id: HubId) -> None:
    """Raises MissingDependency if HF_HUB_OFFLINE forbids requests to the hub."""
    if not is_online():
        message = f"{hub_id} is not in the hub cache and HF_HUB_OFFLINE is set"
        raise MissingDependency(message, _suggest(hub_id, f"unset it and {ELSEWHERE}"))


# remedies, of which `{download}` is the command that fetches the checkpoint
ELSEWHERE = "run `{download}`, or pass the directory of a copy that was downloaded elsewhere"
LOGIN = "run `hf auth login` with an account that may read it"
# fault and remedy by the name of the hub's error or by the HTTP status, None for no answer
FAILURES = {
    "GatedRepoError": ("is gated", f"accept its licence on the hub, then {LOGIN}"),
    "RepositoryNotFoundError": ("is not on the hub, or is private", f"check the id, or {LOGIN}"),
    "RevisionNotFoundError": ("is not a commit, tag or branch on the hub", "write a whole commit"),
    401: ("is refused by the hub (HTTP 401)", LOGIN),
    403: ("is refused by the hub (HTTP 403)", LOGIN),
    None: (
        "is not on this machine, and the hub does not answer",
        ELSEWHERE,
    ),
}


def hub_errors(hub_id: HubId, ask: Callable[[], Result]) -> Result:
    """Returns the result of `ask`, which is a request to the hub.

    Raises TrtspecError if the request fails. The message does not repeat the library's text, which
    may hold a token.
    """
    try:
        return ask()
    except TrtspecError:
        raise
    # Every exception, because network, disk, hub and HTTP libraries raise unrelated types.
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
    """Returns the remedy after a hint at a wrong id.

    The hint is a published id with nearly the same spelling, or that the name lacks "K2".
    """
    close = similar_id(hub_id.name)
    remedy = remedy.format(download=hub_id.download)
    if close:
        return f"did you mean {close}? Otherwise {remedy}"
    if "k2" in hub_id.name.casefold():
        return remedy
    return f"its name lacks K2; trtspec supports only Kimi-K2. If it is one, {remedy}"


def cache_directory() -> Path:
    """Returns the directory in which huggingface_hub keeps repositories.

    HF_HUB_CACHE names it. Without this variable it is hub/ below HF_HOME or below the user's cache.
    """
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return user_path(os.path.expandvars(named))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return user_path(os.path.expandvars(home)) / "hub"
