"""What `inspect` finds: one checkpoint described, and one compared with its target or with its source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import Problem, UsageError

if TYPE_CHECKING:
    from trtspec.checkpoint.hub import Resolved

COMPARED = 64  # tensors that are compared with a source where nobody says how many


def compare(resolved: Resolved, other: Resolved, report: dict[str, Any], sample: int, modelopt: bool) -> dict[str, Any]:
    """The additional keys of --against; `problems` holds the old and the new ones."""
    if report["kind"] == "head" and other.kind == "target":
        return compare_pair(resolved, other, report)
    if report["kind"] != other.kind:
        raise UsageError(
            f"{resolved.name} is a target and {other.name} a head", "turn them around: inspect HEAD --against TARGET"
        )
    if report["kind"] == "head" and report["attention"]:
        return compare_derived_head(resolved, other, report)
    return compare_tensors(resolved, other, report, sample, modelopt)


def compare_pair(resolved: Resolved, other: Resolved, report: dict[str, Any]) -> dict[str, Any]:
    """A head against its target; a head that is none has nothing to compare."""
    from trtspec.checkpoint.headers import Checkpoint
    from trtspec.checkpoint.heads.pairing import (
        config_problems,
        pair_problems,
        tensor_parallel_sizes,
        told_once,
        yarn_problems,
    )
    from trtspec.checkpoint.heads.read import read_head
    from trtspec.checkpoint.heads.shapes import canonical_names
    from trtspec.checkpoint.heads.values import embedding_problems

    if report["attention"] is None:
        return {"against": other.name}
    target = other.target_spec()
    checkpoint = Checkpoint.open(resolved.path) if report["source"] == "files" and resolved.path else None
    head = read_head(checkpoint)[0] if checkpoint is not None else resolved.head_spec()
    found = pair_problems(head, target, head_id=resolved.hub_id, target_id=other.hub_id)
    found += config_problems(resolved.config(), other.config())
    found += yarn_problems(head, target) if checkpoint is not None else []
    own = canonical_names(checkpoint.tensors).get("embed_tokens.weight") if checkpoint is not None else None
    if checkpoint is not None and own and other.path and any(other.path.glob("*.safetensors")):
        found += embedding_problems(checkpoint, own, Checkpoint.open(other.path), target)
    sizes = tensor_parallel_sizes(head)
    problems = told_once(report["problems"] + found)
    return {"against": other.name, "tensor_parallel_sizes": sizes, "problems": problems}


def compare_derived_head(resolved: Resolved, source: Resolved, report: dict[str, Any]) -> dict[str, Any]:
    """A converted head against the head it was made from, all bytes."""
    from trtspec.checkpoint.headers import Checkpoint
    from trtspec.checkpoint.heads.compare import compare_heads

    result = compare_heads(Checkpoint.open(local(resolved)), Checkpoint.open(local(source)))
    return {"against": source.name, "problems": report["problems"] + result.pop("problems"), "comparison": result}


def compare_tensors(
    resolved: Resolved, source: Resolved, report: dict[str, Any], sample: int, modelopt: bool
) -> dict[str, Any]:
    """A derived checkpoint against its source, tensor by tensor."""
    from trtspec.quant.modelopt import packed_by_modelopt
    from trtspec.quant.verify import compare as compare_checkpoints

    packs_as = packed_by_modelopt if modelopt else None
    result = compare_checkpoints(local(resolved), local(source), sample, packs_as)
    problems = [entry if isinstance(entry, Problem) else Problem(**entry) for entry in result.pop("problems")]
    return {"against": source.name, "comparison": result, "problems": report["problems"] + problems}


def local(resolved: Resolved) -> Path:
    if resolved.path is None:
        raise UsageError(
            f"comparing tensors needs {resolved.name} on this machine",
            f"run `hf download {resolved.hub_id}` and pass its directory",
        )
    return resolved.path
