"""Makes results.json of what was measured on each endpoint, with every finding."""

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
from trtspec.errors import Problem, Severity, listed

MIN_RATED_ANSWERS = 16  # of a run whose quarters are compared for waiting
MAX_HALF_INTERVAL = 0.1  # share of the value; a wider interval has too few questions
SHORT_PROMPT = 256  # tokens; shorter prompts are one slice
LATE_MINUTE = 4  # later minutes are one slice
Findings = Iterator[tuple[str, Severity, str]]  # code, severity, message


def assemble(targets: Sequence[MeasuredEndpoint]) -> BenchResults:
    """Returns the results of a run. They are about the first endpoint."""
    first, *others = endpoints = [describe_target(target) for target in targets]
    problems: list[Problem] = []
    for target in targets:
        problems += find_problems(target)
    workload = targets[0].workload
    return BenchResults(
        **vars(first),
        workload=workload.describe(),
        endpoints={endpoint.name: endpoint for endpoint in others},
        speedups=speedups(endpoints),
        problems=problems,
    )


def describe_target(target: MeasuredEndpoint) -> EndpointResult:
    """Returns one endpoint: acceptance over all levels and by category, and one entry per level."""
    answers = answers_of(target.rounds)
    by_name: dict[str, list[Answer]] = {}
    for answer in answers:
        by_name.setdefault(answer.category, []).append(answer)
    rounds = target.rounds
    levels = []
    speeds: list[QuestionSpeed] = []
    for level in target.workload.levels:
        level_rounds = [run for run in rounds if run.level == level]
        levels.append(describe_level(level_rounds))
        speeds += question_speeds(level_rounds)
    pooled = counts_of(rounds)
    separate = counts_of(target.category_rounds)
    summary = summarize(pooled or separate)
    quality = {name: quality_of(group) for name, group in by_name.items()}
    return EndpointResult(
        **vars(summary),
        name=target.name,
        url=target.url,
        server=target.server,
        categories=by_category(separate or pooled),
        degeneration=quality_of(answers),
        quality=quality,
        concurrency=levels,
        turns_detail=pooled,
        questions_detail=speeds,
        slices=slices_of(rounds),
    )


def counts_of(rounds: Sequence[Round]) -> list[TurnCounts]:
    return [count for run in rounds for count in run.counts]


def answers_of(rounds: Sequence[Round]) -> list[Answer]:
    return [answer for run in rounds for answer in run.answers]


def describe_level(rounds: Sequence[Round]) -> LevelResult:
    """Returns the results of one endpoint at one load, over all its rounds."""
    level = rounds[0].level
    # a resumed round has several entries of one number
    by_number: dict[int, list[Round]] = {}
    for run in rounds:
        by_number.setdefault(run.number, []).append(run)
    rates = [round(total_rate(runs), 3) for _, runs in sorted(by_number.items())]
    summary = summarize(counts_of(rounds))
    return LevelResult(
        **vars(summary),
        concurrency=level.concurrency,
        rate=level.rate,
        throughput=throughput(rounds),
        rounds=rates,
        degeneration=quality_of(answers_of(rounds)),
    )


def quality_of(answers: Sequence[Answer]) -> OutputQuality:
    return judge_run([answer.written for answer in good(answers)])


def throughput(rounds: Sequence[Round]) -> Throughput:
    """Returns the rates over the rounds of one level."""
    asked = answers_of(rounds)
    answers = good(asked)
    seconds = sum(run.seconds for run in rounds)
    tokens = sum(answer.completion_tokens for answer in answers)
    token_gaps = [gap for gap in map(inter_token, answers) if gap is not None]
    chunk_gaps: list[float] = []
    for answer in answers:
        times = [when for when, _ in answer.chunks]
        chunk_gaps += np.diff(times).tolist()
    return Throughput(
        requests=len(asked),
        errors=len(asked) - len(answers),
        output_tokens=tokens,
        wall_s=round(seconds, 4),
        tokens_per_s=_rate(tokens, seconds),
        ttft_s=first_tokens(answers),
        inter_token_s=spread_of(token_gaps),
        itl_s=spread_of(chunk_gaps),
    )


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 3) if seconds else None


def slices_of(rounds: Sequence[Round]) -> list[SliceResult]:
    """Groups answers by the minute of their round, by prompt length and by its reused share.

    Groups of length or share are missing if the server does not tell them.
    """
    groups: dict[tuple[str, int], list[Answer]] = defaultdict(list)
    for run in rounds:
        answers = good(run.answers)
        began = min((answer.started for answer in answers), default=0.0)
        for answer in answers:
            minute = 1 + int((answer.started - began) // 60)
            groups[BY_MINUTE, min(minute, LATE_MINUTE)].append(answer)
            prompt = answer.prompt_tokens
            reused = answer.cached_tokens
            if prompt:
                # the next power of two
                bound = 1 << (prompt - 1).bit_length()
                groups[BY_LENGTH, max(bound, SHORT_PROMPT)].append(answer)
            if prompt and reused is not None:
                quarters = 4 * reused // prompt
                groups[BY_REUSE, 25 * quarters].append(answer)
    return [slice_of(by, value, answers) for (by, value), answers in sorted(groups.items())]


def slice_of(by: str, value: int, answers: Sequence[Answer]) -> SliceResult:
    """Returns one slice. A server that keeps only totals tells no acceptance of it."""
    seconds = sum(answer.finished - answer.started for answer in answers)
    tokens = sum(answer.completion_tokens for answer in answers)
    summary = summarize(all_counts(answers, []))
    return SliceResult(
        **vars(summary),
        by=by,
        value=value,
        answers=len(answers),
        tokens_per_s=_rate(tokens, seconds),
        ttft_s=first_tokens(answers),
    )


def first_tokens(answers: Sequence[Answer]) -> LatencySpread | None:
    """Returns the seconds from each request to its first token."""
    waits = [
        answer.first_token - answer.started for answer in answers if answer.first_token is not None
    ]
    return spread_of(waits)


def spread_of(values: Sequence[float]) -> LatencySpread | None:
    if not values:
        return None
    figures = [np.mean(values), *np.percentile(values, [50, 99])]
    return LatencySpread(*(round(float(figure), 5) for figure in figures))


def question_speeds(rounds: Sequence[Round]) -> list[QuestionSpeed]:
    """Returns one entry per conversation of a load that came to its end."""
    groups: dict[tuple[int, str], list[Answer]] = defaultdict(list)
    for run in rounds:
        for answer in run.answers:
            groups[run.number, answer.question].append(answer)
    speeds = []
    for (number, question), answers in groups.items():
        if any(answer.error for answer in answers):
            continue
        seconds = sum(answer.finished - answer.started for answer in answers)
        tokens = sum(answer.completion_tokens for answer in answers)
        speed = QuestionSpeed(
            level=rounds[0].level.label,
            question=question,
            category=answers[0].category,
            tokens=tokens,
            seconds=round(seconds, 6),
            round=number,
        )
        speeds.append(speed)
    return speeds


def speedups(endpoints: Sequence[EndpointResult]) -> list[SpeedUp]:
    """Returns the gain of endpoints that speculate over plain ones, at each level.

    Levels without sound output of both are left out. If all speculate, or none, the others are
    compared with the second.
    """
    bases = [endpoint for endpoint in endpoints if not endpoint.speculates]
    if len(bases) in (0, len(endpoints)):
        bases = list(endpoints[1:2])
    names = {base.name for base in bases}
    faster = [endpoint for endpoint in endpoints if endpoint.name not in names]
    pairs = product(endpoints[0].concurrency, faster, bases)
    gains = [speed_up([endpoint], [base], level.label) for level, endpoint, base in pairs]
    return [gain for gain in gains if gain is not None]


# --- findings: the gate judges servers, findings judge the figures ---


def find_problems(target: MeasuredEndpoint) -> list[Problem]:
    """Returns what makes the figures of one endpoint worth less than they look."""
    rounds = target.rounds
    answers = answers_of(rounds)
    pooled = counts_of(rounds)
    counts = pooled or counts_of(target.category_rounds)
    findings = [
        *in_answers(answers),
        *without_acceptance(target.server.kind, counts, target.unmeasured),
        *in_counts(pooled, answers),
        *in_request(target.limits, target.workload.parameters()),
        *too_few(counts),
        *overloaded(rounds),
        *underfilled(rounds),
    ]
    return [Problem(code, severity, target.name, message) for code, severity, message in findings]


def in_answers(answers: Sequence[Answer]) -> Findings:
    """Finds failed requests, degenerate output, and answers that a proxy holds back."""
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        message = f"{len(errors)} of {len(answers)} requests failed; the first said: {errors[0]}"
        yield "TS-BENCH-ERRORS", "error", message
    quality = quality_of(answers)
    if quality.degenerate:
        yield "TS-BENCH-DEGENERATE", "warning", f"{quality.words}: loops flatter every drafter"
    sizes = []  # tokens of an arrival
    for answer in good(answers):
        tokens = answer.completion_tokens
        arrivals = {when for when, _ in answer.chunks}
        if tokens >= 2 * TOKENS_PER_ARRIVAL:
            sizes.append(tokens / max(1, len(arrivals)))
    if sizes and min(sizes) > TOKENS_PER_ARRIVAL:
        message = (
            f"{len(sizes)} answers arrive in chunks of {median(sizes):.0f} tokens: time to first "
            "token and between tokens are not the server's"
        )
        yield "TS-BENCH-BUFFERED", "warning", message


def without_acceptance(
    server_kind: str, counts: Sequence[TurnCounts], unmeasured: Sequence[str]
) -> Findings:
    """Finds that acceptance is not measured, in whole or in part. `unmeasured`: why."""
    code = "TS-BENCH-NO-ACCEPTANCE"
    if unmeasured:
        extent = "measured in part" if counts else "not measured"
        yield code, "warning", f"acceptance is {extent}: {listed(unmeasured)}"
    elif not counts:
        nothing = f"the server ({server_kind}) reports nothing about speculation"
        yield code, "info", f"{nothing}: acceptance is not measured"


def in_counts(counts: Sequence[TurnCounts], answers: Sequence[Answer]) -> Findings:
    """Finds drafts that are never accepted, made-up acceptance, and counts of other requests."""
    steps = sum(count.steps for count in counts)
    drafted = sum(count.drafted or 0 for count in counts)
    # a head drafts in every step; prompt lookup drafts now and then, and may honestly accept
    # nothing
    if drafted >= max(steps, MIN_STEPS) and not any(count.accepted for count in counts):
        message = (
            f"{drafted} tokens were drafted and none was accepted: the head does not belong to "
            "this target, or the engine computes it otherwise than its training did (rope, norms, "
            "captured layers)"
        )
        yield "TS-BENCH-NOTHING-ACCEPTED", "error", message
    histogram = add_histograms(count.histogram for count in counts) or []
    # a step brings its accepted drafts and the bonus token
    sizes = Counter(dict(enumerate(histogram, 1)))
    forced = forced_sizes(sizes)
    # on a loop a drafter may yield the same in each step
    if forced and not quality_of(answers).degenerate:
        over = f"{forced} tokens over {sum(histogram)} steps"
        message = f"every step brought {over}: the output is corrupt, the speed too"
        yield "TS-BENCH-FORCED-ACCEPTANCE", "error", message
    reason = _disagreement(counts)
    if reason:
        yield "TS-BENCH-COUNTERS", "error", f"the counters and the answers disagree: {reason}"


def _disagreement(counts: Sequence[TurnCounts]) -> str:
    """Why the counters around runs cannot belong to their answers. "" if they can."""
    pooled = [count for count in counts if count.answers > 1 and count.drafted and count.steps]
    tokens = sum(count.tokens for count in pooled)
    steps = sum(count.steps for count in pooled)
    answers = sum(count.answers for count in pooled)
    surplus = sum(count.surplus for count in pooled)
    drafted = sum(count.drafted or 0 for count in pooled)
    draft_len = drafted / max(1, steps)
    if tokens < steps:
        return f"{steps} steps for {tokens} tokens in {answers} answers"
    # an answer leaves behind the drafts of one step at most
    if surplus > answers * draft_len:
        return f"{surplus} more accepted drafts than {answers} answers can leave behind"
    return ""


def in_request(limits: RequestLimits, asked: Mapping[str, Any]) -> Findings:
    """Finds parameters that this release ignores or refuses under speculation, and ignore_eos."""
    for key, verb in (("ignored", "ignores"), ("refused", "refuses")):
        names = sorted(set(asked) & set(limits.get(key, ())))
        if names:
            message = f"this release {verb} {', '.join(names)} under speculation"
            yield "TS-BENCH-PARAMETER", "warning", message
    if asked.get("ignore_eos"):
        message = (
            "ignore_eos makes the model write past its own end: "
            "acceptance there is not that of real answers"
        )
        yield "TS-BENCH-IGNORE-EOS", "warning", message


def too_few(counts: Sequence[TurnCounts]) -> Findings:
    """Finds an acceptance length that is too uncertain to judge by."""
    summary = summarize(counts)
    length = summary.acceptance_length
    if length is None or not per_question(counts):
        return
    message = (
        f"{summary.questions} questions are too few to judge by: acceptance length {length:.2f}"
    )
    interval = length_ratio(counts)
    if interval is not None:
        if interval.high / interval.value - 1 <= MAX_HALF_INTERVAL:
            return
        message += f" ({interval.words})"
    yield "TS-BENCH-FEW-STEPS", "info", message


def overloaded(rounds: Sequence[Round]) -> Findings:
    """Finds the first request rate that the server cannot keep: waiting grows during the run."""
    for run in rounds:
        answers = [answer for answer in good(run.answers) if answer.first_token]
        if run.level.rate is None or len(answers) < MIN_RATED_ANSWERS:
            continue
        answers.sort(key=lambda answer: answer.started)
        waits = [(answer.first_token or 0.0) - answer.started for answer in answers]
        seconds = sum(answer.finished - answer.started for answer in answers)
        mean = seconds / len(answers)
        quarter = len(waits) // 4
        first = median(waits[:quarter])
        last = median(waits[-quarter:])
        if last > 2 * first and last - first > 0.1 * mean:
            growth = f"from {1000 * first:.0f} to {1000 * last:.0f} ms during the run"
            excess = f"{run.level.rate:g} requests/s are more than it serves"
            message = f"{excess}: the time to the first token grew {growth}"
            yield "TS-BENCH-OVERLOAD", "warning", message
            return


def underfilled(rounds: Sequence[Round]) -> Findings:
    """Finds the highest load that a round had too few conversations to reach."""
    # by load and round, because a resumed round has several entries
    asked: dict[tuple[int, int], set[str]] = defaultdict(set)
    for run in rounds:
        if run.level.rate is None:
            questions = {answer.question for answer in run.answers}
            asked[run.level.concurrency, run.number] |= questions
    counts = [(load, len(questions)) for (load, _), questions in asked.items()]
    missed = [(load, count) for load, count in counts if count < load]
    if missed:
        load, count = max(missed)
        message = (
            f"concurrency {load}: a round had {count} questions, "
            "so that no more were ever in flight"
        )
        yield "TS-BENCH-FEW-QUESTIONS", "info", message
