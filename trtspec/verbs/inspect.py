"""Compares checkpoints for `trtspec inspect`.

Compares a head with its target, a derived checkpoint with its source, and a published head with the
engines' releases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trtspec.checkpoint.describe import CheckpointReport
from trtspec.checkpoint.heads import pairing
from trtspec.checkpoint.heads.dialects import DIALECTS, ENGINES
from trtspec.checkpoint.heads.read import HeadComparison, compare_heads, read_head
from trtspec.checkpoint.heads.shapes import canonical_names
from trtspec.checkpoint.hub import Resolved, find_target
from trtspec.checkpoint.published import PublishedHead
from trtspec.checkpoint.values import embedding_problems
from trtspec.data_files import load_yaml
from trtspec.errors import Problem
from trtspec.specs import HeadSpec
from trtspec.trtllm.rules.from_data import first_release

if TYPE_CHECKING:
    from trtspec.quant.verify import CheckpointComparison

COMPARED_TENSORS = 64  # default number of tensors that are compared with a source


def first_releases(record: PublishedHead, head: HeadSpec) -> dict[str, str | None]:
    """Returns the oldest release of each engine that serves a published head, by engine.

    The release is None if every known release of the engine is too old for the head.
    """
    trtllm, vllm = ENGINES["trtllm"], ENGINES["vllm"]
    releases = {trtllm.title: first_release(find_target(record.targets[-1]).spec, head)}
    if vllm.name in record.published_on or DIALECTS[head.dialect].served_by(vllm, head):
        releases[vllm.title] = load_yaml("vllm.yaml")["oldest"]
    return releases


def compare_pair(
    values: dict[str, Any],
    problems: list[Problem],
    report: CheckpointReport,
    resolved: Resolved,
    other: Resolved,
) -> tuple[dict[str, Any], list[Problem]]:
    """Compares a head with its target. Returns the values and problems of the report, extended.

    values: entries of the JSON object of the head.
    problems: problems of the head alone.
    report, resolved: description of the head, and its checkpoint.
    other: checkpoint of the target.
    """
    if report.spec is None:  # not an Eagle3 head, so no rule of a pair applies
        return values, problems
    target = other.target_spec()
    checkpoint = resolved.checkpoint if resolved.weights else None
    head = read_head(checkpoint)[0] if checkpoint is not None else resolved.head_spec()
    pair_problems = pairing.pair_problems(head, target, head_id=resolved.name, target_id=other.name)
    # other commands only warn, because such layer ids are probably but not certainly shifted
    pair_problems = [
        replace(problem, severity="error") if problem.code == pairing.SHIFTED else problem
        for problem in pair_problems
    ]
    pair_problems += pairing.learned_problems(resolved, other)
    pair_problems += pairing.config_problems(resolved.config(), other.config())
    if checkpoint is not None:
        pair_problems += pairing.yarn_problems(head, target)
        embedding = canonical_names(checkpoint.tensors).get("embed_tokens.weight")
        if embedding and other.weights:
            pair_problems += embedding_problems(checkpoint, embedding, other.checkpoint, target)
    values = values | {"tensor_parallel_sizes": pairing.tensor_parallel_sizes(head)}
    return values, pairing.reported_once(problems + pair_problems)


def compare_derived(
    checkpoint_kind: str, derived: Resolved, source: Resolved, sample: int | None
) -> HeadComparison | CheckpointComparison:
    """Compares a derived checkpoint with its source.

    Compares all bytes of a head, or the tensors of a target. Raises UsageError if the weights of a
    checkpoint are not on this machine.

    sample: number of tensors of a target to compare. None for COMPARED_TENSORS.
    """
    for checkpoint in (derived, source):
        _ = checkpoint.directory  # raises the UsageError
    if checkpoint_kind == "head":
        return compare_heads(derived.checkpoint, source.checkpoint)
    from trtspec.quant.verify import compare

    if sample is None:
        sample = COMPARED_TENSORS
    return compare(derived.target, source.checkpoint, sample)
