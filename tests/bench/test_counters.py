"""Acceptance from the counters of a server that answers several clients together, as vLLM's.

The counts are those of the prompts that bench asked, and never of requests whose answers nobody
got.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.conftest import answering
from trtspec.bench.load import assemble
from trtspec.bench.load.journal import RunJournal
from trtspec.bench.load.measure import BenchWorkload, measure
from trtspec.bench.questions.datasets import Dataset, Question
from trtspec.bench.results import BenchResults
from trtspec.client import servers
from trtspec.client.client import RequestSampling

TOKENS = 30
DRAFTS = 3
pytestmark = pytest.mark.clock
QUESTIONS = tuple(
    Question(f"q{n}", "code" if n % 2 else "prose", (f"Question {n}?",)) for n in range(8)
)
WORKLOAD = BenchWorkload(
    dataset=Dataset("eight", "0" * 64, QUESTIONS),
    sampling=RequestSampling(max_tokens=64),
    concurrency=(2,),
    warmup=0,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """This server makes a step every 0.01 s."""
    monkeypatch.setattr(servers, "REREAD_S", 0.1)


@dataclass
class CountingServer:
    """Drafts three tokens in each step and counts as vLLM does.

    A step counts when it is made, and so do drafts accepted past the end of an answer. `cut`
    numbers, by prompt, the requests whose answers end without their last event; their steps go on
    for a while. `received`: (steps, accepted) of each answer by its prompt, as a client that counts
    itself would have them.
    """

    cut: dict[str, tuple[int, ...]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    received: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: int = 0
    reached: list[int] = field(default_factory=lambda: [0] * DRAFTS)
    left_over: list[asyncio.Task[None]] = field(default_factory=list)

    def step(self, dice: random.Random) -> int:
        """Tokens of one verification step."""
        accepted = next((place for place in range(DRAFTS) if dice.random() < 0.4), DRAFTS)
        self.steps += 1
        for place in range(accepted):
            self.reached[place] += 1
        return accepted + 1

    def events(self, prompt: str, tokens: int) -> Iterator[dict[str, Any]]:
        dice = random.Random(prompt)
        words = [
            dice.choice(["river", "storm", "bridge", "report", "week", "house"])
            for _ in range(tokens)
        ]
        sizes = [1]
        while sum(sizes) < tokens:
            sizes.append(self.step(dice))
        sizes[-1] -= sum(sizes) - tokens
        self.received[prompt] = (len(sizes) - 1, tokens - len(sizes))
        for place, size in enumerate(sizes):
            text = " ".join(words[sum(sizes[:place]) :][:size]) + " "
            yield {"choices": [{"index": 0, "delta": {"content": text}}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        yield {
            "choices": [],
            "usage": {"prompt_tokens": len(prompt.split()), "completion_tokens": tokens},
        }

    def metrics(self) -> str:
        name = "vllm:spec_decode_num"
        lines = [
            f"{name}_drafts_total {self.steps}",
            f"{name}_draft_tokens_total {DRAFTS * self.steps}",
            f"{name}_accepted_tokens_total {sum(self.reached)}",
        ]
        lines += [
            f'{name}_accepted_tokens_per_pos_total{{position="{p}"}} {n}'
            for p, n in enumerate(self.reached)
        ]
        return "\n".join(lines) + "\n"

    async def go_on(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0.01)
            self.step(random.Random(0))

    def answer(self, body: dict[str, Any]) -> bytes:
        prompt = body["messages"][-1]["content"]
        events = list(self.events(prompt, min(TOKENS, body["max_tokens"])))
        if body["max_tokens"] > 1:
            self.asked.append(prompt)
        if self.asked.count(prompt) in self.cut.get(prompt, ()):
            self.left_over.append(asyncio.create_task(self.go_on()))
            events = events[:3]
        return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)

    def page(self, path: str, body: Any) -> bytes | None:
        if body is not None:
            return self.answer(body)
        models = b'{"data": [{"id": "m", "owned_by": "vllm"}]}'
        return {"/v1/models": models, "/metrics": self.metrics().encode()}.get(path)

    def run(self, then: Callable[[str], Awaitable[Any]]) -> Any:
        """What `then(url)` returns while this answers."""

        async def inside() -> Any:
            found = await answering(self.page, then)
            await asyncio.gather(*self.left_over)
            return found

        return asyncio.run(inside())

    def truth(self, prompts: list[str]) -> float:
        """Acceptance length over these answers."""
        steps, accepted = (
            sum(self.received[prompt][place] for prompt in prompts) for place in (0, 1)
        )
        return round(1 + accepted / steps, 4)


def bench(url: str, raw: RunJournal | None = None, **changes: Any) -> Awaitable[BenchResults]:
    async def measured() -> BenchResults:
        return assemble.assemble(
            await measure({"e": url}, replace(WORKLOAD, **changes), journal=raw)
        )

    return measured()


def stopped_and_resumed(path: Path, **changes: Any) -> Callable[[str], Awaitable[BenchResults]]:
    """A run of which four answers are left, and the rest of it."""

    async def both(url: str) -> BenchResults:
        with RunJournal(path, {}) as raw:
            await bench(url, raw, **changes)
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
        with RunJournal(path, {}) as raw:
            return await bench(url, raw, **changes)

    return both


def codes(results: BenchResults) -> set[str]:
    return {problem.code for problem in results.problems} - {"TS-BENCH-FEW-STEPS"}


def prompts(category: str | None = None) -> list[str]:
    return [question.turns[0] for question in QUESTIONS if category in (None, question.category)]


def test_counters_give_the_truth_for_all_and_by_category() -> None:
    server = CountingServer()
    results = server.run(bench)
    assert (
        results.acceptance_length == server.truth(prompts())
        and results.surplus
        and not codes(results)
    )
    told = {name: found.acceptance_length for name, found in results.categories.items()}
    assert told == {name: server.truth(prompts(name)) for name in ("code", "prose")}


def test_a_part_with_a_failed_answer_has_no_acceptance(tmp_path: Path) -> None:
    """Neither a level with a failed answer nor the next level has wrong figures.

    The steps of the failed answer are in the counters and its tokens are not. The server still
    works for it during the next level.
    """
    server, path = CountingServer(cut={"Question 3?": (1, 3)}), tmp_path / "answers.jsonl"

    async def twice(url: str) -> list[BenchResults]:
        found = []
        for _ in range(2):
            with RunJournal(path, {}) as raw:
                found.append(await bench(url, raw, concurrency=(2, 1)))
            server.cut.clear()
        return found

    failed, whole = server.run(twice)
    first, second = failed.concurrency
    assert first.acceptance_length is None and first.throughput.errors == 1
    assert failed.acceptance_length == second.acceptance_length == server.truth(prompts()), (
        "nothing failed in it"
    )
    assert codes(failed) == {"TS-BENCH-ERRORS", "TS-BENCH-NO-ACCEPTANCE"}
    said = next(problem for problem in failed.problems if problem.code == "TS-BENCH-NO-ACCEPTANCE")
    assert "1 of 8 answers of concurrency 2, round 1 failed" in said.message
    assert "1 of 4 answers of code, round 1 failed" in said.message
    told = {name: found.acceptance_length for name, found in failed.categories.items()}
    assert told == {"prose": server.truth(prompts("prose"))}
    assert (
        whole.concurrency[0].throughput.requests == 8 and not whole.concurrency[0].throughput.errors
    )
    assert server.asked.count("Question 3?") == 5, (
        "three times in the load, twice by category; no other is asked again"
    )
    assert all(server.asked.count(text) <= 3 for text in prompts() if text != "Question 3?")


def test_answers_before_an_interruption_are_said_to_be_uncounted(tmp_path: Path) -> None:
    """Their counters were never read to the end; the answers are kept and the others counted."""
    server, path = CountingServer(), tmp_path / "answers.jsonl"
    results = server.run(stopped_and_resumed(path))
    kept = [
        json.loads(line)["answer"]["question"]
        for line in path.read_text().splitlines()[:5]
        if "answer" in line
    ]
    rest = [question.turns[0] for question in QUESTIONS if question.id not in kept]
    assert 0 < len(kept) < 8 and results.acceptance_length == server.truth(rest)
    assert (
        codes(results) == {"TS-BENCH-NO-ACCEPTANCE"}
        and results.concurrency[0].throughput.requests == 8
    )
    assert (
        f"{len(kept)} answers of concurrency 2, round 1 were read before"
        in results.problems[0].message
    )
