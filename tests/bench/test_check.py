"""The gate: equal servers pass, near-ties are told from defects, and every planted defect is found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtspec.bench.lossless import compare_transcripts, first_divergence
from trtspec.bench.transcript import Token, Transcript

Start = Callable[..., str]


def check(*arguments: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "trtspec", "check", *arguments, "--json"], capture_output=True, text=True, timeout=120
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def status(verdict: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["status"] for entry in verdict["results"]}


def detail(verdict: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry["detail"] for entry in verdict["results"] if entry["name"] == name)


@pytest.fixture
def recording(stand_in: Start, dataset: Path, tmp_path: Path) -> Path:
    path = tmp_path / "plain.json"
    code, verdict, _ = check(stand_in(kind="plain"), "--record", str(path), "--dataset", str(dataset))
    assert code == 0 and verdict["ok"]
    assert status(verdict)["lossless"] == "skipped"
    return path


def test_equal_servers_pass(stand_in: Start, recording: Path) -> None:
    code, verdict, _ = check(stand_in(), "--against", str(recording), "--min-acceptance", "2.0")
    assert code == 0 and set(status(verdict).values()) == {"pass"}
    lossless = detail(verdict, "lossless")
    assert lossless["identical"] == lossless["compared"] == 36
    assert lossless["rounding"]["positions"] > 1000


def test_near_ties_pass_and_are_listed(stand_in: Start, recording: Path) -> None:
    code, verdict, _ = check(stand_in(swap_ties=True, rounding=5e-4), "--against", str(recording))
    lossless = detail(verdict, "lossless")
    assert code == 0 and lossless["near_ties"] > 5 and lossless["real"] == 0
    assert all(entry["gap_expected"] <= lossless["bound"] for entry in lossless["divergences"])


def test_a_sure_token_replaced_fails(stand_in: Start, recording: Path) -> None:
    code, verdict, stderr = check(stand_in(swap_sure=True, rounding=5e-4), "--against", str(recording))
    lossless = detail(verdict, "lossless")
    assert code == 3 and lossless["real"] > 0 and "lossless" in stderr
    assert lossless["divergences"][0]["verdict"] == "real" and lossless["divergences"][0]["position"] == 7


def test_wild_rounding_cannot_excuse_a_defect(stand_in: Start, recording: Path) -> None:
    """A server whose logprobs are noise would measure a huge bound; the limit holds."""
    code, verdict, _ = check(stand_in(swap_sure=True, rounding=3.0), "--against", str(recording))
    assert code == 3 and detail(verdict, "lossless")["bound"] == 0.5


def test_without_logprobs_the_recorded_gaps_judge(stand_in: Start, recording: Path) -> None:
    code, verdict, _ = check(stand_in(swap_sure=True, logprobs=False), "--against", str(recording))
    assert code == 3 and detail(verdict, "lossless")["real"] > 0
    code, verdict, _ = check(stand_in(logprobs=False), "--against", str(recording))
    assert code == 0 and detail(verdict, "lossless")["identical"] == 36


def test_nobody_can_judge_without_any_logprobs(stand_in: Start, dataset: Path) -> None:
    plain = stand_in(kind="plain", logprobs=False)
    code, verdict, _ = check(stand_in(swap_ties=True, logprobs=False), "--against", plain, "--dataset", str(dataset))
    assert code == 3 and detail(verdict, "lossless")["unjudged"] > 0


@pytest.mark.parametrize(
    ("got", "expected", "wanted"),
    [
        ("call", "call", "pass"),
        ("malformed", "call", "fail"),
        ("vanish", "call", "fail"),
        ("none", "call", "fail"),
        ("refuse", "call", "fail"),
        ("vanish", "none", "fail"),
        ("none", "none", "skipped"),
        ("refuse", "refuse", "skipped"),
        ("malformed", "malformed", "skipped"),
    ],
)
def test_tool_calls(stand_in: Start, dataset: Path, got: str, expected: str, wanted: str) -> None:
    settings = ["--dataset", str(dataset), "--samples", "3", "--max-tokens", "8"]
    code, verdict, _ = check(stand_in(tool=got), "--against", stand_in(kind="plain", tool=expected), *settings)
    assert status(verdict)["tool-call"] == wanted
    assert code == (3 if wanted == "fail" else 0)


def test_loops_fail_unless_the_target_loops_itself(stand_in: Start, dataset: Path) -> None:
    looping, plain = stand_in(loop=True), stand_in(kind="plain", loop=True)
    code, verdict, _ = check(looping, "--dataset", str(dataset))
    assert code == 3 and status(verdict)["degenerate-output"] == "fail"
    code, verdict, _ = check(looping, "--against", plain, "--dataset", str(dataset), "--min-acceptance", "1.1")
    assert code == 0 and status(verdict)["degenerate-output"] == "pass"
    message = next(e["message"] for e in verdict["results"] if e["name"] == "acceptance")
    assert "degenerate" in message


def test_acceptance_floor(stand_in: Start, dataset: Path) -> None:
    code, verdict, _ = check(stand_in(), "--dataset", str(dataset), "--min-acceptance", "3.9")
    assert code == 3 and status(verdict)["acceptance"] == "fail"
    code, verdict, _ = check(stand_in(kind="other"), "--dataset", str(dataset), "--min-acceptance", "1.5")
    assert code == 3, "a floor that cannot be measured is not met"


def test_recording_is_refused_when_it_is_not_one(stand_in: Start, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert check(stand_in(), "--against", str(path))[0] == 2
    assert check(stand_in(), "--against", str(tmp_path / "missing.json"))[0] == 2


def transcript(tokens: list[tuple[str, str, float]] | None, text: str | None = None) -> Transcript:
    made = [Token(*token) for token in tokens] if tokens is not None else None
    return Transcript("q", "c", [], text or "".join(t for t, _, _ in tokens or []), "stop", made)


def test_an_answer_that_ends_early_is_a_divergence() -> None:
    whole = transcript([("a", "x", 2.0), ("b", "x", 2.0), ("c", "x", 2.0)])
    short = transcript([("a", "x", 2.0), ("b", "x", 2.0)])
    found = first_divergence(whole, short)
    assert found and found.position == 2 and found.got == "(end of the answer)"
    assert compare_transcripts([whole], [short], 0.5).real == 1


def test_a_small_gap_between_other_tokens_is_no_tie() -> None:
    """Both gaps are tiny, but the token that came is not the runner-up: something else is wrong."""
    expected = transcript([("a", "b", 1e-5)])
    got = transcript([("z", "a", 1e-5)])
    assert compare_transcripts([expected], [got], 0.5).real == 1
    assert compare_transcripts([expected], [transcript([("b", "a", 1e-5)])], 0.5).near_ties == 1


def test_an_engine_that_logprobs_would_end_is_not_asked_for_them(stand_in: Start, recording: Path) -> None:
    """Before the release candidates of April 2026 one such request under speculation ended the engine."""
    old = stand_in(kind="trtllm", version="1.2.1", logprobs="deadly")
    code, verdict, _ = check(old, "--against", str(recording))
    assert code == 0 and status(verdict)["lossless"] == "pass"
    code, verdict, _ = check(stand_in(kind="trtllm", version="1.4.0rc1"), "--against", str(recording))
    assert code == 0 and detail(verdict, "lossless")["rounding"]["positions"] > 1000


def test_a_speculating_server_recorded_as_plain_is_not_ended(stand_in: Start, tmp_path: Path, dataset: Path) -> None:
    """Recorded as the baseline by mistake: a few answers show the drafts. A plain one is asked for its gaps."""
    mistaken = stand_in(kind="trtllm", version="1.2.1", logprobs="deadly")
    code, _, _ = check(mistaken, "--record", str(tmp_path / "a.json"), "--dataset", str(dataset))
    assert code == 0 and json.loads((tmp_path / "a.json").read_text())["withheld"]
    plain = stand_in(kind="trtllm", version="1.2.1", draft_len=0)
    code, _, _ = check(plain, "--record", str(tmp_path / "b.json"), "--dataset", str(dataset))
    assert code == 0 and json.loads((tmp_path / "b.json").read_text())["withheld"] is None


def test_bench_sends_nothing_that_ends_the_engine(stand_in: Start, dataset: Path) -> None:
    old = stand_in(kind="trtllm", version="1.2.1", logprobs="deadly")
    words = ["bench", old, "--dataset", str(dataset), "--samples", "2", "--concurrency", "1", "--extra-body"]
    for body, says in (({"logprobs": True}, "ends the engine"), ({"min_length": 3}, "ignores min_length")):
        command = [sys.executable, "-m", "trtspec", *words, json.dumps(body)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert says in done.stdout + done.stderr and (done.returncode == 2) == ("logprobs" in body)
