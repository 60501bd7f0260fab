"""What may be a baseline, and the files and rows that a check names: refused or skipped by name, never passed."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import cheats
from tests.bench.test_drafting import eagle, merged, recording, streams
from tests.command_line import trtspec
from trtspec.bench.baseline import COMPARING, speculation
from trtspec.bench.transcript import Recording

NOWHERE = "http://127.0.0.1:9"
SHORT = ("--samples", 2, "--max-tokens", 24, "--contexts", 0)


def fixed(size: int) -> Recording:
    """A plain server that sends so many tokens at a time."""
    told = [replace(item, counted=[1, *range(1 + size, 100, size), 100]) for item in streams(lambda dice: 0)]
    return Recording("u", {}, 128, [], streamed=told)


def test_what_shows_that_a_baseline_speculates() -> None:
    """Drafts that it tells of, or streams of one and more tokens; not a stream_interval, nor pieces sent together."""
    told = recording(streams(eagle(0.65)), 100, 60)
    for drafting in (told, replace(told, counts=[]), replace(told, counts=[], streamed_counts=[])):
        assert speculation(drafting)
    nothing = recording(streams(lambda dice: 0), 99 * 30, 0)
    drafted = replace(nothing.counts[0], drafted=297)
    assert speculation(replace(nothing, counts=[drafted])), "a head of which nothing is accepted"
    busy = [merged(item, 8) for item in streams(lambda dice: 0)]
    for plain in (nothing, fixed(1), fixed(4), Recording("u", {}, 128, [], streamed=busy), Recording("u", {}, 128, [])):
        assert speculation(plain) is None


def test_rows_are_not_compared_with_a_server_that_speculates() -> None:
    """And the plain server is compared with, as before."""
    got = recording(streams(eagle(0.65)), 100, 60)
    verdict = cheats.judged(got, got)
    rows = {row.name: row for row in verdict.results}
    assert {rows[name].status for name in COMPARING} == {"skipped"} and rows["answers"].status == "pass"
    assert "the baseline speculates" in rows["lossless"].message
    assert "lossless" in cheats.judged(got, got, require=("lossless",)).failed
    plain = replace(got, counts=[], streamed_counts=[], streamed=[])
    assert cheats.statuses(cheats.judged(got, plain))["lossless"] == "pass"


def test_a_recording_of_a_server_that_speculates_is_called_no_baseline(cheating: str, tmp_path: Path) -> None:
    done = trtspec("check", cheats.at(cheating, "reference"), "--record", tmp_path / "a.json", *SHORT)
    assert done.status == 0 and "is no baseline: this server speculates" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--against", "a.json", "--record", "a.json", "--force"), "--against and --record name one file"),
        (("--against", "a.json", "--record", "b.json", "--force"), "--against and --record name one file"),  # a link
        (("--record", "c.json", "--junit", "./c.json"), "--record and --junit name one file"),
        (("--require", "typo"), "--require typo names no row"),
        (("--contexts", "0", "--context-samples", "9"), "--context-samples is not used with --contexts 0"),
    ],
)
def test_a_check_is_refused_before_anything_is_asked(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens there, so that a request would end with another error."""
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text("{}")
    Path("b.json").symlink_to("a.json")
    done = trtspec("check", NOWHERE, *words)
    assert done.status == 2 and says in done.stderr, done.stderr
    assert Path("a.json").read_text() == "{}"


@pytest.mark.parametrize(("words", "status"), [((), 1), (("--require", "typo"), 2)])
def test_a_check_without_a_verdict_leaves_no_older_one(words: tuple[str, ...], status: int, tmp_path: Path) -> None:
    junit = tmp_path / "check.xml"
    junit.write_text('<testsuites><testsuite failures="0"/></testsuites>')
    done = trtspec("check", NOWHERE, "--junit", junit, "--force", *SHORT, *words)
    assert done.status == status, done.stderr
    suite = xml.parse(junit).getroot()
    assert suite.get("failures") == "1" and suite.find(".//testcase").get("classname") == "trtspec check"  # type: ignore[union-attr]
    assert trtspec("check", NOWHERE, "--junit", junit, *SHORT, *words).status == status, "such a file may be replaced"
    assert trtspec("check", NOWHERE, "--junit", junit, "--record", junit, "--force").status == 2


@pytest.mark.slow
@pytest.mark.parametrize("baseline", [True, False])
def test_a_head_of_which_nothing_is_accepted_is_not_asked_for_log_probabilities(cheating: str, baseline: bool) -> None:
    """In releases where they end the engine, averages of one token per iteration do not show that it runs without."""
    url = cheats.at(cheating, "trtllm", "honest", 1, "undrafted", "version=1.2.1")
    assert "--logprobs" in (cheats.recorded(url, 1, baseline).withheld or "")
    assert cheats.recorded(url, 1, baseline, logprobs=True).withheld is None
