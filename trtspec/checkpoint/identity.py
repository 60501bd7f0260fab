"""Computes the fingerprint of a checkpoint for journals, scale files and hidden-state dumps.

The fingerprint covers the config, the names, dtypes, shapes and offsets of the tensors, and the
size of each shard. It also covers the first bytes of two tensors of each class, so it changes after
a fine-tune of one class. Computing it reads less than a megabyte of a terabyte. Paths and times do
not change it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, TypedDict

from trtspec.checkpoint.headers import Checkpoint, TensorInfo, read_json
from trtspec.errors import TrtspecError
from trtspec.files import read_object
from trtspec.foreign import PlainName

SHA256 = re.compile(r"[0-9a-f]{64}")
NUMBER = re.compile(r"\d+")  # of a layer or an expert in a tensor's name
SAMPLE_BYTES = 1 << 12  # of each tensor in the sample
# Keys of config.json that do not describe the model.
VOLATILE = {"_name_or_path", "transformers_version", "auto_map"}
# names of the digests that do not depend on the distribution of tensors over shards, with the words
# for messages
MODEL = {
    "config": "the config",
    "tensors": "tensor names, dtypes or shapes",
    "sample": "the weights",
}


class Identity(TypedDict):
    """Digests of a checkpoint by the part that they cover, and the size in bytes of each shard."""

    config: str
    tensors: str
    sample: str
    places: str
    shards: dict[PlainName, int]


def identity(checkpoint: Checkpoint) -> Identity:
    """Returns the digests of a checkpoint, by the part that they cover, and the size of each shard.

    `places` and `shards` depend on how tensors are distributed over shards, the others do not.
    """
    config = {key: value for key, value in checkpoint.config.items() if key not in VOLATILE}
    infos = sorted(checkpoint.tensors.values(), key=lambda info: info.name)
    layouts = [(info.name, info.dtype, info.shape) for info in infos]
    places = [(info.name, info.shard, info.begin) for info in infos]
    return {
        "config": _digest(json.dumps(config, sort_keys=True)),
        "tensors": _digest(repr(layouts)),
        "sample": _sample_digest(checkpoint, infos),
        "places": _digest(repr(places)),
        "shards": checkpoint.shard_bytes,
    }


def _sample_digest(checkpoint: Checkpoint, infos: list[TensorInfo]) -> str:
    """Returns the digest of the first bytes of the first and the last tensor of each class.

    A class is all tensors whose names differ only in numbers. `infos` must be in order of names.
    """
    classes: dict[str, list[TensorInfo]] = {}
    for info in infos:
        classes.setdefault(NUMBER.sub("", info.name), []).append(info)
    sample = hashlib.sha256()
    for members in classes.values():
        for info in (members[0], members[-1]):
            size = min(SAMPLE_BYTES, info.nbytes)
            sample.update(checkpoint.bytes_at(info.shard, info.begin, size))
    return sample.hexdigest()


def _digest(text: str) -> str:
    """Returns the SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def identity_digest(directory: Path) -> str:
    """Returns one SHA-256 over everything that `identity` covers."""
    return _digest(json.dumps(identity(Checkpoint.open(directory)), sort_keys=True))


def recorded(path: Path) -> dict[str, Any]:
    """Reads provenance.json of a checkpoint. {} if it is absent or cannot be read."""
    try:
        return read_object(path / "provenance.json")
    except (OSError, TrtspecError):
        return {}


def recorded_hashes(directory: Path) -> dict[str, str]:
    """Returns the SHA-256 of each weight file that has a recorded one, by file name.

    The hub cache has the hash as the name of the blob that a file links to, and `hf download
    --local-dir` writes it to its metadata. A hash in provenance.json has priority.
    """
    hashes: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        file_name = path.name
        if path.is_symlink():
            blob = os.path.basename(os.readlink(path))
            if SHA256.fullmatch(blob):
                hashes[file_name] = blob
        metadata = directory / ".cache" / "huggingface" / "download" / f"{file_name}.metadata"
        if metadata.is_file():
            words = metadata.read_text(encoding="utf-8", errors="replace").split()
            if len(words) > 1 and SHA256.fullmatch(words[1]):
                hashes[file_name] = words[1]
    provenance = directory / "provenance.json"
    if provenance.is_file():
        shards = read_json(provenance).get("shards")
        if isinstance(shards, dict):
            for name, digest in shards.items():
                if isinstance(digest, str) and SHA256.fullmatch(digest):
                    hashes[name] = digest
    return hashes
