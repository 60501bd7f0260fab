"""A drafter that knows the right continuation and spoils it at random: every acceptance pattern occurs.

Around an Eagle3 drafter it also keeps that drafter's own proposals, so that a test can compare them with what a head
computed from scratch would propose.
"""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtspec.engine.batch import DecodeBatch
from trtspec.engine.drafters import Eagle3Drafter
from trtspec.engine.engine import Engine
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.kimi import KimiModel
from trtspec.models.state import TextPiece


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
        self.cache = self.inner.cache
        self.random = random.Random(self.seed)

    def prompts(self, aux: Tensor | None, tokens: Tensor, pieces: list[TextPiece]) -> None:
        self.inner.prompts(aux, tokens, pieces)

    def learn(
        self, batch: DecodeBatch, aux: Tensor | None, tokens: Tensor, accepted: Tensor
    ) -> None:
        self.inner.learn(batch, aux, tokens, accepted)

    def move(self, source: int, target: int, length: int) -> None:
        self.inner.move(source, target, length)

    def propose(self, batch: DecodeBatch) -> list[int]:
        counts, length = self.inner.propose(batch), batch.draft_len
        for row, sequence in enumerate(batch.sequences):
            done = len(sequence.token_ids)
            text = len(sequence.request.prompt_ids) + done
            self.proposals.append(
                Proposal(sequence.id, text, batch.block[row, 1 : 1 + length].tolist())
            )
            right = self.answers[sequence.id][done : done + length]
            for column in range(length):
                good = column < len(right) and self.random.random() < self.hit
                token = right[column] if good else self.random.randrange(256)
                batch.block[row, column + 1] = torch.tensor(token)
        return counts


def with_oracle(engine: Engine, answers: dict[str, list[int]], hit: float = 0.75) -> OracleDrafter:
    """Puts an oracle around the engine's drafter."""
    assert isinstance(engine.drafter, Eagle3Drafter)
    oracle = OracleDrafter(engine.drafter, answers, hit)
    engine.drafter = oracle
    return oracle


@torch.inference_mode()
def drafts_from_scratch(
    target: KimiModel, head: Eagle3Head, text: list[int], proposal: Proposal
) -> list[int]:
    """Up to three greedy drafts after text[:length]: all true rows at once, then a chain over a growing text, no cache.

    Ends before a draft whose logit leads by less than 1e-4, which rounding may decide either way.
    """
    tokens = torch.tensor([text[: proposal.length]])
    layers = tuple(head.spec.aux_layers or target.spec.default_aux_layers)
    aux = target(tokens, aux_layers=layers).aux
    assert aux is not None
    x, following = head.fuse(aux[:, :-1]), tokens[:, 1:]
    drafts = []
    for _ in range(3):
        feedback, normed = head(x, following, None, None)
        best = head.logits(normed[:, -1]).topk(2)
        if best.values[0, 0] - best.values[0, 1] < 1e-4:
            break
        draft = head.to_target_ids(best.indices[:, 0])
        drafts.append(int(draft))
        x, following = (
            torch.cat((x, feedback[:, -1:]), 1),
            torch.cat((following, draft.view(1, 1)), 1),
        )
    return drafts
