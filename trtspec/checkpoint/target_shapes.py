"""Which weights a Kimi text model has, their shapes, and how many parameters a stored tensor stands for."""

from __future__ import annotations

from collections.abc import Iterator

from trtspec.checkpoint.headers import TensorInfo
from trtspec.specs import ModelSpec

SCALES = ("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_shape", "input_scale", "k_scale", "v_scale")
VISION = ("vision_tower.", "mm_projector.")
COMPANIONS = {
    "nvfp4": ("weight_scale", "weight_scale_2", "input_scale"),
    "int4": ("weight_scale", "weight_shape"),
    "fp8-block": ("weight_scale_inv",),
    "bf16": (),
}


def logical_parameters(info: TensorInfo) -> int:
    """Model parameters held by a stored tensor: 2 per packed NVFP4 byte, 8 per packed INT4 word, 0 for a scale."""
    if info.name.rsplit(".", 1)[-1] in SCALES:
        return 0
    if info.name.endswith(".weight_packed"):
        return info.numel * 8
    if info.dtype == "U8" and info.name.endswith(".weight"):
        return info.numel * 2
    return info.numel


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


def stored_format(tensors: dict[str, TensorInfo], module: str) -> str | None:
    """How one linear is stored: bf16 (any plain float), fp8-block, int4, nvfp4, else its dtype; None if absent."""
    if f"{module}.weight_packed" in tensors:
        return "int4"
    info = tensors.get(f"{module}.weight")
    if info is None:
        return None
    known = {"U8": "nvfp4", "F8_E4M3": "fp8-block", "BF16": "bf16", "F16": "bf16", "F32": "bf16"}
    return known.get(info.dtype, info.dtype)


def logical_shape(tensors: dict[str, TensorInfo], module: str, stored: str) -> tuple[int, ...]:
    """[out, in] of a stored linear, undoing the packing."""
    if stored == "int4":
        rows, words = tensors[f"{module}.weight_packed"].shape
        return rows, words * 8
    shape = tensors[f"{module}.weight"].shape
    return (shape[0], shape[1] * 2) if stored == "nvfp4" else shape
