"""Evidence that sampled tokens are not drawn from the target's distribution.

Each fault of a sampler is tested by an e-value: the product over tokens of the likelihood ratio of
the faulty to the exact distribution, mixed with 1. Its mean is 1 for an exact sampler. The mean of
several e-values therefore exceeds 8,000 by chance in one of 8,000 checks at most. The e-value of a
faulty sampler follows from the distributions that the scoring server lists. It says whether the
tokens could have shown the fault.
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
    """Returns the evidence for each fault of a sampler, from the scored tokens of the exchanges."""
    scores = defaultdict[str, list[Score]](list)
    for exchange in exchanges:
        scores[exchange.kind] += exchange.scores
    evidence = []
    for probe, fault, tilt in SAMPLER_FAULTS:
        terms = [_log_ratios(probe, score, tilt) for score in scores[probe]]
        # a term of zeros, because there may be no scored tokens
        log_e, mean, variance = np.sum([(0, 0, 0), *terms], axis=0)
        deviation = math.sqrt(variance)
        # a fault raises one e-value, which the mean over all faults divides by their number
        with_fault = mean - DEVIATIONS * deviation - math.log(len(SAMPLER_FAULTS))
        evidence.append(Evidence(with_fault, log_e, probe, fault))
    return evidence


class Evidence(NamedTuple):
    """Evidence that the sampled tokens come from a sampler with one fault.

    with_fault: logarithm of the e-value over the number of faults. With the fault, 99 of 100 checks
        exceed it
    log_e: natural logarithm of the e-value of this check
    probe: sampling parameters of the answers, a key of SAMPLERS
    fault: description of the fault
    """

    with_fault: float
    log_e: float
    probe: str
    fault: str


# Share of the likelihood ratio in the mixture with 1. A token that the fault excludes then reduces
# the log e-value by log 10 only, and not to minus infinity.
STAKE = 0.9
DEVIATIONS = 2.33  # standard deviations below the mean that 99 of 100 checks exceed

# Probabilities of classes of tokens, the likeliest class last. The tokens of a class are equally
# likely.
Masses = NDArray[np.float64]
# Function from masses, and the weight of one token in each class, to the masses under a fault. The
# result need not sum to 1.
Tilt = Callable[[Masses, Masses], Masses]


def _tempered(power: float) -> Tilt:
    """Returns the change of a distribution by a wrong temperature. `power`: 1 / temperature - 1."""
    return lambda masses, weights: masses * weights**power


def _best(factor: float) -> Tilt:
    """Returns the change of a distribution that multiplies the likeliest class by `factor`."""
    return lambda masses, weights: np.append(masses[:-1], masses[-1] * factor)


def _listed(masses: Masses, weights: Masses) -> Masses:
    """Returns the masses without the unlisted tokens, which are in the first class."""
    return np.append(weights[0], masses[1:])


# Sampling parameters by probe. `tail` makes small tails visible: at its temperature no target is
# sure, and its top_k allows only listed tokens.
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
HOT = PLAIN | {"temperature": 2.0}
SAMPLERS = {"places": PLAIN, "tail": HOT | {"top_k": 16, "max_tokens": 32, "ignore_eos": True}}
# probe, fault, and the distribution under the fault
SAMPLER_FAULTS: tuple[tuple[str, str, Tilt], ...] = (
    ("places", "temperature 0.7", _tempered(0.43)),
    ("places", "temperature 1.5", _tempered(-0.33)),
    ("places", "the best token favoured", _best(3.0)),
    ("places", "the best token avoided", _best(0.33)),
    ("places", "top_k 20", _listed),
    ("tail", "top_p 0.95", lambda masses, weights: masses * (1 - masses.cumsum() < 0.95)),
)


def mixed(evidence: Sequence[Evidence]) -> float:
    """Natural logarithm of the mean e-value over all faults."""
    log_e_values = [test.log_e for test in evidence]
    log_sum: float = np.logaddexp.reduce(log_e_values)
    return log_sum - math.log(len(log_e_values))


@cache
def _log_ratios(probe: str, score: Score, tilt: Tilt) -> tuple[Any, ...]:
    """Returns three floats: what one token adds to the log e-value, and its mean and variance.

    Mean and variance hold if the sampler has the fault `tilt`.
    """
    sampler = SAMPLERS[probe]
    top_k = sampler["top_k"]
    top = score.top
    # servers differ in which of equally likely tokens top_k keeps, so a tie at the cut is no
    # evidence
    at_cut = {*top[top_k - 1 : top_k + 1]}
    if top_k and len(at_cut) < 2:
        return 0.0, 0.0, 0.0
    logprobs, masses, weights = _classes(top, sampler["temperature"], top_k)
    faulty = tilt(masses, weights)
    faulty /= faulty.sum()
    log_ratios = np.log1p(STAKE * (faulty / masses - 1))
    mean = faulty @ log_ratios
    variance = faulty @ (log_ratios - mean) ** 2
    chosen_class = np.abs(logprobs - score.chosen).argmin()
    return log_ratios[chosen_class], mean, variance


def _classes(
    top: tuple[float, ...], temperature: float, top_k: int
) -> tuple[Masses, Masses, Masses]:
    """Groups the listed tokens into classes of equally likely tokens, the likeliest class last.

    Returns three arrays with an entry per class: log-probability of a token in `top`, probability
    of the class after temperature and `top_k`, and probability of one token in it. The first class
    also holds all unlisted tokens if `top_k` is 0.
    """
    logprobs, counts = np.unique(top[: top_k or None], return_counts=True)
    sizes = counts.astype(float)
    if not top_k:
        # the unlisted probability is shared by tokens that are as likely as the last listed token
        unlisted = abs(1 - np.exp(top).sum())
        sizes[0] += unlisted / math.exp(top[-1])
    weights = np.exp(logprobs / temperature)
    weights /= weights @ sizes
    return logprobs, weights * sizes, weights
