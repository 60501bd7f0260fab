"""The batch of decoding sequences, and chunks of prompts that are not decoding yet.

Sequence i of the batch has row i of the batch's tensors and of every cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtspec.engine.sampling import BatchSampling
from trtspec.engine.sequence import Sequence, TokenLogprobs
from trtspec.models.state import TextPiece


class DecodeBatch:
    """State of the decoding sequences, which use the first rows of all tensors.

    `k` is the draft length.

    block: int64 [rows, 1+k], last token and drafts of each row.
    start: int64 [rows], position of each row's last token.
    uniform: float32 [rows, 2k+1], random numbers of a round. The first k draw drafts, the next k
        accept drafts, and the last draws the token after the accepted drafts.
    draft_probs: float32 [rows, k, Vd], distribution that each draft was drawn from. None if the
        drafter is deterministic.
    sampling: parameters of the sampled rows. None if all rows are greedy.
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
        """Number of tokens of the longest row, computed without a transfer from the device."""
        return max(sequence.length for sequence in self.sequences)

    def append(self, sequence: Sequence, token: int) -> None:
        """Adds a sequence whose prompt is in the caches and whose first token is `token`."""
        row = len(self.sequences)
        # `fill_` does not wait for the device, unlike the assignment of a number to an element.
        self.block[row, 0].fill_(token)
        self.start[row].fill_(len(sequence.request.prompt_ids))
        if sequence.sampled:
            self.uniform[row].copy_(sequence.uniform(self.uniform.shape[1]), non_blocking=True)
        self.sampling = BatchSampling.of([*self.sequences, sequence], self.device)
        # The sequence is appended last, so that an error above leaves the batch unchanged.
        self.sequences.append(sequence)

    def remove(self, row: int) -> int:
        """Removes a row by moving the last row to its index. Returns the last row's old index.

        If `row` is the last row, nothing moves, and the result equals `row`.
        """
        last = len(self.sequences) - 1
        if row != last:
            self.sequences[row] = self.sequences[last]
            for tensor in (self.block, self.start, self.uniform, self.draft_probs):
                if tensor is not None:
                    tensor[row] = tensor[last]
        self.sequences.pop()
        self.sampling = BatchSampling.of(self.sequences, self.device)
        return last

    def advance(self, tokens: Tensor, accepted: Tensor) -> None:
        """Moves each row past its accepted drafts, and draws the next round's random numbers.

        Each sequence draws the same quantity of numbers per round, whatever other sequences do. So
        its output does not depend on the batch.

        Args:
            tokens: int64 [B, T]. tokens[b, accepted[b]] is the new last token of row b.
            accepted: int64 [B], number of accepted drafts of each row.
        """
        rows = len(accepted)
        self.block[:rows, 0] = tokens[self.row_index[:rows], accepted]
        self.start[:rows] += accepted + 1
        if self.sampling is None:
            return
        drawn = [
            sequence.uniform(self.uniform.shape[1])
            for sequence in self.sequences
            if sequence.sampled
        ]
        self.uniform[self.sampling.rows] = torch.stack(drawn).to(self.device, non_blocking=True)

    def store_draft_probs(self, step: int, rows: Tensor, probs: Tensor) -> None:
        """Stores the distributions from which a draft of the sampled rows was drawn.

        Args:
            step: index of the draft, 0 for the first draft of a round.
            rows: int64 [S], indices of the sampled rows.
            probs: float32 [S, Vd].
        """
        if self.draft_probs is None:
            self.draft_probs = probs.new_zeros(len(self.block), self.draft_len, probs.shape[-1])
        self.draft_probs[rows, step] = probs


@dataclass
class Chunk:
    """A part of a sequence's prompt that one pass computes, and the results of the pass.

    sequence: the sequence.
    piece: cache row, and begin and end of the part in the prompt.
    following: id of the token after the part.
    logits: [V], logits after the part's last token.
    margins: [1], least lead of the chosen experts at the part's last token.
    logprobs: log-probabilities of the prompt's tokens that the part predicts, if requested.
    """

    sequence: Sequence
    piece: TextPiece
    following: int = -1
    logits: Tensor = field(init=False)
    margins: Tensor = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __len__(self) -> int:
        return self.piece.end - self.piece.begin

    @property
    def prompt(self) -> list[int]:
        """Token ids of the whole prompt."""
        return self.sequence.request.prompt_ids

    @property
    def done(self) -> bool:
        """Whether this is the last chunk of its prompt."""
        return self.piece.end == len(self.prompt)

    @property
    def scored(self) -> int:
        """Number of positions at the end of the chunk that need logits."""
        return len(self) if self.sequence.request.prompt_logprobs else 1
