"""Sampled requests have the target's distribution, with and without drafts, in any batch."""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from torch import nn
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.cases import slow
from tests.engine.conftest import HeadOf, Kind
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.k2 import KimiModel

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
VOCAB = 5
RUNS = 800


@pytest.fixture(scope="module")
def small(target: KimiModel) -> KimiModel:
    """The tiny target cut to 5 tokens and 4 layers, to count all outcomes of three tokens."""
    small = copy.deepcopy(target)
    small.spec = replace(target.spec, vocab_size=VOCAB, num_hidden_layers=4, eos_token_ids=())
    del small.layers[4:]
    small.lm_head.weight = nn.Parameter(target.lm_head.weight[:VOCAB], False)
    small.embed = nn.Embedding.from_pretrained(target.embed.weight[:VOCAB])
    return small


def head_for(small: KimiModel, head: Eagle3Head, draft_ids: list[int] | None) -> Eagle3Head:
    """A random head over the small vocabulary, or over some tokens of it."""
    head = copy.deepcopy(head)
    head.embed = small.embed
    size = VOCAB if draft_ids is None else len(draft_ids)
    head.lm_head.weight = nn.Parameter(head.lm_head.weight[:size], False)  # type: ignore[index]
    head.target_ids = None if draft_ids is None else torch.tensor(draft_ids)
    return head


def outcomes(
    small: KimiModel,
    head: Eagle3Head | None,
    seed: int,
    draft_sampling: str = "argmax",
    **sampling: Any,
) -> Counter:
    """Counts of the three tokens after the prompt, over independent requests."""
    options = EngineOptions(
        max_batch_size=64,
        draft_len=2,
        seed=seed,
        draft_sampling=draft_sampling,  # type: ignore[arg-type]
    )
    engine = Engine(small, head, options)
    one = GenerationRequest("", PROMPT, 3, **{"temperature": 1.2, **sampling})
    wanted = [one.model_copy(update={"id": str(n)}) for n in range(RUNS)]
    done = engine.generate(wanted)
    if head is not None:
        assert 0.05 * RUNS < engine.totals.accepted < engine.totals.drafted
    return Counter(tuple(completion.token_ids) for completion in done.values())


@pytest.fixture(scope="module")
def plain_outcomes(small: KimiModel) -> Counter:
    return outcomes(small, None, seed=1)


def test_plain_sampling_is_the_models_distribution(
    small: KimiModel, plain_outcomes: Counter
) -> None:
    assert fits(plain_outcomes, exact(small))


@pytest.mark.parametrize("draft_sampling", ["argmax", "probabilistic"])
@pytest.mark.parametrize(
    ("kind", "draft_ids"),
    [
        slow(("mha", "3", None), None),
        (("mla", "3.1", None), [0, 2, 3]),
    ],
)
def test_speculation_keeps_the_distribution(
    draft_sampling: str,
    kind: Kind,
    draft_ids: list[int] | None,
    small: KimiModel,
    head_of: HeadOf,
    plain_outcomes: Counter,
) -> None:
    counts = outcomes(small, head_for(small, head_of(kind), draft_ids), 2, draft_sampling)
    assert fits(counts, exact(small))
    common = [
        outcome
        for outcome in plain_outcomes | counts
        if plain_outcomes[outcome] + counts[outcome] >= 10
    ]
    table = [[source[outcome] for outcome in common] for source in (plain_outcomes, counts)]
    assert chi2_contingency(table).pvalue > 1e-3


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": {2: 0.8, 4: -1.0}},
    "all": {
        "temperature": 0.9,
        "top_k": 4,
        "top_p": 0.9,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.5,
        "logit_bias": {2: 0.8},
    },
}


@torch.inference_mode()
def exact(small: KimiModel, **fields: Any) -> dict[tuple[int, ...], float]:
    """Probability of each outcome by the chain rule with transformers' processors.

    In the documented order: bans, biases, penalties, temperature, top_k, top_p. OpenAI's two
    penalties by their formula.
    """
    constraints = GenerationRequest("", PROMPT, 3, **{"temperature": 1.2, **fields})
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, probability in found.items():
            ids = torch.tensor([[*PROMPT, *tokens]])
            scores = small(ids, last_only=True).logits[:, -1].float()
            for processor in before_penalties(constraints):
                scores = processor(ids, scores)
            counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=VOCAB)
            scores = (
                scores
                - constraints.frequency_penalty * counts
                - constraints.presence_penalty * (counts > 0)
            )
            for warper in warpers(constraints):
                scores = warper(ids, scores)
            for token, conditional in enumerate(scores.softmax(-1)[0].tolist()):
                longer[(*tokens, token)] = probability * conditional
        found = longer
    return found


def before_penalties(constraints: GenerationRequest) -> list[LogitsProcessor]:
    processors: list[LogitsProcessor] = []
    if constraints.logit_bias:
        processors.append(
            SequenceBiasLogitsProcessor(
                {(token,): bias for token, bias in constraints.logit_bias.items()}
            )
        )
    return [*processors, RepetitionPenaltyLogitsProcessor(constraints.repetition_penalty)]


def warpers(asked: GenerationRequest) -> list[LogitsProcessor]:
    top_k = [TopKLogitsWarper(asked.top_k)] if asked.top_k else []
    return [TemperatureLogitsWarper(asked.temperature), *top_k, TopPLogitsWarper(asked.top_p)]


@pytest.mark.parametrize("draft_sampling", ["argmax", "probabilistic"])
@pytest.mark.parametrize(
    "option", [pytest.param(name, marks=[pytest.mark.slow] * (name != "all")) for name in OPTIONS]
)
def test_every_option_has_transformers_distribution(
    option: str, draft_sampling: str, small: KimiModel, head_of: HeadOf
) -> None:
    """With and without drafts, outcomes have the probabilities of transformers' processors.

    Without the option they would differ.
    """
    head = head_for(small, head_of(("mla", "3.1", None)), [0, 2, 3])
    counts = outcomes(small, head, 7, draft_sampling, **OPTIONS[option])
    expected = exact(small, **OPTIONS[option])
    assert fits(counts, expected) and fits(outcomes(small, None, 5, **OPTIONS[option]), expected)
    assert not fits(counts, exact(small))
    assert all(expected[outcome] > 0 for outcome in counts)


def fits(counts: Counter, probabilities: dict[tuple[int, ...], float]) -> bool:
    """Chi-square goodness of fit; outcomes expected fewer than 5 times are counted together."""
    total, whole = sum(counts.values()), sum(probabilities.values())
    assert whole == pytest.approx(1, abs=1e-5)  # a softmax in float32
    probabilities = {outcome: probability / whole for outcome, probability in probabilities.items()}
    common = [outcome for outcome, probability in probabilities.items() if probability * total >= 5]
    seen = [counts[outcome] for outcome in common]
    want = [probabilities[outcome] * total for outcome in common]
    if total - sum(want) < 1e-6:  # every possible outcome is common
        return sum(seen) == total and chisquare(seen, want).pvalue > 1e-3
    return chisquare([*seen, total - sum(seen)], [*want, total - sum(want)]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("drafting", "draft_sampling"), [(False, "argmax"), (True, "argmax"), (True, "probabilistic")]
)
def test_a_seed_decides_alone(
    draft_sampling: str, drafting: bool, target: KimiModel, head_of: HeadOf
) -> None:
    """A seed gives the same tokens alone, among greedy and sampled mates, and in another order."""
    head = head_of(("mha", "3", None)) if drafting else None
    seeded = [
        GenerationRequest(
            f"s{n}", PROMPT[: 4 + n], 12, temperature=0.9, top_p=0.9, seed=n, ignore_eos=True
        )
        for n in range(4)
    ]
    greedy = [GenerationRequest(f"g{n}", PROMPT[n:], 3 + 4 * n, ignore_eos=True) for n in range(4)]

    def results(requests: list[GenerationRequest], rows: int) -> dict[str, list[int]]:
        options = EngineOptions(
            max_batch_size=rows,
            max_seq_len=64,
            draft_sampling=draft_sampling,  # type: ignore[arg-type]
        )
        engine = Engine(target, head, options)
        return {
            name: completion.token_ids for name, completion in engine.generate(requests).items()
        }

    mixed = results([r for pair in zip(greedy, seeded, strict=True) for r in pair], 5)
    reverse = results([*seeded[::-1], *greedy], 3)
    plain_greedy = {
        r.id: ids for r in greedy for ids in [Engine(target).generate([r])[r.id].token_ids]
    }
    for request in seeded:
        alone = results([request], 1)[request.id]
        assert mixed[request.id] == alone == reverse[request.id]
    assert all(mixed[name] == ids == reverse[name] for name, ids in plain_greedy.items())


def test_unseeded_requests_differ(target: KimiModel) -> None:
    done = Engine(target).generate(
        [GenerationRequest(str(n), PROMPT, 10, temperature=1.0) for n in range(4)]
    )
    assert len({tuple(completion.token_ids) for completion in done.values()}) == 4
