"""A fault of the sampler is found in 99 of 100 runs, and none in an exact sampler.

Counted are runs whose row says that it was measured.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trtspec.bench.check.asking import TOP
from trtspec.bench.check.evidence import SAMPLER_FAULTS, SAMPLERS
from trtspec.bench.check.rows import sampled
from trtspec.client.exchange import Exchange, Score

RUNS = 100
SIZES = (40, 150, 900)  # tokens
# what a server makes of the probabilities, the likeliest word first
FAULTS: dict[str, Callable[[Any], Any]] = {
    "": lambda probs: probs,
    "temperature 0.7": lambda probs: probs ** (1 / 0.7),
    "temperature 1.5": lambda probs: probs ** (1 / 1.5),
    "the best token favoured": lambda probs: np.where(probs == probs[0], 3 * probs, probs),
    "the best token avoided": lambda probs: np.where(probs == probs[0], probs / 3, probs),
    "top_p 0.95": lambda probs: probs * (probs.cumsum() - probs < 0.95),
    "top_k 20": lambda probs: probs * (probs >= probs[TOP - 1]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_measured_is_found(fault: str) -> None:
    dice = random.Random(fault)
    pools = {probe: contexts(fields, FAULTS[fault]) for probe, fields in SAMPLERS.items()}
    probe = next(bet[0] for bet in SAMPLER_FAULTS if fault in ("", bet[1]))
    statuses = [status(pools, SIZES[run % 3], probe, dice) for run in range(RUNS)]
    found = sum(map(bool, statuses))
    assert (found > RUNS / 10) == bool(fault)
    assert not fault or statuses.count("") <= RUNS / 100
    assert fault or found == 0 and {*statuses} == {None, ""}


def contexts(fields: dict[str, Any], fault: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
    """Words and likeliest words with their log-probabilities, and what a server draws by.

    Logits are in steps of 0.1, so that many are equal. The target is sure of some words."""
    dice = np.random.default_rng(1)
    pool = []
    for index in range(max(SIZES)):
        logits = np.sort(dice.normal(0, (1.5, 3, 9)[index % 3], 60).round(1))[::-1]
        logs = logits - np.log(np.exp(logits).sum())
        probs = np.exp(logs / fields["temperature"]) * (logs >= logs[fields["top_k"] - 1])
        pool.append((logs.tolist(), tuple(logs[:TOP].tolist()), fault(probs / probs.sum())))
    return pool


def status(pools: dict[str, Any], tokens: int, probe: str, dice: random.Random) -> str | None:
    got = []
    for kind, pool in pools.items():
        drawn = dice.sample(pool, tokens)
        scores = tuple(Score(dice.choices(logs, probs)[0], top) for logs, top, probs in drawn)
        got.append(Exchange(key="", kind=kind, run="", finish="", token_ids=(1,), scores=scores))
    return next(look.fault for look in sampled(got, [])[0] if look.probe == probe)
