"""The load of `bench` on one or several endpoints.

Several endpoints are loaded one at a time, round by round and in rotating order, so that a noisy
machine disturbs all of them alike.
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
from trtspec.bench.results import StatedWorkload
from trtspec.bench.statistics import without_surplus
from trtspec.checkpoint.published import ThinkingLevel
from trtspec.client import servers
from trtspec.client.client import (
    OWNED,
    Answer,
    RequestSampling,
    chat_body,
    new_client,
    refuse_owned,
    remedy_for,
    stream_answer,
)
from trtspec.errors import TrtspecError, UsageError
from trtspec.report import ProgressBar


async def measure(
    urls: dict[str, str],
    workload: BenchWorkload,
    model: str | None = None,
    *,
    journal: RunJournal | None = None,
    bar: ProgressBar | None = None,
    limits: Callable[[servers.DetectedServer], RequestLimits] = lambda server: {},
    earlier: Mapping[str, servers.DetectedServer] | None = None,
) -> list[MeasuredEndpoint]:
    """Puts the load on every endpoint of `urls` and returns what was measured.

    Raises TrtspecError if a server does not answer or refuses every request.

    Args:
        urls: By name. The results are about the first.
        model: The name to ask for, if a server lists several.
        limits: Called for each server before the first request.
        earlier: The server of each earlier result that this run is shown with, by option.
    """
    journal = journal or RunJournal(None, {})
    bar = bar or ProgressBar()
    async with AsyncExitStack() as stack:
        targets = []
        connections = workload.max_in_flight
        if workload.rates:
            connections = OPEN_CONNECTIONS
        for name, url in urls.items():
            client = await stack.enter_async_context(new_client(url, connections, workload.limit_s))
            server = await servers.detect_server(client, model)
            sampled = bool(workload.sampling.temperature or workload.dataset.recorded)
            refuse_other_server(server, earlier or {}, sampled)
            target = MeasuredEndpoint(
                name, url, client, server, workload, journal, bar, limits(server)
            )
            target.refuse_deadly()
            targets.append(target)
        journal.answered_by({target.name: target.server for target in targets})
        # servers that keep only totals are asked once more by category
        passes = [len(workload.levels) + target.server.adapter.around_runs for target in targets]
        bar.show(0, workload.turns * sum(passes))
        for target in targets:
            bar.say(f"{target.name}: warming up")
            # a killed run may have left requests behind
            target.restless = journal.segment > 0
            await target.warm_up()
        await _measure_levels(targets)
        for target in targets:
            answers = target.answers()
            if answers and not good(answers):
                reason = str(answers[0].error)
                failed = f"all {len(answers)} requests to {target.name} failed"
                by_hand = "look at the server's log; send one request by hand (curl)"
                raise TrtspecError(
                    f"{failed}; the first said: {reason}", remedy_for(reason, by_hand)
                )
            await target.ask_by_category()
    return targets


async def _measure_levels(targets: Sequence[MeasuredEndpoint]) -> None:
    """In each round every endpoint answers the same questions, in rotating order."""
    workload = targets[0].workload
    questions = list(enumerate(workload.dataset.questions))
    rounds = min(workload.rounds, len(questions))
    for level in workload.levels:
        for number in range(rounds):
            first = number % len(targets)
            for target in [*targets[first:], *targets[:first]]:
                target.rounds += await target.round(level, number, questions[number::rounds])
        for target in targets:
            target.announce(level)


WARMUP_TOKENS = 16
# keys of a request that options set and every figure states
BENCH_OWNED = {
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
Ask = tuple[int, Question]  # a question with its index in the workload, which makes its seed
Converse = Callable[[int, Question], Coroutine[Any, Any, None]]  # asks a question to its last turn
# request parameters that a server's release handles badly under speculation: "end_engine",
# "ignored", "refused"
RequestLimits = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class BenchWorkload:
    """All questions of `dataset` at each level, in `rounds` equal parts.

    Levels are `rates` (conversations per second) if any, else `concurrency`. `recorded_times`:
    conversations begin at the times of the rows, whose rate is in `rates`. `system`: a message
    before every question. `warmup`: questions before the first level, None for as many as are in
    flight. `limit_s`: seconds of one answer.
    """

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
        owned = BENCH_OWNED
        if self.thinking:
            owned = BENCH_OWNED | THINKING_OWNED
        refuse_owned(self.extra_body, owned)
        if self.system is not None and self.dataset.recorded:
            raise UsageError("recorded requests have their own messages", "leave out `system`")

    @property
    def levels(self) -> list[LoadLevel]:
        if self.rates:
            return [LoadLevel(0, rate) for rate in self.rates]
        return [LoadLevel(concurrency) for concurrency in self.concurrency]

    @property
    def max_in_flight(self) -> int:
        """The highest number of conversations in flight. 1 with rates, which set none."""
        return 1 if self.rates else max(self.concurrency)

    @property
    def turns(self) -> int:
        """Answers asked of one endpoint at each level."""
        return sum(question.requests for question in self.dataset.questions)

    def times(self, asked: Sequence[Ask], rate: float, number: int) -> NDArray[np.float64]:
        """Returns the seconds at which the conversations of a round begin.

        They begin as recorded, or as a Poisson process of `rate` per second.
        """
        if self.recorded_times:
            sent_ms = [question.sent_ms for _, question in asked]
            times = np.array(sent_ms, dtype=np.float64)
            seconds: NDArray[np.float64] = (times - times.min()) / 1000
            return seconds
        # a Poisson process has exponential gaps
        rng = np.random.default_rng((self.sampling.seed, number))
        return np.cumsum(rng.exponential(1 / rate, size=len(asked)))

    def body(self) -> dict[str, Any]:
        """Returns the fields that are merged into every request."""
        level = self.thinking
        thinking: dict[str, Any] = {}
        if level in ("on", "off"):
            thinking["chat_template_kwargs"] = {"thinking": level == "on"}
        elif level:
            thinking["reasoning_effort"] = level
        return thinking | self.extra_body

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters that any request sets, recorded ones included."""
        parameters: dict[str, Any] = {}
        for body in self.dataset.recorded:
            for key, value in body.items():
                if value not in (None, False):
                    parameters[key] = value
        return parameters | self.body()

    def describe(self) -> StatedWorkload:
        """Returns the workload as results.json states it."""
        dataset = self.dataset
        concurrency = list(self.concurrency)
        if self.rates:
            concurrency = []
        return StatedWorkload(
            dataset=dataset.name,
            dataset_sha256=dataset.sha256,
            licence=dataset.licence,
            questions=len(dataset.questions),
            turns=self.turns,
            template="the server's chat template",
            thinking=self.thinking,
            system=self.system,
            concurrency=concurrency,
            rates=list(self.rates),
            rounds=self.rounds,
            **asdict(self.sampling),
            limit_s=self.limit_s,
            extra_body=self.body(),
            recorded=bool(dataset.recorded),
            recorded_times=self.recorded_times,
        )


@dataclass
class MeasuredEndpoint:
    """One endpoint under load and everything measured on it.

    `journal` keeps every answer, `bar` counts them. `category_rounds`: each category by itself, for
    a server that keeps only totals. `unmeasured`: why acceptance is not measured, or only in part.
    `restless`: the server may still work for requests that were given up.
    """

    name: str
    url: str
    client: httpx.AsyncClient
    server: servers.DetectedServer
    workload: BenchWorkload
    journal: RunJournal
    bar: ProgressBar
    limits: RequestLimits
    rounds: list[Round] = field(default_factory=list)
    category_rounds: list[Round] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    restless: bool = False

    def answers(self) -> list[Answer]:
        """Returns the answers of all rounds."""
        answers = []
        for run in self.rounds:
            answers += run.answers
        return answers

    def refuse_deadly(self) -> None:
        """Raises UsageError for a request parameter that would end the engine."""
        parameters = set(self.workload.parameters())
        deadly = sorted(parameters.intersection(self.limits.get("end_engine", ())))
        if deadly:
            message = (
                f"{', '.join(deadly)}: under speculation such a request ends the engine "
                f"of {self.name} for everybody"
            )
            raise UsageError(message, "leave it out of every request, or use a later release")

    def announce(self, level: LoadLevel) -> None:
        """Shows the output tokens per second of a level, and how many requests failed."""
        rounds = [run for run in self.rounds if run.level == level]
        failed = sum(bool(answer.error) for run in rounds for answer in run.answers)
        line = f"{self.name}, {level.label}: {total_rate(rounds):.1f} tokens/s"
        if failed:
            line += f", {failed} requests failed"
        self.bar.say(line)

    async def warm_up(self) -> None:
        """Asks for short answers at the highest concurrency, which are not counted.

        Users see no first-use costs, so figures hold none.
        """
        workload = self.workload
        concurrency = workload.max_in_flight
        count = workload.warmup
        if count is None:
            count = concurrency
        questions = workload.dataset.questions[:count]
        short_questions = [replace(item, turns=item.turns[:1], body=None) for item in questions]
        tokens = min(WARMUP_TOKENS, workload.sampling.max_tokens)
        short = replace(workload.sampling, max_tokens=tokens)

        async def converse(index: int, question: Question) -> None:
            async for answer in self.converse(question, index, short):
                self.restless |= bool(answer.error)

        await closed_loop(converse, list(enumerate(short_questions)), concurrency)

    async def ask_by_category(self) -> None:
        """Asks all questions once more, category by category, if the server keeps only totals.

        vLLM is such a server.
        """
        sources = set()
        for run in self.rounds:
            sources |= {count.source for count in run.counts}
        if servers.FROM_COUNTERS not in sources:
            return
        categories: dict[str, list[Ask]] = {}
        for index, question in enumerate(self.workload.dataset.questions):
            categories.setdefault(question.category, []).append((index, question))
        for category, asked in categories.items():
            self.bar.say(f"{self.name} keeps totals alone: {category} once more by itself")
            level = LoadLevel(self.workload.max_in_flight, category=category)
            self.category_rounds += await self.round(level, 0, asked)

    async def round(self, level: LoadLevel, number: int, asked: Sequence[Ask]) -> list[Round]:
        """Reads what earlier processes recorded of a round, then asks the rest."""
        name = f"{self.name}|{level.label}|{number}"
        rounds = []
        texts: dict[str, list[str]] = {}  # recorded answers by question
        for stored in self.journal.rounds(name, level, number):
            answers = stored.answers
            counts = stored.counts or servers.all_counts(answers, self.unmeasured)
            if not (counts or stored.complete) and await self.counters():
                part = f"{len(answers)} answers of {level.label}, round {number + 1}"
                self.unmeasured.append(f"{part} were read before an interruption")
            rounds.append(replace(stored, counts=counts))
            for answer in sorted(answers, key=lambda answer: answer.turn):
                texts.setdefault(answer.question, []).append(answer.text)
                self.bar.advance(1)
        unfinished = []
        for index, question in asked:
            if len(texts.get(question.id, ())) < question.requests:
                unfinished.append((index, question))
        if unfinished:
            rounds.append(await self.ask(name, level, number, unfinished, texts))
        return rounds

    async def ask(
        self,
        name: str,
        level: LoadLevel,
        number: int,
        asked: Sequence[Ask],
        texts: Mapping[str, list[str]],
    ) -> Round:
        """Puts the load on the server, and reads its counters around it.

        `texts`: recorded answers of conversations that resume, by question.
        """
        answers: list[Answer] = []
        before = await self.counters(settled=self.restless)
        began = time.perf_counter()

        async def converse(index: int, question: Question) -> None:
            recorded = texts.get(question.id, ())
            sampling = self.workload.sampling
            async for answer in self.converse(question, index, sampling, recorded):
                answers.append(answer)
                self.journal.record(name, answer, began)
                self.bar.advance(1)

        if level.rate is None:
            await closed_loop(converse, asked, level.concurrency)
        else:
            times = self.workload.times(asked, level.rate, number)
            await open_loop(converse, asked, times)
        seconds = time.perf_counter() - began
        after = await self.counters()
        counts = servers.all_counts(answers, self.unmeasured)
        answered = good(answers)
        self.restless = len(answered) < len(answers)
        if before and after and answered and not counts:
            counts = self._counts_between(before, after, Round(level, number, answers, seconds))
        measured = Round(level, number, answers, seconds, counts)
        self.journal.end(name, measured)
        return measured

    def _counts_between(
        self, before: servers.Counters, after: servers.Counters, run: Round
    ) -> list[servers.TurnCounts]:
        """The speculation of a round by the server's counters. [] if it is not known."""
        level = run.level
        count = len(run.answers)
        answered = good(run.answers)
        failed = count - len(answered)
        # the counters hold the work for failed requests, and nobody knows how much that was
        if failed:
            part = f"{failed} of {count} answers of {level.label}, round {run.number + 1}"
            reason = f"{part} failed, and the server counts all requests together"
            self.unmeasured.append(reason)
            return []
        tokens = sum(answer.completion_tokens for answer in answered)
        category = level.category or "all"
        pooled = servers.counts_between(before, after, category, tokens, self.unmeasured)
        questions = {answer.question for answer in answered}
        return [without_surplus(pooled, len(answered), len(questions))] if pooled else []

    async def counters(self, settled: bool = False) -> servers.Counters | None:
        """Reads the server's speculation counters, as `servers.read_counters` does."""
        return await servers.read_counters(self.client, self.server, self.unmeasured, settled)

    async def converse(
        self, question: Question, index: int, sampling: RequestSampling, texts: Sequence[str] = ()
    ) -> AsyncIterator[Answer]:
        """Yields the answers to the turns of one question. Stops at the first error.

        Each turn is asked with the model's answers to the earlier ones. `texts`: answers that are
        known already.
        """
        workload = self.workload
        model = self.server.model
        messages: list[dict[str, Any]] = []
        if workload.system is not None:
            messages.append({"role": "system", "content": workload.system})
        for turn in range(question.requests):
            messages += question.request(turn)
            if turn < len(texts):
                messages.append({"role": "assistant", "content": texts[turn]})
                continue
            if question.body:
                body = {**question.body, "model": model}
            else:
                body = chat_body(model, messages, sampling, index)
                if question.tools:
                    body["tools"] = list(question.tools)
            answer = await stream_answer(
                self.client,
                body | workload.body(),
                question.id,
                question.category,
                turn,
                limit_s=workload.limit_s,
            )
            yield answer
            if answer.error:
                break
            messages.append({"role": "assistant", "content": answer.text})


async def closed_loop(converse: Converse, asked: Sequence[Ask], concurrency: int) -> None:
    """Asks all questions with `concurrency` of them in flight.

    A slot that ends takes the next one at once.
    """
    queue = list(asked)[::-1]

    async def slot() -> None:
        while queue:
            index, question = queue.pop()
            await converse(index, question)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asked))):
            group.create_task(slot())


async def open_loop(converse: Converse, asked: Sequence[Ask], times: Iterable[float]) -> None:
    """Begins conversations at these times, in seconds from now."""
    began = time.perf_counter()
    schedule = sorted(zip(times, asked, strict=True), key=itemgetter(0))
    async with asyncio.TaskGroup() as group:
        for when, (index, question) in schedule:
            passed = time.perf_counter() - began
            await asyncio.sleep(max(0.0, when - passed))
            group.create_task(converse(index, question))


def total_rate(rounds: Sequence[Round]) -> float:
    """Returns output tokens over wall time of one round, which may have been resumed."""
    tokens = sum(answer.completion_tokens for run in rounds for answer in good(run.answers))
    seconds = sum(run.seconds for run in rounds)
    return tokens / max(seconds, 1e-9)


def refuse_other_server(
    server: servers.DetectedServer, earlier: Mapping[str, servers.DetectedServer], sampled: bool
) -> None:
    """Raises UsageError if an earlier result is another model's, or drew its drafts in another way.

    `earlier`: by option. `sampled`: whether drafts are drawn at random.
    """
    for option, other in earlier.items():
        if other.model != server.model:
            message = (
                f"{option} holds figures of the model {other.model}, "
                f"and this server serves {server.model}"
            )
            remedy = "compare runs of one model; `model` names another one that the server lists"
            raise UsageError(message, remedy)
        earlier_mode = other.draft_sampling
        mode = server.draft_sampling
        if sampled and None not in (earlier_mode, mode) and earlier_mode != mode:
            message = f"{option} drew {earlier_mode} drafts, and this server draws {mode} ones"
            remedy = "compare runs with the same draft sampling, or at temperature 0"
            raise UsageError(message, remedy)
