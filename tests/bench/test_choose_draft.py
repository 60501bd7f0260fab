"""`--choose-draft`: the shortest of the measured lengths that may be as fast as the fastest."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.bench.conftest import WORKLOAD, results_of
from tests.command_line import trtspec
from tests.json_files import read_json
from trtspec.bench.choose_draft import by_draft_len, choose, served_length
from trtspec.bench.results import BenchResults, QuestionSpeed
from trtspec.client.servers import TurnCounts
from trtspec.client.text_quality import judge_run
from trtspec.errors import UsageError

Start = Callable[..., str]
LOADS = (1, 4, 16)
WORK = replace(WORKLOAD, concurrency=list(LOADS))
ACCEPTED = {0: 0.0, 1: 0.7, 2: 1.1, 3: 1.3, 6: 1.5}  # drafts per step


def served(drafts: int, loads: tuple[int, ...] = LOADS) -> BenchResults:
    """Results of a server whose step cost grows with its `drafts` and with its users."""
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
    return results_of(turns, speeds, loads, name=f"k{drafts}", workload=WORK)


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
    assert "K=0" in refused.value.remedy
    loops = replace(served(3), degeneration=judge_run(["loop " * 60] * 4))
    with pytest.raises(UsageError, match="degenerate"):
        choose({1: served(1), 3: loops})


def test_lengths_are_given_and_compared_with_what_was_drafted(stand_in: Start) -> None:
    assert [served_length(served(drafts)) for drafts in (0, 3)] == [0, 3]
    mute = replace(served(3), drafted=None)
    assert set(by_draft_len([mute, served(1)], {"k3": 3, "k1": 1})) == {1, 3}
    with pytest.raises(UsageError, match="it drafts 3 tokens per step"):
        by_draft_len([served(3)], {"k3": 5})
    url = stand_in()
    refused = trtspec("bench", f"3={url}", "--against-url", f"plain={url}", "--choose-draft")
    assert refused.status == 2 and f"write K={url}" in refused.stderr


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
    done = trtspec("bench", f"3={stand_in()}", *words)
    assert done.status == 2 and "1 draft length was measured" in done.stderr
    assert read_json(out / "results.json")["draft_choice"] is None
