"""Acceptance of draft tokens, as pure functions over counts.

What is stored is `steps`, `drafted`, `accepted` and the histogram (entry j = number of verification steps that accepted
exactly j draft tokens); every rate is derived, because the same words name different numbers in the field:

- acceptance length = 1 + accepted / steps over all answers (micro average; vLLM's "mean acceptance length");
- per-turn mean = tokens per iteration of each answer, averaged over answers (macro), the prefill counted as one
  iteration of length 1, as ModelOpt's specdec_bench and NVIDIA's model cards report it;
- cumulative acceptance at position k = share of steps that accepted at least k drafts (vLLM's "per-position");
- conditional acceptance at position k = the same share among the steps that accepted k - 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class TurnCounts:
    """What speculation did in one answer. `drafted` and `histogram` are None where the server does not tell.

    `prefill_in_steps` says whether `steps` already counts the prefill iteration (trtllm-serve's average does).
    """

    question: str
    category: str
    tokens: int
    steps: int
    accepted: int
    drafted: int | None
    histogram: tuple[int, ...] | None
    source: str
    prefill_in_steps: bool = False

    @property
    def tokens_per_iteration(self) -> float:
        """Tokens per engine iteration with the prefill counted as one iteration of length 1."""
        extra = 0 if self.prefill_in_steps else 1
        iterations = self.steps + extra
        return (self.steps + self.accepted + extra) / iterations if iterations else 1.0


@dataclass(frozen=True, kw_only=True)
class AcceptanceSummary:
    """What speculation did in a group of answers; None where the server told nothing. The interval is of 95 %."""

    turns: int
    questions: int
    tokens: int
    steps: int | None
    drafted: int | None
    accepted: int | None
    histogram: list[int] | None
    source: str
    acceptance_length: float | None
    acceptance_length_interval: list[float] | None
    per_turn_mean: float | None
    per_turn_sd: float | None
    draft_acceptance_rate: float | None
    cumulative: list[float] | None
    conditional: list[float | None] | None


@dataclass(frozen=True)
class RatioSpread:
    """A ratio with the ends of its interval or range."""

    ratio: float
    low: float
    high: float


def acceptance_length(steps: int, accepted: int) -> float | None:
    """1 + accepted / steps: tokens per verification step, the bonus token included. None without steps."""
    return 1.0 + accepted / steps if steps else None


def cumulative_acceptance(histogram: Sequence[int]) -> list[float]:
    """Entry k-1 = share of the steps that accepted at least k drafts."""
    total = sum(histogram)
    return [sum(histogram[k:]) / total for k in range(1, len(histogram))] if total else []


def conditional_acceptance(histogram: Sequence[int]) -> list[float | None]:
    """Entry k-1 = share of the steps that accepted draft k among those that accepted draft k-1; None where none did."""
    reached = [sum(histogram[k:]) for k in range(len(histogram))]
    return [reached[k] / reached[k - 1] if reached[k - 1] else None for k in range(1, len(reached))]


def add_histograms(histograms: Iterable[Sequence[int] | None]) -> list[int] | None:
    """Sums histograms of possibly different draft lengths; None as soon as one is unknown, or when there is none."""
    total: list[int] = []
    seen = False
    for histogram in histograms:
        if histogram is None:
            return None
        seen = True
        total += [0] * (len(histogram) - len(total))
        for accepted, count in enumerate(histogram):
            total[accepted] += count
    return total if seen else None


def bootstrap_interval(turns: Sequence[TurnCounts], seed: int = 0) -> list[float] | None:
    """95 % interval of the acceptance length, resampling whole questions: turns of one are not independent."""
    per_question: dict[str, list[int]] = {}
    for turn in turns:
        entry = per_question.setdefault(turn.question, [0, 0])
        entry[0] += turn.steps
        entry[1] += turn.accepted
    if len(per_question) < 2:
        return None
    counts = np.array(list(per_question.values()), dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(counts), size=(RESAMPLES, len(counts)))
    sums = counts[picks].sum(axis=1)
    lengths = 1.0 + sums[:, 1] / np.maximum(sums[:, 0], 1.0)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(lengths, [tail, 100 - tail])
    return [round(float(low), 4), round(float(high), 4)]


def summarize(turns: Sequence[TurnCounts]) -> AcceptanceSummary:
    """Acceptance of one group of answers; figures are None where the server told nothing."""
    steps, accepted = sum(t.steps for t in turns), sum(t.accepted for t in turns)
    drafted = None if any(t.drafted is None for t in turns) else sum(t.drafted or 0 for t in turns)
    histogram = add_histograms(t.histogram for t in turns)
    per_turn = np.array([t.tokens_per_iteration for t in turns if t.tokens], dtype=np.float64)
    return AcceptanceSummary(
        turns=len(turns),
        questions=len({t.question for t in turns}),
        tokens=sum(t.tokens for t in turns),
        steps=steps if turns else None,
        drafted=drafted if turns else None,
        accepted=accepted if turns else None,
        histogram=histogram,
        source=" + ".join(sorted({t.source for t in turns})) or "the server does not tell",
        acceptance_length=_rounded(acceptance_length(steps, accepted)),
        acceptance_length_interval=bootstrap_interval(turns),
        per_turn_mean=_rounded(float(per_turn.mean())) if per_turn.size else None,
        per_turn_sd=_rounded(float(per_turn.std(ddof=1))) if per_turn.size > 1 else None,
        draft_acceptance_rate=_rounded(accepted / drafted) if drafted else None,
        cumulative=[round(share, 4) for share in cumulative_acceptance(histogram)] if histogram else None,
        conditional=[_rounded(share) for share in conditional_acceptance(histogram)] if histogram else None,
    )


def by_category(turns: Sequence[TurnCounts]) -> dict[str, AcceptanceSummary]:
    """`summarize` per category, in the order of first appearance."""
    groups: dict[str, list[TurnCounts]] = {}
    for turn in turns:
        groups.setdefault(turn.category, []).append(turn)
    return {category: summarize(group) for category, group in groups.items()}


def ratio_with_spread(new: Sequence[float], old: Sequence[float], seed: int = 0) -> RatioSpread | None:
    """Ratio of means of two independent samples with a 95 % bootstrap interval. None when either is empty or zero."""
    if not new or not old or not np.mean(old):
        return None
    rng = np.random.default_rng(seed)
    a, b = np.array(new, dtype=np.float64), np.array(old, dtype=np.float64)
    means_a = a[rng.integers(0, len(a), size=(RESAMPLES, len(a)))].mean(axis=1)
    means_b = b[rng.integers(0, len(b), size=(RESAMPLES, len(b)))].mean(axis=1)
    low, high = np.percentile(means_a / np.maximum(means_b, 1e-12), [2.5, 97.5])
    return RatioSpread(round(float(a.mean() / b.mean()), 4), round(float(low), 4), round(float(high), 4))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
