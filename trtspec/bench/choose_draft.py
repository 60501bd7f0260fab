"""`--choose-draft`: which of the draft lengths that were measured pays, at each load.

The output tokens per second that a user sees are compared with the fastest length, question by
question. A length whose interval reaches 1 may be as fast as the fastest: the shortest such length
is proposed.
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
    """Returns the proposed draft length.

    Raises UsageError if there is no choice, or if a speed is not known.
    """
    if not any(served) or len(served) < 2:
        raise UsageError(f"{len(served)} draft length was measured, and a choice needs two", REMEDY)
    first = next(iter(served.values()))
    loads = [_choose_at(level, served) for level in first.concurrency]
    return DraftChoice(loads=loads, draft_len=median_low(load.best for load in loads))


def _choose_at(level: LevelResult, served: Served) -> LoadChoice:
    """The choice at one load. Raises UsageError if a speed is not known."""
    label = level.label
    speeds = _speeds(label, served)
    fastest = max(speeds, key=lambda drafts: speeds[drafts].value)
    figures = []
    best = fastest
    for drafts, speed in speeds.items():
        endpoint = served[drafts]
        of_best = None
        if drafts != fastest:
            gain = speed_up([endpoint], [served[fastest]], label)
            if gain:
                of_best = gain.ratio
        if of_best is not None and of_best.high >= 1:
            best = min(best, drafts)
        length = endpoint.acceptance_length
        at_level = endpoint.at(label)
        if at_level and at_level.acceptance_length:
            length = at_level.acceptance_length
        row = LengthFigures(
            draft_len=drafts,
            acceptance_length=length,
            tokens_per_s=round(speed.value, 3),
            of_best=of_best,
        )
        figures.append(row)
    return LoadChoice(concurrency=level.concurrency, lengths=figures, best=best)


def _speeds(label: str, served: Served) -> dict[int, Ratio]:
    """Speeds for a user at a level by draft length, the shortest first.

    Raises UsageError if one is not known.
    """
    speeds = {}
    for drafts, endpoint in sorted(served.items()):
        speed = user_speed(endpoint, label)
        if speed is None or endpoint.degenerate():
            message = f"no speed of {endpoint.url} ({drafts} drafts) at {label}: its output is "
            message += "degenerate, or fewer than three questions were answered"
            remedy = "look at answers.jsonl, ask other questions, and measure again"
            raise UsageError(message, remedy)
        speeds[drafts] = speed
    return speeds


def by_draft_len(
    endpoints: Sequence[EndpointResult], lengths: Mapping[str, int]
) -> dict[int, EndpointResult]:
    """Returns the endpoint of each draft length. `lengths`: by endpoint name.

    Raises UsageError if a server reports another length.
    """
    served = {}
    for endpoint in endpoints:
        length = lengths[endpoint.name]
        reported = served_length(endpoint)
        if reported not in (None, length):
            message = f"{length}={endpoint.url}: it drafts {reported} tokens per step"
            raise UsageError(message, "name what it serves")
        served[length] = endpoint
    return served


def served_length(endpoint: EndpointResult) -> int | None:
    """Returns the draft length that a server reported.

    0 if it steps without drafts, None if it reports none.
    """
    drafted = endpoint.drafted
    steps = endpoint.steps
    histogram = endpoint.histogram
    if drafted is None or not steps:
        return None
    return len(histogram) - 1 if histogram else round(drafted / steps)
