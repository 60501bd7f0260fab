"""What one verification step costs at each draft length of a load, and how well the lengths can be told apart.

Servers of one run take turns: in every round each answers the same questions. A machine that slows down slows all
lengths of that round, so a length's cost is its ratio to the round's mean over all lengths; pooled seconds would let
the slowest round decide. Over the rounds the centre is the median of the means of all pairs (Hodges and Lehmann, Annals
of Mathematical Statistics 34, 1963), which one disturbed round cannot move far and which is nearly as sharp as the mean
where none is. The spread of the ratios of two lengths over the rounds says how sure their order is (Student's t).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtspec.bench.acceptance import AcceptanceSummary, mean_interval
from trtspec.bench.results import EndpointResult, LevelResult, QuestionSpeed

ENOUGH_ROUNDS = 3


@dataclass(frozen=True)
class StepCost:
    """Seconds per verification step of one request. `by_round`: the same in each round, where the length was measured
    in turns with the other lengths that have one."""

    seconds: float
    by_round: tuple[float, ...] | None = None


def step_costs(
    levels: Mapping[int, tuple[EndpointResult, LevelResult]], apart: Collection[int] = ()
) -> dict[int, StepCost | None]:
    """Cost by draft length of the servers of one load; None where no step was timed.

    `apart`: lengths that were not measured in turns with the others, whose rounds are nobody else's."""
    rounds = {
        drafts: _seconds_by_round(endpoint, level)
        for drafts, (endpoint, level) in levels.items()
        if drafts not in apart
    }
    paired = len(rounds) > 1 and all(rounds.values()) and len({tuple(found) for found in rounds.values()}) == 1
    found: dict[int, StepCost | None] = _paired(rounds) if paired else {}
    for drafts, (endpoint, level) in levels.items():
        if drafts not in found:
            pooled = _seconds(speeds_of(endpoint, level), tokens_per_step(endpoint, level))
            found[drafts] = StepCost(pooled) if pooled else None
    return found


def _paired(rounds: Mapping[int, Mapping[int, float]]) -> dict[int, StepCost | None]:
    """From seconds by length and round: the centre of each length's ratio to its rounds, times the mean round."""
    logs = np.log([list(found.values()) for found in rounds.values()])
    ratios, mean = logs - logs.mean(axis=0), logs.mean()
    return {
        drafts: StepCost(math.exp(mean + centre(ratio)), tuple(rounds[drafts].values()))
        for drafts, ratio in zip(rounds, ratios, strict=True)
    }


def centre(values: NDArray[np.float64]) -> float:
    """Hodges and Lehmann's: the median of the means of all pairs, each value with itself as well."""
    first, second = np.triu_indices(len(values))
    return float(np.median((values[first] + values[second]) / 2))


def speeds_of(endpoint: EndpointResult, level: LevelResult) -> list[QuestionSpeed]:
    return [speed for speed in endpoint.questions_detail if speed.level == level.label]


def tokens_per_step(endpoint: AcceptanceSummary, level: AcceptanceSummary) -> float:
    """Of a level, or where a server tells only of all answers, of these; 1 without drafts."""
    return level.acceptance_length or endpoint.acceptance_length or 1.0


def _seconds(speeds: Collection[QuestionSpeed], length: float) -> float | None:
    """From the first to the last chunk of each answer, over the steps of so many tokens that this took."""
    waited, decoded = sum(speed.decode_s for speed in speeds), sum(speed.decoded for speed in speeds)
    return waited * length / decoded if waited and decoded else None


def _seconds_by_round(endpoint: EndpointResult, level: LevelResult) -> dict[int, float]:
    """Seconds per step by the number of the round; empty where a round has none."""
    rounds: dict[int, list[QuestionSpeed]] = {}
    for speed in speeds_of(endpoint, level):
        rounds.setdefault(speed.round, []).append(speed)
    length = tokens_per_step(endpoint, level)
    found = {number: _seconds(speeds, length) for number, speeds in sorted(rounds.items())}
    return {number: seconds for number, seconds in found.items() if seconds} if all(found.values()) else {}


def ratio_interval(of: NDArray[np.float64], over: NDArray[np.float64]) -> tuple[float, float] | None:
    """95 % interval of the ratio of two figures, each given by round, about its centre; None below three rounds."""
    ratios = np.log(of / over)
    found = mean_interval(ratios) if len(of) >= ENOUGH_ROUNDS else None
    middle = centre(ratios)
    half = (found[1] - found[0]) / 2 if found else 0.0
    return (math.exp(middle - half), math.exp(middle + half)) if found else None
