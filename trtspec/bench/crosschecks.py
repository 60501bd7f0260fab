"""What a server says of its answers against what came in: usage, chunks, counts of speculation and counters must agree.

An answer that contradicts itself is enough to name a server, because no honest one writes it; so a server that lies in
5 % of its answers is found with 95 % certainty by 59 answers (1 - 0.95^59). What no single answer can show (many
tokens in few chunks is also a large `stream_interval`) is said of the run and not called a lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtspec.bench.acceptance import AcceptanceSummary, TurnCounts, per_question, units_needed
from trtspec.bench.arrivals import LONG
from trtspec.bench.client import Answer
from trtspec.errors import Problem

HIDDEN = 16  # special tokens of an answer that no text shows: ends of thinking, marks of tool calls
SPLIT = 3  # chunks more than iterations: text is split where thinking or a tool call begins and ends
WIDE = 0.1  # half an interval over its value: more is too few steps to judge
AIM = 0.05
SHOWN = 3


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
    calls = "".join(call["name"] + call["arguments"] for call in answer.tool_calls)
    size = len((answer.text + answer.reasoning + calls).encode("utf-8", "replace"))
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
    if length is None or not summary.steps or not per_question(counts):
        return []
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
