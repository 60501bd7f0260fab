"""`--compare` of servers that tell only of all answers together, and of output that is degenerate: what is judged is
judged soundly, and what is not is never passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.bench.test_statistics import RUNS, as_old, in_a_mood, run_of
from tests.command_line import trtspec
from trtspec.bench.acceptance import TurnCounts, by_category
from trtspec.bench.adapters import FROM_COUNTERS, FROM_SGLANG
from trtspec.bench.compare import compare
from trtspec.bench.results import BenchResults, ComparedRun, read_results
from trtspec.bench.text_quality import judge_run

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


def old_of(run: BenchResults) -> ComparedRun:
    groups = {name: vars(group) for name, group in run.categories.items()}
    said = {
        "workload": {"questions_sha256": None, "under": None, **run.workload},
        "server": {"model": run.server.model},
    }
    return replace(as_old(run), categories=groups, acceptance_length=run.acceptance_length, **said)


def alarms(runs: int, fall: float, seed: int, shape: tuple[int, int, int]) -> int:
    """How many comparisons raise an alarm about acceptance; shape: categories, rounds, earlier runs."""
    categories, rounds, earlier = shape
    rng, raised = np.random.default_rng(seed), 0
    for _ in range(runs):
        ease = rng.normal(0, 0.35, len(NAMES))
        past = [old_of(of_counters(run_of(rng, NAMES, ease, 0.0), categories, rounds)) for _ in range(earlier)]
        new = of_counters(in_a_mood(rng, run_of(rng, NAMES, ease, fall), 0.05, rounds), categories, rounds)
        figure = compare(new, past[0], None, past[1:]).figures[0]
        assert figure.figure == "acceptance, all" and figure.judged
        assert figure.paired_by == ("run" if max(categories, rounds) < 4 else "group")
        raised += figure.verdict == "regression"
    return raised


SHAPES = [(8, 1, 1), (1, 4, 1), (4, 5, 1), (2, 1, 4), (1, 3, 6), (8, 1, 4)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_runs_of_counters_raise_an_alarm_in_at_most_5_percent(shape: tuple[int, int, int]) -> None:
    raised = alarms(RUNS, 0.0, 1, shape)
    print(f"{raised} alarms in {RUNS} comparisons of equal runs (categories, rounds, earlier runs: {shape})")
    assert raised <= 0.05 * RUNS


def test_a_fall_that_counters_show_is_a_regression_and_equal_runs_are_none() -> None:
    for shape in ((8, 1, 1), (1, 4, 1), (2, 1, 4)):
        assert alarms(3, 0.0, 2, shape) <= 1
        assert alarms(2, 0.25, 3, shape) == 2


def test_runs_that_agree_to_the_last_token_do_not_make_the_next_one_a_regression() -> None:
    """Four greedy runs with the same counts, and a fifth with one near-tie that went the other way."""
    rng = np.random.default_rng(4)
    run = of_counters(run_of(rng, NAMES, rng.normal(0, 0.35, 40), 0.0), 2, 1)
    nearly = [replace(turn, accepted=turn.accepted - 3, tokens=turn.tokens - 3) for turn in run.turns_detail]
    found = compare(replace(run, turns_detail=nearly), old_of(run), 0.0, [old_of(run)] * 3)
    assert found.figures[0].judged and found.figures[0].ratio < 1 and found.figures[0].verdict == "no change found"


def problems(new: BenchResults, earlier: list[ComparedRun], gate: float | None) -> list[tuple[str, str, str]]:
    found = compare(new, earlier[0], gate, earlier[1:]).problems
    return [(p.code, p.severity, p.message) for p in found if p.code == "TS-BENCH-NOT-COMPARED"]


def test_acceptance_that_cannot_be_judged_is_an_error_of_a_gate_and_a_warning_without() -> None:
    rng = np.random.default_rng(5)
    ease = rng.normal(0, 0.35, len(NAMES))
    old = old_of(of_counters(run_of(rng, NAMES, ease, 0.0), 2, 1))
    new = of_counters(run_of(rng, NAMES, ease, 0.35), 2, 1)
    [(_, severity, message)] = problems(new, [old], 0.05)
    assert severity == "error" and "tells only of all answers together" in message
    assert [severity for _, severity, _ in problems(new, [old], None)] == ["warning"]
    assert "TS-BENCH-REGRESSION" in {p.code for p in compare(new, old, 0.05, [old] * 3).problems}
    exact, few = run_of(rng, NAMES, ease, 0.0), run_of(rng, NAMES[:2], ease[:2], 0.0)
    assert problems(exact, [old_of(exact)], 0.05) == []
    [(_, severity, message)] = problems(few, [old_of(exact)], 0.05)
    assert severity == "error" and "2 questions in common" in message
    rounds = of_counters(exact, 1, 4)
    other = old_of(of_counters(exact, 1, 5))
    assert [severity for _, severity, _ in problems(rounds, [other], 0.05)] == ["error"], (
        "other rounds, other questions"
    )


def test_the_running_mean_of_sglang_has_a_remedy_of_its_own() -> None:
    """Neither categories, nor rounds, nor earlier runs make it one that can be judged."""
    rng = np.random.default_rng(9)
    run = run_of(rng, NAMES, rng.normal(0, 0.35, len(NAMES)), 0.0)
    mean = replace(total(run.turns_detail, "all"), source=FROM_SGLANG, drafted=None)
    new = replace(run, turns_detail=[], categories=by_category([mean]), acceptance_length=2.5)
    for earlier in (1, 4):
        found = compare(new, old_of(new), 0.05, [old_of(new)] * (earlier - 1)).problems
        problem = next(p for p in found if p.code == "TS-BENCH-NOT-COMPARED")
        assert problem.severity == "error" and "one mean over all requests since its start" in problem.message
        assert problem.remedy.startswith("restart SGLang before each run") and "--rounds" not in problem.remedy


@pytest.mark.parametrize("silent", ["this run", "the earlier run"])
def test_a_run_that_tells_nothing_of_acceptance_does_not_pass_beside_one_that_does(silent: str) -> None:
    rng = np.random.default_rng(6)
    run = run_of(rng, NAMES, rng.normal(0, 0.35, len(NAMES)), 0.0)
    mute = replace(run, turns_detail=[], acceptance_length=None, steps=None, accepted=None)
    new, old = (mute, run) if silent == "this run" else (run, mute)
    [(_, severity, message)] = problems(new, [old_of(old)] * 4, 0.05)
    assert severity == "error" and message.startswith(f"acceptance is not judged: {silent} tells nothing")
    assert problems(mute, [old_of(mute)] * 4, 0.05) == [], "speed is judged, and there is no acceptance"
    [(_, severity, message)] = problems(mute, [old_of(mute)], 0.05)
    assert severity == "error" and "no run tells of acceptance" in message


@pytest.mark.parametrize("place", ["new", "old"])
def test_loops_are_no_improvement_and_their_repair_no_regression(place: str) -> None:
    rng = np.random.default_rng(7)
    ease = rng.normal(0, 0.35, len(NAMES))
    sound, loops = run_of(rng, NAMES, ease, 0.3), run_of(rng, NAMES, ease, 0.0)
    loops, sound = replace(loops, degeneration=LOOPS), replace(sound, degeneration=TEXT)
    new, old = (loops, sound) if place == "new" else (sound, loops)
    before = replace(old_of(old), degeneration=vars(old.degeneration))
    for gate, severity in ((0.05, "error"), (None, "warning")):
        found = compare(new, before, gate)
        assert not any(figure.judged for figure in found.figures)
        assert {figure.verdict for figure in found.figures} == {"not judged"}
        assert [(p.code, p.severity) for p in found.problems] == [("TS-BENCH-NOT-COMPARED", severity)]
        assert {"new": "this run", "old": "an earlier run"}[place] in found.problems[0].message
    unknown = compare(new if place == "old" else sound, old_of(old))
    assert any(figure.judged for figure in unknown.figures), "results of earlier releases do not tell of loops"


def test_loops_of_one_category_or_level_leave_the_others_judged() -> None:
    rng = np.random.default_rng(8)
    run = of_counters(run_of(rng, NAMES, rng.normal(0, 0.35, len(NAMES)), 0.0), 8, 1)
    levels = [replace(run.concurrency[0], degeneration=LOOPS), *run.concurrency[1:]]
    found = compare(
        replace(run, quality={"c0": LOOPS, "c1": TEXT}, concurrency=levels), old_of(run), None, [old_of(run)] * 3
    )
    verdicts = {figure.figure: figure.judged for figure in found.figures}
    assert verdicts["acceptance, all"] and not verdicts["tokens/s at concurrency 1"]
    assert verdicts["tokens/s at concurrency 4"] and not verdicts["acceptance, c0"]


@pytest.mark.slow
def test_a_lower_acceptance_of_a_vllm_does_not_pass_the_gate(
    stand_in: Callable[..., str], dataset: Path, tmp_path: Path
) -> None:
    """Three categories of one round: nothing to judge by with one earlier run, a prediction with four."""
    common = ["--dataset", dataset, "--concurrency", "4", "--max-tokens", "48", "--temperature", "1"]
    past = []
    for number in range(4):
        past += ["--compare", tmp_path / str(number)]
        assert trtspec("bench", stand_in(kind="vllm"), *common, "--seed", number, "-o", past[-1]).status == 0
    assert read_results(past[1]).acceptance_length
    worse = stand_in(kind="vllm", accept_nothing=True)
    one = trtspec("bench", worse, *common, *past[:2], "--max-regression", "5%", "--json")
    assert one.status == 3 and "TS-BENCH-NOT-COMPARED" in one.stderr
    four = trtspec("bench", worse, *common, *past, "--max-regression", "5%", "--json")
    assert four.status == 3 and "TS-BENCH-REGRESSION" in {p["code"] for p in json.loads(four.stdout)["problems"]}
