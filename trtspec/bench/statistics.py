"""Acceptance of drafts as pure functions over counts, and the intervals that go with ratios.

Stored are `steps`, `drafted`, `accepted` and the histogram (entry j = verification steps that
accepted exactly j drafts). Every rate is derived, because the same words name different numbers in
the field:

- acceptance length = 1 + accepted / steps over all answers (vLLM's "mean acceptance length")
- per-question mean = tokens per iteration of each question, its turns pooled and each prefill
  counted as an iteration, averaged over questions: "Average AL" of ModelOpt's specdec_bench, which
  NVIDIA's cards print by category
- cumulative acceptance at position k = share of steps that accepted at least k drafts (vLLM's
  "per-position")
- conditional acceptance at position k = the same share among the steps that accepted k - 1

Intervals are over questions, the unit that is drawn independently. Intervals of speed-ups are over
rounds and launches of questions. They are for ratios of sums with linearised variance (Cochran,
Sampling Techniques, 3rd ed., chapter 6), on the logarithm, with quantiles of Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise, zip_longest
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trtspec.client.servers import Count, TurnCounts

MIN_UNITS = 3  # of an interval
MIN_ROUNDS = 4  # of an interval over rounds; fewer do not show how rounds differ
MIN_EARLIER_RUNS = 4  # that predict the next run
BISECTIONS = 50  # a double has no more digits
CONFIDENCE = 0.95
Units = Mapping[Any, Sequence[float] | NDArray[np.float64]]  # (numerator, denominator) by unit


@dataclass(frozen=True, kw_only=True)
class AcceptanceSummary:
    """Acceptance in a group of answers. None if the server reports nothing. Intervals are of 95 %.

    `steps`: verification steps, without prefills. `per_question_mean`: None if the server reports
    only totals. `surplus`: accepted drafts past the end of answers, taken out of `accepted`.
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


def summarize(turns: Sequence[TurnCounts]) -> AcceptanceSummary:
    """Returns the acceptance of one group of answers."""
    steps = sum(turn.steps for turn in turns)
    accepted = sum(turn.accepted for turn in turns)
    drafts = [turn.drafted or 0 for turn in turns]
    drafted: int | None = sum(drafts)
    if any(turn.drafted is None for turn in turns):
        drafted = None
    totals: dict[str, int | None] = dict.fromkeys(("steps", "drafted", "accepted", "surplus"))
    if turns:
        surplus = sum(turn.surplus for turn in turns)
        totals = {"steps": steps, "drafted": drafted, "accepted": accepted, "surplus": surplus}
    interval = None
    length = length_ratio(turns)
    if length is not None:
        length = length.within(1.0, most_tokens(steps, drafted))
        interval = [length.low, length.high]
    cumulative = None
    conditional = None
    histogram = add_histograms(turn.histogram for turn in turns)
    if histogram:
        shares, conditional_shares = by_position(histogram)
        cumulative = [round(share, 4) for share in shares]
        conditional = [_rounded(share) for share in conditional_shares]
    questions = per_question(turns)
    means = [1 + drafts / (verified + answers) for verified, drafts, answers in questions.values()]
    mean = None
    if means:
        mean = round(float(np.mean(means)), 4)
    sources = sorted({turn.source for turn in turns})
    answer_count = sum(turn.answers for turn in turns)
    question_count = len(questions) or sum(turn.questions for turn in turns)
    tokens = sum(turn.tokens for turn in turns)
    return AcceptanceSummary(
        turns=answer_count,
        questions=question_count,
        tokens=tokens,
        histogram=histogram,
        source=" + ".join(sources) or "the server does not tell",
        acceptance_length=_rounded(acceptance_length(steps, accepted)),
        acceptance_length_interval=interval,
        cumulative=cumulative,
        conditional=conditional,
        per_question_mean=mean,
        **totals,
    )


def by_category(turns: Sequence[TurnCounts]) -> dict[str, AcceptanceSummary]:
    """Returns `summarize` by category, in the order of first appearance."""
    groups: dict[str, list[TurnCounts]] = {}
    for turn in turns:
        groups.setdefault(turn.category, []).append(turn)
    return {category: summarize(group) for category, group in groups.items()}


def acceptance_length(steps: int, accepted: int) -> float | None:
    """Returns 1 + accepted / steps: tokens per verification step, the bonus token included.

    None without steps.
    """
    return 1.0 + accepted / steps if steps else None


def most_tokens(steps: int | None, drafted: int | None) -> float:
    """Returns the tokens of a step whose drafts are all accepted.

    Infinite if the number of drafts is unknown.
    """
    return 1 + math.ceil(drafted / steps) if drafted and steps else math.inf


def by_position(histogram: Sequence[int]) -> tuple[list[float], list[float | None]]:
    """Returns the acceptance of each draft position, cumulative and conditional.

    A conditional share is None if no step accepted the draft before. Both are empty without steps.
    """
    reached = [sum(histogram[accepted:]) for accepted in range(len(histogram))]
    if not any(reached):
        return [], []
    cumulative = [count / reached[0] for count in reached[1:]]
    conditional = [count / before if before else None for before, count in pairwise(reached)]
    return cumulative, conditional


def add_histograms(histograms: Iterable[Sequence[int] | None]) -> list[int] | None:
    """Sums histograms of possibly different draft lengths.

    None if one is unknown, or for no histograms.
    """
    known = list(histograms)
    if not known or None in known:
        return None
    return [sum(counts) for counts in zip_longest(*known, fillvalue=0)]  # type: ignore[arg-type]


def per_question(turns: Sequence[TurnCounts]) -> dict[str, list[int]]:
    """Returns [verification steps, accepted drafts, answers] by question.

    {} if answers were counted together.
    """
    if any(turn.answers > 1 or turn.questions > 1 for turn in turns):
        return {}
    counts: dict[str, list[int]] = {}
    for turn in turns:
        question = counts.setdefault(turn.question, [0, 0, 0])
        for index, count in enumerate((turn.steps, turn.accepted, turn.answers)):
            question[index] += count
    return counts


def without_surplus(counts: TurnCounts, answers: int, questions: int) -> TurnCounts:
    """Takes out of a run's counters the drafts that were accepted past the end of answers.

    Every token that somebody received is the first of its answer, the bonus token of a verification
    step, or an accepted draft. So tokens - answers - steps drafts were received. If tokens came
    without drafts, that is more than the server counted, and its counter decides.
    """
    received = counts.tokens - answers - counts.steps
    accepted = counts.accepted
    if 0 <= received < accepted:
        accepted = received
    return replace(
        counts,
        accepted=accepted,
        surplus=counts.accepted - accepted,
        answers=answers,
        questions=questions,
    )


# --- ratios and their intervals ---


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
        """Cuts the interval at the least and the most that is possible.

        `most` below the value has no effect.
        """
        high = min(self.high, max(most, self.value))
        return replace(self, low=max(self.low, least), high=high)


def ratio(
    numerators: ArrayLike, denominators: ArrayLike, confidence: float = CONFIDENCE
) -> Ratio | None:
    """Returns sum / sum with its interval over units. None below MIN_UNITS, or if a sum is zero."""
    pooled = _ratio_of_sums(numerators, denominators)
    if pooled is None:
        return None
    value, influence = pooled
    return _interval(value, confidence, _standard_error(influence))


def length_ratio(turns: Sequence[TurnCounts]) -> Ratio | None:
    """Returns the acceptance length over questions.

    None below MIN_UNITS questions, or if only totals are known.
    """
    counts = list(per_question(turns).values())
    steps = [verified for verified, _, _ in counts]
    tokens = [verified + accepted for verified, accepted, _ in counts]
    return ratio(tokens, steps)


def paired_ratio(
    *launches: tuple[Units, Units], confidence: float = CONFIDENCE, alike: bool = False
) -> Ratio | None:
    """Returns the ratio of two ratios of sums, new over old, over the units that all sides have.

    None below MIN_UNITS, or if a sum is zero.

    Args:
        launches: New and old of each launch. The interval of several covers what launches differ
            by, too.
        alike: Units are equally large, as rounds are: the ratios of the units are averaged.
    """
    sides = list(chain(*launches))
    common = [unit for unit in sides[0] if all(unit in side for side in sides)]
    if len(common) < MIN_UNITS:
        return None
    values = [[[side[unit] for unit in common] for side in launch] for launch in launches]
    sums = np.array(values)  # [launch, new or old, unit, numerator or denominator]
    pooled = sums.sum(axis=0)
    new_sums, old_sums = pooled.transpose(0, 2, 1)
    # a unit without tokens has no ratio of its own
    average = _mean_ratio if alike and pooled.min() > 0 else _ratio_of_sums
    new = average(*new_sums)
    old = average(*old_sums)
    if new is None or old is None:
        return None
    new_value, new_influence = new
    old_value, old_influence = old
    errors = [_standard_error(new_influence - old_influence)]
    if len(launches) > 1:
        new_launches, old_launches = sums.sum(axis=2).transpose(1, 2, 0)
        top, bottom = new_launches
        old_top, old_bottom = old_launches
        logs = np.log(top / bottom * old_bottom / old_top)
        errors.append(_standard_error(logs))
    return _interval(new_value / old_value, confidence, *errors)


def next_ratio(
    new: float, earlier: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio | None:
    """Returns a run over the geometric mean of earlier runs, with its prediction interval.

    The interval is Student's, of the logarithms, and holds what runs of one setup differ by. None
    below MIN_EARLIER_RUNS, or if a run is zero.
    """
    if len(earlier) < MIN_EARLIER_RUNS or min(new, *earlier) <= 0:
        return None
    logs = np.log(np.asarray(earlier, dtype=np.float64))
    error, freedom = _standard_error(logs)
    prediction_error = error * math.sqrt(len(earlier) + 1)
    mean = math.exp(float(logs.mean()))
    return _interval(new / mean, confidence, (prediction_error, freedom))


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Returns a quantile of Student's t, by bisection (Abramowitz and Stegun, 26.7.3, 26.7.4)."""
    low = 0.0
    high = math.pi / 2
    for _ in range(BISECTIONS):
        angle = (low + high) / 2
        if _central(angle, freedom) < 2 * probability - 1:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan(low)


def _central(angle: float, freedom: int) -> float:
    """The share of Student's t between -x and x, with tan(angle) = x / sqrt(freedom)."""
    odd = freedom % 2
    cosine = math.cos(angle)
    term = cosine**odd
    total = 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    share = math.sin(angle) * total
    return (angle + share) * 2 / math.pi if odd else share


# a ratio, and the influence of each unit on its logarithm
Influenced = tuple[float, NDArray[np.float64]]


def _ratio_of_sums(numerators: ArrayLike, denominators: ArrayLike) -> Influenced | None:
    """Influence by the jackknife: what the ratio loses without the unit.

    None below MIN_UNITS, if a sum is zero, or if one unit holds a whole sum.
    """
    top = np.asarray(numerators, dtype=np.float64)
    bottom = np.asarray(denominators, dtype=np.float64)
    top_sum = top.sum()
    bottom_sum = bottom.sum()
    if len(top) < MIN_UNITS or top_sum <= 0 or bottom_sum <= 0:
        return None
    # the sums without each unit
    tops = top_sum - top
    bottoms = bottom_sum - bottom
    if tops.min() <= 0 or bottoms.min() <= 0:
        return None
    value = float(top_sum / bottom_sum)
    losses = np.log(value * bottoms / tops)
    return value, (len(top) - 1) * losses


def _mean_ratio(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> Influenced:
    """The geometric mean of the units' own ratios."""
    logs = np.log(top / bottom)
    mean = float(logs.mean())
    return math.exp(mean), logs


def _standard_error(influence: NDArray[np.float64]) -> tuple[float, int]:
    """Standard error of the mean, and its degrees of freedom."""
    units = len(influence)
    deviation = float(influence.std(ddof=1))
    return deviation / math.sqrt(units), units - 1


def _interval(value: float, confidence: float, *errors: tuple[float, int]) -> Ratio:
    """The ratio with its interval.

    `errors`: independent standard errors of its logarithm with their degrees of freedom, the first
    over units. Each widens the interval by its own quantile, so the interval holds whichever error
    is larger.
    """
    probability = (1 + confidence) / 2
    widths = [t_quantile(probability, freedom) * error for error, freedom in errors]
    spread = math.exp(math.hypot(*widths))
    units = errors[0][1] + 1
    low = round(value / spread, 4)
    high = round(value * spread, 4)
    return Ratio(round(value, 4), low, high, units)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
