"""Acceptance of draft tokens, as pure functions over counts, and the intervals that go with it.

What is stored is `steps`, `drafted`, `accepted` and the histogram (entry j = number of verification steps that accepted
exactly j draft tokens); every rate is derived, because the same words name different numbers in the field:

- acceptance length = 1 + accepted / steps over all answers (micro average; vLLM's "mean acceptance length");
- per-question mean = tokens per iteration of each question, its turns pooled and the prefill of each counted as one
  iteration of length 1, averaged over questions: "Average AL" of ModelOpt's specdec_bench (metrics/mtbench.py,
  metrics/specbench.py), of which NVIDIA's cards print the mean by category;
- per-turn mean = the same of each answer, averaged over answers ("Average AL" of specdec_bench's plain metric);
- cumulative acceptance at position k = share of steps that accepted at least k drafts (vLLM's "per-position");
- conditional acceptance at position k = the same share among the steps that accepted k - 1.

Intervals and tests are over questions, the unit that is drawn independently: turns of one question are not. They are
vectorised over questions and resamples. Sources: percentile bootstrap with quantiles widened for small samples
("expanded percentile", Hesterberg, The American Statistician 69, 2015); ratio estimator with linearised variance
(Cochran, Sampling Techniques, 3rd ed., chapter 6); quantiles of Student's t by the expansion 26.7.5 of Abramowitz and
Stegun, and the fall that a test finds by 26.7.10, the noncentral t.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trtspec.client.servers import Count, TurnCounts

RESAMPLES = 1000
LEAST_RUNS = 4  # earlier runs from which the next one is predicted: t is within 2 % of Student's for so many
CONFIDENCE = 0.95
POWER = 0.8  # chance of finding a change with the number of questions that is proposed for it
NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class AcceptanceSummary:
    """What speculation did in a group of answers; None where the server told nothing. The interval is of 95 %.

    `steps` are verification steps, without prefills. Means by turn and by question are None where a server tells only
    of all answers together.
    """

    turns: Count
    questions: Count
    tokens: Count
    steps: Count | None
    drafted: Count | None
    accepted: Count | None
    histogram: list[Count] | None
    source: str
    acceptance_length: float | None
    acceptance_length_interval: list[float] | None
    per_turn_mean: float | None
    per_turn_sd: float | None
    draft_acceptance_rate: float | None
    cumulative: list[float] | None
    conditional: list[float | None] | None
    per_question_mean: float | None = None
    per_question_interval: list[float] | None = None
    surplus: int | None = None


def acceptance_length(steps: int, accepted: int) -> float | None:
    """1 + accepted / steps: tokens per verification step, the bonus token included. None without steps."""
    return 1.0 + accepted / steps if steps else None


def cumulative_acceptance(histogram: Sequence[int]) -> list[float]:
    """Entry k-1 = share of the steps that accepted at least k drafts."""
    total = sum(histogram)
    return [sum(histogram[k:]) / total for k in range(1, len(histogram))] if total else []


def conditional_acceptance(histogram: Sequence[int]) -> list[float | None]:
    """Entry k-1 = share of the steps that accepted draft k among those that accepted draft k-1; None where none did."""
    reached = [sum(histogram[k:]) for k in range(len(histogram))]
    return [reached[k] / reached[k - 1] if reached[k - 1] else None for k in range(1, len(reached))]


def add_histograms(histograms: Iterable[Sequence[int] | None]) -> list[int] | None:
    """Sums histograms of possibly different draft lengths; None as soon as one is unknown, or when there is none."""
    total: list[int] = []
    seen = False
    for histogram in histograms:
        if histogram is None:
            return None
        seen = True
        total += [0] * (len(histogram) - len(total))
        for accepted, count in enumerate(histogram):
            total[accepted] += count
    return total if seen else None


def per_question(turns: Sequence[TurnCounts]) -> dict[str, list[int]]:
    """[verification steps, accepted, answers] of each question; nothing where answers were counted together."""
    found: dict[str, list[int]] = {}
    if any(turn.questions > 1 for turn in turns):
        return found
    for turn in turns:
        entry = found.setdefault(turn.question, [0, 0, 0])
        for place, value in enumerate((turn.verifications, turn.accepted, turn.answers)):
            entry[place] += value
    return found


def bootstrap_interval(turns: Sequence[TurnCounts], seed: int = 0) -> list[float] | None:
    """95 % interval of the acceptance length, resampling whole questions: turns of one are not independent."""
    counts = list(per_question(turns).values())
    interval = length_interval([c[0] for c in counts], [c[1] for c in counts], seed)
    return [round(end, 4) for end in interval] if interval else None


def without_surplus(counts: TurnCounts, answers: int, questions: int) -> TurnCounts:
    """Counters of a run of `answers` with the drafts taken out that were accepted past the end of answers.

    Every token that somebody received is the first of its answer, the own one of a verification step, or an accepted
    draft; so tokens - answers - steps drafts were accepted in truth. More than counted were accepted where tokens came
    without drafts; then the counter stands."""
    true = counts.tokens - answers - counts.steps
    surplus = counts.accepted - true if 0 <= true < counts.accepted else 0
    return replace(counts, accepted=counts.accepted - surplus, surplus=surplus, answers=answers, questions=questions)


def summarize(turns: Sequence[TurnCounts]) -> AcceptanceSummary:
    """Acceptance of one group of answers; figures are None where the server told nothing."""
    steps, accepted = sum(t.verifications for t in turns), sum(t.accepted for t in turns)
    drafted = None if any(t.drafted is None for t in turns) else sum(t.drafted or 0 for t in turns)
    histogram = add_histograms(t.histogram for t in turns)
    single = all(t.answers == 1 for t in turns)
    per_turn = np.array([t.tokens_per_iteration for t in turns if t.tokens] if single else [], dtype=np.float64)
    questions = np.array(
        [1 + done / (verified + answers) for verified, done, answers in per_question(turns).values()], dtype=np.float64
    )
    return AcceptanceSummary(
        turns=sum(t.answers for t in turns),
        questions=len(per_question(turns)) or sum(t.questions for t in turns),
        tokens=sum(t.tokens for t in turns),
        steps=steps if turns else None,
        drafted=drafted if turns else None,
        accepted=accepted if turns else None,
        histogram=histogram,
        source=" + ".join(sorted({t.source for t in turns})) or "the server does not tell",
        acceptance_length=_rounded(acceptance_length(steps, accepted)),
        acceptance_length_interval=bootstrap_interval(turns),
        per_turn_mean=_rounded(float(per_turn.mean())) if per_turn.size else None,
        per_turn_sd=_rounded(float(per_turn.std(ddof=1))) if per_turn.size > 1 else None,
        draft_acceptance_rate=_rounded(accepted / drafted) if drafted else None,
        cumulative=[round(share, 4) for share in cumulative_acceptance(histogram)] if histogram else None,
        conditional=[_rounded(share) for share in conditional_acceptance(histogram)] if histogram else None,
        per_question_mean=_rounded(float(questions.mean())) if questions.size else None,
        per_question_interval=mean_interval(questions),
        surplus=sum(t.surplus for t in turns) if turns else None,
    )


def mean_interval(values: np.ndarray) -> list[float] | None:
    """95 % interval of a mean of independent values, by Student's t."""
    if len(values) < 2:
        return None
    half = t_quantile(0.975, len(values) - 1) * float(values.std(ddof=1)) / len(values) ** 0.5
    return [round(float(values.mean()) - half, 4), round(float(values.mean()) + half, 4)]


def by_category(turns: Sequence[TurnCounts]) -> dict[str, AcceptanceSummary]:
    """`summarize` per category, in the order of first appearance."""
    groups: dict[str, list[TurnCounts]] = {}
    for turn in turns:
        groups.setdefault(turn.category, []).append(turn)
    return {category: summarize(group) for category, group in groups.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


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


def next_ratio(new: float, old: Sequence[float], confidence: float = CONFIDENCE) -> RatioTest | None:
    """Of one more run over the geometric mean of earlier ones, by Student's prediction interval for their logarithms:
    what runs of the same setup differ by is in it. None below LEAST_RUNS earlier ones."""
    if len(old) < LEAST_RUNS or min(new, *old) <= 0:
        return None
    logs = np.log(np.asarray(old, dtype=np.float64))
    error = float(logs.std(ddof=1)) * math.sqrt(1 + 1 / len(old))
    return _bounds(math.exp(math.log(new) - float(logs.mean())), error, len(old) - 1, len(old), confidence)


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
    freedom = max(freedom, 2)
    t = t_quantile((1 + confidence) / 2, freedom)
    shift = t * (1 - 1 / (4 * freedom)) + NORMAL.inv_cdf(POWER) * math.sqrt(1 + t**2 / (2 * freedom))
    typical = (1 - 2 / (9 * freedom)) ** 1.5  # the median of an estimated deviation over the true one
    finds = 1 - math.exp(-shift * error / typical)
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
