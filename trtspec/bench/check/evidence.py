"""Evidence that sampled tokens are not drawn from the target's distribution, and what a faulty sampler would bring.

A bet pays on each token what its fault makes likelier, and loses on the others. An exact sampler wins nothing in the
mean: a mixture of bets exceeds log 8000 by chance once in 8,000 checks at most. What a faulty sampler wins follows
from the distributions that the scoring server lists, so a row knows whether its tokens could have shown the fault.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtspec.client.exchange import Exchange, Score

STAKE = 0.9  # of what was won so far: a token that a fault excludes costs log 10, never everything
DEVIATIONS = 2.33  # below the mean, which 99 of 100 runs exceed

Masses = NDArray[np.float64]  # of the classes of equally likely tokens, the likeliest last
# from masses, and the weight of one token in each, to the masses under a fault
Tilt = Callable[[Masses, Masses], Masses]


def _tempered(power: float) -> Tilt:
    """`power`: 1 / temperature - 1."""
    return lambda masses, weights: masses * weights**power


def _best(factor: float) -> Tilt:
    return lambda masses, weights: np.append(masses[:-1], masses[-1] * factor)


def _nucleus(masses: Masses, weights: Masses) -> Masses:
    return masses * (1 - masses.cumsum() < 0.95)


def _listed(masses: Masses, weights: Masses) -> Masses:
    return np.append(weights[0], masses[1:])


# by probe, the sampler of its requests; that of `tail` shows small tails: at its temperature no target is sure, and
# with its top_k all tokens that may come are listed
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
HOT = PLAIN | {"temperature": 2.0}
SAMPLERS = {"places": PLAIN, "tail": HOT | {"top_k": 16, "max_tokens": 32, "ignore_eos": True}}
# probe, fault, and what the fault makes of a distribution
BETS = (
    ("places", "temperature 0.7", _tempered(0.43)),
    ("places", "temperature 1.5", _tempered(-0.33)),
    ("places", "the best token favoured", _best(3.0)),
    ("places", "the best token avoided", _best(0.33)),
    ("places", "top_k 20", _listed),
    ("tail", "top_p 0.95", _nucleus),
)


class Evidence(NamedTuple):
    """`faulty`: logarithm of what all bets win by this one in 99 of 100 runs with its fault. `won`: of what it won."""

    faulty: float
    won: float
    probe: str
    fault: str


def collect(exchanges: Iterable[Exchange]) -> list[Evidence]:
    """What each bet won on sampled tokens."""
    scores = defaultdict[str, list[Score]](list)
    for one in exchanges:
        scores[one.kind] += one.scores
    found = []
    for probe, fault, tilt in BETS:
        gains = [_gains(probe, score, tilt) for score in scores[probe]]
        won, mean, variance = np.sum([(0, 0, 0), *gains], axis=0)
        faulty = mean - DEVIATIONS * math.sqrt(variance) - math.log(len(BETS))
        found.append(Evidence(faulty, won, probe, fault))
    return found


def mixed(found: Sequence[Evidence]) -> float:
    """Logarithm of the mean of what bets won."""
    return np.logaddexp.reduce([bet.won for bet in found]) - math.log(len(found))


@cache
def _gains(probe: str, score: Score, tilt: Tilt) -> tuple[Any, ...]:
    """What a bet wins on a token, then mean and variance of that under its fault."""
    values, masses, weights = _classes(score.top, **SAMPLERS[probe])
    faulty = tilt(masses, weights)
    faulty /= faulty.sum()
    gains = np.log1p(STAKE * (faulty / masses - 1))
    mean = faulty @ gains
    won = gains[np.abs(values - score.chosen).argmin()]
    return won, mean, faulty @ (gains - mean) ** 2


def _classes(
    top: tuple[float, ...], temperature: float, top_k: int, **_: Any
) -> tuple[Masses, Masses, Masses]:
    """Log-probabilities of the classes of equally likely tokens, the likeliest last, their masses, and the weight of
    one token in each. Without a `top_k` the first class is also that of all tokens that are not listed."""
    values, counts = np.unique(top[: top_k or None], return_counts=True)
    numbers = counts.astype(float)
    if not top_k:
        numbers[0] += abs(1 - np.exp(top).sum()) / math.exp(top[-1])
    weights = np.exp(values / temperature)
    weights /= weights @ numbers
    return values, weights * numbers, weights
