"""`--resume` continues what this server was asked, and nothing else: another server is named, other files stand."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.test_counters import WORKLOAD as COUNTED
from tests.bench.test_counters import CountingServer, quick  # noqa: F401
from tests.bench.test_malformed_metadata import WORKLOAD, pages, served
from tests.command_line import trtspec
from trtspec.bench.load.journal import RunJournal
from trtspec.bench.load.measure import measure
from trtspec.errors import UsageError
from trtspec.report import Bar

pytestmark = pytest.mark.clock
Start = Callable[..., str]


def test_answers_of_another_server_are_not_continued(
    stand_in: Start, dataset: Path, tmp_path: Path
) -> None:
    """Another URL, another temperature; and the same command goes on where the journal ends."""
    url, other, out = stand_in(), stand_in(accept_nothing=True), tmp_path / "out"
    common = [
        "--dataset",
        dataset,
        "--samples",
        2,
        "--concurrency",
        1,
        "--max-tokens",
        8,
        "-o",
        out,
    ]
    first = trtspec("bench", url, *common)
    assert first.status == 0, first.stderr
    journal = out / "answers.jsonl"
    journal.write_bytes(
        b"".join(journal.read_bytes().splitlines(keepends=True)[:4])
    )  # as a kill leaves it
    for place, words in ((other, ()), (url, ("--temperature", 0.5))):
        refused = trtspec("bench", place, *common, *words, "--resume")
        assert refused.status == 2 and "begun with something else" in refused.stderr
        assert (
            f'now "{other}"' if place == other else "temperature was 0.0, now 0.5"
        ) in refused.stderr, refused.stderr
        assert "--force" in refused.stderr
    again = trtspec("bench", url, *common, "--resume")
    assert again.status == 0, again.stderr


def test_another_server_at_the_same_url_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"

    def run(kind: str, version: str | None = "1.0") -> None:
        found = pages(kind) | {"/version": json.dumps({"version": version})}
        with RunJournal(path, {}) as raw:
            asyncio.run(served(found.get, lambda url: measure({"e": url}, WORKLOAD, journal=raw)))

    run("sglang")
    run("sglang", None)  # what it does not say this time is not known to differ
    for kind, version, says in (
        ("sglang", "2.0", 'e.version was "1.0", now "2.0"'),
        ("vllm", "1.0", "e.kind was"),
    ):
        with pytest.raises((UsageError, ExceptionGroup)) as refused:
            run(kind, version)
        found = (
            refused.value.exceptions[0]
            if isinstance(refused.value, ExceptionGroup)
            else refused.value
        )
        assert isinstance(found, UsageError) and says in found.message and "force" in found.remedy
    run("sglang")


def test_what_is_kept_is_what_is_not_asked_again(tmp_path: Path) -> None:
    """Only the answer that failed is asked again, in the load and by category."""
    server, path = CountingServer(cut={"Question 3?": (1, 3)}), tmp_path / "answers.jsonl"
    said, asked, bar = list[str](), list[int](), Bar()
    bar.say = said.append  # type: ignore[method-assign]

    async def twice(url: str) -> None:
        for _ in range(2):
            with RunJournal(path, {}) as raw:
                work = replace(COUNTED, concurrency=(2, 1))
                await measure({"e": url}, work, journal=raw, bar=bar)
            asked.append(len(server.asked))
            server.cut.clear()
            server.asked.clear()

    server.run(twice)
    assert asked == [24, 2]
    assert [text for text in said if "kept" in text] == [
        "22 answers of the interrupted run are kept"
    ]


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
