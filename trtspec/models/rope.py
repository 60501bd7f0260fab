"""Rotary position embedding with YaRN's context extension.

RoFormer is arXiv 2104.09864, YaRN arXiv 2309.00071. Each pair of a vector's dimensions is a complex
number. Position t turns pair i by the angle t * frequency_i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtspec.specs import RopeSpec

MIN_POSITIONS = 2048  # of the kept rotations


class RotaryEmbedding:
    """Rotates vectors of `dim` dimensions by their positions.

    `interleaved`: pairs are (0, 1), (2, 3), ... as in DeepSeek's files. Otherwise they are (i, i +
    dim / 2), as in Llama's.
    """

    def __init__(self, spec: RopeSpec, dim: int, interleaved: bool) -> None:
        self.spec = spec
        self.dim = dim
        self.interleaved = interleaved
        self.rotations: Tensor | None = None

    def upto(self, length: int, device: torch.device | str) -> Tensor:
        """The rotations of positions 0 to length - 1 or more, complex64 [positions, dim / 2]."""
        if self.rotations is None or len(self.rotations) < length:
            rotations = rotations_upto(max(length, MIN_POSITIONS), self.spec, self.dim)
            self.rotations = rotations.to(device, non_blocking=True)
        return self.rotations

    def rotate(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x [B, T, N, dim] turned by rotation complex64 [B or 1, T, 1, dim / 2].

        Computes in float32 or wider. The result has the dtype of x.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        pairs = wide.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else wide.chunk(2, -1)
        turned = torch.view_as_real(torch.complex(*pairs) * rotation)
        if self.interleaved:
            return turned.flatten(-2).to(x.dtype)
        return torch.cat(turned.unbind(-1), -1).to(x.dtype)


def rotations_upto(length: int, spec: RopeSpec, dim: int) -> Tensor:
    """e^(i angle) of each position and pair, complex64 [length, dim / 2].

    They are multiplied by YaRN's gain, which is 1 for every Kimi.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(spec, dim))
    gain = 1.0
    if spec.is_yarn:
        gain = yarn_mscale(spec.factor, spec.mscale) / yarn_mscale(spec.factor, spec.mscale_all_dim)
    return torch.complex(angles.cos() * gain, angles.sin() * gain)


def inverse_frequencies(spec: RopeSpec, dim: int) -> Tensor:
    """Radians per position, float32 [dim / 2].

    YaRN divides the low frequencies by `factor`, and keeps the high ones. It ramps between the
    pairs that turn `beta_slow` and `beta_fast` times over the original context.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / (spec.theta**exponents)
    if not spec.is_yarn:
        return plain

    def pair_with(turns: float) -> float:
        """The pair, as a dimension, that turns `turns` times over the original context."""
        wavelength = spec.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low = max(math.floor(pair_with(spec.beta_fast)), 0)
    high = min(math.ceil(pair_with(spec.beta_slow)), dim - 1)
    span = 0.001 if low == high else high - low
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / span).clamp(0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, as DeepSeek-V3 applies YaRN's attention temperature."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
