"""Prompts and answers of a given length: prompts by the target's tokenizer, and a warning where the server counts
otherwise."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_counters import QUESTIONS, CountingServer, bench
from tests.bench.test_raw_prompts import ROWS
from trtspec.bench.conditions import PromptSizes, parse, read_tokenizer
from trtspec.bench.datasets import DatasetChoice, Question, load_dataset
from trtspec.bench.results import BenchResults
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.client.client import RequestSampling
from trtspec.data_files import kimi_nano_dir
from trtspec.errors import Problem, UsageError

NANO = str(kimi_nano_dir())
TOKENIZER = KimiTokenizer(NANO)


def prompt_tokens(question: Question, raw: bool) -> int:
    """By hand: what the template makes of the messages, or the messages alone."""
    messages = question.request(0, [])
    if raw:
        return len(TOKENIZER.encode(messages[0]["content"]))
    return len(TOKENIZER.apply_chat_template(messages, list(question.tools) or None, thinking=None))


@dataclass
class NanoServer(CountingServer):
    """Counts prompts by kimi-nano's tokenizer, `grows_by` more than it should; keeps the bodies."""

    grows_by: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, body: dict[str, Any]) -> bytes:
        self.fixed_prompt = self.grows_by + len(
            TOKENIZER.apply_chat_template(body["messages"], body.get("tools"), thinking=None)
        )
        self.bodies.append(body)
        return super().answer(body | {"messages": [{"content": str(body["messages"])}]})


def measured(server: CountingServer, **changes: Any) -> BenchResults:
    found: BenchResults = server.run(lambda url: bench(url, **{"tokenizer": NANO, **changes}))
    return found


def missed(results: BenchResults) -> list[Problem]:
    return [problem for problem in results.problems if problem.code == "TS-BENCH-LENGTH"]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("tokens", [48, 500, 3000])
def test_prompts_have_the_length_that_was_asked_for(tokens: int, raw: bool) -> None:
    """Longer than the whole set, so that its text repeats, and shorter than one question, which is cut."""
    asked = [*QUESTIONS, Question("long", "code", ("def f(): " * 300 + "what is it?",))]
    found = PromptSizes(NANO, raw).fitted(asked, tokens, "--isl")
    assert all(abs(prompt_tokens(question, raw) - tokens) <= 3 for question in found)
    assert all(new.turns[0].endswith(old.turns[0][-20:]) for new, old in zip(found, asked, strict=True))
    assert len({question.turns[0][:3] for question in found}) == len(asked), "no two of them share a prefix"


def test_lengths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--isl 5: q0 has .* tokens beside its text"):
        measured(CountingServer(), isl=5)
    for name in ("moonshotai/Kimi-K2.5", "no-such-directory", str(tmp_path)):
        with pytest.raises(UsageError, match=f"--isl 64: no tokenizer of {name} is here") as failed:
            read_tokenizer(name, "--isl 64")
        assert "--tokenizer" in failed.value.remedy
    with pytest.raises(UsageError, match="--under context=64: no tokenizer of m is here"):
        measured(CountingServer(), conditions=tuple(parse(["context=64"])), tokenizer=None)


def test_lengths_that_the_server_did_not_keep_are_named() -> None:
    """It writes 30 tokens whatever `min_tokens` says, and reads 40 more than the tokenizer counts."""
    results = measured(NanoServer(grows_by=40), isl=128, osl=200, sampling=RequestSampling(max_tokens=200))
    found = {problem.message.split()[0]: problem.message for problem in missed(results)}
    assert found["--osl"] == "--osl asked for 200 tokens, and the server counts 30 (median of 8)"
    assert set(found) == {"--osl", "--isl"} and "asked for 128 tokens" in found["--isl"]
    results = measured(NanoServer(grows_by=40), conditions=tuple(parse(["context=200"])))
    assert [problem.message.split(",")[0] for problem in missed(results)] == ["--under context asked for 200 tokens"]
    assert not missed(measured(NanoServer(), isl=128, osl=30, sampling=RequestSampling(max_tokens=30)))


def rows(tmp_path: Path, *names: str, **choice: Any) -> dict[str, Any]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS if not names or row["id"] in names))
    return {"dataset": load_dataset(str(file), choice=DatasetChoice(**choice))}


def sized(results: BenchResults) -> list[str]:
    return [problem.message for problem in results.problems if problem.code == "TS-BENCH-SIZED-PROMPTS"]


def test_a_context_keeps_tools_pictures_and_recorded_messages(tmp_path: Path) -> None:
    server = NanoServer()
    results = measured(server, conditions=tuple(parse(["context=300"])), **rows(tmp_path))
    long = [body for body in server.bodies if len(str(body["messages"])) > 500]
    kinds = [key for body in long for key in ("tools", "image_url", "tool_calls", "reasoning_content")
             if f"'{key}'" in str(body)]  # fmt: skip
    assert sorted(set(kinds)) == ["image_url", "reasoning_content", "tool_calls", "tools"]
    assert any("The area?" in str(body["messages"][-1]["content"]) for body in long if "tools" in body)
    told = [turn for turn in results.questions_detail if turn.category == "context of 300"]
    assert {turn.question.split()[0] for turn in told} == {row["id"] for row in ROWS}
    assert not missed(results) and not sized(results), "tools and earlier messages count"


def test_what_a_length_leaves_out_is_named(tmp_path: Path) -> None:
    server = NanoServer()
    (message,) = sized(measured(server, isl=300, **rows(tmp_path)))
    assert message.startswith("4 of 5 questions have tools and pictures and recorded tool calls and recorded reasoning")
    assert message.endswith("(for example tools); the prompts hold only their text")
    assert not any("tools" in body for body in server.bodies)
    assert not sized(measured(NanoServer(), isl=300, **rows(tmp_path, "text")))
    context = tuple(parse(["context=300"]))
    with pytest.raises(UsageError, match="context=300 asks nothing: 1 of 1 questions are recorded sessions"):
        measured(NanoServer(), conditions=context, **rows(tmp_path, "thought", replay=True))
