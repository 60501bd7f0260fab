"""Evidence that sampled tokens are not drawn from the target's distribution.

A bet pays on each token what its fault makes likelier, and loses on the others. An exact sampler
wins nothing in the mean: a mixture of bets exceeds log 8000 by chance once in 8,000 checks at most.
The winnings with a faulty sampler follow from the distributions that the scoring server lists, so a
row knows whether its tokens could have shown the fault.
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


def collect(exchanges: Iterable[Exchange]) -> list[Evidence]:
    """Returns the winnings of each bet on sampled tokens."""
    scores = defaultdict[str, list[Score]](list)
    for exchange in exchanges:
        scores[exchange.kind] += exchange.scores
    evidence = []
    for probe, fault, tilt in BETS:
        gains = [_gains(probe, score, tilt) for score in scores[probe]]
        won, mean, variance = np.sum([(0, 0, 0), *gains], axis=0)
        deviation = math.sqrt(variance)
        faulty = mean - DEVIATIONS * deviation - math.log(len(BETS))
        evidence.append(Evidence(faulty, won, probe, fault))
    return evidence


class Evidence(NamedTuple):
    """Winnings of one bet, as natural logarithms.

    `faulty`: what 99 of 100 runs with the fault exceed, as this bet's share of the mixture. `won`:
    in this run.
    """

    faulty: float
    won: float
    probe: str
    fault: str


STAKE = 0.9  # share of the winnings: a token that a fault excludes costs log 10, never everything
DEVIATIONS = 2.33  # below the mean: 99 of 100 runs exceed it

Masses = NDArray[np.float64]  # of the classes of equally likely tokens, the likeliest last
# from masses, and the weight of one token in each, to the masses under a fault
Tilt = Callable[[Masses, Masses], Masses]


def _tempered(power: float) -> Tilt:
    """`power`: 1 / temperature - 1."""
    return lambda masses, weights: masses * weights**power


def _best(factor: float) -> Tilt:
    """`factor`: of the mass of the likeliest class."""
    return lambda masses, weights: np.append(masses[:-1], masses[-1] * factor)


def _listed(masses: Masses, weights: Masses) -> Masses:
    """Drops the tokens that are not listed, which are in the first class."""
    return np.append(weights[0], masses[1:])


# Sampling parameters by probe. `tail` makes small tails visible: at its temperature no target is
# sure, and its top_k allows no token that is not listed.
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
HOT = PLAIN | {"temperature": 2.0}
SAMPLERS = {"places": PLAIN, "tail": HOT | {"top_k": 16, "max_tokens": 32, "ignore_eos": True}}
# probe, fault, and the distribution under the fault
BETS: tuple[tuple[str, str, Tilt], ...] = (
    ("places", "temperature 0.7", _tempered(0.43)),
    ("places", "temperature 1.5", _tempered(-0.33)),
    ("places", "the best token favoured", _best(3.0)),
    ("places", "the best token avoided", _best(0.33)),
    ("places", "top_k 20", _listed),
    ("tail", "top_p 0.95", lambda masses, weights: masses * (1 - masses.cumsum() < 0.95)),
)


def mixed(bets: Sequence[Evidence]) -> float:
    """Logarithm of the mean winnings of all bets."""
    won = [bet.won for bet in bets]
    total: float = np.logaddexp.reduce(won)
    return total - math.log(len(won))


@cache
def _gains(probe: str, score: Score, tilt: Tilt) -> tuple[Any, ...]:
    """Winnings of a bet on a token, then their mean and variance under its fault."""
    sampler = SAMPLERS[probe]
    top_k = sampler["top_k"]
    top = score.top
    # servers differ in which of equally likely tokens they keep
    if top_k and len({*top[top_k - 1 : top_k + 1]}) < 2:
        return 0.0, 0.0, 0.0
    values, masses, weights = _classes(top, sampler["temperature"], top_k)
    faulty = tilt(masses, weights)
    faulty /= faulty.sum()
    gains = np.log1p(STAKE * (faulty / masses - 1))
    mean = faulty @ gains
    variance = faulty @ (gains - mean) ** 2
    nearest = np.abs(values - score.chosen).argmin()
    return gains[nearest], mean, variance


def _classes(
    top: tuple[float, ...], temperature: float, top_k: int
) -> tuple[Masses, Masses, Masses]:
    """Groups equally likely tokens. `top`: log-probabilities of the listed tokens.

    Returns log-probabilities of the classes, the likeliest last, their masses, and the weight of
    one token in each. Without a `top_k` the first class also holds all tokens that are not listed.
    """
    values, counts = np.unique(top[: top_k or None], return_counts=True)
    sizes = counts.astype(float)
    if not top_k:
        unlisted = abs(1 - np.exp(top).sum())
        sizes[0] += unlisted / math.exp(top[-1])
    weights = np.exp(values / temperature)
    weights /= weights @ sizes
    return values, weights * sizes, weights
