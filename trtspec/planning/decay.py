"""How acceptance falls with the draft position, from published curves, for positions that the user did not measure.

A head drafts position j from its own guess at position j - 1, so the chance a_j that draft j is accepted, given that
all before it were, falls with j. Published curves share a shape at different heights: a_1, then a_j = b r^(j - 2). Only
the shape is taken from them. Its height is the user's: every rate is raised to one power, so that the shape gives what
the user measured. Data: data/acceptance_lengths.yaml; errors on curves that were held out: docs/plan-model.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from trtspec.data_files import load_yaml

FITTED_FROM = 4  # the first draft length that decides the ratio; below it the shape passes through the curve itself
RATIOS = [step / 1000 for step in range(850, 1101)]


def lengths(rates: Sequence[float]) -> list[float]:
    """Acceptance length for 1, 2, .. drafts, bonus token included, of conditional rates by position."""
    found, total, reached = [], 1.0, 1.0
    for rate in rates:
        reached *= rate
        total += reached
        found.append(total)
    return found


def rates_of(curve: Sequence[float]) -> list[float]:
    """Conditional rates by position of acceptance lengths for 1, 2, .. drafts; the curve must rise."""
    reached = [after - before for before, after in zip([1.0, *curve], curve, strict=False)]
    return [here / before for before, here in zip([1.0, *reached], reached, strict=False)]


@dataclass(frozen=True)
class Decay:
    """Acceptance `first` of the first draft, `second` of the second, and `ratio` from each further one to the next."""

    first: float
    second: float
    ratio: float

    def rate(self, position: int) -> float:
        """Of draft `position`, counted from 1; never above 1."""
        return self.first if position == 1 else min(0.999, self.second * self.ratio ** (position - 2))

    def beyond(self, known: Sequence[float], drafts: int) -> list[float]:
        """Rates of positions len(known) + 1 .. drafts of a head whose first rates are `known`.

        The power is that of the known positions from the second on together; of the first where it is the only one.
        """
        if min(known) <= 0:
            return [0.0] * (drafts - len(known))
        start = 1 if len(known) > 1 else 0
        power = sum(map(math.log, known[start:])) / sum(
            math.log(self.rate(position)) for position in range(start + 1, len(known) + 1)
        )
        return [self.rate(position) ** power for position in range(len(known) + 1, drafts + 1)]

    def through(self, length: float, at: int, drafts: int) -> list[float]:
        """Rates of positions 1 .. drafts of a head with acceptance length `length` at `at` drafts (bisection)."""
        power = _power(self, length, at)
        return [self.rate(position) ** power for position in range(1, drafts + 1)]


@lru_cache(maxsize=1024)  # a plan asks for the same few at every one of its points
def _power(decay: Decay, length: float, at: int) -> float:
    """The power of the decay's rates that gives the acceptance length `length` at `at` drafts."""
    rates = [decay.rate(position) for position in range(1, at + 1)]
    low, high = 0.0, 200.0
    for _ in range(80):
        power = (low + high) / 2
        found = lengths([rate**power for rate in rates])[-1]
        low, high = (power, high) if found > length else (low, power)
    return low


def fit(curve: Sequence[float]) -> Decay:
    """The shape of acceptance lengths for 1, 2, .. drafts: `first` and the middle of the next two positions are those
    of the curve, and the ratio is the one that, from there on, comes closest to its further lengths (least squares of
    their logarithms)."""
    known = rates_of(curve[: FITTED_FROM - 1])
    middle = math.prod(known[1:]) ** (1 / len(known[1:]))  # lies half way between the second and the third

    def distance(ratio: float) -> float:
        shape = Decay(known[0], middle / math.sqrt(ratio), ratio)
        found = lengths([*known, *(shape.rate(position) for position in range(FITTED_FROM, len(curve) + 1))])
        pairs = zip(found[FITTED_FROM - 1 :], curve[FITTED_FROM - 1 :], strict=True)
        return sum(math.log(ours / theirs) ** 2 for ours, theirs in pairs)

    ratio = min(RATIOS, key=distance)
    return Decay(known[0], middle / math.sqrt(ratio), ratio)


def mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*curves, strict=True)]


def published_curves() -> dict[str, Any]:
    """`curves` by name, the names under `decay`, and their `source`."""
    return load_yaml("acceptance_lengths.yaml")


@cache
def published_decay() -> Decay:
    data = published_curves()
    return fit(mean([data["curves"][name] for name in data["decay"]]))


@cache
def other_decays() -> dict[str, Decay]:
    """The shape of each published curve by its name: the range within which the shape is known."""
    return {name: fit(curve) for name, curve in published_curves()["curves"].items()}
