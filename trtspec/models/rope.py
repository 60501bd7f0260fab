"""Rotary position embedding with YaRN's context extension.

RoFormer is arXiv 2104.09864, YaRN arXiv 2309.00071. Each pair of a vector's dimensions is a complex
number. Position t turns pair i by the angle t * frequency_i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtspec.specs import RopeSpec

MIN_POSITIONS = 2048  # minimum number of positions whose rotations are computed at a time


class RotaryEmbedding:
    """A rotary position embedding for vectors of `dim` dimensions.

    Args:
        interleaved: whether the dimensions of a pair are neighbours, (0, 1), (2, 3) and so on, as
            in DeepSeek's checkpoints. Otherwise a pair is (i, i + dim / 2), as in Llama's
            checkpoints.
    """

    def __init__(self, spec: RopeSpec, dim: int, interleaved: bool) -> None:
        self.spec = spec
        self.dim = dim
        self.interleaved = interleaved
        self.rotations: Tensor | None = None

    def upto(self, length: int, device: torch.device | str) -> Tensor:
        """Returns the rotations of the positions from 0 to `length` - 1, or of more positions.

        The result is complex64 [positions, dim / 2], and is kept for later calls.
        """
        if self.rotations is None or len(self.rotations) < length:
            rotations = rotations_upto(max(length, MIN_POSITIONS), self.spec, self.dim)
            self.rotations = rotations.to(device, non_blocking=True)
        return self.rotations

    def rotate(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Rotates each vector of x [B, T, N, dim]. Returns the same shape and dtype.

        Computes in float32 or wider.

        rotation: rotations of the vectors' positions, complex64 [B or 1, T, 1, dim / 2].
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        pairs = wide.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else wide.chunk(2, -1)
        turned = torch.view_as_real(torch.complex(*pairs) * rotation)
        if self.interleaved:
            return turned.flatten(-2).to(x.dtype)
        return torch.cat(turned.unbind(-1), -1).to(x.dtype)


def rotations_upto(length: int, spec: RopeSpec, dim: int) -> Tensor:
    """Computes the rotation e^(i angle) of each position and pair, complex64 [length, dim / 2].

    The rotations are multiplied by YaRN's gain, which is 1 for every Kimi.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(spec, dim))
    gain = 1.0
    if spec.is_yarn:
        gain = yarn_mscale(spec.factor, spec.mscale) / yarn_mscale(spec.factor, spec.mscale_all_dim)
    return torch.complex(angles.cos() * gain, angles.sin() * gain)


def inverse_frequencies(spec: RopeSpec, dim: int) -> Tensor:
    """Computes the frequency of each pair in radians per position, float32 [dim / 2].

    YaRN divides the low frequencies by `factor`, and keeps the high frequencies. The ramp in
    between is linear. The ramp begins at the pair that turns `beta_fast` times over the original
    context, and ends at the pair that turns `beta_slow` times.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / (spec.theta**exponents)
    if not spec.is_yarn:
        return plain

    def pair_with(turns: float) -> float:
        """Returns the fractional index of the pair that turns `turns` times over that context."""
        wavelength = spec.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low = max(math.floor(pair_with(spec.beta_fast)), 0)
    high = min(math.ceil(pair_with(spec.beta_slow)), dim - 1)
    span = 0.001 if low == high else high - low  # no division by zero
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / span).clamp(0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Returns YaRN's attention temperature as DeepSeek-V3 has it: 0.1 * mscale * ln(factor) + 1.

    The temperature is 1 if the context is not extended (`factor` 1 or less).
    """
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
