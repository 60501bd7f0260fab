"""NVFP4: 4-bit E2M1 values, one FP8 E4M3 scale per 16 values of a row, one FP32 scale per tensor.

The real value is E2M1 value * fp32(scale) * scale_2. The bytes equal the bytes of ModelOpt's export
for the same amax, with one exception. For an all-zero tensor ModelOpt divides zero by zero, and
stores NaN scales. This module stores 1/2688 as `scale_2`, 1.0 as block scales (byte 0x38), and
codes of 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from trtspec.errors import TrtspecError
from trtspec.formats import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK, NVFP4_RANGE

BLOCK = NVFP4_BLOCK
# Smallest positive E4M3 value. Smaller block scales become this value, because a scale of 0 would
# erase the block.
E4M3_SMALLEST = 2.0**-9
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code, without the sign bit
# Midpoints between neighbouring values. A magnitude on a midpoint gets the even code.
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
AMAX_OF_ZERO = 1.0  # replaces the amax of an all-zero tensor
DECODE_CHUNK = 1 << 16  # values decoded at a time, so that intermediates stay in the CPU's cache


@dataclass(frozen=True)
class NVFP4Tensor:
    """An NVFP4 weight of shape [N, K].

    packed: uint8 [N, K/2], two codes per byte, the code of the even column in the low nibble.
    scale: float8_e4m3fn [N, K/16], scale of each block of 16 values.
    scale_2: float32 scalar, scale of the whole tensor.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    scale_2: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the decoded weight, (N, K)."""
        rows, packed_columns = self.packed.shape
        return rows, packed_columns * 2


def quantize(
    weight: torch.Tensor, amax: torch.Tensor | None = None, weight_scales: str = "max"
) -> NVFP4Tensor:
    """Quantizes a weight to NVFP4, on the weight's device. This function defines the encoding.

    Raises TrtspecError if the weight or `amax` is NaN or infinity.

    Args:
        weight: [N, K] in bf16, fp16 or fp32. K must be a multiple of 16.
        amax: float32 scalar, largest magnitude of all weights that share `scale_2`, such as gate
            and up projections. None: the largest magnitude of `weight`.
        weight_scales: rule for the block scales. "max": from the maximum of the block. "mse": the
            scale of least squared error (ModelOpt's `fp8_scale_sweep`).
    """
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // BLOCK, BLOCK)
    block_amax = blocks.abs().amax(-1).float()
    weight_amax = block_amax.amax()
    if amax is None:
        amax = weight_amax
    is_finite = torch.isfinite(weight_amax) & torch.isfinite(amax)
    if not bool(is_finite):
        message = "the weight holds NaN or infinity"
        raise TrtspecError(message, "find the tensor with `trtspec inspect --json`")
    scale_2 = scale_2_of(amax)
    if weight_scales == "mse":
        scale = best_scales(blocks.reshape(-1, BLOCK), amax).view(block_amax.shape)
    else:
        scale = block_scales(block_amax, scale_2)
    value_per_code = scale.float() * scale_2
    codes = e2m1_codes(blocks.float() / value_per_code.unsqueeze(-1))
    codes = codes.reshape(rows, columns)
    even_columns = codes[:, 0::2]
    odd_columns = codes[:, 1::2]
    return NVFP4Tensor(even_columns | (odd_columns << 4), scale, scale_2)


def scale_2_of(amax: torch.Tensor) -> torch.Tensor:
    """Returns `scale_2` for a largest magnitude: amax / (6 * 448) in float32.

    An amax of zero gives 1 / (6 * 448).
    """
    # A single division, because two would round twice.
    scale_2 = amax.float() / NVFP4_RANGE
    return torch.where(scale_2 == 0, AMAX_OF_ZERO / NVFP4_RANGE, scale_2)


def block_scales(block_amax: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Returns the float8_e4m3fn scales of blocks, in the shape of `block_amax`.

    A block of zeros gets 1.0.

    Args:
        block_amax: float32, largest magnitude of each block.
        scale_2: float32, scale of the tensor.
    """
    # This order of the operations is ModelOpt's. Another order would change the last bit.
    scale = block_amax / (E2M1_MAX * scale_2)
    scale = torch.where(scale == 0, 1.0, scale)
    return scale.clamp(E4M3_SMALLEST, E4M3_MAX).to(torch.float8_e4m3fn)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Returns the codes of the nearest E2M1 values, uint8 in the shape of `values`.

    Ties get the even code. Bits 0 to 2 are the magnitude, and bit 3 is set if the value is
    negative.

    Args:
        values: float32 of any shape.
    """
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for index, bound in enumerate(E2M1_BOUNDS):
        # Bound i is between the codes i and i + 1. A value on the bound gets the even one.
        is_below = magnitude < bound if index % 2 else magnitude <= bound
        codes += ~is_below
    sign = (values < 0).to(torch.uint8)
    return codes | (sign << 3)


def codes_times_scale(tensor: NVFP4Tensor) -> torch.Tensor:
    """Returns E2M1 value * block scale of each weight, bf16 [N, K].

    The real weight is this product times `scale_2`. bf16 holds the product exactly, because it has
    at most six significant bits.
    """
    values = torch.empty(tensor.shape, dtype=torch.bfloat16)
    _decode(tensor, tensor.scale.to(torch.bfloat16), values)
    return values


def dequantize(tensor: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Returns the real weights [N, K], computed in float32 and cast to `dtype`."""
    values = torch.empty(tensor.shape, dtype=dtype)
    _decode(tensor, tensor.scale.float() * tensor.scale_2, values)
    return values


def _decode(tensor: NVFP4Tensor, factors: torch.Tensor, values: torch.Tensor) -> None:
    """Writes E2M1 value * factor into `values` [N, K], computed in the dtype of `factors`.

    `factors` [N, K/16]: factor of each block.
    """
    packed = tensor.packed.reshape(-1, BLOCK // 2)
    factors = factors.reshape(-1, 1)
    blocks = values.view(-1, BLOCK)
    table = _value_pairs()
    step = DECODE_CHUNK // BLOCK
    for start in range(0, blocks.shape[0], step):
        chunk = slice(start, start + step)
        indices = packed[chunk].reshape(-1).to(torch.int32)
        pairs = table.index_select(0, indices)
        blocks[chunk] = pairs.view(torch.bfloat16).view(-1, BLOCK) * factors[chunk]


@functools.cache
def _value_pairs() -> torch.Tensor:
    """Returns the decoding table of packed bytes, int32 [256].

    Each entry holds two bf16 values, with the value of the low nibble first. -0 decodes to +0.
    """
    negative = tuple(-value for value in E2M1_VALUES[1:])
    # Codes 8 to 15 have the sign bit. Code 8 is -0.
    values = torch.tensor(E2M1_VALUES + (0.0,) + negative)
    packed = torch.arange(256)
    low = values[packed & 15]
    high = values[packed >> 4]
    pairs = torch.stack((low, high), dim=-1).to(torch.bfloat16)
    return pairs.view(torch.int32).reshape(256)


def fake_quantize_activation(
    x: torch.Tensor, input_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds an activation to NVFP4, as kernels do. Returns values and input scale.

    The rounded activation is values * input_scale. The values are E2M1 value * block scale, which
    bf16 holds exactly. Blocks with larger magnitudes than in calibration saturate, as on the GPU.

    Args:
        x: [..., K] of any float dtype.
        input_scale: float32 scalar, amax / 2688 of calibration. Or one for each row, [..., 1].
    """
    blocks = x.float().reshape(-1, BLOCK)
    block_scale_2 = input_scale
    if input_scale.dim():  # one scale for each row: repeated for each block
        blocks_per_row = x.shape[-1] // BLOCK
        block_scale_2 = input_scale.expand(*x.shape[:-1], blocks_per_row).reshape(-1, 1)
    block_amax = blocks.abs().amax(-1, keepdim=True)
    scale = block_scales(block_amax, block_scale_2).float()
    values = round_to_e2m1(blocks / (scale * block_scale_2)) * scale
    return values.to(torch.bfloat16).reshape(x.shape), input_scale


# A float32 value has 24 significant bits. So adding 2^22 and subtracting it again rounds a small
# value to a multiple of 0.5, ties to even. 2^23 gives multiples of 1, and 2^24 multiples of 2.
ROUND_TO_HALVES = 2.0**22
ROUND_TO_ONES = 2.0**23
ROUND_TO_TWOS = 2.0**24


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Returns the nearest E2M1 value of each float32 value, ties to even, as float32.

    E2M1 values are multiples of 0.5 below 2, multiples of 1 below 4, and multiples of 2 above.
    """
    magnitude = values.abs()
    halves = (magnitude + ROUND_TO_HALVES) - ROUND_TO_HALVES
    ones = (magnitude + ROUND_TO_ONES) - ROUND_TO_ONES
    twos = (magnitude + ROUND_TO_TWOS) - ROUND_TO_TWOS
    from_two_on = torch.where(magnitude < 4, ones, twos)
    rounded = torch.where(magnitude < 2, halves, from_two_on)
    return torch.copysign(rounded.clamp(max=E2M1_MAX), values)


# Search for the block scales of least squared error, as in ModelOpt's `mse` with `fp8_scale_sweep`.
# If several of the 126 scales have the least error, the smallest is taken. The arithmetic equals
# ModelOpt's to the last bit: the unit, the division, and the order in which PyTorch adds the
# squares of sixteen floats. The C kernel finds the same scale from fewer candidates.
SMALLEST_CODE = 1  # E4M3 code of the smallest positive scale
LARGEST_CODE = 0x7E  # E4M3 code of 448
CODE_OF_ONE = 0x38  # E4M3 code of 1.0
SEARCH_CHUNK = 1 << 13  # blocks searched at a time, which limits the memory


def best_scales(blocks: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Returns the block scales of least squared error, float8_e4m3fn [n].

    Of several such scales, the smallest is taken. A block of zeros gets 2^-9, as in ModelOpt. If
    `amax` is zero, all blocks get 1.0.

    Args:
        blocks: [n, 16], finite values.
        amax: float32 scalar, largest magnitude of all weights that share `scale_2`. It must be 0 or
            at least TINIEST_AMAX, because smaller magnitudes underflow in the search.
    """
    codes = torch.full(blocks.shape[:1], CODE_OF_ONE, dtype=torch.uint8, device=blocks.device)
    if float(amax):
        chunks = zip(blocks.split(SEARCH_CHUNK), codes.split(SEARCH_CHUNK), strict=True)
        for block_chunk, code_chunk in chunks:
            _search_codes(block_chunk.float().abs(), search_unit(amax), code_chunk)
    return codes.view(torch.float8_e4m3fn)


def search_unit(amax: torch.Tensor) -> torch.Tensor:
    """Value of a block scale of 1.0 in ModelOpt's search, a float32 scalar.

    It differs from `scale_2` only by rounding.
    """
    return 1.0 / (448.0 / (amax.float() / 6.0))


def _search_codes(magnitudes: torch.Tensor, unit: torch.Tensor, codes: torch.Tensor) -> None:
    """Writes the E4M3 codes of the best scales of blocks into `codes`, uint8 [n].

    Args:
        magnitudes: float32 [n, 16], magnitudes of the blocks' values.
        unit: float32 scalar, value of a block scale of 1.0.
        codes: result.
    """
    candidates = torch.arange(LARGEST_CODE, SMALLEST_CODE - 1, -1, device=unit.device)
    candidates = candidates.to(torch.uint8)
    divisors = candidates.view(torch.float8_e4m3fn).float() * unit
    maximum = magnitudes.amax(-1)
    least_error = torch.full(codes.shape, torch.inf, device=codes.device)
    for candidate, divisor in zip(candidates, divisors, strict=True):
        error = _squared_error(magnitudes, divisor)
        torch.where(error <= least_error, candidate, codes, out=codes)
        torch.minimum(error, least_error, out=least_error)
        # Candidates get smaller, and smaller scales clip the maximum further. If the clipping alone
        # costs more than the least error of every block, no further scale can be better.
        clipped = (maximum - E2M1_MAX * divisor).clamp(min=0)
        if bool((clipped.square() > least_error).all()):
            return


def _squared_error(magnitudes: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squared rounding errors of each block under one scale, float32 [n].

    Args:
        magnitudes: float32 [n, 16].
        divisor: float32 scalar, real value of a code value of 1.
    """
    rounded = round_to_e2m1(magnitudes / divisor) * divisor
    squares = (magnitudes - rounded).square()
    # PyTorch adds value i to value i + 8 first, and then the eight sums in order.
    sums = squares[:, : BLOCK // 2] + squares[:, BLOCK // 2 :]
    total = torch.zeros_like(squares[:, 0])
    for column in sums.unbind(-1):
        total += column
    return total
