"""Two runs of `bench` side by side: what changed, and how sure that is.

Acceptance over all questions is paired by question. Speed differs from run to run of one server for reasons that all
answers of a run share, and some servers report only totals: there LEAST_RUNS earlier runs give a prediction interval
for one more. A regression is an interval that lies wholly below 1 - `max_regression`. The judged figures share the
chance of a false alarm (Bonferroni): two equal runs raise one in at most 5 % of comparisons. The rest is only shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtspec.bench.results import BenchResults, ComparedFigure, Comparison, Workload
from trtspec.bench.statistics import LEAST_RUNS, Ratio, next_ratio, paired_ratio, per_question
from trtspec.checkpoint.writer import differences
from trtspec.errors import Problem, UsageError

SAME = ("dataset_sha256", "temperature", "max_tokens", "thinking", "system", "extra_body")
ALARMS = 0.05  # share of comparisons of equal runs that may raise one
REGRESSION, IMPROVEMENT, NO_CHANGE, NOT_JUDGED = (
    "regression",
    "improvement",
    "no change found",
    "not judged",
)
RUN, ACCEPTANCE = "run", "acceptance"


def refuse_different(workload: Workload, earlier: Mapping[str, BenchResults]) -> None:
    """Raises UsageError, before anything is asked, if an earlier run was asked something else: the ratio of the two
    would mix that difference with the change under test. `earlier`: by the option that names it."""
    for option, run in earlier.items():
        before, now = ({key: getattr(one, key) for key in SAME} for one in (run.workload, workload))
        if found := differences(before, now):
            message = f"{option}: the run of {run.url} differs from this one: {'; '.join(found)}"
            raise UsageError(message, "give the same data set and options in both runs")


def compare(
    new: BenchResults, earlier: Sequence[BenchResults], max_regression: float | None = None
) -> Comparison:
    """This run over `earlier` ones of the same workload and model; the first of them is the one whose questions are
    paired. With `max_regression` (0.05: 5 %) the comparison is a gate: nothing judged is an error."""
    old, allowed = earlier[0], max_regression or 0.0
    levels = [level.label for level in new.concurrency]
    confidence = 1 - 2 * ALARMS / (
        1 + (len(earlier) >= LEAST_RUNS) * len(levels)
    )  # one of its ends is a regression
    found = [acceptance_figure(new, earlier, confidence, allowed)]
    found += [speed_figure(new, earlier, label, confidence, allowed) for label in levels]
    figures = [figure for figure in found if figure]
    problems = not_judged(figures, [new, *earlier], max_regression is not None)
    for figure in figures:
        if figure.verdict == REGRESSION:
            message = (
                f"{figure.figure} is {figure.ratio:.3f} times the earlier run's ({figure.low:.3f} to {figure.high:.3f})"
                f", over {figure.units} {figure.paired_by}s"
            )
            message += f", more than the {100 * allowed:g} % allowed" if allowed else ""
            problems.append(Problem("TS-BENCH-REGRESSION", "error", "`compare`", message))
    return Comparison(
        old={"name": old.name, "url": old.url},
        runs=len(earlier),
        max_regression=allowed,
        confidence=round(confidence, 5),
        figures=figures,
        problems=problems,
    )


def acceptance_figure(
    new: BenchResults, earlier: Sequence[BenchResults], confidence: float, allowed: float
) -> ComparedFigure | None:
    """Tokens per step, paired by the questions that both answered, or where answers were counted together against
    several runs. None if a run does not report it. Degenerate output is shown alone."""
    runs = (new, *earlier)
    lengths = [run.acceptance_length for run in runs]
    if None in lengths[:2]:
        return None
    now, before = (
        {
            question: (steps + accepted, steps)
            for question, (steps, accepted, _) in per_question(run.turns_detail).items()
        }
        for run in runs[:2]
    )
    test, by = paired_ratio((now, before), confidence=confidence), "question"
    if test is None and None not in lengths:
        test, by = next_ratio(lengths[0], lengths[1:], confidence), RUN  # type: ignore[arg-type]
    judged = not any(run.degenerate() for run in runs)
    return _figure(ACCEPTANCE, test, lengths, allowed, judged, by)  # type: ignore[arg-type]


def speed_figure(
    new: BenchResults,
    earlier: Sequence[BenchResults],
    label: str,
    confidence: float,
    allowed: float,
) -> ComparedFigure | None:
    """Output tokens per second of one level: the mean of its rounds against earlier runs, or with too few of these the
    ratio to the first, without an interval."""
    found = [run.at(label) for run in (new, *earlier)]
    rates = [sum(at.rounds) / len(at.rounds) if at and at.rounds else 0.0 for at in found]
    if not all(rates[:2]):
        return None
    sound = not any(at is None or at.degeneration.degenerate for at in found)
    return _figure(
        f"tokens/s at {label}",
        next_ratio(rates[0], rates[1:], confidence),
        rates,
        allowed,
        sound,
        RUN,
    )


def _figure(
    name: str, test: Ratio | None, values: Sequence[float], allowed: float, judged: bool, by: str
) -> ComparedFigure:
    """`values`: of this run and the first earlier one, whose ratio is shown where nothing can be tested."""
    if test is None:
        return ComparedFigure(figure=name, ratio=round(values[0] / values[1], 4))
    verdict = REGRESSION if test.high < 1 - allowed else IMPROVEMENT if test.low > 1 else NO_CHANGE
    return ComparedFigure(
        figure=name, ratio=test.value, low=test.low, high=test.high, units=test.units, paired_by=by,
        verdict=verdict if judged else NOT_JUDGED,
    )  # fmt: skip


def not_judged(
    figures: Sequence[ComparedFigure], runs: Sequence[BenchResults], gate: bool
) -> list[Problem]:
    """That acceptance, or anything at all, is not judged, and why."""
    judged = {figure.figure for figure in figures if figure.verdict != NOT_JUDGED}
    reports = [run.acceptance_length is not None for run in runs]
    if ACCEPTANCE in judged or (judged and not any(reports)):
        return []
    remedy = f"repeat `compare` for {LEAST_RUNS} earlier runs, or measure both servers in one run: bench A=URL B=URL"
    if any(run.degenerate() for run in runs):
        reason = "the output of a run is degenerate, and loops flatter every drafter"
        remedy = "read answers.jsonl; measure at the temperature that users have, with the right chat template"
    elif any(reports) and not all(reports):
        reason = f"{'an earlier' if reports[0] else 'this'} run reports no acceptance, and the other does"
        remedy = "see whether the server has loaded its head, and what it says of its speculation"
    else:
        reason = f"totals and speed are judged from {LEAST_RUNS} earlier runs on"
    message, severity = f"acceptance is not judged: {reason}", "error" if gate else "warning"
    return [Problem("TS-BENCH-NOT-COMPARED", severity, "`compare`", message, remedy)]  # type: ignore[arg-type]
