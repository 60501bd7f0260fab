"""Load on one server: closed loop (so many conversations in flight) or open loop (so many new ones per second, whatever
the server does with them)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np

from trtspec.bench.questions.datasets import Question
from trtspec.client.client import Answer, Endpoint, RequestSampling, request_body, stream_answer

Ask = tuple[int, Question]  # a question with its place in the workload, which makes its seed


@dataclass(frozen=True)
class Round:
    """One run of load, in time.perf_counter() seconds. `number`: which round of its level; a resumed round has several
    parts."""

    concurrency: int
    answers: list[Answer]
    started: float
    finished: float
    number: int = 0
    rate: float | None = None

    @property
    def seconds(self) -> float:
        return self.finished - self.started


@dataclass
class Load:
    """One server under load; `on_answer` gets every answer as soon as it is complete. `said`: texts of the first turns
    of conversations that resume, by question."""

    client: httpx.AsyncClient
    endpoint: Endpoint
    sampling: RequestSampling
    on_answer: Callable[[Answer], None] = lambda answer: None
    said: Mapping[str, list[str]] = field(default_factory=dict)
    in_flight: int = 0
    peak: int = 0
    answers: list[Answer] = field(default_factory=list)

    async def hold(self, place: int, question: Question) -> None:
        """One conversation to its last request."""
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            said = self.said.get(question.id, [])
            async for answer in converse(self.client, self.endpoint, question, self.sampling, place, said):
                self.answers.append(answer)
                self.on_answer(answer)
        finally:
            self.in_flight -= 1


async def closed_loop(load: Load, asked: Sequence[Ask], concurrency: int, number: int = 0) -> Round:
    """Holds all conversations with `concurrency` of them in flight; a slot that ends takes the next one at once."""
    queue = list(asked)[::-1]

    async def slot() -> None:
        while queue:
            await load.hold(*queue.pop())

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asked))):
            group.create_task(slot())
    return Round(concurrency, load.answers, started, time.perf_counter(), number)


async def open_loop(load: Load, asked: Sequence[Ask], rate: float, seed: int, number: int = 0) -> Round:
    """Begins `rate` conversations per second at the times of a Poisson process, drawn from `seed`."""
    gaps = np.random.default_rng((seed, number)).exponential(1 / rate, size=len(asked))
    started = time.perf_counter()
    due = started + np.concatenate([[0.0], np.cumsum(gaps)[:-1]])
    async with asyncio.TaskGroup() as group:
        for when, (place, question) in zip(due, asked, strict=True):
            await asyncio.sleep(max(0.0, float(when) - time.perf_counter()))
            group.create_task(load.hold(place, question))
    return Round(load.peak, load.answers, started, time.perf_counter(), number, rate)


async def converse(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    question: Question,
    sampling: RequestSampling,
    place: int,
    said: Sequence[str] = (),
) -> AsyncIterator[Answer]:
    """The answers to the turns of one question as they come, each asked with the model's own earlier answers, of which
    `said` holds the first; stops at the first error."""
    messages: list[dict] = []
    for turn in range(question.requests):
        messages += question.request(turn)
        if turn < len(said):
            messages.append({"role": "assistant", "content": said[turn]})
            continue
        body = request_body(endpoint, messages, sampling, place)
        if question.tools:
            body["tools"] = list(question.tools)
        answer = await stream_answer(client, endpoint, body, question.id, question.category, turn)
        yield answer
        if answer.error:
            break
        messages.append({"role": "assistant", "content": answer.text})


@dataclass(frozen=True)
class ServiceLevel:
    """What a user is promised, in seconds: to the first token, between tokens (mean of an answer), to the last."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, text: str) -> ServiceLevel:
        """`ttft:500,tpot:20` in ms, as `vllm bench serve --goodput` has it. Raises ValueError with the first fault."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"{name!r} is none of {', '.join(cls.__dataclass_fields__)}")
            if name in limits:
                raise ValueError(f"{name} is given twice")
            if not 0 < limit < math.inf:
                raise ValueError(f"{value!r} is not a number of milliseconds above 0")
            limits[name] = limit / 1000
        return cls(**limits)

    def met(self, answer: Answer) -> bool:
        """Whether one answer keeps every promise; a failed one keeps none."""
        if answer.error or answer.first_token is None:
            return False
        found = {
            "ttft": answer.first_token - answer.started,
            "tpot": slowest_tpot(answer),
            "e2el": answer.finished - answer.started,
        }
        return all(found[name] <= limit for name, limit in vars(self).items() if limit is not None)

    def words(self) -> str:
        return ", ".join(f"{name} {1000 * limit:g} ms" for name, limit in vars(self).items() if limit is not None)


def inter_token(answer: Answer) -> float | None:
    """TPOT: mean seconds between tokens after the first; a chunk of several tokens counts with all of them."""
    if answer.completion_tokens < 2 or len(answer.chunks) < 2:
        return None
    return (answer.chunks[-1][0] - answer.chunks[0][0]) / (answer.completion_tokens - 1)


def slowest_tpot(answer: Answer) -> float:
    """TPOT, or for an answer in a single chunk its whole time over its tokens. Infinite where nobody counted them."""
    found = inter_token(answer)
    if found is not None or answer.completion_tokens == 1:
        return found or 0.0
    return (answer.finished - answer.started) / (answer.completion_tokens - 1) if answer.completion_tokens else math.inf
