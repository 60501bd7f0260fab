"""Computes the contents of results.json from the answers of each endpoint.

The results include findings: reasons why a figure must not be trusted.
"""

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

MIN_RATED_ANSWERS = 16  # a round with fewer answers is not judged for growing waiting times
MAX_HALF_INTERVAL = 0.1  # share of the value; a wider interval has too few questions
SHORT_PROMPT = 256  # tokens; all shorter prompts form one slice
LATE_MINUTE = 4  # this and all later minutes of a round form one slice
Findings = Iterator[tuple[str, Severity, str]]  # code, severity, message


def assemble(targets: Sequence[MeasuredEndpoint]) -> BenchResults:
    """Returns the results of a run.

    The main figures are about the first endpoint. The other endpoints are in `endpoints`.
    """
    endpoints = [describe_target(target) for target in targets]
    first, *others = endpoints
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
    """Returns the results of one endpoint.

    They contain acceptance over all levels and by category, and an entry per level.
    """
    answers = answers_of(target.rounds)
    answers_by_category: dict[str, list[Answer]] = {}
    for answer in answers:
        answers_by_category.setdefault(answer.category, []).append(answer)
    rounds = target.rounds
    levels = []
    speeds: list[QuestionSpeed] = []
    for level in target.workload.levels:
        level_rounds = [load_round for load_round in rounds if load_round.level == level]
        levels.append(describe_level(level_rounds))
        speeds += question_speeds(level_rounds)
    # some servers report acceptance only for rounds of one category
    pooled = counts_of(rounds)
    separate = counts_of(target.category_rounds)
    summary = summarize(pooled or separate)
    quality = {category: quality_of(group) for category, group in answers_by_category.items()}
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
    """Returns the speculation counts of all rounds."""
    counts: list[TurnCounts] = []
    for load_round in rounds:
        counts += load_round.counts
    return counts


def answers_of(rounds: Sequence[Round]) -> list[Answer]:
    """Returns the answers of all rounds, including failed answers."""
    answers: list[Answer] = []
    for load_round in rounds:
        answers += load_round.answers
    return answers


def describe_level(rounds: Sequence[Round]) -> LevelResult:
    """Returns the results of one endpoint at one load. `rounds`: all rounds at this load."""
    level = rounds[0].level
    # a resumed round has several entries with one number
    rounds_by_number: dict[int, list[Round]] = {}
    for load_round in rounds:
        rounds_by_number.setdefault(load_round.number, []).append(load_round)
    rates = []
    for _, parts in sorted(rounds_by_number.items()):
        rates.append(round(total_rate(parts), 3))
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
    """Returns how many answers are degenerate. Failed answers are left out."""
    return judge_run([answer.written for answer in good(answers)])


def throughput(rounds: Sequence[Round]) -> Throughput:
    """Returns the numbers of requests and tokens, the token rate and latencies of one load."""
    all_answers = answers_of(rounds)
    answers = good(all_answers)
    seconds = sum(load_round.seconds for load_round in rounds)
    tokens = sum(answer.completion_tokens for answer in answers)
    token_gaps = [gap for gap in map(inter_token, answers) if gap is not None]
    chunk_gaps: list[float] = []
    for answer in answers:
        times = [moment for moment, _ in answer.chunks]
        chunk_gaps += np.diff(times).tolist()
    return Throughput(
        requests=len(all_answers),
        errors=len(all_answers) - len(answers),
        output_tokens=tokens,
        wall_s=round(seconds, 4),
        tokens_per_s=_rate(tokens, seconds),
        ttft_s=first_tokens(answers),
        inter_token_s=spread_of(token_gaps),
        itl_s=spread_of(chunk_gaps),
    )


def _rate(tokens: int, seconds: float) -> float | None:
    """Returns tokens per second. None if no time has passed."""
    return round(tokens / seconds, 3) if seconds else None


def slices_of(rounds: Sequence[Round]) -> list[SliceResult]:
    """Groups the answers by minute, prompt length and reused share of the prompt.

    The minute counts from the start of the round. There are no groups by length or share if the
    server does not report prompt tokens or cached tokens.
    """
    groups: dict[tuple[str, int], list[Answer]] = defaultdict(list)
    for load_round in rounds:
        answers = good(load_round.answers)
        round_start = min((answer.started for answer in answers), default=0.0)
        for answer in answers:
            minute = 1 + int((answer.started - round_start) // 60)
            groups[BY_MINUTE, min(minute, LATE_MINUTE)].append(answer)
            prompt = answer.prompt_tokens
            reused = answer.cached_tokens
            if prompt:
                # the next power of two, so that slices are few
                max_length = 1 << (prompt - 1).bit_length()
                groups[BY_LENGTH, max(max_length, SHORT_PROMPT)].append(answer)
            if prompt and reused is not None:
                quarters = 4 * reused // prompt
                percent = 25 * quarters
                groups[BY_REUSE, percent].append(answer)
    return [slice_of(by, value, answers) for (by, value), answers in sorted(groups.items())]


def slice_of(by: str, value: int, answers: Sequence[Answer]) -> SliceResult:
    """Returns the figures of one group of answers.

    Acceptance is missing if the server reports only totals of a round.

    Args:
        by: Property by which answers are grouped, such as BY_MINUTE.
        value: Value of the property in this group.
    """
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
    """Returns the spread of the time to the first token, in seconds. None without a token."""
    waits = [
        answer.first_token - answer.started for answer in answers if answer.first_token is not None
    ]
    return spread_of(waits)


def spread_of(values: Sequence[float]) -> LatencySpread | None:
    """Returns mean, median and 99th percentile of latencies. None without values."""
    if not values:
        return None
    figures = [np.mean(values), *np.percentile(values, [50, 99])]
    mean, p50, p99 = (round(float(figure), 5) for figure in figures)
    return LatencySpread(mean, p50, p99)


def question_speeds(rounds: Sequence[Round]) -> list[QuestionSpeed]:
    """Returns tokens and seconds of each conversation at one load.

    Conversations with a failed answer are left out.
    """
    conversations: dict[tuple[int, str], list[Answer]] = defaultdict(list)
    for load_round in rounds:
        for answer in load_round.answers:
            conversations[load_round.number, answer.question].append(answer)
    speeds = []
    for (number, question), answers in conversations.items():
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
    """Returns the speed of each speculating endpoint over each plain endpoint, at each level.

    If all endpoints speculate, or none does, each is compared with the second. Levels at which the
    output of an endpoint is degenerate are left out.
    """
    baselines = [endpoint for endpoint in endpoints if not endpoint.speculates]
    if len(baselines) in (0, len(endpoints)):
        baselines = list(endpoints[1:2])
    baseline_names = {baseline.name for baseline in baselines}
    compared = [endpoint for endpoint in endpoints if endpoint.name not in baseline_names]
    pairs = product(endpoints[0].concurrency, compared, baselines)
    gains = [speed_up([endpoint], [baseline], level.label) for level, endpoint, baseline in pairs]
    return [gain for gain in gains if gain is not None]


# --- findings: `check` judges servers, findings judge the figures of `bench` ---


def find_problems(target: MeasuredEndpoint) -> list[Problem]:
    """Returns the reasons not to trust the figures of one endpoint."""
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
    """Yields findings on failed requests, degenerate output, and streams that a proxy buffers."""
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        message = f"{len(errors)} of {len(answers)} requests failed; the first said: {errors[0]}"
        yield "TS-BENCH-ERRORS", "error", message
    quality = quality_of(answers)
    if quality.degenerate:
        yield "TS-BENCH-DEGENERATE", "warning", f"{quality.words}: loops flatter every drafter"
    tokens_per_arrival = []
    for answer in good(answers):
        tokens = answer.completion_tokens
        arrival_times = {moment for moment, _ in answer.chunks}
        # a shorter answer may rightly arrive at once
        if tokens >= 2 * TOKENS_PER_ARRIVAL:
            tokens_per_arrival.append(tokens / max(1, len(arrival_times)))
    if tokens_per_arrival and min(tokens_per_arrival) > TOKENS_PER_ARRIVAL:
        typical = median(tokens_per_arrival)
        message = (
            f"{len(tokens_per_arrival)} answers arrive in chunks of {typical:.0f} tokens: "
            "time to first token and between tokens are not the server's"
        )
        yield "TS-BENCH-BUFFERED", "warning", message


def without_acceptance(
    server_kind: str, counts: Sequence[TurnCounts], unmeasured: Sequence[str]
) -> Findings:
    """Yields a finding if acceptance is not measured, in whole or in part.

    `unmeasured`: reasons why it is not.
    """
    code = "TS-BENCH-NO-ACCEPTANCE"
    if unmeasured:
        extent = "measured in part" if counts else "not measured"
        yield code, "warning", f"acceptance is {extent}: {listed(unmeasured)}"
    elif not counts:
        nothing = f"the server ({server_kind}) reports nothing about speculation"
        yield code, "info", f"{nothing}: acceptance is not measured"


def in_counts(counts: Sequence[TurnCounts], answers: Sequence[Answer]) -> Findings:
    """Yields findings on acceptance that cannot be right.

    They are drafts that are never accepted, a forced acceptance rate, and counters that include
    other users' requests.
    """
    steps = sum(count.steps for count in counts)
    drafted = sum(count.drafted or 0 for count in counts)
    # a head drafts in every verification step; prompt lookup drafts in some, and its drafts may
    # rightly all be rejected
    if drafted >= max(steps, MIN_STEPS) and not any(count.accepted for count in counts):
        message = (
            f"{drafted} tokens were drafted and none was accepted: the head does not belong to "
            "this target, or the engine computes it otherwise than its training did (rope, norms, "
            "captured layers)"
        )
        yield "TS-BENCH-NOTHING-ACCEPTED", "error", message
    histogram = add_histograms(count.histogram for count in counts) or []
    # a step yields its accepted drafts and one token of the target
    step_sizes = Counter(dict(enumerate(histogram, 1)))
    forced = forced_sizes(step_sizes)
    # in looping text, a working drafter may yield the same number of tokens in each step
    if forced and not quality_of(answers).degenerate:
        over = f"{forced} tokens over {sum(histogram)} steps"
        message = f"every step brought {over}: the output is corrupt, the speed too"
        yield "TS-BENCH-FORCED-ACCEPTANCE", "error", message
    reason = _disagreement(counts)
    if reason:
        yield "TS-BENCH-COUNTERS", "error", f"the counters and the answers disagree: {reason}"


def _disagreement(counts: Sequence[TurnCounts]) -> str:
    """Returns why a server's counters cannot belong to the answers of their rounds. "" if they can.

    The counters then include requests of other users.
    """
    # counts of a single answer come from the answer itself
    pooled = [count for count in counts if count.answers > 1 and count.drafted and count.steps]
    tokens = sum(count.tokens for count in pooled)
    steps = sum(count.steps for count in pooled)
    answers = sum(count.answers for count in pooled)
    surplus = sum(count.surplus for count in pooled)
    drafted = sum(count.drafted or 0 for count in pooled)
    draft_len = drafted / max(1, steps)
    if tokens < steps:
        return f"{steps} steps for {tokens} tokens in {answers} answers"
    # after the end of an answer, at most the drafts of its last step are accepted
    if surplus > answers * draft_len:
        return f"{surplus} more accepted drafts than {answers} answers can leave behind"
    return ""


def in_request(limits: RequestLimits, parameters: Mapping[str, Any]) -> Findings:
    """Yields findings on request parameters that distort the figures.

    They are parameters that the server's release ignores or refuses under speculation (`limits`),
    and ignore_eos.
    """
    for key, verb in (("ignored", "ignores"), ("refused", "refuses")):
        names = sorted(set(parameters) & set(limits.get(key, ())))
        if names:
            message = f"this release {verb} {', '.join(names)} under speculation"
            yield "TS-BENCH-PARAMETER", "warning", message
    if parameters.get("ignore_eos"):
        message = (
            "ignore_eos makes the model write past its own end: "
            "acceptance there is not that of real answers"
        )
        yield "TS-BENCH-IGNORE-EOS", "warning", message


def too_few(counts: Sequence[TurnCounts]) -> Findings:
    """Yields a finding if the confidence interval of the acceptance length is wide or not known."""
    summary = summarize(counts)
    acceptance_length = summary.acceptance_length
    # totals of a round give no interval
    if acceptance_length is None or not per_question(counts):
        return
    message = (
        f"{summary.questions} questions are too few to judge by: "
        f"acceptance length {acceptance_length:.2f}"
    )
    interval = length_ratio(counts)
    if interval is not None:
        if interval.high / interval.value - 1 <= MAX_HALF_INTERVAL:
            return
        message += f" ({interval.words})"
    yield "TS-BENCH-FEW-STEPS", "info", message


def overloaded(rounds: Sequence[Round]) -> Findings:
    """Yields a finding for the first request rate that is too high for the server.

    Requests then queue, so the time to the first token grows during a round.
    """
    for load_round in rounds:
        answers = [answer for answer in good(load_round.answers) if answer.first_token]
        if load_round.level.rate is None or len(answers) < MIN_RATED_ANSWERS:
            continue
        answers.sort(key=lambda answer: answer.started)
        waits_s = [(answer.first_token or 0.0) - answer.started for answer in answers]
        total_s = sum(answer.finished - answer.started for answer in answers)
        mean_answer_s = total_s / len(answers)
        quarter = len(waits_s) // 4
        first_s = median(waits_s[:quarter])
        last_s = median(waits_s[-quarter:])
        # growth by a small part of an answer's time is noise
        if last_s > 2 * first_s and last_s - first_s > 0.1 * mean_answer_s:
            growth = f"from {1000 * first_s:.0f} to {1000 * last_s:.0f} ms during the run"
            excess = f"{load_round.level.rate:g} requests/s are more than it serves"
            message = f"{excess}: the time to the first token grew {growth}"
            yield "TS-BENCH-OVERLOAD", "warning", message
            return


def underfilled(rounds: Sequence[Round]) -> Findings:
    """Yields a finding for the highest concurrency that exceeds the questions of a round."""
    # by concurrency and round, because a resumed round has several entries
    sent: dict[tuple[int, int], set[str]] = defaultdict(set)
    for load_round in rounds:
        if load_round.level.rate is None:
            questions = {answer.question for answer in load_round.answers}
            sent[load_round.level.concurrency, load_round.number] |= questions
    counts = [(concurrency, len(questions)) for (concurrency, _), questions in sent.items()]
    missed = [(concurrency, count) for concurrency, count in counts if count < concurrency]
    if missed:
        concurrency, count = max(missed)
        message = (
            f"concurrency {concurrency}: a round had {count} questions, "
            "so that no more were ever in flight"
        )
        yield "TS-BENCH-FEW-QUESTIONS", "info", message
