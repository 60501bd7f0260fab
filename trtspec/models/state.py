"""The memory of a model's layers: each row keeps one text.

A forward changes no memory that cannot be overwritten. It appends its entries, and `commit` says
how many of its tokens became text. Rejected drafts, failed passes, snapshots and reuse need no
other rule, for any type of memory. Here is the memory of latent attention, a cache of latents by
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class TextPiece(NamedTuple):
    """Tokens `begin` to `end` of the text in row `row`."""

    row: int
    begin: int
    end: int


class Span(NamedTuple):
    """Tokens of a call that read the same rows.

    tokens: slice of the call's width.
    rows: slice of the memory's rows.
    start: position of the first token, int64 [rows] or one for all. None without a cache.
    end: the end of the longest row, after these tokens.
    """

    tokens: slice
    rows: slice
    start: Tensor | int | None
    end: int


class State(Protocol):
    """Memory of some layers for a number of rows of up to `max_len` tokens.

    A row's valid length is the position at which the next call begins. At 0 the row is empty.
    """

    max_len: int

    def append(self, layer: int, slots: Any, entries: Any) -> None:
        """Takes a layer's entries for the tokens of a call."""

    def seen(self, layer: int, span: Span) -> Any:
        """Returns a layer's memory of the rows of a span."""

    def commit(self, counts: Tensor | Sequence[int]) -> None:
        """Makes the first `counts` tokens of each row's last call text, and drops the others."""

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the memory of a row of `length` tokens over another row."""

    def snapshot(self, row: int, begin: int, end: int) -> Any:
        """A copy from which `restore` resumes after token `end`.

        None if the row has moved too far past `end`. begin: the end of the snapshot before.
        """

    def restore(self, row: int, snapshots: Sequence[Any], length: int) -> int:
        """Fills a row from the snapshots of a text, with at most `length` tokens.

        Returns the number of tokens.
        """

    def bytes(self, tokens: int) -> int:
        """Size of a snapshot of `tokens` tokens."""


class LatentCache:
    """Entries by position, [layers, rows, max_len, width].

    For MLA the width is kv_lora_rank + qk_rope_head_dim. The entry of a rejected draft is
    overwritten before it can be seen, so there is nothing to commit. `dtype=torch.float8_e4m3fn`
    keeps the entries as the scale-free FP8 cast.
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
        self.raw = self.data.view(torch.uint8)  # torch indexes no FP8 type
        self.entries = self.data.flatten(1, 2).unbind(0)

    def append(self, layer: int, slots: Tensor, entries: Tensor) -> None:
        """`slots` int64 [B * T]: row * max_len + position of each entry of [B, T, width]."""
        stored = entries.flatten(0, 1)
        target = self.entries[layer]
        if target.dtype == torch.float8_e4m3fn:
            # The cast saturates in the engines but gives NaN in torch.
            stored = stored.clamp(-448, 448).to(target.dtype).view(torch.uint8)
            target = target.view(torch.uint8)
        target.index_copy_(0, slots, stored)

    def seen(self, layer: int, span: Span) -> Tensor:
        """The entries of a span's rows, [rows, end, width]."""
        return self.data[layer, span.rows, : span.end]

    def commit(self, counts: Tensor | Sequence[int]) -> None:
        pass

    def move(self, source: int, target: int, length: int) -> None:
        self.data[:, target, :length].copy_(self.data[:, source, :length])

    def snapshot(self, row: int, begin: int, end: int) -> Tensor:
        return self.raw[:, row, max(0, begin) : end].clone()

    def restore(self, row: int, snapshots: Sequence[Tensor], length: int) -> int:
        entries = torch.cat((self.raw[:, row, :0], *snapshots), 1)[:, :length]
        self.raw[:, row, : entries.shape[1]] = entries
        return entries.shape[1]

    def bytes(self, tokens: int) -> int:
        return tokens * self.raw[:, 0, 0].numel()
