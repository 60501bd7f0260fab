"""The records of results.json from what was measured on each endpoint, and every finding on it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from trtspec.bench import findings
from trtspec.bench.acceptance import by_category, summarize
from trtspec.bench.load import steady_rate, throughput, total_rate
from trtspec.bench.measure import BenchWorkload, LoadLevel, MeasuredEndpoint
from trtspec.bench.results import (
    BenchResults,
    EndpointResult,
    InterleavedLevel,
    LevelResult,
    PairRatio,
    QuestionSpeed,
)
from trtspec.bench.tables import is_degenerate_at
from trtspec.client.client import Answer
from trtspec.client.text_quality import OutputQuality, judge_run
from trtspec.errors import Problem


def assemble(
    targets: Sequence[MeasuredEndpoint], workload: BenchWorkload, problems: Sequence[Problem] = ()
) -> BenchResults:
    """The first endpoint is the one that the results are about."""
    found = [*workload.dataset.problems, *problems]
    for target in targets:
        found += find_problems(target.name, target, workload)
    described = [describe_target(target, workload) for target in targets]
    return BenchResults(
        **vars(described[0]),
        workload=workload.describe(),
        endpoints={endpoint.name: endpoint for endpoint in described[1:]},
        interleaved=interleaved(targets, described) if len(targets) > 1 else None,
        problems=found,
    )


def find_problems(name: str, target: MeasuredEndpoint, workload: BenchWorkload) -> list[Problem]:
    """All findings on one endpoint, named by `where`."""
    answers = target.answers()
    counts = [count for level in target.counts.values() for count in level]
    told = counts or target.category_counts
    body = workload.body()
    found = [
        *findings.failed_requests(name, answers),
        *findings.degenerate_output(name, answers),
        *findings.no_acceptance(name, target.server.kind, told, target.unmeasured, target.uncounted),
        *findings.nothing_accepted(name, counts),
        *findings.forced_acceptance(name, counts, answers),
        *findings.limited_parameters(name, target.limits, body),
        *findings.contradictions(name, answers, workload.sampling.max_tokens),
        *findings.counters_disagree(name, counts, answers),
        *findings.missed_lengths(name, lengths_asked(workload, answers)),
        *findings.buffered(name, answers),
        *findings.too_few(name, summarize(told), told),
        *findings.overloaded(name, [run for runs in target.rounds.values() for run in runs]),
        *findings.underfilled(name, [run for runs in target.rounds.values() for run in runs]),
    ]
    if body.get("ignore_eos"):
        found.append(
            Problem(
                "TS-BENCH-IGNORE-EOS",
                "warning",
                name,
                "ignore_eos makes the model write past its own end: acceptance there is not that of real answers",
                "measure acceptance without ignore_eos and without --osl",
            )
        )
    return found


def lengths_asked(workload: BenchWorkload, answers: Sequence[Answer]) -> list[tuple[str, int, list[int]]]:
    """(option, tokens it asks for, tokens that the server counted) of prompts and answers of a given length."""
    good = [answer for answer in answers if not answer.error]
    as_asked = {condition.label for condition in workload.conditions[:1]}  # the others change the prompt
    found = [("--osl", workload.osl, [answer.completion_tokens for answer in good])] if workload.osl else []
    if workload.isl:
        prompts = [answer.prompt_tokens for answer in good if not as_asked or answer.category in as_asked]
        found.append(("--isl", workload.isl, prompts))
    for condition in workload.conditions:
        if condition.context:
            prompts = [answer.prompt_tokens for answer in good if answer.category == condition.label]
            found.append(("--under context", condition.context, prompts))
    return found


def describe_target(target: MeasuredEndpoint, workload: BenchWorkload) -> EndpointResult:
    """One endpoint: pooled acceptance over all levels, by category, and one entry per level."""
    pooled = [count for counts in target.counts.values() for count in counts]
    return EndpointResult(
        **vars(summarize(pooled or target.category_counts)),
        name=target.name,
        url=target.endpoint.base_url,
        server=target.server,
        categories=by_category(target.category_counts or pooled),
        degeneration=judge_run(_texts(target.answers())),
        quality=by_category_quality(target.answers()),
        concurrency=[describe_level(target, level, workload) for level in target.rounds],
        turns_detail=pooled,
        questions_detail=[speed for level in target.rounds for speed in question_speeds(target, level)],
    )


def describe_level(target: MeasuredEndpoint, level: LoadLevel, workload: BenchWorkload) -> LevelResult:
    counts, runs = target.counts.get(level, []), target.rounds[level]
    answers = [answer for run in runs for answer in run.answers]
    return LevelResult(
        **vars(summarize(counts)),
        concurrency=level.concurrency if level.rate is None else max(run.concurrency for run in runs),
        rate=level.rate,
        categories=by_category(counts),
        throughput=throughput(runs, workload.promise),
        rounds=[round(rate, 3) for rate in round_rates(target, level)],
        degeneration=judge_run(_texts(answers)),
    )


def _texts(answers: Sequence[Answer]) -> list[str]:
    return [answer.written for answer in answers if not answer.error]


def by_category_quality(answers: Sequence[Answer]) -> dict[str, OutputQuality]:
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.category, []).append(answer)
    return {category: judge_run(_texts(group)) for category, group in groups.items()}


def round_rates(target: MeasuredEndpoint, level: LoadLevel) -> list[float]:
    """Output tokens per second of each round, of all parts of it that were measured apart."""
    runs = target.rounds[level]
    numbers = sorted({run.number for run in runs})
    return [total_rate([run for run in runs if run.number == number]) for number in numbers]


def question_speeds(target: MeasuredEndpoint, level: LoadLevel) -> list[QuestionSpeed]:
    """One entry per conversation that came to its end."""
    groups: dict[tuple[int, str], list[Answer]] = {}
    for run in target.rounds[level]:
        for answer in run.answers:
            groups.setdefault((run.number, answer.question), []).append(answer)
    found = []
    for (number, question), answers in groups.items():
        if any(answer.error for answer in answers):
            continue
        first = min(answers, key=lambda answer: answer.turn)
        streamed = [answer for answer in answers if answer.completion_tokens > 1 and len(answer.chunks) > 1]
        found.append(
            QuestionSpeed(
                level=level.label,
                question=question,
                category=first.category,
                tokens=sum(answer.completion_tokens for answer in answers),
                seconds=round(sum(answer.finished - answer.started for answer in answers), 6),
                ttft_s=None if first.first_token is None else round(first.first_token - first.started, 6),
                decoded=sum(answer.completion_tokens - 1 for answer in streamed),
                decode_s=round(sum(answer.chunks[-1][0] - answer.chunks[0][0] for answer in streamed), 6),
                round=number,
            )
        )
    return found


def interleaved(targets: Sequence[MeasuredEndpoint], described: Sequence[EndpointResult]) -> list[InterleavedLevel]:
    """Per level: each endpoint's rate by round, and for every pair the ratio by round, its median and range; no ratio
    where the output of either is degenerate."""
    levels = []
    for level in targets[0].rounds:
        steady = {t.name: [steady_rate(run) for run in t.rounds[level]] for t in targets}
        total = {t.name: round_rates(t, level) for t in targets}
        fair = all(rate is not None for rates in steady.values() for rate in rates)
        fair = fair and all(len(steady[name]) == len(total[name]) for name in total)
        rates: dict[str, Any] = steady if fair else total
        loops = {endpoint.name for endpoint in described if is_degenerate_at(endpoint, level.label)}
        levels.append(
            InterleavedLevel(
                concurrency=level.concurrency,
                rate=level.rate,
                metric="steady_tokens_per_s" if fair else "tokens_per_s",
                tokens_per_s={name: [round(float(r or 0), 3) for r in found] for name, found in rates.items()},
                ratios=[pair_ratio(a, b, {} if {a, b} & loops else rates) for a, b in permutations(rates, 2)],
            )
        )
    return levels


def pair_ratio(of: str, over: str, rates: dict[str, Any]) -> PairRatio:
    """`of` / `over`, round by round, with the median and the range; null where there are no `rates`."""
    per_round = [a / b for a, b in zip(rates.get(of, []), rates.get(over, []), strict=True) if b]
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
            "level": level.label,
            "concurrency": None if level.rate is not None else level.concurrency,
            "question": answer.question,
            "category": answer.category,
            "turn": answer.turn,
            "tokens": answer.completion_tokens,
            "finish_reason": answer.finish_reason,
            "error": answer.error,
            "reasoning": answer.reasoning,
            "text": answer.text,
            "tool_calls": answer.tool_calls,
        }
        for target in targets
        for level, rounds in target.rounds.items()
        for run in rounds
        for answer in run.answers
    ]
