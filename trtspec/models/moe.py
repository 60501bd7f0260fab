"""Mixture of experts of DeepSeek-V3 and Kimi-K2: sigmoid scores, a bias that only selects, a shared expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.layers import MLP, Linear
from trtspec.models.packed import pack, through_float32
from trtspec.specs import ModelSpec

# Below this many weights per layer, and up to this many tokens, one product over all experts beats grouping tokens
# (docs/reference-engine.md).
DENSE_EXPERT_WEIGHTS = 2**21
DENSE_EXPERT_TOKENS = 24


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
        if self.grouped(x):
            return self.by_groups(x, ids, weights)
        return dispatch(x, ids, weights, len(self.gate_up), self.one_expert)

    def grouped(self, x: Tensor) -> bool:
        """Whether torch's grouped product takes these operands: on a CPU float32, rows of whole 16 bytes, no gradient.

        It gives the same numbers as expert after expert in half to three quarters of the time (docs/LOG.md). bfloat16
        takes it through float32 copies of the weights, small ones only.
        """
        if torch.is_grad_enabled() or not x.is_cpu or not hasattr(F, "grouped_mm"):  # torch 2.10 and newer
            return False
        if x.shape[-1] % 4 or self.down.shape[-1] % 4:
            return False
        return x.dtype == torch.float32 or (through_float32(x.dtype) and small(self))

    def by_groups(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order, tokens, sizes = by_expert(ids, len(self.gate_up))
        ends = sizes.cumsum(0).to(torch.int32)

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return F.grouped_mm(x.float(), weight.float().transpose(1, 2), offs=ends).to(x.dtype)

        gate, up = product(x[tokens], self.gate_up).chunk(2, -1)
        return add_weighted(x, product(F.silu(gate) * up, self.down), weights, order, tokens)

    def one_expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[expert])


def small(experts: Experts) -> bool:
    """Whether another copy of a layer's experts is cheap."""
    return experts.gate_up.numel() + experts.down.numel() <= DENSE_EXPERT_WEIGHTS


def dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, count: int, one_expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Groups tokens by expert, runs each touched expert once on its tokens, and adds the weighted results."""
    order, tokens, sizes = by_expert(ids, count)
    inputs = x[tokens].split(sizes.tolist())
    outputs = torch.cat([one_expert(expert, part) for expert, part in enumerate(inputs) if len(part)])
    return add_weighted(x, outputs, weights, order, tokens)


def by_expert(ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids [tokens, k] -> the pairs' order by expert and their tokens, both int64 [tokens * k], and pairs per expert."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    return order, order // ids.shape[1], torch.bincount(flat, minlength=count)


def add_weighted(x: Tensor, outputs: Tensor, weights: Tensor, order: Tensor, tokens: Tensor) -> Tensor:
    """Sums the pairs' outputs [tokens * k, H], each times its weight, per token, in x's shape."""
    weighted = outputs * weights.flatten()[order].unsqueeze(-1).to(outputs.dtype)
    return torch.zeros_like(x, dtype=weighted.dtype).index_add_(0, tokens, weighted)


class MoE(nn.Module):
    """Routed experts plus the shared expert; `together`, where set, computes both for up to DENSE_EXPERT_TOKENS."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = Router(spec)
        self.experts: nn.Module = Experts(spec)
        self.shared_experts: nn.Module = MLP(spec.hidden_size, spec.moe_intermediate_size * spec.n_shared_experts)
        self.together: AllExperts | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        ids, weights = self.gate(flat)
        if self.together is not None and len(flat) <= DENSE_EXPERT_TOKENS and not torch.is_grad_enabled():
            return self.together(flat, ids, weights).view_as(x)
        return (self.experts(flat, ids, weights) + self.shared_experts(flat)).view_as(x)


class AllExperts(nn.Module):
    """Small routed experts and the shared ones as two products over every expert, unrouted ones weighted by zero.

    A shared expert is one more expert of the same width that every token takes with weight one. `up` multiplies by
    [2*(E+S)*I, H], all gates, then all ups; `down` by [H, (E+S)*I]; always [E+S] is 1 for shared experts.
    """

    always: Tensor

    def __init__(self, routed: Experts, shared: MLP) -> None:
        super().__init__()
        count, hidden, inner = routed.down.shape
        gate, up = routed.gate_up.detach().chunk(2, 1)
        gate_shared, up_shared = shared.gate_up_proj.weight.detach().chunk(2, 0)
        stacked = (gate.reshape(-1, hidden), gate_shared, up.reshape(-1, hidden), up_shared)
        down = torch.cat(
            (routed.down.detach().transpose(0, 1).reshape(hidden, -1), shared.down_proj.weight.detach()), 1
        )
        always = torch.arange(down.shape[1] // inner, device=down.device) >= count
        self.up = product_with(torch.cat(stacked))
        self.down = product_with(down)
        self.register_buffer("always", always.to(down.dtype), persistent=False)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, H], ids and weights [tokens, k] -> routed plus shared experts [tokens, H]."""
        gate, up = self.up(x).chunk(2, -1)
        routed = self.always.expand(len(x), -1).scatter(1, ids, weights.to(x.dtype))
        active = (F.silu(gate) * up).view(len(x), len(self.always), -1) * routed.unsqueeze(-1)
        return self.down(active.view(len(x), -1))


def product_with(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x [tokens, in] -> x W^T [tokens, out] of weight [out, in], from a packed copy where there can be one."""
    packed = pack(weight)
    return packed.product if packed is not None else lambda x: F.linear(x, weight)


def together(moe: MoE) -> AllExperts | None:
    """Stacked copies of a layer's experts where they are plain and small; None where dispatching tokens is faster."""
    routed, shared = moe.experts, moe.shared_experts
    if not isinstance(routed, Experts) or not isinstance(shared, MLP) or shared.down_proj.in_features == 0:
        return None
    if not isinstance(shared.gate_up_proj, Linear) or not isinstance(shared.down_proj, Linear):
        return None
    if not small(routed):
        return None
    return AllExperts(routed, shared)
