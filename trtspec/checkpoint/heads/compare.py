"""A converted head against the head it was made from: the same function, the same bytes?"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trtspec import files
from trtspec.checkpoint.headers import Checkpoint, TensorInfo
from trtspec.checkpoint.heads.read import read_head
from trtspec.checkpoint.heads.shapes import canonical_names
from trtspec.errors import Problem

PIECE = 1 << 20
STORAGE = ("dialect", "layer_prefix", "has_lm_head", "has_embed_tokens", "has_d2t")  # may differ between dialects
MAY_BE_ABSENT = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")  # rebuilt, or lent by the target


def compare_heads(derived: Checkpoint, source: Checkpoint) -> dict[str, Any]:
    """Counts and `problems`: every tensor that both hold byte by byte, and every field of the two records."""
    ours, theirs = canonical_names(derived.tensors), canonical_names(source.tensors)
    both = [name for name in ours if name in theirs]
    different = [name for name in both if not _same(derived, ours[name], source, theirs[name])]
    lost = [name for name in theirs if name not in ours and name not in MAY_BE_ABSENT]
    problems = [_problem(name, "its bytes are not those of the source") for name in different]
    problems += [_problem(name, "the source has it, the derived head does not") for name in lost]
    one, other = read_head(derived)[0], read_head(source)[0]
    for name in (field.name for field in fields(one) if field.name not in STORAGE):
        if name == "aux_layers" and None in (one.aux_layers, other.aux_layers):
            continue  # one of the two does not say
        if getattr(one, name) != getattr(other, name):
            problems.append(_problem(name, f"{getattr(one, name)} here, {getattr(other, name)} in the source"))
    return {
        "tensors": len(ours),
        "compared": len(both),
        "identical": len(both) - len(different),
        "added": sorted(set(ours) - set(theirs)),
        "absent": sorted(set(theirs) - set(ours)),
        "problems": problems,
    }


def _problem(where: str, what: str) -> Problem:
    remedy = "convert again from the source, or check which of the two is meant"
    return Problem("TS-HEAD-DIFFERS", "error", where, f"differs from the source: {what}", remedy)


def _same(one: Checkpoint, ours: TensorInfo, other: Checkpoint, theirs: TensorInfo) -> bool:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    with files.open_regular(one.path / ours.shard) as a, files.open_regular(other.path / theirs.shard) as b:
        a.seek(ours.begin)
        b.seek(theirs.begin)
        for begin in range(0, ours.nbytes, PIECE):
            size = min(PIECE, ours.nbytes - begin)
            if a.read(size) != b.read(size):
                return False
    return True
