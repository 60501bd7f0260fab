"""Mixture of experts of DeepSeek-V3 and Kimi-K2: sigmoid scores, a bias that only selects, a shared expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.layers import MLP, Linear
from trtspec.models.precision import pack, through_float32
from trtspec.specs import ModelSpec

# Below this many weights per layer, and up to this many tokens, one product over all experts beats grouping tokens
# (docs/reference-engine.md).
DENSE_EXPERT_WEIGHTS = 2**21
DENSE_EXPERT_TOKENS = 32


class Router(nn.Module):
    """Scores every expert and picks `num_experts_per_tok` of them, in float32 at least.

    Every Kimi has one group of experts and weights that sum to 1; `target_config` refuses other values.
    """

    recording = False  # set by `KimiModel.record_margins`
    margin: Tensor  # of the last call, [tokens]: how far the last chosen expert was ahead of the best other one

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.n_routed_experts, spec.hidden_size))
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(spec.n_routed_experts, dtype=torch.float32), requires_grad=False
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, H] -> expert ids int64 [tokens, k] and weights float32 or wider [tokens, k]."""
        spec, wide = self.spec, torch.promote_types(x.dtype, torch.float32)
        scores = F.linear(x.to(wide), self.weight.to(wide)).sigmoid()
        choice = scores + self.e_score_correction_bias
        if self.recording:
            best = choice.topk(spec.num_experts_per_tok + 1).values
            self.margin = best[:, -2] - best[:, -1]
        ids = choice.topk(spec.num_experts_per_tok, dim=-1, sorted=False).indices
        weights = scores.gather(-1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * spec.routed_scaling_factor


class Experts(nn.Module):
    """The routed experts of one layer as two stacked matrices: gate_up [E, 2I, H] and down [E, H, I]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        count, hidden, inner = spec.n_routed_experts, spec.hidden_size, spec.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, H], ids and weights [tokens, k] -> weighted sum over each token's experts [tokens, H]."""
        if x.is_cpu:
            return self.by_slices(x, ids, weights)
        return dispatch(
            x, ids, weights, len(self.down), self.one_expert
        )  # index_add's order varies on a GPU

    def one_expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[expert])

    def by_slices(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Expert after expert over its slice of the sorted tokens; reads the slices' sizes."""
        experts = ids.flatten()
        order, sizes = (
            experts.argsort(stable=True),
            experts.bincount(minlength=len(self.gate_up)).tolist(),
        )
        tokens = order // ids.shape[1]
        wide = through_float32(x.dtype) and is_small(self.gate_up, self.down)
        kind = torch.float32 if wide else x.dtype
        gate, up = each_expert(
            x.index_select(0, tokens).to(kind), self.gate_up.to(kind), sizes
        ).chunk(2, -1)
        active = F.silu(gate) * up * weights.flatten().index_select(0, order).unsqueeze(-1).to(kind)
        outputs = each_expert(active, self.down.to(kind), sizes)
        summed = x.new_zeros(x.shape, dtype=torch.promote_types(kind, torch.float32))
        return summed.index_add(0, tokens, outputs.to(summed.dtype)).to(x.dtype)


def each_expert(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """x [n, in] in slices of `sizes`, each times its expert of weight [E, out, in] -> [n, out]."""
    slices = [
        (part, expert)
        for part, expert, size in zip(x.split(sizes), weight.mT, sizes, strict=True)
        if size
    ]
    if torch.is_grad_enabled():
        return torch.cat([part @ expert for part, expert in slices])
    output = x.new_empty(len(x), weight.shape[1])
    for (part, expert), into in zip(
        slices, output.split([size for size in sizes if size]), strict=True
    ):
        torch.mm(part, expert, out=into)
    return output


def is_small(gate_up: Tensor, down: Tensor) -> bool:
    """Whether the experts of a layer are small enough for another copy."""
    return gate_up.numel() + down.numel() <= DENSE_EXPERT_WEIGHTS


def dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, count: int, one_expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Groups tokens by expert, runs each touched expert once on its tokens, and adds the weighted results.

    Reads the sizes of the groups back from the device, once per layer.
    """
    ordered, order = ids.flatten().sort(stable=True)  # pairs of token and expert, [tokens * k]
    ends = torch.searchsorted(
        ordered, torch.arange(count, device=ids.device), right=True, out_int32=True
    )
    inputs = x[order // ids.shape[1]].tensor_split(ends[:-1].tolist())
    outputs = torch.cat(
        [one_expert(expert, part) for expert, part in enumerate(inputs) if len(part)]
    )
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    by_token = outputs[back].unflatten(0, weights.shape)
    return (by_token * weights.unsqueeze(-1).to(outputs.dtype)).sum(1)


class MoE(nn.Module):
    """Routed experts plus the shared expert; `together`, where set, computes both for up to DENSE_EXPERT_TOKENS."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        shared = spec.moe_intermediate_size * spec.n_shared_experts
        self.gate = Router(spec)
        self.experts: nn.Module = Experts(spec)
        self.shared_experts: nn.Module = MLP(spec.hidden_size, shared)
        self.together: AllExperts | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        ids, weights = self.gate(flat)
        if (
            self.together is not None
            and len(flat) <= DENSE_EXPERT_TOKENS
            and not torch.is_grad_enabled()
        ):
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
            (
                routed.down.detach().transpose(0, 1).reshape(hidden, -1),
                shared.down_proj.weight.detach(),
            ),
            1,
        )
        always = torch.arange(down.shape[1] // inner, device=down.device) >= count
        self.up = product_with(torch.cat(stacked))
        self.down = product_with(down)
        self.register_buffer("always", always.to(down.dtype), persistent=False)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, H], ids and weights [tokens, k] -> routed plus shared experts [tokens, H]."""
        gate, up = self.up(x).chunk(2, -1)
        routed = self.always.expand(len(x), -1).scatter(1, ids, weights.to(x.dtype))
        active = F.silu(gate).mul_(up).view(len(x), len(self.always), -1).mul_(routed.unsqueeze(-1))
        return self.down(active.view(len(x), -1))


def product_with(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x [tokens, in] -> x W^T [tokens, out] of weight [out, in], from a packed copy where there can be one."""
    packed = pack(weight)
    return packed.product if packed is not None else lambda x: F.linear(x, weight)


def together(moe: MoE) -> AllExperts | None:
    """Stacked copies of a layer's experts where they are plain and small; None where dispatching tokens is faster."""
    routed, shared = moe.experts, moe.shared_experts
    plain = all(isinstance(product, Linear) for product in shared.children())  # no NVFP4
    if not (plain and isinstance(routed, Experts) and isinstance(shared, MLP)):
        return None
    return AllExperts(routed, shared) if is_small(routed.gate_up, routed.down) else None
