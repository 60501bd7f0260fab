"""`bench`: runs the load over one or several endpoints, in alternating rounds, and makes results.json of it.

Several endpoints are loaded one at a time, round by round and in rotating order, so that a noisy machine disturbs all
of them alike; a comparison is the median over rounds of the ratio inside a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import Any

import httpx

from trtspec.bench import adapters, findings
from trtspec.bench.acceptance import TurnCounts, by_category, summarize
from trtspec.bench.client import Answer, Endpoint, RequestSampling, new_client
from trtspec.bench.datasets import Dataset, Question, spread
from trtspec.bench.load import Round, closed_loop, steady_rate, throughput, total_rate
from trtspec.bench.results import BenchResults, EndpointResult, InterleavedLevel, LevelResult, PairRatio
from trtspec.bench.text_quality import judge_run
from trtspec.errors import Problem

WARMUP_TOKENS = 16


@dataclass(frozen=True)
class BenchWorkload:
    """What is asked. `samples[i]` questions (None = all) are asked at `concurrency[i]`, in `rounds` equal parts."""

    dataset: Dataset
    sampling: RequestSampling
    concurrency: tuple[int, ...]
    samples: tuple[int | None, ...]
    rounds: int = 1
    api: str = "chat"
    extra_body: dict[str, Any] = field(default_factory=dict)

    def questions(self, level: int) -> list[Question]:
        return spread(list(self.dataset.questions), self.samples[level])

    def turns(self) -> int:
        """Answers asked of one endpoint over all concurrencies."""
        levels = range(len(self.concurrency))
        return sum(len(question.turns) for level in levels for question in self.questions(level))

    def describe(self) -> dict[str, Any]:
        """The workload as results.json states it: a figure without it is not a measurement."""
        asked = [self.questions(level) for level in range(len(self.concurrency))]
        largest = max(asked, key=len)
        return {
            "dataset": self.dataset.name,
            "dataset_sha256": self.dataset.sha256,
            "questions": [len(questions) for questions in asked],
            "turns": sum(len(q.turns) for q in largest),
            "categories": sorted({q.category for q in largest}),
            "api": self.api,
            "template": "the server's chat template" if self.api == "chat" else "none (raw completion)",
            "concurrency": list(self.concurrency),
            "rounds": self.rounds,
            **asdict(self.sampling),
            "extra_body": self.extra_body,
        }


@dataclass
class MeasuredEndpoint:
    """One endpoint under load and everything measured on it: rounds and acceptance counts per concurrency."""

    name: str
    client: httpx.AsyncClient
    endpoint: Endpoint
    server: adapters.DetectedServer
    rounds: dict[int, list[Round]] = field(default_factory=dict)
    limits: findings.RequestLimits = field(default_factory=dict)
    counts: dict[int, list[TurnCounts]] = field(default_factory=dict)
    category_counts: list[TurnCounts] = field(default_factory=list)

    def answers(self) -> list[Answer]:
        return [answer for runs in self.rounds.values() for run in runs for answer in run.answers]


async def measure(
    urls: dict[str, str],
    workload: BenchWorkload,
    model: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    on_answer: Callable[[Answer], None] | None = None,
    limits: Callable[[adapters.DetectedServer], findings.RequestLimits] = lambda server: {},
) -> tuple[BenchResults, list[dict[str, Any]]]:
    """Measures every endpoint of `urls` (the first is the one the results are about).

    `say` gets a line per round, `on_answer` every measured answer; `limits` is asked before anything is sent. Returns
    the results and the answers with their texts, for answers.jsonl. Raises TrtspecError when a server does not
    answer or refuses every request.
    """
    async with AsyncExitStack() as stack:
        targets = []
        for name, url in urls.items():
            client = await stack.enter_async_context(new_client(url, max(workload.concurrency)))
            server = await adapters.detect_server(client, model)
            endpoint = Endpoint(url, server.model, workload.api, workload.extra_body)  # type: ignore[arg-type]
            found = MeasuredEndpoint(name, client, endpoint, server, limits=limits(server))
            findings.refuse_what_ends_engines(name, found.limits, workload.extra_body)
            targets.append(found)
        for target in targets:
            await warm_up(target, workload)
        for level, concurrency in enumerate(workload.concurrency):
            await run_level(targets, workload, level, concurrency, say, on_answer)
        for target in targets:
            findings.refuse_all_failed(target.name, target.answers())
            await count_outside(target, workload)
    return assemble(targets, workload), answer_records(targets)


async def warm_up(target: MeasuredEndpoint, workload: BenchWorkload) -> None:
    """Short answers at the highest concurrency, not counted: first-use costs are not what users see."""
    questions = [
        Question(q.id, q.category, q.turns[:1], q.opening) for q in workload.questions(0)[: max(workload.concurrency)]
    ]
    short = RequestSampling(min(WARMUP_TOKENS, workload.sampling.max_tokens), workload.sampling.temperature)
    await closed_loop(target.client, target.endpoint, questions, short, max(workload.concurrency))


async def run_level(
    targets: Sequence[MeasuredEndpoint],
    workload: BenchWorkload,
    level: int,
    concurrency: int,
    say: Callable[[str], None],
    on_answer: Callable[[Answer], None] | None,
) -> None:
    """All rounds of one concurrency: in each round every endpoint answers the same questions, in rotating order."""
    questions = workload.questions(level)
    rounds = min(workload.rounds, len(questions))
    for number in range(rounds):
        part = questions[number::rounds]
        first = number % len(targets)
        for target in [*targets[first:], *targets[:first]]:
            before = await adapters.read_counters(target.client, target.server)
            run = await closed_loop(target.client, target.endpoint, part, workload.sampling, concurrency, on_answer)
            after = await adapters.read_counters(target.client, target.server)
            target.rounds.setdefault(concurrency, []).append(run)
            counts = adapters.all_counts(run.answers)
            if before and after and not counts:
                tokens = sum(answer.completion_tokens for answer in run.answers)
                counts = [adapters.counts_between(before, after, "all", tokens)]
            target.counts.setdefault(concurrency, []).extend(counts)
            failed = sum(1 for answer in run.answers if answer.error)
            trouble = f", {failed} of {len(run.answers)} requests failed" if failed else ""
            say(
                f"concurrency {concurrency}, round {number + 1} of {rounds}, {target.name}: "
                f"{total_rate(run):.1f} tokens/s{trouble}"
            )


async def count_outside(target: MeasuredEndpoint, workload: BenchWorkload) -> None:
    """Categories for servers that only keep totals: vLLM once more, category by category; SGLang's running mean."""
    tokens = sum(answer.completion_tokens for answer in target.answers())
    if not any(target.counts.values()):
        target.category_counts += await adapters.running_mean(target.client, target.server, tokens)
    if not any(c.source == adapters.FROM_COUNTERS for counts in target.counts.values() for c in counts):
        return
    questions = workload.questions(0)
    for category in dict.fromkeys(question.category for question in questions):
        part = [question for question in questions if question.category == category]
        before = await adapters.read_counters(target.client, target.server)
        run = await closed_loop(target.client, target.endpoint, part, workload.sampling, max(workload.concurrency))
        after = await adapters.read_counters(target.client, target.server)
        if before and after:
            produced = sum(answer.completion_tokens for answer in run.answers)
            target.category_counts.append(adapters.counts_between(before, after, category, produced))


def assemble(targets: Sequence[MeasuredEndpoint], workload: BenchWorkload) -> BenchResults:
    """The first endpoint is the one that the results are about."""
    problems = list(workload.dataset.problems)
    for target in targets:
        problems += find_problems(target.name, target, workload)
    return BenchResults(
        **vars(describe_target(targets[0])),
        workload=workload.describe(),
        endpoints={target.name: describe_target(target) for target in targets[1:]},
        interleaved=interleaved(targets) if len(targets) > 1 else None,
        problems=problems,
    )


def find_problems(name: str, target: MeasuredEndpoint, workload: BenchWorkload) -> list[Problem]:
    """All findings on one endpoint, named by `where`."""
    answers = target.answers()
    counts = [count for level in target.counts.values() for count in level]
    found = [
        *findings.failed_requests(name, answers),
        *findings.degenerate_output(name, answers),
        *findings.no_acceptance(name, target.server.kind, counts or target.category_counts),
        *findings.nothing_accepted(name, counts),
        *findings.forced_acceptance(name, counts, answers),
        *findings.limited_parameters(name, target.limits, workload.extra_body),
    ]
    if workload.extra_body.get("ignore_eos"):
        found.append(
            Problem(
                "TS-BENCH-IGNORE-EOS",
                "warning",
                name,
                "ignore_eos makes the model write past its own end: acceptance there is not that of real answers",
                "measure acceptance without ignore_eos",
            )
        )
    return found


def describe_target(target: MeasuredEndpoint) -> EndpointResult:
    """One endpoint: pooled acceptance over all concurrencies, by category, and one entry per concurrency."""
    pooled = [count for counts in target.counts.values() for count in counts]
    return EndpointResult(
        **vars(summarize(pooled or target.category_counts)),
        name=target.name,
        url=target.endpoint.base_url,
        server=target.server,
        categories=by_category(target.category_counts or pooled),
        degeneration=judge_run([a.reasoning + a.text for a in target.answers() if not a.error]),
        concurrency=[describe_level(target, concurrency) for concurrency in target.rounds],
        turns_detail=pooled,
    )


def describe_level(target: MeasuredEndpoint, concurrency: int) -> LevelResult:
    counts, rounds = target.counts.get(concurrency, []), target.rounds[concurrency]
    return LevelResult(
        **vars(summarize(counts)),
        concurrency=concurrency,
        categories=by_category(counts),
        throughput=throughput(rounds),
        rounds=[round(total_rate(run), 3) for run in rounds],
    )


def interleaved(targets: Sequence[MeasuredEndpoint]) -> list[InterleavedLevel]:
    """Per concurrency: each endpoint's rate by round, and for every pair the ratio by round, its median and range."""
    levels = []
    for concurrency in targets[0].rounds:
        steady = {t.name: [steady_rate(run) for run in t.rounds[concurrency]] for t in targets}
        fair = all(rate is not None for rates in steady.values() for rate in rates)
        total = {t.name: [total_rate(run) for run in t.rounds[concurrency]] for t in targets}
        rates = steady if fair else total
        levels.append(
            InterleavedLevel(
                concurrency=concurrency,
                metric="steady_tokens_per_s" if fair else "tokens_per_s",
                tokens_per_s={name: [round(float(r or 0), 3) for r in found] for name, found in rates.items()},
                ratios=[pair_ratio(a, b, rates) for a, b in permutations(rates, 2)],
            )
        )
    return levels


def pair_ratio(of: str, over: str, rates: dict[str, Any]) -> PairRatio:
    """`of` / `over`, round by round, with the median and the range."""
    per_round = [a / b for a, b in zip(rates[of], rates[over], strict=True) if b]
    return PairRatio(
        of=of,
        over=over,
        per_round=[round(ratio, 4) for ratio in per_round],
        median=round(statistics.median(per_round), 4) if per_round else None,
        low=round(min(per_round), 4) if per_round else None,
        high=round(max(per_round), 4) if per_round else None,
    )


def answer_records(targets: Sequence[MeasuredEndpoint]) -> list[dict[str, Any]]:
    """Every answer with its text, for answers.jsonl."""
    return [
        {
            "endpoint": target.name,
            "concurrency": concurrency,
            "question": answer.question,
            "category": answer.category,
            "turn": answer.turn,
            "tokens": answer.completion_tokens,
            "finish_reason": answer.finish_reason,
            "error": answer.error,
            "reasoning": answer.reasoning,
            "text": answer.text,
        }
        for target in targets
        for concurrency, rounds in target.rounds.items()
        for run in rounds
        for answer in run.answers
    ]
