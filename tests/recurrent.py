"""A target with a recurrent state: Kimi Delta Attention (arXiv 2510.26692) in the place of latent attention.

With S the state of a head [K, V], k and q normed keys and queries, g the bounded log gate and beta in (0, 1):

    S_t = (I - beta_t k_t k_t^T) diag(e^g_t) S_(t-1) + beta_t k_t v_t^T,    o_t = S_t^T q_t
    g_t = -5 sigmoid(e^A (f(x_t) + b))

k, q and v come out of a causal convolution over CONV tokens, so a row also remembers a window of CONV - 1 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.kimi import KimiModel
from trtspec.models.layers import AttentionStep, Linear, RMSNorm
from trtspec.models.state import Span, State

CONV, GATE_BOUND, SIZE = 4, -5.0, 16
RECURRENT = (0, 1, 4)  # of the tiny target's seven layers; the others keep latent attention


class Record(NamedTuple):
    """Of a call's span: windows [B, T + 1, 3ND, CONV - 1] and states [B, T + 1, N, D, D] after 0 .. T of its tokens."""

    windows: Tensor
    states: Tensor


def gate(x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """Log decay of every channel of the keys, [..., N, D]; rate [N], bias [N, D]."""
    return GATE_BOUND * torch.sigmoid(rate.exp().unsqueeze(-1) * (x + bias))


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k, v, g [B, T, N, D], beta [B, T, N], state [B, N, D, D] -> outputs [B, T, N, D], states after 0 .. T."""
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
    """In the place of a layer's attention. `in_proj` makes q, k and v, decay, gate of the outputs and beta."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.shape, width = (heads, SIZE), heads * SIZE
        self.sizes = 3 * width, width, width, heads
        self.in_proj, self.o_proj = Linear(hidden, sum(self.sizes)), Linear(width, hidden)
        self.conv = nn.Parameter(torch.randn(3 * width, CONV) / CONV**0.5)
        self.rate = nn.Parameter(torch.rand(heads).mul(4).add(0.5).log())
        self.bias = nn.Parameter(torch.randn(heads, SIZE) * 0.5 - 2.0)
        self.o_norm = RMSNorm(SIZE, 1e-5)
        for linear in (self.in_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        memory: Any = step.cache
        reads, records = [], []
        for span in step.spans:
            begin = memory.remembered(step.index, span) if memory else empty(len(x), self.shape, x)
            read, record = self.run(x[:, span.tokens], *begin)
            reads.append(read)
            records.append(record)
        if memory:
            memory.keep(step.index, step.spans, records)
        return self.o_proj(torch.cat(reads, 1))

    def run(self, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Record]:
        """x [B, T, H] behind a window [B, 3ND, CONV - 1] and a state [B, N, D, D]."""
        raw, decay, gates, beta = self.in_proj(x).split(self.sizes, -1)
        padded = torch.cat((window, raw.mT), -1)
        mixed = F.silu((padded.unfold(-1, CONV, 1) * self.conv.unsqueeze(1)).sum(-1)).mT
        q, k, v = mixed.unflatten(-1, (3, *self.shape)).unbind(2)
        q, k = F.normalize(q, dim=-1) * SIZE**-0.5, F.normalize(k, dim=-1)
        g = gate(decay.unflatten(-1, self.shape), self.rate, self.bias)
        read, states = delta_rule(*(y.to(state.dtype) for y in (q, k, v, g, beta.sigmoid())), state)
        gated = self.o_norm(read.to(x.dtype)).flatten(-2) * gates.sigmoid()
        return gated, Record(padded.unfold(-1, CONV - 1, 1).transpose(1, 2), states)


def empty(rows: int, shape: tuple[int, int], like: Tensor) -> Record:
    """What a text begins with: the window in the model's type, the state in float32 at least."""
    heads, size = shape
    wide = torch.promote_types(like.dtype, torch.float32)
    return Record(
        like.new_zeros(rows, 3 * heads * size, CONV - 1),
        like.new_zeros(rows, heads, size, size, dtype=wide),
    )


class HybridState:
    """Latents by position, beside windows and states, which no later call can overwrite: a row moves on by `commit`.

    `rows` has, by row, where its last call began, and what the layers remembered behind 0 .. T tokens of the call that
    became text: windows and states [layers, T + 1, ...].
    """

    def __init__(self, latents: State, shape: tuple[int, int], like: Tensor) -> None:
        self.latents, self.max_len = latents, latents.max_len
        self.append, self.seen = latents.append, latents.seen
        self.nothing = 0, [x.expand(len(RECURRENT), *x.shape) for x in empty(1, shape, like)]
        self.rows: dict[int, tuple[int, list[Tensor]]] = {}
        self.spans: list[Span] = []
        self.call: dict[int, list[Record]] = {}

    def keep(self, layer: int, spans: list[Span], records: list[Record]) -> None:
        self.spans, self.call[layer] = spans, records

    def remembered(self, layer: int, span: Span) -> Record:
        number = RECURRENT.index(layer)
        parts = [self.rows[row][1] if start else self.nothing[1] for row, start in started(span)]
        return Record(
            *(torch.stack([x[number, -1] for x in kind]) for kind in zip(*parts, strict=True))
        )

    def commit(self, counts: Tensor | Sequence[int]) -> None:
        left = iter(torch.as_tensor(counts).tolist())
        for number, span in enumerate(self.spans):
            records = [self.call[layer][number] for layer in RECURRENT]
            # [B, layers, T + 1, ...]
            kinds = [torch.stack(kind, 1) for kind in zip(*records, strict=True)]
            for index, (row, start) in enumerate(started(span)):
                end = next(left) + 1
                self.rows[row] = start, [kind[index, :, :end] for kind in kinds]

    def move(self, source: int, target: int, length: int) -> None:
        self.latents.move(source, target, length)
        self.rows[target] = self.rows[source]

    def snapshot(self, row: int, begin: int, end: int) -> tuple[int, list[Tensor], Any] | None:
        start, kinds = self.rows[row]
        if not start <= end < start + kinds[0].shape[1]:
            return None
        kept = [kind[:, end - start].unsqueeze(1).clone() for kind in kinds]
        return end, kept, self.latents.snapshot(row, begin, end)

    def restore(
        self, row: int, snapshots: Sequence[tuple[int, list[Tensor], Any]], length: int
    ) -> int:
        """From the last that is not behind `length`."""
        usable = [saved for saved in snapshots if saved[0] <= length]
        self.rows[row] = usable[-1][:2] if usable else self.nothing
        return self.latents.restore(row, [latents for *_, latents in usable], length)

    def bytes(self, tokens: int) -> int:
        return self.latents.bytes(tokens) + sum(x.nbytes for x in self.nothing[1])


def started(span: Span) -> list[tuple[int, int]]:
    """The rows of a span, each with the position of its first token."""
    starts = torch.as_tensor(span.start).view(-1).tolist()
    return [*zip(range(span.rows.start, span.rows.stop), starts, strict=True)]


class HybridModel(KimiModel):
    """A loaded target with delta attention in the place of that of RECURRENT layers."""

    def __init__(self, target: KimiModel, state: type[HybridState] = HybridState) -> None:
        super().__init__(target.spec, target.kv_dtype, layers=0)
        self.state = state
        self.embed, self.layers = target.embed, target.layers
        self.norm, self.lm_head = target.norm, target.lm_head
        with torch.random.fork_rng():
            torch.manual_seed(1)
            for index in RECURRENT:
                attention = DeltaAttention(self.spec.hidden_size, self.spec.num_attention_heads)
                self.layers[index].self_attn = attention
        self.to(target.dtype).eval().requires_grad_(False)

    def new_cache(self, rows: int, max_len: int) -> HybridState:
        shape = self.spec.num_attention_heads, SIZE
        return self.state(super().new_cache(rows, max_len), shape, self.embed.weight)
