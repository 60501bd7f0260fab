"""Prompts and answers of a given length, held to what the server counts: never a figure under a length that was not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_counters import CountingServer, bench
from tests.bench.test_raw_prompts import ROWS
from trtspec.bench.client import RequestSampling
from trtspec.bench.conditions import parse
from trtspec.bench.datasets import DatasetChoice, load_dataset
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


FOR_TOOLS, FOR_PICTURES = 40, 60  # tokens


@dataclass
class ToolServer(CountingServer):
    """Counts the words of all messages, and tools and pictures beside them."""

    bodies: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, body: dict[str, Any]) -> bytes:
        parts = [part for message in body["messages"] for part in contents(message)]
        words = " ".join(part.get("text", "") for part in parts)
        self.extra_tokens = FOR_TOOLS * ("tools" in body) + FOR_PICTURES * any("image_url" in part for part in parts)
        if body["max_tokens"] > 1:
            self.bodies.append(body)
        return super().answer(body | {"messages": [{"content": words}]})


def contents(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"text": content}] if isinstance(content, str) else list(content)


def rows(tmp_path: Path, *names: str, **choice: Any) -> dict[str, Any]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS if not names or row["id"] in names))
    return {"dataset": load_dataset(str(file), choice=DatasetChoice(**choice))}


def sized(results: BenchResults) -> list[str]:
    return [problem.message for problem in results.problems if problem.code == "TS-BENCH-SIZED-PROMPTS"]


def test_a_context_keeps_tools_pictures_and_recorded_messages(tmp_path: Path) -> None:
    server = ToolServer()
    results = measured(server, conditions=tuple(parse(["context=300"])), **rows(tmp_path))
    long = [body for body in server.bodies if len(str(body["messages"])) > 500]
    kinds = [key for body in long for key in ("tools", "image_url", "tool_calls", "reasoning_content")
             if f"'{key}'" in str(body)]  # fmt: skip
    assert sorted(set(kinds)) == ["image_url", "reasoning_content", "tool_calls", "tools"]
    assert any("The area?" in str(body["messages"][-1]["content"]) for body in long if "tools" in body)
    told = [turn for turn in results.questions_detail if turn.category == "context of 300"]
    assert {turn.question.split()[0] for turn in told} == {row["id"] for row in ROWS}
    assert not missed(results) and not sized(results), "tools and pictures count"
    with pytest.raises(UsageError, match="counts 61 tokens beside the text of shown"):
        measured(server, conditions=tuple(parse(["context=50"])), **rows(tmp_path))


def test_what_a_length_leaves_out_is_named(tmp_path: Path) -> None:
    server = ToolServer()
    (message,) = sized(measured(server, isl=300, **rows(tmp_path)))
    assert message.startswith("4 of 5 questions have tools and pictures and recorded tool calls and recorded reasoning")
    assert message.endswith("(for example tools); the prompts hold only their text")
    assert not any("tools" in body for body in server.bodies)
    assert not sized(measured(ToolServer(), isl=300, **rows(tmp_path, "text")))
    context = tuple(parse(["context=300"]))
    with pytest.raises(UsageError, match="context=300 asks nothing: 1 of 1 questions are recorded sessions"):
        measured(ToolServer(), conditions=context, **rows(tmp_path, "thought", replay=True))
