"""Two runs of `bench` side by side: what changed, and how sure that is.

Acceptance over all questions is paired by question. Speed differs from run to run of one server for
reasons that all answers of a run share, and some servers report only totals: there MIN_EARLIER_RUNS
earlier runs give a prediction interval for one more. A regression is an interval that lies wholly
below 1 - `max_regression`. The judged figures share the chance of a false alarm (Bonferroni): two
equal runs raise one in at most 5 % of comparisons. Other figures are only shown.
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
ACCEPTANCE = "acceptance"  # the figure


def compare(
    new: BenchResults, earlier: Sequence[BenchResults], max_regression: float | None = None
) -> Comparison:
    """Returns this run over `earlier` ones of the same workload and model.

    Questions are paired with the first.

    With `max_regression` (0.05: 5 %) the comparison is a gate: nothing judged is an error.
    """
    old = earlier[0]
    allowed = max_regression or 0.0
    levels = [level.label for level in new.concurrency]
    judged = 1
    if len(earlier) >= MIN_EARLIER_RUNS:
        judged += len(levels)
    # a regression is beyond one of the two ends of an interval
    confidence = 1 - 2 * FALSE_ALARM_RATE / judged
    candidates = [acceptance_figure(new, earlier, confidence, allowed)]
    for label in levels:
        candidates.append(speed_figure(new, earlier, label, confidence, allowed))
    figures = [figure for figure in candidates if figure]
    gate = max_regression is not None
    problems = not_judged(figures, [new, *earlier], "error" if gate else "warning")
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
    between = f"({figure.low:.3f} to {figure.high:.3f})"
    message = f"{figure.figure} is {figure.ratio:.3f} times the earlier run's {between}"
    message += f", over {figure.units} {figure.paired_by}s"
    if allowed:
        message += f", more than the {100 * allowed:g} % allowed"
    return Problem("TS-BENCH-REGRESSION", "error", "`compare`", message)


def refuse_different(workload: StatedWorkload, earlier: Mapping[str, BenchResults]) -> None:
    """Raises UsageError, before anything is sent, if an earlier run had another workload.

    The ratio of the two would mix that difference with the change under test. `earlier`: by the
    option that names it.
    """
    for option, run in earlier.items():
        sides = (run.workload, workload)
        before, now = ({key: getattr(side, key) for key in WORKLOAD_KEYS} for side in sides)
        changes = differences(before, now)
        if changes:
            message = f"{option}: the run of {run.url} differs from this one: {'; '.join(changes)}"
            raise UsageError(message, "give the same data set and options in both runs")


def acceptance_figure(
    new: BenchResults, earlier: Sequence[BenchResults], confidence: float, allowed: float
) -> ComparedFigure | None:
    """Compares tokens per step, paired by the questions that both runs answered.

    If the servers report only totals, the run is compared with several earlier ones. Degenerate
    output is not judged. None if the run or the first earlier one reports no acceptance.
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
    sound = not any(run.degenerate() for run in runs)
    return _tested(ACCEPTANCE, test, paired_by, _verdict(test, allowed, sound))


def _step_units(run: BenchResults) -> dict[str, tuple[int, int]]:
    """(tokens, steps) by question."""
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
    """Compares output tokens per second of one level, the mean of its rounds, with earlier runs.

    With too few earlier runs, the ratio to the first has no interval. None if either has no speed.
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
    sound = all(level is not None and not level.degeneration.degenerate for level in levels)
    return _tested(name, test, "run", _verdict(test, allowed, sound))


def _untested(name: str, values: Sequence[float]) -> ComparedFigure:
    """`values`: of this run and the first earlier one."""
    new, old = values[:2]
    return ComparedFigure(figure=name, ratio=round(new / old, 4))


def _tested(name: str, test: Ratio, paired_by: str, verdict: str) -> ComparedFigure:
    return ComparedFigure(
        figure=name,
        ratio=test.value,
        low=test.low,
        high=test.high,
        units=test.units,
        paired_by=paired_by,
        verdict=verdict,
    )


def _verdict(test: Ratio, allowed: float, sound: bool) -> str:
    """`sound`: whether no output is degenerate."""
    if not sound:
        return NOT_JUDGED
    if test.high < 1 - allowed:
        return REGRESSION
    return IMPROVEMENT if test.low > 1 else NO_CHANGE


def not_judged(
    figures: Sequence[ComparedFigure], runs: Sequence[BenchResults], severity: Severity
) -> list[Problem]:
    """Says why acceptance is not judged.

    [] if it is, or if no run reports it and a speed is judged.
    """
    judged = {figure.figure for figure in figures if figure.verdict != NOT_JUDGED}
    reports = [run.acceptance_length is not None for run in runs]
    if ACCEPTANCE in judged or (judged and not any(reports)):
        return []
    if any(run.degenerate() for run in runs):
        reason = "the output of a run is degenerate, and loops flatter every drafter"
        remedy = (
            "read answers.jsonl; measure at the temperature "
            "that users have, with the right chat template"
        )
    elif any(reports) and not all(reports):
        run = "an earlier" if reports[0] else "this"
        reason = f"{run} run reports no acceptance, and the other does"
        remedy = "see whether the server has loaded its head, and what it says of its speculation"
    else:
        reason = f"totals and speed are judged from {MIN_EARLIER_RUNS} earlier runs on"
        remedy = f"repeat `compare` for {MIN_EARLIER_RUNS} earlier runs, "
        remedy += "or measure both servers in one run: bench A=URL B=URL"
    message = f"acceptance is not judged: {reason}"
    return [Problem("TS-BENCH-NOT-COMPARED", severity, "`compare`", message, remedy)]
