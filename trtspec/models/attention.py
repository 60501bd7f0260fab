"""One forward call as its attention layers see it: positions, causal masks and rows of the cache.

Two calls are built here. `batch_step`: rows of equal width, each at its own position, as decoding wants. `prompt_step`:
pieces of several texts one after the other in a single row, without padding, as prompts want (varlen attention).
Shapes: B rows, T tokens of the call, S cached positions, N heads, D entries of a head.
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
        """[B, T * heads, S] for multi-query attention, which takes heads as further tokens. Made once a call."""
        if heads not in self.repeated:
            self.repeated[heads] = self.blocked.repeat_interleave(heads, 1)
        return self.repeated[heads]


# attention of queries [B, T, N, D] over the cache's entries [B, S, width] -> [B, T, ...]
Attend = Callable[[Tensor, Tensor, CausalMask], Tensor]


@dataclass
class AttentionStep:
    """Built once for a call, shared by all layers.

    rotation: of the call's positions, complex64 [B or 1, T, 1, R / 2].
    spans: tokens of the call that read the same rows of the cache; masks: one for each span.
    slots: where the call's tokens go in a cache, int64 [B * T], row * max_len + position.
    layer: of the cache, the one that runs now.
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
        """Writes entry [B, T, width] into the cache; returns the attention of queries [B, T, N, D] over what each row
        has cached up to its own position. Without a cache the call's own entries are all there is."""
        if self.cache is None:
            return attention(queries, entry, self.masks[0])
        self.cache.append(self.layer, self.slots, entry)
        attended = []
        for span, mask in zip(self.spans, self.masks, strict=True):
            seen = self.cache.seen(self.layer, span).to(entry.dtype)
            attended.append(attention(queries[:, span.tokens], seen, mask))
        return attended[0] if len(attended) == 1 else torch.cat(attended, 1)


def batch_step(
    tokens: Tensor,
    rope: RotaryEmbedding,
    dtype: torch.dtype,
    start: Tensor | None = None,
    cache: State | None = None,
    row: int = 0,
    length: int | None = None,
) -> AttentionStep:
    """A call over tokens int64 [B, T]; without a cache a plain causal forward from position 0.

    Row b is row `row + b` of the cache, has the positions start[b] .. start[b] + T - 1 and sees cached positions up to
    its own. `length` is where the longest row ends, max(start) + T; None reads it from the device, which waits.
    """
    (batch, count), device = tokens.shape, tokens.device
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
    rotation = rope.upto(cache.max_len if cache else count, device)[positions].unsqueeze(2)
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
    """A call over pieces of several texts one after the other, [1, T]; each sees its own text only."""
    spans: list[Span] = []
    masks: list[CausalMask] = []
    # of each token: the first slot of its row, and its position
    addresses: list[tuple[int, int]] = []
    for piece in pieces:
        first, size = len(addresses), piece.end - piece.begin
        addresses += [(piece.row * cache.max_len, at) for at in range(piece.begin, piece.end)]
        tokens, rows = slice(first, first + size), slice(piece.row, piece.row + 1)
        spans.append(Span(tokens, rows, piece.begin, piece.end))
        blocked = torch.full((1, size, piece.end), float("-inf"), dtype=dtype, device=device)
        masks.append(CausalMask(blocked.triu_(piece.begin + 1)))
    row_slots, positions = torch.tensor(addresses).to(device, non_blocking=True).unbind(1)
    rotation = rope.upto(cache.max_len, device)[positions.unsqueeze(0)].unsqueeze(2)
    return AttentionStep(rope, rotation, spans, masks, cache, row_slots + positions)
