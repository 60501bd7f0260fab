"""results.json from what was measured on each endpoint, with every finding on it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np

from trtspec.bench.load import findings
from trtspec.bench.load.journal import good
from trtspec.bench.load.loops import Round, ServiceLevel, inter_token
from trtspec.bench.load.measure import BenchWorkload, LoadLevel, MeasuredEndpoint, total_rate
from trtspec.bench.results import (
    BenchResults,
    EndpointResult,
    Goodput,
    LatencySpread,
    LevelResult,
    QuestionSpeed,
    SpeedUp,
    Throughput,
    speed_ratio,
)
from trtspec.bench.statistics import by_category, summarize
from trtspec.client.client import Answer
from trtspec.client.text_quality import OutputQuality, judge_run
from trtspec.errors import Problem


def assemble(targets: Sequence[MeasuredEndpoint], workload: BenchWorkload) -> BenchResults:
    """The first endpoint is the one that the results are about."""
    found = [problem for target in targets for problem in find_problems(target, workload)]
    described = [describe_target(target, workload) for target in targets]
    return BenchResults(
        **vars(described[0]),
        workload=workload.describe(),
        endpoints={endpoint.name: endpoint for endpoint in described[1:]},
        speedups=speedups(described),
        problems=found,
    )


def find_problems(target: MeasuredEndpoint, workload: BenchWorkload) -> list[Problem]:
    name, answers = target.name, target.answers()
    counts = [count for level in target.counts.values() for count in level]
    told = counts or target.category_counts
    runs = [run for runs in target.rounds.values() for run in runs]
    return [
        *findings.failed_requests(name, answers),
        *findings.degenerate_output(name, answers),
        *findings.no_acceptance(name, target.server.kind, told, target.unmeasured, target.uncounted),
        *findings.nothing_accepted(name, counts),
        *findings.forced_acceptance(name, counts, answers),
        *findings.limited_parameters(name, target.limits, workload.body()),
        *findings.ignored_end(name, workload.body()),
        *findings.counters_disagree(name, counts),
        *findings.buffered(name, answers),
        *findings.too_few(name, summarize(told), told),
        *findings.overloaded(name, runs),
        *findings.underfilled(name, runs),
    ]


def describe_target(target: MeasuredEndpoint, workload: BenchWorkload) -> EndpointResult:
    """One endpoint: pooled acceptance over all levels, by category, and one entry per level."""
    pooled, answers = [count for counts in target.counts.values() for count in counts], target.answers()
    return EndpointResult(
        **vars(summarize(pooled or target.category_counts)),
        name=target.name,
        url=target.endpoint.base_url,
        server=target.server,
        categories=by_category(target.category_counts or pooled),
        degeneration=quality_of(answers),
        quality={
            name: quality_of([answer for answer in answers if answer.category == name])
            for name in dict.fromkeys(answer.category for answer in answers)
        },
        concurrency=[describe_level(target, level, workload) for level in target.rounds],
        turns_detail=pooled,
        questions_detail=[speed for level in target.rounds for speed in question_speeds(target, level)],
    )


def describe_level(target: MeasuredEndpoint, level: LoadLevel, workload: BenchWorkload) -> LevelResult:
    counts, runs = target.counts.get(level, []), target.rounds[level]
    numbers = sorted({run.number for run in runs})
    return LevelResult(
        **vars(summarize(counts)),
        concurrency=level.concurrency if level.rate is None else max(run.concurrency for run in runs),
        rate=level.rate,
        categories=by_category(counts),
        throughput=throughput(runs, workload.promise),
        rounds=[round(total_rate([run for run in runs if run.number == number]), 3) for number in numbers],
        degeneration=quality_of([answer for run in runs for answer in run.answers]),
    )


def quality_of(answers: Sequence[Answer]) -> OutputQuality:
    return judge_run([answer.written for answer in good(list(answers))])


def throughput(rounds: Sequence[Round], promise: ServiceLevel | None = None) -> Throughput:
    """Rates over the rounds of one level."""
    asked = [answer for run in rounds for answer in run.answers]
    answers, wall = good(asked), sum(run.seconds for run in rounds)
    tokens = sum(answer.completion_tokens for answer in answers)
    waited = [(answer, answer.finished - answer.started) for answer in answers]
    times = [[when for when, _ in answer.chunks] for answer in answers]
    return Throughput(
        requests=len(asked),
        errors=len(asked) - len(answers),
        output_tokens=tokens,
        wall_s=round(wall, 4),
        tokens_per_s=round(tokens / wall, 3) if wall else None,
        tokens_per_s_per_user=spread_of([a.completion_tokens / s for a, s in waited if a.completion_tokens and s > 0]),
        ttft_s=spread_of([a.first_token - a.started for a in answers if a.first_token is not None]),
        inter_token_s=spread_of([gap for a in answers if (gap := inter_token(a)) is not None]),
        itl_s=spread_of([float(gap) for chunks in times for gap in np.diff(chunks)]),
        request_s=spread_of([seconds for _, seconds in waited]),
        requests_per_s=round(len(answers) / wall, 4) if wall else None,
        prompt_tokens=spread_of([float(a.prompt_tokens) for a in answers if a.prompt_tokens]),
        answer_tokens=spread_of([float(a.completion_tokens) for a in answers]),
        goodput=goodput(asked, wall, promise) if promise else None,
    )


def goodput(answers: Sequence[Answer], wall: float, promise: ServiceLevel) -> Goodput:
    kept = sum(promise.met(answer) for answer in answers)
    return Goodput(
        promise=promise.words(),
        requests_per_s=round(kept / wall, 4) if wall else 0.0,
        share=round(kept / len(answers), 4) if answers else 0.0,
    )


def spread_of(values: Sequence[float]) -> LatencySpread | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return LatencySpread(*(round(float(value), 5) for value in (np.mean(values), p50, p90, p99)))


def question_speeds(target: MeasuredEndpoint, level: LoadLevel) -> list[QuestionSpeed]:
    """One entry per conversation that came to its end."""
    groups: dict[str, list[Answer]] = {}
    for run in target.rounds[level]:
        for answer in run.answers:
            groups.setdefault(answer.question, []).append(answer)
    found = []
    for question, answers in groups.items():
        if any(answer.error for answer in answers):
            continue
        first = min(answers, key=lambda answer: answer.turn)
        found.append(
            QuestionSpeed(
                level=level.label,
                question=question,
                category=first.category,
                tokens=sum(answer.completion_tokens for answer in answers),
                seconds=round(sum(answer.finished - answer.started for answer in answers), 6),
                ttft_s=None if first.first_token is None else round(first.first_token - first.started, 6),
            )
        )
    return found


def speedups(endpoints: Sequence[EndpointResult]) -> list[SpeedUp]:
    """Each endpoint over each other one at each level where both wrote sound output."""
    found = []
    for level in endpoints[0].concurrency:
        for of, over in permutations(endpoints, 2):
            if ratio := speed_ratio(of, over, level.label):
                ends = (round(value, 4) for value in (ratio.value, ratio.low, ratio.high))
                found.append(SpeedUp(**dict(zip(("ratio", "low", "high"), ends, strict=True)), of=of.name,
                                     over=over.name, level=level.label, questions=ratio.units))  # fmt: skip
    return found


def answer_records(targets: Sequence[MeasuredEndpoint]) -> list[dict[str, Any]]:
    """Every answer with its text, for answers.jsonl."""
    keys = ("question", "category", "turn", "finish_reason", "error", "reasoning", "text", "tool_calls")
    return [
        {
            "endpoint": target.name,
            "level": level.label,
            "tokens": answer.completion_tokens,
            **{key: getattr(answer, key) for key in keys},
        }
        for target in targets
        for level, rounds in target.rounds.items()
        for run in rounds
        for answer in run.answers
    ]
