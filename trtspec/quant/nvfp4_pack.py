"""The quick NVFP4 packing loop: cache-sized chunks, reused buffers, no allocation of the tensor's size.

A fresh large allocation costs a page fault per 4 KiB, several times the arithmetic itself, so every intermediate lives
in a buffer that stays in the L2 cache.

Rounding to E2M1 needs one rounding only (re-biasing the exponent rounds twice and errs beside ties). Adding 2^22,
2^23 + 2 or 2^24 + 8 to |x| leaves, in the low byte of the float's bits, rint(2|x|), rint(|x|) + 2 or rint(|x|/2) + 4:
the E2M1 code for |x| below 2, from 2 to 4, and above. Each is the smallest of the three just where it is right.
"""

from __future__ import annotations

import torch

CHUNK = 1 << 18
MAGIC = (2.0**22, 2.0**23 + 2, 2.0**24 + 8)


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
    """uint8 [n, 16]: E2M1 code of blocks / divisor with the sign in bit 3."""
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
