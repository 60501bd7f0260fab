"""What answers say of their own speculation: does it agree with itself, with their tokens and with their stream?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from trtspec.bench.adapters import is_count
from trtspec.bench.steps import ENOUGH_ANSWERS, LONGEST_DRAFT, claimed_steps, increments
from trtspec.bench.transcript import Transcript

FEW_DECIMALS = 3  # an average printed with fewer digits does not show whether it belongs to a whole number of steps


def claim_faults(transcripts: Sequence[Transcript]) -> list[tuple[str, str]]:
    """(question, what is wrong) for every answer whose claims contradict each other, its tokens or its stream."""
    decimals = max((_decimals(t.average) for t in transcripts if t.average), default=0)
    found = [
        (transcript.question, fault)
        for transcript in transcripts
        if transcript.error is None
        for fault in itertools.islice(_faults(transcript, decimals), 1)
    ]
    return found or _one_average(transcripts)


def _faults(transcript: Transcript, decimals: int) -> Iterator[str]:
    tokens, average, spec = transcript.completion_tokens or 0, transcript.average, transcript.spec_decode
    if spec is not None:
        yield from _spec_faults(spec, tokens)
    if average is not None and average < 0.99:
        yield f"{average:g} tokens per iteration are fewer than one"
    if average is not None and tokens and decimals >= FEW_DECIMALS and not _whole(tokens, average, decimals):
        yield f"{average:g} tokens per iteration of {tokens} tokens are no whole number of iterations"
    if average is not None and average > tokens > 0:
        yield f"{average:g} tokens per iteration are more than the {tokens} tokens of the answer"
    claimed, seen = claimed_steps(transcript), increments(transcript)
    if claimed is not None and len(seen) > 1.05 * (claimed + 1) + 1:
        yield f"{claimed} steps are claimed and the stream brought tokens {len(seen)} times"
    elif claimed is not None and not seen and (transcript.pieces or 0) > 1.2 * (claimed + 1) + 4:
        yield f"{claimed} steps are claimed and the stream came in {transcript.pieces} pieces"
    if spec is not None and average is not None and is_count(spec.get("steps")) and tokens:
        told = tokens / (spec["steps"] + 1)
        if not 0.9 * told <= average <= 1.1 * told + 0.1:
            yield f"{average:g} tokens per iteration are claimed, and {spec['steps']} steps for {tokens} tokens"


def _spec_faults(spec: dict[str, Any], tokens: int) -> Iterator[str]:
    named = {key: spec.get(key) for key in ("steps", "drafted", "accepted")}
    if not all(is_count(value) for value in named.values()):
        wrong = ", ".join(key for key, value in named.items() if not is_count(value))
        yield f"of spec_decode, {wrong} are no counts"
        return
    steps, drafted, accepted = (int(value or 0) for value in named.values())
    if accepted and not steps:
        yield f"{accepted} drafts are accepted without a step"
    if accepted > drafted:
        yield f"{accepted} drafts are accepted of {drafted}"
    histogram = spec.get("histogram")
    longest = LONGEST_DRAFT
    if isinstance(histogram, (list, tuple)) and histogram and all(is_count(entry) for entry in histogram):
        longest = len(histogram) - 1
        if sum(histogram) != steps or sum(j * count for j, count in enumerate(histogram)) != accepted:
            yield "the histogram does not add up to its own steps and accepted drafts"
    if tokens > 1 + steps + accepted:
        yield f"{tokens} tokens are more than {steps} steps and {accepted} accepted drafts make"
    elif tokens and 1 + steps + accepted - tokens > longest + 1:
        yield f"{steps} steps and {accepted} accepted drafts make more than the {tokens} tokens that came"


def _decimals(value: float) -> int:
    return len(repr(round(value, 6)).rpartition(".")[2])


def _whole(tokens: int, average: float, decimals: int) -> bool:
    """Whether some whole number of iterations gives this average; an engine may count the end of the answer or not."""
    slack = 0.5 * 10.0 ** -min(decimals, 5)
    for counted in (tokens - 1, tokens, tokens + 1):
        iterations = counted / average
        if abs(iterations - round(iterations)) <= 1e-3 + slack * iterations / average:
            return True
    return False


def _one_average(transcripts: Sequence[Transcript]) -> list[tuple[str, str]]:
    """Answers of different lengths that all claim one average, though it makes no whole number of iterations."""
    told = [t for t in transcripts if t.error is None and t.average and t.completion_tokens]
    averages = {round(t.average or 0.0, 4) for t in told}
    if len(told) < ENOUGH_ANSWERS or len(averages) != 1 or averages == {1.0}:
        return []
    average = averages.pop()
    broken = [t for t in told if not _whole(t.completion_tokens or 0, average, FEW_DECIMALS + 1)]
    said = f"all {len(told)} answers claim {average:g} tokens per iteration, whatever their length"
    return [(t.question, said) for t in broken] if len(broken) > len(told) / 4 else []
