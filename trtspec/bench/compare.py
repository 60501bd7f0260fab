"""Two runs of `bench` side by side, paired by question: what changed, how sure that is, and what forbids comparing.

A regression is called only where the whole interval lies below 1 - `max_regression`. What is judged is judged together:
each interval is widened (Bonferroni) so that two equal runs raise an alarm in at most 5 % of comparisons. Acceptance
over all questions is judged wherever there is an interval for it; where not, that is said. Speed differs from run to
run of one server, for reasons that all answers of a run share, so it is judged only where LEAST_RUNS earlier runs show
by how much. Categories and times to the first token are shown.

Acceptance is compared question by question. A server that only keeps counters (vLLM) tells what each category accepted;
both runs asked the same questions in it, so categories are pairs as questions are, from LEAST_GROUPS of them on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trtspec.bench.acceptance import (
    LEAST_RUNS,
    RatioTest,
    acceptance_length,
    independent_ratio,
    next_ratio,
    paired_ratio,
    pairs_needed,
    per_question,
)
from trtspec.bench.results import BenchResults, ComparedFigure, Comparison, QuestionSpeed
from trtspec.client.servers import FROM_COUNTERS, TurnCounts
from trtspec.errors import Problem

SAME = (
    "dataset_sha256", "questions_sha256", "under", "temperature", "max_tokens", "api", "thinking", "isl", "osl",
    "extra_body",
)  # fmt: skip
MODEL = "server.model"
LEAST_GROUPS = 4  # t is within 2 % of Student's
QUESTION, GROUP, RUN = "question", "group", "run"
ALARMS = 0.05  # share of comparisons of equal runs that may raise one
SOUGHT = 0.05
ROUNDS = 3  # from which rounds are compared instead of questions: they hold a machine's moods within a run
REGRESSION, IMPROVEMENT, NONE, UNJUDGED = "regression", "improvement", "no change found", "not judged"
LOWER = "lower, not judged"
ACCEPTANCE, SPEED = "acceptance, ", "tokens/s at "
ALL = "all"


def compare(
    new: BenchResults, old: BenchResults, max_regression: float | None = None, others: Sequence[BenchResults] = ()
) -> Comparison:
    """Ratios new / old with intervals, and the workload keys that differ.

    `others` are further earlier runs of the same setup: with LEAST_RUNS in all, speed is judged against their mean.
    With `max_regression` (0.05: 5 %) the comparison is a gate: acceptance that cannot be judged is an error too.
    Nothing is judged of degenerate output, which says nothing of a drafter."""
    earlier = [old, *others]
    differing = differences(new, earlier)
    everywhere = set.intersection(*({level.label for level in run.concurrency} for run in earlier))
    levels = [level.label for level in new.concurrency if level.label in everywhere]
    confidence = 1 - ALARMS / (1 + (len(earlier) >= LEAST_RUNS) * len(levels))
    allowed, gate = max_regression or 0.0, max_regression is not None
    overall = overall_ratio(new, old, confidence)
    bad = [degenerate_parts(run) for run in (new, *earlier)]
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
    return Comparison(
        old={"name": old.name, "url": old.url, "server": old.server.to_dict()},
        differs=differing,
        max_regression=allowed,
        confidence=round(confidence, 5),
        figures=found,
        problems=problems,
        runs=len(earlier),
    )


def differences(new: BenchResults, earlier: Sequence[BenchResults]) -> list[str]:
    """What the runs were not asked alike."""
    differing = [key for key in SAME if any(new.workload.get(key) != run.workload.get(key) for run in earlier)]
    if any(run.server.model != new.server.model for run in earlier):
        differing.append(MODEL)
    if new.workload.get("temperature") and any(_drafts_otherwise(new, run) for run in earlier):
        differing.append("draft_sampling")
    return differing


@dataclass(frozen=True)
class AcceptanceRatio:
    """`plain`: length over length, None where a run tells none. Without a `test`, `reason` says why and `remedy` what
    would make one; `paired_by` names the units of the test."""

    plain: float | None
    test: RatioTest | None = None
    paired_by: str = QUESTION
    reason: str = ""
    remedy: str = "ask the same questions in both runs"


def overall_ratio(new: BenchResults, old: BenchResults, confidence: float) -> AcceptanceRatio | None:
    """Over all that both runs asked; None where neither tells of acceptance."""
    lengths = [length_of(run) for run in (new, old)]
    if lengths == [None, None]:
        return None
    if None in lengths:
        silent, other = ("this run", "the earlier one") if lengths[0] is None else ("the earlier run", "this one")
        remedy = "look at what the server says of its speculation, and whether its head is loaded"
        return AcceptanceRatio(None, reason=f"{silent} tells nothing of acceptance, and {other} does", remedy=remedy)
    if all(by_question(run.turns_detail) for run in (new, old)):
        return question_ratio(new.turns_detail, old.turns_detail, confidence)
    plain = lengths[0] / lengths[1]  # type: ignore[operator]
    reason = (
        f"a server tells only of all answers together, and fewer than {LEAST_GROUPS} categories were counted apart in "
        "both runs"
    )
    remedy = (
        f"ask {LEAST_GROUPS} categories or more; of SGLang, which keeps one mean since its start, compare the means of "
        "two fresh servers by eye"
    )
    first, second = category_counts(new), category_counts(old)
    common = [name for name in first if name in second]
    if new.workload.get("questions") != old.workload.get("questions") or len(common) < LEAST_GROUPS:
        return AcceptanceRatio(plain, reason=reason, remedy=remedy)
    return AcceptanceRatio(plain, _paired(first, second, common, confidence), GROUP, reason, remedy)


def category_ratio(new: BenchResults, old: BenchResults, category: str, confidence: float) -> AcceptanceRatio:
    """Of one category: over its questions, else the ratio alone."""
    turns = [[turn for turn in run.turns_detail if turn.category == category] for run in (new, old)]
    if all(by_question(side) for side in turns):
        return question_ratio(turns[0], turns[1], confidence)
    groups = [category_counts(run).get(category) for run in (new, old)]
    known = [acceptance_length(*group) if group else None for group in groups]
    return AcceptanceRatio(known[0] / known[1] if known[0] and known[1] else None)


def by_question(turns: Sequence[TurnCounts]) -> dict[str, list[int]]:
    """`per_question`, nothing where the counters of a part stand for its answers."""
    return {} if any(turn.source == FROM_COUNTERS for turn in turns) else per_question(turns)


def question_ratio(new: Sequence[TurnCounts], old: Sequence[TurnCounts], confidence: float) -> AcceptanceRatio:
    """Tokens out of steps over steps, of the questions that both answered."""
    first, second = by_question(new), by_question(old)
    common = [question for question in first if question in second]
    lengths = [
        acceptance_length(sum(t.verifications for t in side), sum(t.accepted for t in side)) for side in (new, old)
    ]
    plain = lengths[0] / lengths[1] if lengths[0] and lengths[1] else None
    reason = f"{len(common)} questions in common, and an interval takes 3"
    return AcceptanceRatio(plain, _paired(first, second, common, confidence), QUESTION, reason)


def _paired(
    new: Mapping[str, Sequence[int]], old: Mapping[str, Sequence[int]], common: Sequence[str], confidence: float
) -> RatioTest | None:
    """Tokens out of steps over steps, of the units in `common`, each with (steps, accepted, ...) on both sides."""
    sides = [([side[q][0] + side[q][1] for q in common], [side[q][0] for q in common]) for side in (new, old)]
    return paired_ratio(sides[0], sides[1], confidence) if common else None


def category_counts(run: BenchResults) -> dict[str, tuple[int, int]]:
    """(steps, accepted) by category, where the server told of a category's own answers."""
    groups = run.categories.items()
    return {name: (group.steps, group.accepted) for name, group in groups if group.steps and group.accepted is not None}


def length_of(run: BenchResults) -> float | None:
    """Acceptance length over all answers: from their counts, or as the results state it."""
    turns = run.turns_detail
    counted = acceptance_length(sum(t.verifications for t in turns), sum(t.accepted for t in turns))
    return counted or run.acceptance_length


def compared_figures(
    new: BenchResults,
    earlier: Sequence[BenchResults],
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


def unjudged(figure: ComparedFigure) -> ComparedFigure:
    return replace(figure, judged=False, verdict=UNJUDGED)


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


def degenerate_parts(run: BenchResults) -> set[str]:
    """The categories and levels of a run whose output is noise or loops, and ALL."""
    found = {name for name, quality in run.quality.items() if quality.degenerate}
    found |= {level.label for level in run.concurrency if level.degeneration.degenerate}
    return found | ({ALL} if run.degeneration.degenerate else found & {ALL})


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


def _drafts_otherwise(new: BenchResults, old: BenchResults) -> bool:
    """Whether the servers say that they choose the drafts of sampled requests in different ways."""
    modes = (new.server.draft_sampling, old.server.draft_sampling)
    return None not in modes and modes[0] != modes[1]


def acceptance_figure(name: str, found: AcceptanceRatio | None, allowed: float) -> ComparedFigure | None:
    """Of all questions, which is judged where there is an interval, or of one category."""
    if found is None:
        return None
    return _figure(f"{ACCEPTANCE}{name}", found.test, found.plain, found.paired_by, name == ALL, allowed)


def speed_figure(
    new: BenchResults, old: BenchResults, label: str, confidence: float, allowed: float
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
    new: BenchResults, earlier: Sequence[BenchResults], label: str, confidence: float, allowed: float
) -> ComparedFigure | None:
    """Output tokens per second of one level over the mean of earlier runs, whose spread says how much equal runs
    differ: the means of the rounds, or where a round has no rate the questions that all runs answered."""
    runs = [new, *earlier]
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


def _rounds(run: BenchResults, label: str) -> Sequence[float | None]:
    return next(level.rounds for level in run.concurrency if level.label == label)


def first_token_figure(new: BenchResults, old: BenchResults, label: str, confidence: float) -> ComparedFigure | None:
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
    return replace(figure, verdict="slower, not judged" if slower else "faster, not judged")


def _speeds(run: BenchResults, label: str) -> dict[str, QuestionSpeed]:
    return {speed.question: speed for speed in run.questions_detail if speed.level == label and speed.seconds > 0}
