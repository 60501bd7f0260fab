"""Memory of one GPU in bytes: weights, head, reserve, and the rest for the KV cache.

The parameters and bytes of a Kimi model and of an Eagle3 head follow from their shapes and
quantization alone.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass

from trtspec.checkpoint.heads.shapes import expected_shapes, tensor_names
from trtspec.checkpoint.writer import byte_count
from trtspec.formats import KV_ELEMENT_BYTES, WeightFormat
from trtspec.planning.layout import ATTENTION_DP_KV_FRACTION, KV_FRACTION, Layout
from trtspec.specs import GpuSpec, HeadSpec, ModelSpec

# Bytes that neither weights nor KV cache use: communicators 0.41 GB and context with libraries
# 3.76 GB (aiconfigurator), activations 1.2 GB and MoE workspace 0.7 to 5.6 GB at 8192 tokens, the
# rest for CUDA graphs. With 9 to 10 GB the formula gives the 715,072 KV tokens that vLLM reports
# for Kimi-K2-Thinking on 8 H200.
RESERVE = 9.0e9
RESERVE_TOKENS = 8192  # tokens per step that RESERVE is for
TRANSFER_BUFFERS = 2  # one to send from and one to receive into (cacheTransBuffer.cpp)
BF16_BYTES = 2
ACTIVATION_BYTES = BF16_BYTES * 10  # ten live tensors of the model's width per token
# roles of weights that tensor parallelism divides over the ranks
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
    """The memory of one GPU of a server, in bytes.

    Args:
        capacity: memory of the GPU.
        weights: bytes of the target's weights, by role.
        head: bytes of the head's weights.
        reserve: bytes for working memory.
        fraction: share of the free memory that the KV cache takes.
        kv_dtype: type of a KV cache element, as in `KV_ELEMENT_BYTES`.
        kv_bytes_per_token: bytes of one token in one cache.
    """

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
        """Bytes of all weights of the target on the GPU."""
        return sum(self.weights.values())

    @property
    def free(self) -> float:
        """Bytes that weights, head and reserve leave. Negative if they do not fit."""
        return self.capacity - self.weights_total - self.head - self.reserve

    @property
    def kv(self) -> float:
        """Bytes of the KV cache."""
        return max(0.0, self.fraction * self.free)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens in the KV caches of the whole group."""
        return int(self.kv / self.kv_bytes_per_token) * self.layout.caches

    def sequences(self, tokens: int) -> int:
        """Number of sequences of `tokens` tokens that the KV caches of the whole group hold.

        With attention DP a sequence never spans two ranks.
        """
        caches = self.layout.caches
        tokens_per_cache = self.kv_tokens // caches
        return tokens_per_cache // tokens * caches


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
    """Memory of one GPU of a server.

    Args:
        fraction: TensorRT-LLM's free_gpu_memory_fraction, a share of the memory that the weights
            leave. None for the share that `trtspec build-config` writes for the layout.
        max_num_tokens: number of tokens that one step computes. More than RESERVE_TOKENS enlarge
            the reserve.
        transfer_tokens: number of tokens that each transfer buffer of a disaggregated server holds.
    """
    if fraction is None:
        fraction = ATTENTION_DP_KV_FRACTION if layout.attention_dp else KV_FRACTION
    kv_dtype = model.quant.kv_cache or "bf16"
    token_bytes = kv_elements_per_token(model, head, layout) * KV_ELEMENT_BYTES[kv_dtype]
    head_bytes = 0.0
    if head:
        head_bytes = BF16_BYTES * head_parameters(head) / layout.attention_tp
    tokens_beyond = max(0, max_num_tokens - RESERVE_TOKENS)
    activations = tokens_beyond * model.hidden_size * ACTIVATION_BYTES
    transfer_buffers = TRANSFER_BUFFERS * transfer_tokens * token_bytes
    return Memory(
        layout=layout,
        capacity=float(gpu.memory_bytes),
        weights=weights_per_gpu(model, layout),
        head=head_bytes,
        reserve=RESERVE + activations + transfer_buffers,
        fraction=fraction,
        kv_dtype=kv_dtype,
        kv_bytes_per_token=token_bytes,
    )


def kv_elements_per_token(model: ModelSpec, head: HeadSpec | None, layout: Layout) -> float:
    """Number of KV cache elements per token on one rank.

    Latents have no heads to divide, so every tensor-parallel rank holds all latents, also of an MLA
    head. Keys and values of an MHA head are divided over the ranks by its heads.
    """
    if head is None:
        return model.kv_elements_per_token
    head_elements: float = head.kv_elements_per_token
    if not head.is_mla:
        head_elements /= min(layout.attention_tp, head.num_key_value_heads)
    return model.kv_elements_per_token + head_elements


def weights_per_gpu(model: ModelSpec, layout: Layout) -> dict[str, float]:
    """Bytes of weights on one rank, by role.

    Tensor parallelism divides weights that have heads, widths or a vocabulary. Latent projections,
    router, norms and vision tower are copied. With attention DP only the experts are divided. It is
    the careful assumption that the engine copies embedding, lm_head and shared experts there.
    """
    divided = {"experts"} if layout.attention_dp else SHARDED
    sizes = {}
    for role, size in weights_by_role(model).items():
        ranks = layout.gpus if role in divided else 1
        sizes[role] = size / ranks
    return sizes


@functools.cache
def weights_by_role(model: ModelSpec) -> dict[str, int]:
    """Bytes of the checkpoint's tensors by role, the largest role first."""
    sizes = Counter[str]()
    for stem, part in model.family.parts(model):
        if len(part.shape) == 2:  # a matrix, which may be quantized
            module = stem + part.name.format(0).removesuffix(".weight")
            stored = linear_bytes(model.quant.format_of(module, part.role), *part.shape)
        else:
            element_bytes = 4 if part.role == "router bias" else BF16_BYTES
            stored = element_bytes * math.prod(part.shape)
        sizes[part.role] += part.copies * stored
    if model.has_vision:
        sizes["vision"] = BF16_BYTES * model.family.vision_parameters
    return {role: size for role, size in sizes.most_common() if size}


def linear_bytes(format: WeightFormat, rows: int, columns: int) -> int:
    """Bytes of one stored [rows, columns] matrix with its scales, in a published checkpoint."""
    shapes = format.part_shapes(rows, columns)
    size = 0
    for suffix, dtypes in zip(format.storage.all_parts, format.storage.dtypes, strict=True):
        size += byte_count(dtypes[0], shapes[suffix][0])
    return size


def checkpoint_bytes(model: ModelSpec) -> int:
    """Bytes of all tensors of the checkpoint."""
    return sum(weights_by_role(model).values())


def head_parameters(head: HeadSpec) -> int:
    """Number of parameters of an Eagle3 head as the engine loads it, without an embedding.

    The engine shares the target's embedding with the head.
    """
    shapes = expected_shapes(head)
    return sum(math.prod(shapes[name]) for name in (*tensor_names(head), "lm_head.weight"))
