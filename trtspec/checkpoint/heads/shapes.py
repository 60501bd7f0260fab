"""What the tensors of an Eagle3 head say about it: every dimension that a shape shows, and where the config differs."""

from __future__ import annotations

from typing import Any

from trtspec.checkpoint.headers import TensorInfo
from trtspec.errors import Problem
from trtspec.specs import HeadSpec

REMEDY = "fetch the checkpoint again, or ask its author which of the two is right"
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
ATTENTION = {
    "mha": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mla": ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"),
}


def canonical_names(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Drops a leading `model.` and names the first decoder layer `layer.`, whatever the dialect calls it."""
    renamed = {}
    for name, info in tensors.items():
        plain = name.removeprefix("model.")
        for prefix in ("midlayer.", "layers.0."):
            if plain.startswith(prefix):
                plain = "layer." + plain.removeprefix(prefix)
        renamed[plain] = info
    return renamed


def layer_prefix(tensors: dict[str, TensorInfo]) -> str:
    return "midlayer." if any("midlayer." in name for name in tensors) else "layers.0."


def required_names(attention: str) -> list[str]:
    """Tensors without which no engine computes the head; lm_head, embed_tokens and d2t may be absent."""
    names = ["fc", "norm", *(f"layer.{norm}" for norm in NORMS), *(f"layer.mlp.{part}" for part in MLP)]
    return [f"{name}.weight" for name in names + [f"layer.self_attn.{part}" for part in ATTENTION[attention]]]


def measure(
    tensors: dict[str, TensorInfo], declared: HeadSpec, config: dict[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """HeadSpec fields that the shapes decide, and one problem for each that the config states differently."""
    mla = "layer.self_attn.kv_a_proj_with_mqa.weight" in tensors
    attention = "mla" if mla else "mha"
    missing = [name for name in required_names(attention) if name not in tensors]
    if missing:
        message = (
            f"{len(missing)} tensors that an Eagle3 {attention.upper()} head needs are absent: {', '.join(missing)}"
        )
        return {"attention": attention}, [Problem("TS-HEAD-TENSOR-MISSING", "error", missing[0], message, REMEDY)]
    shape = {name: info.shape for name, info in tensors.items()}
    found: dict[str, Any] = {"attention": attention, "hidden_size": shape["fc.weight"][0]}
    found["intermediate_size"] = shape["layer.mlp.gate_proj.weight"][0]
    found["num_aux"] = shape["fc.weight"][1] // declared.target_hidden_size
    found |= _mla(shape, declared) if mla else _mha(shape, declared)
    found |= _vocabulary(shape, declared)
    found["fc_norm"] = "fc_norm.0.weight" in shape
    found["norm_before_fc"] = "input_norm.weight" in shape
    problems = _disagreements(found, declared, config) + _input_widths(shape, found, declared)
    return found, problems


def _mha(shape: dict[str, tuple[int, ...]], declared: HeadSpec) -> dict[str, Any]:
    size = declared.head_dim
    return {
        "num_attention_heads": shape["layer.self_attn.q_proj.weight"][0] // size,
        "num_key_value_heads": shape["layer.self_attn.k_proj.weight"][0] // size,
    }


def _mla(shape: dict[str, tuple[int, ...]], declared: HeadSpec) -> dict[str, Any]:
    """Ranks from the norms, head sizes from the b-projections divided by the number of heads (config only)."""
    heads = declared.num_attention_heads
    kv_rank = shape["layer.self_attn.kv_a_layernorm.weight"][0]
    rope = shape["layer.self_attn.kv_a_proj_with_mqa.weight"][0] - kv_rank
    nope = shape["layer.self_attn.q_b_proj.weight"][0] // heads - rope
    return {
        "q_lora_rank": shape["layer.self_attn.q_a_layernorm.weight"][0],
        "kv_lora_rank": kv_rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": shape["layer.self_attn.kv_b_proj.weight"][0] // heads - nope,
        "head_dim": nope + rope,
    }


def _vocabulary(shape: dict[str, tuple[int, ...]], declared: HeadSpec) -> dict[str, Any]:
    found: dict[str, Any] = {
        "has_lm_head": "lm_head.weight" in shape,
        "has_embed_tokens": "embed_tokens.weight" in shape,
        "has_d2t": "d2t" in shape,
        "draft_vocab_size": declared.draft_vocab_size,
    }
    if found["has_lm_head"]:
        found["draft_vocab_size"] = shape["lm_head.weight"][0]
    elif found["has_d2t"]:
        found["draft_vocab_size"] = shape["d2t"][0]
    if found["has_embed_tokens"]:
        found["vocab_size"] = shape["embed_tokens.weight"][0]
    return found


def _disagreements(found: dict[str, Any], declared: HeadSpec, config: dict[str, Any]) -> list[Problem]:
    """Fields whose value in config.json is not what the tensors have. A key that is absent does not disagree."""
    problems = []
    for field, value in found.items():
        if field not in config or config[field] is None or field == "attention":
            continue
        stated = getattr(declared, field)
        if stated == value:
            continue
        code = "TS-HEAD-FC-NORM" if field == "fc_norm" else "TS-HEAD-SHAPE"
        message = f"config.json says {field} {stated!r}, the tensors say {value!r}"
        problems.append(Problem(code, "error", f"config.json:{field}", message, REMEDY))
    if found["fc_norm"] and not config.get("fc_norm"):
        message = "the tensors hold fc_norm weights and config.json does not set fc_norm, so an engine leaves them out"
        problems.append(Problem("TS-HEAD-FC-NORM", "error", "config.json:fc_norm", message, "set `fc_norm: true`"))
    if found["attention"] != declared.attention:
        message = f"config.json describes {declared.attention} attention, the tensors are {found['attention']}"
        problems.append(Problem("TS-HEAD-SHAPE", "error", "config.json:kv_lora_rank", message, REMEDY))
    return problems


def _input_widths(shape: dict[str, tuple[int, ...]], found: dict[str, Any], declared: HeadSpec) -> list[Problem]:
    """The first projections see [embedding, state], 2H wide; fc sees n_aux target states."""
    problems = []
    hidden = found["hidden_size"]
    first = "q_a_proj" if found["attention"] == "mla" else "q_proj"
    width = shape[f"layer.self_attn.{first}.weight"][1]
    if width != 2 * hidden:
        message = f"{first} takes {width} inputs where an Eagle3 head takes 2 x {hidden} (embedding and state)"
        problems.append(Problem("TS-HEAD-SHAPE", "error", f"self_attn.{first}", message, "this is not an Eagle3 head"))
    fc_width, states = shape["fc.weight"][1], declared.num_aux
    stated = declared.aux_layers is not None
    if fc_width % declared.target_hidden_size or (stated and found["num_aux"] != states):
        message = (
            f"fc takes {fc_width} inputs, which is not {states} captured states of width {declared.target_hidden_size}"
        )
        problems.append(Problem("TS-HEAD-FC-WIDTH", "error", "fc.weight", message, REMEDY))
    return problems
