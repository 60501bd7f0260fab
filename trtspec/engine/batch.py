"""The rows that decode together, and prompts on their way there.

Sequence i of the batch is row i of the tensors here and of every cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtspec.engine.sampling import BatchSampling
from trtspec.engine.sequence import Sequence, TokenLogprobs
from trtspec.models.state import TextPiece


class DecodeBatch:
    """State of the decoding rows, compacted at the front.

    block: int64 [rows, 1+k], a row's last token and its drafts.
    start: int64 [rows], the last token's position.
    uniform: float32 [rows, 2k+1], a round's random numbers: k to draw drafts, k to accept them, 1
        for the token after.
    draft_probs: float32 [rows, k, Vd], the distributions of the drafts. None if the drafter is
        deterministic.
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
        """The end of the longest row, after its last token. Known without asking the device."""
        return max(sequence.length for sequence in self.sequences)

    def append(self, sequence: Sequence, token: int) -> None:
        """Adds a sequence whose prompt is in the caches and whose first token is `token`."""
        row = len(self.sequences)
        # Assigning a number to one element would be a copy from the host that waits.
        self.block[row, 0].fill_(token)
        self.start[row].fill_(len(sequence.request.prompt_ids))
        if sequence.sampled:
            self.uniform[row].copy_(sequence.uniform(self.uniform.shape[1]), non_blocking=True)
        self.sampling = BatchSampling.of([*self.sequences, sequence], self.device)
        # The sequence comes last, so that an error above leaves no row half added.
        self.sequences.append(sequence)

    def remove(self, row: int) -> int:
        """Removes a row by moving the last row there. Returns the row that moved.

        Returns `row` itself if it was the last one: nothing moved.
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

        A row gets the same count of random numbers in any batch.

        Args:
            tokens: int64 [B, T]. tokens[b, accepted[b]] is the last token of row b.
            accepted: int64 [B].
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
        """Keeps the distribution [S, Vd] from which draft `step` of these rows was drawn."""
        if self.draft_probs is None:
            self.draft_probs = probs.new_zeros(len(self.block), self.draft_len, probs.shape[-1])
        self.draft_probs[rows, step] = probs


@dataclass
class Chunk:
    """A piece of a sequence's prompt, and the results of its pass.

    following: the token after the piece.
    logits, margins: [V] and [1], of the piece's last token.
    logprobs: of the prompt's tokens after the piece's first, if the request asks for them.
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
        return self.sequence.request.prompt_ids

    @property
    def done(self) -> bool:
        """Whether the prompt ends here."""
        return self.piece.end == len(self.prompt)

    @property
    def scored(self) -> int:
        """Number of trailing positions that need logits."""
        return len(self) if self.sequence.request.prompt_logprobs else 1
