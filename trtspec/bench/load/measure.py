"""`bench`: the load on one or several endpoints.

Several endpoints are loaded one at a time, round by round and in rotating order, so that a noisy machine disturbs all
of them alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from trtspec.bench.load.journal import LoadLevel, Round, RunJournal, good
from trtspec.bench.questions.datasets import Dataset, Question
from trtspec.bench.results import Workload
from trtspec.bench.statistics import without_surplus
from trtspec.checkpoint.published import ThinkingLevel
from trtspec.client import servers
from trtspec.client.client import (
    CHAT,
    OWNED,
    RAW,
    Answer,
    RequestSampling,
    chat_body,
    new_client,
    refuse_owned,
    remedy_for,
    stream_answer,
)
from trtspec.errors import TrtspecError, UsageError
from trtspec.report import Bar

WARMUP_TOKENS = 16
BENCH_OWNED = {  # keys of a request that options set and every figure states
    **OWNED,
    "messages": "give `dataset`",
    "prompt": "give `dataset`",
    "tools": "give a `dataset` whose questions have tools",
    "seed": "give `seed`",
    "stream": "leave it out: answers are always streamed",
    "stream_options": "leave it out: usage is always asked for",
}
THINKING_OWNED = dict.fromkeys(
    ("chat_template_kwargs", "reasoning_effort"),
    "leave `thinking` out and set it in `extra_body` with the rest",
)
OPEN_CONNECTIONS = 4096  # at a given rate the server decides how many are in flight
Ask = tuple[int, Question]  # a question with its place in the workload, which makes its seed
Converse = Callable[[int, Question], Coroutine[Any, Any, None]]  # asks a question to its last turn
# request parameters that a server's release handles badly under speculation: "end_engine", "ignored", "refused"
RequestLimits = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class BenchWorkload:
    """What is asked: all questions of `dataset` at each level, in `rounds` equal parts. Levels are `concurrency`, or
    where set `rates` (conversations per second). `recorded_times`: at the times of the rows, `rates` being theirs.
    `system`: a message before every question."""

    dataset: Dataset
    sampling: RequestSampling
    concurrency: tuple[int, ...]
    rounds: int = 1
    extra_body: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    thinking: ThinkingLevel | None = None
    system: str | None = None
    recorded_times: bool = False
    warmup: int | None = None
    limit_s: float | None = None

    def __post_init__(self) -> None:
        refuse_owned(self.extra_body, BENCH_OWNED | (THINKING_OWNED if self.thinking else {}))
        if self.system is not None and self.dataset.recorded:
            raise UsageError("recorded requests have their own messages", "leave out `system`")

    @property
    def levels(self) -> list[LoadLevel]:
        if self.rates:
            return [LoadLevel(0, rate) for rate in self.rates]
        return [LoadLevel(concurrency) for concurrency in self.concurrency]

    @property
    def most(self) -> int:
        """The highest number of conversations that are meant to be in flight, for warm-up."""
        return 1 if self.rates else max(self.concurrency)

    @property
    def turns(self) -> int:
        """Answers asked of one endpoint at each level."""
        return sum(question.requests for question in self.dataset.questions)

    def times(self, asked: Sequence[Ask], rate: float, number: int) -> NDArray[np.float64]:
        """Seconds at which the conversations of a round begin: as recorded, else those of a Poisson process."""
        if self.recorded_times:
            times = np.array([question.sent_ms for _, question in asked], dtype=np.float64)
            return (times - times.min()) / 1000
        # a Poisson process has exponential gaps
        rng = np.random.default_rng((self.sampling.seed, number))
        return np.cumsum(rng.exponential(1 / rate, size=len(asked)))

    def body(self) -> dict[str, Any]:
        """What is merged into every request."""
        thinking: dict[str, Any] = {}
        if self.thinking in ("on", "off"):
            thinking = {"chat_template_kwargs": {"thinking": self.thinking == "on"}}
        elif self.thinking:
            thinking = {"reasoning_effort": self.thinking}
        return thinking | self.extra_body

    def parameters(self) -> dict[str, Any]:
        """Parameters that any request has: of recorded ones those that are set."""
        parameters: dict[str, Any] = {}
        for body in self.dataset.recorded:
            for key, value in body.items():
                if value not in (None, False):
                    parameters[key] = value
        return parameters | self.body()

    def describe(self) -> Workload:
        return Workload(
            dataset=self.dataset.name,
            dataset_sha256=self.dataset.sha256,
            licence=self.dataset.licence,
            questions=len(self.dataset.questions),
            turns=self.turns,
            template="the server's chat template",
            thinking=self.thinking,
            system=self.system,
            concurrency=[] if self.rates else list(self.concurrency),
            rates=list(self.rates),
            rounds=self.rounds,
            **asdict(self.sampling),
            limit_s=self.limit_s,
            extra_body=self.body(),
            recorded=bool(self.dataset.recorded),
            recorded_times=self.recorded_times,
        )


async def measure(
    urls: dict[str, str],
    workload: BenchWorkload,
    model: str | None = None,
    *,
    journal: RunJournal | None = None,
    bar: Bar | None = None,
    limits: Callable[[servers.DetectedServer], RequestLimits] = lambda server: {},
    earlier: Mapping[str, servers.DetectedServer] | None = None,
) -> list[MeasuredEndpoint]:
    """Puts the load on every endpoint of `urls` (the first is the one the results are about).

    `limits` is asked before anything is sent; `earlier` holds the server of each earlier result that this run is shown
    with. Raises TrtspecError when a server does not answer or refuses every request.
    """
    journal, bar = journal or RunJournal(None, {}), bar or Bar()
    async with AsyncExitStack() as stack:
        targets = []
        for name, url in urls.items():
            most = OPEN_CONNECTIONS if workload.rates else workload.most
            client = await stack.enter_async_context(new_client(url, most, workload.limit_s))
            server = await servers.detect_server(client, model)
            sampled = bool(workload.sampling.temperature or workload.dataset.recorded)
            refuse_other_server(server, earlier or {}, sampled)
            target = MeasuredEndpoint(
                name, url, client, server, workload, journal, bar, limits(server)
            )
            if deadly := sorted(
                set(workload.parameters()) & set(target.limits.get("end_engine", ()))
            ):
                message = (
                    f"{', '.join(deadly)}: under speculation such a request ends the engine "
                    f"of {name} for everybody"
                )
                raise UsageError(message, "leave it out of every request, or use a later release")
            targets.append(target)
        journal.answered_by({target.name: target.server for target in targets})
        for target in targets:
            target.restless = journal.segment > 0  # a killed run may have left requests behind
        # servers that keep only totals are asked once more by category
        times = [len(workload.levels) + target.server.adapter.around_runs for target in targets]
        bar.show(0, workload.turns * sum(times))
        for target in targets:
            bar.say(f"{target.name}: warming up")
            await target.warm_up()
        asked = list(enumerate(workload.dataset.questions))
        rounds = min(workload.rounds, len(asked))
        # in each round every endpoint answers the same questions, in rotating order
        for level in workload.levels:
            for number in range(rounds):
                first = number % len(targets)
                for target in [*targets[first:], *targets[:first]]:
                    target.rounds += await target.round(level, number, asked[number::rounds])
            for target in targets:
                found = [run for run in target.rounds if run.level == level]
                failed = sum(bool(answer.error) for run in found for answer in run.answers)
                trouble = f", {failed} requests failed" if failed else ""
                bar.say(f"{target.name}, {level.label}: {total_rate(found):.1f} tokens/s{trouble}")
        for target in targets:
            if (answers := target.answers()) and not good(answers):
                reason = str(answers[0].error)
                message = (
                    f"all {len(answers)} requests to {target.name} failed; the first said: {reason}"
                )
                by_hand = "look at the server's log; send one request by hand (curl)"
                raise TrtspecError(message, remedy_for(reason, by_hand))
            await target.ask_by_category()
    return targets


@dataclass
class MeasuredEndpoint:
    """One endpoint under load and everything measured on it. `journal` keeps every answer, `bar` counts them.

    `category_rounds`: each category by itself, of a server that keeps only totals. `unmeasured`: why acceptance is not
    measured, or only in part."""

    name: str
    url: str
    client: httpx.AsyncClient
    server: servers.DetectedServer
    workload: BenchWorkload
    journal: RunJournal
    bar: Bar
    limits: RequestLimits
    rounds: list[Round] = field(default_factory=list)
    category_rounds: list[Round] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    restless: bool = False  # it may still be at work for requests that were given up

    def answers(self) -> list[Answer]:
        return [answer for run in self.rounds for answer in run.answers]

    async def warm_up(self) -> None:
        """Short answers at the highest concurrency, not counted: first-use costs are not what users see."""
        count = self.workload.most if self.workload.warmup is None else self.workload.warmup
        first = [
            replace(question, turns=question.turns[:1], body=None)
            for question in self.workload.dataset.questions[:count]
        ]
        sampling = self.workload.sampling
        short = replace(sampling, max_tokens=min(WARMUP_TOKENS, sampling.max_tokens))

        async def one(place: int, question: Question) -> None:
            async for answer in self.converse(question, place, short):
                self.restless |= bool(answer.error)

        await closed_loop(one, list(enumerate(first)), self.workload.most)

    async def ask_by_category(self) -> None:
        """Asks a server that keeps only totals, as vLLM does, all questions once more, category by category."""
        if not any(
            count.source == servers.FROM_COUNTERS for run in self.rounds for count in run.counts
        ):
            return
        questions = self.workload.dataset.questions
        for category in dict.fromkeys(question.category for question in questions):
            self.bar.say(f"{self.name} keeps totals alone: {category} once more by itself")
            asked = [
                (place, question)
                for place, question in enumerate(questions)
                if question.category == category
            ]
            self.category_rounds += await self.round(
                LoadLevel(self.workload.most, category=category), 0, asked
            )

    async def round(self, level: LoadLevel, number: int, asked: Sequence[Ask]) -> list[Round]:
        """What earlier processes recorded of a round, then what is still to be asked."""
        found, said = list[Round](), dict[str, list[str]]()
        name = f"{self.name}|{level.label}|{number}"
        for stored in self.journal.rounds(name, level, number):
            counts = stored.counts or servers.all_counts(stored.answers, self.unmeasured)
            if not (counts or stored.complete) and await self.counters():
                where = f"{len(stored.answers)} answers of {level.label}, round {number + 1}"
                self.unmeasured.append(f"{where} were read before an interruption")
            found.append(replace(stored, counts=counts))
            for answer in sorted(stored.answers, key=lambda answer: answer.turn):
                said.setdefault(answer.question, []).append(answer.text)
                self.bar.advance(1)
        # a conversation resumes behind its last recorded answer
        left = [
            (place, question)
            for place, question in asked
            if len(said.get(question.id, ())) < question.requests
        ]
        return [*found, await self.ask(name, level, number, left, said)] if left else found

    async def ask(
        self,
        name: str,
        level: LoadLevel,
        number: int,
        asked: Sequence[Ask],
        said: Mapping[str, list[str]],
    ) -> Round:
        """The load itself, with the server's counters around it where answers do not report speculation. `said`: texts
        of the first turns of conversations that resume, by question."""
        answers, sampling = list[Answer](), self.workload.sampling
        before = await self.counters(settled=self.restless)
        began = time.perf_counter()

        async def one(place: int, question: Question) -> None:
            async for answer in self.converse(question, place, sampling, said.get(question.id, ())):
                answers.append(answer)
                self.journal.record(name, answer, began)
                self.bar.advance(1)

        if level.rate is None:
            await closed_loop(one, asked, level.concurrency)
        else:
            await open_loop(one, asked, self.workload.times(asked, level.rate, number))
        seconds = time.perf_counter() - began
        after = await self.counters()
        counts = servers.all_counts(answers, self.unmeasured)
        answered = good(answers)
        failed = len(answers) - len(answered)
        self.restless = failed > 0
        if before and after and answered and not counts:
            if failed:  # its counters hold what it did for them, and nobody knows how much that was
                where = f"{failed} of {len(answers)} answers of {level.label}, round {number + 1}"
                self.unmeasured.append(
                    f"{where} failed, and the server counts all requests together"
                )
            else:
                tokens = sum(answer.completion_tokens for answer in answered)
                pooled = servers.counts_between(
                    before, after, level.category or "all", tokens, self.unmeasured
                )
                questions = len({answer.question for answer in answered})
                counts = [without_surplus(pooled, len(answered), questions)] if pooled else []
        found = Round(level, number, answers, seconds, counts)
        self.journal.end(name, found)
        return found

    async def counters(self, settled: bool = False) -> servers.Counters | None:
        """A reading of its speculation counters, as `servers.read_counters`."""
        return await servers.read_counters(self.client, self.server, self.unmeasured, settled)

    async def converse(
        self, question: Question, place: int, sampling: RequestSampling, said: Sequence[str] = ()
    ) -> AsyncIterator[Answer]:
        """The answers to the turns of one question as they come, each asked with the model's own earlier answers, of
        which `said` holds the first; stops at the first error."""
        messages: list[dict[str, Any]] = []
        if self.workload.system is not None:
            messages.append({"role": "system", "content": self.workload.system})
        for turn in range(question.requests):
            messages += question.request(turn)
            if turn < len(said):
                messages.append({"role": "assistant", "content": said[turn]})
                continue
            if question.body:
                body = {**question.body, "model": self.server.model}
            else:
                body = chat_body(self.server.model, messages, sampling, place)
                if question.tools:
                    body["tools"] = list(question.tools)
            answer = await stream_answer(
                self.client,
                body | self.workload.body(),
                question.id,
                question.category,
                turn,
                path=RAW if "prompt" in body else CHAT,
                limit_s=self.workload.limit_s,
            )
            yield answer
            if answer.error:
                break
            messages.append({"role": "assistant", "content": answer.text})


async def closed_loop(converse: Converse, asked: Sequence[Ask], concurrency: int) -> None:
    """Asks all questions with `concurrency` of them in flight; a slot that ends takes the next one at once."""
    queue = list(asked)[::-1]

    async def slot() -> None:
        while queue:
            await converse(*queue.pop())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asked))):
            group.create_task(slot())


async def open_loop(converse: Converse, asked: Sequence[Ask], times: Iterable[float]) -> None:
    """Begins conversations at these times, in seconds from now."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for when, (place, question) in sorted(zip(times, asked, strict=True), key=itemgetter(0)):
            await asyncio.sleep(max(0.0, began + when - time.perf_counter()))
            group.create_task(converse(place, question))


def total_rate(rounds: Sequence[Round]) -> float:
    """Output tokens over wall time of one round, which may have been resumed."""
    tokens = sum(a.completion_tokens for run in rounds for a in run.answers if not a.error)
    return tokens / max(sum(run.seconds for run in rounds), 1e-9)


def refuse_other_server(
    server: servers.DetectedServer, earlier: Mapping[str, servers.DetectedServer], sampled: bool
) -> None:
    """Raises UsageError if an earlier result is another model's, or its sampled requests drew drafts in another way."""
    for where, other in earlier.items():
        if other.model != server.model:
            message = f"{where} holds figures of the model {other.model}, and this server serves {server.model}"
            raise UsageError(
                message,
                "compare runs of one model; `model` names another one that the server lists",
            )
        drawn = (other.draft_sampling, server.draft_sampling)
        if sampled and None not in drawn and drawn[0] != drawn[1]:
            message = f"{where} drew {drawn[0]} drafts, and this server draws {drawn[1]} ones"
            raise UsageError(
                message, "compare runs with the same draft sampling, or at temperature 0"
            )
