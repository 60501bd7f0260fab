"""`--weight-scales mse`: for each block the E4M3 scale whose rounding has the least squared error.

The scale of the maximum maps it to 6, the end of the E2M1 grid, whose steps are widest there. A larger scale maps it
to 4 or 3 and may fit the other values better; INT4 values k * s (k = -8..7) all but 5 and 7 lie on the grid of scale
2 s. The search is exhaustive where it can matter: above, it ends where the maximum would round to 2 or less, because
half that scale then represents the same values; below, where clipping the maximum alone costs more than the best found.
"""

from __future__ import annotations

import torch

from trtspec.formats import NVFP4_BLOCK

BLOCK = NVFP4_BLOCK
ABOVE = 11  # E4M3 codes above the maximum's own: 8 are one octave
BELOW = 4
WIDTH = ABOVE + 1 + BELOW
SMALLEST, LARGEST = 1, 0x7E
CHUNK = 1 << 13  # blocks


def best_scales(blocks: torch.Tensor, base: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [n] of least squared error for finite `blocks` [n, 16]; `base` [n] are the maximum's own scales.

    Of equally good scales the maximum's own is kept, then the first from below. All-zero blocks keep theirs.
    """
    codes = base.view(torch.uint8).clone()
    for start in range(0, blocks.shape[0], CHUNK):
        magnitudes = blocks[start : start + CHUNK].float().abs()
        codes[start : start + CHUNK] = _search(magnitudes, codes[start : start + CHUNK].int(), scale_2)
    return codes.view(torch.float8_e4m3fn)


def _search(magnitudes: torch.Tensor, base: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    maximum = magnitudes.amax(-1)
    rows = maximum.nonzero().squeeze(-1)  # those whose search goes on
    best, least = base.clone(), torch.full_like(maximum, torch.inf)
    least[rows] = _errors(magnitudes[rows], base[rows], scale_2)
    first = base - BELOW
    while rows.numel():
        for offset in range(WIDTH):
            code = first[rows] + offset
            error = _errors(magnitudes[rows], code.clamp(SMALLEST, LARGEST), scale_2)
            better = (error < least[rows]) & (code >= SMALLEST) & (code <= LARGEST)
            chosen = rows[better]
            least[chosen], best[chosen] = error[better], code[better]
        next_divisor = _divisor((first[rows] - 1).clamp(min=SMALLEST), scale_2)
        clipped = maximum[rows] - 6.0 * next_divisor
        rows = rows[(first[rows] > SMALLEST) & ~(clipped * clipped > least[rows])]
        first[rows] -= WIDTH
    return best.to(torch.uint8)


def _divisor(codes: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * scale_2


def _errors(magnitudes: torch.Tensor, codes: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Squared error of each block [n, 16] with its candidate [n]; summed value by value, as the C kernel does."""
    divisor = _divisor(codes, scale_2)
    inverse, total = 1.0 / divisor, torch.zeros_like(divisor)
    for column in magnitudes.unbind(-1):
        quotient = column * inverse
        error = quotient - _round(quotient)
        total += error * error
    return total * (divisor * divisor)


def _round(quotient: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value of a magnitude: adding 2^22, 2^23 or 2^24 rounds to multiples of 0.5, 1 or 2."""
    fine, middle, coarse = ((quotient + 2.0**bits) - 2.0**bits for bits in (22, 23, 24))
    return torch.where(quotient < 2, fine, torch.where(quotient < 4, middle, coarse.clamp(max=6.0)))
