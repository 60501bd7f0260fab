"""The memory of a model's layers: each row keeps one text.

A forward pass only appends entries, which later passes may overwrite. After the pass `commit` says
how many of its tokens became text. Rejected drafts, failed passes, snapshots and reuse need no
other rule, for any type of memory. `LatentCache` is the memory of latent attention, a cache of
latents by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class TextPiece(NamedTuple):
    """The tokens of one text that a call computes: positions `begin` to `end` - 1 of row `row`."""

    row: int
    begin: int
    end: int


class Span(NamedTuple):
    """The tokens of a call that read the same rows of the memory.

    Args:
        tokens: slice of the call's tokens.
        rows: slice of the memory's rows.
        start: position of the first token, int64 [rows], or an int for all rows. None without a
            cache.
        end: length of the longest row with these tokens.
    """

    tokens: slice
    rows: slice
    start: Tensor | int | None
    end: int


class State(Protocol):
    """The memory of a model's layers for several texts, one in each row.

    The length of a row is the position at which the next call begins. At position 0 the row is
    empty. A row has at most `max_len` tokens.
    """

    max_len: int

    def append(self, layer: int, slots: Any, entries: Any) -> None:
        """Stores the entries of a layer for the tokens of a call.

        slots: index of each token in the memory, row * max_len + position.
        """

    def seen(self, layer: int, span: Span) -> Any:
        """Returns the memory of a layer for the rows of a span."""

    def commit(self, counts: Tensor | Sequence[int]) -> None:
        """Accepts the first tokens of each row's last call as text, and drops its other tokens.

        counts: number of accepted tokens of each row.
        """

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of row `source` to row `target`."""

    def snapshot(self, row: int, begin: int, end: int) -> Any:
        """Copies the memory of a row at position `end`, for `restore`.

        None if the row has moved too far past `end`.

        begin: position at the end of the previous snapshot. The first snapshot of a text may begin
            at -1.
        """

    def restore(self, row: int, snapshots: Sequence[Any], length: int) -> int:
        """Fills a row from consecutive snapshots of a text, with at most `length` tokens.

        Returns the new number of tokens of the row.
        """

    def bytes(self, tokens: int) -> int:
        """Size of a snapshot of `tokens` tokens, in bytes."""


class LatentCache:
    """A cache with one entry per layer and position, [layers, rows, max_len, width].

    The entry of a rejected draft is overwritten before it can be seen, so there is nothing to
    commit.

    Args:
        width: elements of an entry. For MLA: kv_lora_rank + qk_rope_head_dim.
        dtype: dtype of the entries. torch.float8_e4m3fn casts the entries to FP8 without a scale.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        max_len: int,
        width: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        self.max_len = max_len
        self.data = torch.zeros(layers, rows, max_len, width, dtype=dtype, device=device)
        self.raw = self.data.view(torch.uint8)  # torch cannot index FP8 tensors
        self.entries = self.data.flatten(1, 2).unbind(0)

    def append(self, layer: int, slots: Tensor, entries: Tensor) -> None:
        """Writes the entries [B, T, width] of a call to one layer.

        slots: index of each entry, row * max_len + position, int64 [B * T].
        """
        stored = entries.flatten(0, 1)
        target = self.entries[layer]
        if target.dtype == torch.float8_e4m3fn:
            # Values beyond FP8's range become the largest value in the engines, but NaN in torch.
            stored = stored.clamp(-448, 448).to(target.dtype).view(torch.uint8)
            target = target.view(torch.uint8)
        target.index_copy_(0, slots, stored)

    def seen(self, layer: int, span: Span) -> Tensor:
        """Returns the entries of a span's rows in one layer, [rows, end, width]."""
        return self.data[layer, span.rows, : span.end]

    def commit(self, counts: Tensor | Sequence[int]) -> None:
        """Does nothing, because the entries of rejected drafts are overwritten later."""

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` entries of row `source` to row `target`."""
        self.data[:, target, :length].copy_(self.data[:, source, :length])

    def snapshot(self, row: int, begin: int, end: int) -> Tensor:
        """Copies the entries of a row at the positions `begin` to `end` - 1.

        `begin` may be -1, which means 0.
        """
        return self.raw[:, row, max(0, begin) : end].clone()

    def restore(self, row: int, snapshots: Sequence[Tensor], length: int) -> int:
        """Fills a row with the first `length` entries of the snapshots. Returns their number."""
        # An empty tensor comes first, because torch cannot concatenate an empty list.
        entries = torch.cat((self.raw[:, row, :0], *snapshots), 1)[:, :length]
        self.raw[:, row, : entries.shape[1]] = entries
        return entries.shape[1]

    def bytes(self, tokens: int) -> int:
        """Size of a snapshot of `tokens` tokens, in bytes."""
        return tokens * self.raw[:, 0, 0].numel()
