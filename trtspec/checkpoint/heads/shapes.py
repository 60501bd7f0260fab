"""Compares the tensors of an Eagle3 head with its config.json: absent tensors and other shapes.

config.json states a dimension, and otherwise the first tensor shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtspec.checkpoint.headers import TensorInfo
from trtspec.checkpoint.target_tensors import finding
from trtspec.errors import Problem, listed
from trtspec.families.kimi_k2 import latent_attention
from trtspec.specs import Attention, HeadSpec

REMEDY = "fetch the checkpoint again, or ask its author which of the two is right"
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
ATTENTION = {
    "mha": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mla": (
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
        "o_proj",
    ),
}
MAPS = ("d2t", "t2d")
# tensors that a head may leave out, because they are rebuilt or the target lends them
OPTIONAL = ("lm_head.weight", "embed_tokens.weight", *MAPS)
FLAGS = ("fc_norm", "norm_before_fc")  # fields of HeadSpec that add norms
Shapes = dict[str, tuple[int, ...]]


def canonical_names(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the tensors by canonical name.

    A canonical name has no `model.`, and begins with `layer.` for the decoder layer, which dialects
    call `midlayer.` or `layers.0.`.
    """
    renamed = {}
    for name, info in tensors.items():
        plain = name.removeprefix("model.")
        for prefix in ("midlayer.", "layers.0."):
            if plain.startswith(prefix):
                plain = "layer." + plain.removeprefix(prefix)
        renamed[plain] = info
    return renamed


def layer_prefix(tensors: dict[str, TensorInfo]) -> str:
    """Returns the prefix of the decoder layer's tensor names, `midlayer.` or `layers.0.`."""
    return "midlayer." if any("midlayer." in name for name in tensors) else "layers.0."


def required_names(attention: str) -> list[str]:
    """Returns the canonical names of tensors without which no engine computes the head.

    lm_head, embed_tokens and d2t may be absent.
    """
    names = ["fc", "norm"]
    names += [f"layer.{norm}" for norm in NORMS]
    names += [f"layer.mlp.{part}" for part in MLP]
    names += [f"layer.self_attn.{part}" for part in ATTENTION[attention]]
    return [f"{name}.weight" for name in names]


def tensor_names(spec: HeadSpec) -> list[str]:
    """Returns the canonical names of all tensors that an engine loads into the head's layers."""
    names = required_names(spec.attention)
    if spec.fc_norm:
        names += [f"fc_norm.{index}.weight" for index in range(spec.num_aux)]
    if spec.norm_before_fc:
        names.append("input_norm.weight")
    return names


def expected_shapes(spec: HeadSpec) -> Shapes:
    """Returns the shape of every tensor that a head of this record may hold, by canonical name.

    Linears are [outputs, inputs]. The first projections of attention take embedding and state,
    which together are 2H wide.
    """
    hidden = spec.hidden_size
    inner = spec.intermediate_size
    captured = spec.num_aux * spec.target_hidden_size
    shapes: Shapes = {f"layer.{norm}.weight": (hidden,) for norm in NORMS}
    shapes |= {
        "fc.weight": (hidden, captured),
        "norm.weight": (hidden,),
        "input_norm.weight": (captured,),
    }
    shapes |= {f"layer.mlp.{part}.weight": (inner, hidden) for part in ("gate_proj", "up_proj")}
    shapes["layer.mlp.down_proj.weight"] = (hidden, inner)
    shapes |= {
        f"layer.self_attn.{part}.weight": shape for part, shape in _attention_shapes(spec).items()
    }
    shapes |= {
        f"fc_norm.{index}.weight": (spec.target_hidden_size,) for index in range(spec.num_aux)
    }
    shapes["lm_head.weight"] = (spec.draft_vocab_size, hidden)
    shapes["embed_tokens.weight"] = (spec.vocab_size, hidden)
    shapes["d2t"] = (spec.draft_vocab_size,)
    shapes["t2d"] = (spec.vocab_size,)
    return shapes


def _attention_shapes(spec: HeadSpec) -> Shapes:
    """Returns the shapes of the attention's tensors by their name in the layer."""
    inputs = 2 * spec.hidden_size
    if spec.is_mla:
        return latent_attention(spec, inputs)
    queries = spec.num_attention_heads * spec.head_dim
    keys = spec.num_key_value_heads * spec.head_dim
    return {
        "q_proj": (queries, inputs),
        "k_proj": (keys, inputs),
        "v_proj": (keys, inputs),
        "o_proj": (spec.hidden_size, queries),
    }


def unreadable(
    tensors: dict[str, TensorInfo], declared: HeadSpec, attention: Attention
) -> list[Problem]:
    """Returns problems that prevent a comparison of shapes.

    They are absent tensors that every head needs, tensors of another rank, and a config that
    describes another attention.
    """
    missing = [name for name in required_names(attention) if name not in tensors]
    if missing:
        what = f"{len(missing)} tensors that an Eagle3 {attention.upper()} head needs are absent"
        message = f"{what}: {', '.join(missing)}"
        return [Problem("TS-HEAD-TENSOR-MISSING", "error", missing[0], message)]
    problems = (_wrong_rank(name, info) for name, info in tensors.items())
    wrong = [problem for problem in problems if problem is not None]
    if wrong:
        return wrong
    if attention != declared.attention:
        message = (
            f"config.json describes {declared.attention} attention, the tensors are {attention}"
        )
        return [Problem("TS-HEAD-SHAPE", "error", "config.json:kv_lora_rank", message)]
    return []


def measured(
    tensors: dict[str, TensorInfo], declared: HeadSpec, config: dict[str, Any]
) -> HeadSpec:
    """Returns the record, completed with facts that config.json does not state and tensors show."""
    # number of rows of each optional tensor
    rows = {
        name: tensors[name].shape[0] for name in OPTIONAL if name in tensors and tensors[name].shape
    }
    draft = declared.draft_vocab_size
    states = declared.num_aux
    if not config.get("draft_vocab_size"):
        draft = rows.get("lm_head.weight") or rows.get("d2t") or draft
    if declared.aux_layers is None and not config.get("num_aux_hidden_states"):
        states = tensors["fc.weight"].shape[1] // declared.target_hidden_size
    return replace(
        declared,
        draft_vocab_size=draft,
        num_aux=states,
        has_lm_head="lm_head.weight" in tensors,
        has_embed_tokens="embed_tokens.weight" in tensors,
        has_d2t="d2t" in tensors,
        fc_norm=any(name.startswith("fc_norm.") for name in tensors),
        norm_before_fc="input_norm.weight" in tensors,
    )


def _wrong_rank(name: str, info: TensorInfo) -> Problem | None:
    """Returns the problem of a tensor with another rank or without values, else None.

    Linears have two dimensions and norms one. `values` checks the vocabulary maps.
    """
    rank = 1 if "norm" in name else 2
    known = name.endswith(".weight") and not name.startswith("layers.")
    if not known or (len(info.shape) == rank and info.numel):
        return None
    needed = f"{rank} dimension{'s' * (rank > 1)}, none empty"
    message = f"{name} is stored as {list(info.shape)}, where a head has {needed}"
    return Problem("TS-HEAD-TENSOR-SHAPE", "error", name, message)


def misfits(tensors: dict[str, TensorInfo], spec: HeadSpec, declared: HeadSpec) -> list[Problem]:
    """Returns problems of shapes and flags that disagree with the record.

    All shapes are one problem, because several wrong shapes usually have one cause in config.json.

    Args:
        tensors: header entries by canonical name.
        spec: record of the head, completed from its tensors.
        declared: record as config.json alone states it.
    """
    faults = []
    for name, wanted in expected_shapes(spec).items():
        stored = tensors[name].shape if name in tensors else wanted
        if name in MAPS and len(stored) != 1:
            continue  # `values` reports maps of another rank.
        if name == "fc.weight":
            # `fc_width` judges the inputs of fc with the layer ids.
            stored = stored[:1]
            wanted = wanted[:1]
        if stored != wanted:
            asked = f"where config.json asks for {list(wanted)}"
            faults.append(f"{name} is stored as {list(stored)}, {asked}")
    flags = []
    for flag in FLAGS:
        has_norms = getattr(spec, flag)
        if has_norms == getattr(declared, flag):
            continue
        remedy = f"set `{flag}: true`" if has_norms else REMEDY
        flags.append(finding("TS-HEAD-FC-NORM", f"config.json:{flag}", remedy=remedy))
    if not faults:
        return flags
    code = "TS-HEAD-TENSOR-SHAPE" if len(faults) == 1 else "TS-HEAD-SHAPE"
    message = faults[0]
    others = [text.partition(" ")[0] for text in faults[1:]]
    if others:
        message += f"; of another shape too: {listed(others)}"
    return [Problem(code, "error", faults[0].partition(" ")[0], message, REMEDY), *flags]


def missing_norms(tensors: dict[str, TensorInfo], spec: HeadSpec) -> list[Problem]:
    """Returns a problem if the record has norms before fc that are absent.

    Call it only if the other shapes agree with the record, from which the number of norms follows.
    """
    missing = [name for name in tensor_names(spec) if name not in tensors]
    if not missing:
        return []
    message = f"its config has norms before fc, and there is no {listed(missing)}"
    return [Problem("TS-HEAD-FC-NORM", "error", "tensor names", message, REMEDY)]


def fc_width(
    tensors: dict[str, TensorInfo], spec: HeadSpec, config: dict[str, Any]
) -> list[Problem]:
    """Returns a problem if fc takes another number of target states than config.json states."""
    rows, width = tensors["fc.weight"].shape
    states = spec.num_aux
    if rows != spec.hidden_size:
        return []  # `misfits` reports the number of outputs.
    if width != states * spec.target_hidden_size or (
        spec.aux_layers is not None and len(spec.aux_layers) != states
    ):
        states = states if spec.aux_layers is None else len(spec.aux_layers)
        needed = f"{states} captured states of width {spec.target_hidden_size}"
        message = f"fc takes {width} inputs, which is not {needed}"
        return [Problem("TS-HEAD-FC-WIDTH", "error", "fc.weight", message, REMEDY)]
    stated = config.get("num_aux_hidden_states")
    if stated and stated != states:
        where = "config.json:num_aux_hidden_states"
        taken = f"fc takes {states} states; vLLM believes the key"
        message = f"config.json says num_aux_hidden_states {stated}, {taken}"
        remedy = f"set `num_aux_hidden_states: {states}`"
        return [Problem("TS-HEAD-FC-WIDTH", "error", where, message, remedy)]
    return []
