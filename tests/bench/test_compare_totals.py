"""`--compare` of servers that tell only of all answers together, and of output that is degenerate: what is judged is
judged soundly, and what is not is never passed over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.bench.test_statistics import RUNS, in_a_mood, run_of
from trtspec.bench.acceptance import by_category
from trtspec.bench.compare import compare
from trtspec.bench.results import BenchResults
from trtspec.client.servers import FROM_COUNTERS, FROM_SGLANG, TurnCounts
from trtspec.client.text_quality import judge_run

NAMES = [str(place) for place in range(40)]
LOOPS, TEXT = judge_run(["loop " * 40] * 10), judge_run(["Every word of this sentence is its own."] * 10)


def total(turns: list[TurnCounts], name: str) -> TurnCounts:
    """What counters say of these answers."""
    tokens, steps, accepted, drafted = (
        sum(getattr(turn, key) or 0 for turn in turns) for key in ("tokens", "steps", "accepted", "drafted")
    )
    return TurnCounts(
        f"all of {name}", name, tokens, steps, accepted, drafted, None, FROM_COUNTERS, answers=len(turns),
        questions=len(turns),
    )  # fmt: skip


def of_counters(run: BenchResults, categories: int, rounds: int) -> BenchResults:
    """The run as vLLM would tell of it: counters around each round of each level, and around each category."""
    turns = run.turns_detail
    levels = [replace(level, rounds=[1.0] * rounds) for level in run.concurrency]
    parts = [total(turns[number::rounds], "all") for _ in levels for number in range(rounds)]
    groups = by_category([total(turns[number::categories], f"c{number}") for number in range(categories)])
    return replace(
        run, concurrency=levels, turns_detail=parts, categories=groups, workload={**run.workload, "questions": [40] * 3}
    )


def alarms(runs: int, fall: float, seed: int) -> int:
    """How many comparisons of runs with 8 categories raise an alarm about acceptance."""
    rng, raised = np.random.default_rng(seed), 0
    for _ in range(runs):
        ease = rng.normal(0, 0.35, len(NAMES))
        old, new = (of_counters(run_of(rng, NAMES, ease, lost), 8, 1) for lost in (0.0, fall))
        figure = compare(in_a_mood(rng, new, 0.05, 1), old).figures[0]
        assert figure.figure == "acceptance, all" and figure.judged and figure.paired_by == "group"
        raised += figure.verdict == "regression"
    return raised


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_equal_runs_of_counters_raise_an_alarm_in_at_most_5_percent() -> None:
    raised = alarms(RUNS, 0.0, 1)
    print(f"{raised} alarms in {RUNS} comparisons of equal runs")
    assert raised <= 0.05 * RUNS


def test_a_fall_that_counters_show_is_a_regression_and_equal_runs_are_none() -> None:
    assert alarms(9, 0.0, 2) <= 1 and alarms(6, 0.25, 3) == 6


def problems(new: BenchResults, earlier: list[BenchResults], gate: float | None) -> list[tuple[str, str, str]]:
    found = compare(new, earlier[0], gate, earlier[1:]).problems
    return [(p.code, p.severity, p.message) for p in found if p.code == "TS-BENCH-NOT-COMPARED"]


def test_acceptance_that_cannot_be_judged_is_an_error_of_a_gate_and_a_warning_without() -> None:
    rng = np.random.default_rng(5)
    ease = rng.normal(0, 0.35, len(NAMES))
    old = of_counters(run_of(rng, NAMES, ease, 0.0), 2, 1)
    new = of_counters(run_of(rng, NAMES, ease, 0.35), 2, 1)
    [(_, severity, message)] = problems(new, [old], 0.05)
    assert severity == "error" and "tells only of all answers together" in message
    assert [severity for _, severity, _ in problems(new, [old], None)] == ["warning"]
    exact, few = run_of(rng, NAMES, ease, 0.0), run_of(rng, NAMES[:2], ease[:2], 0.0)
    assert problems(exact, [exact], 0.05) == []
    [(_, severity, message)] = problems(few, [exact], 0.05)
    assert severity == "error" and "2 questions in common" in message


def test_the_running_mean_of_sglang_is_not_judged() -> None:
    rng = np.random.default_rng(9)
    run = run_of(rng, NAMES, rng.normal(0, 0.35, len(NAMES)), 0.0)
    mean = replace(total(run.turns_detail, "all"), source=FROM_SGLANG, drafted=None)
    new = replace(run, turns_detail=[], categories=by_category([mean]), acceptance_length=2.5)
    for earlier in (1, 4):
        found = compare(new, new, 0.05, [new] * (earlier - 1)).problems
        problem = next(p for p in found if p.code == "TS-BENCH-NOT-COMPARED")
        assert problem.severity == "error" and "SGLang, which keeps one mean since its start" in problem.remedy


@pytest.mark.parametrize("silent", ["this run", "the earlier run"])
def test_a_run_that_tells_nothing_of_acceptance_does_not_pass_beside_one_that_does(silent: str) -> None:
    rng = np.random.default_rng(6)
    run = run_of(rng, NAMES, rng.normal(0, 0.35, len(NAMES)), 0.0)
    mute = replace(run, turns_detail=[], acceptance_length=None, steps=None, accepted=None)
    new, old = (mute, run) if silent == "this run" else (run, mute)
    [(_, severity, message)] = problems(new, [old] * 4, 0.05)
    assert severity == "error" and message.startswith(f"acceptance is not judged: {silent} tells nothing")
    assert problems(mute, [mute] * 4, 0.05) == [], "speed is judged, and there is no acceptance"
    [(_, severity, message)] = problems(mute, [mute], 0.05)
    assert severity == "error" and "no run tells of acceptance" in message


@pytest.mark.parametrize("place", ["new", "old"])
def test_loops_are_no_improvement_and_their_repair_no_regression(place: str) -> None:
    rng = np.random.default_rng(7)
    ease = rng.normal(0, 0.35, len(NAMES))
    sound, loops = run_of(rng, NAMES, ease, 0.3), run_of(rng, NAMES, ease, 0.0)
    loops, sound = replace(loops, degeneration=LOOPS), replace(sound, degeneration=TEXT)
    new, old = (loops, sound) if place == "new" else (sound, loops)
    for gate, severity in ((0.05, "error"), (None, "warning")):
        found = compare(new, old, gate)
        assert not any(figure.judged for figure in found.figures)
        assert {figure.verdict for figure in found.figures} == {"not judged"}
        assert [(p.code, p.severity) for p in found.problems] == [("TS-BENCH-NOT-COMPARED", severity)]
        assert {"new": "this run", "old": "an earlier run"}[place] in found.problems[0].message


def test_loops_of_one_category_or_level_leave_the_others_judged() -> None:
    rng = np.random.default_rng(8)
    run = of_counters(run_of(rng, NAMES, rng.normal(0, 0.35, len(NAMES)), 0.0), 8, 1)
    levels = [replace(run.concurrency[0], degeneration=LOOPS), *run.concurrency[1:]]
    found = compare(replace(run, quality={"c0": LOOPS, "c1": TEXT}, concurrency=levels), run, None, [run] * 3)
    verdicts = {figure.figure: figure.judged for figure in found.figures}
    assert verdicts["acceptance, all"] and not verdicts["tokens/s at concurrency 1"]
    assert verdicts["tokens/s at concurrency 4"] and not verdicts["acceptance, c0"]
