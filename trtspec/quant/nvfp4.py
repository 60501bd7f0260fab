"""NVFP4: 4-bit E2M1 values, one FP8 E4M3 scale per 16 values of a row, one FP32 scale per tensor.

real value = E2M1 value * fp32(scale) * scale_2. The bytes equal those of ModelOpt's export for the same amax, with one
exception: where ModelOpt divides zero by zero (an all-zero tensor) and stores NaN scales, `scale_2` is 1/2688 here,
the block scales are 1.0 (byte 0x38) and the codes 0.

`quantize_plain` is the definition, step by step; `quantize` gives the same bytes several times faster: `block_maxima`
and `pack_blocks` work on chunks in buffers that stay in the L2 cache, because a fresh large allocation costs a page
fault per 4 KiB, several times the arithmetic itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtspec.errors import TrtspecError
from trtspec.formats import NVFP4_BLOCK
from trtspec.quant.scale_search import LARGEST_SEARCHED, SMALLEST_SEARCHED, best_scales

BLOCK = NVFP4_BLOCK
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9  # smaller block scales are raised to it, so that tiny blocks do not vanish
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints; ties go to the even code
AMAX_OF_ZERO = 1.0  # stands for the amax of an all-zero tensor
CHUNK = 1 << 18
DECODE_CHUNK = 1 << 16
MAGIC = (2.0**22, 2.0**23 + 2, 2.0**24 + 8)
_TABLE: list[torch.Tensor] = []


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


def block_amax(weight: torch.Tensor) -> torch.Tensor:
    """max|w| of each block of 16: [N, K] -> [N, K/16], in the weight's dtype (a maximum is exact in any)."""
    _check(weight)
    blocks = weight.contiguous().view(-1, BLOCK)
    return block_maxima(blocks).view(weight.shape[0], weight.shape[1] // BLOCK)


def scale_2_of(amax: torch.Tensor) -> torch.Tensor:
    """amax / (6 * 448) in float32, one division; of 1.0 where that is zero."""
    scale_2 = amax.float() / (E2M1_MAX * E4M3_MAX)
    return torch.where(scale_2 == 0, AMAX_OF_ZERO / (E2M1_MAX * E4M3_MAX), scale_2)


def block_scales(block_amax: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn scales of blocks with these float32 maxima; the order of the divisions decides the last bit."""
    scale = block_amax / (E2M1_MAX * scale_2)
    return torch.where(scale == 0, 1.0, scale).clamp(E4M3_SMALLEST, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize(
    weight: torch.Tensor,
    amax: torch.Tensor | None = None,
    maxima: torch.Tensor | None = None,
    weight_scales: str = "max",
) -> NVFP4Tensor:
    """Quantizes [N, K] bf16, fp16 or fp32; `amax` (float32 scalar) is given when gate and up share it.

    `maxima` spares the first of two passes when the caller already has `block_amax(weight)`. `weight_scales` max takes
    each block's scale from its maximum, mse the one of least squared error (ModelOpt's `fp8_scale_sweep`).
    Raises TrtspecError when K is not a multiple of 16 or the weight holds NaN or infinity.
    """
    maxima = block_amax(weight) if maxima is None else maxima
    largest = maxima.amax().float()
    amax = largest if amax is None else amax
    if not bool(torch.isfinite(largest) & torch.isfinite(amax)):
        raise TrtspecError("the weight holds NaN or infinity", "find the tensor with `trtspec inspect --json`")
    scale_2 = scale_2_of(amax)
    # the quick path rounds exactly only well inside float32's range and up to the largest code
    clips = weight_scales == "mse" and not SMALLEST_SEARCHED <= float(amax) <= LARGEST_SEARCHED
    if float(scale_2) < 2.0**-100 or bool(largest > amax) or clips or denormals_are_flushed():
        return quantize_plain(weight, amax, weight_scales)
    scale = block_scales(maxima.float(), scale_2)
    if weight_scales == "mse":
        scale = best_scales(weight.reshape(-1, BLOCK), scale.view(-1), amax).view(scale.shape)
    packed = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)
    pack_blocks(weight.contiguous().view(-1, BLOCK), scale.view(-1), scale_2, packed.view(-1))
    return NVFP4Tensor(packed, scale, scale_2)


def quantize_plain(weight: torch.Tensor, amax: torch.Tensor | None = None, weight_scales: str = "max") -> NVFP4Tensor:
    """The definition of the encoding; slow, and the oracle of `quantize`. Runs where `weight` is."""
    _check(weight)
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // BLOCK, BLOCK)
    amax = weight.abs().amax() if amax is None else amax
    scale_2 = scale_2_of(amax)
    scale = block_scales(blocks.abs().amax(-1).float(), scale_2)
    if weight_scales == "mse":
        scale = best_scales(blocks.reshape(-1, BLOCK), scale.view(-1), amax).view(scale.shape)
    codes = e2m1_codes(blocks.float() / (scale.float() * scale_2).unsqueeze(-1)).reshape(rows, columns)
    return NVFP4Tensor(codes[:, 0::2] | (codes[:, 1::2] << 4), scale, scale_2)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """uint8 codes of float32 values: magnitude in three bits, nearest with ties to even; bit 3 where negative."""
    magnitude, codes = values.abs(), torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for index, bound in enumerate(E2M1_BOUNDS):
        codes += ~((magnitude < bound) if index % 2 else (magnitude <= bound))
    return codes | ((values < 0).to(torch.uint8) << 3)


def _check(weight: torch.Tensor) -> None:
    if weight.dim() != 2 or weight.shape[1] % BLOCK:
        raise TrtspecError(
            f"a weight of shape {list(weight.shape)} has no whole blocks of {BLOCK} along its rows",
            "exclude this tensor from quantization",
        )


def denormals_are_flushed() -> bool:
    """Whether torch.set_flush_denormal(True) is in force, which the quick paths do not survive."""
    return bool(torch.tensor([2.0**-130]).mul(0.5).eq(0))


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
    packed, table, step = tensor.packed.reshape(-1, BLOCK // 2), _value_pairs(), DECODE_CHUNK // BLOCK
    for start in range(0, blocks.shape[0], step):
        part = slice(start, start + step)
        pairs = table.index_select(0, packed[part].reshape(-1).to(torch.int32))
        blocks[part] = pairs.view(torch.bfloat16).view(-1, BLOCK) * factor[part]


def fake_quantize_activation(x: torch.Tensor, input_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    rounded = torch.where(magnitude < 2, fine, torch.where(magnitude < 4, middle, coarse)).clamp(max=E2M1_MAX)
    return torch.copysign(rounded, values)


def _value_pairs() -> torch.Tensor:
    """int32 [256]: for each packed byte its two values as two bf16, low nibble first. -0 decodes to +0."""
    if not _TABLE:
        signed = torch.tensor(E2M1_VALUES + (0.0,) + tuple(-value for value in E2M1_VALUES[1:]))
        codes = torch.arange(256)
        pairs = torch.stack((signed[codes & 15], signed[codes >> 4]), dim=-1).to(torch.bfloat16)
        _TABLE.append(pairs.view(torch.int32).reshape(256))
    return _TABLE[0]


class _Buffers:
    """Scratch space for one chunk of blocks of 16."""

    def __init__(self, blocks: int) -> None:
        self.scaled, self.scratch = torch.empty(2, blocks, 16).unbind()
        self.bytes = torch.empty(3, blocks, 16, dtype=torch.uint8).unbind()


def block_maxima(blocks: torch.Tensor) -> torch.Tensor:
    """max|x| of each block: [n, 16] -> [n] in the same dtype. bf16 is compared as integers, in the same order."""
    result, step = torch.empty(blocks.shape[0], dtype=blocks.dtype), CHUNK // 16
    scratch = torch.empty(min(step, blocks.shape[0]), 16, dtype=blocks.dtype)
    for start in range(0, blocks.shape[0], step):
        part = blocks[start : start + step]
        target, space = result[start : start + step], scratch[: part.shape[0]]
        if blocks.dtype == torch.bfloat16:
            bits = torch.bitwise_and(part.view(torch.int16), 0x7FFF, out=space.view(torch.int16))
            torch.amax(bits, -1, out=target.view(torch.int16))
        else:
            torch.amax(torch.abs(part, out=space), -1, out=target)
    return result


def pack_blocks(blocks: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor, packed: torch.Tensor) -> None:
    """Fills `packed` (uint8, flat, half a byte per value) from `blocks` [n, 16] and their float8_e4m3fn `scale` [n].

    Finite values only; `scale_2` must be so large that no divisor is subnormal.
    """
    step = CHUNK // 16
    buffers = _Buffers(min(step, blocks.shape[0]))
    for start in range(0, blocks.shape[0], step):
        part = blocks[start : start + step]
        divisor = (scale[start : start + step].float() * scale_2).unsqueeze(-1)
        pairs = _codes(part, divisor, buffers).view(-1).view(torch.int16)
        packed[start * 8 : (start + part.shape[0]) * 8] = pairs | (pairs >> 4)  # the store keeps the low byte


def _codes(blocks: torch.Tensor, divisor: torch.Tensor, buffers: _Buffers) -> torch.Tensor:
    """uint8 [n, 16]: E2M1 code of blocks / divisor with the sign in bit 3.

    One rounding only: re-biasing the exponent would round twice and err beside ties. Adding 2^22, 2^23 + 2 or 2^24 + 8
    to |x| leaves, in the low byte of the float's bits, rint(2|x|), rint(|x|) + 2 or rint(|x|/2) + 4: the E2M1 code for
    |x| below 2, from 2 to 4, and above. Each is the smallest of the three just where it is right.
    """
    count = blocks.shape[0]
    scaled, scratch = buffers.scaled[:count], buffers.scratch[:count]
    best, other, sign = (buffer[:count] for buffer in buffers.bytes)
    bits = scratch.view(torch.int32)
    scaled.copy_(blocks)
    scaled.div_(divisor).add_(0.0)  # -0.0 + 0.0 is +0.0, which has code 0
    sign.copy_(torch.bitwise_right_shift(scaled.view(torch.int32), 28, out=bits))
    scaled.abs_()
    torch.add(scaled, MAGIC[0], out=scratch)
    best.copy_(bits)
    for magic in MAGIC[1:]:
        torch.add(scaled, magic, out=scratch)
        torch.minimum(best, other.copy_(bits), out=best)
    return best.clamp_(max=7).bitwise_or_(sign.bitwise_and_(8))
