"""Measured rounding explains bf16 divergences, and no output of a wrong engine."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases import slow
from tests.engine.conftest import HeadOf
from tests.engine.near_ties import Divergence, Rounding, first_divergence, rounding_at, spacing
from tests.engine.oracle import with_oracle
from trtspec.data_files import kimi_nano_dir
from trtspec.engine.batch import Chunk
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Output
from trtspec.models.k2 import KimiModel
from trtspec.models.layers import Linear
from trtspec.models.weights import load_target


def judged(
    target: KimiModel, requests: list[GenerationRequest], plain: dict[str, Output], engine: Engine
) -> list[tuple[Divergence, Rounding]]:
    """The two earliest first divergences of the engine's answers with the rounding there."""
    done = engine.generate(requests)
    found = [(r, d) for r in requests if (d := first_divergence(plain[r.id], done[r.id]))]
    found.sort(key=lambda pair: pair[1].index)  # the earlier, the less there is to compute again
    return [(d, rounding_at(target, r.prompt_ids, plain[r.id], d)) for r, d in found[:2]]


def tied(
    target: KimiModel, token: int, other: int, margin: float, state: torch.Tensor
) -> KimiModel:
    """The target with other's logit `margin` below token's at the given final hidden state [H]."""
    twin = copy.deepcopy(target)
    weight = twin.lm_head.weight.detach().clone(memory_format=torch.contiguous_format)
    weight[other] = weight[token] - margin * state / state.square().sum()
    twin.lm_head.weight = torch.nn.Parameter(weight, False)
    twin.lm_head.__class__ = Linear  # without the packed copy of the weight that was
    return twin


@pytest.mark.slow
@torch.inference_mode()
def test_a_tie_within_rounding_is_a_near_tie_and_a_wider_one_is_not(
    requests: list[GenerationRequest],
) -> None:
    """Two tokens set to be a given margin apart at one position of a real context, in float32.

    On kimi-nano: the tiny target's logits are the same to the bit in every shape.
    """
    target = load_target(kimi_nano_dir(), dtype=torch.float32)
    request = requests[0].model_copy(update={"max_tokens": 8, "ignore_eos": True})
    plain = Engine(target, options=EngineOptions(record_gaps=True)).generate([request])[request.id]
    context = torch.tensor([request.prompt_ids + plain.token_ids[:5]])
    state = target(context).hidden[0, -1]
    token, other = plain.token_ids[5], (plain.token_ids[5] + 1) % 512
    verdicts = {}
    for margin in (1e-7, 1e-2):
        divergence = Divergence(5, token, other, margin)
        measured = rounding_at(
            tied(target, token, other, margin, state), request.prompt_ids, plain, divergence
        )
        assert 0 < measured.change < 1e-5
        assert measured.behind == pytest.approx(margin, abs=1e-5)
        verdicts[margin] = measured.explains(divergence)
    assert verdicts == {1e-7: True, 1e-2: False}


class OneCacheEntryOff(Engine):
    """One cached token of each prompt is 1 % too large in every layer."""

    def _advance_prompt(self, chunk: Chunk) -> list[Output]:
        self.cache.data[:, chunk.piece.row, chunk.piece.end - 1] *= 1.01
        return super()._advance_prompt(chunk)


class RopeOffByOne(Engine):
    """Generated tokens are rotated as if they stood one position later; the prompt is right."""

    def _round(self, outputs: list[Output]) -> None:
        right = self.target.rope.upto(self.cache.max_len, "cpu")
        self.target.rope.rotations = right.roll(-1, 0)
        try:
            super()._round(outputs)
        finally:
            self.target.rope.rotations = right


class WrongDraftAccepted(Engine):
    """In one round of each row the first draft stands although the target wants another token."""

    def _accept(self, logits: Tensor, drafts: Tensor, offered: list[int]) -> tuple[Tensor, Tensor]:
        tokens, accepted = super()._accept(logits, drafts, offered)
        for row, sequence in enumerate(self.batch.sequences):
            if sequence.stats.steps == 2 and offered[row] and accepted[row] == 0:
                tokens[row, 0] = drafts[row, 0]
        return tokens, accepted


@pytest.mark.parametrize(
    ("mutant", "dtype"),
    [
        *(
            (mutant, torch.float32)
            for mutant in (OneCacheEntryOff, RopeOffByOne, WrongDraftAccepted)
        ),
        *(slow(m, torch.bfloat16) for m in (RopeOffByOne, WrongDraftAccepted)),
    ],
)
def test_a_slightly_wrong_engine_is_judged_real(
    mutant: type[Engine],
    dtype: torch.dtype,
    target_dir: Path,
    head_of: HeadOf,
    requests: list[GenerationRequest],
) -> None:
    """One spacing of bfloat16 is let pass, which is far less than these do."""
    target, head = (
        load_target(target_dir, dtype=dtype),
        copy.deepcopy(head_of(("mha", "3", None))).to(dtype),
    )
    wanted = [
        request.model_copy(update={"max_tokens": 16, "ignore_eos": True})
        for request in requests[:12]
    ]
    plain = Engine(target, options=EngineOptions(max_batch_size=4, record_gaps=True)).generate(
        wanted
    )
    engine = mutant(
        target, head, EngineOptions(max_batch_size=4, max_seq_len=128, record_gaps=True)
    )
    found = judged(target, wanted, plain, engine)
    assert found, "the mutation changed nothing"
    assert not any(rounding.explains(divergence) for divergence, rounding in found), found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_spacing_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    for value in (0.03, 1.0, 1.99, 2.0, 5.0, 7.9, 13.25):
        here = torch.tensor(value, dtype=torch.float64).to(dtype)
        above = torch.nextafter(here, torch.tensor(float("inf"), dtype=dtype))
        assert spacing(float(here), dtype) == float(above) - float(here)
    assert spacing(0.0, dtype) == 0.0


def test_a_token_that_nobody_wanted_is_no_near_tie(
    target: KimiModel, requests: list[GenerationRequest]
) -> None:
    """The best two tokens may be close; what was emitted must be one of them."""
    request = requests[0].model_copy(update={"max_tokens": 12, "ignore_eos": True})
    plain = Engine(target, options=EngineOptions(record_gaps=True)).generate([request])[request.id]
    closest = min(range(12), key=lambda index: plain.gaps[index])
    wrong = Output("w", list(plain.token_ids), gaps=[0.0] * 12)
    wrong.token_ids[closest] = (wrong.token_ids[closest] + 1) % 512
    divergence = first_divergence(plain, wrong)
    assert divergence == Divergence(
        closest, plain.token_ids[closest], wrong.token_ids[closest], plain.gaps[closest]
    )
    measured = rounding_at(target, request.prompt_ids, plain, replace(divergence, gap=0.0))
    assert not measured.explains(replace(divergence, gap=0.0))


def test_a_shorter_answer_is_no_near_tie(target: KimiModel) -> None:
    plain, short = (
        Output("a", [1, 2, 3], gaps=[1.0, 1.0, 1.0]),
        Output("a", [1, 2], gaps=[1.0, 1.0]),
    )
    divergence = first_divergence(plain, short)
    assert divergence is not None and not rounding_at(
        target, [1, 2, 3], plain, divergence
    ).explains(divergence)
    assert first_divergence(plain, plain) is None


def test_gaps_are_those_of_the_emitted_tokens(
    target: KimiModel,
    head_of: HeadOf,
    requests: list[GenerationRequest],
    expected: dict[str, list[int]],
) -> None:
    """One gap per token, the same with and without drafts."""
    plain = Engine(target, options=EngineOptions(record_gaps=True)).generate(requests)
    engine = Engine(
        target,
        head_of(("mla", "3", None)),
        EngineOptions(max_batch_size=4, max_seq_len=128, record_gaps=True),
    )
    with_oracle(engine, expected)
    for name, completion in engine.generate(requests).items():
        assert len(completion.gaps) == len(completion.token_ids)
        assert completion.gaps == pytest.approx(plain[name].gaps, abs=1e-4)


def test_logprobs_are_the_models(
    target: KimiModel,
    head_of: HeadOf,
    requests: list[GenerationRequest],
    expected: dict[str, list[int]],
) -> None:
    """Each emitted token's log-probability equals that of a forward of its whole prefix."""
    wanted = [request.model_copy(update={"logprobs": 3}) for request in requests[:6]]
    engine = Engine(
        target, head_of(("mla", "3", None)), EngineOptions(max_batch_size=4, max_seq_len=128)
    )
    with_oracle(engine, expected)
    for request in wanted:
        completion = engine.generate([request])[request.id]
        with torch.inference_mode():
            scores = (
                target(torch.tensor([request.prompt_ids + completion.token_ids]))
                .logits[0]
                .log_softmax(-1)
            )
        for position, entry in enumerate(completion.logprobs):
            row = scores[len(request.prompt_ids) - 1 + position]
            assert entry.token == completion.token_ids[position]
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            best = row.topk(3)
            assert list(entry.ids) == best.indices.tolist()
