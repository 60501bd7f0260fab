"""Intervals cover, and `--compare` alarms as rarely as it says, in 1,000 runs each."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.bench.conftest import results_of
from tests.cases import slow
from trtspec.bench import compare as comparing
from trtspec.bench.results import BenchResults, QuestionSpeed
from trtspec.bench.statistics import (
    Ratio,
    add_histograms,
    by_position,
    paired_ratio,
    ratio,
    summarize,
    t_quantile,
)
from trtspec.client.servers import TurnCounts

RUNS = 1000
RATES = np.array([0.78, 0.66, 0.6])  # conditional acceptance of a real head, roughly


def questions(
    rng: np.random.Generator, count: int, fall: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(steps, accepted) of `count` questions: different lengths, easy and hard, turns of one alike.

    `fall` lowers the length that a step yields by that share on average.
    """
    steps = 20 + rng.poisson(60, count)
    ease = rng.normal(0, 0.35, count)
    odds = np.log(RATES / (1 - RATES))[None, :] + ease[:, None]
    reached = np.cumprod(1 / (1 + np.exp(-odds)), axis=1)
    shares = -np.diff(np.concatenate([np.ones((count, 1)), reached, np.zeros((count, 1))], axis=1))
    accepted = rng.multinomial(steps, shares / shares.sum(axis=1, keepdims=True)) @ np.arange(4)
    lost = np.minimum(accepted, rng.binomial(steps + accepted, fall)) if fall else 0
    return steps, accepted - lost


def truth() -> float:
    steps, accepted = questions(np.random.default_rng(99), 200_000)
    return 1 + accepted.sum() / steps.sum()


def test_quantiles_are_students() -> None:
    for freedom in (5, 9, 29, 79, 879):
        for probability in (0.9, 0.975, 0.995):
            expected = stats.t.ppf(probability, freedom)
            assert t_quantile(probability, freedom) == pytest.approx(expected, rel=0.003)


@pytest.mark.parametrize(
    "count",
    [10, slow(34), slow(80)],
)
def test_intervals_of_acceptance_cover_in_93_to_97_percent_of_runs(count: int) -> None:
    rng, value = np.random.default_rng(count), truth()
    covered = 0
    for _ in range(RUNS):
        steps, accepted = questions(rng, count)
        found = ratio(steps + accepted, steps)
        assert found
        covered += found.low <= value <= found.high
    print(f"{count} questions: {covered / RUNS:.1%} of {RUNS} intervals hold {value:.3f}")
    assert 0.93 * RUNS <= covered <= 0.97 * RUNS


def units(numerators: np.ndarray, denominators: np.ndarray) -> dict[int, tuple[float, float]]:
    return dict(enumerate(zip(numerators.tolist(), denominators.tolist(), strict=True)))


@pytest.mark.parametrize(("count", "launches"), [(10, 1), (80, 1), (8, 1), (8, 4)])
def test_intervals_of_a_paired_ratio_cover(count: int, launches: int) -> None:
    """Intervals over questions cover the true ratio.

    Every token of the old run is kept with 0.95. Eight are rounds, which count alike. Of several
    launches, each is faster or slower as a whole; their intervals may cover more.
    """
    rng, covered = np.random.default_rng(count), 0
    for _ in range(RUNS):
        steps, accepted = questions(rng, count)
        tokens, pairs = steps + accepted, []
        for mood in np.exp(rng.normal(0, 0.05 * (launches > 1), launches)):
            again = rng.binomial(tokens, 0.95)
            pairs.append((units(again, steps * mood), units(tokens, steps)))
        test = paired_ratio(*pairs, alike=count == 8)
        assert test
        covered += test.low <= 0.95 <= test.high
    print(f"{count} pairs, {launches} launches: {covered / RUNS:.1%} of {RUNS}")
    assert covered >= 0.93 * RUNS
    assert launches > 1 or covered <= 0.97 * RUNS


def run_of(
    rng: np.random.Generator, names: list[str], ease: np.ndarray, fall: float
) -> BenchResults:
    """A sampled run of bench at three concurrencies on a machine with noise of its own."""
    count = len(names)
    steps = 20 + rng.poisson(60, count)
    odds = np.log(RATES / (1 - RATES))[None, :] + ease[:, None]
    mean = np.cumprod(1 / (1 + np.exp(-odds)), axis=1).sum(axis=1)
    accepted = rng.binomial(3 * steps, np.minimum(((1 + mean) * (1 - fall) - 1) / 3, 1))
    turns = [
        TurnCounts(name, "c", int(1 + s + a), int(s), int(a), int(3 * s), None, "synthetic")
        for name, s, a in zip(names, steps, accepted, strict=True)
    ]
    speeds = []
    for concurrency in (1, 4, 16):
        tokens = steps + accepted
        seconds = steps * 0.01 * concurrency**0.3 * rng.normal(1, 0.05, count)
        speeds += [
            QuestionSpeed(f"concurrency {concurrency}", name, "c", int(t), float(s))
            for name, t, s in zip(names, tokens, seconds, strict=True)
        ]
    return results_of(turns, speeds, (1, 4, 16))


def in_a_mood(
    rng: np.random.Generator, run: BenchResults, mood: float, rounds: int
) -> BenchResults:
    """The same run on a machine that is faster or slower by one factor for each level."""
    speeds, levels = [], []
    for level in run.concurrency:
        factor = float(np.exp(rng.normal(0, mood)))
        mine = [speed for speed in run.questions_detail if speed.level == level.label]
        speeds += [replace(speed, seconds=speed.seconds * factor) for speed in mine]
        levels.append(
            replace(
                level,
                rounds=[float(100 / factor * np.exp(rng.normal(0, 0.01))) for _ in range(rounds)],
            )
        )
    return replace(run, questions_detail=speeds, concurrency=levels)


def alarms(
    count: int,
    fall: float,
    runs: int,
    seed: int,
    mood: float = 0.05,
    rounds: int = 1,
    earlier: int = 1,
) -> int:
    """How many comparisons raise an alarm."""
    rng = np.random.default_rng(seed)
    names, raised = [str(i) for i in range(count)], 0
    for _ in range(runs):
        ease = rng.normal(0, 0.35, count)
        old = [in_a_mood(rng, run_of(rng, names, ease, 0.0), mood, rounds) for _ in range(earlier)]
        new = in_a_mood(rng, run_of(rng, names, ease, fall), mood, rounds)
        found = comparing.compare(new, old)
        raised += any(problem.code == "TS-BENCH-REGRESSION" for problem in found.problems)
    return raised


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [1, 4, 6])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("mood", [0.05, 0.1])
def test_equal_runs_raise_an_alarm_in_at_most_5_percent(
    mood: float, rounds: int, earlier: int
) -> None:
    """On a machine whose speed differs from run to run by 5 or 10 %."""
    raised = alarms(40, 0.0, RUNS, 1, mood, rounds, earlier)
    print(
        f"{raised} alarms in {RUNS} comparisons of equal runs of 40 questions at three "
        f"concurrencies, {rounds} rounds, {earlier} earlier runs, "
        f"speed differing by {mood:.0%} from run to run"
    )
    assert raised <= 68, "5 % within chance: 1 in 200 such runs has more"


def test_speed_of_one_earlier_run_is_not_judged_and_of_four_is() -> None:
    rng = np.random.default_rng(9)
    names, ease = [str(i) for i in range(40)], rng.normal(0, 0.35, 40)
    old = [in_a_mood(rng, run_of(rng, names, ease, 0.0), 0.01, 1) for _ in range(4)]
    half = run_of(rng, names, ease, 0.0)
    levels = [replace(level, rounds=[50.0]) for level in half.concurrency]
    seconds = [replace(speed, seconds=2 * speed.seconds) for speed in half.questions_detail]
    half = replace(half, concurrency=levels, questions_detail=seconds)
    one, four = comparing.compare(half, old[:1], 0.05), comparing.compare(half, old, 0.05)
    assert not [p for p in one.problems if p.severity != "info"] and one.runs == 1
    assert {f.verdict for f in one.figures[1:]} == {"not judged"}
    assert [p.code for p in four.problems if p.severity == "error"] == [
        "TS-BENCH-REGRESSION"
    ] * 3 and four.runs == 4


def test_comparison_in_small() -> None:
    """The same in 60 runs, for the default suite."""
    assert alarms(40, 0.0, 60, seed=4) <= 6 and alarms(60, 0.08, 40, seed=5) >= 36


def test_an_interval_needs_three_units() -> None:
    assert paired_ratio(({"a": (1, 1)}, {"a": (1, 1)})) is None


def turn(
    steps: int,
    accepted: int,
    histogram: tuple[int, ...] | None = None,
    question: str = "q",
    **more: Any,
) -> TurnCounts:
    more = {"drafted": 3 * steps, **more}
    return TurnCounts(
        question,
        "c",
        1 + steps + accepted,
        steps,
        accepted,
        histogram=histogram,
        source="s",
        **more,
    )


def test_rates_follow_from_the_histogram() -> None:
    histogram = [10, 20, 30, 40]
    cumulative, conditional = by_position(histogram)
    assert cumulative == [0.9, 0.7, 0.4] and conditional == pytest.approx([0.9, 7 / 9, 4 / 7])
    assert by_position([5, 0, 0]) == ([0.0, 0.0], [0.0, None]) and by_position([]) == ([], [])
    assert add_histograms([[1, 2], [1, 1, 1]]) == [2, 3, 1] and add_histograms([]) is None


def test_unknown_stays_unknown() -> None:
    found = summarize([turn(10, 5, (5, 5, 0, 0)), turn(10, 5, drafted=None)])
    assert found.histogram is None and found.drafted is None
    assert found.cumulative is None and found.acceptance_length == 1.5
    assert summarize([]).acceptance_length is None and summarize([]).steps is None


def test_no_interval_reaches_beyond_what_can_be() -> None:
    """Three questions with two drafts, one of which accepts all, never give four tokens a step."""
    turns = [
        TurnCounts(str(i), "all", 30, 10, accepted, 20, None, "test")
        for i, accepted in enumerate((2, 20, 20))
    ]
    low, high = summarize(turns).acceptance_length_interval or (0.0, 0.0)
    assert 1.0 <= low < high == 3.0
    assert Ratio(2.04, 1.01, 4.12, 3).within(0.0, 3.0) == Ratio(2.04, 1.01, 3.0, 3)
    assert Ratio(3.5, 0.5, 9.0, 3).within(1.0, 3.0) == Ratio(3.5, 1.0, 3.5, 3), "other hardware"


def test_an_interval_is_over_questions_not_turns() -> None:
    """Ten copies of each turn of a question add no information, so the interval must not shrink."""
    rng = np.random.default_rng(3)
    once = [turn(20, int(rng.integers(0, 60)), question=str(i)) for i in range(30)]
    several = [entry for entry in once for _ in range(10)]
    narrow, wide = (summarize(turns).acceptance_length_interval for turns in (several, once))
    assert narrow and wide
    assert narrow[1] - narrow[0] == pytest.approx(wide[1] - wide[0], rel=0.05)
    assert summarize(once[:2]).acceptance_length_interval is None
