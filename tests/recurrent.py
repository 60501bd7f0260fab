"""A target with a recurrent state: Kimi Delta Attention in the place of latent attention.

With S the state of a head [K, V], k and q normed keys and queries, g the bounded log gate and beta
in (0, 1) (arXiv 2510.26692):

    S_t = (I - beta_t k_t k_t^T) diag(e^g_t) S_(t-1) + beta_t k_t v_t^T,    o_t = S_t^T q_t
    g_t = -5 sigmoid(e^A (f(x_t) + b))

k, q and v come out of a causal convolution over CONV tokens, so a row also remembers a window of
CONV - 1 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.attention import AttentionStep
from trtspec.models.k2 import KimiModel
from trtspec.models.layers import Linear, RMSNorm
from trtspec.models.state import Span, State

CONV, GATE_BOUND, SIZE = 4, -5.0, 16
RECURRENT = (0, 1, 4)  # of the tiny target's seven layers; the others keep latent attention


def gate(x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """Log decay of every channel of the keys, [..., N, D]; rate [N], bias [N, D]."""
    return GATE_BOUND * torch.sigmoid(rate.exp().unsqueeze(-1) * (x + bias))


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, N, D], and states after 0 .. T.

    q, k, v, g [B, T, N, D], beta [B, T, N], state [B, N, D, D].
    """
    decay, write = g.exp().unsqueeze(-1), (beta.unsqueeze(-1) * k).unsqueeze(-1)
    k, v = k.unsqueeze(-2), v.unsqueeze(-2)
    states = [state]
    for steps in zip(*(x.unbind(1) for x in (decay, write, k, v)), strict=True):
        decay_t, write_t, k_t, v_t = steps
        kept = states[-1] * decay_t
        states.append(kept + write_t * (v_t - k_t @ kept))
    history = torch.stack(states, 1)
    return (q.unsqueeze(-2) @ history[:, 1:]).squeeze(-2), history


class DeltaAttention(nn.Module):
    """In the place of a layer's attention.

    `in_proj` makes q, k and v, decay, gate of the outputs and beta.

    A text leaves one vector [M], in float32 at least: its window and its state.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.shape, width = (heads, SIZE), heads * SIZE
        self.sizes = 3 * width, width, width, heads
        self.parts = 3 * width * (CONV - 1), width * SIZE
        self.in_proj, self.o_proj = Linear(hidden, sum(self.sizes)), Linear(width, hidden)
        self.conv = nn.Parameter(torch.randn(3 * width, CONV) / CONV**0.5)
        self.rate = nn.Parameter(torch.rand(heads).mul(4).add(0.5).log())
        self.bias = nn.Parameter(torch.randn(heads, SIZE) * 0.5 - 2.0)
        self.o_norm = RMSNorm(SIZE, 1e-5)
        for linear in (self.in_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def nothing(self) -> Tensor:
        """What an empty text leaves."""
        wide = torch.promote_types(self.conv.dtype, torch.float32)
        return self.conv.new_zeros(sum(self.parts), dtype=wide)

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        memory: Any = step.cache
        reads, histories = [], []
        for span in step.spans:
            begin = self.nothing().expand(len(x), -1)
            if memory:
                begin = memory.remembered(step.layer, span)
            window, state = begin.split(self.parts, -1)
            read, history = self.run(x[:, span.tokens], window, state)
            reads.append(read)
            histories.append(history)
        if memory:
            memory.keep(step.layer, step.spans, histories)
        return self.o_proj(torch.cat(reads, 1))

    def run(self, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of x [B, T, H] after a window and a state, and what is kept [B, T + 1, M].

        It is kept after 0 .. T of the tokens.
        """
        window = window.view(len(x), -1, CONV - 1).to(x.dtype)
        state = state.view(len(x), *self.shape, SIZE)
        raw, decay, gates, beta = self.in_proj(x).split(self.sizes, -1)
        padded = torch.cat((window, raw.mT), -1)
        mixed = F.silu((padded.unfold(-1, CONV, 1) * self.conv.unsqueeze(1)).sum(-1)).mT
        q, k, v = mixed.unflatten(-1, (3, *self.shape)).unbind(2)
        q, k = F.normalize(q, dim=-1) * SIZE**-0.5, F.normalize(k, dim=-1)
        g = gate(decay.unflatten(-1, self.shape), self.rate, self.bias)
        read, states = delta_rule(*(y.to(state.dtype) for y in (q, k, v, g, beta.sigmoid())), state)
        windows = padded.unfold(-1, CONV - 1, 1).transpose(1, 2)
        gated = self.o_norm(read.to(x.dtype)).flatten(-2) * gates.sigmoid()
        return gated, torch.cat((windows.flatten(2), states.flatten(2)), -1)


class HybridState:
    """Latents by position, beside what recurrent layers keep.

    No later call can overwrite that: a row moves on by `commit`. `rows` has, by row, where its last
    call began, and what the layers kept after 0 .. T of the call's tokens that became text,
    [layers, T + 1, M].
    """

    def __init__(self, latents: State, nothing: Tensor) -> None:
        self.latents, self.max_len, self.nothing = latents, latents.max_len, nothing
        self.append, self.seen = latents.append, latents.seen
        self.rows: dict[int, tuple[int, Tensor]] = {}
        self.spans: list[Span] = []
        self.call: dict[int, list[Tensor]] = {}

    def keep(self, layer: int, spans: list[Span], histories: list[Tensor]) -> None:
        self.spans, self.call[layer] = spans, histories

    def remembered(self, layer: int, span: Span) -> Tensor:
        """[B, M] of the rows of a span."""
        number = RECURRENT.index(layer)
        texts = [self.rows[row][1][number, -1] if at else self.nothing for row, at in begun(span)]
        return torch.stack(texts)

    def commit(self, counts: Tensor | Sequence[int]) -> None:
        left = iter(torch.as_tensor(counts).tolist())
        for number, span in enumerate(self.spans):
            histories = torch.stack([self.call[layer][number] for layer in RECURRENT], 1)
            for history, (row, start) in zip(histories, begun(span), strict=True):
                self.rows[row] = start, history[:, : next(left) + 1]

    def move(self, source: int, target: int, length: int) -> None:
        self.latents.move(source, target, length)
        self.rows[target] = self.rows[source]

    def snapshot(self, row: int, begin: int, end: int) -> tuple[int, Tensor, Any] | None:
        start, history = self.rows[row]
        if not start <= end < start + history.shape[1]:
            return None
        kept = history[:, end - start].unsqueeze(1).clone()
        return end, kept, self.latents.snapshot(row, begin, end)

    def restore(self, row: int, snapshots: Sequence[tuple[int, Tensor, Any]], length: int) -> int:
        """From the last one that does not end behind `length`."""
        usable = [saved for saved in snapshots if saved[0] <= length]
        for end, kept, _ in usable:
            self.rows[row] = end, kept
        return self.latents.restore(row, [latents for *_, latents in usable], length)

    def bytes(self, tokens: int) -> int:
        return self.latents.bytes(tokens) + len(RECURRENT) * self.nothing.nbytes


def begun(span: Span) -> list[tuple[int, int]]:
    """The rows of a span, each with the position of its first token."""
    starts = torch.as_tensor(span.start).view(-1).tolist()
    return [*zip(range(span.rows.start, span.rows.stop), starts, strict=True)]


class HybridModel(KimiModel):
    """A loaded target with delta attention in the place of that of RECURRENT layers."""

    def __init__(self, target: KimiModel) -> None:
        super().__init__(target.spec, target.kv_dtype, layers=0)
        self.embed, self.layers = target.embed, target.layers
        self.norm, self.lm_head = target.norm, target.lm_head
        with torch.random.fork_rng():
            torch.manual_seed(1)
            for index in RECURRENT:
                attention = DeltaAttention(self.spec.hidden_size, self.spec.num_attention_heads)
                self.layers[index].self_attn = attention
        self.to(target.dtype).eval().requires_grad_(False)

    def new_cache(self, rows: int, max_len: int) -> HybridState:
        nothing = self.layers[RECURRENT[0]].self_attn.nothing()
        return HybridState(super().new_cache(rows, max_len), nothing)
