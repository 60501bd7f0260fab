"""The sequential tests of `watch`: false alarms at most as often as stated, falls found within the samples stated.

The traffic is simulated: mixed categories whose shares drift (correlated over 90 minutes) and follow the time of day,
requests that differ, steps whose accepted drafts are counted. About 3 s.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from trtspec.bench.sequential import (
    SeriesReference,
    WatchedSeries,
    drift_test,
    event_test,
    learned_reference,
    long_run_variance,
)

PER_DAY = 144  # batches of ten minutes
ACCEPTED = np.array([2.4, 2.1, 1.8, 1.5, 1.2, 1.0])  # drafts per step, by category
SHARES = np.array([1.0, 0.6, 0.8, 0.5, 0.4, 0.3])
PHI = math.exp(-10 / 90)  # of one batch to the next


def traffic(days: int, endpoints: int, seed: int, fall_at: int | None = None, fall: float = 0.15) -> np.ndarray:
    """Accepted drafts per step, [endpoint, batch]; from batch `fall_at` on all categories accept less."""
    rng = np.random.default_rng(seed)
    drift, phase = 0.5 * rng.normal(size=(endpoints, 6)), rng.uniform(0, 24, size=(endpoints, 1))
    found = np.empty((endpoints, days * PER_DAY))
    for batch in range(found.shape[1]):
        hour = batch * 24 / PER_DAY
        drift = PHI * drift + math.sqrt(1 - PHI**2) * 0.5 * rng.normal(size=(endpoints, 6))
        daily = 0.35 * np.sin(2 * np.pi * (hour - phase) / 24) * np.array([1, 1, 0, 0, -1, -1])
        shares = np.exp(np.log(SHARES) + drift + daily)
        shares /= shares.sum(axis=1, keepdims=True)
        requests = rng.poisson(37 * (1 + 0.7 * math.sin(2 * np.pi * (hour - 9) / 24)), size=endpoints) + 4
        mean = shares @ ACCEPTED
        between = shares @ ACCEPTED**2 - mean**2
        # a request has 40 steps and a level of its own; its accepted drafts scatter around that
        noise = np.sqrt((between + 0.35**2 + 1.3 / 40) / requests) * rng.normal(size=endpoints)
        found[:, batch] = mean * (1 - fall if fall_at is not None and batch >= fall_at else 1) + noise
    return found


def watched() -> WatchedSeries:
    return WatchedSeries(0.15, PER_DAY, PER_DAY, 0.01)


def test_false_alarms_over_a_thousand_days_are_no_more_than_stated(capsys: pytest.CaptureFixture[str]) -> None:
    values = traffic(days=12, endpoints=100, seed=5)
    neighbours = np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]
    alarms, days = 0, 0.0
    for row in values:
        series = watched()
        for value in row:
            days += (series.test is not None) / PER_DAY
            alarms += series.add(float(value))
    with capsys.disabled():
        print(f"\n{alarms} false alarms in {days:.0f} days; stated: at most {0.01 * days:.0f}; standard deviation of a "
              f"batch mean {values.std() / values.mean():.1%}, correlation of neighbours {neighbours:.2f}")  # fmt: skip
    assert days > 1000 and neighbours > 0.4, "the traffic is to be hard"
    assert alarms <= 0.01 * days + 2 * math.sqrt(0.01 * days)


@pytest.mark.parametrize("day", [2, 8], ids=["a day after learning", "after a week"])
def test_a_fall_is_found_within_the_samples_stated(day: int, capsys: pytest.CaptureFixture[str]) -> None:
    late, stated = [], []
    for row in traffic(days=day + 4, endpoints=100, seed=6, fall_at=day * PER_DAY):
        series = watched()
        for value in row[: day * PER_DAY]:
            series.add(float(value))
        if series.test is None or series.alarming:
            continue
        stated.append(series.test.detect_within)
        late.append(next((n for n, value in enumerate(row[day * PER_DAY :], 1) if series.add(float(value))), 10**6))
    within = np.mean(np.array(late) <= np.array(stated))
    with capsys.disabled():
        print(
            f"\na fall of 15 % on day {day}: found after {np.median(late):.0f} batches (95 %: "
            f"{np.percentile(late, 95):.0f}), stated {np.median(stated):.0f}; within: {within:.0%} of {len(late)}"
        )
    assert len(late) >= 90 and within >= 0.95


def test_without_the_long_run_variance_the_same_traffic_alarms_far_too_often() -> None:
    """What the estimate is for: with the variance of single batches the test breaks its promise."""
    alarms, days = 0, 0.0
    for row in traffic(days=9, endpoints=60, seed=7):
        learned = row[:PER_DAY]
        naive = SeriesReference(float(learned.mean()), 0.0, float(learned.var()))
        series = WatchedSeries(0.15, PER_DAY, PER_DAY, 0.01, recorded=naive)
        alarms += sum(series.add(float(value)) for value in row[PER_DAY:])
        days += 8
    assert alarms > 3 * 0.01 * days


def test_the_long_run_variance_of_a_known_process() -> None:
    """An AR(1) with coefficient 0.5 and unit innovations has 1 / (1 - 0.5)^2 = 4; the estimate is one from above."""
    rng, found = np.random.default_rng(3), []
    for _ in range(200):
        series = [0.0]
        for shock in rng.normal(size=600):
            series.append(0.5 * series[-1] + shock)
        found.append(long_run_variance(series))
    assert 3.4 < np.median(found) < 7 and np.mean(np.array(found) > 4 * 0.8) > 0.9
    with pytest.raises(ValueError, match="too few"):
        long_run_variance([1.0] * 15)


@pytest.mark.parametrize("false_alarms", [1.0, 0.1])
def test_independent_batches_alarm_at_about_the_stated_rate(false_alarms: float) -> None:
    """With a known mean and variance the rate is Siegmund's; discrete steps only make alarms rarer."""
    test = drift_test(SeriesReference(2.0, 0.0, 0.09), 0.3, PER_DAY, false_alarms)
    assert test is not None
    rng, paths, days = np.random.default_rng(1), 500, 20
    statistic, alarms = np.zeros(paths), 0
    for _ in range(days * PER_DAY):
        statistic = np.maximum(0, statistic + test.mid - (2.0 + 0.3 * rng.normal(size=paths)))
        alarms += int((statistic >= test.threshold).sum())
        statistic[statistic >= test.threshold] = 0
    rate = alarms / (paths * days)
    assert 0.1 * false_alarms < rate <= 1.1 * false_alarms, rate


def test_a_reference_that_is_not_known_well_enough_gives_no_test() -> None:
    assert drift_test(SeriesReference(2.0, 0.2, 0.1), 0.3, PER_DAY, 0.01) is None
    assert drift_test(learned_reference([2.0] * 20), 0.3, PER_DAY, 0.01) is not None


def test_a_fall_does_not_become_the_norm_while_it_is_being_looked_for() -> None:
    rng, series = np.random.default_rng(4), watched()
    for value in 2.0 + 0.05 * rng.normal(size=2 * PER_DAY):
        series.add(float(value))
    before = len(series.learned)
    for value in 1.6 + 0.05 * rng.normal(size=40):
        series.add(float(value))
    assert series.alarming and len(series.learned) - before <= 1 and series.reference is not None
    assert abs(series.reference.mean - 2.0) < 0.02
    for value in 2.0 + 0.05 * rng.normal(size=60):
        series.add(float(value))
    assert not series.alarming and series.alarms == 1


def test_rare_events_alarm_at_most_at_the_stated_rate() -> None:
    test = event_test(0.02, 0.25, observations_per_day=1440, false_alarms_per_day=0.1)
    rng, alarms, statistic = np.random.default_rng(2), 0, 0.0
    for happened in rng.random(1440 * 200) < 0.02:
        statistic = test.step(statistic, bool(happened))
        if test.alarms(statistic):
            alarms, statistic = alarms + 1, 0.0
    assert alarms <= 20
    needed, statistic = 0, 0.0
    for happened in rng.random(1000) < 0.5:
        statistic, needed = test.step(statistic, bool(happened)), needed + 1
        if test.alarms(statistic):
            break
    assert needed < 40
