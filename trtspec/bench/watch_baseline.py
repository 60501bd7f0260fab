"""What a results.json says an endpoint should accept, in both units that servers count in: per verification step, and
per draft token where only drafts are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.bench.acceptance import TurnCounts
from trtspec.bench.sequential import SeriesReference

ENOUGH_STEPS = 200  # of a category in a baseline, to say what it accepts
DESIGN_EFFECT = 8.0  # variance of a mean over steps of whole answers, over that of independent steps


@dataclass(frozen=True)
class BaselineRatios:
    """Accepted drafts per unit (a step, or a draft token) of each category with its standard error, and how much one
    unit adds to the variance of a sum of units (answers are clusters of steps that depend on each other)."""

    mean: dict[str, float]
    errors: dict[str, float]
    variance: float

    def lowest(self, units: float) -> SeriesReference:
        """The category that accepts least, for batches of this many units: no mix of the categories is below it."""
        category = min(self.mean, key=self.mean.__getitem__)
        return SeriesReference(self.mean[category], self.errors[category], self.variance / units)


@dataclass(frozen=True)
class WatchBaseline:
    """What a results.json says, per verification step and per draft token; `drafts` is None where the results do not
    say how many were drafted."""

    name: str
    steps: BaselineRatios
    drafts: BaselineRatios | None = None

    @property
    def draft_length(self) -> float | None:
        """Drafts of a step, the most of any category."""
        drafts = self.drafts
        if drafts is None:
            return None
        return max((self.steps.mean[c] / share for c, share in drafts.mean.items() if share), default=None)

    @property
    def nothing_accepted(self) -> list[str]:
        """Categories without an accepted draft. No mix of the traffic can fall below them."""
        return [category for category, mean in self.steps.mean.items() if not mean]

    def floor(self, per: str, units: float) -> SeriesReference | None:
        """What traffic should accept at least, in a server's unit (`Increment.per`) and for batches of this many."""
        ratios = self.steps if per == "step" else self.drafts
        return ratios.lowest(units) if ratios is not None else None

    def probes(self, steps: float) -> SeriesReference | None:
        """Of accepted drafts over those that each answer's own category gives, for batches of this many steps; 1 is
        what the baseline had, so the mix does not matter. None where nothing was accepted."""
        ratios = self.steps
        relative = {c: (ratios.errors[c] / r) ** 2 for c, r in ratios.mean.items() if r}
        mean = sum(ratios.mean.values()) / len(ratios.mean)
        if not relative:
            return None
        error = math.sqrt(sum(relative.values())) / len(relative)
        return SeriesReference(1.0, error, ratios.variance / mean**2 / steps)


def baseline_of(name: str, categories: Mapping[str, Any], turns: Sequence[TurnCounts]) -> WatchBaseline | None:
    """From the categories and answers of a results.json; None where none has ENOUGH_STEPS steps.

    A category's ratio is accepted over units; its error and the variance are those of a ratio estimator with answers as
    clusters. Where a server counts for all answers together (vLLM), single steps with a DESIGN_EFFECT stand in.
    """
    told = {category: found for category, found in categories.items() if found.get("accepted") is not None}
    enough = {category: found for category, found in told.items() if (found.get("steps") or 0) >= ENOUGH_STEPS}
    if not enough:
        return None
    groups: dict[str, list[TurnCounts]] = {}
    for turn in turns:
        groups.setdefault(turn.category, []).append(turn)
    steps = _ratios(enough, groups, "steps")
    drafted = all(found.get("drafted") for found in enough.values())
    drafts = _ratios(enough, groups, "drafted") if drafted else None
    return WatchBaseline(name, steps, drafts)


def _ratios(categories: Mapping[str, Any], groups: Mapping[str, Sequence[TurnCounts]], unit: str) -> BaselineRatios:
    """Of the field `unit` ("steps" or "drafted") of categories and answers."""
    means, errors, squares, all_units = {}, {}, 0.0, 0
    for category, found in categories.items():
        units, group = found[unit], groups.get(category, [])
        mean = found["accepted"] / units
        told = [(turn.accepted, turn.drafted if unit == "drafted" else turn.verifications) for turn in group]
        if len(told) > 1 and all(count is not None for _, count in told):
            scatter = sum((got - mean * (count or 0)) ** 2 for got, count in told) * len(told) / (len(told) - 1)
        else:
            ratio = found["accepted"] / found["steps"]
            scatter = DESIGN_EFFECT * _step_scatter(found.get("histogram"), ratio, found["steps"])
        means[category], errors[category] = mean, math.sqrt(scatter) / units
        squares, all_units = squares + scatter, all_units + units
    return BaselineRatios(means, errors, squares / all_units)


def _step_scatter(histogram: Sequence[int] | None, ratio: float, steps: int) -> float:
    """Sum over steps of (accepted - ratio)^2; without a histogram that of a geometric distribution."""
    if histogram:
        return float(sum(count * (accepted - ratio) ** 2 for accepted, count in enumerate(histogram)))
    return steps * ratio * (1 + ratio)
