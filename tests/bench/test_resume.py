"""`--resume` asks only what is missing, and leaves other files as they are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.test_counters import WORKLOAD as COUNTED
from tests.bench.test_counters import CountingServer, quick  # noqa: F401
from tests.command_line import trtspec
from trtspec.bench.load.journal import RunJournal
from trtspec.bench.load.measure import measure

pytestmark = pytest.mark.clock
Start = Callable[..., str]


def test_what_is_kept_is_what_is_not_asked_again(tmp_path: Path) -> None:
    """Only the answer that failed is asked again, in the load and by category."""
    server, path = CountingServer(cut={"Question 3?": (1, 3)}), tmp_path / "answers.jsonl"
    asked = list[int]()

    async def twice(url: str) -> None:
        for _ in range(2):
            with RunJournal(path, {}) as raw:
                work = replace(COUNTED, concurrency=(2, 1))
                await measure({"e": url}, work, journal=raw)
            asked.append(len(server.asked))
            server.cut.clear()
            server.asked.clear()

    server.run(twice)
    assert asked == [24, 2]


def test_resume_overwrites_only_what_it_continues(
    stand_in: Start, dataset: Path, tmp_path: Path
) -> None:
    url, out = stand_in(), tmp_path / "out"
    common = ["--dataset", dataset, "--samples", 2, "--concurrency", 1, "--max-tokens", 16]
    out.mkdir()
    (out / "report.html").write_text("mine")
    refused = trtspec("bench", url, *common, "-o", out, "--resume")
    assert refused.status == 2 and "would be overwritten" in refused.stderr, refused.stderr
    assert (out / "report.html").read_text() == "mine"
