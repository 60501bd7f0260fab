"""Memory of one GPU: weights, head, reserve, and what is left for the KV cache, in bytes and in tokens. Parameters and
bytes of a Kimi model and an Eagle3 head follow by class from their shapes and quantization alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trtspec.checkpoint.heads.shapes import expected_shapes, tensor_names
from trtspec.checkpoint.writer import byte_count
from trtspec.formats import KV_ELEMENT_BYTES, WeightFormat
from trtspec.planning.layout import ATTENTION_DP_KV_FRACTION, KV_FRACTION, Layout
from trtspec.specs import GpuSpec, HeadSpec, ModelSpec

# Communicators 0.41 GB and context with libraries 3.76 GB (aiconfigurator), activations 1.2 GB and MoE workspace 0.7 to
# 5.6 GB at 8192 tokens, the rest for CUDA graphs. With 9 to 10 GB the formula gives the 715,072 KV tokens that vLLM
# reports for Kimi-K2-Thinking on 8 H200.
RESERVE = 9.0e9
RESERVE_TOKENS = 8192
TRANSFER_BUFFERS = 2  # one to send from and one to receive into (cacheTransBuffer.cpp)
ACTIVATION_BYTES = 2 * 10  # BF16, ten live tensors of the model's width per token
# MoonViT-3d of K2.5 and later and its projector into the text width (27 blocks, 1152 wide; kept in BF16 everywhere)
VISION_PARAMETERS = 416_866_032 + 54_277_888
SHARDED = {
    "experts",
    "shared experts",
    "dense layers",
    "attention, by heads",
    "embedding",
    "lm_head",
}


@dataclass(frozen=True)
class Memory:
    """All sizes are bytes on one GPU; `kv_tokens` counts the whole group."""

    layout: Layout
    capacity: float
    weights: dict[str, float]
    head: float
    reserve: float
    fraction: float
    kv_dtype: str
    kv_bytes_per_token: float

    @property
    def weights_total(self) -> float:
        return sum(self.weights.values())

    @property
    def free(self) -> float:
        """What is left after weights, head and reserve; negative when they do not fit."""
        return self.capacity - self.weights_total - self.head - self.reserve

    @property
    def kv(self) -> float:
        return max(0.0, self.fraction * self.free)

    @property
    def kv_tokens(self) -> int:
        ranks = self.layout.gpus if self.layout.attention_dp else 1
        return int(self.kv / self.kv_bytes_per_token) * ranks

    def sequences(self, tokens: int) -> int:
        """Whole sequences of that many tokens that the group holds; with attention DP one never spans two ranks."""
        ranks = self.layout.gpus if self.layout.attention_dp else 1
        return self.kv_tokens // ranks // tokens * ranks


def memory(
    model: ModelSpec,
    head: HeadSpec | None,
    gpu: GpuSpec,
    layout: Layout,
    *,
    fraction: float | None = None,
    max_num_tokens: int = RESERVE_TOKENS,
    transfer_tokens: int = 0,
) -> Memory:
    """Args:
    fraction: TensorRT-LLM's free_gpu_memory_fraction, of what is free after the weights and not of the whole. None:
        what `trtspec build-config` writes for the layout.
    transfer_tokens: tokens that each transfer buffer of a disaggregated server holds.
    """
    if fraction is None:
        fraction = ATTENTION_DP_KV_FRACTION if layout.attention_dp else KV_FRACTION
    tokens_beyond = max(0, max_num_tokens - RESERVE_TOKENS)
    dtype = model.quant.kv_cache or "bf16"
    token_bytes = kv_elements_per_token(model, head, layout) * KV_ELEMENT_BYTES[dtype]
    return Memory(
        layout=layout,
        capacity=float(gpu.memory_bytes),
        weights=weights_per_gpu(model, layout),
        head=2 * head_parameters(head) / layout.attention_tp if head else 0.0,
        reserve=RESERVE
        + tokens_beyond * model.hidden_size * ACTIVATION_BYTES
        + TRANSFER_BUFFERS * transfer_tokens * token_bytes,
        fraction=fraction,
        kv_dtype=dtype,
        kv_bytes_per_token=token_bytes,
    )


def kv_elements_per_token(model: ModelSpec, head: HeadSpec | None, layout: Layout) -> float:
    """Cache elements per token on one rank. Latents have no heads to divide, so every tensor-parallel rank holds all of
    them, the MLA head's too; an MHA head's keys and values are divided by their heads."""
    if head is None:
        return model.kv_elements_per_token
    own: float = head.kv_elements_per_token
    if not head.is_mla:
        own /= min(layout.attention_tp, head.num_key_value_heads)
    return model.kv_elements_per_token + own


def linear_bytes(format: WeightFormat, rows: int, columns: int) -> int:
    """Bytes of one stored [rows, columns] matrix with its scales, as published."""
    shapes, parts = (
        format.part_shapes(rows, columns),
        zip(format.storage.all_parts, format.storage.dtypes, strict=True),
    )
    return sum(byte_count(dtypes[0], shapes[suffix][0]) for suffix, dtypes in parts)


@dataclass(frozen=True)
class WeightClass:
    """`linears` holds (count, rows, columns) of equal matrices; `other` counts parameters that are never quantized."""

    name: str
    format: WeightFormat
    linears: tuple[tuple[int, int, int], ...] = ()
    other: int = 0
    other_bytes: int = 2

    @property
    def parameters(self) -> int:
        return sum(count * rows * columns for count, rows, columns in self.linears) + self.other

    @property
    def bytes(self) -> int:
        stored = sum(
            count * linear_bytes(self.format, rows, columns)
            for count, rows, columns in self.linears
        )
        return stored + self.other * self.other_bytes


def weight_classes(model: ModelSpec) -> list[WeightClass]:
    """Every weight of the checkpoint, in the order of size."""
    hidden, layers, dense = model.hidden_size, model.num_hidden_layers, model.first_k_dense_replace
    moe, heads, width = layers - dense, model.num_attention_heads, model.moe_intermediate_size
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    norms = layers * (2 * hidden + model.q_lora_rank + model.kv_lora_rank) + hidden
    attention = module_format(model, "layers.{moe}.self_attn.o_proj")
    by_heads = (
        (layers, heads * model.qk_head_dim, model.q_lora_rank),
        (layers, heads * (model.qk_nope_head_dim + model.v_head_dim), model.kv_lora_rank),
        (layers, hidden, heads * model.v_head_dim),
    )
    shared = width * model.n_shared_experts
    classes = [
        WeightClass(
            "experts", module_format(model, "layers.{moe}.mlp.experts.0.up_proj"),
            _mlp(moe * model.n_routed_experts, hidden, width),
        ),
        WeightClass("attention, by heads", attention, by_heads),
        WeightClass("attention, latent", attention, ((layers, model.q_lora_rank, hidden), (layers, latent, hidden))),
        WeightClass(
            "shared experts", module_format(model, "layers.{moe}.mlp.shared_experts.up_proj"),
            _mlp(moe if model.n_shared_experts else 0, hidden, shared),
        ),
        WeightClass(
            "dense layers", module_format(model, "layers.{dense}.mlp.up_proj"),
            _mlp(dense, hidden, model.intermediate_size),
        ),
        WeightClass("embedding", WeightFormat.BF16, other=model.vocab_size * hidden),
        WeightClass("lm_head", WeightFormat.BF16, other=model.vocab_size * hidden),
        WeightClass("router", WeightFormat.BF16, other=moe * model.n_routed_experts * hidden),
        WeightClass("router bias", WeightFormat.BF16, other=moe * model.n_routed_experts, other_bytes=4),
        WeightClass("norms", WeightFormat.BF16, other=norms),
        WeightClass("vision", WeightFormat.BF16, other=VISION_PARAMETERS if model.has_vision else 0),
    ]  # fmt: skip
    return sorted((item for item in classes if item.parameters), key=lambda item: -item.bytes)


def _mlp(count: int, hidden: int, width: int) -> tuple[tuple[int, int, int], ...]:
    return ((2 * count, width, hidden), (count, hidden, width))


def module_format(model: ModelSpec, module: str) -> WeightFormat:
    """How the linear `module` is stored; {moe} and {dense} name a layer of that kind."""
    plain = f"model.{module.format(moe=model.first_k_dense_replace, dense=0)}"
    kept = model.quant.format.unquantized_modules(model.quant.exclude)
    unquantized = kept.match(plain) or kept.match(f"language_model.{plain}")
    return WeightFormat.BF16 if unquantized else model.quant.format


def checkpoint_bytes(model: ModelSpec) -> int:
    """Bytes of all tensors of the checkpoint."""
    return sum(item.bytes for item in weight_classes(model))


def weights_per_gpu(model: ModelSpec, layout: Layout) -> dict[str, float]:
    """Bytes on one rank by class. Tensor parallelism divides what has heads, widths or a vocabulary; the latent
    projections, the router, the norms and the vision tower are copied. With attention DP only the experts divide
    (that the engine copies embedding, lm_head and shared experts then is the careful assumption)."""
    divided = {"experts"} if layout.attention_dp else SHARDED
    return {
        item.name: item.bytes / (layout.gpus if item.name in divided else 1)
        for item in weight_classes(model)
    }


def head_parameters(head: HeadSpec) -> int:
    """Parameters of an Eagle3 head as the engine loads it, without an embedding, which is the target's."""
    shapes = expected_shapes(head)
    return sum(math.prod(shapes[name]) for name in (*tensor_names(head), "lm_head.weight"))
