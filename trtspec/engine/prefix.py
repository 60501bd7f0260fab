"""Prefix reuse: caches of computed texts, kept in blocks. Known prefixes are not computed again.

A block is identified by its tokens and by the block before it, so only equal texts share one. It
keeps a snapshot of the target's state and one of the head's. The head's input at position t needs
the token at t + 1, which the next prompt may change. So with a head all snapshots end one position
before their block, and that position is computed again.
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

BlockKey = tuple[int, tuple[int, ...]]  # number of the block before, and the block's own tokens


@dataclass
class PrefixStats:
    """Counts since the start.

    tokens: of all prompts.
    cached_tokens: prompt tokens that needed no computation.
    """

    tokens: int = 0
    cached_tokens: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True)
class Block:
    """A block of a text that was computed.

    snapshots: of the target's state and, with a head, of the head's.
    """

    number: int
    snapshots: list[Any]


class PrefixCache:
    """Blocks of computed texts. The least recently used block is evicted first.

    Raises UsageError if `max_bytes` hold no block.
    """

    def __init__(
        self, target: State, head: State | None, max_bytes: int, block_tokens: int
    ) -> None:
        self.block_tokens = block_tokens
        self.states = [target] if head is None else [target, head]
        # positions from the end of a snapshot to the end of its block
        self.behind = len(self.states) - 1
        block_bytes = sum(state.bytes(block_tokens) for state in self.states)
        self.capacity = max_bytes // block_bytes
        if not self.capacity:
            message = f"{max_bytes} bytes for reused prefixes hold no block of {block_bytes}"
            mib = -(-block_bytes >> 20)
            raise UsageError(
                message, f"use `prefix_cache_mib` {mib} or more, or 0 to switch the reuse off"
            )
        # Oldest first. A parent always counts as used after its children, so the oldest block has
        # no child.
        self.blocks: OrderedDict[BlockKey, Block] = OrderedDict()
        self.stats = PrefixStats()
        self._numbers = itertools.count(ROOT + 1)

    def load(self, tokens: Sequence[int], row: int) -> int:
        """Fills a row of the states with the longest known prefix of a prompt.

        Returns its length in tokens, which is never the whole prompt's.
        """
        blocks = self._chain(tokens)
        reused = len(tokens) - 1
        for index, state in enumerate(self.states):
            reused = state.restore(row, [block.snapshots[index] for block in blocks], reused)
        self.stats.tokens += len(tokens)
        self.stats.cached_tokens += reused
        return reused

    def worth_waiting(self, tokens: list[int], computed: list[int], cached_tokens: int) -> bool:
        """Whether waiting for the prompt `computed` lets the prompt `tokens` reuse more tokens.

        The first `cached_tokens` of `computed` are known already.
        """
        shared = len(os.path.commonprefix([tokens, computed]))
        reusable = shared - shared % self.block_tokens - self.behind
        return reusable > cached_tokens

    def save(self, tokens: Sequence[int], row: int) -> None:
        """Keeps the whole blocks of a row's text, up to the first block without a snapshot."""
        self._chain(tokens, row)

    def _chain(self, tokens: Sequence[int], row: int | None = None) -> list[Block]:
        """The longest known chain of blocks at the beginning of `tokens`. It counts as used.

        With a `row`, new blocks of its text follow.
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
        for key in reversed(chain):
            self.blocks.move_to_end(key)
        return list(chain.values())

    def _new_block(self, row: int, begin: int, in_use: int) -> Block | None:
        """Makes a block of a row's text from `begin` on. Evicts the oldest block if all are taken.

        None if a state has no snapshot, or if all blocks are among the `in_use` of this chain.
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
