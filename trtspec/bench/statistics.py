"""Acceptance of drafts as pure functions over counts, and the intervals that go with ratios.

Stored are `steps`, `drafted`, `accepted` and the histogram (entry j = verification steps that accepted exactly j
drafts). Every rate is derived, because the same words name different numbers in the field:

- acceptance length = 1 + accepted / steps over all answers (vLLM's "mean acceptance length");
- per-question mean = tokens per iteration of each question, its turns pooled and each prefill counted as an iteration,
  averaged over questions: "Average AL" of ModelOpt's specdec_bench, which NVIDIA's cards print by category;
- cumulative acceptance at position k = share of steps that accepted at least k drafts (vLLM's "per-position");
- conditional acceptance at position k = the same share among the steps that accepted k - 1.

Intervals are over questions, the unit that is drawn independently, those of speed-ups over rounds and launches of
questions. They are for ratios of sums with linearised variance (Cochran, Sampling Techniques, 3rd ed., chapter 6), on
the logarithm, with quantiles of Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trtspec.client.servers import Count, TurnCounts

LEAST_UNITS = 3  # of an interval
LEAST_ROUNDS = 4  # of an interval over rounds; fewer are not enough to see what they differ by
LEAST_RUNS = 4  # earlier runs that predict the next one
BISECTIONS = 50  # beyond which a double has no more digits
CONFIDENCE = 0.95
Units = Mapping[Any, Sequence[float] | NDArray[np.float64]]  # numerator and denominator by unit


@dataclass(frozen=True, kw_only=True)
class AcceptanceSummary:
    """What speculation did in a group of answers; None where the server reports nothing. Intervals are of 95 %.

    `steps` are verification steps, without prefills. The mean by question is None where a server reports only
    totals. `surplus`: accepted drafts past the end of answers, taken out of `accepted`.
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
    cumulative: list[float] | None
    conditional: list[float | None] | None
    per_question_mean: float | None = None
    surplus: int | None = None


def acceptance_length(steps: int, accepted: int) -> float | None:
    """1 + accepted / steps: tokens per verification step, the bonus token included. None without steps."""
    return 1.0 + accepted / steps if steps else None


def most_tokens(steps: int | None, drafted: int | None) -> float:
    """Tokens of a step whose drafts are all accepted; infinite where the server does not tell how many it drafts."""
    return 1 + math.ceil(drafted / steps) if drafted and steps else math.inf


def by_position(histogram: Sequence[int]) -> tuple[list[float], list[float | None]]:
    """Acceptance of each draft position, cumulative and conditional (None where no step accepted the draft before)."""
    reached = [sum(histogram[accepted:]) for accepted in range(len(histogram))]
    if not any(reached):
        return [], []
    conditional = [now / before if before else None for before, now in pairwise(reached)]
    return [now / reached[0] for now in reached[1:]], conditional


def add_histograms(histograms: Iterable[Sequence[int] | None]) -> list[int] | None:
    """Sums histograms of possibly different draft lengths; None where one is unknown, or when there is none."""
    known = list(histograms)
    if not known or None in known:
        return None
    return [sum(counts) for counts in zip_longest(*known, fillvalue=0)]  # type: ignore[arg-type]


def per_question(turns: Sequence[TurnCounts]) -> dict[str, list[int]]:
    """[verification steps, accepted, answers] of each question; empty where answers were counted together."""
    found: dict[str, list[int]] = {}
    if any(turn.answers > 1 or turn.questions > 1 for turn in turns):
        return found
    for turn in turns:
        entry = found.setdefault(turn.question, [0, 0, 0])
        for place, value in enumerate((turn.steps, turn.accepted, turn.answers)):
            entry[place] += value
    return found


def without_surplus(counts: TurnCounts, answers: int, questions: int) -> TurnCounts:
    """Counters of a run of `answers` with the drafts taken out that were accepted past the end of answers.

    Every token that somebody received is the first of its answer, the own one of a verification step, or an accepted
    draft; so tokens - answers - steps drafts were accepted in truth. More than counted were accepted where tokens came
    without drafts; then the counter decides."""
    true = counts.tokens - answers - counts.steps
    surplus = counts.accepted - true if 0 <= true < counts.accepted else 0
    return replace(
        counts,
        accepted=counts.accepted - surplus,
        surplus=surplus,
        answers=answers,
        questions=questions,
    )


def summarize(turns: Sequence[TurnCounts]) -> AcceptanceSummary:
    """Acceptance of one group of answers; figures are None where the server reports nothing."""
    steps, accepted = sum(t.steps for t in turns), sum(t.accepted for t in turns)
    drafted = None if any(t.drafted is None for t in turns) else sum(t.drafted or 0 for t in turns)
    histogram, length = add_histograms(t.histogram for t in turns), length_ratio(turns)
    cumulative, conditional = by_position(histogram or [])
    questions = per_question(turns)
    if length is not None:
        length = length.within(1.0, most_tokens(steps, drafted))
    means = [1 + done / (verified + answers) for verified, done, answers in questions.values()]
    return AcceptanceSummary(
        turns=sum(t.answers for t in turns),
        questions=len(questions) or sum(t.questions for t in turns),
        tokens=sum(t.tokens for t in turns),
        steps=steps if turns else None,
        drafted=drafted if turns else None,
        accepted=accepted if turns else None,
        histogram=histogram,
        source=" + ".join(sorted({t.source for t in turns})) or "the server does not tell",
        acceptance_length=_rounded(acceptance_length(steps, accepted)),
        acceptance_length_interval=[length.low, length.high] if length else None,
        cumulative=[round(share, 4) for share in cumulative] if histogram else None,
        conditional=[_rounded(share) for share in conditional] if histogram else None,
        per_question_mean=_rounded(float(np.mean(means)) if means else None),
        surplus=sum(t.surplus for t in turns) if turns else None,
    )


def by_category(turns: Sequence[TurnCounts]) -> dict[str, AcceptanceSummary]:
    """`summarize` per category, in the order of first appearance."""
    groups: dict[str, list[TurnCounts]] = {}
    for turn in turns:
        groups.setdefault(turn.category, []).append(turn)
    return {category: summarize(group) for category, group in groups.items()}


def length_ratio(turns: Sequence[TurnCounts]) -> Ratio | None:
    """The acceptance length over questions; None below LEAST_UNITS questions, or where a server reports totals."""
    counts = per_question(turns).values()
    return ratio(
        [steps + accepted for steps, accepted, _ in counts], [steps for steps, _, _ in counts]
    )


@dataclass(frozen=True)
class Ratio:
    """A ratio over `units`, and the ends of its interval."""

    value: float
    low: float
    high: float
    units: int

    @property
    def words(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"

    def within(self, least: float, most: float) -> Ratio:
        """The same, with no end of its interval beyond what can be."""
        high = min(self.high, max(most, self.value))
        return replace(self, low=max(self.low, least), high=high)


def ratio(
    numerators: ArrayLike, denominators: ArrayLike, confidence: float = CONFIDENCE
) -> Ratio | None:
    """sum / sum with its interval over units. None below LEAST_UNITS, or where a sum is zero."""
    found = _linear(numerators, denominators)
    return None if found is None else _interval(found[0], confidence, _error(found[1]))


def paired_ratio(
    *launches: tuple[Units, Units], confidence: float = CONFIDENCE, alike: bool = False
) -> Ratio | None:
    """The ratio of two ratios of sums, new over old, over the units of both; of units that are `alike`, as rounds of
    the same questions are, the geometric mean of their own. None below LEAST_UNITS, or where a sum is zero. With
    several launches of both, whose units are the same, the interval covers what launches differ by too."""
    common = [
        unit for unit in launches[0][0] if all(unit in side for pair in launches for side in pair)
    ]
    if len(common) < LEAST_UNITS:
        return None
    sums = np.array([[[side[unit] for unit in common] for side in pair] for pair in launches])
    sides = sums.sum(axis=0).transpose(0, 2, 1)
    new, old = (_linear(top, bottom, alike) for top, bottom in sides)
    if new is None or old is None:
        return None
    errors = [_error(new[1] - old[1])]
    if len(launches) > 1:
        (top, bottom), (old_top, old_bottom) = sums.sum(axis=2).transpose(1, 2, 0)
        errors.append(_error(np.log(top / bottom * old_bottom / old_top)))
    return _interval(new[0] / old[0], confidence, *errors)


def next_ratio(
    new: float, earlier: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio | None:
    """One more run over the geometric mean of earlier ones, by Student's prediction interval for their logarithms,
    which holds what runs of one setup differ by. None below LEAST_RUNS earlier ones."""
    if len(earlier) < LEAST_RUNS or min(new, *earlier) <= 0:
        return None
    logs = np.log(np.asarray(earlier, dtype=np.float64))
    error, freedom = _error(logs)
    error *= math.sqrt(len(earlier) + 1)
    return _interval(new / math.exp(float(logs.mean())), confidence, (error, freedom))


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Of Student's t, by bisection of its distribution (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    low, high = 0.0, math.pi / 2
    for _ in range(BISECTIONS):
        angle = (low + high) / 2
        if _central(angle, freedom) < 2 * probability - 1:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan(low)


def _central(angle: float, freedom: int) -> float:
    """The share of Student's t between -x and x, where tan(angle) is x over the root of `freedom`."""
    odd, total = freedom % 2, 0.0
    term = math.cos(angle) ** odd
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
    share = math.sin(angle) * total
    return (angle + share) * 2 / math.pi if odd else share


def _linear(
    numerators: ArrayLike, denominators: ArrayLike, alike: bool = False
) -> tuple[float, NDArray[np.float64]] | None:
    """The ratio of the sums, and what each unit contributes to its logarithm: by the jackknife, what it loses without
    the unit. The geometric mean of the units' own ratios, and their logarithms, if they are `alike`. None where a sum
    is zero, or one unit has it all."""
    top, bottom = (
        np.asarray(numerators, dtype=np.float64),
        np.asarray(denominators, dtype=np.float64),
    )
    if len(top) < LEAST_UNITS or top.sum() <= 0 or bottom.sum() <= 0:
        return None
    if alike and min(*top, *bottom) > 0:
        logs = np.log(top / bottom)
        return math.exp(logs.mean()), logs
    tops, bottoms = top.sum() - top, bottom.sum() - bottom  # without each unit
    if tops.min() <= 0 or bottoms.min() <= 0:
        return None
    value = float(top.sum() / bottom.sum())
    return value, (len(top) - 1) * np.log(value * bottoms / tops)


def _error(influence: NDArray[np.float64]) -> tuple[float, int]:
    """Standard error of a mean of what each unit contributes, and its degrees of freedom."""
    freedom = len(influence) - 1
    return float(influence.std(ddof=1)) / math.sqrt(len(influence)), freedom


def _interval(value: float, confidence: float, *errors: tuple[float, int]) -> Ratio:
    """`errors`: independent standard errors of the ratio's logarithm, each with its degrees of freedom; the first is
    over units. Each widens the interval by a quantile of its own, so that it holds whichever is larger."""
    ends = [t_quantile((1 + confidence) / 2, freedom) * error for error, freedom in errors]
    spread, units = math.exp(math.hypot(*ends)), errors[0][1] + 1
    return Ratio(round(value, 4), round(value / spread, 4), round(value * spread, 4), units)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
