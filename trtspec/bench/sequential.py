"""Sequential tests for a series without an end: how often they alarm for nothing, and how soon they find a fall.

A series is a sequence of batch means, such as accepted drafts per step over ten minutes. Batch means of live traffic
are correlated over hours, because the mix of requests drifts, so their variance alone would promise far too few false
alarms. What counts is the long-run variance, sigma^2 = lim m Var(mean of m batches), estimated by the method of batch
means (Glynn & Whitt 1991) over several m, and from above.

The test is Page's CUSUM with the midpoint between what is normal and what is to be found as its allowance:
S <- max(0, S + mid - x), alarm at S >= h. For a Brownian motion with variance sigma^2 and drift -g (normal) or +g
(fallen), g half the distance of the two levels and theta = 2 g / sigma^2 (Siegmund 1985, section II.6):

    batches between false alarms  = (exp(theta h) - theta h - 1) sigma^2 / (2 g^2)
    batches until a fall is found = h / g on average, with variance h sigma^2 / g^3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

SCALES = (1, 2, 4, 8, 16)  # batches per mean; the longest that leaves FEWEST means is the last one looked at
FEWEST = 8
WIDER = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # times the change that is asked for
REFINE = 7  # times the first learning: with the default of a day, a week
UPPER = 1.2816  # standard normal quantile of 90 %: how pessimistic estimates are taken
FOUND = 1.6449  # and of 95 %: the share of falls that are found within the stated samples


@dataclass(frozen=True)
class SeriesReference:
    """What is normal: the mean of a series, the standard error of that mean, and the long-run variance of one batch.
    `batches`: how many it was learned from; 0 where it comes from a recorded baseline."""

    mean: float
    error: float
    variance: float
    batches: int = 0


@dataclass(frozen=True)
class DriftTest:
    """A one-sided test for a fall. `mid` is the allowance, `threshold` the h of the alarm, both in the series' unit.
    `detect_mean` and `detect_within` are batches until a fall is found, on average and in 95 of 100 cases."""

    mid: float
    half_gap: float
    threshold: float
    days_between_false_alarms: float
    detect_mean: float
    detect_within: float

    def __post_init__(self) -> None:
        if self.half_gap <= 0 or self.threshold <= 0:  # of a file that was edited
            raise ValueError("half_gap and threshold are positive")

    def step(self, statistic: float, value: float) -> float:
        """The statistic after one more batch. Capped at twice the threshold, so that an alarm ends soon after a
        recovery."""
        return min(2 * self.threshold, max(0.0, statistic + self.mid - value))

    def alarms(self, statistic: float) -> bool:
        return statistic >= self.threshold


def long_run_variance(values: Sequence[float]) -> float:
    """An upper estimate (90 %) of the long-run variance of a stationary series: the largest over SCALES of
    m * Var(means of m), each raised by the uncertainty of a variance from that many means.

    Raises ValueError for fewer than 2 * FEWEST values.
    """
    series = np.asarray(values, dtype=np.float64)
    if len(series) < 2 * FEWEST:
        raise ValueError(f"{len(series)} values are too few for a variance")
    found = []
    for size in SCALES:
        count = len(series) // size
        if count < FEWEST:
            break
        means = series[: count * size].reshape(count, size).mean(axis=1)
        found.append(size * float(means.var(ddof=1)) * _variance_factor(count - 1))
    return max(found)


def _variance_factor(freedom: int) -> float:
    """freedom / chi2 quantile of 10 % (Wilson & Hilferty 1931): true variance over estimated, at most, in 90 %."""
    part = 2.0 / (9.0 * freedom)
    return 1.0 / (1.0 - part - UPPER * math.sqrt(part)) ** 3


def learned_reference(values: Sequence[float]) -> SeriesReference:
    """What is normal by a series that is taken for normal. Raises ValueError for too few values."""
    variance = long_run_variance(values)
    return SeriesReference(float(np.mean(values)), math.sqrt(variance / len(values)), variance, len(values))


def drift_test(
    reference: SeriesReference, change: float, batches_per_day: float, false_alarms_per_day: float
) -> DriftTest | None:
    """The test that finds a fall by `change` (in the series' unit) and alarms for nothing at most as often as stated.

    Both levels are taken where they are least favourable within the error of the reference. None where that leaves less
    than a third of the distance: the reference is not known well enough yet. None, too, for a change of 0: what is 0
    cannot fall.
    """
    half_gap = (change - 2 * UPPER * reference.error) / 2
    if half_gap <= 0 or half_gap < change / 6:
        return None
    variance = max(reference.variance, 1e-12)
    theta = 2 * half_gap / variance
    excursions = (batches_per_day / false_alarms_per_day) * 2 * half_gap**2 / variance
    scaled = _solve(excursions)
    threshold = max(scaled / theta, half_gap)
    mean = threshold / half_gap
    spread = math.sqrt(threshold * variance / half_gap**3)
    return DriftTest(
        mid=reference.mean - UPPER * reference.error - half_gap,
        half_gap=half_gap,
        threshold=threshold,
        days_between_false_alarms=1.0 / false_alarms_per_day,
        detect_mean=mean + 1,
        detect_within=math.ceil(mean + FOUND * spread) + 1,
    )


def _solve(excursions: float) -> float:
    """x with exp(x) - x - 1 = excursions; by Newton's method from above, where it converges for every start."""
    x = math.log(excursions + 2.0) + 1.0
    for _ in range(60):
        x -= (math.exp(x) - x - 1.0 - excursions) / max(math.exp(x) - 1.0, 1e-9)
    return x


@dataclass(frozen=True)
class EventTest:
    """A test for events that should be rare, such as loops among the answers: CUSUM of the likelihood ratio of `bad`
    against `good`, alarm at `threshold`. Mean events between false alarms >= exp(threshold) (Lorden 1971), whatever
    the distribution of the waiting times."""

    good: float
    bad: float
    threshold: float

    def step(self, statistic: float, happened: bool) -> float:
        ratio = self.bad / self.good if happened else (1 - self.bad) / (1 - self.good)
        return min(2 * self.threshold, max(0.0, statistic + math.log(ratio)))

    def alarms(self, statistic: float) -> bool:
        return statistic >= self.threshold


def event_test(good: float, bad: float, observations_per_day: float, false_alarms_per_day: float) -> EventTest:
    """`good` is the share of events that is tolerated, `bad` the one to find soon."""
    return EventTest(good, bad, math.log(max(observations_per_day / false_alarms_per_day, 20.0)))


@dataclass
class WatchedSeries:
    """One series under a DriftTest, and what it has seen; the whole is kept between runs.

    What is normal is learned from the series itself: from the first `learn` batches, then refined with up to
    REFINE * learn of them. Batches join only once the statistic is back at 0, so that a fall that has begun does not
    become the norm. With a `recorded` reference nothing is learned. `change` is relative to the mean, or in the
    series' unit with `absolute`.
    """

    change: float
    learn: int
    batches_per_day: float
    false_alarms_per_day: float
    absolute: bool = False
    recorded: SeriesReference | None = None
    learned: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    reference: SeriesReference | None = None
    test: DriftTest | None = None
    finds: float | None = None  # the change that `test` finds
    statistic: float = 0.0
    alarming: bool = False
    alarms: int = 0
    batches: int = 0
    missing: int = 0  # batches since the last one that had a value for this series
    last: float | None = None

    def __post_init__(self) -> None:
        if self.recorded is not None and self.test is None:
            self._set(self.recorded)

    def add(self, value: float) -> bool:
        """One more batch mean. True when an alarm begins with it."""
        self.batches, self.missing, self.last = self.batches + 1, 0, value
        if self.test is not None:
            self.statistic = self.test.step(self.statistic, value)
        before, self.alarming = self.alarming, self.test is not None and self.test.alarms(self.statistic)
        if self.recorded is None:
            self._learn(value)
        begins = self.alarming and not before
        self.alarms += begins
        return begins

    def _learn(self, value: float) -> None:
        room = REFINE * self.learn - len(self.learned)
        if room <= 0:
            return
        self.waiting.append(value)
        if self.test is not None and self.statistic > 0:
            return
        self.learned += self.waiting[:room]
        self.waiting = []
        if len(self.learned) >= self.learn and (self.test is None or len(self.learned) % max(1, self.learn // 4) == 0):
            self._set(learned_reference(self.learned))

    def _set(self, reference: SeriesReference) -> None:
        change = self.change if self.absolute else self.change * reference.mean
        # a small baseline is not known well enough for a small fall, and still finds a large one
        for factor in WIDER if self.recorded is not None else WIDER[:1]:
            test = drift_test(reference, factor * change, self.batches_per_day, self.false_alarms_per_day)
            if test is not None:
                self.reference, self.test, self.finds = reference, test, factor * self.change
                return
