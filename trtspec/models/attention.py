"""One forward call as its attention layers see it: positions, causal masks and rows of the cache.

Two kinds of calls are built here. `batch_step` is for decoding: rows of equal width, each at its
own position. `prompt_step` is for prompts: pieces of several texts one after the other in a single
row, without padding (varlen attention). Shapes: B rows, T tokens of the call, S cached positions, N
heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtspec.models.rope import RotaryEmbedding
from trtspec.models.state import Span, State, TextPiece


class CausalMask:
    """A causal mask that is added to attention scores.

    Args:
        blocked: [B, T, S], -inf for the cached positions that a token must not see, else 0.
    """

    def __init__(self, blocked: Tensor) -> None:
        self.blocked = blocked
        self.repeated: dict[int, Tensor] = {}

    def by_head(self, heads: int) -> Tensor:
        """Returns the mask for multi-query attention, which treats heads as further tokens.

        The mask is [B, T * heads, S]. The mask is kept, so later layers get the same tensor.
        """
        if heads not in self.repeated:
            self.repeated[heads] = self.blocked.repeat_interleave(heads, 1)
        return self.repeated[heads]


# Function that computes the attention [B, T, ...] of queries [B, T, N, D] over entries of the cache
# [B, S, width].
Attend = Callable[[Tensor, Tensor, CausalMask], Tensor]


@dataclass
class AttentionStep:
    """Positions, masks and cache slots of one forward call, built once and shared by all layers.

    Args:
        rotation: rotary rotations of the call's positions, complex64 [B or 1, T, 1, R / 2].
        spans: groups of tokens that read the same rows of the cache.
        masks: causal mask of each span.
        cache: cache of the model. None: the tokens attend to each other only.
        slots: index of each token in the cache, row * max_len + position, int64 [B * T].
        layer: index of the cache's layer that runs now.
    """

    rope: RotaryEmbedding
    rotation: Tensor
    spans: list[Span]
    masks: list[CausalMask]
    cache: State | None = None
    slots: Tensor | None = None
    layer: int = 0

    def at(self, layer: int) -> AttentionStep:
        """Selects the layer of the cache that runs next."""
        self.layer = layer
        return self

    def rotate(self, x: Tensor) -> Tensor:
        """Applies the rotary embedding of this call's positions to x [B, T, N, R]."""
        return self.rope.rotate(x, self.rotation)

    def attend(self, entry: Tensor, queries: Tensor, attention: Attend) -> Tensor:
        """Appends the entries of the call to the cache, and returns the attention [B, T, ...].

        Each query attends to the cached entries of its row up to its own position. Without a cache
        each query attends to the entries of the call.

        entry: cache entry of each token, [B, T, width].
        queries: queries of each token, [B, T, N, D].
        attention: function that computes the attention over entries.
        """
        if self.cache is None:
            return attention(queries, entry, self.masks[0])
        self.cache.append(self.layer, self.slots, entry)
        attended = []
        for span, mask in zip(self.spans, self.masks, strict=True):
            seen = self.cache.seen(self.layer, span).to(entry.dtype)
            attended.append(attention(queries[:, span.tokens], seen, mask))
        if len(attended) == 1:
            return attended[0]
        return torch.cat(attended, 1)


def batch_step(
    tokens: Tensor,
    rope: RotaryEmbedding,
    dtype: torch.dtype,
    start: Tensor | None = None,
    cache: State | None = None,
    row: int = 0,
    length: int | None = None,
) -> AttentionStep:
    """Builds the step of a call over token ids int64 [B, T].

    Row b of the call has the positions start[b] to start[b] + T - 1. Each token attends to the
    cached positions of its row up to its own position. Without a cache the call is a plain causal
    forward pass from position 0.

    dtype: dtype of the attention scores.
    start: position of the first token of each row, int64 [B]. None without a cache.
    row: row of the cache that row 0 of the call uses. Row b uses row `row + b`.
    length: end of the longest row, max(start) + T. None: the length is read from the device, and
        the host waits.
    """
    batch, count = tokens.shape
    device = tokens.device
    steps = torch.arange(count, device=device)
    slots = None
    if cache is None:
        positions = steps.unsqueeze(0)
        length = count
    else:
        assert start is not None
        positions = start.unsqueeze(1) + steps
        length = length or int(start.max()) + count
        rows = torch.arange(row, row + batch, device=device).unsqueeze(1)
        slots = (rows * cache.max_len + positions).flatten()
    rotations = rope.upto(cache.max_len if cache else count, device)
    rotation = rotations[positions].unsqueeze(2)
    unseen = torch.arange(length, device=device) > positions.unsqueeze(-1)  # [B or 1, T, S]
    blocked = torch.zeros(unseen.shape, dtype=dtype, device=device)
    blocked.masked_fill_(unseen, float("-inf"))
    mask = CausalMask(blocked.expand(batch, count, length))
    span = Span(slice(None), slice(row, row + batch), start, length)
    return AttentionStep(rope, rotation, [span], [mask], cache, slots)


def prompt_step(
    pieces: Sequence[TextPiece],
    rope: RotaryEmbedding,
    dtype: torch.dtype,
    cache: State,
    device: torch.device,
) -> AttentionStep:
    """Builds the step of a call over pieces of several texts, one after the other in a single row.

    A piece attends to its own text only.

    pieces: rows of the cache and positions of each piece.
    dtype: dtype of the attention scores.
    """
    spans: list[Span] = []
    masks: list[CausalMask] = []
    # For each token, the first slot of its row and its position in the text.
    addresses: list[tuple[int, int]] = []
    for piece in pieces:
        first = len(addresses)
        size = piece.end - piece.begin
        row_slot = piece.row * cache.max_len
        addresses += [(row_slot, position) for position in range(piece.begin, piece.end)]
        tokens = slice(first, first + size)
        rows = slice(piece.row, piece.row + 1)
        spans.append(Span(tokens, rows, piece.begin, piece.end))
        blocked = torch.full((1, size, piece.end), float("-inf"), dtype=dtype, device=device)
        masks.append(CausalMask(blocked.triu_(piece.begin + 1)))
    row_slots, positions = torch.tensor(addresses).to(device, non_blocking=True).unbind(1)
    rotations = rope.upto(cache.max_len, device)
    rotation = rotations[positions.unsqueeze(0)].unsqueeze(2)
    return AttentionStep(rope, rotation, spans, masks, cache, row_slots + positions)
