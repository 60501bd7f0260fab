"""Acceptance of drafts, and ratios with confidence intervals, as pure functions of counts.

Servers and results report `steps` (verification steps), `drafted` and `accepted` tokens, and a
histogram. Entry j of the histogram is the number of steps that accepted exactly j drafts.
Publications use the same names for different rates. The names have these meanings here:

- Acceptance length: 1 + accepted / steps over all answers. vLLM's name is "mean acceptance length".
- Per-question mean: tokens per iteration of a question, averaged over questions. The turns of a
  question are pooled, and each prefill counts as an iteration. ModelOpt's specdec_bench calls this
  mean "Average AL", and NVIDIA's cards print it by category.
- Cumulative acceptance at position k: share of the steps that accepted at least k drafts. vLLM's
  name is "per-position".
- Conditional acceptance at position k: the same share among the steps that accepted at least k - 1.

Confidence intervals of acceptance are over questions, which are sampled independently. Intervals of
speed-ups are over rounds if there are at least MIN_ROUNDS, and otherwise over questions. They also
cover the difference between launches. An interval is computed for the logarithm of a ratio, from
standard errors and Student's t. The standard error of a ratio of sums is found by the jackknife.
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

MIN_UNITS = 3  # number of units (questions, rounds or runs) that an interval needs
MIN_ROUNDS = 4  # fewer rounds do not show how rounds differ
MIN_EARLIER_RUNS = 4  # fewer runs do not predict the next run
BISECTIONS = 50  # halvings of an interval that reach the precision of a double
CONFIDENCE = 0.95
# numerator and denominator of a ratio by unit (a question, a round or a run)
Units = Mapping[Any, Sequence[float] | NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class AcceptanceSummary:
    """Acceptance of drafts in a group of answers. A field is None if the server does not report it.

    turns: number of answers
    questions: number of questions
    tokens: number of output tokens
    steps: number of verification steps, without prefills
    drafted: number of drafted tokens
    accepted: number of accepted draft tokens
    histogram: number of steps that accepted exactly j drafts, for each j from 0
    source: description of the server's report
    acceptance_length: tokens per verification step
    acceptance_length_interval: ends of the 95 % confidence interval of the acceptance length
    cumulative: share of steps that accepted at least k drafts, for each k from 1
    conditional: share of the steps with at least k - 1 accepted drafts that accepted draft k
    per_question_mean: tokens per iteration, averaged over questions
    surplus: accepted drafts after the end of answers, which `accepted` does not include
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
    """Returns the acceptance over a group of answers. `turns`: speculation in each answer.

    An entry of `turns` may also be the speculation in a whole round.
    """
    steps = sum(turn.steps for turn in turns)
    accepted = sum(turn.accepted for turn in turns)
    drafts = [turn.drafted or 0 for turn in turns]
    drafted: int | None = sum(drafts)
    # a total without some answers would be too small
    if any(turn.drafted is None for turn in turns):
        drafted = None
    totals: dict[str, int | None] = dict.fromkeys(("steps", "drafted", "accepted", "surplus"))
    if turns:
        surplus = sum(turn.surplus for turn in turns)
        totals = {"steps": steps, "drafted": drafted, "accepted": accepted, "surplus": surplus}
    interval = None
    length = length_ratio(turns)
    if length is not None:
        # a step yields at least one token, and at most all its drafts and one token
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
    # each answer has one more iteration than verification steps: its prefill
    means = [
        1 + accepted_drafts / (verified + answers)
        for verified, accepted_drafts, answers in questions.values()
    ]
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
    """Returns the acceptance by category of the questions, in the order of first appearance."""
    groups: dict[str, list[TurnCounts]] = {}
    for turn in turns:
        groups.setdefault(turn.category, []).append(turn)
    return {category: summarize(group) for category, group in groups.items()}


def acceptance_length(steps: int, accepted: int) -> float | None:
    """Returns the tokens per verification step: accepted drafts and one token of the target.

    None without verification steps.
    """
    return 1.0 + accepted / steps if steps else None


def most_tokens(steps: int | None, drafted: int | None) -> float:
    """Returns the number of tokens of a verification step whose drafts are all accepted.

    Infinity if the number of verification steps or of drafted tokens is unknown or 0.
    """
    return 1 + math.ceil(drafted / steps) if drafted and steps else math.inf


def by_position(histogram: Sequence[int]) -> tuple[list[float], list[float | None]]:
    """Returns the acceptance at each draft position, as two lists of shares.

    The first list has shares of all verification steps. The second has shares of the steps that
    accepted all earlier drafts, and None if there were no such steps. Both are empty without steps.
    `histogram`: number of steps that accepted exactly j drafts, for each j.
    """
    # number of steps that accepted at least this many drafts
    at_least = [sum(histogram[accepted:]) for accepted in range(len(histogram))]
    if not any(at_least):
        return [], []
    cumulative = [count / at_least[0] for count in at_least[1:]]
    conditional = [count / before if before else None for before, count in pairwise(at_least)]
    return cumulative, conditional


def add_histograms(histograms: Iterable[Sequence[int] | None]) -> list[int] | None:
    """Returns the sum of histograms, which may have different draft lengths.

    None without histograms, or if a histogram is None.
    """
    known = list(histograms)
    if not known or None in known:
        return None
    return [sum(counts) for counts in zip_longest(*known, fillvalue=0)]  # type: ignore[arg-type]


def per_question(turns: Sequence[TurnCounts]) -> dict[str, list[int]]:
    """Returns counts by question: a list of verification steps, accepted drafts and answers.

    {} if an entry of `turns` counts several answers together.
    """
    if any(turn.answers > 1 or turn.questions > 1 for turn in turns):
        return {}
    counts: dict[str, list[int]] = {}
    for turn in turns:
        question_counts = counts.setdefault(turn.question, [0, 0, 0])
        for index, count in enumerate((turn.steps, turn.accepted, turn.answers)):
            question_counts[index] += count
    return counts


def without_surplus(counts: TurnCounts, answers: int, questions: int) -> TurnCounts:
    """Returns a round's counts without the drafts that were accepted after the end of answers.

    Every received token is the first of its answer, the target's own token of a verification step,
    or an accepted draft. So tokens - answers - steps drafts were received.

    Args:
        counts: Counts of the server over the whole round.
        answers: Number of answers in the round.
        questions: Number of questions in the round.
    """
    received_drafts = counts.tokens - answers - counts.steps
    accepted = counts.accepted
    # Servers do not count steps without drafts, which makes `received_drafts` too large. The
    # server's counter decides in this case.
    if 0 <= received_drafts < accepted:
        accepted = received_drafts
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
    """Ratio with its confidence interval.

    value: ratio
    low: lower end of the interval
    high: upper end of the interval
    units: number of units (questions, rounds or runs) that the interval is over
    """

    value: float
    low: float
    high: float
    units: int

    @property
    def words(self) -> str:
        """Interval in words, such as "1.24 to 1.57"."""
        return f"{self.low:.2f} to {self.high:.2f}"

    def within(self, least: float, most: float) -> Ratio:
        """Returns the ratio with its interval cut to the possible values.

        `least` and `most`: smallest and largest possible value. If `most` is smaller than the
        ratio, the interval ends at the ratio.
        """
        high = min(self.high, max(most, self.value))
        return replace(self, low=max(self.low, least), high=high)


def ratio(
    numerators: ArrayLike, denominators: ArrayLike, confidence: float = CONFIDENCE
) -> Ratio | None:
    """Returns the sum of numerators over the sum of denominators, with its confidence interval.

    None if there are fewer than MIN_UNITS units, or if a sum is zero. `numerators` and
    `denominators` have an entry per unit. `confidence`: confidence level as a fraction.
    """
    pooled = _ratio_of_sums(numerators, denominators)
    if pooled is None:
        return None
    value, influence = pooled
    return _interval(value, confidence, _standard_error(influence))


def length_ratio(turns: Sequence[TurnCounts]) -> Ratio | None:
    """Returns the tokens per verification step, with an interval over questions.

    None for fewer than MIN_UNITS questions, or if `turns` counts several answers together.
    """
    counts = list(per_question(turns).values())
    steps = [verified for verified, _, _ in counts]
    tokens = [verified + accepted for verified, accepted, _ in counts]
    return ratio(tokens, steps)


def paired_ratio(
    *launches: tuple[Units, Units], confidence: float = CONFIDENCE, alike: bool = False
) -> Ratio | None:
    """Returns a new ratio divided by an old ratio, with its confidence interval.

    Each ratio is a sum of numerators divided by a sum of denominators, over the units that all
    sides share. None if fewer than MIN_UNITS units are shared, or if a sum is zero.

    Args:
        launches: New and old side of each launch. With several launches, the interval also covers
            the difference between launches.
        confidence: Confidence level as a fraction.
        alike: Units have about equal sums, as rounds have. The mean of the units' ratios then
            replaces the ratio of sums.
    """
    sides = list(chain(*launches))
    common = [unit for unit in sides[0] if all(unit in side for side in sides)]
    if len(common) < MIN_UNITS:
        return None
    values = np.array([[side[unit] for unit in common] for side in sides])
    # [launch, new or old, unit, numerator or denominator]
    sums = values.reshape(len(launches), 2, len(common), 2)
    pooled = sums.sum(axis=0)
    # [new or old, numerator or denominator, unit]
    new_sums, old_sums = pooled.transpose(0, 2, 1)
    # the ratio of a unit whose sum is zero has no logarithm to average
    average = _mean_ratio if alike and pooled.min() > 0 else _ratio_of_sums
    new = average(*new_sums)
    old = average(*old_sums)
    if new is None or old is None:
        return None
    new_value, new_influence = new
    old_value, old_influence = old
    errors = [_standard_error(new_influence - old_influence)]
    # launches differ by more than their questions do, so they add an error of their own
    if len(launches) > 1:
        # [new or old, numerator or denominator, launch]
        new_launches, old_launches = sums.sum(axis=2).transpose(1, 2, 0)
        new_numerators, new_denominators = new_launches
        old_numerators, old_denominators = old_launches
        launch_ratios = new_numerators / new_denominators * old_denominators / old_numerators
        errors.append(_standard_error(np.log(launch_ratios)))
    return _interval(new_value / old_value, confidence, *errors)


def next_ratio(
    new: float, earlier: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio | None:
    """Returns the figure of a run over the geometric mean of earlier runs, with an interval.

    The interval is Student's prediction interval of the logarithms, so it covers the difference
    between runs of one setup. None if there are fewer than MIN_EARLIER_RUNS, or if a figure is 0.
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
    """Returns a quantile of Student's t distribution, by bisection.

    `probability`: at least 0.5, because quantiles below 0 are not found. `freedom`: degrees of
    freedom.
    """
    # tan maps the angles from 0 to pi / 2 to all positive values
    low = 0.0
    high = math.pi / 2
    central_probability = 2 * probability - 1
    for _ in range(BISECTIONS):
        angle = (low + high) / 2
        if _central_probability(angle, freedom) < central_probability:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan(low)


def _central_probability(angle: float, freedom: int) -> float:
    """Returns the probability that Student's t is between -x and x.

    `angle`: arctan(x / sqrt(freedom)). The formulas are 26.7.3 and 26.7.4 of Abramowitz and Stegun,
    for odd and even degrees of freedom.
    """
    odd = freedom % 2
    cosine = math.cos(angle)
    term = cosine**odd
    series = 0.0
    for k in range(odd, freedom - 1, 2):
        series += term
        term *= cosine**2 * (k + 1) / (k + 2)
    probability = math.sin(angle) * series
    return (angle + probability) * 2 / math.pi if odd else probability


# a ratio, and the influence of each unit on the logarithm of the ratio
RatioInfluence = tuple[float, NDArray[np.float64]]


def _ratio_of_sums(numerators: ArrayLike, denominators: ArrayLike) -> RatioInfluence | None:
    """Returns the ratio of two sums, and the influence of each unit by the jackknife.

    None for fewer than MIN_UNITS units, if a sum is zero, or if a sum without one unit is zero.
    """
    top = np.asarray(numerators, dtype=np.float64)
    bottom = np.asarray(denominators, dtype=np.float64)
    top_sum = top.sum()
    bottom_sum = bottom.sum()
    if len(top) < MIN_UNITS or top_sum <= 0 or bottom_sum <= 0:
        return None
    # the jackknife leaves out one unit at a time
    tops = top_sum - top
    bottoms = bottom_sum - bottom
    if tops.min() <= 0 or bottoms.min() <= 0:
        return None
    value = float(top_sum / bottom_sum)
    log_losses = np.log(value * bottoms / tops)
    return value, (len(top) - 1) * log_losses


def _mean_ratio(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> RatioInfluence:
    """Returns the geometric mean of the units' ratios, and the logarithm of each ratio."""
    logs = np.log(top / bottom)
    mean = float(logs.mean())
    return math.exp(mean), logs


def _standard_error(influence: NDArray[np.float64]) -> tuple[float, int]:
    """Returns the standard error of the mean, and its degrees of freedom."""
    units = len(influence)
    deviation = float(influence.std(ddof=1))
    return deviation / math.sqrt(units), units - 1


def _interval(value: float, confidence: float, *errors: tuple[float, int]) -> Ratio:
    """Returns a ratio with its confidence interval.

    `errors`: independent standard errors of the ratio's logarithm, each with its degrees of
    freedom. The first error is the error over units.
    """
    probability = (1 + confidence) / 2
    # Each error has the quantile of its own degrees of freedom, so the interval is valid whichever
    # error is the largest.
    widths = [t_quantile(probability, freedom) * error for error, freedom in errors]
    factor = math.exp(math.hypot(*widths))
    _, freedom_over_units = errors[0]
    units = freedom_over_units + 1
    low = round(value / factor, 4)
    high = round(value * factor, 4)
    return Ratio(round(value, 4), low, high, units)


def _rounded(value: float | None) -> float | None:
    """Returns the value with four decimals, as results.json stores figures. None for None."""
    return None if value is None else round(value, 4)
