"""A drafter that knows the right continuation and spoils it at random: every pattern occurs.

Around an Eagle3 drafter it also keeps that drafter's own proposals, so that a test can compare them
with what a head computed from scratch would propose.
"""

import random
from dataclasses import dataclass, field

import torch

from trtspec.engine.batch import DecodeBatch
from trtspec.engine.drafters import Eagle3Drafter
from trtspec.engine.engine import Engine
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.k2 import KimiModel


@dataclass
class Proposal:
    """What the head proposed for a text of `length` tokens."""

    id: str
    length: int
    drafts: list[int]


@dataclass
class Oracle:
    """Overwrites a drafter's proposals, which it keeps, with `answers`.

    Each token is right with probability `hit`.
    """

    drafter: Eagle3Drafter
    answers: dict[str, list[int]]
    hit: float
    random: random.Random
    proposals: list[Proposal] = field(default_factory=list)

    def propose(self, batch: DecodeBatch) -> list[int]:
        counts, length = Eagle3Drafter.propose(self.drafter, batch), batch.draft_len
        for row, sequence in enumerate(batch.sequences):
            drafts, done = batch.block[row, 1 : 1 + length], len(sequence.token_ids)
            self.proposals.append(Proposal(sequence.id, sequence.length, drafts.tolist()))
            right = self.answers[sequence.id][done : done + length]
            for column in range(length):
                good = column < len(right) and self.random.random() < self.hit
                drafts[column] = torch.tensor(right[column] if good else self.random.randrange(256))
        return counts


def with_oracle(engine: Engine, answers: dict[str, list[int]], hit: float = 0.75) -> Oracle:
    """Lets an oracle propose in the place of the engine's drafter."""
    assert isinstance(engine.drafter, Eagle3Drafter)
    oracle = Oracle(engine.drafter, answers, hit, random.Random(0))
    vars(engine.drafter)["propose"] = oracle.propose
    return oracle


@torch.inference_mode()
def drafts_from_scratch(
    target: KimiModel, head: Eagle3Head, text: list[int], proposal: Proposal
) -> list[int]:
    """Up to three greedy drafts after text[:length], without a cache.

    All true rows are computed at once, then a chain over a growing text. Ends before a draft whose
    logit leads by less than 1e-4, which rounding may decide either way.
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
