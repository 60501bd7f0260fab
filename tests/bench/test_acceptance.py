"""Acceptance formulas against hand counts and against a token-by-token simulation."""

from __future__ import annotations

import random

import pytest

from trtspec.bench import acceptance
from trtspec.client.servers import TurnCounts


def turn(steps: int, accepted: int, histogram: tuple[int, ...] | None = None, **more: object) -> TurnCounts:
    settings: dict = {"question": "q", "category": "c", "tokens": 1 + steps + accepted, "drafted": 3 * steps}
    settings |= {"source": "test", **more}
    return TurnCounts(steps=steps, accepted=accepted, histogram=histogram, **settings)


def simulate(steps: int, rates: tuple[float, ...], seed: int) -> list[int]:
    """How many drafts each step accepted, drafting one position after the other."""
    rng = random.Random(seed)
    found = []
    for _ in range(steps):
        accepted = 0
        while accepted < len(rates) and rng.random() < rates[accepted]:
            accepted += 1
        found.append(accepted)
    return found


def test_rates_of_a_published_pair() -> None:
    """A card prints cumulative rates 0.633 / 0.404 / 0.264 and acceptance length 2.30; conditionals are nearly flat."""
    histogram = [367, 229, 140, 264]
    assert acceptance.cumulative_acceptance(histogram) == pytest.approx([0.633, 0.404, 0.264])
    assert acceptance.conditional_acceptance(histogram) == pytest.approx([0.633, 0.6382, 0.6535], abs=1e-4)
    accepted = sum(j * n for j, n in enumerate(histogram))
    assert acceptance.acceptance_length(1000, accepted) == pytest.approx(2.301)


def test_recovers_the_rates_that_made_the_counts() -> None:
    rates = (0.8, 0.6, 0.5)
    found = simulate(20000, rates, seed=1)
    histogram = [found.count(j) for j in range(4)]
    assert acceptance.conditional_acceptance(histogram) == pytest.approx(rates, abs=0.02)
    expected = 1 + 0.8 + 0.48 + 0.24
    assert acceptance.acceptance_length(len(found), sum(found)) == pytest.approx(expected, abs=0.02)


def test_micro_and_macro_average_differ() -> None:
    long, short = turn(90, 180), turn(9, 0)
    found = acceptance.summarize([long, short])
    assert found.acceptance_length == pytest.approx(1 + 180 / 99, abs=1e-4)
    # prefill counted: 271 tokens in 91 iterations, 10 tokens in 10
    assert found.per_turn_mean == pytest.approx((271 / 91 + 1.0) / 2, abs=1e-4)


def test_prefill_is_not_counted_twice() -> None:
    assert turn(10, 20, prefill_in_steps=True).tokens_per_iteration == pytest.approx(3.0)
    assert turn(10, 20).tokens_per_iteration == pytest.approx(31 / 11)


def test_unknown_stays_unknown() -> None:
    found = acceptance.summarize([turn(10, 5, (5, 5, 0, 0)), turn(10, 5, None, drafted=None)])
    assert found.histogram is None and found.drafted is None
    assert found.cumulative is None and found.acceptance_length == 1.5
    nothing = acceptance.summarize([])
    assert nothing.acceptance_length is None and nothing.source == "the server does not tell"


def test_histograms_of_different_draft_lengths_add() -> None:
    assert acceptance.add_histograms([[1, 2], [1, 1, 1]]) == [2, 3, 1]
    assert acceptance.add_histograms([]) is None


def test_interval_resamples_questions_not_turns() -> None:
    """Ten copies of each turn of the same question add no information, so the interval must not shrink."""
    rng = random.Random(3)
    once = [turn(20, rng.randint(0, 60), question=str(i)) for i in range(30)]
    copies = [entry for entry in once for _ in range(10)]
    narrow, wide = acceptance.bootstrap_interval(copies), acceptance.bootstrap_interval(once)
    assert narrow and wide
    assert narrow[1] - narrow[0] == pytest.approx(wide[1] - wide[0], rel=0.05)
    assert acceptance.bootstrap_interval(once[:1]) is None


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    truth = 1 + 0.8 + 0.48
    hits = 0
    for trial in range(60):
        counts = []
        for question in range(25):
            found = simulate(30, (0.8, 0.6), seed=1000 * trial + question)
            counts.append(turn(30, sum(found), question=str(question)))
        low, high = acceptance.bootstrap_interval(counts, seed=trial)  # type: ignore[misc]
        hits += low <= truth <= high
    assert 50 <= hits <= 60
