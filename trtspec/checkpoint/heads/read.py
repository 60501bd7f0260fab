"""Reads a head of any dialect into one canonical record (HeadSpec).

Also recognises drafts that are not Eagle3 heads, and compares a converted head with its source.
config.json states a dimension, and otherwise the first tensor shows it. If the two disagree,
`read_head` reports a problem.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trtspec.checkpoint.headers import Checkpoint, TensorInfo, same_bytes
from trtspec.checkpoint.heads.config import LATENT, flat_config
from trtspec.checkpoint.heads.dialects import Dialect, detect_dialect, dialect_of
from trtspec.checkpoint.heads.shapes import (
    OPTIONAL,
    canonical_names,
    fc_width,
    layer_prefix,
    measured,
    misfits,
    missing_norms,
    unreadable,
)
from trtspec.checkpoint.target_problems import refusal
from trtspec.checkpoint.target_tensors import finding
from trtspec.errors import Problem, TrtspecError, has_errors
from trtspec.specs import Attention, HeadSpec, RopeSpec, Values

# beginnings of tensor names that only latent attention has
LATENT_TENSORS = ("layer.self_attn.kv_", "layer.self_attn.q_a_", "layer.self_attn.q_b_")
# tensor names of Medusa heads
MEDUSA = re.compile(r"^(medusa_heads?\.)?\d+\.\d+\.linear\.weight$|^medusa_heads?\.")
# fields of HeadSpec that may differ between a head and its conversion
STORAGE = (
    "dialect",
    "layer_prefix",
    "has_lm_head",
    "has_embed_tokens",
    "has_d2t",
)


def head_spec(checkpoint: Checkpoint, *, values: bool = False) -> HeadSpec:
    """Returns the canonical record of a head.

    Raises TrtspecError if the head has errors. `values`: whether a sample of the weights is checked
    too.
    """
    spec, problems = read_head(checkpoint)
    if values:
        from trtspec.checkpoint.values import head_value_problems

        problems += head_value_problems(checkpoint, checkpoint.tensors)
    if has_errors(problems):
        raise refusal(checkpoint.path, problems)
    return spec


def read_head(
    checkpoint: Checkpoint, dialect: Dialect | None = None
) -> tuple[HeadSpec, list[Problem]]:
    """Returns the canonical record of a head and every problem that shows without a target.

    The record is incomplete if tensors are missing. Raises TrtspecError if the checkpoint is not an
    Eagle3 head.

    `dialect`: dialect that the user states. None: it is detected.
    """
    # Imported late, because it loads numpy, which takes longer than `trtspec lint` itself.
    from trtspec.checkpoint.heads.problems import head_problems

    wrong = no_eagle3_head(checkpoint.config, checkpoint.tensors)
    if wrong is not None:
        raise TrtspecError(f"{checkpoint.path}: {wrong.message} [{wrong.code}]", wrong.remedy)
    tensors = canonical_names(checkpoint.tensors)
    declared = head_spec_from_config(checkpoint.config, dialect=dialect_of(checkpoint, dialect))
    config = flat_config(checkpoint.config)
    is_latent = any(name.startswith(LATENT_TENSORS) for name in tensors)
    attention: Attention = "mla" if is_latent else "mha"
    prefix = layer_prefix(checkpoint.tensors)
    problems = unreadable(tensors, declared, attention)
    if problems:
        return replace(declared, attention=attention, layer_prefix=prefix), problems
    spec = replace(measured(tensors, declared, config), layer_prefix=prefix)
    problems = misfits(tensors, spec, declared) + fc_width(tensors, spec, config)
    # Wrong shapes also change the number of norms, so they are reported alone.
    problems = problems or missing_norms(tensors, spec)
    return spec, problems + head_problems(checkpoint, tensors, spec)


def head_spec_from_config(
    config: dict[str, Any], *, dialect: Dialect | None = None, owns: dict[str, bool] | None = None
) -> HeadSpec:
    """Returns the record of a head as config.json alone states it.

    Raises TrtspecError if config.json lacks a size or states an invalid value.

    Args:
        dialect: dialect of the head. None: it is detected.
        owns: whether the checkpoint holds lm_head, embed_tokens and d2t, by these names.
    """
    flat = flat_config(config)
    owns = owns or {}
    values = Values(flat, "the head's config.json")
    hidden = values.whole("hidden_size", least=1)
    heads = values.whole("num_attention_heads", least=1)
    vocab = values.whole("vocab_size", least=1)
    dialect = dialect or detect_dialect(config, set())[0]
    mla = bool(flat.get("kv_lora_rank"))
    aux = dialect.capture(config)[0]
    spec = HeadSpec(
        attention="mla" if mla else "mha",
        dialect=dialect.name,
        hidden_size=hidden,
        target_hidden_size=values.whole("target_hidden_size", hidden),
        intermediate_size=values.whole("intermediate_size", least=1),
        num_attention_heads=heads,
        num_key_value_heads=values.whole("num_key_value_heads", heads),
        head_dim=values.whole("head_dim", max(hidden // heads, 1)),
        vocab_size=vocab,
        draft_vocab_size=values.whole("draft_vocab_size", vocab),
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        rope=RopeSpec.from_config(flat),
        num_aux=len(aux) if aux else values.whole("num_aux_hidden_states", 3),
        aux_layers=aux,
        max_position_embeddings=values.whole("max_position_embeddings", 4096),
        has_lm_head=owns.get("lm_head", True),
        has_embed_tokens=owns.get("embed_tokens", False),
        has_d2t=owns.get("d2t", False),
        layer_prefix=dialect.prefix,
        **_flags(config, dialect),
    )
    if mla:
        sizes: dict[str, Any] = {name: values.whole(name, 0) for name in LATENT}
        sizes["head_dim"] = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
        # Engines do not read a number of key-value heads for latent attention.
        spec = replace(spec, **sizes, num_key_value_heads=heads)
    return spec


def _flags(config: dict[str, Any], dialect: Dialect) -> dict[str, bool]:
    """Returns the flags of the head's norms, by their names in `HeadSpec`."""
    # Projects have different keys for the same flag.
    eagle = config.get("eagle_config") or {}
    fc_norm = bool(config.get("fc_norm"))
    norm_output = bool(
        config.get("norm_output") or config.get("post_norm") or eagle.get("return_hidden_post_norm")
    )
    if dialect.norm_output_since and not fc_norm:
        norm_output = False  # Before that date the key described plain EAGLE-3.
    return {
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "norm_before_fc": bool(eagle.get("norm_before_fc") or config.get("norm_before_fc")),
        "norm_before_residual": bool(
            config.get("norm_before_residual", dialect.norm_before_residual)
        ),
    }


def no_eagle3_head(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> Problem | None:
    """Returns the problem of a checkpoint that is not an Eagle3 head. None if it may be a head.

    Names and shapes of the tensors decide, and keys of config.json that other drafts have.
    """
    names = tensors.keys()
    model_type = config.get("speculators_model_type") or config.get("model_type")
    medusa = "medusa_num_heads" in config or model_type == "medusa"
    if medusa or any(map(MEDUSA.match, names)):
        return finding("TS-HEAD-MEDUSA", "tensor names")
    if config.get("speculators_model_type", "eagle3") != "eagle3":
        return finding("TS-HEAD-OTHER-DRAFT", "speculators_model_type")
    fc = tensors.get("fc.weight") or tensors.get("model.fc.weight")
    if fc is not None:
        # EAGLE-1 and EAGLE-2 fuse the embedding with one state, so their fc is [H, 2H].
        normed = any(name.endswith("hidden_norm.weight") for name in names)
        if normed or len(fc.shape) != 2 or fc.shape[1] != 2 * fc.shape[0]:
            return None
        return finding("TS-HEAD-EAGLE1", "fc.weight")
    layers = set()
    for name in names:
        number = f".{name}".partition(".layers.")[2].partition(".")[0]
        if number.isdecimal():
            layers.add(number)
    if len(layers) < 2 and any(name.endswith(("eh_proj.weight", "enorm.weight")) for name in names):
        return finding("TS-HEAD-OTHER-DRAFT", "tensor names")
    if len(layers) > 1 or any(".experts." in name for name in names):
        return finding("TS-HEAD-FULL-MODEL", "fc.weight")
    return None


def head_facts(spec: HeadSpec, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of `inspect --json` and `convert --json` that only a head has."""
    attributes = (
        "eagle",
        "attention",
        "dialect",
        "draft_vocab_size",
        "vocab_size",
        "hidden_size",
        "kv_elements_per_token",
    )
    return {
        "family": "eagle3",
        "model_type": config.get("model_type"),
        "architecture": (config.get("architectures") or [None])[0],
        "format": spec.dialect,
        "aux_layers": list(spec.aux_layers) if spec.aux_layers is not None else None,
        "own_lm_head": spec.has_lm_head,
        "own_embed_tokens": spec.has_embed_tokens,
        "context": spec.max_position_embeddings,
        **{name: getattr(spec, name) for name in attributes},
    }


@dataclass(frozen=True)
class HeadComparison:
    """Comparison of a converted head with its source.

    tensors: number of tensors in the converted head.
    compared: number of tensors that both heads hold.
    identical: number of compared tensors with the same bytes.
    added: names of tensors that only the converted head holds.
    absent: names of tensors that only the source holds.
    """

    tensors: int
    compared: int
    identical: int
    added: list[str]
    absent: list[str]
    problems: list[Problem] = field(repr=False)


def compare_heads(derived: Checkpoint, source: Checkpoint) -> HeadComparison:
    """Compares a converted head with its source: the bytes of all tensors and the two records.

    Names are canonical. Fields that describe only the storage may differ.
    """
    ours = canonical_names(derived.tensors)
    theirs = canonical_names(source.tensors)
    both = [name for name in ours if name in theirs]
    different = [name for name in both if not same_bytes(derived, ours[name], source, theirs[name])]
    # A dialect may leave out an optional tensor.
    lost = [name for name in theirs if name not in ours and name not in OPTIONAL]
    problems = [_differs(name, "its bytes are not those of the source") for name in different]
    problems += [_differs(name, "the source has it, the derived head does not") for name in lost]
    record = read_head(derived)[0]
    source_record = read_head(source)[0]
    for name in (item.name for item in fields(record) if item.name not in STORAGE):
        value = getattr(record, name)
        source_value = getattr(source_record, name)
        if name == "aux_layers" and None in (value, source_value):
            continue  # One of the two configs does not state the layers.
        if value != source_value:
            problems.append(_differs(name, f"{value} here, {source_value} in the source"))
    return HeadComparison(
        tensors=len(ours),
        compared=len(both),
        identical=len(both) - len(different),
        added=sorted(set(ours) - set(theirs)),
        absent=sorted(set(theirs) - set(ours)),
        problems=problems,
    )


def _differs(where: str, what: str) -> Problem:
    """Returns the problem of a tensor or field that is not as in the source."""
    return Problem("TS-HEAD-DIFFERS", "error", where, f"differs from the source: {what}")
