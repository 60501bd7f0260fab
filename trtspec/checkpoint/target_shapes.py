"""Which weights a Kimi text model has, their shapes, and how many parameters a stored tensor stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trtspec.checkpoint.headers import TensorInfo
from trtspec.formats import SIDE_PARTS, format_of_dtype, packed_format
from trtspec.specs import ModelSpec

LAYER_NUMBER, EXPERT_NUMBER = re.compile(r"\.layers\.\d+\."), re.compile(r"\.experts\.\d+\.")
# Modules that read the same input share a scale: the larger amax of the group serves all of it.
SHARED_INPUT = (("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
SCALES = (*SIDE_PARTS, "k_scale", "v_scale")


def shared_partners(module: str) -> list[str]:
    """The other modules that read the same input as `module`, whose scales are the same therefore."""
    stem, _, leaf = module.rpartition(".")
    group = next((group for group in SHARED_INPUT if leaf in group), ())
    return [f"{stem}.{other}" for other in group if other != leaf]


def logical_parameters(info: TensorInfo) -> int:
    """Model parameters held by a stored tensor: 2 per packed NVFP4 byte, 8 per packed INT4 word, 0 for a scale."""
    suffix = info.name.rsplit(".", 1)[-1]
    if suffix in SCALES:
        return 0
    format = packed_format(suffix) or (format_of_dtype(info.dtype) if suffix == "weight" else None)
    return info.numel * (format.values_per_element if format else 1)


def linear_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Module name (hub name, without `.weight`) and logical [out, in] of every linear, the router and embeddings."""
    hidden, prefix = spec.hidden_size, spec.name_prefix
    yield f"{prefix}model.embed_tokens", (spec.vocab_size, hidden)
    yield f"{prefix}lm_head", (spec.vocab_size, hidden)
    for layer in range(spec.num_hidden_layers):
        name = f"{prefix}model.layers.{layer}"
        for part, shape in attention_shapes(spec).items():
            yield f"{name}.self_attn.{part}", shape
        if layer < spec.first_k_dense_replace:
            yield from _mlp(f"{name}.mlp", hidden, spec.intermediate_size)
            continue
        yield f"{name}.mlp.gate", (spec.n_routed_experts, hidden)
        for expert in range(spec.n_routed_experts):
            yield from _mlp(f"{name}.mlp.experts.{expert}", hidden, spec.moe_intermediate_size)
        yield from _mlp(f"{name}.mlp.shared_experts", hidden, spec.moe_intermediate_size * spec.n_shared_experts)


def vector_shapes(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Tensor name and length of every norm and router bias."""
    hidden, prefix = spec.hidden_size, spec.name_prefix
    yield f"{prefix}model.norm.weight", hidden
    for layer in range(spec.num_hidden_layers):
        name = f"{prefix}model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", hidden
        yield f"{name}.post_attention_layernorm.weight", hidden
        yield f"{name}.self_attn.q_a_layernorm.weight", spec.q_lora_rank
        yield f"{name}.self_attn.kv_a_layernorm.weight", spec.kv_lora_rank
        if layer >= spec.first_k_dense_replace:
            yield f"{name}.mlp.gate.e_score_correction_bias", spec.n_routed_experts


def attention_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    heads = spec.num_attention_heads
    return {
        "q_a_proj": (spec.q_lora_rank, spec.hidden_size),
        "q_b_proj": (heads * spec.qk_head_dim, spec.q_lora_rank),
        "kv_a_proj_with_mqa": (spec.kv_lora_rank + spec.qk_rope_head_dim, spec.hidden_size),
        "kv_b_proj": (heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank),
        "o_proj": (spec.hidden_size, heads * spec.v_head_dim),
    }


def _mlp(name: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield f"{name}.gate_proj", (inner, hidden)
    yield f"{name}.up_proj", (inner, hidden)
    yield f"{name}.down_proj", (hidden, inner)
