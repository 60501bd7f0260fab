"""Draft lengths by batch size: the right one in each round, lossless, and a head that stays warm where it is 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.engine.conftest import token_ids
from tests.engine.oracle import OracleDrafter, drafts_from_scratch
from trtspec.engine import drafters
from trtspec.engine.drafters import Eagle3Drafter
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.kimi import KimiModel

HeadOf = Callable[[tuple[str, str, int | None]], Eagle3Head]
SCHEDULED = EngineOptions(
    drafter="eagle3", draft_schedule=((1, 3), (3, 1), (5, 0)), max_batch_size=8, max_seq_len=128, prefill_tokens=16
)


def test_the_length_of_a_batch() -> None:
    assert [SCHEDULED.draft_len_at(rows) for rows in range(1, 7)] == [3, 3, 1, 1, 0, 0]
    assert SCHEDULED.longest_draft == 3
    assert replace(SCHEDULED, draft_schedule=()).draft_len_at(64) == 3
    assert replace(SCHEDULED, drafter=None).draft_len_at(1) == 0


@pytest.mark.parametrize("kind", [("mla", "3.1", None), ("mha", "3", 100)])
def test_lossless_and_warm_behind_rounds_without_drafts(
    kind: tuple[str, str, int | None],
    target: KimiModel,
    head_of: HeadOf,
    requests: list[GenerationRequest],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows join and leave while others go without drafts for longer than the backlog is."""
    monkeypatch.setattr(drafters, "BACKLOG", 4)
    engine = Engine(target, head_of(kind), SCHEDULED)
    assert isinstance(engine.drafter, Eagle3Drafter)
    oracle = engine.drafter = OracleDrafter(engine.drafter, expected)  # type: ignore[assignment]
    assert token_ids(engine.generate(requests)) == expected
    lengths = [len(proposal.drafts) for proposal in oracle.proposals]
    assert {length: lengths.count(length) > 10 for length in (0, 1, 3)} == {0: True, 1: True, 3: True}
    texts = {request.id: request.prompt_ids + expected[request.id] for request in requests}
    behind_a_gap = [p for p, before in zip(oracle.proposals[8:], lengths, strict=False) if p.drafts and not before]
    assert len(behind_a_gap) >= 5
    for proposal in behind_a_gap[:10]:
        certain = drafts_from_scratch(target, head_of(kind), texts[proposal.id], proposal)[: len(proposal.drafts)]
        assert proposal.drafts[: len(certain)] == certain
