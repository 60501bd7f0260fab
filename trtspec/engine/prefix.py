"""Prefix reuse: the caches of texts that were computed, kept in blocks, so that a prompt that begins like one of them
is not computed again.

A block is known by its tokens and by the block before it, so only equal texts share one. A head's cache is kept beside
the target's, one position behind. Its row at position t needs the token at t+1: the row at a block's last position
depends on the block after it and belongs there. The position before the first new token is computed again, which gives
the head the target's state for that row.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from trtspec.errors import UsageError
from trtspec.models.layers import LatentCache

BLOCK_TOKENS = 32  # TensorRT-LLM's default tokens_per_block
PREFIX_BYTES = 256 << 20
ROOT = 0

Key = tuple[int, tuple[int, ...]]  # number of the block before, and the block's own tokens


@dataclass
class PrefixStats:
    """Since the start. `tokens` are those of the prompts that were looked up, `cached_tokens` those of them that needed
    no computation."""

    tokens: int = 0
    cached_tokens: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True)
class Block:
    number: int
    slot: int


class BlockStore:
    """Copies of a cache's entries in blocks of equal length, [layers, blocks, block_tokens, width]. The cache's entries
    are `behind` positions behind the text."""

    def __init__(self, cache: LatentCache, blocks: int, block_tokens: int, behind: int) -> None:
        self.behind = behind
        # bytes: torch indexes no FP8 type
        self.cache = cache.data.view(torch.uint8)
        layers, _, _, width = self.cache.shape
        self.data = torch.zeros(
            layers, blocks, block_tokens, width, dtype=torch.uint8, device=self.cache.device
        )

    def save(self, row: int, begin: int, slots: Sequence[int]) -> None:
        """Fills these blocks, in their order, with a row's entries from token `begin` on. None lie before 0."""
        for block, entries in self._pairs(row, begin, slots):
            block.copy_(entries)

    def load(self, row: int, begin: int, slots: Sequence[int]) -> None:
        """The reverse of `save`."""
        for block, entries in self._pairs(row, begin, slots):
            entries.copy_(block)

    def _pairs(
        self, row: int, begin: int, slots: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        count = self.data.shape[2]
        for at, slot in zip(itertools.count(begin - self.behind, count), slots, strict=False):
            skip = max(0, -at)
            yield self.data[:, slot, skip:], self.cache[:, row, at + skip : at + count]


class PrefixCache:
    """Blocks of computed texts, the least recently used one leaving first. Raises UsageError if `max_bytes` hold no
    block."""

    def __init__(
        self, target: LatentCache, head: LatentCache | None, max_bytes: int, block_tokens: int
    ) -> None:
        self.block_tokens = block_tokens
        block_bytes = block_tokens * (target.token_bytes + (head.token_bytes if head else 0))
        self.capacity = max_bytes // block_bytes
        if not self.capacity:
            message = f"{max_bytes} bytes for reused prefixes hold no block of {block_bytes}"
            raise UsageError(
                message, f"give at least {-(-block_bytes >> 20)} MiB, or 0 to switch the reuse off"
            )
        caches = [target, head] if head else [target]
        self.stores = [
            BlockStore(cache, self.capacity, block_tokens, behind)
            for behind, cache in enumerate(caches)
        ]
        self.computed_again = (
            len(caches) - 1
        )  # a head needs the last position that is reused computed again
        # A parent always counts as used after its children, so the oldest block, which leaves first, has no child.
        self.blocks: OrderedDict[Key, Block] = OrderedDict()
        self.free = list(range(self.capacity))
        self.stats = PrefixStats()
        self._numbers = itertools.count(ROOT + 1)

    def load(self, tokens: Sequence[int], row: int) -> int:
        """Fills a row of the caches with the longest known beginning of a prompt; returns how many of its tokens need
        no computation, never all."""
        slots, _ = self._chain(tokens)
        reused = max(0, min(len(slots) * self.block_tokens - self.computed_again, len(tokens) - 1))
        if reused:
            for store in self.stores:
                store.load(row, 0, slots)
        self.stats.tokens += len(tokens)
        self.stats.cached_tokens += reused
        return reused

    def gains(self, tokens: Sequence[int], computed: Sequence[int], cached_tokens: int) -> bool:
        """Whether more of a prompt could be loaded after the prompt `computed`, of which `cached_tokens` are known."""
        size = self.block_tokens
        shared = 0
        while tokens[shared : shared + size] == computed[
            shared : shared + size
        ] and shared + size <= len(tokens):
            shared += size
        return shared - self.computed_again > cached_tokens

    def save(self, tokens: Sequence[int], row: int) -> None:
        """Keeps the whole blocks of `tokens`, whose entries are those of a row. If that fails, nothing stays known."""
        try:
            known, new = self._chain(tokens, grow=True)
            for store in self.stores:
                store.save(row, len(known) * self.block_tokens, new)
        except Exception:  # half a block would be part of another prompt
            self.blocks.clear()
            self.free = list(range(self.capacity))
            raise

    def _chain(self, tokens: Sequence[int], grow: bool = False) -> tuple[list[int], list[int]]:
        """Slots of the longest known chain of blocks that `tokens` begin with; of new blocks behind it, as far as there
        is room, if it may `grow`. The chain counts as used."""
        size, before = self.block_tokens, ROOT
        chain: list[Key] = []
        known: list[int] = []
        new: list[int] = []
        for begin in range(0, len(tokens) - size + 1, size):
            key = before, tuple(tokens[begin : begin + size])
            block = self.blocks.get(key)
            if block is not None:
                known.append(block.slot)
            elif grow and self._make_room(len(chain)):
                block = self.blocks[key] = Block(next(self._numbers), self.free.pop())
                new.append(block.slot)
            else:
                break
            self.blocks.move_to_end(key)
            chain.append(key)
            before = block.number
        for key in reversed(chain):
            self.blocks.move_to_end(key)
        return known, new

    def _make_room(self, in_use: int) -> bool:
        """Whether there is a free slot, if need be that of the first block; not of the `in_use` last ones."""
        if not self.free and len(self.blocks) > in_use:
            _, block = self.blocks.popitem(last=False)
            self.free.append(block.slot)
            self.stats.evicted_blocks += 1
        return bool(self.free)
