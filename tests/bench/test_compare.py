"""`--compare`: what is judged, what is only shown, and what is refused before anything is asked."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.bench.conftest import WORKLOAD
from tests.bench.test_statistics import run_of
from trtspec.bench.compare import compare, refuse_different
from trtspec.bench.load.measure import refuse_other_server
from trtspec.bench.results import BenchResults, Comparison
from trtspec.client.servers import FROM_COUNTERS, DetectedServer, TurnCounts
from trtspec.client.text_quality import judge_run
from trtspec.errors import UsageError


def runs(count: int, fall: float = 0.0) -> list[BenchResults]:
    """`count` runs of the same 40 questions, the first of which accepts less."""
    rng = np.random.default_rng(0)
    names, ease = [str(i) for i in range(40)], rng.normal(0, 0.35, 40)
    return [run_of(rng, names, ease, 0.0 if number else fall) for number in range(count)]


def totals(run: BenchResults) -> BenchResults:
    """The same run of a server that counts all answers together."""
    turns = run.turns_detail
    steps, accepted, tokens = (
        sum(getattr(t, key) for t in turns) for key in ("steps", "accepted", "tokens")
    )
    pooled = TurnCounts(
        "all",
        "all",
        tokens,
        steps,
        accepted,
        3 * steps,
        None,
        FROM_COUNTERS,
        answers=40,
        questions=40,
    )
    return replace(run, turns_detail=[pooled])


def codes(found: Comparison) -> list[tuple[str, str]]:
    return [
        (problem.code, problem.severity) for problem in found.problems if problem.severity != "info"
    ]


def test_a_fall_is_found_by_question_and_its_verdict_says_so() -> None:
    new, old = runs(2, fall=0.1)
    found = compare(new, [old])
    assert (
        codes(found) == [("TS-BENCH-REGRESSION", "error")]
        and found.figures[0].paired_by == "question"
    )
    assert found.figures[0].verdict == "regression" and (
        found.figures[0].high < 1  # type: ignore[operator]
    )
    assert compare(new, [old], 0.2).figures[0].verdict == "no change found"
    assert compare(old, [new]).figures[0].verdict == "improvement"


def test_totals_are_judged_from_four_earlier_runs_on() -> None:
    several = [totals(run) for run in runs(6, fall=0.2)]
    one, four = (compare(several[0], earlier) for earlier in (several[1:2], several[1:]))
    gate = compare(several[0], several[1:2], 0.05)
    assert codes(one) == [("TS-BENCH-NOT-COMPARED", "warning")] and codes(gate) == [
        ("TS-BENCH-NOT-COMPARED", "error")
    ]
    assert one.figures[0].verdict == "not judged" and one.figures[0].ratio < 1
    assert four.figures[0].paired_by == "run" and codes(four)[0] == ("TS-BENCH-REGRESSION", "error")


@pytest.mark.parametrize("missing", [0, 1])
def test_a_head_that_is_gone_is_named(missing: int) -> None:
    """One side reports acceptance, the other one does not: the most likely regression of all."""
    pair = runs(2)
    silent = replace(
        pair[missing], acceptance_length=None, steps=None, accepted=None, turns_detail=[]
    )
    pair[missing] = silent
    found = compare(pair[0], [pair[1]], 0.05)
    assert (
        codes(found) == [("TS-BENCH-NOT-COMPARED", "error")]
        and "reports no acceptance" in found.problems[0].message
    )


def test_nothing_is_judged_of_degenerate_output() -> None:
    new, old = runs(2, fall=0.2)
    loops = replace(new, degeneration=judge_run(["loop " * 60] * 4))
    found = compare(loops, [old], 0.05)
    assert (
        codes(found) == [("TS-BENCH-NOT-COMPARED", "error")]
        and "degenerate" in found.problems[0].message
    )
    assert {figure.verdict for figure in found.figures} == {"not judged"}


@pytest.mark.parametrize(
    "change", [{"dataset_sha256": "1"}, {"temperature": 1.0}, {"extra_body": {"top_k": 1}}]
)
def test_another_workload_is_refused_before_the_run(change: dict[str, Any]) -> None:
    (run,) = runs(1)
    refuse_different(WORKLOAD, {"--compare": run})
    with pytest.raises(UsageError, match=rf"{next(iter(change))}[\w.]* was ") as refused:
        refuse_different(replace(WORKLOAD, **change), {"--compare": run})
    assert refused.value.remedy


def test_another_model_or_another_way_to_draw_drafts_is_refused() -> None:
    server = DetectedServer("reference", "m", draft_sampling="argmax")
    other = replace(server, draft_sampling="probabilistic")
    refuse_other_server(server, {"--compare x": other}, sampled=False)
    with pytest.raises(UsageError, match="drew probabilistic drafts, and this server draws argmax"):
        refuse_other_server(server, {"--compare x": other}, sampled=True)
    with pytest.raises(UsageError, match="figures of the model n, and this server serves m"):
        refuse_other_server(server, {"--compare x": replace(server, model="n")}, sampled=False)
