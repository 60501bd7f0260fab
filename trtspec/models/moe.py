"""Mixture of experts of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and Kimi-K2.

    s = sigmoid(W_router x)            the k experts with the largest s + bias (used only here)
    g_i = factor * s_i / sum of s      over the chosen ones
    y = FFN_shared(x) + sum of g_i FFN_i(x)

Shapes: `tokens` are flat here, without rows. k num_experts_per_tok, E routed experts, I their inner
size, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.layers import MLP
from trtspec.specs import ModelSpec


class MoE(nn.Module):
    """A mixture of experts: router, routed experts, and the shared experts as one wider MLP."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = Router(spec)
        self.experts: nn.Module = Experts(spec)
        shared_size = spec.moe_intermediate_size * spec.n_shared_experts
        self.shared_experts: nn.Module = MLP(spec.hidden_size, shared_size)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the mixture's output [..., H] for x [..., H]."""
        flat = x.flatten(0, -2)
        ids, weights = self.gate(flat)
        output: Tensor = self.experts(flat, ids, weights) + self.shared_experts(flat)
        return output.view_as(x)


class Router(nn.Module):
    """The router of a mixture of experts. Scores are computed in float32 or wider.

    Every Kimi has one group of experts, and weights that sum to `factor`. `target_config` refuses
    other values.
    """

    recording = False  # whether `margin` is computed (see KimiModel.record_margins)
    # Lead of the lowest chosen score over the best other score in the last call, [tokens].
    margin: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.top_k = spec.num_experts_per_tok
        self.factor = spec.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(spec.n_routed_experts, spec.hidden_size))
        bias = torch.zeros(spec.n_routed_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses k experts for each token of x [tokens, H].

        Returns the ids of the experts (int64) and their weights (float32 or wider), [tokens, k].
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.sigmoid()
        choice = scores + self.e_score_correction_bias
        ids = choice.topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(-1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # no division by zero
        if self.recording:
            best = choice.topk(self.top_k + 1).values
            self.margin = best[:, -2] - best[:, -1]
        return ids, weights * self.factor


class Experts(nn.Module):
    """The routed experts of a layer, each a SwiGLU MLP.

    The parameter `gate_up` [E, 2I, H] has the gate rows of each expert, then its up rows. The
    parameter `down` [E, H, I] has the down projection of each expert.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        count = spec.n_routed_experts
        hidden = spec.hidden_size
        inner = spec.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Computes the weighted sum [tokens, H] of the chosen experts' outputs.

        x: inputs, [tokens, H].
        ids: ids of the experts of each token, int64 [tokens, k].
        weights: weights of these experts, [tokens, k].
        """
        return dispatch(x, ids, weights, len(self.down), self.one_expert)

    def one_expert(self, expert: int, x: Tensor) -> Tensor:
        """Computes the output [n, H] of one expert for its tokens x [n, H]."""
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[expert])


def dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, count: int, one_expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Groups tokens by expert, runs each expert once on its tokens, and adds the weighted results.

    Returns [tokens, H]. The sizes of the groups are read from the device, so a GPU is waited for.

    x: inputs, [tokens, H].
    ids: ids of the experts of each token, int64 [tokens, k].
    weights: weights of these experts, [tokens, k].
    count: number of experts.
    one_expert: function that computes an expert's output [n, H] for its tokens [n, H].
    """
    expert_ids, order = ids.flatten().sort(stable=True)  # pairs of token and expert, [tokens * k]
    numbers = torch.arange(count, device=ids.device)
    ends = torch.searchsorted(expert_ids, numbers, right=True, out_int32=True)
    groups = x[order // ids.shape[1]].tensor_split(ends[:-1].tolist())
    outputs = torch.cat(
        [one_expert(expert, group) for expert, group in enumerate(groups) if len(group)]
    )
    # The outputs go back from the order of the experts to the order of `ids`. So a token's sum has
    # the same order on every device.
    indices = torch.arange(len(order), device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, indices)
    by_token: Tensor = outputs[inverse].unflatten(0, weights.shape)  # [tokens, k, H]
    weighted = by_token * weights.unsqueeze(-1).to(outputs.dtype)
    return weighted.sum(1)
