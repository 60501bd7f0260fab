"""A weight packed for products of few rows on an x86 CPU: FP16 times a power of two, equal to the original to the bit.

A product of one to sixteen rows spends its time on reading the weight. Half the bytes, laid out for FBGEMM's kernels,
take a third to nine tenths of the time, and four rows cost little more than one (docs/LOG.md). Products and sums are
float32. A CPU without bfloat16 instructions computes bfloat16 this way too, results rounded to bfloat16 as hardware
does: torch's own product takes up to ten times as long there.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from trtspec.models.precision import has_native_bf16

MIN_ELEMENTS = 2**17  # of a float32 weight; below, the operator's own overhead eats the gain
FP16_TOP_EXPONENT = 14  # scaled weights stay below 2^15; FP16 ends at 65504


@functools.cache
def through_float32(dtype: torch.dtype) -> bool:
    """Whether products of `dtype` on this CPU are best computed in float32 and rounded."""
    return dtype == torch.bfloat16 and not has_native_bf16("cpu")


class PackedWeight:
    """`product(x)` = x W^T, summed in float32, for W [out, in] that FP16 times a power of two holds exactly."""

    def __init__(self, packed: Any, unscale: float) -> None:
        self.packed = packed
        self.unscale = torch.tensor(unscale)  # a Python number would be made a tensor at every call

    def product(self, x: Tensor) -> Tensor:
        """x float32 or bfloat16 [..., in] -> [..., out] of x's type."""
        if x.dtype == torch.float32:
            return torch.ops.quantized.linear_dynamic_fp16.default(x, self.packed).mul_(self.unscale)
        return torch.ops.quantized.linear_dynamic_fp16.default(x.float(), self.packed).mul_(self.unscale).to(x.dtype)


def pack(weight: Tensor) -> PackedWeight | None:
    """`weight` [out, in] packed; None where that does not pay (small float32, native bfloat16, not on x86) or would not
    be exact.

    BF16 weights have 8 significant bits: FP16 with its 11 holds all that are within a factor of 2^31 of the largest.
    """
    pays = weight.dtype == torch.float32 and weight.numel() >= MIN_ELEMENTS or through_float32(weight.dtype)
    if not pays or not weight.is_cpu or "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    weight = weight.float()
    largest = float(weight.abs().max())
    if not 0 < largest < math.inf:
        return None
    scale = 2.0 ** (FP16_TOP_EXPONENT - math.floor(math.log2(largest)))
    scaled = weight * scale
    if not torch.equal(scaled.half().float() / scale, weight):
        return None
    return PackedWeight(torch.ops.quantized.linear_prepack_fp16(scaled.contiguous(), None), 1 / scale)
