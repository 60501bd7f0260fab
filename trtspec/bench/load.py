"""Closed-loop load: `concurrency` slots, each holding one conversation after the other, and what came out of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from trtspec.bench.client import Answer, Endpoint, RequestSampling, request_body, stream_answer
from trtspec.bench.datasets import Question
from trtspec.bench.results import LatencySpread, Throughput


@dataclass(frozen=True)
class Round:
    """One closed-loop run, in time.perf_counter() seconds; from `busy_from` to `busy_until` all slots were busy."""

    concurrency: int
    answers: list[Answer]
    started: float
    finished: float
    busy_from: float
    busy_until: float


async def closed_loop(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    questions: Sequence[Question],
    sampling: RequestSampling,
    concurrency: int,
    on_answer: Callable[[Answer], None] | None = None,
) -> Round:
    """Holds all conversations with `concurrency` of them in flight; a slot that ends takes the next one at once."""
    queue = list(enumerate(questions))[::-1]
    answers: list[Answer] = []
    slot_started: list[float] = []
    slot_idle: list[float] = []

    async def slot() -> None:
        slot_started.append(time.perf_counter())
        while queue:
            index, question = queue.pop()
            for answer in await converse(client, endpoint, question, sampling, index):
                answers.append(answer)
                if on_answer:
                    on_answer(answer)
        slot_idle.append(time.perf_counter())

    started = time.perf_counter()
    await asyncio.gather(*(slot() for _ in range(min(concurrency, len(questions)))))
    return Round(concurrency, answers, started, time.perf_counter(), max(slot_started), min(slot_idle))


async def converse(
    client: httpx.AsyncClient, endpoint: Endpoint, question: Question, sampling: RequestSampling, index: int
) -> list[Answer]:
    """All turns of one question, each with the model's own earlier answers; stops at the first error."""
    messages = list(question.opening)
    answers = []
    for turn, text in enumerate(question.turns):
        messages.append({"role": "user", "content": text})
        body = request_body(endpoint, messages, sampling, index)
        answer = await stream_answer(client, endpoint, body, question.id, question.category, turn)
        answers.append(answer)
        if answer.error:
            break
        messages.append({"role": "assistant", "content": answer.text})
    return answers


def throughput(rounds: Sequence[Round]) -> Throughput:
    """Rates over the rounds of one concurrency."""
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
        request_s=spread_of([a.finished - a.started for a in good]),
        cached_prompt_tokens=_cached(good),
    )


def total_rate(run: Round) -> float:
    """Output tokens over wall time of one round."""
    return sum(a.completion_tokens for a in run.answers if not a.error) / max(run.finished - run.started, 1e-9)


def steady_rate(run: Round) -> float | None:
    """Output tokens per second while all slots were busy; None with fewer than two conversations per slot."""
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
    """Mean seconds between tokens after the first; a chunk of several tokens counts with all of them."""
    if answer.completion_tokens < 2 or len(answer.chunks) < 2:
        return None
    return (answer.chunks[-1][0] - answer.chunks[0][0]) / (answer.completion_tokens - 1)


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
