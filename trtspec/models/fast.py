"""Faster forms of the other files' modules, for inference: the same functions and parameters.

`after_loading` and `prepare_for_decoding` replace the plain forms in a loaded model: StackedMoE on
any device, the others on a CPU. A form is a subclass of the plain module, which becomes it in place
(as torch's fully_shard does). So names, hooks and shared modules stay. tests/models/test_fast.py
compares each with its plain form and prints the difference and the bound on it.

| plain | here | gain |
|---|---|---|
| Linear | PackedLinear | few rows only read the weight: half the bytes, 0.3 to 0.9 of the time |
| RMSNorm | FoldedRMSNorm | four operators for nine |
| LatentAttention | FoldedLatentAttention | two products for four, one rotation for two |
| Experts | GroupedExperts | one activation for all experts, weights before the second product |
| MoE | StackedMoE | two products for all experts, if these are small |

Gradients need the plain forms, and so do weights that change: packed, folded and stacked copies
would not follow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.attention import AttentionStep
from trtspec.models.layers import MLP, Linear, RMSNorm
from trtspec.models.mla import LatentAttention
from trtspec.models.moe import Experts, MoE
from trtspec.models.precision import has_native_bf16

# Elements of a float32 weight. For smaller weights the operator's overhead exceeds the gain.
MIN_PACKED_ELEMENTS = 2**17
# Rows of a float32 product. With more rows the product is bound by arithmetic, not by reading the
# weight.
MAX_PACKED_ROWS = 64
FP16_TOP_EXPONENT = 14  # scaled weights stay below 2^15, because FP16 ends at 65504
# Up to this many weights per layer and this many tokens, one product over all experts is faster
# than a product for each expert.
MAX_STACKED_WEIGHTS = 2**21
MAX_STACKED_TOKENS = 32


def after_loading(model: nn.Module) -> None:
    """Replaces the routed experts on a CPU by `GroupedExperts`, which need no copy of a weight."""
    for module in model.modules():
        if type(module) is Experts and module.down.is_cpu:
            turn_into(GroupedExperts, module)


@torch.no_grad()
def prepare_for_decoding(model: nn.Module) -> None:
    """Replaces the modules of `model` by the forms that are faster for products of few rows.

    A second call does nothing. Weights that are not packed and have at least as many outputs as
    inputs are laid out in memory as [in, out]. This layout makes a product of one to sixteen rows
    up to a third faster.
    """
    modules = list(model.modules())
    # `LatentAttention` reads the weight of kv_b_proj itself, so the linear keeps its form.
    absorbed = {module.kv_b_proj for module in modules if isinstance(module, LatentAttention)}
    for module in modules:
        if type(module) is Linear and module not in absorbed:
            PackedLinear.replace(module)
        elif type(module) is RMSNorm and is_float32_on_cpu(module.weight):
            FoldedRMSNorm.replace(module)
        elif type(module) is LatentAttention and is_float32_on_cpu(module.kv_b_proj.weight):
            FoldedLatentAttention.replace(module)
        elif type(module) is MoE:
            StackedMoE.replace(module)
        elif isinstance(module, Experts) and is_float32_on_cpu(module.down) and is_small(module):
            module.gate_up.data = by_input(module.gate_up.data)
            module.down.data = by_input(module.down.data)


def turn_into(form: type[nn.Module], module: nn.Module, **attributes: Any) -> None:
    """Changes the class of `module` to its subclass `form` in place, and sets the attributes."""
    module.__class__ = form
    for name, value in attributes.items():
        setattr(module, name, value)


def is_float32_on_cpu(weight: Tensor) -> bool:
    """Whether the forms for float32 on a CPU are right for this weight."""
    return weight.dtype == torch.float32 and weight.is_cpu


def is_small(experts: Experts) -> bool:
    """Whether the experts of a layer are small enough to keep another copy of their weights."""
    return experts.gate_up.numel() + experts.down.numel() <= MAX_STACKED_WEIGHTS


def by_input(weight: Tensor) -> Tensor:
    """Returns the same weight [..., out, in], laid out in memory as [..., in, out]."""
    return weight.mT.contiguous().mT


class PackedLinear(Linear):
    """A linear with a packed copy of its weight."""

    packed: PackedWeight

    @staticmethod
    def replace(linear: Linear) -> None:
        """Packs the linear's weight, or changes its layout in memory, if that is faster."""
        packed = pack(linear.weight)
        if packed is not None:
            turn_into(PackedLinear, linear, packed=packed)
        elif is_float32_on_cpu(linear.weight) and linear.out_features >= linear.in_features:
            linear.weight.data = by_input(linear.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        """Computes x W^T, with the packed weight only for few rows or for bfloat16."""
        if x.dtype == torch.float32 and x.numel() > MAX_PACKED_ROWS * self.in_features:
            return F.linear(x, self.weight)
        return self.packed.product(x)


class PackedWeight:
    """A weight [out, in] in the FP16 layout of FBGEMM's kernels, times a power of two.

    The weight must be exact in that form. A CPU without bfloat16 instructions also computes
    bfloat16 products this way. The results are rounded to bfloat16 as hardware does. torch's own
    product takes up to ten times as long on such a CPU.

    Args:
        packed: FBGEMM's handle of the scaled weight.
        unscale: factor that undoes the scaling.
    """

    def __init__(self, packed: Any, unscale: float) -> None:
        self.packed = packed
        self.unscale = torch.tensor(unscale)  # a Python number would become a tensor at every call

    def product(self, x: Tensor) -> Tensor:
        """Computes x W^T with sums in float32, [..., out] in the dtype of x.

        x is [..., in] in float32 or bfloat16.
        """
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x.float(), self.packed)
        return product.mul_(self.unscale).to(x.dtype)


def pack(weight: Tensor) -> PackedWeight | None:
    """Packs a weight [out, in] on a CPU for FBGEMM.

    None if FBGEMM is absent, or if the packed product is not faster or not exact. The product is
    not faster for small float32 weights, and for bfloat16 weights on a CPU that multiplies
    bfloat16. BF16 weights have 8 significant bits and FP16 has 11. So FP16 holds all BF16 weights
    within a factor of 2^31 of the largest weight.
    """
    is_large_float32 = weight.dtype == torch.float32 and weight.numel() >= MIN_PACKED_ELEMENTS
    is_faster = is_large_float32 or through_float32(weight.dtype)
    if not is_faster or not weight.is_cpu:
        return None
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    weight = weight.float()
    largest = float(weight.abs().max())
    # An all-zero weight has no scale, and neither has one with infinity or NaN.
    if not 0 < largest < math.inf:
        return None
    scale = 2.0 ** (FP16_TOP_EXPONENT - math.floor(math.log2(largest)))
    scaled = weight * scale
    # The packed product must not change the model.
    if not torch.equal(scaled.half().float() / scale, weight):
        return None
    packed = torch.ops.quantized.linear_prepack_fp16(scaled.contiguous(), None)
    return PackedWeight(packed, 1 / scale)


@functools.cache
def through_float32(dtype: torch.dtype) -> bool:
    """Whether products of `dtype` on this CPU are faster if computed in float32 and rounded.

    True for bfloat16 on a CPU without bfloat16 instructions.
    """
    return dtype == torch.bfloat16 and not has_native_bf16("cpu")


class FoldedRMSNorm(RMSNorm):
    """RMSNorm by torch.hypot, in a third of the time of torch's own norm for few rows of float32.

    With n the size, rms(x) is |x| / sqrt(n), and sqrt(|x|^2 + n eps) is the hypotenuse.
    """

    root: Tensor  # sqrt(n eps)
    gain: Tensor  # weight * sqrt(n)

    @staticmethod
    def replace(norm: RMSNorm) -> None:
        """Turns the norm into this form in place."""
        size = len(norm.weight)
        root = torch.tensor(size * norm.eps, dtype=torch.float64).sqrt().float()
        turn_into(FoldedRMSNorm, norm, root=root, gain=norm.weight * size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the same as `RMSNorm.forward`."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(length, self.root)).mul_(self.gain)


class FoldedLatentAttention(LatentAttention):
    """Latent attention with W_UK multiplied into q_b_proj, and W_UV into o_proj.

    The two products are computed once, in float64. Shapes: N heads, C kv_lora_rank, R rope
    dimensions of a head, H hidden size.
    """

    q_folded: Tensor  # [N * (C + R), q_lora]
    o_folded: Tensor  # [H, N * C]

    @staticmethod
    def replace(mla: LatentAttention) -> None:
        """Turns the attention into this form in place.

        Does nothing if the folded weights would be larger than the plain ones, or for NVFP4.
        """
        plain = isinstance(mla.q_b_proj, Linear) and isinstance(mla.o_proj, Linear)  # no NVFP4
        rank = mla.kv_lora_rank
        # view_as_complex in `forward` needs the rope dimensions at an even offset, the rank.
        if not plain or rank % 2 or rank > min(mla.nope_dim, mla.v_dim):
            return
        dtype = mla.q_b_proj.weight.dtype
        w_uk, w_uv = (weight.double() for weight in mla.up_projections())
        w_uq = mla.q_b_proj.weight.double().unflatten(0, (mla.heads, -1))
        w_nope, w_rope = w_uq.split((mla.nope_dim, mla.rope_dim), 1)
        w_o = mla.o_proj.weight.double().unflatten(1, (mla.heads, -1)).transpose(0, 1)  # [N, H, v]
        w_q = torch.cat((w_uk.mT @ w_nope, w_rope), 1).flatten(0, 1)
        q_folded = by_input(w_q.to(dtype))
        w_out = (w_o @ w_uv).transpose(0, 1).flatten(1)
        o_folded = by_input(w_out.to(dtype))
        turn_into(FoldedLatentAttention, mla, q_folded=q_folded, o_folded=o_folded)

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Computes the same as `LatentAttention.forward`, [B, T, H]."""
        q_lora, kv_lora, k_rope = self.qkv_a_proj(x).split(self.a_sizes, -1)
        queries = F.linear(self.q_a_layernorm(q_lora), self.q_folded)
        # The query heads and the one shared key are rotated together, in place.
        latent = self.kv_a_layernorm(kv_lora)
        vectors = torch.cat((queries, latent, k_rope), -1)
        vectors = vectors.unflatten(-1, (self.heads + 1, -1))
        pairs = vectors[..., self.kv_lora_rank :].unflatten(-1, (-1, 2))
        torch.view_as_complex(pairs).mul_(step.rotation)
        attended = step.attend(vectors[:, :, -1], vectors[:, :, :-1], self.attention)
        return F.linear(attended.flatten(-2), self.o_folded)


class GroupedExperts(Experts):
    """Routed experts as grouped products over the tokens, sorted by expert."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Computes the same as `Experts.forward`, [tokens, H]."""
        experts = ids.flatten()
        order = experts.argsort(stable=True)
        sizes = experts.bincount(minlength=len(self.down)).tolist()
        tokens = order // ids.shape[1]
        # Large experts stay in bfloat16, because a float32 copy would take too much memory.
        wide = through_float32(x.dtype) and is_small(self)
        dtype = torch.float32 if wide else x.dtype
        inputs = x.index_select(0, tokens).to(dtype)
        scales = weights.flatten().index_select(0, order).unsqueeze(-1).to(dtype)
        gate_up = grouped_product(inputs, self.gate_up.to(dtype), sizes)
        gate, up = gate_up.chunk(2, -1)
        activated = F.silu(gate) * up * scales
        outputs = grouped_product(activated, self.down.to(dtype), sizes)
        summed = x.new_zeros(x.shape, dtype=torch.promote_types(dtype, torch.float32))
        summed = summed.index_add(0, tokens, outputs.to(summed.dtype))
        return summed.to(x.dtype)


def grouped_product(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Multiplies each expert's slice of x by the expert's weight. Returns [n, out].

    Args:
        x: inputs sorted by expert, [n, in].
        weight: weights of all experts, [E, out, in].
        sizes: number of inputs of each expert.
    """
    outputs = x.new_empty(len(x), weight.shape[1])
    slices = zip(x.split(sizes), weight.mT, outputs.split(sizes), strict=True)
    for tokens, expert, output in slices:
        if len(tokens):
            torch.mm(tokens, expert, out=output)
    return outputs


class StackedMoE(MoE):
    """Mixture of small experts as two products over all experts.

    Experts that the router does not choose have weight 0. A shared expert is another expert of the
    same width, which every token takes with weight 1. Shapes: E routed experts, S shared experts, I
    inner size of an expert, H hidden size.
    """

    up_product: Callable[[Tensor], Tensor]  # by [2 * (E + S) * I, H]: all gates, then all ups
    down_product: Callable[[Tensor], Tensor]  # by [H, (E + S) * I]
    shared: Tensor  # [E + S], 1 for shared experts, else 0

    @staticmethod
    def replace(moe: MoE) -> None:
        """Turns the mixture into this form in place. Does nothing for large or NVFP4 experts."""
        routed = moe.experts
        shared = moe.shared_experts
        if not isinstance(routed, Experts) or not isinstance(shared, MLP) or not is_small(routed):
            return
        if not isinstance(shared.gate_up_proj, Linear) or not isinstance(shared.down_proj, Linear):
            return  # an NVFP4 linear has no plain weight
        count, hidden, inner = routed.down.shape
        gate, up = routed.gate_up.chunk(2, 1)
        shared_gate, shared_up = shared.gate_up_proj.weight.chunk(2, 0)
        by_gate = gate.reshape(-1, hidden), shared_gate, up.reshape(-1, hidden), shared_up
        by_down = routed.down.transpose(0, 1).reshape(hidden, -1), shared.down_proj.weight
        down = torch.cat(by_down, 1)
        numbers = torch.arange(down.shape[1] // inner, device=down.device)
        turn_into(
            StackedMoE,
            moe,
            up_product=product_with(torch.cat(by_gate)),
            down_product=product_with(down),
            shared=(numbers >= count).to(down.dtype),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Computes the same as `MoE.forward`, in the shape of x [..., H]."""
        flat = x.flatten(0, -2)
        # For many tokens the products over experts that are not chosen cost more than they save.
        if len(flat) > MAX_STACKED_TOKENS:
            return super().forward(x)
        ids, weights = self.gate(flat)
        factors = self.shared.expand(len(flat), -1).scatter(1, ids, weights.to(flat.dtype))
        gate, up = self.up_product(flat).chunk(2, -1)
        active = F.silu(gate).mul_(up).view(len(flat), len(self.shared), -1)
        weighted = active.mul_(factors.unsqueeze(-1)).flatten(1)
        return self.down_product(weighted).view_as(x)


def product_with(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that computes x W^T [tokens, out] for x [tokens, in].

    The function uses a packed copy of the weight if `pack` makes one.

    Args:
        weight: W, [out, in].
    """
    packed = pack(weight)
    if packed is not None:
        return packed.product
    return lambda x: F.linear(x, weight)
