"""The one fingerprint of a checkpoint: what a journal, a file of scales or dumped states belong to.

It takes the config, the tensors' names, types, shapes and places, the size of each shard, and the first bytes of two
tensors of each kind: a fine-tune of one kind is seen, and less than a megabyte of a terabyte is read. Neither paths nor
times count.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from trtspec.checkpoint.headers import Checkpoint, TensorInfo, read_json
from trtspec.errors import TrtspecError
from trtspec.files import read_object

SHA256 = re.compile(r"[0-9a-f]{64}")
NUMBER = re.compile(r"\d+")  # of a layer or an expert in a tensor's name
SAMPLE_BYTES = 1 << 12  # of a tensor
VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "auto_map",
}  # of config.json: says nothing about the model
MODEL = {
    "config": "the config",
    "tensors": "tensor names, dtypes or shapes",
    "sample": "the weights",
}


def identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Digests by name, and shard sizes. MODEL digests do not depend on how tensors are sharded."""
    config = {key: value for key, value in checkpoint.config.items() if key not in VOLATILE}
    infos = sorted(checkpoint.tensors.values(), key=lambda info: info.name)
    sample = hashlib.sha256()
    kinds: dict[str, list[TensorInfo]] = {}
    for info in infos:
        kinds.setdefault(NUMBER.sub("", info.name), []).append(info)
    for info in (info for kind in kinds.values() for info in (kind[0], kind[-1])):
        sample.update(checkpoint.bytes_at(info.shard, info.begin, min(SAMPLE_BYTES, info.nbytes)))
    return {
        "config": _digest(json.dumps(config, sort_keys=True)),
        "tensors": _digest(repr([(info.name, info.dtype, info.shape) for info in infos])),
        "sample": sample.hexdigest(),
        "places": _digest(repr([(info.name, info.shard, info.begin) for info in infos])),
        "shards": checkpoint.shard_bytes,
    }


def identity_digest(directory: Path) -> str:
    """One digest of all that `identity` takes."""
    return _digest(json.dumps(identity(Checkpoint.open(directory)), sort_keys=True))


def recorded(path: Path) -> dict[str, Any]:
    """provenance.json beside a checkpoint; {} when there is none or it cannot be read."""
    try:
        return read_object(path / "provenance.json")
    except (OSError, TrtspecError):
        return {}


def recorded_hashes(directory: Path) -> dict[str, str]:
    """File name -> SHA-256, of the weight files for which one is recorded: by the hub cache, whose files link to blobs
    named by their hash, by the metadata that `hf download --local-dir` leaves, or in provenance.json, which wins."""
    files = sorted(directory.glob("*.safetensors"))
    blobs = {path.name: os.path.basename(os.readlink(path)) for path in files if path.is_symlink()}
    found = {name: blob for name, blob in blobs.items() if SHA256.fullmatch(blob)}
    for path in files:
        metadata = directory / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
        lines = (
            metadata.read_text(encoding="utf-8", errors="replace").split()
            if metadata.is_file()
            else []
        )
        if len(lines) > 1 and SHA256.fullmatch(lines[1]):
            found[path.name] = lines[1]
    if (directory / "provenance.json").is_file():
        shards = read_json(directory / "provenance.json").get("shards")
        for name, digest in (shards if isinstance(shards, dict) else {}).items():
            if isinstance(digest, str) and SHA256.fullmatch(digest):
                found[name] = digest
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
