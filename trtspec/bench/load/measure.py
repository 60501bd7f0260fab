"""Sends the requests of `bench` to one or several endpoints and records the answers.

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
    """Sends the workload to every endpoint and returns the endpoints with their answers.

    Raises TrtspecError if a server does not answer or refuses every request. Raises UsageError if a
    server does not suit the workload or the earlier results.

    Args:
        urls: URL of each endpoint by name. The results of a run are about the first.
        model: Name of the model in the requests. None for the first that the server lists.
        journal: Record of the answers. None records nothing.
        limits: Returns the parameters that a server's release handles badly.
        earlier: Servers of the earlier results to compare with, by the option that names them.
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
            target.refuse_crashing_parameters()
            targets.append(target)
        journal.answered_by({target.name: target.server for target in targets})
        # a server that reports only totals (`around_runs`) is sent all questions once more, by
        # category
        passes = [len(workload.levels) + target.server.adapter.around_runs for target in targets]
        bar.show(0, workload.turns * sum(passes))
        for target in targets:
            bar.say(f"{target.name}: warming up")
            # an earlier process that was killed may have left requests on the server
            target.may_be_busy = journal.segment > 0
            await target.warm_up()
        await _measure_levels(targets)
        for target in targets:
            answers = target.answers()
            # figures of failed requests alone would be empty
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
    """Sends every level of the workload to every endpoint, round by round.

    In a round, every endpoint answers the same questions. The order of endpoints rotates.
    """
    workload = targets[0].workload
    questions = list(enumerate(workload.dataset.questions))
    round_count = min(workload.rounds, len(questions))
    for level in workload.levels:
        for number in range(round_count):
            first = number % len(targets)
            round_questions = questions[number::round_count]
            # the rotation distributes disturbances of the machine evenly
            for target in [*targets[first:], *targets[:first]]:
                target.rounds += await target.round(level, number, round_questions)
        for target in targets:
            target.announce(level)


WARMUP_TOKENS = 16
# keys of a request that options of bench set, with the remedy if `extra_body` has one
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
OPEN_CONNECTIONS = 4096  # at a given rate, the server decides how many requests are in flight
# question with its index in the workload, which is added to the seed
IndexedQuestion = tuple[int, Question]
# function that sends all turns of a question, given its index
Converse = Callable[[int, Question], Coroutine[Any, Any, None]]
# Names of request parameters that a server's release handles badly under speculation. The keys are
# "end_engine", "ignored" and "refused".
RequestLimits = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class BenchWorkload:
    """Requests of a run: all questions of a data set, sent once at each level of load.

    concurrency: number of conversations in flight at each level
    rounds: number of equal parts into which the questions are divided
    extra_body: request fields that are added to every request
    rates: number of conversations that begin per second at each level, replaces `concurrency`
    thinking: level of thinking that is requested
    system: message before every question
    recorded_times: whether conversations begin at the times recorded in the data set
    warmup: number of questions before the first level, None for the highest concurrency
    limit_s: seconds after which an answer has failed
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
        """Raises UsageError if `extra_body` or `system` contradicts another setting."""
        owned = BENCH_OWNED
        if self.thinking:
            owned = BENCH_OWNED | THINKING_OWNED
        refuse_owned(self.extra_body, owned)
        if self.system is not None and self.dataset.recorded:
            raise UsageError("recorded requests have their own messages", "leave out `system`")

    @property
    def levels(self) -> list[LoadLevel]:
        """Loads that are measured one after another, in the order given."""
        if self.rates:
            return [LoadLevel(0, rate) for rate in self.rates]
        return [LoadLevel(concurrency) for concurrency in self.concurrency]

    @property
    def max_in_flight(self) -> int:
        """Highest number of conversations in flight. 1 with rates, which set no such number."""
        return 1 if self.rates else max(self.concurrency)

    @property
    def turns(self) -> int:
        """Number of answers that one endpoint gives at each level."""
        return sum(question.requests for question in self.dataset.questions)

    def times(
        self, questions: Sequence[IndexedQuestion], rate: float, number: int
    ) -> NDArray[np.float64]:
        """Returns the start of each conversation, in seconds after the start of round `number`.

        Conversations start at their recorded times, or as a Poisson process of `rate` per second.
        """
        if self.recorded_times:
            sent_ms = [question.sent_ms for _, question in questions]
            times_ms = np.array(sent_ms, dtype=np.float64)
            seconds: NDArray[np.float64] = (times_ms - times_ms.min()) / 1000
            return seconds
        # a Poisson process has exponential gaps
        rng = np.random.default_rng((self.sampling.seed, number))
        gaps = rng.exponential(1 / rate, size=len(questions))
        return np.cumsum(gaps)

    def body(self) -> dict[str, Any]:
        """Returns the request fields that are merged into every request.

        A field of `extra_body` replaces a field that sets the thinking level.
        """
        level = self.thinking
        thinking: dict[str, Any] = {}
        if level in ("on", "off"):
            thinking["chat_template_kwargs"] = {"thinking": level == "on"}
        elif level:
            thinking["reasoning_effort"] = level
        return thinking | self.extra_body

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters that any request sets, including recorded requests."""
        parameters: dict[str, Any] = {}
        for body in self.dataset.recorded:
            for key, value in body.items():
                # null and false have the effect of a missing parameter
                if value not in (None, False):
                    parameters[key] = value
        return parameters | self.body()

    def describe(self) -> StatedWorkload:
        """Returns the description of the workload in results.json."""
        dataset = self.dataset
        concurrency = list(self.concurrency)
        # rates take the place of concurrency
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
    """Endpoint under load, with all its answers so far.

    journal: file in which every answer is recorded
    bar: progress, in answers
    limits: request parameters that the server's release handles badly
    rounds: answers at each level of load
    category_rounds: answers to each category separately, for a server that reports only totals
    unmeasured: reasons why acceptance is not measured, or only in part
    may_be_busy: whether the server may still work on requests that their client has abandoned
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
    may_be_busy: bool = False

    def answers(self) -> list[Answer]:
        """Returns the answers of `rounds`, without `category_rounds`."""
        answers = []
        for load_round in self.rounds:
            answers += load_round.answers
        return answers

    def refuse_crashing_parameters(self) -> None:
        """Raises UsageError if a request parameter of the workload would crash the server."""
        parameters = set(self.workload.parameters())
        crashing = sorted(parameters.intersection(self.limits.get("end_engine", ())))
        if crashing:
            message = (
                f"{', '.join(crashing)}: under speculation such a request crashes the engine "
                f"of {self.name} for all users"
            )
            raise UsageError(message, "leave it out of every request, or use a later release")

    def announce(self, level: LoadLevel) -> None:
        """Prints the output tokens per second of a level, and the number of failed requests."""
        rounds = [load_round for load_round in self.rounds if load_round.level == level]
        failed_count = 0
        for load_round in rounds:
            failed_count += len(load_round.answers) - len(good(load_round.answers))
        line = f"{self.name}, {level.label}: {total_rate(rounds):.1f} tokens/s"
        if failed_count:
            line += f", {failed_count} requests failed"
        self.bar.say(line)

    async def warm_up(self) -> None:
        """Requests short answers at the highest concurrency. No figure includes them.

        The first requests to a new server are slow, which users of a running server do not see.
        """
        workload = self.workload
        concurrency = workload.max_in_flight
        count = workload.warmup
        if count is None:
            count = concurrency
        questions = workload.dataset.questions[:count]
        # recorded requests are sent without their own parameters, which allow long answers
        short_questions = [replace(item, turns=item.turns[:1], body=None) for item in questions]
        tokens = min(WARMUP_TOKENS, workload.sampling.max_tokens)
        short = replace(workload.sampling, max_tokens=tokens)

        async def converse(index: int, question: Question) -> None:
            async for answer in self.converse(question, index, short):
                self.may_be_busy |= bool(answer.error)

        await closed_loop(converse, list(enumerate(short_questions)), concurrency)

    async def ask_by_category(self) -> None:
        """Sends all questions once more by category, if the server reports only totals of a round.

        The counters of vLLM are such totals, which do not distinguish the categories of a round.
        """
        sources = set()
        for load_round in self.rounds:
            sources |= {count.source for count in load_round.counts}
        if servers.FROM_COUNTERS not in sources:
            return
        categories: dict[str, list[IndexedQuestion]] = {}
        for index, question in enumerate(self.workload.dataset.questions):
            categories.setdefault(question.category, []).append((index, question))
        for category, questions in categories.items():
            self.bar.say(f"{self.name} reports only totals: {category} is measured separately")
            level = LoadLevel(self.workload.max_in_flight, category=category)
            self.category_rounds += await self.round(level, 0, questions)

    async def round(
        self, level: LoadLevel, number: int, questions: Sequence[IndexedQuestion]
    ) -> list[Round]:
        """Returns the answers of a round, from the journal or from the server.

        The list has an entry for each earlier process that recorded answers of the round, and an
        entry for this process if a question was not answered. `number`: index of the round.
        """
        name = f"{self.name}|{level.label}|{number}"
        rounds = []
        texts: dict[str, list[str]] = {}  # recorded answers by question, in the order of turns
        for stored in self.journal.rounds(name, level, number):
            answers = stored.answers
            counts = stored.counts or servers.all_counts(answers, self.unmeasured)
            # a killed process did not read the server's counters at the end of its round
            if not (counts or stored.complete) and await self.counters():
                part = f"{len(answers)} answers of {level.label}, round {number + 1}"
                self.unmeasured.append(f"{part} were read before an interruption")
            rounds.append(replace(stored, counts=counts))
            for answer in sorted(answers, key=lambda answer: answer.turn):
                texts.setdefault(answer.question, []).append(answer.text)
                self.bar.advance(1)
        unfinished = []
        for index, question in questions:
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
        questions: Sequence[IndexedQuestion],
        texts: Mapping[str, list[str]],
    ) -> Round:
        """Sends questions at a level of load and returns the round with its answers.

        Reads the server's speculation counters before and after. Records every answer.

        Args:
            name: Name of the round in the journal.
            number: Index of the round.
            texts: Recorded answers of conversations that are resumed, by question.
        """
        answers: list[Answer] = []
        before = await self.counters(until_stable=self.may_be_busy)
        began = time.perf_counter()

        async def converse(index: int, question: Question) -> None:
            recorded = texts.get(question.id, ())
            sampling = self.workload.sampling
            async for answer in self.converse(question, index, sampling, recorded):
                answers.append(answer)
                self.journal.record(name, answer, began)
                self.bar.advance(1)

        if level.rate is None:
            await closed_loop(converse, questions, level.concurrency)
        else:
            times = self.workload.times(questions, level.rate, number)
            await open_loop(converse, questions, times)
        seconds = time.perf_counter() - began
        after = await self.counters()
        counts = servers.all_counts(answers, self.unmeasured)
        answered = good(answers)
        self.may_be_busy = len(answered) < len(answers)
        # the counters matter only if the answers themselves do not report speculation
        if before and after and answered and not counts:
            counts = self._counts_between(before, after, Round(level, number, answers, seconds))
        measured = Round(level, number, answers, seconds, counts)
        self.journal.end(name, measured)
        return measured

    def _counts_between(
        self, before: servers.Counters, after: servers.Counters, measured: Round
    ) -> list[servers.TurnCounts]:
        """Returns the speculation of a round from the server's counters before and after it.

        The list has one entry for all answers together. [] if an answer failed or a counter is
        invalid, with the reason appended to `unmeasured`.
        """
        level = measured.level
        count = len(measured.answers)
        answered = good(measured.answers)
        failed_count = count - len(answered)
        # the counters include the work for failed requests, whose extent is unknown
        if failed_count:
            number = measured.number + 1
            part = f"{failed_count} of {count} answers of {level.label}, round {number}"
            reason = f"{part} failed, and the server counts all requests together"
            self.unmeasured.append(reason)
            return []
        tokens = sum(answer.completion_tokens for answer in answered)
        category = level.category or "all"
        pooled = servers.counts_between(before, after, category, tokens, self.unmeasured)
        questions = {answer.question for answer in answered}
        return [without_surplus(pooled, len(answered), len(questions))] if pooled else []

    async def counters(self, until_stable: bool = False) -> servers.Counters | None:
        """Reads the server's speculation counters.

        None if its answers report speculation, or if it has no valid counters. `until_stable`:
        waits until the counters no longer change.
        """
        return await servers.read_counters(self.client, self.server, self.unmeasured, until_stable)

    async def converse(
        self, question: Question, index: int, sampling: RequestSampling, texts: Sequence[str] = ()
    ) -> AsyncIterator[Answer]:
        """Sends the turns of one question and yields each answer, up to the first error.

        The request of a turn contains the model's answers to earlier turns.

        Args:
            index: Index of the question, which is added to the seed.
            texts: Recorded answers to the first turns, which are not sent again.
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
            # a recorded request keeps its own parameters
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


async def closed_loop(
    converse: Converse, questions: Sequence[IndexedQuestion], concurrency: int
) -> None:
    """Sends all questions, `concurrency` conversations at a time.

    The next conversation begins as soon as one ends.
    """
    queue = list(questions)[::-1]

    async def worker() -> None:
        while queue:
            index, question = queue.pop()
            await converse(index, question)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(questions))):
            group.create_task(worker())


async def open_loop(
    converse: Converse, questions: Sequence[IndexedQuestion], times: Iterable[float]
) -> None:
    """Starts each conversation at its time, however many are in flight.

    `times`: seconds after the call, one per question.
    """
    began = time.perf_counter()
    schedule = sorted(zip(times, questions, strict=True), key=itemgetter(0))
    async with asyncio.TaskGroup() as group:
        for start, (index, question) in schedule:
            passed = time.perf_counter() - began
            await asyncio.sleep(max(0.0, start - passed))
            group.create_task(converse(index, question))


def total_rate(rounds: Sequence[Round]) -> float:
    """Returns the output tokens per second of wall time over some rounds.

    Tokens of failed answers do not count.
    """
    tokens = 0
    for load_round in rounds:
        tokens += sum(answer.completion_tokens for answer in good(load_round.answers))
    seconds = sum(load_round.seconds for load_round in rounds)
    return tokens / max(seconds, 1e-9)


def refuse_other_server(
    server: servers.DetectedServer, earlier: Mapping[str, servers.DetectedServer], sampled: bool
) -> None:
    """Raises UsageError if an earlier result has another model or another draft sampling.

    Args:
        earlier: Servers of the earlier results, by the option that names the result.
        sampled: Whether the temperature is above 0, so that draft sampling matters.
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
