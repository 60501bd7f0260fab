"""Proposes a draft length from measurements of several (`bench --choose-draft`).

At each load, a user's output tokens per second with each draft length are compared with the fastest
draft length, question by question. A length whose confidence interval reaches 1 may be as fast as
the fastest. The shortest such length is proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low

from trtspec.bench.results import (
    DraftChoice,
    EndpointResult,
    LengthFigures,
    LevelResult,
    LoadChoice,
    speed_up,
    user_speed,
)
from trtspec.bench.statistics import Ratio
from trtspec.errors import UsageError

REMEDY = "pass further servers as `against_url` K=URL; K=0 is without a head"
Served = Mapping[int, EndpointResult]  # by draft length


def choose(served: Served) -> DraftChoice:
    """Returns the proposed draft length, with the figures of every length at each load.

    `served`: the endpoint of each draft length, 0 for a server without a head. Raises UsageError
    if fewer than two lengths were measured, or if a speed is not known.
    """
    if not any(served) or len(served) < 2:
        raise UsageError(f"{len(served)} draft length was measured, and a choice needs two", REMEDY)
    first = next(iter(served.values()))
    loads = [_choose_at(level, served) for level in first.concurrency]
    return DraftChoice(loads=loads, draft_len=median_low(load.best for load in loads))


def _choose_at(level: LevelResult, served: Served) -> LoadChoice:
    """Finds the shortest draft length that may be as fast as the fastest at one load.

    Returns the draft length with the figures of all lengths. Raises UsageError if a speed is not
    known.
    """
    label = level.label
    speeds = _speeds(label, served)
    fastest = max(speeds, key=lambda draft_len: speeds[draft_len].value)
    figures = []
    best = fastest
    for draft_len, speed in speeds.items():
        endpoint = served[draft_len]
        over_fastest = None
        if draft_len != fastest:
            gain = speed_up([endpoint], [served[fastest]], label)
            if gain:
                over_fastest = gain.ratio
        # an interval that reaches 1 does not show that this length is slower
        if over_fastest is not None and over_fastest.high >= 1:
            best = min(best, draft_len)
        # acceptance over all loads, unless it was measured at this load
        acceptance_length = endpoint.acceptance_length
        at_level = endpoint.at(label)
        if at_level and at_level.acceptance_length:
            acceptance_length = at_level.acceptance_length
        length_figures = LengthFigures(
            draft_len=draft_len,
            acceptance_length=acceptance_length,
            tokens_per_s=round(speed.value, 3),
            of_best=over_fastest,
        )
        figures.append(length_figures)
    return LoadChoice(concurrency=level.concurrency, lengths=figures, best=best)


def _speeds(label: str, served: Served) -> dict[int, Ratio]:
    """Returns a user's output tokens per second at one load by draft length, the shortest first.

    Raises UsageError if the speed of an endpoint is not known.
    """
    speeds = {}
    for draft_len, endpoint in sorted(served.items()):
        speed = user_speed(endpoint, label)
        if speed is None or endpoint.degenerate():
            message = f"no speed of {endpoint.url} ({draft_len} drafts) at {label}: its output is "
            message += "degenerate, or fewer than three questions were answered"
            remedy = "look at answers.jsonl, ask other questions, and measure again"
            raise UsageError(message, remedy)
        speeds[draft_len] = speed
    return speeds


def by_draft_len(
    endpoints: Sequence[EndpointResult], lengths: Mapping[str, int]
) -> dict[int, EndpointResult]:
    """Returns the endpoints by draft length.

    `lengths`: draft length by endpoint name, as the user states it. Raises UsageError if a server
    reports another length.
    """
    served = {}
    for endpoint in endpoints:
        stated = lengths[endpoint.name]
        reported = served_length(endpoint)
        if reported not in (None, stated):
            message = f"{stated}={endpoint.url}: it drafts {reported} tokens per step"
            raise UsageError(
                message, "write K=URL with the draft length that the server reports as K"
            )
        served[stated] = endpoint
    return served


def served_length(endpoint: EndpointResult) -> int | None:
    """Returns the number of tokens that a server drafts per verification step.

    0 if the server reports steps without drafts, None if it does not report drafts.
    """
    drafted = endpoint.drafted
    steps = endpoint.steps
    histogram = endpoint.histogram
    if drafted is None or not steps:
        return None
    return len(histogram) - 1 if histogram else round(drafted / steps)
