"""Is every byte of a checkpoint as its maker or the hub recorded it? SHA-256 of the weight files against

- provenance.json, where trtspec made it (`shards`),
- the hub cache, whose files link to blobs named by their hash,
- the metadata that `hf download --local-dir` leaves for each file.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trtspec.checkpoint.headers import DOWNLOAD_AGAIN, read_json
from trtspec.errors import Problem
from trtspec.report import file_sha256

SHA256 = re.compile(r"[0-9a-f]{64}")


def recorded_hashes(directory: Path) -> dict[str, str]:
    """File name -> SHA-256, of the weight files for which one is recorded; provenance.json wins."""
    files = sorted(directory.glob("*.safetensors"))
    blobs = {path.name: os.path.basename(os.readlink(path)) for path in files if path.is_symlink()}
    found = {name: blob for name, blob in blobs.items() if SHA256.fullmatch(blob)}
    for path in files:
        metadata = directory / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
        lines = metadata.read_text(encoding="utf-8", errors="replace").split() if metadata.is_file() else []
        if len(lines) > 1 and SHA256.fullmatch(lines[1]):
            found[path.name] = lines[1]
    if (directory / "provenance.json").is_file():
        shards = read_json(directory / "provenance.json").get("shards")
        for name, digest in (shards if isinstance(shards, dict) else {}).items():
            if isinstance(digest, str) and SHA256.fullmatch(digest):
                found[name] = digest
    return found


def hash_problems(directory: Path, shards: tuple[str, ...]) -> tuple[int, list[Problem]]:
    """How many of `shards` are what was recorded, and what is wrong with the others. Reads every byte."""
    recorded = recorded_hashes(directory)
    known = [shard for shard in shards if shard in recorded]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        same = list(pool.map(lambda shard: file_sha256(directory / shard) == recorded[shard], known))
    problems = []
    for shard, whole in zip(known, same, strict=True):
        if not whole:
            message = "its SHA-256 is not the recorded one: at least one byte changed"
            problems.append(Problem("TS-HASH-DIFFERS", "error", shard, message, DOWNLOAD_AGAIN))
    unknown = [shard for shard in shards if shard not in recorded]
    if unknown:
        message = f"no hash is recorded for {len(unknown)} of {len(shards)} weight files, first {unknown[0]}"
        remedy = "compare with the publisher's list; `hf download` and `trtspec quantize` record them"
        problems.append(Problem("TS-HASH-UNKNOWN", "warning", unknown[0], message, remedy))
    lost = sorted(name for name in recorded if name not in shards)
    if lost:
        message = f"a hash is recorded for {len(lost)} files that are not part of the checkpoint, first {lost[0]}"
        problems.append(Problem("TS-HASH-LOST", "error", lost[0], message, DOWNLOAD_AGAIN))
    return sum(same), problems
