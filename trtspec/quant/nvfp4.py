"""NVFP4: 4-bit E2M1 values, one FP8 E4M3 scale per 16 values of a row, one FP32 scale per tensor.

real value = E2M1 value * fp32(scale) * scale_2. The bytes equal the bytes of ModelOpt's export for
the same amax, with one exception. ModelOpt divides zero by zero for an all-zero tensor and stores
NaN scales. Here `scale_2` of such a tensor is 1/2688, its block scales are 1.0 (byte 0x38) and its
codes are 0.
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
DECODE_CHUNK = 1 << 16  # values decoded at a time, so that intermediates stay in the cache


@dataclass(frozen=True)
class NVFP4Tensor:
    """A weight of shape [N, K].

    `packed`: uint8 [N, K/2], the even column in the low nibble. `scale`: float8_e4m3fn [N, K/16].
    `scale_2`: float32 scalar.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    scale_2: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, packed_columns = self.packed.shape
        return rows, packed_columns * 2


def quantize(
    weight: torch.Tensor, amax: torch.Tensor | None = None, weight_scales: str = "max"
) -> NVFP4Tensor:
    """Quantizes a weight on its own device. This function defines the encoding.

    Raises TrtspecError if the weight holds NaN or infinity.

    Args:
        weight: [N, K] in bf16, fp16 or fp32. K is a multiple of 16, which `prepare` checks.
        amax: float32 scalar, the largest magnitude of all weights that share `scale_2`, as gate
            and up do. None: the largest magnitude of `weight`.
        weight_scales: "max" takes the scale of a block from its maximum. "mse" takes the scale of
            least squared error (ModelOpt's `fp8_scale_sweep`).
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
    """amax / (6 * 448) in float32, by one division. A zero amax gives 1.0 / (6 * 448)."""
    scale_2 = amax.float() / NVFP4_RANGE
    return torch.where(scale_2 == 0, AMAX_OF_ZERO / NVFP4_RANGE, scale_2)


def block_scales(block_amax: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn scales of blocks whose largest magnitudes are `block_amax` (float32).

    A block of zeros gets 1.0.
    """
    # The order of the two divisions decides the last bit, and is ModelOpt's.
    scale = block_amax / (E2M1_MAX * scale_2)
    scale = torch.where(scale == 0, 1.0, scale)
    return scale.clamp(E4M3_SMALLEST, E4M3_MAX).to(torch.float8_e4m3fn)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """uint8 codes of float32 values, any shape: the nearest E2M1 value, ties to the even code.

    Bits 0 to 2 are the magnitude. Bit 3 is set if the value is negative.
    """
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for index, bound in enumerate(E2M1_BOUNDS):
        # A value on an even bound keeps the code below it, on an odd bound it gets the next code.
        is_below = magnitude < bound if index % 2 else magnitude <= bound
        codes += ~is_below
    sign = (values < 0).to(torch.uint8)
    return codes | (sign << 3)


def codes_times_scale(tensor: NVFP4Tensor) -> torch.Tensor:
    """bf16 [N, K] of E2M1 value * block scale, which is exact: it has six significant bits.

    The real weight is this times `scale_2`.
    """
    values = torch.empty(tensor.shape, dtype=torch.bfloat16)
    _decode(tensor, tensor.scale.to(torch.bfloat16), values)
    return values


def dequantize(tensor: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[N, K] of E2M1 value * (fp32(scale) * scale_2), computed in float32, then cast to `dtype`."""
    values = torch.empty(tensor.shape, dtype=dtype)
    _decode(tensor, tensor.scale.float() * tensor.scale_2, values)
    return values


def _decode(tensor: NVFP4Tensor, factors: torch.Tensor, values: torch.Tensor) -> None:
    """Fills `values` [N, K] with E2M1 value * factor, computed in the dtype of `factors`.

    `factors` [N, K/16] has one factor per block.
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
    """int32 [256]: the two values of each packed byte as two bf16, low nibble first.

    -0 decodes to +0.
    """
    negative = tuple(-value for value in E2M1_VALUES[1:])
    values = torch.tensor(E2M1_VALUES + (0.0,) + negative)
    packed = torch.arange(256)
    low = values[packed & 15]
    high = values[packed >> 4]
    pairs = torch.stack((low, high), dim=-1).to(torch.bfloat16)
    return pairs.view(torch.int32).reshape(256)


def fake_quantize_activation(
    x: torch.Tensor, input_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns an activation as an NVFP4 kernel sees it: (values, input_scale).

    real = values * input_scale. Values are bf16 of E2M1 value * E4M3 block scale, which is exact.
    A block larger than calibration saw saturates, as on the device.

    Args:
        x: [..., K] of any float dtype.
        input_scale: float32 scalar (amax / 2688 of calibration), or one for each row as [..., 1].
    """
    blocks = x.float().reshape(-1, BLOCK)
    block_scale_2 = input_scale
    if input_scale.dim():
        blocks_per_row = x.shape[-1] // BLOCK
        block_scale_2 = input_scale.expand(*x.shape[:-1], blocks_per_row).reshape(-1, 1)
    block_amax = blocks.abs().amax(-1, keepdim=True)
    scale = block_scales(block_amax, block_scale_2).float()
    values = round_to_e2m1(blocks / (scale * block_scale_2)) * scale
    return values.to(torch.bfloat16).reshape(x.shape), input_scale


# A float32 value has 24 significant bits. So adding 2^22 and subtracting it again rounds a small
# value to a multiple of 0.5, ties to even.
ROUND_TO_HALVES = 2.0**22
ROUND_TO_ONES = 2.0**23
ROUND_TO_TWOS = 2.0**24


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value of float32 values, ties to even, as float32 of the same shape.

    E2M1 has steps of 0.5 below 2, of 1 below 4, and of 2 above.
    """
    magnitude = values.abs()
    halves = (magnitude + ROUND_TO_HALVES) - ROUND_TO_HALVES
    ones = (magnitude + ROUND_TO_ONES) - ROUND_TO_ONES
    twos = (magnitude + ROUND_TO_TWOS) - ROUND_TO_TWOS
    from_two_on = torch.where(magnitude < 4, ones, twos)
    rounded = torch.where(magnitude < 2, halves, from_two_on)
    return torch.copysign(rounded.clamp(max=E2M1_MAX), values)


# Block scales of least squared error, ModelOpt's `mse` with `fp8_scale_sweep`: the smallest of the
# 126 scales with the least error. ModelOpt's own arithmetic is kept to the last bit: its unit, its
# division, and its sum of squares in the order in which PyTorch adds sixteen floats. The C kernel
# finds the same scale from fewer candidates.
SMALLEST_CODE = 1  # E4M3 codes of the smallest positive scale, of 448, and of 1.0
LARGEST_CODE = 0x7E
CODE_OF_ONE = 0x38
SEARCH_CHUNK = 1 << 13  # blocks searched at a time


def best_scales(blocks: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [n] of least squared error for finite `blocks` [n, 16].

    The smallest of scales with equal errors is taken. A block of zeros gets 2^-9, as in ModelOpt,
    and a tensor of zeros gets 1.0. `amax` is the float32 largest magnitude of all weights that
    share `scale_2`: a nonzero one below TINIEST_AMAX is refused before this function is called.
    """
    codes = torch.full(blocks.shape[:1], CODE_OF_ONE, dtype=torch.uint8, device=blocks.device)
    if float(amax):
        chunks = zip(blocks.split(SEARCH_CHUNK), codes.split(SEARCH_CHUNK), strict=True)
        for block_chunk, code_chunk in chunks:
            _search_codes(block_chunk.float().abs(), search_unit(amax), code_chunk)
    return codes.view(torch.float8_e4m3fn)


def search_unit(amax: torch.Tensor) -> torch.Tensor:
    """float32 scalar: the value of a block scale of 1.0 while ModelOpt searches.

    It equals `scale_2` but for its rounding.
    """
    return 1.0 / (448.0 / (amax.float() / 6.0))


def _search_codes(magnitudes: torch.Tensor, unit: torch.Tensor, codes: torch.Tensor) -> None:
    """Fills `codes` (uint8 [n]) with the E4M3 codes of the best scales of `magnitudes` [n, 16]."""
    candidates = torch.arange(LARGEST_CODE, SMALLEST_CODE - 1, -1, device=unit.device)
    candidates = candidates.to(torch.uint8)
    divisors = candidates.view(torch.float8_e4m3fn).float() * unit
    maximum = magnitudes.amax(-1)
    least_error = torch.full(codes.shape, torch.inf, device=codes.device)
    for candidate, divisor in zip(candidates, divisors, strict=True):
        error = _squared_error(magnitudes, divisor)
        torch.where(error <= least_error, candidate, codes, out=codes)
        torch.minimum(error, least_error, out=least_error)
        # A smaller scale clips the maximum further. If that alone costs more, the search is over.
        clipped = (maximum - E2M1_MAX * divisor).clamp(min=0)
        if bool((clipped.square() > least_error).all()):
            return


def _squared_error(magnitudes: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """float32 [n]: rounding error of each block [n, 16] under one scale."""
    rounded = round_to_e2m1(magnitudes / divisor) * divisor
    squares = (magnitudes - rounded).square()
    # PyTorch adds value i to value i + 8 first, and then the eight sums in order.
    sums = squares[:, : BLOCK // 2] + squares[:, BLOCK // 2 :]
    total = torch.zeros_like(squares[:, 0])
    for column in sums.unbind(-1):
        total += column
    return total
