"""`bench`: runs the load over one or several endpoints, in alternating rounds.

Several endpoints are loaded one at a time, round by round and in rotating order, so that a noisy machine disturbs all
of them alike; a comparison is the median over rounds of the ratio inside a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx

from trtspec.bench import findings
from trtspec.bench.acceptance import without_surplus
from trtspec.bench.conditions import Condition, PromptSizes, as_text, under, whole
from trtspec.bench.datasets import Dataset, Question, spread
from trtspec.bench.load import Ask, Load, Round, ServiceLevel, closed_loop, open_loop, total_rate
from trtspec.bench.raw_prompts import asked_as_text, sessions_left_out, text_alone
from trtspec.bench.raw_results import PartName, RawResults, whole_conversations
from trtspec.bench.results import level_label
from trtspec.client import servers
from trtspec.client.client import OWNED, Answer, Endpoint, RequestSampling, new_client, refuse_owned
from trtspec.client.servers import TurnCounts
from trtspec.errors import Problem, UsageError

WARMUP_TOKENS = 16
BENCH_OWNED = {  # keys of a request that options set and every figure states
    **OWNED,
    "messages": "give --dataset",
    "prompt": "give --dataset",
    "tools": "give a --dataset whose questions have tools",
    "seed": "give --seed",
    "stream": "leave it out: answers are always streamed",
    "stream_options": "leave it out: usage is always asked for",
}
THINKING_VARIABLES = ("thinking", "enable_thinking", "reasoning_effort")  # of the chat templates of model families
OPEN_CONNECTIONS = 4096  # at a given rate the server decides how many are in flight


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
    `concurrency`, or where set `rates` (conversations per second). `isl`, `osl`: tokens of every prompt and answer;
    `tokenizer`: the target that counts prompts, None for the model that the server names."""

    dataset: Dataset
    sampling: RequestSampling
    concurrency: tuple[int, ...]
    samples: tuple[int | None, ...]
    rounds: int = 1
    api: str = "chat"
    extra_body: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    thinking: str | None = None
    warmup: int | None = None
    limit_s: float | None = None
    promise: ServiceLevel | None = None
    isl: int | None = None
    osl: int | None = None
    tokenizer: str | None = None
    conditions: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        refuse_owned(self.extra_body, owned_keys(self.extra_body, self.thinking, self.osl))

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
        return under(spread(list(self.dataset.questions), self.samples[level]), self.conditions)

    def sizes(self, model: str) -> PromptSizes:
        thinking = {"on": True, "off": False}.get(self.thinking or "")
        return PromptSizes(self.tokenizer or model, self.api == "completions", thinking)

    def turns(self) -> int:
        """Answers asked of one endpoint over all levels."""
        return sum(question.requests for level in range(len(self.levels)) for question in self.questions(level))

    def body(self) -> dict[str, Any]:
        """What is merged into every request."""
        found = {**thinking_body(self.thinking), **({"ignore_eos": True, "min_tokens": self.osl} if self.osl else {})}
        for key, value in self.extra_body.items():
            if isinstance(found.get(key), dict) and isinstance(value, dict):
                value = {**found[key], **value}
            found[key] = value
        return found

    def describe(self) -> dict[str, Any]:
        """The workload as results.json states it: a figure without it is not a measurement."""
        asked = [self.questions(level) for level in range(len(self.levels))]
        largest = max(asked, key=len)
        return {
            "dataset": self.dataset.name,
            "dataset_sha256": self.dataset.sha256,
            "questions_sha256": self.dataset.asked_sha256,
            "licence": self.dataset.licence,
            "questions": [len(questions) for questions in asked],
            "turns": sum(q.requests for q in largest),
            "categories": sorted({q.category for q in largest}),
            "api": self.api,
            "template": "the server's chat template" if self.api == "chat" else "none (raw completion)",
            "thinking": self.thinking,
            "concurrency": [] if self.rates else list(self.concurrency),
            "rates": list(self.rates),
            "rounds": self.rounds,
            **asdict(self.sampling),
            "under": [condition.label for condition in self.conditions],
            "isl": self.isl,
            "osl": self.osl,
            "tokenizer": self.tokenizer,
            "limit_s": self.limit_s,
            "promise": self.promise.words() if self.promise else None,
            "extra_body": self.body(),
        }


def owned_keys(extra_body: Mapping[str, Any], thinking: str | None, osl: int | None) -> dict[str, str]:
    """The keys of a request that options set, each with its remedy: figures would be named for what was not asked."""
    owned = dict(BENCH_OWNED)
    if osl is not None:
        owned |= dict.fromkeys(("ignore_eos", "min_tokens"), "leave one of the two out: --osl sets it")
    if thinking is not None:
        owned["reasoning_effort"] = "leave one of the two out: --thinking sets how the model reasons"
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
    limits: findings.RequestLimits = field(default_factory=dict)
    counts: dict[LoadLevel, list[TurnCounts]] = field(default_factory=dict)
    category_counts: list[TurnCounts] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)  # what it said of its speculation that is not understood
    uncounted: list[str] = field(default_factory=list)  # answers whose steps are in counters that tell nothing
    restless: bool = False  # it may still be at work for requests that were given up

    def answers(self) -> list[Answer]:
        return [answer for runs in self.rounds.values() for run in runs for answer in run.answers]


@dataclass
class Progress:
    """Who hears of a run: `say` a line per round, `on_answer` every measured answer, `raw` keeps them."""

    say: Callable[[str], None] = lambda text: None
    on_answer: Callable[[Answer], None] | None = None
    raw: RawResults = field(default_factory=lambda: RawResults(None, {}))


async def measure(
    urls: dict[str, str],
    workload: BenchWorkload,
    model: str | None = None,
    progress: Progress | None = None,
    limits: Callable[[servers.DetectedServer], findings.RequestLimits] = lambda server: {},
) -> tuple[list[MeasuredEndpoint], BenchWorkload, list[Problem]]:
    """Puts the load on every endpoint of `urls` (the first is the one the results are about).

    `limits` is asked before anything is sent. Returns what was measured, the workload as it was asked in the end and
    what was left out of it. Raises TrtspecError when a server does not answer or refuses every request.
    """
    progress = progress or Progress()
    async with AsyncExitStack() as stack:
        targets = []
        for name, url in urls.items():
            most = OPEN_CONNECTIONS if workload.rates else workload.most
            client = await stack.enter_async_context(new_client(url, most, workload.limit_s))
            server = await servers.detect_server(client, model)
            progress.raw.served_by(name, server)
            endpoint = Endpoint(url, server.model, workload.api, workload.body(), workload.limit_s)  # type: ignore[arg-type]
            found = MeasuredEndpoint(name, client, endpoint, server, limits=limits(server))
            found.restless = progress.raw.segment > 0
            findings.refuse_what_ends_engines(name, found.limits, workload.body())
            targets.append(found)
        workload, problems = await prepare(targets, workload)
        for target in targets:
            await warm_up(target, workload)
        sizes = workload.sizes(targets[0].server.model)
        asked = [
            in_context(workload.questions(number), workload.conditions, sizes) for number in range(len(workload.levels))
        ]
        kept = progress.raw.kept({question.id: question.requests for part in asked for question in part})
        if kept:
            progress.say(f"{kept} answers of the interrupted run are kept")
        for level, questions in zip(workload.levels, asked, strict=True):
            part = replace(workload, rounds=min(workload.rounds, len(questions)))
            await run_level(targets, part, questions, level, progress)
        for target in targets:
            findings.refuse_all_failed(target.name, target.answers())
            await count_outside(target, workload, asked[0], progress)
    return targets, workload, problems


async def prepare(targets: Sequence[MeasuredEndpoint], workload: BenchWorkload) -> tuple[BenchWorkload, list[Problem]]:
    """The workload that all endpoints can be asked: prompts of the length that is wanted, pictures only where taken."""
    questions, problems = list(workload.dataset.questions), list[Problem]()
    if workload.isl:  # prompts of a length are made of text alone
        problems = asked_as_text(questions, f"--isl {workload.isl}")
        questions = [as_text(question) for question in questions]
    else:
        if workload.api == "completions":
            questions, problems = text_alone(questions, "--api completions")
        elif any(condition.raw for condition in workload.conditions):
            problems = text_alone(questions, "--under template=none")[1]
        for tokens in (condition.context for condition in workload.conditions if condition.context):
            problems += sessions_left_out(questions, f"--under context={tokens}")
    if not workload.isl and any(question.has_pictures for question in questions):
        for target in targets:
            refused = await _refuses_pictures(target, next(q for q in questions if q.has_pictures))
            if not refused:
                continue
            kept = [question for question in questions if not question.has_pictures]
            message = f"{target.name} takes no pictures ({refused}): {len(questions) - len(kept)} questions left out"
            if not kept:
                raise UsageError(message, "take a data set of text, or a server that takes pictures")
            questions = kept
            problems.append(
                Problem("TS-BENCH-PICTURES", "warning", target.name, message, "read figures as of text alone")
            )
            break
    if workload.isl:
        sizes = workload.sizes(targets[0].server.model)
        questions = sizes.fitted(questions, workload.isl, f"--isl {workload.isl}")
    return replace(workload, dataset=replace(workload.dataset, questions=tuple(questions))), problems


async def _refuses_pictures(target: MeasuredEndpoint, question: Question) -> str | None:
    """The words of a server that refuses a picture."""
    load = Load(target.client, target.endpoint, RequestSampling(max_tokens=1))
    await load.hold(0, Question(**{**vars(question), "turns": question.turns[:1], "replay": question.replay[:1]}))
    error = load.answers[0].error
    return error if error and error.startswith("HTTP 4") else None


async def warm_up(target: MeasuredEndpoint, workload: BenchWorkload) -> None:
    """Short answers at the highest concurrency, not counted: first-use costs are not what users see."""
    count = workload.most if workload.warmup is None else workload.warmup
    asked = [
        (place, Question(**{**vars(question), "turns": question.turns[:1], "replay": question.replay[:1]}))
        for place, question in enumerate(workload.questions(0)[:count])
    ]
    short = replace(workload.sampling, max_tokens=min(WARMUP_TOKENS, workload.sampling.max_tokens))
    body = {key: value for key, value in target.endpoint.extra_body.items() if key != "min_tokens"}
    run = await closed_loop(Load(target.client, replace(target.endpoint, extra_body=body), short), asked, workload.most)
    target.restless |= any(answer.error for answer in run.answers)


def in_context(questions: list[Question], conditions: Sequence[Condition], sizes: PromptSizes) -> list[Question]:
    """The questions with those of a condition of long context filled to its length."""
    lengths = {condition.label: condition.context for condition in conditions if condition.context}
    found: dict[str, Question] = {}
    for label, tokens in lengths.items():
        part = [whole(question) for question in questions if question.category == label]
        if part:
            filled = sizes.fitted(part, tokens, f"--under context={tokens}")
            found |= {question.id: question for question in filled}
    return [found.get(question.id, question) for question in questions]


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


async def run_part(
    target: MeasuredEndpoint,
    workload: BenchWorkload,
    name: PartName,
    level: LoadLevel,
    part: Sequence[Ask],
    progress: Progress,
) -> tuple[list[Round], list[TurnCounts]]:
    """One round of one endpoint: what earlier processes recorded of it, and what is still to be asked. All of a part is
    asked again where its answers were counted together and some of them failed or are lost."""
    requests = {question.id: question.requests for _, question in part}
    runs, counts, done = [], [], set()
    for stored in progress.raw.parts(name):
        answers = whole_conversations(stored.answers, requests)
        if stored.asked_again:
            progress.say(f"{_where(name)}: asked again, because answers failed there and all are counted together")
        elif answers:
            ends = stored.seconds or max(answer.finished for answer in answers)
            runs.append(Round(level.concurrency, answers, 0.0, ends, 0.0, 0.0, name.number, level.rate))
            own = stored.counts or servers.all_counts(answers, target.unmeasured)
            if not own and stored.seconds is None and await servers.read_counters(target.client, target.server):
                target.uncounted.append(f"{len(answers)} answers of {_where(name)} were read before an interruption")
            counts += own
            done |= {answer.question for answer in answers}
            for answer in answers if progress.on_answer else ():
                progress.on_answer(answer)  # type: ignore[misc]
    left = [(place, question) for place, question in part if question.id not in done]
    if left:
        run, own = await ask(target, workload, name, level, left, progress)
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
    progress: Progress,
) -> tuple[Round, list[TurnCounts]]:
    """The load itself, with the server's counters around it where answers say nothing of speculation."""
    read = servers.settled_counters if target.restless else servers.read_counters
    before = await read(target.client, target.server, target.unmeasured)
    origin = time.perf_counter()

    def heard(answer: Answer) -> None:
        progress.raw.record(name, answer, origin)
        if progress.on_answer:
            progress.on_answer(answer)

    load = Load(target.client, target.endpoint, workload.sampling, heard)
    if level.rate is None:
        run = await closed_loop(load, asked, level.concurrency, name.number)
    else:
        run = await open_loop(load, asked, level.rate, workload.sampling.seed, name.number)
    after = await servers.read_counters(target.client, target.server, target.unmeasured)
    counts, from_counters = servers.all_counts(run.answers, target.unmeasured), []
    good = [answer for answer in run.answers if not answer.error]
    failed = len(run.answers) - len(good)
    target.restless = failed > 0
    if before and after and good and not counts:
        tokens = sum(answer.completion_tokens for answer in run.answers)
        label = name.level if name.level in {question.category for _, question in asked} else "all"
        pooled = servers.counts_between(before, after, label, tokens, target.unmeasured)
        if pooled is not None:
            from_counters = [without_surplus(pooled, len(good), len({answer.question for answer in good}))]
        if failed:  # what it did for them is in its counters, and nobody knows how much that was
            target.uncounted.append(f"{failed} of {len(run.answers)} answers of {_where(name)} failed")
        else:
            counts = from_counters
    progress.raw.end(name, run.finished - run.started, from_counters)
    return run, counts


async def count_outside(
    target: MeasuredEndpoint, workload: BenchWorkload, questions: Sequence[Question], progress: Progress
) -> None:
    """Categories for servers that only keep totals: vLLM once more, the `questions` of the first load category by
    category; SGLang's running mean."""
    good = [answer for answer in target.answers() if not answer.error]
    if not any(target.counts.values()):
        tokens = sum(answer.completion_tokens for answer in good)
        mean = await servers.running_mean(target.client, target.server, tokens, target.unmeasured)
        different = len({answer.question for answer in good})
        target.category_counts += [replace(count, answers=len(good), questions=different) for count in mean]
    if not any(c.source == servers.FROM_COUNTERS for counts in target.counts.values() for c in counts):
        return
    quiet = replace(progress, on_answer=None)
    asked = list(enumerate(questions))
    for category in dict.fromkeys(question.category for _, question in asked):
        part = [(place, question) for place, question in asked if question.category == category]
        name = PartName(target.name, category, 0)
        _, counts = await run_part(target, workload, name, LoadLevel(workload.most), part, quiet)
        target.category_counts += counts
