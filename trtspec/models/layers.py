"""Linear, RMSNorm and the SwiGLU MLP of the Kimi target and the Eagle3 heads. H: hidden size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """A linear layer without bias: y = x W^T, with W stored as [out, in]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Computes x W^T, [..., out], for x [..., in]."""
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """A root-mean-square norm over the last dimension: x / rms(x) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MLP(nn.Module):
    """A SwiGLU MLP: down(silu(gate(x)) * up(x)).

    gate_proj and up_proj share one weight matrix, because they read the same input.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the MLP's output [..., H] for x [..., H]."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output


def embedding(vocab_size: int, hidden_size: int) -> nn.Embedding:
    """Makes an embedding table, without values if the default device is meta."""
    if torch.empty(0).is_meta:
        # Random values for a meta tensor would make torch import torch._dynamo, which takes more
        # than a second at every start.
        weight = torch.empty(vocab_size, hidden_size)
        meta: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        return meta
    return nn.Embedding(vocab_size, hidden_size)
