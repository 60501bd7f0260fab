"""Near-ties: bf16 divergences are explained by measured rounding, and a wrong token is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.oracle import OracleDrafter
from trtspec.engine.drafters import Eagle3Drafter
from trtspec.engine.engine import Engine
from trtspec.engine.near_ties import Divergence, first_divergence, rounding_bound
from trtspec.engine.sequence import Completion, Request
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.kimi import KimiModel
from trtspec.models.weights import load_target

HeadOf = Callable[[tuple[str, str, int | None]], Eagle3Head]


@pytest.fixture(scope="module")
def half(target_dir: Path) -> KimiModel:
    return load_target(target_dir, dtype=torch.bfloat16)


def test_bf16_divergences_are_near_ties(half: KimiModel, head_of: HeadOf, requests: list[Request]) -> None:
    wanted = [replace(request, max_tokens=24, ignore_eos=True) for request in requests[:12]]
    plain = Engine(half, max_batch_size=1, record_gaps=True).generate(wanted)
    engine = Engine(
        half,
        copy.deepcopy(head_of(("mha", "3", None))).to(torch.bfloat16),
        drafter="eagle3",
        max_batch_size=4,
        max_seq_len=128,
        record_gaps=True,
    )
    texts = [request.prompt_ids + plain[request.id].token_ids for request in wanted]
    bound = rounding_bound(half, texts[:4], [(1, 1), (1, 4), (4, 4)])
    assert 0 < bound < 0.5
    done = engine.generate(wanted)
    found = [first_divergence(plain[request.id], done[request.id]) for request in wanted]
    assert all(divergence is None or divergence.near_tie(bound) for divergence in found)


def test_float32_rounds_at_rounding_level(target: KimiModel, requests: list[Request]) -> None:
    assert rounding_bound(target, [requests[0].prompt_ids], [(1, 1), (3, 4), (1, 64)]) < 1e-4


def test_a_wrong_token_is_no_near_tie(target: KimiModel, requests: list[Request]) -> None:
    request = replace(requests[0], max_tokens=12, ignore_eos=True)
    plain = Engine(target, record_gaps=True).generate([request])[request.id]
    widest = max(range(12), key=lambda index: plain.gaps[index])
    wrong = Completion("w", list(plain.token_ids), gaps=list(plain.gaps))
    wrong.token_ids[widest] = (wrong.token_ids[widest] + 1) % 512
    divergence = first_divergence(plain, wrong)
    assert divergence == Divergence(widest, plain.token_ids[widest], wrong.token_ids[widest], plain.gaps[widest])
    assert not divergence.near_tie(1e-4)


def test_a_shorter_answer_is_no_near_tie() -> None:
    plain, short = Completion("a", [1, 2, 3], gaps=[1.0, 1.0, 1.0]), Completion("a", [1, 2], gaps=[1.0, 1.0])
    divergence = first_divergence(plain, short)
    assert divergence is not None and not divergence.near_tie(10.0)
    assert first_divergence(plain, plain) is None


def test_gaps_are_those_of_the_emitted_tokens(
    target: KimiModel, head_of: HeadOf, requests: list[Request], expected: dict[str, list[int]]
) -> None:
    """One gap per token, the same with and without drafts."""
    plain = Engine(target, record_gaps=True).generate(requests)
    engine = Engine(
        target, head_of(("mla", "3", None)), drafter="eagle3", max_batch_size=4, max_seq_len=128, record_gaps=True
    )
    assert isinstance(engine.drafter, Eagle3Drafter)
    engine.drafter = OracleDrafter(engine.drafter, expected)
    for name, completion in engine.generate(requests).items():
        assert len(completion.gaps) == len(completion.token_ids)
        assert completion.gaps == pytest.approx(plain[name].gaps, abs=1e-4)


def test_logprobs_are_the_models(
    target: KimiModel, head_of: HeadOf, requests: list[Request], expected: dict[str, list[int]]
) -> None:
    """Each emitted token's log-probability equals the one from running its whole prefix through the model."""
    wanted = [replace(request, logprobs=3) for request in requests[:6]]
    engine = Engine(target, head_of(("mla", "3", None)), drafter="eagle3", max_batch_size=4, max_seq_len=128)
    assert isinstance(engine.drafter, Eagle3Drafter)
    engine.drafter = OracleDrafter(engine.drafter, expected)
    for request in wanted:
        completion = engine.generate([request])[request.id]
        with torch.inference_mode():
            scores = target(torch.tensor([request.prompt_ids + completion.token_ids])).logits[0].log_softmax(-1)
        for position, entry in enumerate(completion.logprobs):
            row = scores[len(request.prompt_ids) - 1 + position]
            assert entry.token == completion.token_ids[position]
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            best = row.topk(3)
            assert [token for token, _ in entry.top] == best.indices.tolist()
