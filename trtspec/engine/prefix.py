"""Prefix cache: snapshots of computed texts in blocks, so that equal prefixes are computed once.

A block is identified by its tokens and by the block before it, so only equal texts share a block.
It keeps a snapshot of the target's state and, with a head, one of the head's state. The head's
input at position t needs the token at t + 1, which the next prompt may change. So with a head, all
snapshots end one position before their block, and that position is computed again.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.errors import UsageError
from trtspec.models.state import State

BLOCK_TOKENS = 32  # TensorRT-LLM's default tokens_per_block
PREFIX_BYTES = 256 << 20  # default size of the prefix cache
ROOT = 0  # number of the block before the first block of a text

BlockKey = tuple[int, tuple[int, ...]]  # number of the block before, and the block's own tokens


@dataclass
class PrefixStats:
    """Counters of the prefix cache since the start.

    tokens: number of tokens of all prompts that were looked up.
    cached_tokens: number of prompt tokens whose state came from the cache.
    evicted_blocks: number of blocks that made room for others.
    """

    tokens: int = 0
    cached_tokens: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True)
class Block:
    """A block of a computed text.

    number: number of the block, which keys of following blocks contain.
    snapshots: snapshot of the target's state and, with a head, snapshot of the head's state.
    """

    number: int
    snapshots: list[Any]


class PrefixCache:
    """Cache of blocks of computed texts. The least recently used block is evicted first.

    Raises UsageError if `max_bytes` is less than the size of a block.

    Args:
        target: state of the target.
        head: state of the head. None without a head.
        max_bytes: size of the cache in bytes.
        block_tokens: number of tokens in a block.
    """

    def __init__(
        self, target: State, head: State | None, max_bytes: int, block_tokens: int
    ) -> None:
        self.block_tokens = block_tokens
        self.states = [target] if head is None else [target, head]
        # Number of positions from the end of a snapshot to the end of its block: 1 with a head.
        self.behind = len(self.states) - 1
        block_bytes = sum(state.bytes(block_tokens) for state in self.states)
        self.capacity = max_bytes // block_bytes
        if not self.capacity:
            message = f"{max_bytes} bytes for reused prefixes hold no block of {block_bytes}"
            mib = -(-block_bytes >> 20)  # rounded up
            raise UsageError(
                message, f"use `prefix_cache_mib` {mib} or more, or 0 to switch the reuse off"
            )
        # Least recently used first. A block always counts as used after the blocks that follow it,
        # so the first entry has no block that depends on it.
        self.blocks: OrderedDict[BlockKey, Block] = OrderedDict()
        self.stats = PrefixStats()
        self._numbers = itertools.count(ROOT + 1)

    def load(self, tokens: Sequence[int], row: int) -> int:
        """Fills a row of the states with the longest cached prefix of a prompt.

        Returns the number of tokens of this prefix. The prompt's last token is never part of it.
        """
        blocks = self._chain(tokens)
        reused = len(tokens) - 1  # a pass over the last token gives the first logits
        for index, state in enumerate(self.states):
            reused = state.restore(row, [block.snapshots[index] for block in blocks], reused)
        self.stats.tokens += len(tokens)
        self.stats.cached_tokens += reused
        return reused

    def worth_waiting(self, tokens: list[int], computed: list[int], cached_tokens: int) -> bool:
        """Whether a prompt can reuse more tokens after another prompt is computed.

        Args:
            tokens: token ids of the prompt that may wait.
            computed: token ids of the prompt that is being computed.
            cached_tokens: number of first tokens of `computed` that are in the cache already.
        """
        shared = len(os.path.commonprefix([tokens, computed]))
        reusable = shared - shared % self.block_tokens - self.behind
        return reusable > cached_tokens

    def save(self, tokens: Sequence[int], row: int) -> None:
        """Stores the complete blocks of a row's text, up to the first block without a snapshot."""
        self._chain(tokens, row)

    def _chain(self, tokens: Sequence[int], row: int | None = None) -> list[Block]:
        """Returns the longest chain of cached blocks at the beginning of `tokens`.

        All returned blocks count as used. If `row` is given, blocks that are missing in the cache
        are created from the states of this row.
        """
        size = self.block_tokens
        before = ROOT
        chain: dict[BlockKey, Block] = {}
        for begin in range(0, len(tokens) - size + 1, size):
            key = before, tuple(tokens[begin : begin + size])
            block = self.blocks.get(key)
            if block is None and row is not None:
                block = self._new_block(row, begin - self.behind, len(chain))
            if block is None:
                break
            self.blocks[key] = chain[key] = block
            self.blocks.move_to_end(key)
            before = block.number
        # The first block of the chain becomes the most recently used block.
        for key in reversed(chain):
            self.blocks.move_to_end(key)
        return list(chain.values())

    def _new_block(self, row: int, begin: int, in_use: int) -> Block | None:
        """Returns a new block of a row's text. Evicts the oldest block if the cache is full.

        None if a state has no snapshot of these positions, or if the chain fills the whole cache.

        Args:
            row: row of the states.
            begin: first position of the block's snapshots.
            in_use: number of blocks of the chain so far, which must not be evicted.
        """
        if in_use == self.capacity:
            return None
        snapshots = [state.snapshot(row, begin, begin + self.block_tokens) for state in self.states]
        if any(snapshot is None for snapshot in snapshots):
            return None
        if len(self.blocks) == self.capacity:
            self.blocks.popitem(last=False)
            self.stats.evicted_blocks += 1
        return Block(next(self._numbers), snapshots)
