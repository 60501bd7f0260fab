"""Compares a run of `bench` with earlier runs, and judges whether a change is significant.

Acceptance over all questions is paired by question. The speed of one server differs from run to run
for reasons that all answers of a run share, and some servers report only totals. In both cases,
MIN_EARLIER_RUNS earlier runs give a prediction interval. A regression is an interval that is
entirely below 1 - `max_regression`. The judged figures share the probability of a false alarm
(Bonferroni): two equal runs raise an alarm in at most 5 % of comparisons. Other figures are only
shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtspec.bench.results import BenchResults, ComparedFigure, Comparison, StatedWorkload
from trtspec.bench.statistics import (
    MIN_EARLIER_RUNS,
    Ratio,
    next_ratio,
    paired_ratio,
    per_question,
)
from trtspec.checkpoint.writer import differences
from trtspec.errors import Problem, Severity, UsageError

# fields of the workload that must be equal in the compared runs
WORKLOAD_KEYS = (
    "dataset_sha256",
    "temperature",
    "max_tokens",
    "thinking",
    "system",
    "extra_body",
)
FALSE_ALARM_RATE = 0.05  # share of comparisons of equal runs that may raise an alarm
REGRESSION = "regression"
IMPROVEMENT = "improvement"
NO_CHANGE = "no change found"
NOT_JUDGED = "not judged"
ACCEPTANCE = "acceptance"  # name of the figure


def compare(
    new: BenchResults, earlier: Sequence[BenchResults], max_regression: float | None = None
) -> Comparison:
    """Compares the figures of a run with earlier runs and lists the regressions.

    Args:
        new: Results of this run.
        earlier: Results of runs of the same workload and model. Questions are paired with the
            first.
        max_regression: Decrease that is allowed, as a fraction. With it, a comparison that judges
            nothing is an error.
    """
    old = earlier[0]
    allowed = max_regression or 0.0
    levels = [level.label for level in new.concurrency]
    # acceptance, and the speed at each level if the earlier runs suffice
    judged_count = 1
    if len(earlier) >= MIN_EARLIER_RUNS:
        judged_count += len(levels)
    # a regression is beyond one of the two ends of an interval
    confidence = 1 - 2 * FALSE_ALARM_RATE / judged_count
    candidates = [acceptance_figure(new, earlier, confidence, allowed)]
    for label in levels:
        candidates.append(speed_figure(new, earlier, label, confidence, allowed))
    figures = [figure for figure in candidates if figure]
    severity: Severity = "warning" if max_regression is None else "error"
    problems = not_judged(figures, [new, *earlier], severity)
    problems += [_regression(figure, allowed) for figure in figures if figure.verdict == REGRESSION]
    return Comparison(
        old={"name": old.name, "url": old.url},
        runs=len(earlier),
        max_regression=allowed,
        confidence=round(confidence, 5),
        figures=figures,
        problems=problems,
    )


def _regression(figure: ComparedFigure, allowed: float) -> Problem:
    """Returns the error of a regressed figure. `allowed`: allowed decrease as a fraction."""
    interval = f"({figure.low:.3f} to {figure.high:.3f})"
    message = f"{figure.figure} is {figure.ratio:.3f} times the earlier run's {interval}"
    message += f", over {figure.units} {figure.paired_by}s"
    if allowed:
        message += f", more than the {100 * allowed:g} % allowed"
    return Problem("TS-BENCH-REGRESSION", "error", "`compare`", message)


def refuse_different(workload: StatedWorkload, earlier: Mapping[str, BenchResults]) -> None:
    """Raises UsageError if an earlier run had another workload than this run.

    The comparison would mix that difference with the change under test. `earlier`: results of
    earlier runs by the option that names them.
    """
    for option, run in earlier.items():
        before = {key: getattr(run.workload, key) for key in WORKLOAD_KEYS}
        now = {key: getattr(workload, key) for key in WORKLOAD_KEYS}
        changes = differences(before, now)
        if changes:
            message = f"{option}: the run of {run.url} differs from this one: {'; '.join(changes)}"
            raise UsageError(message, "give the same data set and options in both runs")


def acceptance_figure(
    new: BenchResults, earlier: Sequence[BenchResults], confidence: float, allowed: float
) -> ComparedFigure | None:
    """Compares tokens per verification step, paired by the questions that both runs answered.

    If the servers report only totals, the run is compared with all earlier runs. Degenerate output
    is not judged. None if this run or the first earlier run reports no acceptance.

    Args:
        confidence: Confidence level of the interval, as a fraction.
        allowed: Allowed decrease, as a fraction.
    """
    runs = [new, *earlier]
    lengths = [run.acceptance_length for run in runs]
    if None in lengths[:2]:
        return None
    known = [length for length in lengths if length is not None]
    paired_by = "question"
    test = paired_ratio((_step_units(new), _step_units(earlier[0])), confidence=confidence)
    if test is None and len(known) == len(runs):
        paired_by = "run"
        test = next_ratio(known[0], known[1:], confidence)
    if test is None:
        return _untested(ACCEPTANCE, known)
    is_sound = not any(run.degenerate() for run in runs)
    return _tested(ACCEPTANCE, test, paired_by, _verdict(test, allowed, is_sound))


def _step_units(run: BenchResults) -> dict[str, tuple[int, int]]:
    """Returns the numbers of tokens and of verification steps, as a pair, by question."""
    units = {}
    for question, (steps, accepted, _) in per_question(run.turns_detail).items():
        units[question] = (steps + accepted, steps)
    return units


def speed_figure(
    new: BenchResults,
    earlier: Sequence[BenchResults],
    label: str,
    confidence: float,
    allowed: float,
) -> ComparedFigure | None:
    """Compares the output tokens per second at one level of load with earlier runs.

    The figure of a run is the mean over its rounds. If there are too few earlier runs, the ratio to
    the first has no interval. None if this run or the first earlier run has no speed at the level.

    Args:
        label: Name of the level.
        confidence: Confidence level of the interval, as a fraction.
        allowed: Allowed decrease, as a fraction.
    """
    levels = [run.at(label) for run in (new, *earlier)]
    rates = []
    for level in levels:
        rounds = level.rounds if level else []
        rates.append(sum(rounds) / max(1, len(rounds)))
    if not all(rates[:2]):
        return None
    name = f"tokens/s at {label}"
    test = next_ratio(rates[0], rates[1:], confidence)
    if test is None:
        return _untested(name, rates)
    is_sound = all(level is not None and not level.degeneration.degenerate for level in levels)
    return _tested(name, test, "run", _verdict(test, allowed, is_sound))


def _untested(name: str, values: Sequence[float]) -> ComparedFigure:
    """Returns a figure without interval and verdict.

    `values`: the figure in this run, and in each earlier run.
    """
    new, old = values[:2]
    return ComparedFigure(figure=name, ratio=round(new / old, 4))


def _tested(name: str, test: Ratio, paired_by: str, verdict: str) -> ComparedFigure:
    """Returns a figure with its interval and verdict. `paired_by`: question or run."""
    return ComparedFigure(
        figure=name,
        ratio=test.value,
        low=test.low,
        high=test.high,
        units=test.units,
        paired_by=paired_by,
        verdict=verdict,
    )


def _verdict(test: Ratio, allowed: float, is_sound: bool) -> str:
    """Returns the verdict on a figure: regression, improvement, no change found or not judged.

    `allowed`: allowed decrease as a fraction. `is_sound`: whether no output is degenerate.
    """
    if not is_sound:
        return NOT_JUDGED
    if test.high < 1 - allowed:
        return REGRESSION
    return IMPROVEMENT if test.low > 1 else NO_CHANGE


def not_judged(
    figures: Sequence[ComparedFigure], runs: Sequence[BenchResults], severity: Severity
) -> list[Problem]:
    """Returns a list with the problem that acceptance is not judged, and the reason.

    The list is empty if acceptance is judged, or if no run reports acceptance and a speed is
    judged. `runs`: this run and the earlier runs.
    """
    judged = {figure.figure for figure in figures if figure.verdict != NOT_JUDGED}
    has_acceptance = [run.acceptance_length is not None for run in runs]
    if ACCEPTANCE in judged or (judged and not any(has_acceptance)):
        return []
    if any(run.degenerate() for run in runs):
        reason = "the output of a run is degenerate, and loops flatter every drafter"
        remedy = (
            "read answers.jsonl; measure at the temperature "
            "that users have, with the right chat template"
        )
    elif any(has_acceptance) and not all(has_acceptance):
        run = "an earlier" if has_acceptance[0] else "this"
        reason = f"{run} run reports no acceptance, and the other does"
        remedy = "see whether the server has loaded its head, and what it says of its speculation"
    else:
        reason = f"totals and speed are judged from {MIN_EARLIER_RUNS} earlier runs on"
        remedy = f"repeat `compare` for {MIN_EARLIER_RUNS} earlier runs, "
        remedy += "or measure both servers in one run: bench A=URL B=URL"
    message = f"acceptance is not judged: {reason}"
    return [Problem("TS-BENCH-NOT-COMPARED", severity, "`compare`", message, remedy)]
