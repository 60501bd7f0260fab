"""The rows that decode together: sequence i of the batch always is row i of the tensors here and of every cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtspec.engine.sampling import probabilities
from trtspec.engine.sequence import Sequence


def on_device(values: list[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """What the host knows, as a tensor of the device. Does not wait for the device, as `torch.tensor` there would: a
    copy from host memory that is not pinned is staged first, so the source may go (CUDA driver API, "API
    synchronization behavior")."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


@dataclass(frozen=True)
class BatchSampling:
    """Parameters of the sampled rows of a batch. `rows` int64 [S]; temperature, top_p float32 [S]; top_k int64 [S], of
    which `most` is the largest, with 0 for the whole vocabulary."""

    rows: Tensor
    temperature: Tensor
    top_p: Tensor | None
    top_k: Tensor | None
    most: int = 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The sampling distribution, float32 [S, ..., V], of these rows' logits [S, ..., V]."""
        return probabilities(logits, self.temperature, self.top_p, self.top_k, self.most)

    @staticmethod
    def of(sequences: list[Sequence], device: torch.device) -> BatchSampling | None:
        """None when every sequence is greedy."""
        picked = [(row, sequence.request) for row, sequence in enumerate(sequences) if sequence.sampled]
        if not picked:
            return None
        requests = [request for _, request in picked]
        top_p = on_device([r.top_p for r in requests], device) if any(r.top_p < 1 for r in requests) else None
        top_k = on_device([r.top_k for r in requests], device) if any(r.top_k > 0 for r in requests) else None
        return BatchSampling(
            on_device([row for row, _ in picked], device),
            on_device([r.temperature for r in requests], device, torch.float32),
            top_p,
            top_k,
            max(r.top_k for r in requests) if all(r.top_k > 0 for r in requests) else 0,
        )


class DecodeBatch:
    """State of the decoding rows, compacted at the front.

    block int64 [rows, 1+k]: a row's last token and its drafts. start int64 [rows]: the last token's position.
    uniform float32 [rows, 2k+1]: the round's random numbers of a sampled
    row: k to draw drafts, k to accept them, one for the token after them. draft_probs float32 [rows, k, Vd]: what the
    drafts were drawn from, None when the drafter is deterministic.
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
