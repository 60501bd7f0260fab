"""Load on one server: closed loop (so many conversations in flight) or open loop (so many new ones per second, whatever
the server does with them)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trtspec.bench.questions.datasets import Question
from trtspec.bench.results import level_label
from trtspec.client.client import Answer
from trtspec.client.servers import TurnCounts

Ask = tuple[int, Question]  # a question with its place in the workload, which makes its seed
Converse = Callable[[int, Question], Awaitable[None]]  # asks a question to its last turn


@dataclass(frozen=True)
class LoadLevel:
    """One load: `concurrency` conversations in flight, or with `rate` so many new ones per second and no `concurrency`.
    `category`: its questions are those of one category."""

    concurrency: int
    rate: float | None = None
    category: str = ""

    @property
    def label(self) -> str:
        return self.category or level_label(self.concurrency, self.rate)


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one process asked of one endpoint in a round of a load; a resumed round has several.

    `seconds` of wall time. `most`: conversations that were in flight at once. `counts`: speculation in its answers.
    `complete`: False if the process ended before all were answered."""

    level: LoadLevel
    number: int
    answers: list[Answer]
    seconds: float
    most: int
    counts: list[TurnCounts] = field(default_factory=list)
    complete: bool = True


async def closed_loop(converse: Converse, asked: Sequence[Ask], concurrency: int) -> int:
    """Asks all questions with `concurrency` of them in flight; a slot that ends takes the next one at once. Returns how
    many were in flight."""
    queue = list(asked)[::-1]

    async def slot() -> None:
        while queue:
            await converse(*queue.pop())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asked))):
            group.create_task(slot())
    return concurrency


async def open_loop(converse: Converse, asked: Sequence[Ask], rate: float, seed: tuple[int, int]) -> int:
    """Begins `rate` conversations per second at the times of a Poisson process, drawn from `seed`. Returns the most
    that were in flight."""
    # a Poisson process has exponential gaps
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=len(asked))
    due = time.perf_counter() + np.concatenate([[0.0], np.cumsum(gaps)[:-1]])
    in_flight = most = 0

    async def counted(place: int, question: Question) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await converse(place, question)
        in_flight -= 1

    async with asyncio.TaskGroup() as group:
        for when, (place, question) in zip(due, asked, strict=True):
            await asyncio.sleep(max(0.0, float(when) - time.perf_counter()))
            group.create_task(counted(place, question))
    return most


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
