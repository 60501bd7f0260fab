"""`--weight-scales mse`: for each block the E4M3 scale whose rounding has the least squared error.

ModelOpt's `mse` with `fp8_scale_sweep` computes the error of all 126 scales of a block and keeps the first least one.
Here the same scale is found from sixteen of them, as a rule. With the scale of the maximum, which maps it to 6, as the
centre: above, the search ends where the maximum would round to 2 or less, because half that scale then represents the
same values; below, where clipping the maximum alone costs more than the best found. ModelOpt's own arithmetic is kept
to the last bit: its unit, its division, its sum of squares in the order in which PyTorch adds sixteen floats.
"""

from __future__ import annotations

import torch

from trtspec.formats import NVFP4_BLOCK

BLOCK = NVFP4_BLOCK
ABOVE = 11  # E4M3 codes above the maximum's own: 8 are one octave
BELOW = 4
WIDTH = ABOVE + 1 + BELOW
SMALLEST, LARGEST = 1, 0x7E
ONE = 0x38
CHUNK = 1 << 13  # blocks
TINIEST = 2.0**-88  # an amax below it leaves float32's range in ModelOpt's search; then every block has one scale


def search_unit(amax: torch.Tensor) -> torch.Tensor:
    """float32 scalar: what a block scale of 1.0 stands for while ModelOpt searches; `scale_2` but for its rounding."""
    return 1.0 / (448.0 / (amax.float() / 6.0))


def best_scales(blocks: torch.Tensor, base: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [n] of least squared error for finite `blocks` [n, 16]; of equal ones the smallest.

    `base` [n] are the scales of the maxima, `amax` is the float32 largest magnitude of the tensor (of the group, where
    a partner shares it). Blocks of zeros get 2^-9, as in ModelOpt; a tensor of zeros keeps `base`.
    """
    codes = base.view(torch.uint8).clone()
    if float(amax) < TINIEST:
        return codes.fill_(exported_code(amax) if float(amax) else ONE).view(torch.float8_e4m3fn)
    unit = search_unit(amax)
    for start in range(0, blocks.shape[0], CHUNK):
        magnitudes = blocks[start : start + CHUNK].float().abs()
        codes[start : start + CHUNK] = _search(magnitudes, codes[start : start + CHUNK].int(), unit)
    return codes.view(torch.float8_e4m3fn)


def sweep(blocks: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """uint8 [n]: the codes by all 126 errors, as ModelOpt finds them; the oracle of the search."""
    magnitudes = blocks.float().abs()
    codes = torch.arange(SMALLEST, LARGEST + 1, device=blocks.device)
    errors = [_errors(magnitudes, code.expand(blocks.shape[0]), unit) for code in codes]
    return (torch.stack(errors).argmin(0) + SMALLEST).to(torch.uint8)


def _search(magnitudes: torch.Tensor, base: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    maximum = magnitudes.amax(-1)
    best, least = torch.ones_like(base), torch.full_like(maximum, torch.inf)
    rows = maximum.nonzero().squeeze(-1)  # those whose search goes on; a block of zeros keeps the smallest scale
    first = (base - BELOW).clamp(min=SMALLEST)
    while rows.numel():
        code, error = _best_of_window(magnitudes[rows], first[rows], unit)
        better = error <= least[rows]  # windows go down, and of equal scales the smallest counts
        chosen = rows[better]
        least[chosen], best[chosen] = error[better], code[better]
        next_divisor = _divisor((first[rows] - 1).clamp(min=SMALLEST), unit)
        clipped = maximum[rows] - 6.0 * next_divisor
        rows = rows[(first[rows] > SMALLEST) & ~(clipped * clipped > least[rows])]
        first[rows] -= WIDTH
    return best.to(torch.uint8)


def _best_of_window(
    magnitudes: torch.Tensor, first: torch.Tensor, unit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    best, least = first.clamp(min=SMALLEST), torch.full_like(magnitudes[:, 0], torch.inf)
    for offset in range(WIDTH):
        code = first + offset
        error = _errors(magnitudes, code.clamp(SMALLEST, LARGEST), unit)
        better = (error < least) & (code >= SMALLEST) & (code <= LARGEST)
        best, least = torch.where(better, code, best), torch.where(better, error, least)
    return best, least


def _divisor(codes: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * unit


def _errors(magnitudes: torch.Tensor, codes: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Squared error of each block [n, 16] with its candidate [n]. Value i is added to value i + 8 first."""
    divisor = _divisor(codes, unit)
    squares = []
    for column in magnitudes.unbind(-1):
        error = column - _round(column / divisor) * divisor
        squares.append(error * error)
    total = torch.zeros_like(divisor)
    for low, high in zip(squares[: BLOCK // 2], squares[BLOCK // 2 :], strict=True):
        total += low + high
    return total


def _round(quotient: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value of a magnitude: adding 2^22, 2^23 or 2^24 rounds to multiples of 0.5, 1 or 2."""
    fine, middle, coarse = ((quotient + 2.0**bits) - 2.0**bits for bits in (22, 23, 24))
    return torch.where(quotient < 2, fine, torch.where(quotient < 4, middle, coarse.clamp(max=6.0)))


def exported_code(amax: torch.Tensor) -> int:
    """The code that ModelOpt's export makes of its smallest candidate where that has left float32's range."""
    scale = amax.float() * (2.0**-9 / 448.0) / 6.0
    scale = torch.where(scale == 0, 1.0, scale) * 448.0 / (amax.float() / 6.0)
    return int(scale.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).view(torch.uint8))
