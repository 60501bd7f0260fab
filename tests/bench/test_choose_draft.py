"""`--choose-draft`: the shortest of the measured lengths that may be as fast as the fastest."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.conftest import WORKLOAD, results_of
from tests.command_line import succeeded, trtspec
from tests.json_files import read_json
from trtspec.bench.choose_draft import by_draft_len, choose, refuse_stored, served_length
from trtspec.bench.results import BenchResults, QuestionSpeed
from trtspec.client.servers import TurnCounts
from trtspec.client.text_quality import judge_run
from trtspec.errors import UsageError

Start = Callable[..., str]
LOADS = (1, 4, 16)
WORK = replace(WORKLOAD, concurrency=list(LOADS))
ACCEPTED = {0: 0.0, 1: 0.7, 2: 1.1, 3: 1.3, 6: 1.5}  # drafts per step


def served(drafts: int, loads: tuple[int, ...] = LOADS, **changed: Any) -> BenchResults:
    """A server with `drafts` drafts, whose steps cost more the more it drafts and the more users it has."""
    rng = np.random.default_rng(0)
    turns, speeds = [], []
    for number in range(30):
        steps = int(20 + rng.poisson(60))
        accepted = int(steps * ACCEPTED[drafts] * rng.normal(1, 0.02))
        turns.append(
            TurnCounts(
                str(number), "c", 1 + steps + accepted, steps, accepted, drafts * steps, None, "s"
            )
        )
        for load in loads:
            cost = 0.01 * (1 + drafts * 0.02 * load)
            seconds = steps * cost * rng.normal(1, 0.01)
            speeds.append(
                QuestionSpeed(
                    f"concurrency {load}", str(number), "c", 1 + steps + accepted, seconds
                )
            )
    return results_of(turns, speeds, loads, name=f"k{drafts}", workload=replace(WORK, **changed))


def test_the_best_length_falls_with_the_load_and_one_is_proposed() -> None:
    found = choose({drafts: served(drafts) for drafts in (0, 1, 3, 6)})
    best = {load.concurrency: load.best for load in found.loads}
    assert best[1] > best[4] >= best[16] and found.draft_len in {1, 3}
    for load in found.loads:
        fastest = max(load.lengths, key=lambda figures: figures.tokens_per_s)
        assert fastest.of_best is None and all(f.of_best for f in load.lengths if f is not fastest)
        assert all(f.of_best.value < 1 for f in load.lengths if f.of_best)


def test_of_lengths_that_may_be_equally_fast_the_shorter_is_proposed() -> None:
    three = served(3, loads=(1,))
    again = replace(three, questions_detail=[
        replace(speed, seconds=speed.seconds * (1.01 if number % 2 else 0.985))
        for number, speed in enumerate(three.questions_detail)
    ])  # fmt: skip
    assert choose({3: three, 6: again}).draft_len == 3, (
        "6 is faster by less than the questions can tell"
    )


def test_no_drafts_are_proposed_where_they_are_fastest() -> None:
    found = choose({drafts: served(drafts, loads=(64,)) for drafts in (0, 3)})
    assert found.draft_len == 0


def test_nothing_is_chosen_between_one_length_or_on_loops() -> None:
    with pytest.raises(UsageError, match="1 draft length was measured") as refused:
        choose({3: served(3)})
    assert "`at`" in refused.value.remedy
    loops = replace(served(3), degeneration=judge_run(["loop " * 60] * 4))
    with pytest.raises(UsageError, match="degenerate"):
        choose({1: served(1), 3: loops})


@pytest.mark.parametrize(
    ("given", "results", "says"),
    [
        (6, served(1), "are of 1 drafts per step"),
        (
            3,
            served(3, dataset_sha256="1", temperature=1.0),
            'sha256 was "1", now "0"; temperature was 1.0, now 0.0',
        ),
        (3, served(3, loads=(2,)), "have no concurrency 1"),
    ],
)
def test_results_that_cannot_stand_beside_the_run_are_refused_before_it(
    given: int, results: BenchResults, says: str
) -> None:
    refuse_stored({3: served(3), 2: served(2)}, WORK)
    with pytest.raises(UsageError, match=says):
        refuse_stored({given: results}, WORK)


def test_lengths_come_from_what_was_drafted_or_given() -> None:
    assert [served_length(served(drafts)) for drafts in (0, 3)] == [0, 3]
    mute = replace(served(3), drafted=None)
    assert set(by_draft_len([mute, served(1)], {"k3": 3}, {6: served(6)})) == {1, 3, 6}
    with pytest.raises(UsageError, match="does not report its draft length") as refused:
        by_draft_len([mute], {}, {})
    assert "write K=u" in refused.value.remedy
    with pytest.raises(UsageError, match="it drafts 3 tokens per step"):
        by_draft_len([served(3)], {"k3": 5}, {})


@pytest.mark.slow
def test_a_server_that_does_not_report_its_length_is_given_it(
    stand_in: Start, dataset: Path, tmp_path: Path
) -> None:
    """The remedy of the error, tried: trtllm-serve reports an average and no draft length."""
    url, other, out = (
        stand_in(kind="trtllm"),
        stand_in(kind="trtllm", draft_len=2),
        tmp_path / "out",
    )
    command = ["bench", url, "--dataset", dataset, "--samples", 6, "--concurrency", 1, "--max-tokens", 24,
               "--choose-draft", "--against-url", f"2={other}", "-o", out]  # fmt: skip
    refused = trtspec(*command)
    assert refused.status == 2 and "does not report its draft length" in refused.stderr
    assert f"K={url}" in refused.stderr
    done = succeeded("bench", f"3={url}", *command[2:], "--resume", "--json")
    found = done.json
    assert [figure["draft_len"] for figure in found["draft_choice"]["loads"][0]["lengths"]] == [
        2,
        3,
    ]
    assert list(found["endpoints"]) == ["draft-2"], "the first server is measured once"
    twice = trtspec(*command, "--resume", "--against-url", f"2={url}")
    assert twice.status == 2 and "the name 2 is given twice" in twice.stderr


def test_a_mistyped_place_of_results_is_no_server(tmp_path: Path) -> None:
    for place in ("resuls-old", tmp_path / "resuls" / "old", "./old"):
        done = trtspec("bench", "http://127.0.0.1:9", "--choose-draft", "--at", f"1={place}")
        assert done.status == 2 and "is not K=RESULTS of an earlier run" in done.stderr, done.stderr
    server = trtspec(
        "bench", "http://127.0.0.1:9", "--choose-draft", "--at", "1=http://127.0.0.1:10"
    )
    assert server.status == 2 and "--against-url 3=URL" in server.stderr


def test_what_was_measured_is_kept_where_nothing_can_be_chosen(
    stand_in: Start, dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = (
        "--dataset",
        dataset,
        "--samples",
        4,
        "--concurrency",
        1,
        "--max-tokens",
        48,
        "--choose-draft",
        "-o",
        out,
    )
    done = trtspec("bench", stand_in(), *words)
    assert done.status == 2 and "1 draft length was measured" in done.stderr
    assert read_json(out / "results.json")["draft_choice"] is None
