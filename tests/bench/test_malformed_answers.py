"""Recordings and answers that somebody damaged: a verdict or an error that names the cause, never a crash."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench import cheats
from tests.bench.cheating_server import fuzzed
from tests.command_line import trtspec
from trtspec.bench.asking import read_answer
from trtspec.bench.check import GateLimits, run_checks
from trtspec.bench.pace import check_speed
from trtspec.bench.transcript import AskedPrompt, Recording, read_recording
from trtspec.client.client import finite
from trtspec.errors import UsageError


def judge_damaged(whole: Recording, plain: Recording, path: Path, seeds: range) -> tuple[int, int]:
    """(read, refused) of recordings with one to three damaged places; those that are read are judged on both sides: the
    plain server's as the baseline, since nothing is compared with a server that speculates."""
    texts, read, refused = [json.dumps(side.to_dict()) for side in (whole, plain)], 0, 0
    for seed in seeds:
        dice, value = random.Random(seed), json.loads(texts[seed % 2])
        for _ in range(1 + seed % 3):
            value = fuzzed(value, dice)
        written = json.dumps(value)
        path.write_text(written if seed % 10 else written[: dice.randrange(len(written))])
        try:
            damaged = read_recording(path)
        except UsageError as error:
            assert str(path) in error.message
            refused += 1
            continue
        read += 1
        for got, expected in ((whole, damaged), (damaged, plain), (damaged, None)):
            json.dumps(run_checks(got, expected, GateLimits()).to_dict())
    return read, refused


def ask_damaged(base: str, recording: Path, seeds: range) -> set[int]:
    """Statuses of the command against servers that damage every second answer."""
    found = set()
    for seed in seeds:
        kind = ("reference", "trtllm", "vllm", "unknown")[seed % 4]
        url = cheats.at(base, kind, "honest", 1, "fuzz", f"seed={seed}")
        done = trtspec("check", url, "--against", recording, "--timeout", 5, "--json")
        assert "unexpected" not in done.stderr.lower() and done.stdout, done.stderr
        assert done.status == (0 if json.loads(done.stdout)["ok"] else 3)
        found.add(done.status)
    return found


@pytest.fixture(scope="module")
def whole(cheating: str) -> Recording:
    return cheats.recorded(cheats.at(cheating, "reference"), 3, True, (200,), per_context=1)


@pytest.fixture(scope="module")
def plain(cheating: str) -> Recording:
    return cheats.recorded(cheats.at(cheating, "plain"), 3, True, (200,), per_context=1)


@pytest.fixture(scope="module")
def small(cheating: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of two questions."""
    path = tmp_path_factory.mktemp("small") / "plain.json"
    found = cheats.recorded(cheats.at(cheating, "plain"), 2, True)
    path.write_text(json.dumps(found.to_dict()))
    return path


def test_damaged_recordings(whole: Recording, plain: Recording, tmp_path: Path) -> None:
    read, refused = judge_damaged(whole, plain, tmp_path / "x.json", range(80))
    assert read > 5 and refused > 20


def test_a_last_pass_without_times_is_no_measurement(whole: Recording) -> None:
    """And what the other passes show still counts."""
    untimed = replace(whole, later=[replace(item, timing=None) for item in whole.later])
    assert whole.later and check_speed(whole, None).status == "pass"
    assert check_speed(untimed, None).status == "skipped"
    streamed = list(untimed.streamed)
    for place in (0, 3):  # two stalls that do not overlap
        timing = streamed[place].timing
        assert timing is not None
        timing = replace(timing, started=timing.started + 1000 * place, total=timing.total + 60)
        streamed[place] = replace(streamed[place], timing=timing)
    found = check_speed(replace(untimed, streamed=streamed), None)
    assert (found.status, found.code) == ("fail", "TS-CHECK-SLOWER"), found


def test_damaged_answers(cheating: str, small: Path) -> None:
    assert ask_damaged(cheating, small, range(4)) == {3}


def test_integers_without_end(whole: Recording) -> None:
    """JSON's integers have no limit; Python's are no float beyond 1.8e308."""
    asked = AskedPrompt(question="q", category="c", messages=[{"role": "user", "content": "a"}])
    choice: dict[str, Any] = {"message": {"content": "a"}, "avg_decoded_tokens_per_iter": 10**400}
    assert read_answer(asked, {"choices": [choice]}).average is None and finite(10**400) is None
    for damaged in ({"usage": {"completion_tokens": 10**400}}, {"usage": {"prompt_tokens": -1}}):
        with pytest.raises(ValueError, match="not a number of tokens"):
            read_answer(asked, {"choices": [choice], **damaged})


@pytest.mark.slow
def test_many_damaged_recordings(whole: Recording, plain: Recording, tmp_path: Path) -> None:
    judge_damaged(whole, plain, tmp_path / "x.json", range(100, 500))


@pytest.mark.slow
def test_many_damaged_answers(cheating: str, small: Path) -> None:
    ask_damaged(cheating, small, range(100, 200))
