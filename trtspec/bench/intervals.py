"""Intervals and tests over questions, the unit that is drawn independently: turns of one question are not.

Everything is vectorised over questions and resamples. Sources: percentile bootstrap with quantiles widened for small
samples ("expanded percentile", Hesterberg, The American Statistician 69, 2015); ratio estimator with linearised
variance (Cochran, Sampling Techniques, 3rd ed., chapter 6); quantiles of Student's t by the expansion 26.7.5 of
Abramowitz and Stegun.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 1000
CONFIDENCE = 0.95
POWER = 0.8  # chance of finding a change with the number of questions that is proposed for it
NORMAL = NormalDist()


@dataclass(frozen=True)
class RatioTest:
    """A ratio new / old over `pairs` questions with its two-sided interval, and the smallest fall that as many
    questions find in POWER of the runs."""

    ratio: float
    low: float
    high: float
    pairs: int
    finds: float | None


def t_quantile(probability: float, freedom: float) -> float:
    """Of Student's t; within 0.3 % from 5 degrees of freedom on, within 2 % at 3."""
    z = NORMAL.inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def expanded_tail(count: int, confidence: float = CONFIDENCE) -> float:
    """The share below the lower end of a percentile interval over `count` units, so that it covers as it says."""
    t = t_quantile((1 + confidence) / 2, count - 1)
    return NORMAL.cdf(-math.sqrt(count / (count - 1)) * t)


def length_interval(steps: ArrayLike, accepted: ArrayLike, seed: int = 0) -> tuple[float, float] | None:
    """95 % bootstrap interval of 1 + sum(accepted) / sum(steps) over units (questions); None below two units.

    steps, accepted: one entry per unit, whole numbers."""
    counts = np.stack([np.asarray(steps, dtype=np.float64), np.asarray(accepted, dtype=np.float64)], axis=1)
    if len(counts) < 2 or not counts[:, 0].any():
        return None
    picks = np.random.default_rng(seed).integers(0, len(counts), size=(RESAMPLES, len(counts)))
    sums = counts[picks].sum(axis=1)
    tail = 100 * expanded_tail(len(counts))
    low, high = np.percentile(1.0 + sums[:, 1] / np.maximum(sums[:, 0], 1.0), [tail, 100 - tail])
    return float(low), float(high)


def paired_ratio(
    new: tuple[ArrayLike, ArrayLike], old: tuple[ArrayLike, ArrayLike], confidence: float = CONFIDENCE
) -> RatioTest | None:
    """Of two ratios of sums, each (numerators, denominators) by unit, the same units in both and in the same order.

    For acceptance length the numerators are tokens out of steps, the denominators steps. None below three units or
    where a sum is zero."""
    parts = [_linear(*side) for side in (new, old)]
    if parts[0] is None or parts[1] is None or len(parts[0][1]) != len(parts[1][1]) or len(parts[0][1]) < 3:
        return None
    (top, first), (bottom, second) = parts  # type: ignore[misc]
    return _ratio_test(top / bottom, first - second, confidence)


def independent_ratio(new: ArrayLike, old: ArrayLike, confidence: float = CONFIDENCE) -> RatioTest | None:
    """Of the means of two independent samples (rounds), with Welch's degrees of freedom. None below three in each."""
    a, b = np.asarray(new, dtype=np.float64), np.asarray(old, dtype=np.float64)
    if min(len(a), len(b)) < 3 or a.mean() <= 0 or b.mean() <= 0:
        return None
    parts = [values.var(ddof=1) / len(values) / values.mean() ** 2 for values in (a, b)]
    error = math.sqrt(sum(parts))
    spread = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
    freedom = sum(parts) ** 2 / spread if spread else float(len(a) + len(b) - 2)
    return _bounds(float(a.mean() / b.mean()), error, freedom, min(len(a), len(b)), confidence)


def _linear(numerators: ArrayLike, denominators: ArrayLike) -> tuple[float, NDArray[np.float64]] | None:
    """The ratio of the sums, and what each unit contributes to its logarithm."""
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if top.sum() <= 0 or bottom.sum() <= 0:
        return None
    ratio = float(top.sum() / bottom.sum())
    return ratio, (top - ratio * bottom) / (ratio * bottom.mean())


def _ratio_test(ratio: float, influence: NDArray[np.float64], confidence: float) -> RatioTest:
    error = float(influence.std(ddof=1)) / math.sqrt(len(influence))
    return _bounds(ratio, error, len(influence) - 1, len(influence), confidence)


def _bounds(ratio: float, error: float, freedom: float, pairs: int, confidence: float) -> RatioTest:
    t = t_quantile((1 + confidence) / 2, max(freedom, 2))
    finds = 1 - math.exp(-(t + NORMAL.inv_cdf(POWER)) * error)
    return RatioTest(ratio, ratio * math.exp(-t * error), ratio * math.exp(t * error), pairs, finds)


def pairs_needed(test: RatioTest, fall: float, confidence: float = CONFIDENCE) -> int:
    """Questions that find a fall of that share (0.05: 5 %) in POWER of the runs, from the spread that `test` saw."""
    t = t_quantile((1 + confidence) / 2, max(test.pairs - 1, 2))
    error = math.log(test.high / test.ratio) / t
    wanted = -math.log(1 - fall) / (NORMAL.inv_cdf((1 + confidence) / 2) + NORMAL.inv_cdf(POWER))
    return max(3, math.ceil(test.pairs * (error / wanted) ** 2) + 2)


def units_needed(count: int, interval: Sequence[float], value: float, share: float) -> int:
    """Questions for an interval of value +- share, from the one that `count` of them gave."""
    half = max(interval[1] - interval[0], 1e-9) / 2
    return math.ceil(count * (half / (share * value)) ** 2)
