"""Prompts and answers of a given length, held to what the server counts: never a figure under a length that was not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.test_counters import CountingServer, bench
from trtspec.bench.client import RequestSampling
from trtspec.bench.conditions import parse
from trtspec.bench.results import BenchResults
from trtspec.errors import Problem, TrtspecError, UsageError


def measured(server: CountingServer, **changes: Any) -> BenchResults:
    found: BenchResults = server.run(lambda url: bench(url, **changes))
    return found


def missed(results: BenchResults) -> list[Problem]:
    return [problem for problem in results.problems if problem.code == "TS-BENCH-LENGTH"]


@pytest.mark.parametrize("tokens", [64, 500])
def test_prompts_have_the_length_that_was_asked_for(tokens: int) -> None:
    results = measured(CountingServer(extra_tokens=20), isl=tokens)
    counted = results.concurrency[0].throughput.prompt_tokens
    assert counted is not None and counted.p50 == pytest.approx(tokens, rel=0.03) and not missed(results)


@pytest.mark.parametrize(
    ("server", "changes", "says"),
    [
        ({"extra_tokens": 300}, {"isl": 128}, "--isl 128: http://.* counts 301 tokens for a prompt without words"),
        ({"extra_tokens": 300}, {"conditions": tuple(parse(["context=128"]))}, "--under context=128: .* counts 301"),
        ({"fixed_prompt": 5}, {"isl": 2048}, "--isl 2048: http://.* counts 5 tokens in a prompt of"),
        ({}, {"isl": 16}, "--isl 16 is less than 32"),
        ({}, {"conditions": tuple(parse(["context=16"]))}, "--under context=16 is less than 32"),
    ],
)
def test_lengths_that_cannot_be_are_refused(server: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    played = CountingServer(**server)
    with pytest.raises((TrtspecError, UsageError), match=says):
        measured(played, **changes)
    assert played.longest < 64 * 2048 + 100, "a prompt does not grow without end"


def test_lengths_that_the_server_did_not_keep_are_named() -> None:
    """It writes 30 tokens whatever `min_tokens` says, and its prompts grow once the load begins."""
    server = CountingServer(grows_by=40)
    sampling = RequestSampling(max_tokens=200)
    results = measured(server, isl=128, osl=200, sampling=sampling)
    found = {problem.message.split()[0]: problem.message for problem in missed(results)}
    assert found["--osl"] == "--osl asked for 200 tokens, and the server counts 30 (median of 8)"
    assert set(found) == {"--osl", "--isl"} and "asked for 128 tokens" in found["--isl"]
    results = measured(CountingServer(grows_by=40), conditions=tuple(parse(["context=200"])))
    assert [problem.message.split(",")[0] for problem in missed(results)] == ["--under context asked for 200 tokens"]
    assert not missed(measured(CountingServer(), isl=128, osl=30, sampling=RequestSampling(max_tokens=30)))
