"""One forward call as its attention layers see it: positions, causal masks and rows of the cache.

Two kinds of calls are built here. `batch_step` is for decoding: rows of equal width, each at its
own position. `prompt_step` is for prompts: pieces of several texts one after the other in a single
row, without padding (varlen attention). Shapes: B rows, T tokens of the call, S cached positions, N
heads, D entries of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtspec.models.rope import RotaryEmbedding
from trtspec.models.state import Span, State, TextPiece


class CausalMask:
    """`blocked` [B, T, S]: -inf for the positions that a token must not see, else 0."""

    def __init__(self, blocked: Tensor) -> None:
        self.blocked = blocked
        self.repeated: dict[int, Tensor] = {}

    def by_head(self, heads: int) -> Tensor:
        """The mask for multi-query attention, [B, T * heads, S]. Made once a call.

        Multi-query attention takes heads as further tokens.
        """
        if heads not in self.repeated:
            self.repeated[heads] = self.blocked.repeat_interleave(heads, 1)
        return self.repeated[heads]


# attention of queries [B, T, N, D] over the cache's entries [B, S, width] -> [B, T, ...]
Attend = Callable[[Tensor, Tensor, CausalMask], Tensor]


@dataclass
class AttentionStep:
    """One call. Built once for the call and shared by all layers.

    rotation: of the call's positions, complex64 [B or 1, T, 1, R / 2].
    spans: tokens of the call that read the same rows of the cache.
    masks: one for each span.
    slots: indices of the call's tokens in a cache, int64 [B * T], row * max_len + position.
    layer: the layer of the cache that runs now.
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
        """Writes entry [B, T, width] into the cache, and returns the attention [B, T, ...].

        The attention of queries [B, T, N, D] is over the cached entries of each row up to its own
        position. Without a cache it is over the call's own entries.
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
    """A call over tokens int64 [B, T]. Without a cache: a plain causal forward from position 0.

    Row b is row `row + b` of the cache, has the positions start[b] .. start[b] + T - 1 and sees
    cached positions up to its own. `length` is the end of the longest row, max(start) + T. None
    reads it from the device, which waits.
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
    """A call over pieces of texts one after the other, [1, T]. Each sees its own text only."""
    spans: list[Span] = []
    masks: list[CausalMask] = []
    # for each token, the first slot of its row, and its position
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
