"""Prefix reuse: the caches of texts that were computed, kept in blocks, so that a prompt that begins like one of them
is not computed again.

A block is known by its tokens and by the block before it, so only equal texts share one. It keeps snapshots of the
target's state and of the head's. A head's row at position t needs the token at t+1 and what the target computes at t.
So with a head all snapshots end one position before their block, and the target computes that position again.
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
    """`snapshots`: of the target's state and, with a head, of the head's."""

    number: int
    snapshots: list[Any]


class PrefixCache:
    """Blocks of computed texts, the least recently used one leaving first. Raises UsageError if `max_bytes` hold no
    block."""

    def __init__(
        self, target: State, head: State | None, max_bytes: int, block_tokens: int
    ) -> None:
        self.block_tokens = block_tokens
        self.states = [target] if head is None else [target, head]
        self.behind = (
            len(self.states) - 1
        )  # positions, from the end of a block back to its snapshots
        block_bytes = sum(state.bytes(block_tokens) for state in self.states)
        self.capacity = max_bytes // block_bytes
        if not self.capacity:
            message = f"{max_bytes} bytes for reused prefixes hold no block of {block_bytes}"
            raise UsageError(
                message, f"give at least {-(-block_bytes >> 20)} MiB, or 0 to switch the reuse off"
            )
        # A parent always counts as used after its children, so the oldest block, which leaves first, has no child.
        self.blocks: OrderedDict[Key, Block] = OrderedDict()
        self.stats = PrefixStats()
        self._numbers = itertools.count(ROOT + 1)

    def load(self, tokens: Sequence[int], row: int) -> int:
        """Fills a row of the states with the longest known beginning of a prompt; returns how many of its tokens need
        no computation, never all."""
        blocks = self._chain(tokens)
        reused = len(tokens) - 1
        for index, state in enumerate(self.states):
            reused = state.restore(row, [block.snapshots[index] for block in blocks], reused)
        self.stats.tokens += len(tokens)
        self.stats.cached_tokens += reused
        return reused

    def gains(self, tokens: list[int], computed: list[int], cached_tokens: int) -> bool:
        """Whether more of a prompt could be loaded after the prompt `computed`, of which `cached_tokens` are known."""
        shared = len(os.path.commonprefix([tokens, computed]))
        return shared - shared % self.block_tokens - self.behind > cached_tokens

    def save(self, tokens: Sequence[int], row: int) -> None:
        """Keeps the whole blocks of `tokens`, which a row holds, up to the first that a state has no snapshot of."""
        self._chain(tokens, row)

    def _chain(self, tokens: Sequence[int], row: int | None = None) -> list[Block]:
        """The longest known chain of blocks that `tokens` begin with, and new blocks of `row` behind it, if one is
        given. The chain counts as used."""
        size, before = self.block_tokens, ROOT
        chain: dict[Key, Block] = {}
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
        for key in reversed(chain):
            self.blocks.move_to_end(key)
        return list(chain.values())

    def _new_block(self, row: int, begin: int, in_use: int) -> Block | None:
        """In the place of the oldest block, if need be, but not of the `in_use` last ones; None if that cannot be."""
        if in_use == self.capacity:
            return None
        snapshots = [state.snapshot(row, begin, begin + self.block_tokens) for state in self.states]
        if any(snapshot is None for snapshot in snapshots):
            return None
        if len(self.blocks) == self.capacity:
            self.blocks.popitem(last=False)
            self.stats.evicted_blocks += 1
        return Block(next(self._numbers), snapshots)
