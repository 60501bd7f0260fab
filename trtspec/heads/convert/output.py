"""The directory of a converted head: what may stand in its way, and how it appears whole or not at all."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trtspec.checkpoint.heads.values import EXPONENTS, count_not_finite, not_finite
from trtspec.checkpoint.writer import ShardFile
from trtspec.errors import CheckFailed, UsageError
from trtspec.heads.convert.tensors import OutputTensor, pieces, readers
from trtspec.report import fsync_directory, refuse_overwrite, write_atomic, write_json

OWN_FILES = ("config.json", "model.safetensors", "provenance.json", "README.md", "LICENSE")
MARGIN = 1 << 20  # bytes, for all but the tensors
Progress = Callable[[int, int], None]


def check_output(output: Path, source: Path, force: bool) -> None:
    """Raises UsageError where writing would overwrite, or cannot succeed; with `force`, what `trtspec` wrote may be
    replaced and nothing else."""
    if output.resolve() == source.resolve() or output.resolve() in source.resolve().parents:
        raise UsageError(f"{output} is, or holds, the head that is converted", "choose another --output")
    refuse_overwrite(output, force)
    parent = _existing_parent(output)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{output} cannot be written: no permission to write in {parent}", "choose another --output")
    strangers = [file.name for file in output.iterdir() if file.name not in OWN_FILES] if output.is_dir() else []
    if strangers:
        raise UsageError(
            f"{output} holds more than a head of trtspec's ({sorted(strangers)[0]}), so --force does not replace it",
            "choose another --output, or remove the directory yourself",
        )


def check_room(output: Path, size: int) -> None:
    """Raises UsageError where the file system has less than the head will take."""
    parent = _existing_parent(output)
    free = shutil.disk_usage(parent).free
    if free < size + MARGIN:
        raise UsageError(
            f"{output} needs {size:,} bytes, and {parent} has {free:,} free", "make room, or choose another --output"
        )


def _existing_parent(output: Path) -> Path:
    return next(parent for parent in output.resolve().parents if parent.exists())


def write_output(
    output: Path,
    entries: dict[str, OutputTensor],
    config: dict[str, Any],
    licences: list[Path],
    describe: Callable[[dict[str, Any]], tuple[dict[str, Any], str]],
    progress: Progress | None,
) -> None:
    """Writes everything to a directory beside `output` that takes its name when it is complete. `describe` makes
    provenance.json and README.md from the digests of the tensors."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.parent.resolve() / f".{output.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        digests = write_tensors(partial / "model.safetensors", entries, progress)
        record, card = describe(digests)
        write_json(partial / "provenance.json", record)
        write_atomic(partial / "README.md", card)
        for licence in licences:
            write_atomic(partial / licence.name, licence.read_bytes())
        write_json(partial / "config.json", config)
        _swap(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _swap(partial: Path, output: Path) -> None:
    """Renames `partial` to `output`; what was there is set aside first and removed last."""
    old = partial.with_suffix(".old")
    if output.exists():
        os.rename(output, old)
    os.rename(partial, output)
    fsync_directory(output.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_tensors(
    path: Path, entries: dict[str, OutputTensor], progress: Callable[[int, int], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Writes model.safetensors and returns, for each tensor, its source and the SHA-256 of its bytes.

    Every float that passes is looked at: raises CheckFailed for NaN and infinity.
    """
    layout = {name: (entry.dtype, entry.shape) for name, entry in sorted(entries.items())}
    shard = ShardFile(path, layout, {"format": "pt"})
    total, done, record = shard.size, 0, dict[str, dict[str, Any]]()
    try:
        with readers(*entries.values()) as opened:
            for name, entry in entries.items():
                digest, bad = hashlib.sha256(), 0

                def passing(entry: OutputTensor = entry, digest: Any = digest) -> Iterator[memoryview]:
                    nonlocal bad, done
                    for piece in pieces(entry, opened):
                        digest.update(piece)
                        bad += count_not_finite(piece, entry.dtype) if entry.dtype in EXPONENTS else 0
                        done += len(piece)
                        yield piece
                        if progress is not None:
                            progress(done, total)

                shard.write_chunks(name, passing())
                if bad:
                    problem = not_finite(name, bad, math.prod(entry.shape))
                    raise CheckFailed(f"[{problem.code}] {name}: {problem.message}", problem.remedy)
                record[name] = {"source": entry.info.name if entry.info else None, "sha256": digest.hexdigest()}
        shard.finish()
    except BaseException:
        shard.abandon()
        raise
    return record
