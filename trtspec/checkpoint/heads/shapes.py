"""The tensors of an Eagle3 head against its config.json: which are absent, and whose shape is another one.

A dimension is what config.json states, or what the first tensor shows where it states nothing.
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
OPTIONAL = ("lm_head.weight", "embed_tokens.weight", *MAPS)  # rebuilt, or lent by the target
FLAGS = ("fc_norm", "norm_before_fc")
Shapes = dict[str, tuple[int, ...]]


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
    names = [
        "fc",
        "norm",
        *(f"layer.{norm}" for norm in NORMS),
        *(f"layer.mlp.{part}" for part in MLP),
    ]
    return [
        f"{name}.weight"
        for name in names + [f"layer.self_attn.{part}" for part in ATTENTION[attention]]
    ]


def tensor_names(spec: HeadSpec) -> list[str]:
    """Every tensor that an engine loads into the layers of such a head, those to be stacked in their order."""
    norms = [f"fc_norm.{index}.weight" for index in range(spec.num_aux)] if spec.fc_norm else []
    norms += ["input_norm.weight"] if spec.norm_before_fc else []
    return required_names(spec.attention) + norms


def expected_shapes(spec: HeadSpec) -> Shapes:
    """Canonical name -> shape of every tensor that a head of this record may hold. Linears are [outputs, inputs]; the
    first projections see embedding and state, 2H wide."""
    hidden, inner, captured = (
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_aux * spec.target_hidden_size,
    )
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
    return shapes | {
        "embed_tokens.weight": (spec.vocab_size, hidden), "d2t": (spec.draft_vocab_size,), "t2d": (spec.vocab_size,)
    }  # fmt: skip


def _attention_shapes(spec: HeadSpec) -> Shapes:
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    if not spec.is_mla:
        queries, keys = heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        return {
            "q_proj": (queries, 2 * hidden), "k_proj": (keys, 2 * hidden), "v_proj": (keys, 2 * hidden),
            "o_proj": (hidden, queries),
        }  # fmt: skip
    return latent_attention(spec, 2 * hidden)


def unreadable(
    tensors: dict[str, TensorInfo], declared: HeadSpec, attention: Attention
) -> list[Problem]:
    """Why nothing can be said of the shapes: tensors that every head needs are absent, one has another rank, or the
    config describes another attention."""
    if missing := [name for name in required_names(attention) if name not in tensors]:
        what = f"{len(missing)} tensors that an Eagle3 {attention.upper()} head needs are absent"
        message = f"{what}: {', '.join(missing)}"
        return [Problem("TS-HEAD-TENSOR-MISSING", "error", missing[0], message)]
    if wrong := [
        problem
        for name, info in tensors.items()
        if (problem := _wrong_rank(name, info)) is not None
    ]:
        return wrong
    if attention != declared.attention:
        message = (
            f"config.json describes {declared.attention} attention, the tensors are {attention}"
        )
        return [Problem("TS-HEAD-SHAPE", "error", "config.json:kv_lora_rank", message)]
    return []


def attention_of(tensors: dict[str, TensorInfo]) -> Attention:
    latent = ("layer.self_attn.kv_", "layer.self_attn.q_a_", "layer.self_attn.q_b_")
    return "mla" if any(name.startswith(latent) for name in tensors) else "mha"


def measured(
    tensors: dict[str, TensorInfo], declared: HeadSpec, config: dict[str, Any]
) -> HeadSpec:
    """The record with what the tensors show and config.json does not state."""
    rows = {
        name: tensors[name].shape[0] for name in OPTIONAL if name in tensors and tensors[name].shape
    }
    draft, states = declared.draft_vocab_size, declared.num_aux
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
    """Linears have two dimensions, norms one, and none is empty; `values` judges the maps."""
    rank = 1 if "norm" in name else 2
    known = name.endswith(".weight") and not name.startswith("layers.")
    if not known or (len(info.shape) == rank and info.numel):
        return None
    message = f"{name} is stored as {list(info.shape)}, where a head has {rank} dimension{'s' * (rank > 1)}, none empty"
    return Problem("TS-HEAD-TENSOR-SHAPE", "error", name, message)


def misfits(tensors: dict[str, TensorInfo], spec: HeadSpec, declared: HeadSpec) -> list[Problem]:
    """Tensors of another shape than the record's, in one problem: several at once point at config.json. And flags of
    `declared` that do not go with the tensors."""
    found = []
    for name, wanted in expected_shapes(spec).items():
        stored = tensors[name].shape if name in tensors else wanted
        if name in MAPS and len(stored) != 1:
            continue
        if name == "fc.weight":
            stored, wanted = stored[:1], wanted[:1]  # its inputs are judged with the layer ids
        if stored != wanted:
            found.append(
                f"{name} is stored as {list(stored)}, where config.json asks for {list(wanted)}"
            )
    flags = []
    for flag in (flag for flag in FLAGS if getattr(spec, flag) != getattr(declared, flag)):
        remedy = f"set `{flag}: true`" if getattr(spec, flag) else REMEDY
        flags.append(finding("TS-HEAD-FC-NORM", f"config.json:{flag}", remedy=remedy))
    if not found:
        return flags
    code = "TS-HEAD-TENSOR-SHAPE" if len(found) == 1 else "TS-HEAD-SHAPE"
    others = [text.partition(" ")[0] for text in found[1:]]
    more = f"; of another shape too: {listed(others)}" if others else ""
    return [Problem(code, "error", found[0].partition(" ")[0], found[0] + more, REMEDY), *flags]


def missing_norms(tensors: dict[str, TensorInfo], spec: HeadSpec) -> list[Problem]:
    """Of a head whose shapes agree with its record: otherwise their number follows from another fault."""
    missing = [name for name in tensor_names(spec) if name not in tensors]
    if not missing:
        return []
    message = f"its config has norms before fc, and there is no {listed(missing)}"
    return [Problem("TS-HEAD-FC-NORM", "error", "tensor names", message, REMEDY)]


def fc_width(
    tensors: dict[str, TensorInfo], spec: HeadSpec, config: dict[str, Any]
) -> list[Problem]:
    """fc sees n_aux target states; layer ids and num_aux_hidden_states say how many those are."""
    (rows, width), states = tensors["fc.weight"].shape, spec.num_aux
    if rows != spec.hidden_size:
        return []  # not fc as a head has it, which `misfits` says
    if width != states * spec.target_hidden_size or (
        spec.aux_layers is not None and len(spec.aux_layers) != states
    ):
        states = states if spec.aux_layers is None else len(spec.aux_layers)
        message = f"fc takes {width} inputs, which is not {states} captured states of width {spec.target_hidden_size}"
        return [Problem("TS-HEAD-FC-WIDTH", "error", "fc.weight", message, REMEDY)]
    stated = config.get("num_aux_hidden_states")
    if stated and stated != states:
        message = f"config.json says num_aux_hidden_states {stated}, fc takes {states} states; vLLM believes the key"
        remedy = f"set `num_aux_hidden_states: {states}`"
        return [
            Problem(
                "TS-HEAD-FC-WIDTH", "error", "config.json:num_aux_hidden_states", message, remedy
            )
        ]
    return []
