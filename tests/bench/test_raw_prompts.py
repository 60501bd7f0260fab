"""What only a chat request can hold is never dropped from a raw prompt, nor sent as Python writes it: such questions
are left out by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_malformed_metadata import WORKLOAD, pages, served
from tests.command_line import trtspec
from trtspec.bench import assembly, measure
from trtspec.bench.conditions import parse
from trtspec.bench.datasets import load_dataset
from trtspec.bench.results import BenchResults

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
    return assembly.assemble(*targets), bodies


def left_out(results: BenchResults) -> list[tuple[str, str]]:
    return [(p.where, p.message) for p in results.problems if p.code == "TS-BENCH-RAW-PROMPTS"]


def test_completions_ask_text_alone(tmp_path: Path) -> None:
    results, bodies = asked(tmp_path, api="completions")
    assert {body["prompt"] for body in bodies} == {"Why is the sky blue?"} and results.workload["questions"] == [1]
    ((where, message),) = left_out(results)
    assert where == "--api completions" and message.startswith("4 of 5 questions have ") and "example tools" in message
    for what in ("tools", "pictures", "recorded tool calls", "recorded reasoning"):
        assert what in message
    chat, bodies = asked(tmp_path)
    assert not left_out(chat) and chat.workload["questions"] == [5]
    assert any("tools" in body for body in bodies) and "image_url" in json.dumps(bodies)
    assert '"tool_calls"' in json.dumps(bodies), "a chat request holds all of it"


def test_a_condition_without_a_template_asks_text_alone(tmp_path: Path) -> None:
    """All questions as they are, with what they hold; under the condition only those that a raw prompt can hold."""
    results, bodies = asked(tmp_path, conditions=tuple(parse(["template=none"])))
    raw = [body for body in bodies if "prompt" in body]
    assert {body["prompt"] for body in raw} == {"Why is the sky blue?"} and results.workload["questions"] == [6]
    assert {question.question for question in results.questions_detail} == {
        *(f"{row['id']} (as they are)" for row in ROWS), "text (no chat template)"
    }  # fmt: skip
    assert any("tools" in body for body in bodies if body not in raw)
    ((where, message),) = left_out(results)
    assert where == "--under template=none" and message.startswith("4 of 5 questions have ")


@pytest.mark.parametrize("option", [("--api", "completions"), ("--under", "template=none")])
def test_a_set_of_tools_is_refused_by_name(
    stand_in: Callable[..., str], tmp_path: Path, option: tuple[str, str]
) -> None:
    file = tmp_path / "tools.jsonl"
    file.write_text(json.dumps(TOOLS) + "\n")
    done = trtspec("bench", stand_in(), "--dataset", file, *option)
    assert done.status == 2 and " ".join(option) in done.stderr, done.stderr
    assert "1 of 1 questions have tools, which a raw prompt cannot hold (for example tools)" in done.stderr
