"""Mixture of experts of DeepSeek-V3 and Kimi-K2: sigmoid scores, a bias that only selects, a shared expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.layers import MLP
from trtspec.specs import ModelSpec

# Below this many weights per layer one product over all experts beats dispatching tokens (docs/reference-engine.md).
DENSE_EXPERT_WEIGHTS = 2**21


class Router(nn.Module):
    """Scores every expert and picks `num_experts_per_tok` of them, in float32."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.n_routed_experts, spec.hidden_size))
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(spec.n_routed_experts, dtype=torch.float32), requires_grad=False
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, H] -> expert ids int64 [tokens, k] and weights float32 [tokens, k]."""
        spec = self.spec
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = scores + self.e_score_correction_bias
        if spec.n_group > 1:
            choice = self.keep_best_groups(choice)
        ids = choice.topk(spec.num_experts_per_tok, dim=-1, sorted=False).indices
        weights = scores.gather(-1, ids)
        if spec.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * spec.routed_scaling_factor

    def keep_best_groups(self, choice: Tensor) -> Tensor:
        """Zeroes all but the `topk_group` groups whose two best experts sum highest."""
        groups = choice.unflatten(-1, (self.spec.n_group, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.spec.topk_group, dim=-1).indices
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=choice.device).scatter_(-1, best, True)
        return groups.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(-2)


class Experts(nn.Module):
    """The routed experts of one layer as two stacked matrices: gate_up [E, 2I, H] and down [E, H, I]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        count, inner, hidden = spec.n_routed_experts, spec.moe_intermediate_size, spec.hidden_size
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, H], ids and weights [tokens, k] -> weighted sum over each token's experts [tokens, H]."""
        small = self.gate_up.numel() + self.down.numel() <= DENSE_EXPERT_WEIGHTS
        if small and not torch.is_grad_enabled():
            return self.all_experts(x, ids, weights)
        return dispatch(x, ids, weights, len(self.gate_up), self.one_expert)

    def one_expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[expert])

    def all_experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Every expert on every token, unrouted ones weighted by zero: two large products instead of many tiny ones."""
        count, hidden, inner = self.down.shape
        gate, up = F.linear(x, self.gate_up.view(-1, hidden)).view(-1, count, 2 * inner).chunk(2, -1)
        routed = torch.zeros(len(x), count, dtype=x.dtype, device=x.device).scatter_(1, ids, weights.to(x.dtype))
        active = F.silu(gate) * up * routed.unsqueeze(-1)
        return torch.mm(active.view(len(x), -1), self.down_stacked())

    def down_stacked(self) -> Tensor:
        """down as one [E*I, H] matrix; made once, since weights do not change while serving."""
        if not hasattr(self, "_down_stacked"):
            self._down_stacked = self.down.detach().transpose(1, 2).reshape(-1, self.down.shape[1]).contiguous()
        return self._down_stacked


def dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, count: int, one_expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Groups tokens by expert, runs each touched expert once on its tokens, and adds the weighted results."""
    per_token = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    tokens = order // per_token
    sizes = torch.bincount(ids.flatten(), minlength=count).tolist()
    inputs = x[tokens].split(sizes)
    outputs = torch.cat([one_expert(expert, part) for expert, part in enumerate(inputs) if len(part)])
    weighted = outputs * weights.flatten()[order].unsqueeze(-1).to(outputs.dtype)
    return torch.zeros_like(x, dtype=weighted.dtype).index_add_(0, tokens, weighted)


class MoE(nn.Module):
    """Routed experts plus the shared expert."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = Router(spec)
        self.experts: nn.Module = Experts(spec)
        self.shared_experts: nn.Module = MLP(spec.hidden_size, spec.moe_intermediate_size * spec.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        ids, weights = self.gate(flat)
        return (self.experts(flat, ids, weights) + self.shared_experts(flat)).view_as(x)
