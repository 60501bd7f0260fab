"""What makes a measurement worth less than it looks: failed requests, loops, forced acceptance, ignored end of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from trtspec.bench.acceptance import TurnCounts, add_histograms
from trtspec.bench.client import Answer
from trtspec.bench.text_quality import judge_run
from trtspec.errors import Problem, TrtspecError, UsageError

# request parameters that a server's release handles badly under speculation: "end_engine", "ignored", "refused"
RequestLimits = Mapping[str, Sequence[str]]
ENOUGH_STEPS = 50
ENOUGH_TURNS = 10
MAX_DRAFTS = 16


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
    verdict = judge_run([answer.reasoning + answer.text for answer in answers if not answer.error])
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


def no_acceptance(name: str, kind: str, counts: Sequence[TurnCounts]) -> list[Problem]:
    if counts:
        return []
    message = f"the server ({kind}) tells nothing about speculation: acceptance is not measured"
    return [Problem("TS-BENCH-NO-ACCEPTANCE", "info", name, message, "only throughput and latency are shown")]


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
