"""Which of the draft lengths that were measured pays, at each load: acceptance against the measured cost of a step.

tokens per step     from all loads together, since a load decides what a step costs and not what is accepted, unless a
                    load's own figure contradicts that
seconds per step    see step_cost.py
tokens per second   of a user: the quotient; of lengths measured in turns with how sure their order is

A schedule over batch sizes falls or stays with the load, reaches every batch and never ends at 0, where acceptance
stays collapsed after a burst.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np

from trtspec.bench.acceptance import AcceptanceSummary
from trtspec.bench.compare import SAME
from trtspec.bench.results import BenchResults, EndpointResult, LevelResult
from trtspec.bench.step_cost import ENOUGH_ROUNDS, StepCost, ratio_interval, step_costs, tokens_per_step
from trtspec.errors import UsageError
from trtspec.report import say

CLOSE = 0.01  # two lengths that differ by less are alike, and the shorter one is proposed
ROUNDS = 5  # of several servers: enough for an interval of each ratio
SCHEDULE = "speculative_config.draft_len_schedule"
LARGEST_BATCH = 2048  # what an engine that names no max_batch_size may run, and more than any that does
REMEDY = "serve other draft lengths too and pass each as --at K=URL or --at K=RESULTS; K=0 is a server without a head"


@dataclass(frozen=True, kw_only=True)
class LengthFigures:
    """One draft length at one load. `of_best`: 95 % interval of its tokens per second over those of the best one, where
    both were measured in turns."""

    draft_len: int
    tokens_per_step: float
    step_s: float
    tokens_per_s: float
    of_best: list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class LoadChoice:
    """The lengths at one concurrency, shortest first, and the best of them; `rounds` in which all of them
    were measured in turns, and those that these rounds cannot tell from the best."""

    concurrency: int
    lengths: list[LengthFigures]
    best: int
    rounds: int = 0
    alike: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """What is proposed: one length, and where a release can follow the load a schedule (batch size -> length)."""

    loads: list[LoadChoice]
    draft_len: int
    schedule: dict[int, int] | None
    version: str | None
    options: list[str]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def served_length(endpoint: EndpointResult) -> int | None:
    """The draft length that a server runs with, from what it drafted; 0 where it steps without drafts."""
    if endpoint.drafted is None or not endpoint.steps:
        return None
    if endpoint.histogram:
        return len(endpoint.histogram) - 1
    return round(endpoint.drafted / endpoint.steps)


def choose(served: Mapping[int, EndpointResult], apart: Collection[int] = ()) -> list[LoadChoice]:
    """The best length at every concurrency that all of `served` (by draft length) were measured at; `apart` are the
    lengths that come from another run.

    Raises UsageError where nothing can be chosen between, and for a server whose figures say nothing."""
    if not any(served):
        raise UsageError("no server with drafts was measured", REMEDY)
    for drafts, endpoint in served.items():
        refuse_mute(drafts, endpoint)
    common = common_loads([[level.concurrency for level in _levels(endpoint)] for endpoint in served.values()])
    return [_choice(served, concurrency, apart) for concurrency in common]


def refuse_mute(drafts: int, endpoint: EndpointResult) -> None:
    """Raises UsageError for a server with drafts that does not say what it accepted, and for degenerate output, on
    which every draft is right or none."""
    name, quality = f"{drafts} drafts, {endpoint.url}", endpoint.degeneration
    if quality.degenerate:
        raise UsageError(
            f"{name}: {100 * quality.share:.0f} % of its answers are degenerate: acceptance on them chooses nothing",
            "look at them in answers.jsonl, repair the server or ask other questions, and measure it again",
        )
    if drafts and endpoint.acceptance_length is None:
        raise UsageError(
            f"{name}: it does not say what it accepted ({endpoint.source})",
            "measure a server that tells, such as a worker itself in place of a frontend before it",
        )


def refuse_stored(stored: Mapping[int, BenchResults], workload: Mapping[str, Any]) -> None:
    """Raises UsageError for results of `--at` that cannot stand beside a run of `workload` (as its description states
    it): of another draft length, of other questions or options, at other loads, without acceptance. Before the run."""
    for given, results in stored.items():
        name, told = f"--at {given}: the results of {results.url}", served_length(results)
        if told is not None and told != given:
            raise UsageError(f"{name} are of {told} drafts per step", f"write --at {told}=RESULTS")
        refuse_mute(given, results)
        differing = [key for key in SAME if results.workload.get(key) != workload.get(key)]
        if differing:
            raise UsageError(
                f"{name} differ from this run in {', '.join(differing)}",
                "measure both with the same data set and options, best in one run: --at K=URL",
            )
    if stored:
        common_loads([workload["concurrency"], *([at.concurrency for at in _levels(one)] for one in stored.values())])


def common_loads(loads: Sequence[Sequence[int]]) -> list[int]:
    """The concurrencies that all measurements have. Raises UsageError where there is none."""
    found = [concurrency for concurrency in loads[0] if all(concurrency in other for other in loads)]
    if not found:
        told = "; ".join(", ".join(map(str, one)) or "none" for one in loads)
        raise UsageError(
            f"the measurements have no concurrency in common ({told})", "measure all of them at --concurrency 1,4,16"
        )
    return found


def _levels(endpoint: EndpointResult) -> list[LevelResult]:
    return [level for level in endpoint.concurrency if not level.rate]


def _level(endpoint: EndpointResult, concurrency: int) -> LevelResult | None:
    return next((level for level in _levels(endpoint) if level.concurrency == concurrency), None)


def _choice(served: Mapping[int, EndpointResult], concurrency: int, apart: Collection[int]) -> LoadChoice:
    levels = {k: (endpoint, level) for k, endpoint in served.items() if (level := _level(endpoint, concurrency))}
    costs: dict[int, StepCost] = {}
    for drafts, cost in step_costs(levels, apart).items():
        if cost is None:
            raise UsageError(
                f"no step was timed with {drafts} drafts at concurrency {concurrency}", "ask longer answers"
            )
        costs[drafts] = cost
    lengths = {k: tokens_per_step(levels[k][0], _answers(*levels[k])) if k else 1.0 for k in sorted(levels)}
    rates = {k: length / costs[k].seconds for k, length in lengths.items()}
    best = next(k for k, rate in rates.items() if rate >= (1 - CLOSE) * max(rates.values()))
    by_round = {k: lengths[k] / np.array(cost.by_round) for k, cost in costs.items() if cost.by_round}
    sure = {k: ratio_interval(by_round[k], by_round[best]) for k in by_round if best in by_round and k != best}
    figures = [
        LengthFigures(
            draft_len=k,
            tokens_per_step=round(lengths[k], 4),
            step_s=round(costs[k].seconds, 7),
            tokens_per_s=round(rates[k], 3),
            of_best=[round(end, 4) for end in ends] if (ends := sure.get(k)) else None,
        )
        for k in lengths
    ]
    return LoadChoice(
        concurrency=concurrency,
        lengths=figures,
        best=best,
        rounds=min((len(cost.by_round or ()) for cost in costs.values()), default=0),
        alike=[f.draft_len for f in figures if f.of_best and f.of_best[0] <= 1 <= f.of_best[1]],
    )


def _answers(endpoint: EndpointResult, level: LevelResult) -> AcceptanceSummary:
    """The answers that tell a level's acceptance: those of all levels, several times as many as its own, unless the
    level accepts more or less than its interval allows, as where a server drafts less under load."""
    found, own = endpoint.acceptance_length, level.acceptance_length_interval
    return endpoint if found and own and own[0] <= found <= own[1] else level


def one_length(loads: Sequence[LoadChoice]) -> int:
    """The length that loses least at the load where it loses most; never 0."""
    offered = set.intersection(*({figure.draft_len for figure in load.lengths} for load in loads)) - {0}

    def worst(drafts: int) -> float:
        return max(
            max(f.tokens_per_s for f in load.lengths)
            / next(f.tokens_per_s for f in load.lengths if f.draft_len == drafts)
            for load in loads
        )

    return min(sorted(offered), key=worst)


def schedule_of(loads: Sequence[LoadChoice], bounds: str) -> dict[int, int] | None:
    """Batch size -> draft length in the words of a release, whose keys are `lower` or `upper` bounds; None where one
    length is best everywhere. Half way (geometrically) between two loads the length changes."""
    ordered = sorted(loads, key=lambda load: load.concurrency)
    lengths: list[int] = []
    for load in ordered:
        lengths.append(max(1, min([load.best, *lengths[-1:]])))
    if len(set(lengths)) == 1:
        return None
    borders = [int(sqrt(a.concurrency * b.concurrency)) for a, b in pairwise(ordered)]
    if bounds == "lower":
        found = dict(zip([1, *(border + 1 for border in borders)], lengths, strict=True))
    else:
        found = dict(zip([*borders, max(LARGEST_BATCH, ordered[-1].concurrency)], lengths, strict=True))
    entries = list(found.items())
    if bounds == "lower":  # an entry that changes nothing after the one before it is left out
        return dict(entries[:1] + [b for a, b in pairwise(entries) if a[1] != b[1]])
    return dict([a for a, b in pairwise(entries) if a[1] != b[1]] + entries[-1:])


def propose(
    loads: Sequence[LoadChoice], meaning: Mapping[str, Any], version: str | None, osl: int | None = None
) -> DraftChoice:
    """The proposal for a release, whose `meaning` of draft_len_schedule (bounds, first, beyond) its schema states.
    `osl`: the length to which answers were forced."""
    notes = []
    bounds = meaning.get("bounds")
    schedule = schedule_of(loads, bounds) if bounds in ("lower", "upper") else None
    if version and bounds not in ("lower", "upper"):
        notes.append(
            f"TensorRT-LLM {version} has no draft_len_schedule whose meaning is known: one length for all loads"
        )
    drafts = max(schedule.values()) if schedule else one_length(loads)
    off = [load.concurrency for load in loads if load.best == 0]
    if off:
        where = ", ".join(map(str, off))
        notes.append(f"at concurrency {where} no drafts at all are fastest; a server that reaches 0 may stay there")
    if osl:
        notes.append(
            f"answers were forced to {osl} tokens (--osl), and what a model writes past its own end is accepted more "
            "easily than its answers: leave --osl out"
        )
    notes += how_sure(loads)
    options = ["--draft-len", str(drafts)]
    if schedule:
        entries = ", ".join(f"{batch}: {length}" for batch, length in schedule.items())
        options += ["--set", f"{SCHEDULE}={{{entries}}}"]
    if version:
        options += ["--trtllm-version", version]
    return DraftChoice(
        loads=list(loads), draft_len=drafts, schedule=schedule, version=version, options=options, notes=notes
    )


def how_sure(loads: Sequence[LoadChoice]) -> list[str]:
    """What the rounds cannot tell of the choice."""
    if all(len(load.lengths) < 2 for load in loads):
        return [f"nothing was compared, because one length was served: {REMEDY}"]
    fewest = min(load.rounds for load in loads)
    if fewest == 0:
        return [
            "the lengths were not all measured in turns, so that a machine that was slower for one of them decides as "
            "well: measure all of them in one run"
        ]
    if fewest < ENOUGH_ROUNDS:
        counted = "1 round does" if fewest == 1 else f"{fewest} rounds do"
        return [f"{counted} not show how sure the choice is: give --rounds {ROUNDS}"]
    return [
        f"at concurrency {load.concurrency} {load.rounds} rounds do not tell {', '.join(map(str, load.alike))} drafts "
        f"from {load.best}; more --rounds may"
        for load in loads
        if load.alike
    ]


def served_by(
    endpoints: Sequence[EndpointResult], named: Mapping[str, int], stored: Mapping[int, EndpointResult]
) -> dict[int, EndpointResult]:
    """Endpoints by draft length: measured ones by what they drafted, those of `named` and `stored` as they were given.

    Of two with one length the first counts, and the other is named. Raises UsageError where the first does not tell its
    length, or one tells another than was given."""
    found: dict[int, EndpointResult] = dict(stored)
    for place, endpoint in enumerate(endpoints):
        told, given = served_length(endpoint), named.get(endpoint.name)
        if given is None and told is None and place == 0:
            remedy = f"add --at K={endpoint.url}, K being the number of drafts it serves; with -o DIR also --resume"
            raise UsageError(f"{endpoint.name} does not tell its draft length", remedy)
        if told is not None and given is not None and told != given:
            raise UsageError(f"--at {given}={endpoint.url}: it drafts {told} tokens per step", "name what it serves")
        length = told if given is None else given
        if length in found:
            say(f"note: {endpoint.url} is left out: it drafts {length} tokens, as {found[length].url} does")
        elif length is not None:
            found[length] = endpoint
    return found
