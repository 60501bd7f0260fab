"""results.json from what was measured on each endpoint, with every finding on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from trtspec.bench.check.rows import MIN_STEPS, TOKENS_PER_ARRIVAL, forced_sizes
from trtspec.bench.load.journal import Round, good
from trtspec.bench.load.measure import MeasuredEndpoint, RequestLimits, total_rate
from trtspec.bench.results import (
    BY_LENGTH,
    BY_MINUTE,
    BY_REUSE,
    BenchResults,
    EndpointResult,
    LatencySpread,
    LevelResult,
    QuestionSpeed,
    SliceResult,
    SpeedUp,
    Throughput,
    inter_token,
    speed_up,
)
from trtspec.bench.statistics import (
    add_histograms,
    by_category,
    length_ratio,
    per_question,
    summarize,
)
from trtspec.client.client import Answer
from trtspec.client.servers import TurnCounts, all_counts
from trtspec.client.text_quality import OutputQuality, judge_run
from trtspec.errors import Problem, Severity

ENOUGH_ANSWERS = 16  # of a run, in whose quarters waiting is compared
WIDE = 0.1  # half an interval over its value: more is too few questions to judge by
AIM = 0.05
SHOWN = 3
SHORT_PROMPT = 256  # tokens; up to here one length
LATE_MINUTE = 4  # the minutes from here on are one
Findings = Iterator[tuple[str, Severity, str]]  # code, severity, message


def assemble(targets: Sequence[MeasuredEndpoint]) -> BenchResults:
    """The first endpoint is the one that the results are about."""
    described = [describe_target(target) for target in targets]
    return BenchResults(
        **vars(described[0]),
        workload=targets[0].workload.describe(),
        endpoints={endpoint.name: endpoint for endpoint in described[1:]},
        speedups=speedups(described),
        problems=[problem for target in targets for problem in find_problems(target)],
    )


def describe_target(target: MeasuredEndpoint) -> EndpointResult:
    """One endpoint: pooled acceptance over all levels, by category, and one entry per level."""
    answers, pooled, by_itself = (
        target.answers(),
        counts_of(target.rounds),
        counts_of(target.category_rounds),
    )
    workload = target.workload
    levels = [[run for run in target.rounds if run.level == level] for level in workload.levels]
    return EndpointResult(
        **vars(summarize(pooled or by_itself)),
        name=target.name,
        url=target.url,
        server=target.server,
        categories=by_category(by_itself or pooled),
        degeneration=quality_of(answers),
        quality={
            name: quality_of([answer for answer in answers if answer.category == name])
            for name in dict.fromkeys(answer.category for answer in answers)
        },
        concurrency=[describe_level(rounds) for rounds in levels],
        turns_detail=pooled,
        questions_detail=[speed for rounds in levels for speed in question_speeds(rounds)],
        slices=slices_of(target.rounds),
    )


def counts_of(rounds: Sequence[Round]) -> list[TurnCounts]:
    return [count for run in rounds for count in run.counts]


def describe_level(rounds: Sequence[Round]) -> LevelResult:
    """The results of one endpoint at one load, over all its rounds."""
    counts, level = counts_of(rounds), rounds[0].level
    numbers = sorted({run.number for run in rounds})
    return LevelResult(
        **vars(summarize(counts)),
        concurrency=level.concurrency,
        rate=level.rate,
        throughput=throughput(rounds),
        rounds=[
            round(total_rate([run for run in rounds if run.number == number]), 3)
            for number in numbers
        ],
        degeneration=quality_of([answer for run in rounds for answer in run.answers]),
    )


def quality_of(answers: Sequence[Answer]) -> OutputQuality:
    return judge_run([answer.written for answer in good(answers)])


def throughput(rounds: Sequence[Round]) -> Throughput:
    """Rates over the rounds of one level."""
    asked = [answer for run in rounds for answer in run.answers]
    answers, wall = good(asked), sum(run.seconds for run in rounds)
    tokens = sum(answer.completion_tokens for answer in answers)
    times = [[when for when, _ in answer.chunks] for answer in answers]
    return Throughput(
        requests=len(asked),
        errors=len(asked) - len(answers),
        output_tokens=tokens,
        wall_s=round(wall, 4),
        tokens_per_s=round(tokens / wall, 3) if wall else None,
        ttft_s=first_tokens(answers),
        inter_token_s=spread_of([gap for a in answers if (gap := inter_token(a)) is not None]),
        itl_s=spread_of([float(gap) for chunks in times for gap in np.diff(chunks)]),
    )


def slices_of(rounds: Sequence[Round]) -> list[SliceResult]:
    """Answers by prompt length, by its reused share and by the minute of their round, where the server tells."""
    groups: dict[tuple[str, int], list[Answer]] = defaultdict(list)
    for run in rounds:
        answers = good(run.answers)
        began = min((answer.started for answer in answers), default=0.0)
        for answer in answers:
            minute = 1 + int((answer.started - began) // 60)
            groups[BY_MINUTE, min(minute, LATE_MINUTE)].append(answer)
            prompt, reused = answer.prompt_tokens, answer.cached_tokens
            if prompt:
                bound = 1 << (prompt - 1).bit_length()
                groups[BY_LENGTH, max(bound, SHORT_PROMPT)].append(answer)
            if prompt and reused is not None:
                groups[BY_REUSE, 25 * (4 * reused // prompt)].append(answer)
    return [slice_of(by, value, answers) for (by, value), answers in sorted(groups.items())]


def slice_of(by: str, value: int, answers: Sequence[Answer]) -> SliceResult:
    """Acceptance is unknown here for a server that keeps only totals."""
    seconds = sum(answer.finished - answer.started for answer in answers)
    tokens = sum(answer.completion_tokens for answer in answers)
    return SliceResult(
        **vars(summarize(all_counts(answers, []))),
        by=by,
        value=value,
        answers=len(answers),
        tokens_per_s=round(tokens / seconds, 3) if seconds else None,
        ttft_s=first_tokens(answers),
    )


def first_tokens(answers: Sequence[Answer]) -> LatencySpread | None:
    """Seconds from each request to its first token."""
    return spread_of([a.first_token - a.started for a in answers if a.first_token is not None])


def spread_of(values: Sequence[float]) -> LatencySpread | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return LatencySpread(*(round(float(value), 5) for value in (np.mean(values), p50, p90, p99)))


def question_speeds(rounds: Sequence[Round]) -> list[QuestionSpeed]:
    """One entry per conversation of a load that came to its end."""
    groups: dict[tuple[int, str], list[Answer]] = defaultdict(list)
    for run in rounds:
        for answer in run.answers:
            groups[run.number, answer.question].append(answer)
    return [
        QuestionSpeed(
            level=rounds[0].level.label,
            question=question,
            category=answers[0].category,
            tokens=sum(answer.completion_tokens for answer in answers),
            seconds=round(sum(answer.finished - answer.started for answer in answers), 6),
            round=number,
        )
        for (number, question), answers in groups.items()
        if not any(answer.error for answer in answers)
    ]


def speedups(endpoints: Sequence[EndpointResult]) -> list[SpeedUp]:
    """At each level where both wrote sound output: endpoints that speculate over those that do not; where all do, or
    none, the others over the second."""
    plain = [endpoint for endpoint in endpoints if not endpoint.speculates]
    bases = plain if 0 < len(plain) < len(endpoints) else list(endpoints[1:2])
    names = {base.name for base in bases}
    pairs = product(endpoints[0].concurrency, endpoints, bases)
    found = [
        speed_up([of], [base], level.label) for level, of, base in pairs if of.name not in names
    ]
    return [up for up in found if up is not None]


# --- findings: the gate judges servers; these name what a figure cannot say ---


def find_problems(target: MeasuredEndpoint) -> list[Problem]:
    """What makes the figures of one endpoint worth less than they look."""
    counts = counts_of(target.rounds)
    found = [
        *in_answers(target.answers()),
        *without_acceptance(
            target.server.kind, counts or counts_of(target.category_rounds), target.unmeasured
        ),
        *in_counts(counts, target.answers()),
        *in_request(target.limits, target.workload.parameters()),
        *too_few(counts or counts_of(target.category_rounds)),
        *overloaded(target.rounds),
        *underfilled(target.rounds),
    ]
    return [Problem(code, severity, target.name, message) for code, severity, message in found]


def in_answers(answers: Sequence[Answer]) -> Findings:
    """Failed requests, degenerate output, and answers that a proxy between server and user holds back."""
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        message = f"{len(errors)} of {len(answers)} requests failed; the first said: {errors[0]}"
        yield "TS-BENCH-ERRORS", "error", message
    verdict = quality_of(answers)
    if verdict.degenerate:
        message = (
            f"{verdict.loop} loops, {verdict.empty} empty, {verdict.noise} noise among {verdict.answers} answers "
            f"(distinct 4-grams {verdict.distinct_4gram_ratio}): loops flatter every drafter"
        )
        yield "TS-BENCH-DEGENERATE", "warning", message
    long = [a for a in answers if not a.error and a.completion_tokens >= 2 * TOKENS_PER_ARRIVAL]
    sizes = [a.completion_tokens / max(1, len({when for when, _ in a.chunks})) for a in long]
    if sizes and min(sizes) > TOKENS_PER_ARRIVAL:
        message = (
            f"{len(long)} answers arrive in chunks of {median(sizes):.0f} tokens: time to first token and between "
            "tokens are not the server's"
        )
        yield "TS-BENCH-BUFFERED", "warning", message


def without_acceptance(
    kind: str, counts: Sequence[TurnCounts], unmeasured: Sequence[str]
) -> Findings:
    """That acceptance is not measured, in whole or in part. `unmeasured`: why."""
    code, start = (
        "TS-BENCH-NO-ACCEPTANCE",
        f"acceptance is {'measured in part' if counts else 'not measured'}",
    )
    if unmeasured := list(dict.fromkeys(unmeasured)):
        more = f", and {len(unmeasured) - SHOWN} more" if len(unmeasured) > SHOWN else ""
        yield code, "warning", f"{start}: {'; '.join(unmeasured[:SHOWN])}{more}"
    elif not counts:
        message = (
            f"the server ({kind}) reports nothing about speculation: acceptance is not measured"
        )
        yield code, "info", message


def in_counts(counts: Sequence[TurnCounts], answers: Sequence[Answer]) -> Findings:
    """Drafts of which the target accepts none; acceptance that a server makes up; counters around a run that hold
    requests of others."""
    steps, drafted = (
        sum(count.steps for count in counts),
        sum(count.drafted or 0 for count in counts),
    )
    # a head drafts in every step; prompt lookup drafts now and then, and may honestly find nothing
    if drafted >= max(steps, MIN_STEPS) and not any(count.accepted for count in counts):
        message = (
            f"{drafted} tokens were drafted and none was accepted: the head does not belong to this target, or the "
            "engine computes it otherwise than its training did (rope, norms, captured layers)"
        )
        yield "TS-BENCH-NOTHING-ACCEPTED", "error", message
    histogram = add_histograms(count.histogram for count in counts) or []
    each = forced_sizes(Counter({place + 1: count for place, count in enumerate(histogram)}))
    if (
        each and not quality_of(answers).degenerate
    ):  # on a loop a drafter may yield the same in each step
        message = f"every step brought {each} tokens over {sum(histogram)} steps: the output is corrupt, the speed too"
        yield "TS-BENCH-FORCED-ACCEPTANCE", "error", message
    pooled = [count for count in counts if count.answers > 1 and count.drafted and count.steps]
    tokens, verified, asked, surplus = (
        sum(getattr(count, key) for count in pooled)
        for key in ("tokens", "steps", "answers", "surplus")
    )
    drafts = sum(count.drafted or 0 for count in pooled) / max(1, verified)
    reason = ""
    if tokens < verified:
        reason = f"{verified} steps for {tokens} tokens in {asked} answers"
    elif surplus > asked * drafts:
        reason = f"{surplus} more accepted drafts than {asked} answers can leave behind"
    if reason:
        yield "TS-BENCH-COUNTERS", "error", f"the counters and the answers disagree: {reason}"


def in_request(limits: RequestLimits, asked: Mapping[str, Any]) -> Findings:
    """Parameters with which the answers are not what was asked for: those that this release drops or refuses under
    speculation, and ignore_eos."""
    for key, what in (("ignored", "ignores"), ("refused", "refuses")):
        if named := sorted(set(asked) & set(limits.get(key, ()))):
            message = f"this release {what} {', '.join(named)} under speculation"
            yield "TS-BENCH-PARAMETER", "warning", message
    if asked.get("ignore_eos"):
        message = "ignore_eos makes the model write past its own end: acceptance there is not that of real answers"
        yield "TS-BENCH-IGNORE-EOS", "warning", message


def too_few(counts: Sequence[TurnCounts]) -> Findings:
    """An acceptance length that is too uncertain to judge by, with how many questions would do."""
    summary, found = summarize(counts), length_ratio(counts)
    length = summary.acceptance_length
    certain = found is not None and found.high / found.value - 1 <= WIDE
    if length is None or certain or not per_question(counts):
        return
    needed, sure = (found.units_needed(AIM), f" ({found.words})") if found else (20, "")
    message = f"{summary.questions} questions are too few to judge by: acceptance length {length:.2f}{sure}; about "
    message += f"{needed} give +- {100 * AIM:.0f} %"
    yield "TS-BENCH-FEW-STEPS", "info", message


def overloaded(rounds: Sequence[Round]) -> Findings:
    """A request rate that the server cannot keep: waiting grows with the length of the run. One finding is enough."""
    for run in rounds:
        ordered = sorted(
            (a for a in run.answers if not a.error and a.first_token), key=lambda a: a.started
        )
        if run.level.rate is None or len(ordered) < ENOUGH_ANSWERS:
            continue
        waits = [a.first_token - a.started for a in ordered]  # type: ignore[operator]
        quarter = len(ordered) // 4
        first, last = median(waits[:quarter]), median(waits[-quarter:])
        mean = sum(a.finished - a.started for a in ordered) / len(ordered)
        if last > 2 * first and last - first > 0.1 * mean:
            message = (
                f"{run.level.rate:g} requests/s are more than it serves: the time to the first token grew from "
                f"{1000 * first:.0f} to {1000 * last:.0f} ms during the run"
            )
            yield "TS-BENCH-OVERLOAD", "warning", message
            return


def underfilled(rounds: Sequence[Round]) -> Findings:
    """The highest load that a round had too few conversations to reach; one finding is enough."""
    asked: dict[tuple[int, int], set[str]] = defaultdict(
        set
    )  # by load and round: a resumed round has several parts
    for run in rounds:
        if run.level.rate is None:
            asked[run.level.concurrency, run.number] |= {answer.question for answer in run.answers}
    missed = [
        (load, len(questions)) for (load, _), questions in asked.items() if len(questions) < load
    ]
    if missed:
        message = (
            "concurrency {}: a round had {} questions, so that no more were ever in flight".format(
                *max(missed)
            )
        )
        yield "TS-BENCH-FEW-QUESTIONS", "info", message
