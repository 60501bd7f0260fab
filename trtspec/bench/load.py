"""Load on a server, and what came out of it: closed loop (so many conversations in flight) or open loop (so many new
ones per second, whatever the server does with them)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import httpx
import numpy as np

from trtspec.bench.datasets import Question
from trtspec.bench.raw_prompts import text_alone
from trtspec.bench.results import Goodput, LatencySpread, Throughput
from trtspec.client.client import Answer, Endpoint, RequestSampling, request_body, stream_answer

Ask = tuple[int, Question]  # a question with its place in the workload, of which its seed is made


@dataclass(frozen=True)
class Round:
    """One run of load, in time.perf_counter() seconds; from `busy_from` to `busy_until` it was in its steady state: all
    slots busy, or new conversations arriving. `number`: which round of its level; a resumed one has several parts."""

    concurrency: int
    answers: list[Answer]
    started: float
    finished: float
    busy_from: float
    busy_until: float
    number: int = 0
    rate: float | None = None


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


@dataclass
class Load:
    """One server under load; `on_answer` gets every answer as soon as it is complete."""

    client: httpx.AsyncClient
    endpoint: Endpoint
    sampling: RequestSampling
    on_answer: Callable[[Answer], None] | None = None
    in_flight: int = 0
    peak: int = 0
    answers: list[Answer] = field(default_factory=list)

    async def hold(self, place: int, question: Question) -> None:
        """One conversation from its first request to its last."""
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            async for answer in converse(self.client, self.endpoint, question, self.sampling, place):
                self.answers.append(answer)
                if self.on_answer:
                    self.on_answer(answer)
        finally:
            self.in_flight -= 1


async def closed_loop(load: Load, asked: Sequence[Ask], concurrency: int, number: int = 0) -> Round:
    """Holds all conversations with `concurrency` of them in flight; a slot that ends takes the next one at once."""
    queue = list(asked)[::-1]
    slot_started: list[float] = []
    slot_idle: list[float] = []

    async def slot() -> None:
        slot_started.append(time.perf_counter())
        while queue:
            await load.hold(*queue.pop())
        slot_idle.append(time.perf_counter())

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asked))):
            group.create_task(slot())
    ends = (max(slot_started, default=started), min(slot_idle, default=started))
    return Round(concurrency, load.answers, started, time.perf_counter(), *ends, number=number)


async def open_loop(load: Load, asked: Sequence[Ask], rate: float, seed: int, number: int = 0) -> Round:
    """Begins `rate` conversations per second at the times of a Poisson process, drawn from `seed`. The steady state
    begins when the first conversation has ended and ends with the last arrival."""
    gaps = np.random.default_rng((seed, number)).exponential(1 / rate, size=len(asked))
    started = time.perf_counter()
    due = started + np.concatenate([[0.0], np.cumsum(gaps)[:-1]])
    async with asyncio.TaskGroup() as group:
        for when, (place, question) in zip(due, asked, strict=True):
            await asyncio.sleep(max(0.0, float(when) - time.perf_counter()))
            group.create_task(load.hold(place, question))
    first_end = min((answer.finished for answer in load.answers), default=started)
    ends = (first_end, max((answer.started for answer in load.answers), default=started))
    return Round(load.peak, load.answers, started, time.perf_counter(), *ends, number=number, rate=rate)


async def converse(
    client: httpx.AsyncClient, endpoint: Endpoint, question: Question, sampling: RequestSampling, place: int
) -> AsyncIterator[Answer]:
    """The answers to all requests of one question as they come, each asked with the model's own earlier answers, or of
    a trace with the recorded ones; stops at the first error. Raises UsageError for a question that the endpoint's kind
    of prompt cannot hold."""
    messages: list[dict] = []
    if question.raw:
        body = {key: value for key, value in endpoint.extra_body.items() if key != "chat_template_kwargs"}
        endpoint = replace(endpoint, api="completions", extra_body=body)
    if endpoint.api == "completions":
        text_alone([question], "a raw prompt")
    for turn in range(question.requests):
        messages += question.request(turn, messages)
        body = request_body(endpoint, messages, sampling, place)
        if question.tools:
            body["tools"] = list(question.tools)
        answer = await stream_answer(client, endpoint, body, question.id, question.category, turn)
        yield answer
        if answer.error:
            break
        if not question.replay:
            messages.append({"role": "assistant", "content": answer.text})


def throughput(rounds: Sequence[Round], promise: ServiceLevel | None = None) -> Throughput:
    """Rates over the rounds of one level."""
    answers = [answer for run in rounds for answer in run.answers]
    good = [answer for answer in answers if not answer.error]
    wall = sum(run.finished - run.started for run in rounds)
    tokens = sum(answer.completion_tokens for answer in good)
    steady = [figure for run in rounds if (figure := steady_rate(run)) is not None]
    return Throughput(
        requests=len(answers),
        errors=len(answers) - len(good),
        output_tokens=tokens,
        wall_s=round(wall, 4),
        tokens_per_s=round(tokens / wall, 3) if wall else None,
        steady_tokens_per_s=round(float(np.mean(steady)), 3) if steady else None,
        tokens_per_s_per_user=spread_of([rate for a in good if (rate := user_rate(a)) is not None]),
        ttft_s=spread_of([a.first_token - a.started for a in good if a.first_token is not None]),
        inter_token_s=spread_of([gap for a in good if (gap := inter_token(a)) is not None]),
        itl_s=spread_of([gap for a in good for gap in chunk_gaps(a)]),
        request_s=spread_of([a.finished - a.started for a in good]),
        cached_prompt_tokens=_cached(good),
        requests_per_s=round(len(good) / wall, 4) if wall else None,
        prompt_tokens=spread_of([float(a.prompt_tokens) for a in good if a.prompt_tokens]),
        answer_tokens=spread_of([float(a.completion_tokens) for a in good]),
        goodput=goodput(answers, wall, promise) if promise else None,
    )


def goodput(answers: Sequence[Answer], wall: float, promise: ServiceLevel) -> Goodput:
    """Answers per second that keep the promise."""
    kept = sum(promise.met(answer) for answer in answers)
    return Goodput(
        promise=promise.words(),
        requests_per_s=round(kept / wall, 4) if wall else 0.0,
        share=round(kept / len(answers), 4) if answers else 0.0,
    )


def total_rate(parts: Sequence[Round]) -> float:
    """Output tokens over wall time of one round, which may have been resumed."""
    tokens = sum(a.completion_tokens for run in parts for a in run.answers if not a.error)
    return tokens / max(sum(run.finished - run.started for run in parts), 1e-9)


def steady_rate(run: Round) -> float | None:
    """Output tokens per second in the steady state; None with fewer than two conversations per slot."""
    seconds = run.busy_until - run.busy_from
    if seconds <= 0 or len({answer.question for answer in run.answers}) < 2 * run.concurrency:
        return None
    good = (answer for answer in run.answers if not answer.error)
    return sum(tokens_between(answer, run.busy_from, run.busy_until) for answer in good) / seconds


def user_rate(answer: Answer) -> float | None:
    """Output tokens per second that one user sees, from request to end, prefill included."""
    seconds = answer.finished - answer.started
    return answer.completion_tokens / seconds if answer.completion_tokens and seconds > 0 else None


def inter_token(answer: Answer) -> float | None:
    """TPOT: mean seconds between tokens after the first; a chunk of several tokens counts with all of them."""
    if answer.completion_tokens < 2 or len(answer.chunks) < 2:
        return None
    return (answer.chunks[-1][0] - answer.chunks[0][0]) / (answer.completion_tokens - 1)


def slowest_tpot(answer: Answer) -> float:
    """TPOT, or the most that it can have been: an answer in one piece does not show when its tokens were written, so
    that all its time counts. Infinite where nobody counted the tokens."""
    found = inter_token(answer)
    if found is not None or answer.completion_tokens == 1:
        return found or 0.0
    return (answer.finished - answer.started) / (answer.completion_tokens - 1) if answer.completion_tokens else math.inf


def chunk_gaps(answer: Answer) -> list[float]:
    """ITL: seconds between chunks as they arrived, of one or more tokens each."""
    times = [when for when, _ in answer.chunks]
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def tokens_between(answer: Answer, begin: float, end: float) -> float:
    """Tokens of an answer that arrived in [begin, end]. A stream does not say how many tokens a chunk holds, so the
    answer's tokens are shared over its chunks by their characters."""
    characters = sum(size for _, size in answer.chunks)
    if not characters:
        return 0.0
    inside = sum(size for when, size in answer.chunks if begin <= when <= end)
    return answer.completion_tokens * inside / characters


def spread_of(values: Sequence[float]) -> LatencySpread | None:
    """Mean and percentiles, or None without values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return LatencySpread(*(round(float(value), 5) for value in (np.mean(values), p50, p90, p99)))


def _cached(answers: Sequence[Answer]) -> int | None:
    known = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    return sum(known) if known else None
