"""The rows that decode together, and the prompts on their way to them.

Sequence i of the batch always is row i of the tensors here and of every cache. Chunks of several prompts are computed
in one pass of target and drafter: they lie one behind the other in a single row of tokens, without padding. Every
product takes them all at once, so that a weight is read once; only attention goes from text to text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtspec.engine.sampling import BatchSampling, on_device
from trtspec.engine.sequence import Sequence
from trtspec.models.layers import LatentCache, TextPiece

if TYPE_CHECKING:
    from trtspec.models.kimi import KimiModel


class DecodeBatch:
    """State of the decoding rows, compacted at the front.

    block int64 [rows, 1+k]: a row's last token and its drafts. start int64 [rows]: the last token's position.
    uniform float32 [rows, 2k+1]: the round's random numbers of a sampled row: k to draw drafts, k to accept them, one
    for the token after them. draft_probs float32 [rows, k, Vd]: what the drafts were drawn from, None when the drafter
    is deterministic.
    """

    def __init__(self, rows: int, draft_len: int, device: torch.device) -> None:
        self.draft_len = draft_len
        self.device = device
        self.sequences: list[Sequence] = []
        self.block = torch.zeros(rows, 1 + draft_len, dtype=torch.int64, device=device)
        self.start = torch.zeros(rows, dtype=torch.int64, device=device)
        self.uniform = torch.zeros(rows, 2 * draft_len + 1, device=device)
        self.draft_probs: Tensor | None = None
        self.sampling: BatchSampling | None = None
        self.row_index = torch.arange(rows, device=device)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def reach(self) -> int:
        """Where the longest row ends, behind its last token; known without asking the device."""
        return max(sequence.length for sequence in self.sequences)

    def append(self, sequence: Sequence, token: int) -> int:
        """Adds a sequence whose prompt is in the caches and whose first token is `token`; returns its row."""
        row = len(self.sequences)
        self.sequences.append(sequence)
        self.block[row, 0].fill_(token)  # assigning a number to one element is a copy from the host that waits
        self.start[row].fill_(len(sequence.request.prompt_ids))
        self.sampling = BatchSampling.of(self.sequences, self.device)
        if sequence.sampled:
            self.uniform[row].copy_(sequence.uniform(self.uniform.shape[1]), non_blocking=True)
        return row

    def remove(self, row: int) -> int:
        """Takes out a row by putting the last one in its place; returns the row that moved (== row: none did)."""
        last = len(self.sequences) - 1
        if row != last:
            self.sequences[row] = self.sequences[last]
            state = [self.block, self.start, self.uniform]
            for tensor in [*state, self.draft_probs] if self.draft_probs is not None else state:
                tensor[row] = tensor[last]
        self.sequences.pop()
        self.sampling = BatchSampling.of(self.sequences, self.device)
        return last

    def advance(self, tokens: Tensor, accepted: Tensor) -> None:
        """Puts each row behind its accepted drafts: tokens int64 [B, T], of which tokens[b, accepted[b]] is the last.

        Draws the next round's random numbers, the same count per row whatever the batch looks like.
        """
        rows = len(accepted)
        self.block[:rows, 0] = tokens[self.row_index[:rows], accepted]
        self.start[:rows] += accepted + 1
        if self.sampling is None:
            return
        drawn = [sequence.uniform(self.uniform.shape[1]) for sequence in self.sequences if sequence.sampled]
        self.uniform[self.sampling.rows] = torch.stack(drawn).to(self.device, non_blocking=True)

    def store_draft_probs(self, step: int, rows: Tensor, probs: Tensor) -> None:
        """Keeps the distribution [S, Vd] that draft `step` of these rows was drawn from."""
        if self.draft_probs is None:
            self.draft_probs = probs.new_zeros(len(self.block), self.draft_len, probs.shape[-1])
        self.draft_probs[rows, step] = probs


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


def compute_chunks(
    chunks: list[Chunk], target: KimiModel, cache: LatentCache, aux_layers: tuple[int, ...], first_tokens: FirstTokens
) -> tuple[Tensor | None, Tensor]:
    """Fills the cache's rows of the chunks; returns the captured states [1, N, n_aux*H] and the token that follows each
    position, int64 [1, N]. `first_tokens` says what follows whole prompts, from logits [n, V]."""
    device = target.embed.weight.device
    pieces = [chunk.piece for chunk in chunks]
    tokens = [token for chunk in chunks for token in chunk.prompt[chunk.piece.begin : chunk.piece.end]]
    kept: list[int] = []
    end = 0
    for chunk in chunks:
        end += len(chunk)
        kept += range(end - chunk.scored, end)
    out = target.prompts(on_device([tokens], device), pieces, cache, aux_layers, kept)
    for chunk, logits in zip(chunks, out.logits[0].split([chunk.scored for chunk in chunks]), strict=True):
        chunk.logits = logits
    done = [chunk for chunk in chunks if chunk.done]
    first = iter(first_tokens([c.sequence for c in done], torch.stack([c.logits[-1] for c in done])) if done else ())
    following = []
    for chunk in chunks:
        chunk.following = next(first) if chunk.done else chunk.prompt[chunk.piece.end]
        following += [*chunk.prompt[chunk.piece.begin + 1 : chunk.piece.end], chunk.following]
    return out.aux, on_device([following], device)
