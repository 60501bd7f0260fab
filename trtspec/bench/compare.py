"""Two runs of `bench` side by side, paired by question: what changed, how sure that is, and what forbids comparing.

A regression is called only where the whole interval lies below 1 - `max_regression`. What is judged is judged together:
each interval is widened (Bonferroni) so that two equal runs raise an alarm in at most 5 % of comparisons. Acceptance
over all questions is judged wherever there is an interval for it; where not, that is said. Speed differs from run to
run of one server, for reasons that all answers of a run share, so it is judged only where LEAST_RUNS earlier runs show
by how much. Categories and times to the first token are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtspec.bench.acceptance import (
    LEAST_RUNS,
    RatioTest,
    independent_ratio,
    next_ratio,
    paired_ratio,
    pairs_needed,
)
from trtspec.bench.acceptance_ratio import GROUP, RUN, AcceptanceRatio, Either, category_ratio, overall_ratio
from trtspec.bench.results import (
    BenchResults,
    ComparedFigure,
    ComparedRun,
    Comparison,
    QuestionSpeed,
    RatioSpread,
    SpeedRatio,
)
from trtspec.bench.text_quality import OutputQuality
from trtspec.errors import Problem

SAME = ("dataset_sha256", "temperature", "max_tokens", "api", "thinking", "isl", "osl", "extra_body")
SINCE = ("questions_sha256", "under")  # as SAME; results of earlier releases do not say these
MODEL = "server.model"
ALARMS = 0.05  # share of comparisons of equal runs that may raise one
SOUGHT = 0.05
ROUNDS = 3  # from which rounds are compared instead of questions: they hold a machine's moods within a run
REGRESSION, IMPROVEMENT, NONE, UNJUDGED = "regression", "improvement", "no change found", "not judged"
LOWER = "lower, not judged"
ACCEPTANCE, SPEED = "acceptance, ", "tokens/s at "
ALL = "all"


def compare(
    new: BenchResults, old: ComparedRun, max_regression: float | None = None, others: Sequence[ComparedRun] = ()
) -> Comparison:
    """Ratios new / old with intervals, and the workload keys that differ.

    `others` are further earlier runs of the same setup: with LEAST_RUNS in all, speed is judged against their mean.
    With `max_regression` (0.05: 5 %) the comparison is a gate: acceptance that cannot be judged is an error too.
    Nothing is judged of degenerate output, which says nothing of a drafter."""
    earlier = [old, *others]
    differing, unknown = differences(new, earlier)
    everywhere = set.intersection(*({level.label for level in run.concurrency} for run in earlier))
    levels = [level.label for level in new.concurrency if level.label in everywhere]
    confidence = 1 - ALARMS / (1 + (len(earlier) >= LEAST_RUNS) * len(levels))
    allowed, gate = max_regression or 0.0, max_regression is not None
    overall = overall_ratio(new, earlier, confidence)
    runs: list[Either] = [new, *earlier]
    bad = [degenerate_parts(run) for run in runs]
    unsound = set.union(*bad)
    found = [
        unjudged(figure) if differing or {part, ALL} & unsound else figure
        for part, figure in compared_figures(new, earlier, overall, levels, (confidence, allowed))
    ]
    problems = comparison_problems(found, differing, allowed, gate)
    if not differing:
        wrong = ["this run"] if bad[0] & {ALL, *levels} else []
        wrong += ["an earlier run"] if set.union(*bad[1:]) & {ALL, *levels} else []
        problems += not_judged(overall, wrong, gate) or nothing_judged(found, gate)
        problems += not_known(unknown)
    return Comparison(
        old={"name": old.name, "url": old.url, "server": old.server},
        differs=differing,
        max_regression=allowed,
        confidence=round(confidence, 5),
        figures=found,
        problems=problems,
        runs=len(earlier),
        acceptance={
            figure.figure.removeprefix(ACCEPTANCE): RatioSpread(figure.ratio, figure.low, figure.high)
            for figure in found
            if figure.figure.startswith(ACCEPTANCE)
        },
        speed=speed_ratios(new, old),
        unknown=unknown,
    )


def differences(new: BenchResults, earlier: Sequence[ComparedRun]) -> tuple[list[str], list[str]]:
    """(what the runs were not asked alike, what some earlier run does not say)."""
    differing = [key for key in SAME if any(new.workload.get(key) != run.workload.get(key) for run in earlier)]
    unknown = [key for key in SINCE if any(key not in run.workload for run in earlier)]
    for key in SINCE:
        if any(key in run.workload and new.workload.get(key) != run.workload[key] for run in earlier):
            differing.append(key)
    models = [run.server.get("model") for run in earlier]
    if any(model not in (None, new.server.model) for model in models):
        differing.append(MODEL)
    if None in models:
        unknown.append(MODEL)
    if new.workload.get("temperature") and any(_drafts_otherwise(new, run) for run in earlier):
        differing.append("draft_sampling")
    return differing, unknown


def not_known(unknown: Sequence[str]) -> list[Problem]:
    if not unknown:
        return []
    message = (
        f"an earlier run's results do not say {', '.join(unknown)}: whether both runs were alike in it is not known"
    )
    remedy = "measure the earlier setup again with this release"
    return [Problem("TS-BENCH-UNKNOWN-WORKLOAD", "info", "--compare", message, remedy)]


def compared_figures(
    new: BenchResults,
    earlier: Sequence[ComparedRun],
    overall: AcceptanceRatio | None,
    levels: Sequence[str],
    limits: tuple[float, float],
) -> list[tuple[str, ComparedFigure]]:
    """Every figure that both runs have, with what it is over: ALL, a level or a category. `limits`: the confidence of
    each interval, and the fall that is allowed."""
    old, (confidence, allowed) = earlier[0], limits
    found = [(ALL, acceptance_figure(ALL, overall, allowed))]
    for label in levels:
        if len(earlier) >= LEAST_RUNS:
            found.append((label, predicted_speed_figure(new, earlier, label, confidence, allowed)))
        else:
            found.append((label, speed_figure(new, old, label, confidence, allowed)))
    found += [(label, first_token_figure(new, old, label, confidence)) for label in levels]
    for name in new.categories:
        if name in old.categories and name != ALL:
            found.append((name, acceptance_figure(name, category_ratio(new, old, name, confidence), allowed)))
    return [(part, figure) for part, figure in found if figure]


def speed_ratios(new: BenchResults, old: ComparedRun) -> list[SpeedRatio]:
    """Per concurrency that both have, where every round has a rate."""
    before = {level.concurrency: level.rounds for level in old.concurrency if level.rate is None}
    found = []
    for level in new.concurrency:
        a, b = level.rounds, [rate for rate in before.get(level.concurrency, []) if rate]
        if level.rate is not None or not a or not all(a) or not b or len(b) != len(before[level.concurrency]):
            continue
        ratio = (sum(a) / len(a)) / (sum(b) / len(b))
        low, high, rounds = min(a) / max(b), max(a) / min(b), (len(a), len(b))
        found.append(SpeedRatio(level.concurrency, round(ratio, 4), round(low, 4), round(high, 4), rounds))
    return found


def unjudged(figure: ComparedFigure) -> ComparedFigure:
    return ComparedFigure(**{**vars(figure), "judged": False, "verdict": UNJUDGED})


def comparison_problems(
    figures: Sequence[ComparedFigure], differing: Sequence[str], allowed: float, gate: bool
) -> list[Problem]:
    found = []
    if differing:
        message = (
            f"the two runs differ in {', '.join(differing)}: the ratios mix that difference with the change under test"
        )
        severity = "error" if gate else "warning"
        remedy = "run both with the same dataset and options, of a model served by the same name"
        found.append(Problem("TS-BENCH-DIFFERENT-WORKLOAD", severity, "--compare", message, remedy))  # type: ignore[arg-type]
    lower = [figure for figure in figures if figure.verdict == LOWER and figure.figure.startswith(SPEED)]
    if lower and not differing:
        shares = ", ".join(f"{figure.figure} {100 * (figure.ratio - 1):+.1f} %" for figure in lower)
        message = (
            f"lower than in the earlier run, and not judged: {shares}; two runs of one server differ too, and how much "
            f"{LEAST_RUNS} earlier runs show"
        )
        remedy = (
            "repeat --compare for more earlier runs, or measure both servers in turns in one run: bench A=URL B=URL"
        )
        found.append(Problem("TS-BENCH-SPEED-NOT-JUDGED", "warning", "--compare", message, remedy))
    for figure in figures:
        if figure.verdict == REGRESSION:
            message = (
                f"{figure.figure} is {figure.ratio:.3f} times the earlier run's [{figure.low:.3f}, {figure.high:.3f}], "
                f"over {figure.pairs} {figure.paired_by}s"
            )
            message += f", more than the {100 * allowed:g} % allowed" if allowed else ""
            remedy = "look for what changed between the runs; repeat both with more questions or rounds"
            found.append(Problem("TS-BENCH-REGRESSION", "error", "--compare", message, remedy))
    weak = [figure for figure in figures if figure.judged and (figure.finds or 0) > SOUGHT]
    if weak and not differing:
        worst = max(weak, key=lambda figure: figure.finds or 0)
        message = f"the comparison finds a fall of {worst.figure} only from {100 * (worst.finds or 0):.0f} % on"
        if worst.pairs_for_5_percent:
            message += f": {100 * SOUGHT:.0f} % need about {worst.pairs_for_5_percent} {worst.paired_by}s"
        remedy = "ask more questions; for speed, longer runs on a quieter machine"
        found.append(Problem("TS-BENCH-WEAK-COMPARISON", "info", "--compare", message, remedy))
    return found


def not_judged(overall: AcceptanceRatio | None, degenerate: Sequence[str], gate: bool) -> list[Problem]:
    """That acceptance, or anything of the runs that `degenerate` names, is not judged: never silently."""
    if degenerate:
        severity = "error" if gate else "warning"
        message = (
            f"figures of degenerate output are not judged ({' and '.join(degenerate)}): loops flatter every drafter"
        )
        remedy = "read answers.jsonl; measure at the temperature that users have, with the right chat template"
    elif overall is None or overall.test:
        return []
    else:
        lower = overall.plain is None or overall.plain < 1
        severity = "error" if gate else "warning" if lower else "info"
        shown = "" if overall.plain is None else f", {overall.plain:.3f} times the earlier run's,"
        message, remedy = f"acceptance{shown} is not judged: {overall.reason}", overall.remedy
    return [Problem("TS-BENCH-NOT-COMPARED", severity, "--compare", message, remedy)]  # type: ignore[arg-type]


def nothing_judged(figures: Sequence[ComparedFigure], gate: bool) -> list[Problem]:
    """An error where a gate has nothing to go by."""
    if not gate or any(figure.judged for figure in figures):
        return []
    message = f"no run tells of acceptance, and speed takes {LEAST_RUNS} earlier runs that asked at the same loads"
    remedy = f"repeat --compare for {LEAST_RUNS} earlier runs, or compare a server that tells of its speculation"
    return [Problem("TS-BENCH-NOT-COMPARED", "error", "--compare", message, remedy)]


def degenerate_parts(run: Either) -> set[str]:
    """The categories and levels of a run whose output is noise or loops, and ALL; results of earlier releases may not
    say so."""

    def bad(quality: OutputQuality | dict[str, Any] | None) -> bool:
        if isinstance(quality, dict):
            return quality.get("degenerate") is True
        return isinstance(quality, OutputQuality) and quality.degenerate

    found = {name for name, quality in run.quality.items() if bad(quality)}
    found |= {level.label for level in run.concurrency if bad(level.degeneration)}
    return found | ({ALL} if bad(run.degeneration) else found & {ALL})


def _figure(
    name: str, test: RatioTest | None, plain: float | None, paired_by: str, judged: bool, allowed: float
) -> ComparedFigure | None:
    """The record of a test, or of a ratio alone where there is too little for one."""
    if test is None:
        if plain is None:
            return None
        return ComparedFigure(
            figure=name, ratio=round(plain, 4), low=None, high=None, pairs=0, paired_by=paired_by, judged=False,
            verdict=UNJUDGED,
        )  # fmt: skip
    verdict = NONE
    if test.high < 1 - allowed:
        verdict = REGRESSION
    elif test.low > 1:
        verdict = IMPROVEMENT
    return ComparedFigure(
        figure=name,
        ratio=round(test.ratio, 4),
        low=round(test.low, 4),
        high=round(test.high, 4),
        pairs=test.pairs,
        paired_by=paired_by,
        judged=judged,
        verdict=verdict if judged or verdict != REGRESSION else LOWER,
        finds=None if test.finds is None else round(test.finds, 4),
        pairs_for_5_percent=_needed(test, paired_by),
    )


def _needed(test: RatioTest, paired_by: str) -> int | None:
    """More earlier runs do not make the next one less different, and more groups of the same questions tell no more:
    there is no number of them."""
    if paired_by in (RUN, GROUP):
        return None
    return pairs_needed(test, SOUGHT) if test.high > test.ratio else 3


def _drafts_otherwise(new: BenchResults, old: ComparedRun) -> bool:
    """Whether the servers say that they choose the drafts of sampled requests in different ways."""
    modes = (new.server.draft_sampling, old.server.get("draft_sampling"))
    return None not in modes and modes[0] != modes[1]


def acceptance_figure(name: str, found: AcceptanceRatio | None, allowed: float) -> ComparedFigure | None:
    """Of all questions, which is judged where there is an interval, or of one category."""
    if found is None:
        return None
    return _figure(f"{ACCEPTANCE}{name}", found.test, found.plain, found.paired_by, name == ALL, allowed)


def speed_figure(
    new: BenchResults, old: ComparedRun, label: str, confidence: float, allowed: float
) -> ComparedFigure | None:
    """Output tokens per second of one level, not judged: round by round where both runs have ROUNDS, else question by
    question. The interval holds what differs within a run, not from run to run."""
    known = [[rate for rate in _rounds(run, label) if rate] for run in (new, old)]
    if min(map(len, known)) >= ROUNDS:
        test = independent_ratio(known[0], known[1], confidence)
        return _figure(f"{SPEED}{label}", test, None, "round", False, allowed)
    first, second = (_speeds(run, label) for run in (new, old))
    common = [question for question in first if question in second]
    pairs = [([side[q].tokens for q in common], [side[q].seconds for q in common]) for side in (first, second)]
    test = paired_ratio(pairs[0], pairs[1], confidence) if common else None
    whole = all(all(_rounds(run, label)) for run in (new, old)) and all(known)
    plain = (sum(known[0]) / len(known[0])) / (sum(known[1]) / len(known[1])) if whole else None
    return _figure(f"{SPEED}{label}", test, plain, "question", False, allowed)


def predicted_speed_figure(
    new: BenchResults, earlier: Sequence[ComparedRun], label: str, confidence: float, allowed: float
) -> ComparedFigure | None:
    """Output tokens per second of one level over the mean of earlier runs, whose spread says how much equal runs
    differ: the means of the rounds, or where a round has no rate the questions that all runs answered."""
    runs: list[Either] = [new, *earlier]
    rounds = [_rounds(run, label) for run in runs]
    rates: list[float] = []
    if all(some and all(some) for some in rounds):
        rates = [sum(filter(None, some)) / len(some) for some in rounds]
    else:
        sides = [_speeds(run, label) for run in runs]
        common = [question for question in sides[0] if all(question in side for side in sides)]
        if common:
            rates = [sum(side[q].tokens for q in common) / sum(side[q].seconds for q in common) for side in sides]
    test = next_ratio(rates[0], rates[1:], confidence) if rates else None
    return _figure(f"{SPEED}{label}", test, None, RUN, test is not None, allowed)


def _rounds(run: Either, label: str) -> Sequence[float | None]:
    return next(level.rounds for level in run.concurrency if level.label == label)


def first_token_figure(new: BenchResults, old: ComparedRun, label: str, confidence: float) -> ComparedFigure | None:
    """Time to the first token of the questions that both answered; higher is slower, so it is shown and not judged."""
    first, second = (_speeds(run, label) for run in (new, old))
    common = [q for q in first if q in second and first[q].ttft_s and second[q].ttft_s]
    ones = [1.0] * len(common)
    pairs = [([side[q].ttft_s or 0.0 for q in common], ones) for side in (first, second)]
    test = paired_ratio(pairs[0], pairs[1], confidence) if common else None
    figure = _figure(f"time to first token at {label}", test, None, "question", False, 0.0)
    if figure is None or figure.verdict == NONE:
        return figure
    slower = figure.low is not None and figure.low > 1
    return ComparedFigure(**{**vars(figure), "verdict": "slower, not judged" if slower else "faster, not judged"})


def _speeds(run: Either, label: str) -> dict[str, QuestionSpeed]:
    return {speed.question: speed for speed in run.questions_detail if speed.level == label and speed.seconds > 0}
