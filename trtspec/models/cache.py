"""KV cache of the reference models: one tensor for all layers, rolled back by passing a smaller start."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LatentCache:
    """Cached entries [layers, rows, max_len, width]; for MLA the width is kv_lora_rank + qk_rope_head_dim.

    Nothing is erased on rollback: a row's valid length is what the caller passes as `start`, and entries beyond it are
    overwritten before they can be seen. `dtype=torch.float8_e4m3fn` keeps the entries as the scale-free FP8 cast.
    """

    def __init__(
        self, layers: int, rows: int, max_len: int, width: int, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        self.data = torch.zeros(layers, rows, max_len, width, dtype=dtype, device=device)

    @property
    def max_len(self) -> int:
        return self.data.shape[2]

    @property
    def rows(self) -> int:
        return self.data.shape[1]

    @property
    def token_bytes(self) -> int:
        """Of one token's entries in all layers."""
        return self.data.shape[0] * self.data.shape[3] * self.data.itemsize

    def layer(self, index: int) -> Tensor:
        return self.data[index]

    def move(self, source: int, target: int, length: int | None = None) -> None:
        """Copies the first `length` entries (None: all) of row `source` over those of row `target`, so that active rows
        stay together at the front."""
        self.data[:, target, :length].copy_(self.data[:, source, :length])

    def clear(self, row: int, length: int) -> None:
        """Sets the first `length` entries of a row to zero."""
        self.data[:, row, :length].zero_()


class BlockStore:
    """Copies of a cache's entries in blocks of equal length, [layers, blocks, block_tokens, width]."""

    def __init__(self, cache: LatentCache, blocks: int, block_tokens: int) -> None:
        # bytes: torch indexes no FP8 type
        self.cache = cache.data.view(torch.uint8)
        layers, _, _, width = self.cache.shape
        self.data = torch.zeros(layers, blocks, block_tokens, width, dtype=torch.uint8, device=self.cache.device)

    def save(self, row: int, begin: int, slots: Sequence[int]) -> None:
        """Fills these blocks, in their order, with a row's entries from position `begin` on; there are none before 0,
        which leaves as many places of the first block empty."""
        count = self.data.shape[2]
        for number, slot in enumerate(slots):
            at = begin + number * count
            skip = max(0, -at)
            self.data[:, slot, skip:] = self.cache[:, row, at + skip : at + count]

    def load(self, row: int, begin: int, slots: Sequence[int]) -> None:
        """The reverse of `save`."""
        count = self.data.shape[2]
        for number, slot in enumerate(slots):
            at = begin + number * count
            skip = max(0, -at)
            self.cache[:, row, at + skip : at + count] = self.data[:, slot, skip:]
