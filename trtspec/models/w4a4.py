"""NVFP4 linears as an FP4 tensor core computes them: 4-bit weights and 4-bit activations.

Both operands enter the product as E2M1 value times FP8 block scale, which bf16 holds exactly. The
two per-tensor scales multiply the accumulated result.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.moe import dispatch
from trtspec.quant import nvfp4


class NVFP4Linear(nn.Module):
    """A linear layer y = x W^T with W in NVFP4.

    Args:
        activation: "w4a4" quantizes x to NVFP4, too. "weight-only" does not quantize x.
    """

    values: Tensor  # E2M1 value times FP8 block scale, [out, in]
    scale_2: Tensor  # float32 scalar
    input_scale: Tensor  # float32 scalar

    def __init__(
        self, values: Tensor, scale_2: Tensor, input_scale: Tensor, activation: str
    ) -> None:
        super().__init__()
        self.activation = activation
        self.register_buffer("values", values)
        self.register_buffer("scale_2", scale_2.float())
        self.register_buffer("input_scale", input_scale.float())
        self.out_features, self.in_features = self.values.shape

    def forward(self, x: Tensor) -> Tensor:
        """Computes x W^T in the dtype of x, with one multiplication by the per-tensor scales."""
        values = x
        scale = self.scale_2
        if self.activation == "w4a4":
            quantized, input_scale = nvfp4.fake_quantize_activation(x, self.input_scale)
            values = quantized.to(x.dtype)
            scale = self.scale_2 * input_scale
        product = F.linear(values, self.values)
        return (product * scale).to(x.dtype)


class NVFP4Experts(nn.Module):
    """Routed experts in NVFP4. The linears of each expert have their own scales."""

    def __init__(self, gate_up: Iterable[nn.Module], down: Iterable[nn.Module]) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Computes the same as `Experts.forward`, [tokens, H]."""
        return dispatch(x, ids, weights, len(self.down), self.one_expert)

    def one_expert(self, expert: int, x: Tensor) -> Tensor:
        """Computes the output [n, H] of one expert for its tokens x [n, H]."""
        gate, up = self.gate_up[expert](x).chunk(2, -1)
        output: Tensor = self.down[expert](F.silu(gate) * up)
        return output
