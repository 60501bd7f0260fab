"""How the acceptance of one run stands to that of earlier ones, with an interval where there is a sound one.

Servers that tell of each answer are compared question by question. Of one that only keeps counters (vLLM), what is
known is the sum over each part that was asked by itself. Both runs asked the same questions in a part, so parts are
pairs as questions are: the categories, or the rounds of all levels. Below LEAST_GROUPS of them the spread between
earlier runs says how much equal runs differ, and without those there is a ratio and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.bench.acceptance import (
    LEAST_RUNS,
    AcceptanceSummary,
    RatioTest,
    TurnCounts,
    acceptance_length,
    next_ratio,
    paired_ratio,
    per_question,
)
from trtspec.bench.adapters import FROM_COUNTERS, FROM_SGLANG, is_count
from trtspec.bench.results import BenchResults, ComparedRun

LEAST_PAIRS = 3
LEAST_GROUPS = LEAST_RUNS  # the same few: t is within 2 % of Student's
QUESTION, GROUP, RUN = "question", "group", "run"
ANY_ROUNDS = (
    f"ask {LEAST_GROUPS} categories or more, give both runs --rounds {LEAST_GROUPS}, or repeat --compare for "
    f"{LEAST_RUNS} earlier runs"
)
MEAN_ALONE = (
    "an SGLang server keeps one mean over all requests since its start, and nothing says how far equal runs differ"
)
COUNT_STEPS = (
    "restart SGLang before each run, so that its mean is of that run alone, and compare the means by eye; a verdict "
    "takes a server that counts steps, such as trtllm-serve or vLLM"
)
Counts = tuple[int, int]
Either = BenchResults | ComparedRun


@dataclass(frozen=True)
class AcceptanceRatio:
    """`plain`: length over length, None where a run tells none. Without a `test`, `reason` says why and `remedy` what
    would make one; `paired_by` names the units of the test."""

    plain: float | None
    test: RatioTest | None = None
    paired_by: str = QUESTION
    reason: str = ""
    remedy: str = "ask the same questions in both runs"


def overall_ratio(new: BenchResults, earlier: Sequence[ComparedRun], confidence: float) -> AcceptanceRatio | None:
    """Over all questions that this run and the first of the `earlier` ones have in common; None where neither tells of
    acceptance."""
    old = earlier[0]
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
    test = group_ratio(new, old, confidence)
    if test is not None:
        return AcceptanceRatio(plain, test, GROUP)
    if any(tells_a_mean(run) for run in (new, old)):
        return AcceptanceRatio(plain, reason=MEAN_ALONE, remedy=COUNT_STEPS)
    test = predicted_ratio(new, earlier, confidence)
    reason = (
        f"a server tells only of all answers together, and fewer than {LEAST_GROUPS} categories or rounds were counted "
        "apart in both runs"
    )
    return AcceptanceRatio(plain, test, RUN, reason, ANY_ROUNDS)


def category_ratio(new: BenchResults, old: ComparedRun, category: str, confidence: float) -> AcceptanceRatio:
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
    reason = f"{len(common)} questions in common, and an interval takes {LEAST_PAIRS}"
    return AcceptanceRatio(plain, paired(first, second, common, confidence), QUESTION, reason)


def group_ratio(new: BenchResults, old: ComparedRun, confidence: float) -> RatioTest | None:
    """Over the categories or the rounds of both, whichever are more. None below LEAST_GROUPS."""
    if new.workload.get("questions") != old.workload.get("questions"):
        return None  # a part of one run holds questions that the same part of the other does not
    kinds = [[category_counts(run) for run in (new, old)]]
    shapes = [[(level.label, len(level.rounds)) for level in run.concurrency] for run in (new, old)]
    if shapes[0] == shapes[1]:
        kinds.append([round_counts(run) for run in (new, old)])
    first, second = max(kinds, key=lambda sides: len(sides[0].keys() & sides[1].keys()))
    common = [name for name in first if name in second]
    return paired(first, second, common, confidence) if len(common) >= LEAST_GROUPS else None


def paired(
    new: Mapping[str, Sequence[int]], old: Mapping[str, Sequence[int]], common: Sequence[str], confidence: float
) -> RatioTest | None:
    """Tokens out of steps over steps, of the units in `common`, each with (steps, accepted, ...) on both sides."""
    sides = [([side[q][0] + side[q][1] for q in common], [side[q][0] for q in common]) for side in (new, old)]
    return paired_ratio(sides[0], sides[1], confidence) if common else None


def tells_a_mean(run: Either) -> bool:
    """Whether its acceptance is the running mean of SGLang: no part of the run has one of its own."""
    told = [vars(group) if isinstance(group, AcceptanceSummary) else group for group in run.categories.values()]
    return any(isinstance(group, dict) and group.get("source") == FROM_SGLANG for group in told)


def category_counts(run: Either) -> dict[str, Counts]:
    """(steps, accepted) by category, where the server told of a category's own answers."""
    found: dict[str, Counts] = {}
    for name, group in run.categories.items():
        told: Any = vars(group) if isinstance(group, AcceptanceSummary) else group
        steps, accepted = (told.get("steps"), told.get("accepted")) if isinstance(told, dict) else (None, None)
        if steps and accepted is not None and is_count(steps) and is_count(accepted):
            found[name] = (steps, accepted)
    return found


def round_counts(run: Either) -> dict[str, Counts]:
    """(steps, accepted) by round, of all levels together, where each was counted apart and in one piece."""
    numbers = {len(level.rounds) for level in run.concurrency}
    parts = sum(len(level.rounds) for level in run.concurrency)
    if len(numbers) != 1 or len(run.turns_detail) != parts or by_question(run.turns_detail):
        return {}
    rounds = numbers.pop()
    found = {}
    for number in range(rounds):
        part = run.turns_detail[number::rounds]  # they are in order of level, then round
        found[f"round {number + 1}"] = (sum(t.verifications for t in part), sum(t.accepted for t in part))
    return found


def predicted_ratio(new: BenchResults, earlier: Sequence[ComparedRun], confidence: float) -> RatioTest | None:
    """Of this run over the mean of LEAST_RUNS earlier ones or more, by the interval of one more run.

    Greedy runs may agree to the last token without that the next must. So a run is taken to differ from the others at
    least as the count of its steps would, were they independent: sd^2 = a (k - a) / steps is the most that the mean a
    of accepted drafts varies, with k drafted."""
    runs: list[Either] = [new, *earlier]
    lengths, errors = [length_of(run) for run in runs], [_counting_error(run) for run in runs]
    if None in lengths or None in errors:
        return None
    known = [length for length in lengths if length is not None]
    return next_ratio(known[0], known[1:], confidence, max(error for error in errors if error is not None))


def _counting_error(run: Either) -> float | None:
    """Standard deviation of the acceptance length over itself; None where drafts are not told of all answers."""
    steps, accepted = sum(t.verifications for t in run.turns_detail), sum(t.accepted for t in run.turns_detail)
    if not steps or any(turn.drafted is None for turn in run.turns_detail):
        return None
    mean, drafts = accepted / steps, sum(turn.drafted or 0 for turn in run.turns_detail) / steps
    return math.sqrt(max(0.0, mean * (drafts - mean)) / steps) / (1 + mean)


def length_of(run: Either) -> float | None:
    """Acceptance length over all answers: from their counts, or as the results state it."""
    turns = run.turns_detail
    counted = acceptance_length(sum(t.verifications for t in turns), sum(t.accepted for t in turns))
    return counted or run.acceptance_length
