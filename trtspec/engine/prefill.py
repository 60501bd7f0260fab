"""Prompts on their way into the batch: chunks of several, computed together in one pass of target and drafter.

The chunks lie one behind the other in a single row of tokens, without padding. Every product takes them all at once,
so that a weight is read once for all of them; only attention goes from text to text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtspec.engine.batch import on_device
from trtspec.engine.sequence import Sequence
from trtspec.models.layers import LatentCache, TextPiece

if TYPE_CHECKING:
    from trtspec.engine.drafters import Drafter
    from trtspec.models.kimi import KimiModel

FirstTokens = Callable[[list[Sequence], Tensor], list[int]]


@dataclass
class Chunk:
    """A piece of a sequence's prompt. Its pass fills in the token that follows it, and the logits [rows, V] behind its
    last token, or behind each one where the prompt's own log-probabilities are asked for."""

    sequence: Sequence
    piece: TextPiece
    following: int = -1
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def __len__(self) -> int:
        return self.piece.end - self.piece.begin

    @property
    def prompt(self) -> list[int]:
        return self.sequence.request.prompt_ids

    @property
    def done(self) -> bool:
        """Whether the prompt ends here."""
        return self.piece.end == len(self.prompt)

    @property
    def scored(self) -> int:
        """Positions, from the last one back, that logits are needed of."""
        return len(self) if self.sequence.request.prompt_logprobs else 1


def compute(
    chunks: list[Chunk], target: KimiModel, cache: LatentCache, drafter: Drafter, first_tokens: FirstTokens
) -> None:
    """Fills the caches' rows of the chunks. `first_tokens` says what follows whole prompts, from logits [n, V]."""
    device = target.embed.weight.device
    pieces = [chunk.piece for chunk in chunks]
    tokens = [token for chunk in chunks for token in chunk.prompt[chunk.piece.begin : chunk.piece.end]]
    kept: list[int] = []
    end = 0
    for chunk in chunks:
        end += len(chunk)
        kept += range(end - chunk.scored, end)
    out = target.prompts(on_device([tokens], device), pieces, cache, drafter.aux_layers, kept)
    for chunk, logits in zip(chunks, out.logits[0].split([chunk.scored for chunk in chunks]), strict=True):
        chunk.logits = logits
    done = [chunk for chunk in chunks if chunk.done]
    first = iter(first_tokens([c.sequence for c in done], torch.stack([c.logits[-1] for c in done])) if done else ())
    following = []
    for chunk in chunks:
        chunk.following = next(first) if chunk.done else chunk.prompt[chunk.piece.end]
        following += [*chunk.prompt[chunk.piece.begin + 1 : chunk.piece.end], chunk.following]
    drafter.prompts(out.aux, on_device([following], device), pieces)
