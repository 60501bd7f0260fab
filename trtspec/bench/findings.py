"""What makes a measurement worth less than it looks: failed requests, loops, forced acceptance, ignored end of text,
answers that are held back, figures that contradict each other, a server that cannot keep up.

An answer that contradicts itself is enough to name a server, because no honest one writes it; so a server that lies in
5 % of its answers is found with 95 % certainty by 59 answers (1 - 0.95^59). What no single answer can show (many
tokens in few chunks is also a large `stream_interval`) is said of the run and not called a lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from trtspec.bench.acceptance import AcceptanceSummary, add_histograms, per_question, units_needed
from trtspec.bench.load import Round
from trtspec.client.client import Answer
from trtspec.client.servers import TurnCounts, is_too_low
from trtspec.client.text_quality import judge_run
from trtspec.errors import Problem, TrtspecError, UsageError

# request parameters that a server's release handles badly under speculation: "end_engine", "ignored", "refused"
RequestLimits = Mapping[str, Sequence[str]]
ENOUGH_STEPS = 50
ENOUGH_TURNS = 10
MAX_DRAFTS = 16
LONG = 32  # tokens from which the arrival of an answer says something
TOKENS_PER_ARRIVAL = 16  # more than any drafter yields in a step
ENOUGH_ANSWERS = 4
HIDDEN = 16  # special tokens of an answer that no text shows: ends of thinking, marks of tool calls
SPLIT = 3  # chunks more than iterations: text is split where thinking or a tool call begins and ends
DRAFTS = 7  # the most that published heads are served with: taken where the server does not tell how many it drafts
WIDE = 0.1  # half an interval over its value: more is too few steps to judge
AIM = 0.05
SHOWN = 3
LENGTH_OFF = 0.05  # of prompts or answers from what was asked for


def refuse_all_failed(name: str, answers: Sequence[Answer]) -> None:
    """Raises TrtspecError with the server's own words when no request succeeded."""
    if answers and all(answer.error for answer in answers):
        raise TrtspecError(
            f"all {len(answers)} requests to {name} failed; the first said: {answers[0].error}",
            "send one request by hand (curl URL/v1/models, then a chat completion) and look at the server's log",
        )


def refuse_what_ends_engines(name: str, limits: RequestLimits, asked: Iterable[str]) -> None:
    """Raises UsageError, before anything is sent, for parameters that end an engine of this release."""
    deadly = sorted(set(asked) & set(limits.get("end_engine", ())))
    if deadly:
        message = f"{', '.join(deadly)}: under speculation such a request ends the engine of {name} for everybody"
        raise UsageError(message, "leave it out of --extra-body, or use a later release")


def limited_parameters(name: str, limits: RequestLimits, asked: Iterable[str]) -> list[Problem]:
    """Parameters that this release drops or refuses under speculation: the answers are not what was asked for."""
    found = []
    for kind, what in (("ignored", "ignores"), ("refused", "refuses")):
        named = sorted(set(asked) & set(limits.get(kind, ())))
        if named:
            message = f"this release {what} {', '.join(named)} under speculation"
            remedy = "measure without it, or without speculation"
            found.append(Problem("TS-BENCH-PARAMETER", "warning", name, message, remedy))
    return found


def failed_requests(name: str, answers: Sequence[Answer]) -> list[Problem]:
    errors = [answer.error for answer in answers if answer.error]
    if not errors:
        return []
    message = f"{len(errors)} of {len(answers)} requests failed; the first said: {errors[0]}"
    return [Problem("TS-BENCH-ERRORS", "error", name, message, "look at the server's log; lower --concurrency")]


def degenerate_output(name: str, answers: Sequence[Answer]) -> list[Problem]:
    verdict = judge_run([answer.written for answer in answers if not answer.error])
    if not verdict.degenerate:
        return []
    return [
        Problem(
            "TS-BENCH-DEGENERATE",
            "warning",
            name,
            f"{verdict.loop} loops, {verdict.empty} empty, {verdict.noise} noise among {verdict.answers} "
            f"answers (distinct 4-grams {verdict.distinct_4gram_ratio}): acceptance on such "
            "output says little, and loops flatter every drafter",
            "read answers.jsonl; measure at the temperature that users have, with the right chat template",
        )
    ]


def no_acceptance(
    name: str, kind: str, counts: Sequence[TurnCounts], unmeasured: Sequence[str] = (), uncounted: Sequence[str] = ()
) -> list[Problem]:
    """That acceptance is not measured, in whole or in part: `unmeasured` is what the server said that is no figure,
    `uncounted` which answers its counters cannot be held to."""
    code, remedy = "TS-BENCH-NO-ACCEPTANCE", "only throughput and latency are shown"
    found, start = [], f"acceptance is {'' if counts else 'not '}measured{' in part' if counts else ''}"
    if unmeasured:
        by_hand = "read the server's metrics by hand; ask it, not a proxy"
        found.append(Problem(code, "warning", name, f"{start}: {unmeasured[0]}", by_hand))
    if uncounted:
        more = f", and {len(uncounted) - SHOWN} more" if len(uncounted) > SHOWN else ""
        message = (
            f"{start}: the server's counters hold all requests together, and {'; '.join(uncounted[:SHOWN])}{more}. "
            "What else was answered there is not in acceptance"
        )
        again = "give the same command with --resume, which asks parts with failed answers again, or with --force"
        found.append(Problem(code, "warning", name, message, again))
    if found or counts:
        return found
    message = f"the server ({kind}) tells nothing about speculation: acceptance is not measured"
    return [Problem(code, "info", name, message, remedy)]


def nothing_accepted(name: str, counts: Sequence[TurnCounts]) -> list[Problem]:
    steps, drafted = sum(count.steps for count in counts), sum(count.drafted or 0 for count in counts)
    # a head drafts in every step; prompt lookup drafts now and then, and may honestly find nothing
    if drafted < max(steps, ENOUGH_STEPS) or any(count.accepted for count in counts):
        return []
    return [
        Problem(
            "TS-BENCH-NOTHING-ACCEPTED",
            "error",
            name,
            f"{drafted} tokens were drafted and none was accepted: the head does not belong to this target, or is "
            "served with another function than it was trained with",
            "trtspec inspect HEAD --against TARGET",
        )
    ]


def forced_acceptance(name: str, counts: Sequence[TurnCounts], answers: Sequence[Answer]) -> list[Problem]:
    """Acceptance that no drafter produces: the same number in every step. A loop may do that honestly, so loops are not
    accused."""
    steps = sum(count.steps for count in counts)
    looping = judge_run([answer.text for answer in answers if not answer.error]).degenerate
    if steps < ENOUGH_STEPS or looping or not any(c.accepted for c in counts) or not _same_everywhere(counts):
        return []
    return [
        Problem(
            "TS-BENCH-FORCED-ACCEPTANCE",
            "error",
            name,
            f"every step accepted the same number of drafts over {steps} steps: acceptance looks forced, so the output "
            "is corrupt and the speed fictitious",
            "unset TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS (or the engine's equivalent) and start the server again",
        )
    ]


def _same_everywhere(counts: Sequence[TurnCounts]) -> bool:
    histogram = add_histograms(count.histogram for count in counts)
    if histogram is not None:
        # the last step of an answer may be cut short, hence not exactly all of them
        return max(histogram) >= 0.98 * sum(histogram) and len(counts) < 0.2 * sum(histogram)
    long = [count for count in counts if count.tokens >= 16]
    return len(long) >= ENOUGH_TURNS and any(all(_is_constant(c, j) for c in long) for j in range(1, MAX_DRAFTS + 1))


def _is_constant(count: TurnCounts, accepted: int) -> bool:
    """Whether exactly `accepted` drafts in each step (the last may be cut short) give these steps for these tokens."""
    steps = count.steps - (1 if count.prefill_in_steps else 0)
    return steps == math.ceil((count.tokens - 1) / (1 + accepted))


def buffered(name: str, answers: Sequence[Answer]) -> list[Problem]:
    """A warning where most answers came at once or in large pieces: what is between server and user holds them back."""
    long = [a for a in answers if not a.error and a.completion_tokens >= LONG and a.first_token is not None]
    if len(long) < ENOUGH_ANSWERS:
        return []
    per_arrival = [answer.completion_tokens / len({when for when, _ in answer.chunks}) for answer in long]
    if median(per_arrival) <= TOKENS_PER_ARRIVAL:
        return []
    waited = median([(a.first_token - a.started) / max(a.finished - a.started, 1e-9) for a in long])  # type: ignore[operator]
    message = (
        f"answers arrive in pieces of {median(per_arrival):.0f} tokens (median of {len(long)}), the first after "
        f"{100 * waited:.0f} % of the time: time to first token and between tokens are not the server's"
    )
    remedy = "turn buffering off in the proxy (nginx: proxy_buffering off), or lower the server's stream_interval"
    return [Problem("TS-BENCH-BUFFERED", "warning", name, message, remedy)]


def overloaded(name: str, rounds: Sequence[Round]) -> list[Problem]:
    """A warning for a request rate that the server cannot keep: waiting grows with the length of the run."""
    found = []
    for run in rounds:
        ordered = sorted((a for a in run.answers if not a.error and a.first_token), key=lambda a: a.started)
        if run.rate is None or len(ordered) < 4 * ENOUGH_ANSWERS:
            continue
        quarter = len(ordered) // 4
        first, last = (
            median([a.first_token - a.started for a in part])  # type: ignore[operator]
            for part in (ordered[:quarter], ordered[-quarter:])
        )
        mean = sum(a.finished - a.started for a in ordered) / len(ordered)
        if last > 2 * first and last - first > 0.1 * mean:
            message = (
                f"{run.rate:g} requests/s are more than it serves: the time to the first token grew from "
                f"{1000 * first:.0f} to {1000 * last:.0f} ms during the run"
            )
            found.append(Problem("TS-BENCH-OVERLOAD", "warning", name, message, "lower --rate"))
    return found[:1]


def underfilled(name: str, runs: Sequence[Round]) -> list[Problem]:
    """The highest load that a round had too few conversations to reach; one finding is enough."""
    held = [(run.concurrency, len({answer.question for answer in run.answers})) for run in runs if run.rate is None]
    missed = max(((load, count) for load, count in held if count < load), default=None)
    if missed is None:
        return []
    message = "load {}: a round had {} questions, so that no more were ever in flight".format(*missed)
    remedy = "ask more questions (--dataset, --samples), or fewer --rounds"
    return [Problem("TS-BENCH-FEW-QUESTIONS", "info", name, message, remedy)]


def missed_lengths(name: str, asked: Iterable[tuple[str, int, Sequence[int]]]) -> list[Problem]:
    """A warning for each (option, tokens, what the server counted) whose median is not the length that was asked for:
    results name their figures by it."""
    found = []
    for option, tokens, counted in asked:
        known = [count for count in counted if count]
        if not known or abs(median(known) - tokens) <= max(2, LENGTH_OFF * tokens):
            continue
        message = (
            f"{option} asked for {tokens} tokens, and the server counts {median(known):g} (median of {len(known)})"
        )
        remedy = "name figures by what was counted; see whether the server takes min_tokens and so long a prompt"
        found.append(Problem("TS-BENCH-LENGTH", "warning", name, message, remedy))
    return found


def contradictions(name: str, answers: Sequence[Answer], max_tokens: int) -> list[Problem]:
    """Answers whose own figures cannot all be true, by kind."""
    good = [answer for answer in answers if not answer.error]
    checks: dict[str, Callable[[Answer], str | None]] = {
        "TS-BENCH-USAGE": lambda answer: usage_contradicts(answer, max_tokens),
        "TS-BENCH-CLAIMED-ACCEPTANCE": claim_contradicts,
    }
    found = []
    for code, check in checks.items():
        wrong = [(answer, reason) for answer in good if (reason := check(answer))]
        if not wrong:
            continue
        shown = "; ".join(f"{answer.question}: {reason}" for answer, reason in wrong[:SHOWN])
        message = f"{len(wrong)} of {len(good)} answers contradict themselves, for example {shown}"
        remedy = "believe none of its figures; look for a proxy that rewrites answers, and at the server's release"
        found.append(Problem(code, "error", name, message, remedy))
    return found


def usage_contradicts(answer: Answer, max_tokens: int) -> str | None:
    """Why the number of tokens that an answer reports cannot be, or None."""
    tokens = answer.completion_tokens
    size = len(answer.written.encode("utf-8", "replace"))
    if tokens > max_tokens:
        return f"{tokens} tokens where {max_tokens} were allowed"
    if not tokens and size:
        return f"{size} bytes of text and no tokens"
    if tokens > size + HIDDEN:
        return f"{tokens} tokens in {size} bytes of text"
    if answer.counted and max(answer.counted) > tokens:
        return f"{max(answer.counted)} tokens on the way and {tokens} at the end"
    spec = answer.spec_decode
    if spec and spec["steps"] and tokens > 1 + spec["steps"] + spec["accepted"]:
        return f"{tokens} tokens out of {spec['steps']} steps and {spec['accepted']} accepted drafts"
    return None


def claim_contradicts(answer: Answer) -> str | None:
    """Why what an answer says of its speculation cannot be, or None."""
    spec, tokens, chunks = answer.spec_decode, answer.completion_tokens, len(answer.chunks)
    if spec:
        steps, drafted, accepted, histogram = (spec[key] for key in ("steps", "drafted", "accepted", "histogram"))
        if accepted > drafted:
            return f"{accepted} drafts accepted of {drafted}"
        if histogram and sum(histogram) != steps:
            return f"a histogram of {sum(histogram)} steps for {steps}"
        if histogram and sum(place * count for place, count in enumerate(histogram)) != accepted:
            return f"a histogram whose drafts are not the {accepted} accepted ones"
        if drafted and 1 + steps + accepted > tokens + max(len(histogram or ()), 1) + drafted // max(1, steps):
            return f"{steps} steps with {accepted} accepted drafts for {tokens} tokens"
        if chunks > steps + 1 + SPLIT + 0.05 * tokens:
            return f"{chunks} chunks out of {steps + 1} iterations"
    claimed = answer.tokens_per_iteration
    if is_too_low(claimed):
        return f"{claimed:g} tokens per iteration, and each brings at least one"
    if claimed and tokens >= LONG and chunks > tokens / claimed + SPLIT + 0.05 * tokens:
        return f"{claimed:g} tokens per iteration, and its {tokens} tokens came in {chunks} chunks"
    if claimed and tokens and claimed > tokens:
        return f"{claimed:g} tokens per iteration in {tokens} tokens"
    return None


def counters_disagree(name: str, counts: Sequence[TurnCounts], answers: Sequence[Answer]) -> list[Problem]:
    """Counters of the server around a run that cannot belong to its answers alone."""
    pooled = [count for count in counts if count.answers > 1 and count.drafted and count.steps]
    if not pooled:
        return []
    tokens, steps, asked = (sum(getattr(count, key) for count in pooled) for key in ("tokens", "steps", "answers"))
    drafts = sum(count.drafted or 0 for count in pooled) / steps
    accepted, surplus = (sum(getattr(count, key) for count in pooled) for key in ("accepted", "surplus"))
    # tokens that no counted step explains came one by one in steps without drafts, each with a chunk of its own
    single = tokens - asked - steps - accepted
    good = [answer for answer in answers if not answer.error and answer.completion_tokens]
    per_chunk = sum(a.completion_tokens for a in good) / max(1, sum(len(a.chunks) for a in good))
    reason = None
    if tokens < steps:
        reason = f"{steps} steps for {tokens} tokens in {asked} answers"
    elif surplus > asked * drafts:
        reason = f"{surplus} more accepted drafts than {asked} answers can leave behind"
    elif single > 0.05 * tokens and tokens / (asked + steps + single) < 0.8 * per_chunk:
        reason = f"{tokens} tokens from {steps} steps with {accepted} accepted drafts, in chunks of {per_chunk:.2f}"
    if reason is None:
        return []
    message = f"the counters and the answers disagree: {reason}"
    remedy = "measure alone on the server, whose counters hold everybody's requests; else believe none of its figures"
    return [Problem("TS-BENCH-COUNTERS", "error", name, message, remedy)]


def too_few(name: str, summary: AcceptanceSummary, counts: Sequence[TurnCounts]) -> list[Problem]:
    """A note where the interval of the acceptance length is too wide to judge by, with how many questions would do."""
    interval, length = summary.acceptance_length_interval, summary.acceptance_length
    if length is None or not summary.steps:
        return []
    if not per_question(counts):
        return _too_few_steps(name, summary, length)
    if interval is None:
        message, remedy = f"{summary.questions} question is too few to judge acceptance by", "ask at least 20"
    elif (interval[1] - interval[0]) / 2 > WIDE * length:
        needed = units_needed(summary.questions, interval, length, AIM)
        message = (
            f"{summary.steps} steps of {summary.questions} questions are too few to judge by: acceptance length "
            f"{length:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
        )
        remedy = f"about {needed} questions give +- {100 * AIM:.0f} %"
    else:
        return []
    return [Problem("TS-BENCH-FEW-STEPS", "info", name, message, remedy)]


def _too_few_steps(name: str, summary: AcceptanceSummary, length: float) -> list[Problem]:
    """The same for servers that tell only of all answers together. A step accepts between 0 and K drafts, so that the
    standard deviation is at most K / 2 (Popoviciu's inequality): from that many steps on the mean is within WIDE."""
    steps = summary.steps or 0
    drafts = summary.drafted / steps if summary.drafted else DRAFTS
    needed = math.ceil((1.96 * drafts / (2 * WIDE * length)) ** 2)
    if steps >= needed:
        return []
    message = (
        f"{steps} steps of {summary.questions} questions are too few to judge by: acceptance length {length:.2f} has "
        "no interval, because the server tells only of all answers together"
    )
    remedy = f"{needed} steps are enough for +- {100 * WIDE:.0f} %: ask about {summary.questions * needed // steps + 1}"
    return [Problem("TS-BENCH-FEW-STEPS", "info", name, message, f"{remedy} questions")]
