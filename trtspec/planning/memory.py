"""Memory of one GPU: weights, head, reserve, and what is left for the KV cache, in bytes and in tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtspec.formats import KV_ELEMENT_BYTES
from trtspec.planning.layout import ATTENTION_DP_KV_FRACTION, KV_FRACTION, Layout
from trtspec.planning.weights import head_weights, weights_per_gpu
from trtspec.specs import GpuSpec, HeadSpec, ModelSpec

# Communicators 0.41 GB and context with libraries 3.76 GB (aiconfigurator), activations 1.2 GB and MoE workspace 0.7 to
# 5.6 GB at 8192 tokens, the rest for CUDA graphs. With 9 to 10 GB the formula gives the 715,072 KV tokens that vLLM
# reports for Kimi-K2-Thinking on 8 H200.
RESERVE = 9.0e9
RESERVE_TOKENS = 8192
ACTIVATION_BYTES = 2 * 10  # BF16, ten live tensors of the model's width per token


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
    kv_bytes_per_token: float = field(default=0.0)

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
    reserve: float | None = None,
    max_num_tokens: int = RESERVE_TOKENS,
) -> Memory:
    """`fraction` is TensorRT-LLM's free_gpu_memory_fraction: of what is free after the weights, not of the whole. None:
    what `trtspec build-config` writes for the layout."""
    if fraction is None:
        fraction = ATTENTION_DP_KV_FRACTION if layout.attention_dp else KV_FRACTION
    if reserve is None:
        reserve = RESERVE + max(0, max_num_tokens - RESERVE_TOKENS) * model.hidden_size * ACTIVATION_BYTES
    dtype = model.quant.kv_cache or "bf16"
    return Memory(
        layout=layout,
        capacity=float(gpu.memory_bytes),
        weights=weights_per_gpu(model, layout),
        head=head_weights(head).per_gpu(layout) if head else 0.0,
        reserve=reserve,
        fraction=fraction,
        kv_dtype=dtype,
        kv_bytes_per_token=kv_elements_per_token(model, head, layout) * KV_ELEMENT_BYTES[dtype],
    )


def kv_elements_per_token(model: ModelSpec, head: HeadSpec | None, layout: Layout) -> float:
    """Cache elements per token on one rank. Latents have no heads to divide, so every tensor-parallel rank holds all of
    them, the MLA head's too; an MHA head's keys and values are divided by their heads."""
    if head is None:
        return model.kv_elements_per_token
    own: float = head.kv_elements_per_token
    if head.attention == "mha":
        own /= min(layout.attention_tp, head.num_key_value_heads)
    return model.kv_elements_per_token + own
