"""`bench`: the load on one or several endpoints.

Several endpoints are loaded one at a time, round by round and in rotating order, so that a noisy machine disturbs all
of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx

from trtspec.bench.load.journal import PartName, RunJournal, good
from trtspec.bench.load.loops import Ask, Load, Round, ServiceLevel, closed_loop, open_loop
from trtspec.bench.questions.datasets import Dataset, Question, spread
from trtspec.bench.results import Workload, level_label
from trtspec.bench.statistics import without_surplus
from trtspec.client import servers
from trtspec.client.client import OWNED, Answer, Endpoint, RequestSampling, new_client, refuse_owned
from trtspec.client.servers import TurnCounts
from trtspec.errors import TrtspecError, UsageError

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
THINKING_VARIABLES = ("thinking", "enable_thinking", "reasoning_effort")  # of the chat templates of model families
SETS = {"reasoning_effort": "--thinking on or off: this server takes no mode"}  # key of a request -> another option
OPEN_CONNECTIONS = 4096  # at a given rate the server decides how many are in flight


# request parameters that a server's release handles badly under speculation: "end_engine", "ignored", "refused"
RequestLimits = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class LoadLevel:
    """One load: so many conversations in flight, or with `rate` so many new ones per second."""

    concurrency: int
    rate: float | None = None

    @property
    def label(self) -> str:
        return level_label(self.concurrency, self.rate)


@dataclass(frozen=True)
class BenchWorkload:
    """What is asked. `samples[i]` questions (None = all) are asked at level i, in `rounds` equal parts; levels are
    `concurrency`, or where set `rates` (conversations per second)."""

    dataset: Dataset
    sampling: RequestSampling
    concurrency: tuple[int, ...]
    samples: tuple[int | None, ...]
    rounds: int = 1
    extra_body: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    thinking: str | None = None
    warmup: int | None = None
    limit_s: float | None = None
    promise: ServiceLevel | None = None

    def __post_init__(self) -> None:
        refuse_owned(self.extra_body, owned_keys(self.extra_body, self.thinking))

    @property
    def levels(self) -> list[LoadLevel]:
        if self.rates:
            return [LoadLevel(OPEN_CONNECTIONS, rate) for rate in self.rates]
        return [LoadLevel(concurrency) for concurrency in self.concurrency]

    @property
    def most(self) -> int:
        """The highest number of conversations that are meant to be in flight, for warm-up."""
        return 1 if self.rates else max(self.concurrency)

    def questions(self, level: int) -> list[Question]:
        return spread(list(self.dataset.questions), self.samples[level])

    def answers(self) -> int:
        """Answers asked of one endpoint over all levels."""
        return sum(question.requests for level in range(len(self.levels)) for question in self.questions(level))

    def body(self) -> dict[str, Any]:
        """What is merged into every request."""
        found = thinking_body(self.thinking)
        for key, value in self.extra_body.items():
            if isinstance(found.get(key), dict) and isinstance(value, dict):
                value = {**found[key], **value}
            found[key] = value
        return found

    def describe(self) -> Workload:
        asked = [self.questions(level) for level in range(len(self.levels))]
        largest = max(asked, key=len)
        return Workload(
            dataset=self.dataset.name,
            dataset_sha256=self.dataset.sha256,
            questions_sha256=self.dataset.asked_sha256,
            licence=self.dataset.licence,
            questions=[len(questions) for questions in asked],
            turns=sum(question.requests for question in largest),
            categories=sorted({question.category for question in largest}),
            template="the server's chat template",
            thinking=self.thinking,
            concurrency=[] if self.rates else list(self.concurrency),
            rates=list(self.rates),
            rounds=self.rounds,
            **asdict(self.sampling),
            limit_s=self.limit_s,
            promise=self.promise.words() if self.promise else None,
            extra_body=self.body(),
        )


def owned_keys(extra_body: Mapping[str, Any], thinking: str | None) -> dict[str, str]:
    """The keys of a request that options set, each with its remedy: figures would be named for what was not asked."""
    owned = dict(BENCH_OWNED)
    if thinking is not None:
        owned["reasoning_effort"] = "leave one of the two out: `thinking` sets how the model reasons"
        variables = extra_body.get("chat_template_kwargs", {})
        if not isinstance(variables, dict) or not variables.keys().isdisjoint(THINKING_VARIABLES):
            owned["chat_template_kwargs"] = owned["reasoning_effort"]
    return owned


def thinking_body(mode: str | None) -> dict[str, Any]:
    """`--thinking`: the variable of Kimi's chat template, or for a named mode OpenAI's reasoning_effort."""
    if mode is None:
        return {}
    if mode in ("on", "off"):
        return {"chat_template_kwargs": {"thinking": mode == "on"}}
    return {"reasoning_effort": mode}


@dataclass
class MeasuredEndpoint:
    """One endpoint under load and everything measured on it: rounds and acceptance counts per level."""

    name: str
    client: httpx.AsyncClient
    endpoint: Endpoint
    server: servers.DetectedServer
    rounds: dict[LoadLevel, list[Round]] = field(default_factory=dict)
    limits: RequestLimits = field(default_factory=dict)
    counts: dict[LoadLevel, list[TurnCounts]] = field(default_factory=dict)
    category_counts: list[TurnCounts] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)  # what it said of its speculation that is not understood
    uncounted: list[str] = field(default_factory=list)  # answers whose steps are in counters that say nothing
    restless: bool = False  # it may still be at work for requests that were given up

    def answers(self) -> list[Answer]:
        return [answer for runs in self.rounds.values() for run in runs for answer in run.answers]


@dataclass
class Progress:
    """Who hears of a run: `say` a line, `show` the answers that are there and that there will be."""

    say: Callable[[str], None] = lambda text: None
    show: Callable[[int, int], None] = lambda done, total: None
    on_answer: Callable[[Answer], None] = lambda answer: None
    journal: RunJournal = field(default_factory=lambda: RunJournal(None, {}))
    done: int = 0
    total: int = 0

    def heard(self, answer: Answer) -> None:
        self.done += 1
        self.show(self.done, self.total)
        self.on_answer(answer)


async def measure(
    urls: dict[str, str],
    workload: BenchWorkload,
    model: str | None = None,
    progress: Progress | None = None,
    limits: Callable[[servers.DetectedServer], RequestLimits] = lambda server: {},
    earlier: Mapping[str, servers.DetectedServer] | None = None,
) -> tuple[list[MeasuredEndpoint], BenchWorkload]:
    """Puts the load on every endpoint of `urls` (the first is the one the results are about).

    `limits` is asked before anything is sent; `earlier` holds the server of each earlier result that this run is shown
    with. Raises TrtspecError when a server does not answer or refuses every request.
    """
    progress = progress or Progress()
    async with AsyncExitStack() as stack:
        targets = []
        for name, url in urls.items():
            most = OPEN_CONNECTIONS if workload.rates else workload.most
            client = await stack.enter_async_context(new_client(url, most, workload.limit_s))
            server = await servers.detect_server(client, model)
            refuse_other_server(server, earlier or {}, workload.sampling.temperature > 0)
            progress.journal.served_by(name, server)
            endpoint = Endpoint(url, server.model, extra_body=workload.body(), limit_s=workload.limit_s)
            found = MeasuredEndpoint(name, client, endpoint, server, limits=limits(server))
            found.restless = progress.journal.segment > 0
            refuse_what_ends_engines(name, found.limits, workload.body())
            targets.append(found)
        again = sum(question.requests for question in workload.questions(0))  # of servers that keep only totals
        progress.total = sum(workload.answers() + again * t.server.adapter.around_runs for t in targets)
        for target in targets:
            progress.say(f"{target.name}: warming up")
            await warm_up(target, workload)
        asked = [workload.questions(number) for number in range(len(workload.levels))]
        if kept := progress.journal.kept():
            progress.say(f"{kept} answers of the interrupted run are kept")
        for level, questions in zip(workload.levels, asked, strict=True):
            part = replace(workload, rounds=min(workload.rounds, len(questions)))
            await run_level(targets, part, questions, level, progress)
        for target in targets:
            refuse_all_failed(target.name, target.answers())
            await count_outside(target, workload, asked[0], progress)
    return targets, workload


def refuse_other_server(
    server: servers.DetectedServer, earlier: Mapping[str, servers.DetectedServer], sampled: bool
) -> None:
    """Raises UsageError if an earlier result is another model's, or its sampled requests drew drafts in another way."""
    for where, other in earlier.items():
        if other.model != server.model:
            message = f"{where} holds figures of the model {other.model}, and this server serves {server.model}"
            raise UsageError(message, "compare runs of one model; `model` names another one that the server lists")
        drawn = (other.draft_sampling, server.draft_sampling)
        if sampled and None not in drawn and drawn[0] != drawn[1]:
            message = f"{where} drew {drawn[0]} drafts, and this server draws {drawn[1]} ones"
            raise UsageError(message, "compare runs with the same draft sampling, or at temperature 0")


def refuse_all_failed(name: str, answers: Sequence[Answer]) -> None:
    """Raises TrtspecError with the server's own words when no request succeeded."""
    if answers and all(answer.error for answer in answers):
        refused = next((option for key, option in SETS.items() if key in (answers[0].error or "")), None)
        raise TrtspecError(
            f"all {len(answers)} requests to {name} failed; the first said: {answers[0].error}",
            f"give {refused}" if refused else "look at the server's log; send one request by hand (curl)",
        )


def refuse_what_ends_engines(name: str, limits: RequestLimits, asked: Iterable[str]) -> None:
    """Raises UsageError, before anything is sent, for parameters that end an engine of this release."""
    if deadly := sorted(set(asked) & set(limits.get("end_engine", ()))):
        message = f"{', '.join(deadly)}: under speculation such a request ends the engine of {name} for everybody"
        raise UsageError(message, "leave it out of `extra_body`, or use a later release")


async def warm_up(target: MeasuredEndpoint, workload: BenchWorkload) -> None:
    """Short answers at the highest concurrency, not counted: first-use costs are not what users see."""
    count = workload.most if workload.warmup is None else workload.warmup
    asked = [(place, question.first_turn) for place, question in enumerate(workload.questions(0)[:count])]
    short = replace(workload.sampling, max_tokens=min(WARMUP_TOKENS, workload.sampling.max_tokens))
    run = await closed_loop(Load(target.client, target.endpoint, short), asked, workload.most)
    target.restless |= any(answer.error for answer in run.answers)


async def run_level(
    targets: Sequence[MeasuredEndpoint],
    workload: BenchWorkload,
    questions: Sequence[Question],
    level: LoadLevel,
    progress: Progress,
) -> None:
    """All rounds of one level: in each round every endpoint answers the same questions, in rotating order."""
    asked, rounds = list(enumerate(questions)), workload.rounds
    for number in range(rounds):
        part = asked[number::rounds]
        first = number % len(targets)
        for target in [*targets[first:], *targets[:first]]:
            name = PartName(target.name, level.label, number)
            runs, counts = await run_part(target, workload, name, level, part, progress)
            target.rounds.setdefault(level, []).extend(runs)
            target.counts.setdefault(level, []).extend(counts)
            answers = [answer for run in runs for answer in run.answers]
            failed = sum(1 for answer in answers if answer.error)
            trouble = f", {failed} of {len(answers)} requests failed" if failed else ""
            where = f"{level.label}, round {number + 1} of {rounds}, {target.name}"
            progress.say(f"{where}: {total_rate(runs):.1f} tokens/s{trouble}")


def total_rate(parts: Sequence[Round]) -> float:
    """Output tokens over wall time of one round, which may have been resumed."""
    tokens = sum(a.completion_tokens for run in parts for a in run.answers if not a.error)
    return tokens / max(sum(run.seconds for run in parts), 1e-9)


async def run_part(
    target: MeasuredEndpoint,
    workload: BenchWorkload,
    name: PartName,
    level: LoadLevel,
    part: Sequence[Ask],
    progress: Progress,
) -> tuple[list[Round], list[TurnCounts]]:
    """One round of one endpoint: what earlier processes recorded of it, and what is still to be asked."""
    runs, counts, said = list[Round](), list[TurnCounts](), dict[str, list[str]]()
    for stored in progress.journal.parts(name):
        answers = good(stored.answers)
        if not answers:
            continue
        ends = stored.seconds or max(answer.finished for answer in answers)
        runs.append(Round(level.concurrency, answers, 0.0, ends, name.number, level.rate))
        own = stored.counts or servers.all_counts(answers, target.unmeasured)
        if not own and stored.seconds is None and await servers.read_counters(target.client, target.server):
            target.uncounted.append(f"{len(answers)} answers of {_where(name)} were read before an interruption")
        counts += own
        for answer in sorted(answers, key=lambda answer: answer.turn):
            said.setdefault(answer.question, []).append(answer.text)
            progress.heard(answer)
    left = [(place, question) for place, question in part if len(said.get(question.id, ())) < question.requests]
    if left:
        run, own = await ask(target, workload, name, level, left, said, progress)
        runs.append(run)
        counts += own
    return runs, counts


def _where(name: PartName) -> str:
    return f"{name.level}, round {name.number + 1}"


async def ask(
    target: MeasuredEndpoint,
    workload: BenchWorkload,
    name: PartName,
    level: LoadLevel,
    asked: Sequence[Ask],
    said: Mapping[str, list[str]],
    progress: Progress,
) -> tuple[Round, list[TurnCounts]]:
    """The load itself, with the server's counters around it where answers do not report speculation."""
    before = await servers.read_counters(target.client, target.server, target.unmeasured, target.restless)
    origin = time.perf_counter()

    def heard(answer: Answer) -> None:
        progress.journal.record(name, answer, origin)
        progress.heard(answer)

    load = Load(target.client, target.endpoint, workload.sampling, heard, said)
    if level.rate is None:
        run = await closed_loop(load, asked, level.concurrency, name.number)
    else:
        run = await open_loop(load, asked, level.rate, workload.sampling.seed, name.number)
    after = await servers.read_counters(target.client, target.server, target.unmeasured)
    counts, from_counters = servers.all_counts(run.answers, target.unmeasured), list[TurnCounts]()
    answered = good(run.answers)
    failed = len(run.answers) - len(answered)
    target.restless = failed > 0
    if before and after and answered and not counts:
        if failed:  # its counters hold what it did for them, and nobody knows how much that was
            target.uncounted.append(f"{failed} of {len(run.answers)} answers of {_where(name)} failed")
        else:
            label = name.level if name.level in {question.category for _, question in asked} else "all"
            tokens = sum(answer.completion_tokens for answer in answered)
            pooled = servers.counts_between(before, after, label, tokens, target.unmeasured)
            questions = len({answer.question for answer in answered})
            counts = from_counters = [without_surplus(pooled, len(answered), questions)] if pooled else []
    progress.journal.end(name, run.seconds, from_counters)
    return run, counts


async def count_outside(
    target: MeasuredEndpoint, workload: BenchWorkload, questions: Sequence[Question], progress: Progress
) -> None:
    """Categories of servers that keep only totals: vLLM is asked the `questions` of the first load once more, category
    by category."""
    if not any(c.source == servers.FROM_COUNTERS for counts in target.counts.values() for c in counts):
        return
    asked = list(enumerate(questions))
    for category in dict.fromkeys(question.category for _, question in asked):
        progress.say(f"{target.name} keeps totals alone: {category} once more by itself")
        part = [(place, question) for place, question in asked if question.category == category]
        name = PartName(target.name, category, 0)
        _, counts = await run_part(target, workload, name, LoadLevel(workload.most), part, progress)
        target.category_counts += counts
