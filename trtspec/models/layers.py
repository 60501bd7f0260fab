"""Linear, RMSNorm and the SwiGLU MLP of the Kimi target and the Eagle3 heads. H: hidden size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T without bias, W stored [out, in]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).

    gate_proj and up_proj read the same input and are one matrix here.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output


def embedding(vocab_size: int, hidden_size: int) -> nn.Embedding:
    if torch.empty(0).is_meta:
        # torch's random values for a meta tensor would import torch._dynamo: over a second of every
        # start.
        weight = torch.empty(vocab_size, hidden_size)
        meta: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        return meta
    return nn.Embedding(vocab_size, hidden_size)
