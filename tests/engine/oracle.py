"""A drafter that knows the right continuation and spoils it at random: every acceptance pattern occurs.

Around an Eagle3 drafter it also keeps that drafter's own proposals, so that a test can compare them with what a head
computed from scratch would propose.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtspec.engine.batch import DecodeBatch
from trtspec.engine.drafters import Eagle3Drafter


@dataclass
class Proposal:
    """What the head proposed for a text of `length` tokens."""

    id: str
    length: int
    drafts: list[int]


@dataclass
class OracleDrafter:
    """Overwrites the inner drafter's proposals with `answers`, each token kept with probability `hit`."""

    inner: Eagle3Drafter
    answers: dict[str, list[int]]
    hit: float = 0.75
    seed: int = 0
    proposals: list[Proposal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.aux_layers = self.inner.aux_layers
        self.draft_ids = self.inner.draft_ids
        self.random = random.Random(self.seed)

    def prompt(self, aux: Tensor | None, tokens: Tensor, start: Tensor, row: int) -> None:
        self.inner.prompt(aux, tokens, start, row)

    def begin(self, batch: DecodeBatch, row: int) -> None:
        self.inner.begin(batch, row)

    def follow(self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, start: Tensor, accepted: Tensor) -> None:
        self.inner.follow(batch, aux, tokens, start, accepted)

    def move(self, source: int, target: int) -> None:
        self.inner.move(source, target)

    def propose(self, batch: DecodeBatch) -> None:
        for row, sequence in enumerate(batch.sequences):
            done = len(sequence.token_ids)
            length = len(sequence.request.prompt_ids) + done
            self.proposals.append(Proposal(sequence.id, length, batch.block[row, 1:].tolist()))
            right = self.answers[sequence.id][done : done + batch.draft_len]
            for column in range(batch.draft_len):
                good = column < len(right) and self.random.random() < self.hit
                token = right[column] if good else self.random.randrange(256)
                batch.block[row, column + 1] = torch.tensor(token)
