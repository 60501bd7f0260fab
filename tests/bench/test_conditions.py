"""`--under`: the same questions in a long context, without a chat template, with a system prompt. What a raw prompt
cannot hold is left out by name."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_counters import CountingServer, bench
from tests.bench.test_malformed_metadata import WORKLOAD, pages, served
from trtspec.bench.load import assemble, measure
from trtspec.bench.questions.conditions import parse
from trtspec.bench.questions.datasets import load_dataset
from trtspec.bench.results import BenchResults
from trtspec.errors import UsageError

TOOL = {"type": "function", "function": {"name": "area", "parameters": {"type": "object"}}}
PICTURE = {"type": "image_url", "image_url": {"url": "https://x/a.png"}}
CALL = {"id": "c0", "type": "function", "function": {"name": "area", "arguments": "{}"}}
TEXT, TOOLS, SHOWN, TRACE, THOUGHT = ROWS = (
    {"id": "text", "prompt": "Why is the sky blue?"},
    {"id": "tools", "messages": [{"role": "user", "content": "The area?"}], "tools": [TOOL]},
    {"id": "shown", "messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, PICTURE]}]},
    {"id": "trace", "messages": [
        {"role": "user", "content": "Fix it."}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "done", "tool_call_id": "c0"}, {"role": "user", "content": "And now?"}]},
    {"id": "thought", "messages": [
        {"role": "user", "content": "One?"}, {"role": "assistant", "content": "1", "reasoning_content": "Hm."},
        {"role": "user", "content": "Two?"}]},
)  # fmt: skip


def asked(tmp_path: Path, **options: Any) -> tuple[BenchResults, list[dict[str, Any]]]:
    """(results, bodies) of all ROWS asked of a server that takes everything."""
    file, bodies = tmp_path / "rows.jsonl", list[dict[str, Any]]()
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    work = replace(WORKLOAD, dataset=load_dataset(str(file)), **options)
    targets = asyncio.run(served(pages("vllm").get, lambda url: measure.measure({"e": url}, work), bodies))
    return assemble.assemble(*targets), bodies


def left_out(results: BenchResults) -> list[tuple[str, str]]:
    return [(p.where, p.message) for p in results.problems if p.code == "TS-BENCH-RAW-PROMPTS"]


def test_a_chat_request_holds_everything(tmp_path: Path) -> None:
    results, bodies = asked(tmp_path)
    assert not left_out(results) and results.workload.questions == [5]
    assert any("tools" in body for body in bodies) and "image_url" in json.dumps(bodies)
    assert '"tool_calls"' in json.dumps(bodies)


def test_a_condition_without_a_template_asks_text_alone(tmp_path: Path) -> None:
    """All questions as they are, with what they hold; under the condition only those that a raw prompt can hold."""
    results, bodies = asked(tmp_path, conditions=tuple(parse(["template=none"])))
    raw = [body for body in bodies if "prompt" in body]
    assert {body["prompt"] for body in raw} == {"Why is the sky blue?"} and results.workload.questions == [6]
    assert {question.question for question in results.questions_detail} == {
        *(f"{row['id']} (as they are)" for row in ROWS), "text (no chat template)"
    }  # fmt: skip
    assert any("tools" in body for body in bodies if body not in raw)
    ((where, message),) = left_out(results)
    assert where == "`under` template=none" and message.startswith("4 of 5 questions have ")


@dataclass
class LongServer(CountingServer):
    """A token is three characters, and the template has 20."""

    bodies: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, body: dict[str, Any]) -> bytes:
        text = str(body["messages"][-1]["content"])
        self.fixed_prompt = 20 + len(text) // 3
        self.bodies.append(body)
        return super().answer(body | {"messages": [{"content": text}]})


def test_a_context_has_the_length_that_the_server_counts(tmp_path: Path) -> None:
    """No tokenizer is here: the server says how many tokens a text of the questions has."""
    server = LongServer()
    work = {"conditions": tuple(parse(["context=800"]))}
    results: BenchResults = server.run(lambda url: bench(url, **work))
    long = [
        body["messages"][-1]["content"] for body in server.bodies if len(str(body)) > 1500 and body["max_tokens"] > 1
    ]
    assert len({text[:8] for text in long}) == len(set(long)) == 8, "no two of them share a prefix"
    assert all(abs(len(text) / 3 + 20 - 800) < 40 for text in long)
    assert {turn.category for turn in results.questions_detail} == {"as they are", "context of 800"}


def test_conditions_are_read_or_refused() -> None:
    labels = [condition.label for condition in parse(["context=4096", "template=none", "system=Be brief."])]
    assert labels[:3] == ["as they are", "context of 4,096", "no chat template"] and "(Be brief.)" in labels[3]
    for texts, says in ((["context=x"], "is not a condition"), (["template=none"] * 2, "a condition twice")):
        with pytest.raises(UsageError, match=says):
            parse(texts)
