"""Is greedy output with speculation the output without it? Every first divergence is a near-tie or a defect.

Rounding differs between one-token and several-token passes, so two correct servers may part where the two best tokens
are as good as equal. How far rounding reaches is measured, not assumed: at the positions before a divergence both
servers scored the same context, and the differences of their gaps (best minus second logprob) show the rounding.
A divergence is a near-tie when its gaps stay under twice the largest difference seen there, and never above `limit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trtspec.bench.transcript import Token, Transcript

FLOOR = 1e-4  # nats; float32 logprobs printed with 6 digits carry at least this much
MARGIN = 2.0  # the largest of a few thousand differences is not the largest there is


@dataclass(frozen=True)
class AnswerDivergence:
    """Where two greedy answers part first. Gaps in nats, None where a server gave no logprobs there."""

    question: str
    position: int
    expected: str
    got: str
    gap_expected: float | None
    gap_got: float | None
    same_pair: bool
    verdict: str = ""


def first_divergence(expected: Transcript, got: Transcript) -> AnswerDivergence | None:
    """None when the answers are the same. Positions are tokens when both have them, else characters."""
    if expected.tokens is not None and got.tokens is not None:
        a, b = expected.tokens, got.tokens
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x.text != y.text), min(len(a), len(b)))
        if at == len(a) == len(b):
            return None
        left, right = _at(a, at), _at(b, at)
        return AnswerDivergence(
            expected.question, at, _text(left), _text(right), _gap(left), _gap(right), _same_pair(left, right)
        )
    if expected.text == got.text:
        return None
    at = _common_characters(expected.text, got.text)
    known = _token_at_character(expected.tokens, at), _token_at_character(got.tokens, at)
    texts = expected.text[at : at + 12], got.text[at : at + 12]
    # without the other side's tokens the pair cannot be compared; the gap of the one side still tells
    return AnswerDivergence(expected.question, at, *texts, _gap(known[0]), _gap(known[1]), any(known))


def rounding_differences(expected: Transcript, got: Transcript) -> Iterator[float]:
    """|gap - gap| at each position of the common prefix where both servers see the same two best tokens."""
    if expected.tokens is None or got.tokens is None:
        return
    for a, b in zip(expected.tokens, got.tokens, strict=False):
        if a.text != b.text:
            return
        if a.gap is not None and b.gap is not None and a.second == b.second:
            yield abs(a.gap - b.gap)


def judge(divergence: AnswerDivergence, bound: float) -> str:
    """`near-tie`, `real`, or `unjudged` when neither server told its gaps."""
    gaps = [gap for gap in (divergence.gap_expected, divergence.gap_got) if gap is not None]
    if not gaps:
        return "unjudged"
    return "near-tie" if divergence.same_pair and max(gaps) <= bound else "real"


@dataclass(frozen=True)
class RoundingSpread:
    """Over how many positions rounding was measured, and the largest difference in nats."""

    positions: int
    largest: float | None


@dataclass(frozen=True, kw_only=True)
class LosslessReport:
    """Counts of answers, the measured bound below which a gap is a near-tie, and every divergence with its verdict."""

    compared: int
    identical: int
    near_ties: int
    real: int
    unjudged: int
    bound: float
    limit: float
    rounding: RoundingSpread
    divergences: list[AnswerDivergence]


def compare_transcripts(expected: Sequence[Transcript], got: Sequence[Transcript], limit: float) -> LosslessReport:
    """Answers are matched by question."""
    answers = {transcript.question: transcript for transcript in got}
    pairs = [(transcript, answers[transcript.question]) for transcript in expected if transcript.question in answers]
    noise = [difference for a, b in pairs for difference in rounding_differences(a, b)]
    bound = min(limit, max(FLOOR, MARGIN * max(noise, default=0.0)))
    found = [divergence for a, b in pairs if (divergence := first_divergence(a, b)) is not None]
    judged = [replace(divergence, verdict=judge(divergence, bound)) for divergence in found]
    counts = Counter(divergence.verdict for divergence in judged)
    return LosslessReport(
        compared=len(pairs),
        identical=len(pairs) - len(found),
        near_ties=counts["near-tie"],
        real=counts["real"],
        unjudged=counts["unjudged"],
        bound=round(bound, 6),
        limit=limit,
        rounding=RoundingSpread(len(noise), round(max(noise), 6) if noise else None),
        divergences=judged,
    )


def _at(tokens: Sequence[Token], index: int) -> Token | None:
    return tokens[index] if index < len(tokens) else None


def _text(token: Token | None) -> str:
    return token.text if token else "(end of the answer)"


def _gap(token: Token | None) -> float | None:
    return token.gap if token else None


def _same_pair(left: Token | None, right: Token | None) -> bool:
    """Whether each side's runner-up is the other side's choice; an ended answer has no token to compare with."""
    if left is None or right is None:
        return True
    return left.second in (None, right.text) and right.second in (None, left.text)


def _common_characters(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _token_at_character(tokens: Sequence[Token] | None, at: int) -> Token | None:
    """The token that covers character `at` of the answer."""
    seen = 0
    for token in tokens or []:
        seen += len(token.text)
        if seen > at:
            return token
    return None
