"""Do two servers answer alike? Greedy text with speculation against text without it.

Every first divergence is a near-tie or a defect. Rounding differs between one-token and several-token passes, so
two correct servers may part where the two best tokens are as good as equal. How far rounding reaches is measured, not
assumed: the plain server answers everything at two concurrencies, and where both passes scored the same context, the
differences of their gaps (best minus second logprob) show its rounding. A divergence is a near-tie when each server
that tells its tokens lists the one that came on the other, and it is behind the best by no more than the bound of that
place, whatever its rank: three tokens may be as good as equal. The bound is twice the larger of two figures, the
largest difference in this answer up to there (rounding in the cache adds up along an answer) and the 99th percentile of
all differences, and never above `limit`. Where that percentile itself is above `limit`, the log-probabilities are noise
and excuse nothing. Where no difference was seen at all, the passes had the same shapes, and passes over several tokens
have others: then one spacing of bfloat16 logits is the bound. The visible text decides whether answers are equal;
tokens only say where they part.

The tail of rounding is long in a mixture of experts, where a score that moves by one spacing may choose another expert.
A divergence beyond the bound, but within a few times the largest difference, is `rare`: single ones are excused, and so
many that the plain server's own passes part so less often (Fisher's exact test) are defects. Few positions may show
nothing of the tail, so the 99th percentile counts as well. A token that was not listed may be as near as the last one
that was.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trtspec.bench.gate import UNLIKELY, more_often
from trtspec.bench.transcript import THINKING, THOUGHT, Token, Transcript

FLOOR = 1e-4  # nats; float32 logprobs printed with 6 digits carry at least this much
SPACING = 2.0**-4  # nats; bfloat16 logits from 8 to 16 are so far apart, and best logits are mostly of that size
MARGIN = 2.0  # the largest of a few thousand differences is not the largest there is
TYPICAL = 0.99
REACH = 4.0  # times the largest difference: the tail falls about as its power of 1.5
FURTHER = 40.0  # times the 99th percentile: the largest of 10,000 differences is about 20 times that
PIECE = "\ufffd"  # what a part of a character decodes to
LEAST_WORDS = 5  # in the tokens, for a text without any white space to be wrong


@dataclass(frozen=True)
class AnswerDivergence:
    """Where two greedy answers part first. A gap is how far the token that came is behind the best, in nats, or at
    least behind, where that token is not `listed`: as the last that is. None where a server gave no logprobs there."""

    question: str
    position: int
    expected: str
    got: str
    gap_expected: float | None
    gap_got: float | None
    listed: bool
    verdict: str = ""
    bound: float = 0.0


def first_divergence(expected: Transcript, got: Transcript) -> AnswerDivergence | None:
    """None when the visible texts are the same. Positions are tokens where these spell the text, else characters."""
    if expected.text == got.text:
        return None
    if _reads(expected) and _reads(got):
        return _by_token(expected, got)
    at = _common_characters(expected.text, got.text)
    left, right = _pair(expected, got.text, at), _pair(got, expected.text, at)
    known = [pair for pair in (left, right) if pair is not None]
    return AnswerDivergence(
        expected.question,
        known[0][0] if known else at,
        expected.text[at : at + 12] or "(end of the answer)",
        got.text[at : at + 12] or "(end of the answer)",
        left[1] if left else None,
        right[1] if right else None,
        bool(known) and all(pair[2] for pair in known),
    )


def _by_token(expected: Transcript, got: Transcript) -> AnswerDivergence | None:
    a, b = expected.tokens or [], got.tokens or []
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x.text != y.text), min(len(a), len(b)))
    left, right = _at(a, at), _at(b, at)
    (gap_left, listed_left), (gap_right, listed_right) = _apart(left, right), _apart(right, left)
    listed = listed_left and listed_right
    return AnswerDivergence(expected.question, at, _text(left), _text(right), gap_left, gap_right, listed)


def _reads(transcript: Transcript) -> bool:
    return transcript.tokens is not None and tokens_show(transcript) is not False


def tokens_show(transcript: Transcript) -> bool | None:
    """Whether the tokens spell the visible text, save for markers that a server takes out (end of thinking, end of the
    answer). White space may be missing from the tokens, of which some servers tell none, but not from the text. None
    where the server told no tokens, or none but pieces of characters."""
    if transcript.tokens is None:
        return None
    spelled = "".join(token.text for token in transcript.tokens) if transcript.spelled is None else transcript.spelled
    text = transcript.text
    for marker in {token.text for token in transcript.tokens if is_marker(token.text)}:
        spelled, text = spelled.replace(marker, ""), text.replace(marker, "")
    told, shown = _squeezed(spelled), _squeezed(text)
    if told and not told.strip(PIECE):
        return None
    if not (_fits(told, shown) or _fits(shown, told)):
        return False
    return _words(spelled) < LEAST_WORDS or len(text.split()) > 1


def _words(spelled: str) -> int:
    return len(spelled.replace(PIECE, "").split())


def _fits(pattern: str, text: str) -> bool:
    """Whether `text` reads as `pattern`, in which each run of PIECE may stand for as many characters, or fewer, that
    are no ASCII: only those are spread over several tokens."""
    if PIECE not in pattern:
        return pattern == text
    ends = {0}
    for part in re.findall(f"{PIECE}+|[^{PIECE}]+", pattern):
        if part[0] != PIECE:
            ends = {end + len(part) for end in ends if text.startswith(part, end)}
            continue
        for _ in part:
            ends |= {end + 1 for end in ends if end < len(text) and not text[end].isascii()}
    return len(text) in ends


def is_marker(token: str) -> bool:
    """Names of special tokens: <|im_end|>, </think>, [EOS]."""
    bare = token.strip()
    return (
        not token
        or bare in (THINKING, THOUGHT, "[EOS]", "[EOT]", "</s>")
        or (bare.startswith("<|") and bare.endswith("|>"))
    )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def rounding_differences(expected: Transcript, got: Transcript, swaps: bool) -> Iterator[tuple[int, float]]:
    """(position, |gap - gap|) where both passes saw the same context, chose the same token and told the same other one.
    With `swaps` also where each told what the other chose: between two passes of one server that is rounding too."""
    if expected.tokens is None or got.tokens is None or not same_context(expected, got):
        return
    for index, (a, b) in enumerate(zip(expected.tokens, got.tokens, strict=False)):
        if a.text == b.text:
            mine, other = a.alternatives.get(a.second or ""), b.alternatives.get(a.second or "")
            if mine is not None and other is not None:
                yield index, abs(mine - other)
            continue
        mine, other = a.alternatives.get(b.text), b.alternatives.get(a.text)
        if swaps and mine is not None and other is not None:
            yield index, mine + other
        return


def same_context(a: Transcript, b: Transcript) -> bool:
    """Whether both servers read prompts of one length; a server that does not tell is believed."""
    return None in (a.prompt_tokens, b.prompt_tokens) or a.prompt_tokens == b.prompt_tokens


@dataclass(frozen=True)
class RoundingBound:
    """How far rounding reaches: over all positions, and in each answer as a running maximum from its start. `parted`:
    the gaps at which answers to each question asked of one server twice part, 0 where they are the same and infinite
    where a token was not listed."""

    positions: int = 0
    largest: float | None = None
    typical: float = 0.0
    running: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)
    parted: Mapping[str, float] = field(default_factory=dict)

    def wild(self, limit: float) -> bool:
        """Whether passes differ by more than any rounding: then what is measured is no rounding."""
        return self.typical > limit

    @property
    def unseen(self) -> bool:
        """Whether no pass differs from another: same shapes round alike, and others need not."""
        return not self.largest

    def at(self, question: str, position: int, limit: float) -> float:
        if self.wild(limit):
            return FLOOR
        if self.unseen:
            return min(limit, SPACING)
        here = max((largest for index, largest in self.running.get(question, []) if index <= position), default=0.0)
        return min(limit, max(FLOOR, MARGIN * max(here, self.typical)))

    def reach(self, limit: float) -> float:
        """Up to which gap a divergence beyond the bound may be rounding; 0 where none may, or where one server's own
        passes do not tell how often that is."""
        measured = bool(self.parted) and not self.wild(limit)
        return max(REACH * (self.largest or 0.0), FURTHER * self.typical) if measured else 0.0

    def rarely(self, limit: float) -> tuple[int, int]:
        """(questions whose two answers by one server part beyond the bound that holds everywhere, questions)."""
        return sum(gap > self.at("", -1, limit) for gap in self.parted.values()), len(self.parted)


def measure_rounding(pairs: Sequence[tuple[Transcript, Transcript]], swaps: bool) -> RoundingBound:
    """From pairs of answers to the same question by the same server (`swaps`), or by both where a recording has one
    pass."""
    found: list[float] = []
    running: dict[str, list[tuple[int, float]]] = {}
    apart: dict[str, float] = {}
    for a, b in pairs:
        if swaps:
            parts = first_divergence(a, b)
            gap = max(parts.gap_expected or 0.0, parts.gap_got or 0.0) if parts else 0.0
            gap = math.inf if parts and not parts.listed else gap
            apart[a.question] = max(apart.get(a.question, 0.0), gap)
        for index, difference in rounding_differences(a, b, swaps):
            found.append(difference)
            steps = running.setdefault(a.question, [])
            if not steps or difference > steps[-1][1]:
                steps.append((index, difference))
    if not found:
        return RoundingBound()
    ordered = sorted(found)
    typical = ordered[math.ceil(TYPICAL * len(ordered)) - 1]
    return RoundingBound(len(found), max(found), typical, running, apart)


def judge(divergence: AnswerDivergence, rounding: RoundingBound | None, limit: float) -> str:
    """`near-tie`, `rare`, `real`, or `unjudged` when neither server told its gaps; without `rounding`, the bound is
    `limit`."""
    gaps = [gap for gap in (divergence.gap_expected, divergence.gap_got) if gap is not None]
    if not gaps:
        return "unjudged"
    bound = rounding.at(divergence.question, divergence.position, limit) if rounding else limit
    if divergence.listed and max(gaps) <= bound:
        return "near-tie"
    return "rare" if rounding and max(gaps) <= rounding.reach(limit) else "real"


def what_rare_is(questions: Sequence[str], asked: int, rounding: RoundingBound | None, limit: float) -> str:
    """`near-tie` or `real`: what the rare divergences of these questions are taken for, of so many that were asked."""
    usual = rounding.rarely(limit) if rounding else (0, 0)
    return "real" if more_often(len(set(questions)), asked, *usual) < UNLIKELY else "near-tie"


@dataclass(frozen=True)
class RoundingSpread:
    """Over how many positions rounding was measured, the largest difference in nats, and between what."""

    positions: int
    largest: float | None
    source: str = ""
    wild: bool = False
    unseen: bool = False


@dataclass(frozen=True, kw_only=True)
class LosslessReport:
    """Counts of answers, the bound that holds everywhere (places may have a larger one, see each divergence), and every
    divergence with its verdict. `rare`: those beyond the bound that were excused, since the plain server's passes part
    so for `usually_rare` (questions, of so many). `too_often`: those of `real` that are such ones, but too many.
    `contexts` are questions of which the servers read prompts of different lengths."""

    compared: int
    identical: int
    near_ties: int
    rare: int
    usually_rare: tuple[int, int]
    real: int
    too_often: int
    unjudged: int
    bound: float
    limit: float
    rounding: RoundingSpread
    divergences: list[AnswerDivergence]
    contexts: list[str]

    @property
    def bound_reason(self) -> str:
        """Where the bound comes from, in words."""
        seen = self.rounding
        if not seen.unseen:
            return f"measured over {seen.positions} positions of {seen.source}"
        step = f"one spacing of bfloat16 logits from 8 to 16, {SPACING:g}, is taken, at most --near-tie"
        if not seen.positions:
            return f"rounding was not measured on {seen.source}, so {step}"
        return f"{seen.positions} positions of {seen.source} differ nowhere, which shows no rounding, so {step}"


def compare_transcripts(
    expected: Sequence[Transcript],
    got: Sequence[Transcript],
    limit: float,
    repeats: Sequence[Sequence[Transcript]] = (),
) -> LosslessReport:
    """Answers are matched by question. `repeats` are further passes of the plain server: an answer that equals one of
    them is the plain server's own."""
    answers = {transcript.question: transcript for transcript in got if transcript.error is None}
    pairs = [(item, answers[item.question]) for item in expected if item.question in answers and item.error is None]
    contexts = [a.question for a, b in pairs if not same_context(a, b)]
    pairs = [pair for pair in pairs if pair[0].question not in contexts]
    again = [{item.question: item for item in one if item.error is None} for one in repeats]
    own = [(a, one[a.question]) for a, _ in pairs for one in again if a.question in one]
    source = "the plain server's own passes" if any(one for one in again) else "both servers"
    rounding = measure_rounding(own, True) if again else measure_rounding(pairs, False)
    judged = []
    for a, b in pairs:
        versions = [a, *(one[a.question] for one in again if a.question in one)]
        found = [first_divergence(version, b) for version in versions]
        if None not in found:
            judged.append(_kindest([divergence for divergence in found if divergence], rounding, limit))
    rare = [divergence.question for divergence in judged if divergence.verdict == "rare"]
    too_often = what_rare_is(rare, len(pairs), rounding, limit) == "real"
    if too_often:
        judged = [replace(each, verdict="real") if each.verdict == "rare" else each for each in judged]
    counts = Counter(divergence.verdict for divergence in judged)
    largest = None if rounding.largest is None else round(rounding.largest, 6)
    return LosslessReport(
        compared=len(pairs),
        identical=len(pairs) - len(judged),
        near_ties=counts["near-tie"],
        rare=counts["rare"],
        usually_rare=rounding.rarely(limit),
        real=counts["real"],
        too_often=len(rare) if too_often else 0,
        unjudged=counts["unjudged"],
        bound=round(rounding.at("", 0, limit), 6),
        limit=limit,
        rounding=RoundingSpread(rounding.positions, largest, source, rounding.wild(limit), rounding.unseen),
        divergences=judged,
        contexts=contexts,
    )


def _kindest(found: Sequence[AnswerDivergence], rounding: RoundingBound, limit: float) -> AnswerDivergence:
    """The verdict against that pass of the plain server which the answer follows longest."""
    longest = max(found, key=lambda divergence: divergence.position)
    bound = rounding.at(longest.question, longest.position, limit)
    return replace(longest, verdict=judge(longest, rounding, limit), bound=round(bound, 6))


def _at(tokens: Sequence[Token], index: int) -> Token | None:
    return tokens[index] if index < len(tokens) else None


def _text(token: Token | None) -> str:
    return token.text if token else "(end of the answer)"


def _apart(side: Token | None, other: Token | None) -> tuple[float | None, bool]:
    """(how far `other` is behind the best of this side, at least, whether this side lists it, or tells no token that
    could deny it). Where the other answer has ended, a marker takes the place of its token."""
    if side is None or not side.alternatives:
        return side.gap if side else None, True
    found = {text: gap for text, gap in side.alternatives.items() if other is None or text == other.text}
    if other is None:
        found = {text: gap for text, gap in found.items() if is_marker(text)}
    return (_nearest(found), True) if found else (_furthest(side), False)


def _furthest(side: Token) -> float | None:
    """How far a token that this side does not list is behind its best at least."""
    return max((gap for gap in side.alternatives.values() if gap is not None), default=side.gap)


def _nearest(alternatives: Mapping[str, float | None]) -> float | None:
    return min(alternatives.values(), key=lambda gap: gap or 0.0)


def _common_characters(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _pair(side: Transcript, other: str, at: int) -> tuple[int, float | None, bool] | None:
    """(token, gap, whether the other text goes on with a token told there) where `side` has tokens; None without.

    The token that covers character `at` may not be the one that differs: where one token is the beginning of another,
    the texts part only behind it. So the token before is asked too.
    """
    starts = _starts(side)
    if starts is None or side.tokens is None:
        return None
    covering = max((i for i, start in enumerate(starts) if start <= at), default=0)
    candidates = [index for index in (covering, covering - 1) if 0 <= index < len(side.tokens)]
    matching = {
        index: [gap for text, gap in side.tokens[index].alternatives.items() if text and rest.startswith(text)]
        for index in candidates
        if not _hidden(side, index, starts[index]) and (rest := other[starts[index] :])
    }
    meant = [(gap, index) for index, gaps in matching.items() for gap in gaps]
    if meant:  # where several could be meant, the text does not tell which: the closest one is believed
        gap, index = min(meant, key=lambda found: found[0] or 0.0)
        return index, gap, True
    index = candidates[0]
    token = side.tokens[index]
    if at >= len(other):
        return index, *_apart(token, None)
    return index, _furthest(token), False


def _hidden(side: Transcript, index: int, start: int) -> bool:
    """Whether the token at character `start` is a marker that the visible text does not hold."""
    token = (side.tokens or [])[index].text
    return is_marker(token) and not (token and side.text.startswith(token, start))


def _starts(side: Transcript) -> list[int] | None:
    """At which character of the visible text each token begins; None where the tokens do not spell it exactly."""
    position, found = 0, []
    for token in side.tokens or []:
        found.append(position)
        text = token.text  # servers take white space away around the end of thinking
        forms = (text, text.lstrip(), text.rstrip(), text.strip())
        shown = next((form for form in forms if side.text.startswith(form, position)), None)
        if shown is None and not is_marker(text):
            return None
        position += len(shown or "")
    return found if found and position == len(side.text) else None
