"""`--choose-draft`: which of the draft lengths that were measured pays, at each load.

The output tokens per second that a user sees are compared question by question with those of the fastest length. A
length whose interval reaches 1 may be as fast as the fastest: the shortest of these is proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtspec.bench.compare import refuse_different
from trtspec.bench.results import (
    BenchResults,
    DraftChoice,
    EndpointResult,
    LengthFigures,
    LoadChoice,
    Workload,
    level_label,
    speed_ratio,
    user_speed,
)
from trtspec.errors import UsageError
from trtspec.report import say

REMEDY = "pass further servers as `against_url` K=URL or earlier results as `at` K=RESULTS; K=0 is without a head"


def choose(served: Mapping[int, EndpointResult]) -> DraftChoice:
    """The proposal among `served`, by draft length. Raises UsageError where nothing can be chosen between, and for
    degenerate output, on which every draft is right."""
    if not any(served) or len(served) < 2:
        raise UsageError(f"{len(served)} draft length was measured, and a choice needs two", REMEDY)
    for drafts, endpoint in served.items():
        refuse_degenerate(drafts, endpoint)
    fewest = min(
        served.values(), key=lambda endpoint: len(endpoint.concurrency)
    )  # earlier results may have more loads
    loads = []
    for level in fewest.concurrency:
        speeds = {
            drafts: found
            for drafts in sorted(served)
            if (found := user_speed(served[drafts], level.label))
        }
        if missing := sorted(set(served) - set(speeds)):
            message = f"no speed was measured with {missing[0]} drafts at {level.label}"
            raise UsageError(message, "ask three questions or more")
        fastest = max(speeds, key=lambda drafts: speeds[drafts].value)
        figures, best = list[LengthFigures](), fastest
        for drafts, speed in speeds.items():
            over = (
                speed_ratio(served[drafts], served[fastest], level.label)
                if drafts != fastest
                else None
            )
            if over and over.high >= 1:
                best = min(best, drafts)
            at = served[drafts].at(level.label)
            length = (at and at.acceptance_length) or served[drafts].acceptance_length
            rate = round(speed.value, 3)
            figures.append(
                LengthFigures(
                    draft_len=drafts, acceptance_length=length, tokens_per_s=rate, of_best=over
                )
            )
        loads.append(LoadChoice(concurrency=level.concurrency, lengths=figures, best=best))

    def worst(drafts: int) -> float:
        speeds = [
            {figures.draft_len: figures.tokens_per_s for figures in load.lengths} for load in loads
        ]
        return min(at[drafts] / max(at.values()) for at in speeds)

    alike = {load.best for load in loads}
    drafts = (
        alike.pop() if len(alike) == 1 else max(served, key=lambda length: (worst(length), -length))
    )
    return DraftChoice(loads=loads, draft_len=drafts)


def refuse_degenerate(drafts: int, endpoint: EndpointResult) -> None:
    """Raises UsageError for output on which every draft is right."""
    if endpoint.degenerate():
        share = f"{100 * endpoint.degeneration.share:.0f} %"
        message = f"{drafts} drafts, {endpoint.url}: {share} of its answers are degenerate"
        raise UsageError(
            message, "look at them in answers.jsonl, ask other questions, and measure it again"
        )


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


def refuse_stored(stored: Mapping[int, BenchResults], workload: Workload) -> None:
    """Raises UsageError, before the run, for results of `--at` of another draft length, of other questions or
    options, without a load of this run, or degenerate."""
    for given, results in stored.items():
        reported = served_length(results)
        if reported is not None and reported != given:
            message = (
                f"`at` {given}: the results of {results.url} are of {reported} drafts per step"
            )
            raise UsageError(message, f"write `at` {reported}=RESULTS")
        refuse_different(workload, {f"`at` {given}": results})
        refuse_degenerate(given, results)
        if missing := [
            load for load in workload.concurrency if results.at(level_label(load, None)) is None
        ]:
            message = f"`at` {given}: the results of {results.url} have no concurrency {missing[0]}"
            raise UsageError(message, "measure all lengths at the same `concurrency`")


def by_draft_len(
    endpoints: Sequence[EndpointResult],
    given_lengths: Mapping[str, int],
    earlier: Mapping[int, EndpointResult],
) -> dict[int, EndpointResult]:
    """The endpoint of each draft length, to choose the best from. One of `earlier` runs wins over one measured now.

    A length is what the server reports, else what the user gave for the endpoint's name. A second endpoint of one
    length is left out with a note, one of unknown length without. Raises UsageError where the first endpoint, the one
    under test, has no known length, or where a server reports another length than was given for it."""
    found: dict[int, EndpointResult] = dict(earlier)
    for index, endpoint in enumerate(endpoints):
        reported, given = served_length(endpoint), given_lengths.get(endpoint.name)
        if given is None and reported is None and index == 0:
            remedy = f"write K={endpoint.url}, K being the number of drafts it serves; with -o DIR also give `resume`"
            raise UsageError(f"{endpoint.name} does not report its draft length", remedy)
        if reported is not None and given is not None and reported != given:
            raise UsageError(
                f"{given}={endpoint.url}: it drafts {reported} tokens per step",
                "name what it serves",
            )
        length = reported if given is None else given
        if length in found:
            say(
                f"note: {endpoint.url} is left out: it drafts {length} tokens, as {found[length].url} does"
            )
        elif length is not None:
            found[length] = endpoint
    return found
