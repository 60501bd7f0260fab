"""NVFP4: 4-bit E2M1 values, one FP8 E4M3 scale per 16 values of a row, one FP32 scale per tensor.

real value = E2M1 value * fp32(scale) * scale_2. The bytes equal those of ModelOpt's export for the same amax, with one
exception: where ModelOpt divides zero by zero (an all-zero tensor) and stores NaN scales, `scale_2` is 1/2688 here,
the block scales are 1.0 (byte 0x38) and the codes 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from trtspec.errors import TrtspecError
from trtspec.formats import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK, NVFP4_RANGE

BLOCK = NVFP4_BLOCK
E4M3_SMALLEST = 2.0**-9  # smaller block scales are raised to it, so that tiny blocks do not vanish
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints; ties go to the even code
AMAX_OF_ZERO = 1.0  # in place of the amax of an all-zero tensor
DECODE_CHUNK = 1 << 16


@dataclass(frozen=True)
class NVFP4Tensor:
    """A weight of shape [N, K]: `packed` uint8 [N, K/2] (even column in the low nibble), `scale` float8_e4m3fn
    [N, K/16], `scale_2` float32 scalar."""

    packed: torch.Tensor
    scale: torch.Tensor
    scale_2: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2


def scale_2_of(amax: torch.Tensor) -> torch.Tensor:
    """amax / (6 * 448) in float32, one division; of 1.0 where that is zero."""
    scale_2 = amax.float() / NVFP4_RANGE
    return torch.where(scale_2 == 0, AMAX_OF_ZERO / NVFP4_RANGE, scale_2)


def block_scales(block_amax: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn scales of blocks with these float32 maxima; the order of the divisions decides the last bit."""
    scale = block_amax / (E2M1_MAX * scale_2)
    return (
        torch.where(scale == 0, 1.0, scale).clamp(E4M3_SMALLEST, E4M3_MAX).to(torch.float8_e4m3fn)
    )


def quantize(
    weight: torch.Tensor, amax: torch.Tensor | None = None, weight_scales: str = "max"
) -> NVFP4Tensor:
    """Quantizes [N, K] bf16, fp16 or fp32, on the device of `weight`; the definition of the encoding.

    `amax` (float32 scalar) is given when gate and up share it. `weight_scales` max takes each block's scale from its
    maximum, mse the one of least squared error (ModelOpt's `fp8_scale_sweep`).
    K is a multiple of 16, as `plan` checks. Raises TrtspecError when the weight holds NaN or infinity.
    """
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // BLOCK, BLOCK)
    maxima = blocks.abs().amax(-1).float()
    amax = maxima.amax() if amax is None else amax
    if not bool(torch.isfinite(maxima.amax()) & torch.isfinite(amax)):
        raise TrtspecError(
            "the weight holds NaN or infinity", "find the tensor with `trtspec inspect --json`"
        )
    scale_2 = scale_2_of(amax)
    scale = block_scales(maxima, scale_2)
    if weight_scales == "mse":
        scale = best_scales(blocks.reshape(-1, BLOCK), amax).view(scale.shape)
    codes = e2m1_codes(blocks.float() / (scale.float() * scale_2).unsqueeze(-1)).reshape(
        rows, columns
    )
    return NVFP4Tensor(codes[:, 0::2] | (codes[:, 1::2] << 4), scale, scale_2)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """uint8 codes of float32 values: magnitude in three bits, nearest with ties to even; bit 3 where negative."""
    magnitude, codes = (
        values.abs(),
        torch.zeros(values.shape, dtype=torch.uint8, device=values.device),
    )
    for index, bound in enumerate(E2M1_BOUNDS):
        codes += ~((magnitude < bound) if index % 2 else (magnitude <= bound))
    return codes | ((values < 0).to(torch.uint8) << 3)


def codes_times_scale(tensor: NVFP4Tensor) -> torch.Tensor:
    """bf16 [N, K] of E2M1 value * block scale, exact (six significant bits); the real weight is this times scale_2."""
    rows, columns = tensor.shape
    result = torch.empty(rows, columns, dtype=torch.bfloat16)
    _decode(tensor, tensor.scale.reshape(-1, 1).to(torch.bfloat16), result.view(-1, BLOCK))
    return result


def dequantize(tensor: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[N, K] of value * (fp32(scale) * scale_2), computed in float32, then cast."""
    rows, columns = tensor.shape
    result = torch.empty(rows, columns, dtype=dtype)
    _decode(tensor, (tensor.scale.float() * tensor.scale_2).reshape(-1, 1), result.view(-1, BLOCK))
    return result


def _decode(tensor: NVFP4Tensor, factor: torch.Tensor, blocks: torch.Tensor) -> None:
    """blocks [n, 16] = E2M1 value * factor [n, 1], in factor's dtype, then cast; cache-sized chunks."""
    packed, table, step = (
        tensor.packed.reshape(-1, BLOCK // 2),
        _value_pairs(),
        DECODE_CHUNK // BLOCK,
    )
    for start in range(0, blocks.shape[0], step):
        part = slice(start, start + step)
        pairs = table.index_select(0, packed[part].reshape(-1).to(torch.int32))
        blocks[part] = pairs.view(torch.bfloat16).view(-1, BLOCK) * factor[part]


def fake_quantize_activation(
    x: torch.Tensor, input_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What an NVFP4 kernel sees of an activation: (values, input_scale), real = values * input_scale.

    `x` [..., K] of any float dtype, `input_scale` float32 scalar (amax / 2688 of calibration), or one for each row, as
    [..., 1]. Values are E2M1 code *
    E4M3 block scale, exact in bf16. A block larger than calibration saw saturates, as on the device.
    """
    blocks = x.float().reshape(-1, BLOCK)
    each = input_scale
    if input_scale.dim():
        each = input_scale.expand(*x.shape[:-1], x.shape[-1] // BLOCK).reshape(-1, 1)
    scale = block_scales(blocks.abs().amax(-1, keepdim=True), each).float()
    values = round_to_e2m1(blocks / (scale * each)) * scale
    return values.to(torch.bfloat16).reshape(x.shape), input_scale


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value, ties to even, as float32.

    Adding and subtracting 2^22, 2^23 or 2^24 rounds to multiples of 0.5, 1 or 2: E2M1's steps below 2, below 4, above.
    """
    magnitude = values.abs()
    fine, middle, coarse = ((magnitude + 2.0**bits) - 2.0**bits for bits in (22, 23, 24))
    rounded = torch.where(magnitude < 2, fine, torch.where(magnitude < 4, middle, coarse)).clamp(
        max=E2M1_MAX
    )
    return torch.copysign(rounded, values)


@functools.cache
def _value_pairs() -> torch.Tensor:
    """int32 [256]: for each packed byte its two values as two bf16, low nibble first. -0 decodes to +0."""
    signed = torch.tensor(E2M1_VALUES + (0.0,) + tuple(-value for value in E2M1_VALUES[1:]))
    codes = torch.arange(256)
    pairs = torch.stack((signed[codes & 15], signed[codes >> 4]), dim=-1).to(torch.bfloat16)
    return pairs.view(torch.int32).reshape(256)


# Scales of least squared error, ModelOpt's `mse` with `fp8_scale_sweep`: of the 126 scales of a block the smallest one
# with the least error. ModelOpt's own arithmetic is kept to the last bit: its unit, its division, its sum of squares in
# the order in which PyTorch adds sixteen floats. The C kernel finds the same scale from fewer candidates.
SMALLEST, LARGEST, ONE = 1, 0x7E, 0x38  # E4M3 codes
SEARCH_CHUNK = 1 << 13  # blocks


def search_unit(amax: torch.Tensor) -> torch.Tensor:
    """float32 scalar: the value of a block scale of 1.0 while ModelOpt searches; `scale_2` but for its rounding."""
    return 1.0 / (448.0 / (amax.float() / 6.0))


def best_scales(blocks: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [n] of least squared error for finite `blocks` [n, 16]; of equal ones the smallest.

    `amax` is the float32 largest magnitude of the tensor (of the group, where a partner shares it). Blocks of zeros get
    2^-9, as in ModelOpt; a tensor of zeros gets 1.0. `quantize` refuses other tensors below TINIEST_AMAX.
    """
    codes = torch.full(blocks.shape[:1], ONE, dtype=torch.uint8, device=blocks.device)
    if not float(amax):
        return codes.view(torch.float8_e4m3fn)
    candidates = torch.arange(LARGEST, SMALLEST - 1, -1, device=amax.device).to(torch.uint8)
    divisors = candidates.view(torch.float8_e4m3fn).float() * search_unit(amax)
    for part, chosen in zip(blocks.split(SEARCH_CHUNK), codes.split(SEARCH_CHUNK), strict=True):
        magnitudes = part.float().abs()
        maximum, least = (
            magnitudes.amax(-1),
            torch.full(chosen.shape, torch.inf, device=chosen.device),
        )
        for code, divisor in zip(candidates, divisors, strict=True):
            error = _squared_error(magnitudes, divisor)
            torch.where(error <= least, code, chosen, out=chosen)
            torch.minimum(error, least, out=least)
            # a smaller scale clips the maximum further, which alone costs more already
            if bool(((maximum - E2M1_MAX * divisor).clamp(min=0).square() > least).all()):
                break
    return codes.view(torch.float8_e4m3fn)


def _squared_error(magnitudes: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Of each block [n, 16] under one scale. Value i is added to value i + 8 first."""
    squares = (magnitudes - round_to_e2m1(magnitudes / divisor) * divisor).square()
    total = torch.zeros_like(squares[:, 0])
    for pair in (squares[:, : BLOCK // 2] + squares[:, BLOCK // 2 :]).unbind(-1):
        total += pair
    return total
