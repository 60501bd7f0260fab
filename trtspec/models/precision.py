"""Which type to compute in where nobody asked for one, and how a CPU computes it: bfloat16 where the hardware
multiplies it, else float32, with large weights packed as FP16 times a power of two, equal to the original to the bit.

A product of one to sixteen rows spends its time on reading the weight. Half the bytes, laid out for FBGEMM's kernels,
take a third to nine tenths of the time, and four rows cost little more than one. Products and sums are
float32. A CPU without bfloat16 instructions computes bfloat16 this way too, results rounded to bfloat16 as hardware
does: torch's own product takes up to ten times as long there.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

# Names in torch.cpu.get_capabilities(): AVX-512 BF16 or AMX on x86, the bf16 or SVE bf16 extension on Arm.
NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
MIN_ELEMENTS = 2**17  # of a float32 weight; below, the operator's own overhead eats the gain
FP16_TOP_EXPONENT = 14  # scaled weights stay below 2^15; FP16 ends at 65504


def has_native_bf16(device: str | torch.device = "cpu") -> bool:
    """Whether `device` multiplies bfloat16 matrices in hardware.

    A CPU without such instructions (AVX2 only, say) still computes bfloat16, but through a generic kernel: on one, a
    product of 256 x 2048 weights took 1.5 times float32's time for one token, 9 times for 64 and 12 times for 384.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        if hasattr(torch.cpu, "get_capabilities"):
            found = torch.cpu.get_capabilities()
            return any(bool(found.get(name)) for name in NATIVE_BF16)
        return bool(torch.cpu._is_avx512_bf16_supported())  # torch before 2.10
    if kind == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
    return False


def default_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """bfloat16 where `device` has it natively, else float32."""
    return torch.bfloat16 if has_native_bf16(device) else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` of torch.float32."""
    return str(dtype).removeprefix("torch.")


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
        product = torch.ops.quantized.linear_dynamic_fp16.default(x.float(), self.packed)
        return product.mul_(self.unscale).to(x.dtype)


def pack(weight: Tensor) -> PackedWeight | None:
    """`weight` [out, in] packed; None where that does not pay (small float32, native bfloat16, not on x86) or would not
    be exact.

    BF16 weights have 8 significant bits: FP16 with its 11 holds all that are within a factor of 2^31 of the largest.
    """
    pays = (
        weight.dtype == torch.float32
        and weight.numel() >= MIN_ELEMENTS
        or through_float32(weight.dtype)
    )
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
    return PackedWeight(
        torch.ops.quantized.linear_prepack_fp16(scaled.contiguous(), None), 1 / scale
    )
