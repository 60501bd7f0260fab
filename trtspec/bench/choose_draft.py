"""`--choose-draft`: which of the draft lengths that were measured pays, at each load.

The output tokens per second that a user sees are compared question by question with those of the fastest length. A
length whose interval reaches 1 may be as fast as the fastest: the shortest of these is proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low

from trtspec.bench.results import (
    DraftChoice,
    EndpointResult,
    LengthFigures,
    LoadChoice,
    speed_up,
    user_speed,
)
from trtspec.errors import UsageError

REMEDY = "pass further servers as `against_url` K=URL; K=0 is without a head"


def choose(served: Mapping[int, EndpointResult]) -> DraftChoice:
    """The proposal among `served`, by draft length. Raises UsageError where nothing can be chosen between, and where a
    speed is not known, as for degenerate output."""
    if not any(served) or len(served) < 2:
        raise UsageError(f"{len(served)} draft length was measured, and a choice needs two", REMEDY)
    loads = []
    for level in next(iter(served.values())).concurrency:
        speeds = {
            drafts: found
            for drafts in sorted(served)
            if not served[drafts].degenerate()
            and (found := user_speed(served[drafts], level.label))
        }
        if missing := sorted(set(served) - set(speeds)):
            message = f"no speed of {served[missing[0]].url} ({missing[0]} drafts) at {level.label}: its output is "
            message += "degenerate, or fewer than three questions were answered"
            raise UsageError(
                message, "look at answers.jsonl, ask other questions, and measure again"
            )
        fastest = max(speeds, key=lambda drafts: speeds[drafts].value)
        figures, best = list[LengthFigures](), fastest
        for drafts, speed in speeds.items():
            up = speed_up([served[drafts]], [served[fastest]], level.label)
            of_best = up.ratio if up is not None and drafts != fastest else None
            if of_best is not None and of_best.high >= 1:
                best = min(best, drafts)
            at = served[drafts].at(level.label)
            length = (at and at.acceptance_length) or served[drafts].acceptance_length
            rate = round(speed.value, 3)
            figures.append(
                LengthFigures(
                    draft_len=drafts, acceptance_length=length, tokens_per_s=rate, of_best=of_best
                )
            )
        loads.append(LoadChoice(concurrency=level.concurrency, lengths=figures, best=best))

    return DraftChoice(loads=loads, draft_len=median_low(load.best for load in loads))


def served_length(endpoint: EndpointResult) -> int | None:
    """The draft length that a server runs with, from what it drafted; 0 where it steps without drafts. None if it does
    not say."""
    if endpoint.drafted is None or not endpoint.steps:
        return None
    return (
        len(endpoint.histogram) - 1
        if endpoint.histogram
        else round(endpoint.drafted / endpoint.steps)
    )


def by_draft_len(
    endpoints: Sequence[EndpointResult], lengths: Mapping[str, int]
) -> dict[int, EndpointResult]:
    """The endpoint of each draft length; `lengths` by name. Raises UsageError if a server reports another length."""
    found = {}
    for endpoint in endpoints:
        length, reported = lengths[endpoint.name], served_length(endpoint)
        if reported not in (None, length):
            message = f"{length}={endpoint.url}: it drafts {reported} tokens per step"
            raise UsageError(message, "name what it serves")
        found[length] = endpoint
    return found
