"""Evidence that sampled tokens are not drawn from the target's distribution, and what a faulty sampler would bring.

A bet pays on each token what its fault makes likelier, and loses on the others. An exact sampler wins nothing in the
mean: a mixture of bets exceeds log 5000 by chance once in 5,000 checks at most. What a faulty sampler wins follows
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

SAME = 1e-6  # nats within which two tokens are as likely
MIN_MASS = 1e-6  # of the tokens that are not listed
TOP = 20  # alternatives that are asked for
STAKE = 0.9  # of what was won so far: a token that a fault excludes costs log 10, never everything
DEVIATIONS = 2.33  # below the mean, which 99 of 100 runs exceed

Masses = NDArray[np.float64]  # of the classes of equally likely tokens, the likeliest first
# from masses, and the weight of one token in each, to the masses under a fault
Tilt = Callable[[Masses, Masses], Masses]


def _tempered(temperature: float) -> Tilt:
    return lambda masses, weights: masses * weights ** (1 / temperature - 1)


def _best(factor: float) -> Tilt:
    return lambda masses, weights: np.append(masses[0] * factor, masses[1:])


def _nucleus(masses: Masses, weights: Masses) -> Masses:
    left = 0.95 + masses - masses.cumsum()
    return np.clip(np.ceil(left / weights) * weights, 0, masses)


def _listed(masses: Masses, weights: Masses) -> Masses:
    # servers keep all tokens that are as likely as the last one: three at most, mostly
    return np.append(masses[:-1], 3 * weights[-1])


# fields of requests; at temperature 2 no target is sure, and with a top_k all tokens that may come are listed
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
OPEN = PLAIN | {"temperature": 2.0}
KNOWN = OPEN | {"top_k": 16, "max_tokens": 32, "ignore_eos": True}
# probe, fault, fields of the probe's requests, and what the fault makes of a distribution
BETS = (
    ("places", "temperature 0.7", PLAIN, _tempered(0.7)),
    ("places", "temperature 1.5", PLAIN, _tempered(1.5)),
    ("places", "the best token favoured", PLAIN, _best(3.0)),
    ("places", "the best token avoided", PLAIN, _best(1 / 3)),
    ("tail", "top_p 0.95", KNOWN, _nucleus),
    ("unlisted", "top_k 20", OPEN, _listed),
)
SAMPLED = {probe for probe, *_ in BETS}


class Evidence(NamedTuple):
    """Logarithms of what a bet won on some tokens, and of what it wins on them in 99 of 100 runs with its fault."""

    probe: str
    fault: str
    won: float
    faulty: float


def collect(exchanges: Iterable[Exchange]) -> list[Evidence]:
    """What each bet won on sampled tokens; [] if there are none."""
    tokens = defaultdict[str, list[Score]](list)
    for one in exchanges:
        tokens[one.kind] += one.scores
    found = []
    for probe, fault, fields, tilt in BETS if tokens else ():
        won = mean = variance = 0.0
        for score in tokens[probe]:
            values, gains, expected, spread = _gains(
                score.top, fields["temperature"], fields["top_k"], tilt
            )
            won += float(gains[(values[:-1] > score.chosen + SAME).sum()])
            mean += expected
            variance += spread
        found.append(Evidence(probe, fault, won, mean - DEVIATIONS * math.sqrt(variance)))
    return found


def mixed(found: Sequence[Evidence]) -> float:
    """Logarithm of the mean of what bets won."""
    return float(np.logaddexp.reduce([bet.won for bet in found])) - math.log(len(found))


def classes(
    top: tuple[float, ...], temperature: float, top_k: int
) -> tuple[Masses, Masses, Masses]:
    """Log-probabilities of the classes of equally likely tokens, the likeliest first, their masses, and the weight of
    one token in each. The last class stands for all other tokens too, as if they were as likely as the last listed one.
    """
    values, counts = np.unique(top[: top_k or None], return_counts=True)
    values, numbers = values[::-1], counts[::-1].astype(float)
    if not top_k:
        numbers[-1] += max(MIN_MASS, 1 - np.exp(top).sum()) / math.exp(top[-1])
    weights = np.exp(values / temperature)
    weights /= weights @ numbers
    return values, weights * numbers, weights


@cache
def _gains(
    top: tuple[float, ...], temperature: float, top_k: int, tilt: Tilt
) -> tuple[Masses, Masses, float, float]:
    """Log-probabilities of the classes, what a bet wins on each, then mean and variance of that under its fault."""
    values, masses, weights = classes(top, temperature, top_k)
    if top_k and len({*top[top_k - 1 : top_k + 1]}) < 2:
        # servers differ in which of equally likely tokens they keep
        return values, np.zeros_like(values), 0.0, 0.0
    faulty = tilt(masses, weights)
    faulty /= faulty.sum()
    gains = np.log1p(STAKE * (faulty / masses - 1))
    mean = float(faulty @ gains)
    return values, gains, mean, max(0.0, float(faulty @ gains**2) - mean**2)
