"""Parameters and bytes of a Kimi model and an Eagle3 head by class, from their shapes and quantization alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trtspec.formats import WeightFormat
from trtspec.planning.layout import Layout
from trtspec.specs import HeadSpec, ModelSpec

# MoonViT-3d of K2.5 and later and its projector into the text width (27 blocks, 1152 wide; kept in BF16 everywhere)
VISION_PARAMETERS = 416_866_032 + 54_277_888
SHARDED = {"experts", "shared experts", "dense layers", "attention, by heads", "embedding", "lm_head"}


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
        stored = sum(count * self.format.linear_bytes(rows, columns) for count, rows, columns in self.linears)
        return stored + self.other * self.other_bytes

    @property
    def sharded(self) -> bool:
        return self.name in SHARDED


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
    """How the linear `module` is stored; {moe} and {dense} stand for a layer of that kind."""
    quant = model.quant
    if quant.format.is_plain:
        return quant.format
    layer = {"moe": str(model.first_k_dense_replace), "dense": "0"}
    plain = f"model.{module.format(**layer)}"
    names = (plain, f"language_model.{plain}")
    return (
        WeightFormat.BF16
        if any(_matches(pattern, name) for pattern in quant.exclude for name in names)
        else quant.format
    )


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return fnmatchcase(name, pattern)


def checkpoint_bytes(model: ModelSpec) -> int:
    """Bytes of all tensors of the checkpoint."""
    return sum(item.bytes for item in weight_classes(model))


def weights_per_gpu(model: ModelSpec, layout: Layout) -> dict[str, float]:
    """Bytes on one rank by class. Tensor parallelism divides what has heads, widths or a vocabulary; the latent
    projections, the router, the norms and the vision tower are copied. With attention DP only the experts divide
    (that the engine copies embedding, lm_head and shared experts then is the careful assumption)."""
    divided = {"experts"} if layout.attention_dp else SHARDED
    return {item.name: item.bytes / (layout.gpus if item.name in divided else 1) for item in weight_classes(model)}


@dataclass(frozen=True)
class HeadWeights:
    """Parameters of an Eagle3 head as the engine loads it: its embedding is the target's."""

    body: int
    lm_head: int

    @property
    def bytes(self) -> int:
        return 2 * (self.body + self.lm_head)

    def per_gpu(self, layout: Layout) -> float:
        return self.bytes / layout.attention_tp


def head_weights(head: HeadSpec) -> HeadWeights:
    """From the shapes of facts: attention over 2 x hidden, a dense MLP, fc from the captured layers; BF16."""
    hidden, heads = head.hidden_size, head.num_attention_heads
    if head.attention == "mla":
        attention = 2 * hidden * (head.q_lora_rank + head.kv_lora_rank + head.qk_rope_head_dim)
        attention += head.q_lora_rank * heads * (head.qk_nope_head_dim + head.qk_rope_head_dim)
        attention += head.kv_lora_rank * heads * (head.qk_nope_head_dim + head.v_head_dim)
        attention += heads * head.v_head_dim * hidden
    else:
        attention = 2 * hidden * head.head_dim * (heads + 2 * head.num_key_value_heads) + heads * head.head_dim * hidden
    mlp = 3 * hidden * head.intermediate_size
    fc = head.num_aux * head.target_hidden_size * hidden
    return HeadWeights(attention + mlp + fc + 4 * hidden, head.draft_vocab_size * hidden)
