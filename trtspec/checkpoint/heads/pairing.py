"""Checks that a head agrees with its target, and reports differences that lower acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.dialects import training_record
from trtspec.checkpoint.hub import Resolved
from trtspec.checkpoint.identity import identity, recorded
from trtspec.checkpoint.published import catalogue, known_head, real_pair
from trtspec.checkpoint.target_tensors import finding
from trtspec.data_files import load_yaml
from trtspec.errors import Problem, Severity
from trtspec.specs import HeadSpec, ModelSpec

TP_SIZES = (1, 2, 4, 8, 16, 32, 64)
SHIFTED = "TS-PAIR-LAYERS-SHIFTED"
# Settings of YaRN that must agree. Published heads differ from their targets in the other ones.
YARN_SCALING_KEYS = {"rope_type", "factor", "original_max_position_embeddings"}


def pair_problems(
    head: HeadSpec,
    target: ModelSpec,
    *,
    head_id: str | None = None,
    target_id: str | None = None,
    tp_size: int = 1,
) -> list[Problem]:
    """Returns the problems of serving `head` with `target`.

    Args:
        head_id: hub id of the head, which is compared with published pairs. None if it has none.
        target_id: hub id of the target. None if it has none.
        tp_size: number of GPUs over which tensor parallelism splits the head.
    """
    return [
        *_published(head_id, target_id),
        *_shapes(head, target),
        *_layers(head, target),
        *_rope(head, target),
        *_parallel(head, tp_size),
    ]


def target_record(target: Checkpoint) -> dict[str, Any]:
    """Returns the facts about a target that provenance.json of a head records.

    target_tensors: digest of names, dtypes and shapes of the target's tensors.
    target_samples: digests of the target's weights, and of the weights from which `trtspec
        quantize` made them.
    """
    marks = identity(target)
    record = recorded(target.path)
    quantized = record.get("source") if record.get("command") == "quantize" else None
    original = quantized.get("sample") if isinstance(quantized, dict) else None
    samples = [marks["sample"]]
    if isinstance(original, str):
        samples.append(original)
    return {"target_tensors": marks["tensors"], "target_samples": samples}


def learned_problems(head: Resolved, target: Resolved) -> list[Problem]:
    """Returns a warning if the head was trained on other weights than the target's.

    The problem is of severity info if the weights have another format, because their digests cannot
    be compared. Returns [] if the weights match or are not on this machine, or if provenance.json
    of the head does not record the weights.
    """
    record = training_record(head.path) if head.path is not None else {}
    source = record.get("source")
    if not isinstance(source, dict) or not isinstance(source.get("target_samples"), list):
        return []
    if target.weights is None:
        return []
    here = target_record(target.checkpoint)
    if any(sample in source["target_samples"] for sample in here["target_samples"]):
        return []
    name = source.get("target")
    commit = source.get("commit")
    trained_on = f"{name}@{commit}" if commit else name
    message = f"{head.name} learned from {trained_on}, and the weights of {target.name} are others"
    comparable = source.get("target_tensors") == here["target_tensors"]
    severity: Severity = "warning" if comparable else "info"
    return [Problem("TS-PAIR-OTHER-WEIGHTS", severity, head.name, message)]


def reported_once(problems: list[Problem]) -> list[Problem]:
    """Returns the problems without effects of another listed problem.

    data/explained.yaml lists the effects of a problem, each as a code and the beginning of a place.
    """
    effects = load_yaml("explained.yaml")
    caused: set[tuple[str, str, str]] = set()
    for problem in problems:
        caused.update(effect.partition(" ") for effect in effects.get(problem.code, ()))
    return [
        problem
        for problem in problems
        if not any(
            problem.code == code and problem.where.startswith(prefix) for code, _, prefix in caused
        )
    ]


def config_problems(head: dict[str, Any], target: dict[str, Any]) -> list[Problem]:
    """Returns the problems that only the two config.json show.

    They are different ids that end a text, and a target whose quantization rotates its states.
    """
    text = target.get("text_config") or target
    problems = []
    head_ids = _end_ids(head, head.get("transformer_layer_config") or {})
    target_ids = _end_ids(text, target)
    if head_ids and target_ids and not head_ids & target_ids:
        ends = f"the head ends text at {sorted(head_ids)}, the target at {sorted(target_ids)}"
        message = f"{ends}, so the head was made for another model"
        problems.append(Problem("TS-PAIR-EOS", "warning", "config.json:eos_token_id", message))
    quantization = target.get("quantization_config") or text.get("quantization_config") or {}
    # compressed-tensors describes a rotation in transform_config, other tools in their own keys.
    rotation = [
        key
        for key, value in quantization.items()
        if value and ("rotat" in key or key == "transform_config")
    ]
    if rotation:
        message = (
            f"the target's quantization rotates its states ({rotation[0]}); "
            "a head of the unrotated target accepts about 1.1 tokens per step"
        )
        problems.append(Problem("TS-PAIR-ROTATED", "warning", "quantization_config", message))
    return problems


def _end_ids(config: dict[str, Any], fallback: dict[str, Any]) -> set[int]:
    """Returns the ids that end a text, from `fallback` if `config` does not state the key."""
    value = config.get("eos_token_id", fallback.get("eos_token_id"))
    if isinstance(value, list):
        return set(value)
    return set() if value is None else {value}


def yarn_problems(head: HeadSpec, target: ModelSpec) -> list[Problem]:
    """Returns a problem if an MLA head's YaRN settings differ from the target's.

    It is a warning for type, factor and original positions, and otherwise info. Published heads
    differ in beta_fast, which is 1 or 32.
    """
    names = [field.name for field in fields(head.rope) if field.name != "theta"]
    head_rope, target_rope = (
        {name: getattr(rope, name) for name in names} for rope in (head.rope, target.rope)
    )
    differing = [name for name in names if head_rope[name] != target_rope[name]]
    if not head.is_mla or not differing:
        return []
    values = ", ".join(
        f"{name} {head_rope[name]} against {target_rope[name]}" for name in differing
    )
    message = f"the head's rope scaling is not the target's: {values}"
    severity: Severity = "warning" if set(differing) & YARN_SCALING_KEYS else "info"
    return [Problem("TS-PAIR-ROPE", severity, "rope_scaling", message)]


def tensor_parallel_sizes(head: HeadSpec) -> list[int]:
    """Returns the numbers of GPUs that divide the head's attention heads and its MLP."""
    return [
        size
        for size in TP_SIZES
        if head.num_attention_heads % size == 0 and head.intermediate_size % size == 0
    ]


def _published(head_id: str | None, target_id: str | None) -> list[Problem]:
    """Returns a warning if the head was published for other targets than this one."""
    # `real_pair` is None for an id that is not listed, which says nothing about the pair.
    if head_id is None or target_id is None or real_pair(head_id, target_id) is not False:
        return []
    record = known_head(head_id)
    targets = ", ".join(record.targets) if record else ""
    published = f"{head_id} was published for {targets}, not for {target_id}"
    message = f"{published}; acceptance drops between versions"
    alternatives = [head.id for head in catalogue().heads.values() if target_id in head.targets]
    remedy = f"use {' or '.join(alternatives)}" if alternatives else ""
    return [Problem("TS-PAIR-OTHER-TARGET", "warning", head_id, message, remedy)]


def _shapes(head: HeadSpec, target: ModelSpec) -> Iterator[Problem]:
    """Yields problems of widths, vocabularies, a borrowed lm_head and the KV cache of MHA."""
    if head.target_hidden_size != target.hidden_size:
        states = f"the head fuses states of width {head.target_hidden_size}"
        message = f"{states}, the target's have {target.hidden_size}"
        yield Problem("TS-PAIR-WIDTH", "error", "fc.weight", message)
    if head.vocab_size != target.vocab_size:
        message = (
            f"the head's vocabulary has {head.vocab_size} tokens, the target's {target.vocab_size}"
        )
        yield Problem("TS-PAIR-VOCAB", "error", "vocab_size", message)
    # A head without lm_head uses the target's, which must have the same shape.
    head_shape = (head.draft_vocab_size, head.hidden_size)
    target_shape = (target.vocab_size, target.hidden_size)
    if not head.has_lm_head and head_shape != target_shape:
        yield finding("TS-PAIR-LM-HEAD", "lm_head.weight")
    if not head.is_mla:
        yield finding("TS-PAIR-MHA-CACHE", "attention", "info")


def _layers(head: HeadSpec, target: ModelSpec) -> list[Problem]:
    """Returns a problem if the head's layer ids are unknown, out of range or unlike the default."""
    layers = head.aux_layers
    count = target.num_hidden_layers
    default = target.default_aux_layers
    if layers is None:
        if head.num_aux != len(default):
            message = (
                f"the head fuses {head.num_aux} states and does not say which; "
                f"the default is {len(default)}"
            )
            remedy = "ask the head's author"
            return [Problem("TS-PAIR-LAYERS-UNKNOWN", "error", "eagle_config", message, remedy)]
        message = (
            "the head does not say which layers it reads; "
            f"engines capture the outputs of {list(default)}"
        )
        remedy = (
            "measure acceptance with `trtspec bench`; "
            "the default is right for every published Kimi head"
        )
        return [Problem("TS-PAIR-LAYERS-UNKNOWN", "info", "eagle_config", message, remedy)]
    # -1 is the embedding in some dialects, and the final state in TensorRT-LLM.
    outside = [layer for layer in layers if not -1 <= layer < count]
    if outside:
        message = f"layers {outside} do not exist in a target of {count} layers (0 to {count - 1})"
        return [Problem("TS-PAIR-LAYER-RANGE", "error", "eagle_config", message)]
    if layers == default:
        return []
    if tuple(layer - 1 for layer in layers) == default:
        message = (
            f"{list(layers)} is one more than the usual {list(default)}: "
            "the ids probably count layers that ran"
        )
        remedy = (
            f"store {list(default)} if so; `trtspec bench` with both shows which ids accept more"
        )
        return [Problem(SHIFTED, "warning", "eagle_config", message, remedy)]
    message = (
        f"the head reads layers {list(layers)}, TensorRT-LLM captures {list(default)} by default"
    )
    remedy = f"run `trtspec build-config`, which writes eagle3_layers_to_capture: {list(layers)}"
    return [Problem("TS-PAIR-LAYERS-NOT-DEFAULT", "info", "eagle_config", message, remedy)]


def _rope(head: HeadSpec, target: ModelSpec) -> Iterator[Problem]:
    """Yields problems of an MLA head's rope_theta and of the number of positions."""
    if head.is_mla and head.rope.theta != target.rope.theta:
        message = (
            f"rope_theta is {head.rope.theta:g} in the head and {target.rope.theta:g} in the target"
        )
        yield Problem("TS-PAIR-ROPE", "warning", "rope_theta", message)
    if head.max_position_embeddings < target.max_position_embeddings:
        message = (
            f"the head knows positions to {head.max_position_embeddings:,}; acceptance falls beyond"
        )
        yield Problem("TS-PAIR-CONTEXT", "info", "max_position_embeddings", message)


def _parallel(head: HeadSpec, tp_size: int) -> list[Problem]:
    """Returns an error if the head does not split over `tp_size` GPUs."""
    sizes = tensor_parallel_sizes(head)
    if tp_size in sizes:
        return []
    message = (
        f"the head's {head.num_attention_heads} attention heads do not split over {tp_size} GPUs"
    )
    remedy = f"use a tensor-parallel size of {sizes}"
    return [Problem("TS-PAIR-TP", "error", "num_attention_heads", message, remedy)]
