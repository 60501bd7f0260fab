"""The output directory of a conversion: whose it is, what may be replaced in it, and whether the disk has room."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.journal import recorded_keys
from trtspec.errors import TrtspecError, UsageError
from trtspec.quant.conversion import Conversion
from trtspec.quant.export_files import REPLACED, carried_files
from trtspec.report import existing, file_sha256, refuse_overwrite

JOURNAL_NAME = ".trtspec-quantize.jsonl"
SPARE_BYTES = 64 << 20  # configs, tokenizer and headers
JOURNALS = ".trtspec-quantize*.jsonl"
OWN_PREFIX = ".trtspec-"
TEMPORARY = (".partial", ".tmp")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
MOST_NAMES = 5  # of files that a message lists


def source_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Which source the journal was begun with, from headers and sizes. Times are left out: another mount of the same
    files has others, and what has been converted is compared by content."""
    names = hashlib.sha256(repr(sorted(checkpoint.tensors.items())).encode()).hexdigest()
    config = file_sha256(checkpoint.path / "config.json")
    return {"config": config, "tensors": names, "shards": checkpoint.shard_bytes}


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Whatever the disk refuses is one message; what is finished is kept."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        remedy = "free space on that disk, then run the command again: finished shards are kept"
        raise TrtspecError(f"cannot write {output}: {error.strerror}", remedy) from error


def check_output(conversion: Conversion, journal: str, *, restart: bool, force: bool) -> bool:
    """Whether an earlier run is resumed in `conversion.output`; reads only, so a dry run does it too.

    Raises UsageError where the directory holds what no conversion of ours wrote, TrtspecError where there is no room.
    """
    output = conversion.output
    begun = (output / journal).exists()
    if not any(output.glob(JOURNALS)):
        _refuse_foreign(conversion, force)
    refuse_strays(conversion)
    _check_space(conversion)
    return begun and not restart


def refuse_strays(conversion: Conversion) -> None:
    """Weights that no conversion wrote would be taken for the checkpoint's."""
    present = {path.name for path in conversion.output.glob("*.safetensors")}
    if strays := sorted(present - _ours(conversion)):
        raise UsageError(
            f"{conversion.output} also holds {_listed(strays)}, which a loader would take for part of the checkpoint",
            "move it away, or choose another --output",
        )


def claim_output(conversion: Conversion, journal: str, *, restart: bool, force: bool) -> bool:
    """Makes the output directory ours, or says why it cannot be. True when a new conversion begins there."""
    output = conversion.output
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f"{OWN_PREFIX}{os.getpid()}.partial"
        probe.touch()
        probe.unlink(missing_ok=True)  # another run that begins there may have tidied up
    except OSError as error:
        raise TrtspecError(f"cannot write {output}: {error.strerror}", "choose another --output") from None
    return not check_output(conversion, journal, restart=restart, force=force)


def clear_output(conversion: Conversion, fresh: bool, whole: bool = True) -> None:
    """Removes what a killed run left half-written and, for a new conversion, the weights that were there before.

    Of an output that is not `whole` ours, only the files of our shards.
    """
    output = conversion.output
    patterns = [f".{plan.shard}.*.partial" for plan in conversion.plans]
    if whole:
        patterns = [".*.partial", *(f".{name}.*.tmp" for name in REPLACED)]
    names = ["config.json", "model.safetensors.index.json"] if fresh else []
    if fresh:
        mine = _ours(conversion) if whole else {plan.shard for plan in conversion.plans}
        names += [name for name in mine if name.endswith(".safetensors")]
    for path in (*(path for pattern in patterns for path in output.glob(pattern)), *(output / name for name in names)):
        path.unlink(missing_ok=True)


def _refuse_foreign(conversion: Conversion, force: bool) -> None:
    """Without a journal the directory must be empty, or --force given for what a finished conversion left."""
    output = conversion.output
    if not output.is_dir():
        refuse_overwrite(output, force)
        return
    present = [path.name for path in output.iterdir() if not _is_temporary(path.name)]
    if present and not force:
        raise UsageError(
            f"{output} already exists and would be overwritten", "pass --force, or choose another --output"
        )
    foreign = sorted(set(present) - (_ours(conversion) if _provenance(output) else set()))
    if foreign:
        raise UsageError(
            f"{output} holds {_listed(foreign)}, which `trtspec quantize` did not write",
            "move that away, or choose another --output; --force replaces only what quantize wrote",
        )


def _is_temporary(name: str) -> bool:
    """Of a run that begins beside this one, or of one that was killed."""
    return name.startswith(".") and (name.startswith(OWN_PREFIX) or name.endswith(TEMPORARY))


def _ours(conversion: Conversion) -> set[str]:
    """The names that this conversion, and earlier ones by their journals and provenance.json, write."""
    output, found = conversion.output, set(conversion.checkpoint.shards) | set(REPLACED)
    for journal in output.glob(JOURNALS):
        found |= recorded_keys(journal)
    provenance = _provenance(output)
    found |= set(provenance.get("shards", {})) | set(provenance.get("carried", []))
    return found | {path.name for path in carried_files(conversion.checkpoint.path)}


def _provenance(output: Path) -> dict[str, Any]:
    """provenance.json of an earlier conversion; empty where there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((output / "provenance.json").read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("command") == "quantize":
            return found
    return {}


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _check_space(conversion: Conversion) -> None:
    """Shards of ours that are there already make room for their successors."""
    output = conversion.output
    free = shutil.disk_usage(existing(output)).free
    present = sum(path.stat().st_size for plan in conversion.plans if (path := output / plan.shard).exists())
    if free + present < conversion.bytes_out + SPARE_BYTES:
        raise TrtspecError(
            f"{output} needs {conversion.bytes_out:,} bytes and its disk has {free:,} free",
            "free space, or choose an --output on another disk",
        )
