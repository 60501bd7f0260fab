"""Is a quantized target's distribution of the next token its source's?

Both servers answer greedily and tell their most likely tokens. Every position up to and including the first token that
differs has one context on both, and is compared:

KL         sum of p log(p / q) over the tokens that both tell, and one term for all others together, p of the source and
           q of the target. Merging tokens never raises the sum (log-sum inequality; Cover and Thomas, Elements of
           Information Theory, theorem 2.7.1), so this is a lower bound of the divergence, close where the told tokens
           hold most of the probability. Nats.
agreement  whether the most likely token is the same

Means are over positions, intervals by bootstrap over questions, because positions of one answer are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from trtspec.bench.acceptance import length_interval
from trtspec.bench.gate import CheckResult, result
from trtspec.bench.lossless import same_context
from trtspec.bench.transcript import Recording, Transcript

MOST_TOLD = 20  # the most that OpenAI's API and the engines behind it tell by default
LEAST = 1e-9  # probability of what is left, where the told tokens hold all of it up to rounding
ENOUGH_QUESTIONS = 8  # for an interval
SHOWN = 5
Told = Mapping[str, float]  # token -> log-probability, of the most likely ones


@dataclass(frozen=True)
class QualityLimits:
    """Mean KL divergence in nats that a target may have from its source, and the share of positions at which their most
    likely tokens must agree."""

    max_kl: float = 0.1
    min_agreement: float = 0.9


@dataclass(frozen=True, kw_only=True)
class DistributionReport:
    """`mass`: the mean share of the source's probability on tokens that both tell. Intervals are of 95 %."""

    questions: int
    positions: int
    kl: float
    kl_interval: tuple[float, float]
    agreement: float
    agreement_interval: tuple[float, float]
    mass: float
    worst: list[tuple[str, float]]


def kl_bound(source: Told, target: Told) -> tuple[float, float]:
    """(lower bound of KL(source || target) in nats, the source's probability on the tokens that both tell)."""
    shared = [token for token in source if token in target]
    told = [(math.exp(source[token]), math.exp(target[token])) for token in shared]
    mass = min(1.0, sum(p for p, _ in told))
    rest = (max(LEAST, 1 - mass), max(LEAST, 1 - sum(q for _, q in told)))
    bound = sum(p * math.log(p / q) for p, q in [*told, rest] if p > 0 and q > 0)
    return max(0.0, bound), mass


def common_positions(source: Transcript, target: Transcript) -> Iterator[tuple[Told, Told]]:
    """What both told at each position with one context: up to and including the first token that differs."""
    if not source.tops or not target.tops or not same_context(source, target):
        return
    for place, (before, now) in enumerate(zip(source.tops, target.tops, strict=False)):
        if not before or not now:
            return
        yield before, now
        if (source.tokens or [])[place : place + 1] == [] or (target.tokens or [])[place : place + 1] == []:
            return
        if source.tokens[place].text != target.tokens[place].text:  # type: ignore[index]
            return


def compare_distributions(source: Sequence[Transcript], target: Sequence[Transcript]) -> DistributionReport | None:
    """Over the questions that both answered; None where fewer than two have a position that can be compared."""
    answers = {item.question: item for item in target if item.error is None}
    counts, divergences, agreed, masses = [], [], [], []
    worst = []
    for item in source:
        if item.error is not None or item.question not in answers:
            continue
        pairs = list(common_positions(item, answers[item.question]))
        if not pairs:
            continue
        bounds = [kl_bound(*pair) for pair in pairs]
        counts.append(len(pairs))
        divergences.append(sum(bound for bound, _ in bounds))
        agreed.append(sum(_best(before) == _best(now) for before, now in pairs))
        masses += [mass for _, mass in bounds]
        worst.append((item.question, round(divergences[-1] / len(pairs), 6)))
    kl, same = length_interval(counts, divergences), length_interval(counts, agreed)
    if kl is None or same is None:
        return None
    positions = sum(counts)
    low = min(same[0] - 1, 0.025 ** (1 / positions))  # where all agree, the bootstrap has no spread: binomial bound
    return DistributionReport(
        questions=len(counts),
        positions=positions,
        kl=round(sum(divergences) / positions, 6),
        kl_interval=(round(kl[0] - 1, 6), round(kl[1] - 1, 6)),
        agreement=round(sum(agreed) / positions, 6),
        agreement_interval=(round(low, 6), round(min(1.0, same[1] - 1), 6)),
        mass=round(sum(masses) / positions, 6),
        worst=sorted(worst, key=lambda entry: -entry[1])[:SHOWN],
    )


def _best(told: Told) -> str:
    return max(told, key=lambda token: told[token])


def check_distribution(got: Recording, expected: Recording | None, limits: QualityLimits | None) -> CheckResult:
    """The target's distribution is its source's within the limits, with the interval on their right side."""
    name = "distribution"
    if limits is None:
        return result(name, "skipped", "not asked for: --quality-gate compares a quantized target with its source")
    if expected is None:
        return result(name, "skipped", "nothing to compare with: pass --against FILE or URL of the source")
    asked = f" (limits: {limits.max_kl:g} nats, {100 * limits.min_agreement:g} %)"
    for recording, which in ((got, "target"), (expected, "source")):
        if not any(item.tops for item in recording.answered):
            why = recording.withheld or "it was recorded without --quality-gate"
            return result(name, "skipped", f"the {which} told no probabilities of several tokens: {why}{asked}")
    found = compare_distributions(expected.answered, got.answered)
    if found is None or found.questions < ENOUGH_QUESTIONS:
        have = found.questions if found else 0
        message = f"{have} common questions, {ENOUGH_QUESTIONS} are needed: raise --samples{asked}"
        return result(name, "skipped", message, **asdict(limits))
    kl, same = found.kl_interval, found.agreement_interval
    message = (
        f"mean KL {found.kl:.4f} nats [{kl[0]:.4f}, {kl[1]:.4f}], a lower bound over {100 * found.mass:.1f} % of the "
        f"probability; the best token agrees at {100 * found.agreement:.2f} % [{100 * same[0]:.2f}, "
        f"{100 * same[1]:.2f}] of {found.positions} positions of {found.questions} questions{asked}"
    )
    detail = {**asdict(found), **asdict(limits)}
    if kl[0] > limits.max_kl or same[1] < limits.min_agreement:
        remedy = (
            "trtspec inspect TARGET --against SOURCE finds wrong scales; else calibrate on more text or quantize less"
        )
        return result(name, "fail", message, "TS-CHECK-DISTRIBUTION", remedy, **detail)
    if kl[1] > limits.max_kl or same[0] < limits.min_agreement:
        message += "; the interval holds the limit, so that more questions must decide (--samples)"
        return result(name, "skipped", message, **detail)
    return result(name, "pass", message, seen=found.questions, **detail)
