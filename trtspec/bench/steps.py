"""Verification steps of single answers, from what a server claims and from what its stream shows: do the two agree, is
acceptance forced, and did it collapse between two passes over the same questions?
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtspec.bench.gate import UNLIKELY
from trtspec.bench.transcript import Transcript
from trtspec.client.servers import FROM_STREAMS, LEAST_AVERAGE, TurnCounts, choice_histogram, is_count
from trtspec.client.text_quality import degeneration

ENOUGH_STEPS = 50
ENOUGH_ANSWERS = 10
LONG_ANSWER = 12  # steps from which a single answer says something
SAME_SHARE = 0.98  # the last step of an answer may be cut short
LONGEST_DRAFT = 64
MOST_TOKENS = 2**20  # of one answer; a larger figure counts no tokens, and lists of its steps would fill the memory
IMPOSSIBLE = 1e-6
COLLAPSED = 0.5  # an answer that accepts less than this share of what it accepted before
COLLAPSE_STEPS = 8  # ... and takes this many steps more
NEXT_TO_NOTHING = 0.05  # an answer that accepts less than this share of what others do
MOST_DRAFTS = 8  # that one step accepts, where a server tells averages alone
DRAWS = 10_000
AGREE = 1.1  # tokens per step of two sources that mean the same
SINGLE = 0.05  # share of tokens without a counted step from which these must be seen in the stream
MERGED = 0.8  # ... where pieces that a busy server sends together leave at least this share of them
MERGED_ONE = 0.7  # ... of one answer, whose share varies by chance
FALL = 0.8  # a pass that accepts less than this share of what the other pass did over the same answers


@dataclass(frozen=True)
class AnswerSteps:
    """One answer: its tokens, its verification steps (the prefill is none), and the sizes of steps less one where they
    are known, the last step left out. `streamed`: only the pieces of its stream tell, which may be sent together.
    """

    question: str
    tokens: int
    steps: int
    accepted: tuple[int, ...] | None = None
    text: str = ""
    streamed: bool = False

    @property
    def drafts(self) -> int:
        """Accepted ones: the tokens that neither the prefill nor a step itself made."""
        return max(0, self.tokens - 1 - self.steps)

    @property
    def rate(self) -> float:
        """Accepted drafts per step."""
        return self.drafts / self.steps if self.steps else 0.0


def steps_of(transcript: Transcript) -> AnswerSteps | None:
    """The steps that an answer took at least: what is claimed, or the pieces of the stream where these are more."""
    tokens = transcript.completion_tokens or 0
    claimed, seen = claimed_steps(transcript), increments(transcript.counted, transcript.completion_tokens)
    if transcript.error or tokens < 2 or (claimed is None and len(seen) < 2) or max(tokens, claimed or 0) > MOST_TOKENS:
        return None
    steps = max(claimed or 0, len(seen) - 1)
    accepted = tuple(size - 1 for size in seen[1:-1])
    whole = len(seen) > 1 and (claimed is None or abs(claimed - len(seen) + 1) <= 1)
    known = accepted if whole else None
    return AnswerSteps(transcript.question, tokens, max(1, steps), known, transcript.trimmed, claimed is None)


def claimed_steps(transcript: Transcript) -> int | None:
    """None where nothing is claimed, or an average that is none."""
    spec = transcript.spec_decode or {}
    if is_count(spec.get("steps")) and (spec["steps"] or not spec.get("accepted")):
        return int(spec["steps"])
    if transcript.average and transcript.average >= LEAST_AVERAGE and transcript.completion_tokens:
        return max(1, round(transcript.completion_tokens / transcript.average)) - 1
    return None


def increments(counted: Sequence[int], most: int | None = None) -> list[int]:
    """Tokens that each piece of a stream added, by the usage in it; the first are those of the prefill. A count beyond
    `most`, that of the whole answer, is left out."""
    counted = [count for count in counted if most is None or count <= most]
    added = [b - a for a, b in itertools.pairwise([0, *counted])]
    return [size for size in added if size > 0]


def pooled_histogram(transcripts: Sequence[Transcript]) -> list[int]:
    """How many steps accepted 0, 1, 2 ... drafts, by the streams, and by the server's own word where there are none."""
    total = [0] * (LONGEST_DRAFT + 1)
    for accepted in (sizes for _, sizes in step_sizes(transcripts)):
        for size in accepted:
            total[min(size, LONGEST_DRAFT)] += 1
    while total and not total[-1]:
        total.pop()
    return total


def step_sizes(transcripts: Sequence[Transcript]) -> list[tuple[Transcript, list[int]]]:
    """Accepted drafts of each step, per answer, the cut last step left out where the order is known."""
    found = []
    for transcript in transcripts:
        steps = steps_of(transcript)
        histogram = choice_histogram(transcript.spec_decode)
        if steps is not None and steps.accepted:
            found.append((transcript, list(steps.accepted)))
        elif steps is not None and histogram is not None and sum(histogram) == steps.steps:
            found.append((transcript, [j for j, count in enumerate(histogram) for _ in range(count)]))
    return found


def forced(transcripts: Sequence[Transcript]) -> str | None:
    """Why acceptance looks forced, or None. No drafter accepts the same number of drafts in every step, or one of two
    neighbouring numbers and never none at all; a text that repeats itself does that honestly and is left out."""
    lively = [item for item in transcripts if item.error is None and degeneration(item.text) is None]
    known = step_sizes(lively)
    pooled = [size for _, sizes in known for size in sizes]
    if len(pooled) < ENOUGH_STEPS:
        return _narrow_averages(lively)
    counts = Counter(pooled)
    most, longest = max(counts, key=lambda size: (counts[size], -size)), max(counts)
    drafts = max((len(h) - 1 for t in lively if (h := choice_histogram(t.spec_decode))), default=0)
    if most and counts[most] >= SAME_SHARE * len(pooled):
        return f"every one of {len(pooled)} steps accepted {most} drafts"
    pairs = [
        (counts[j] + counts[j + 1], j) for j in {j for size in counts for j in (size - 1, size)} if 0 < j < longest
    ]
    if pairs and max(pairs)[0] >= SAME_SHARE * len(pooled):
        low = max(pairs)[1]
        return f"each of {len(pooled)} steps accepted {low} or {low + 1} drafts, and none was refused whole"
    if drafts > 1 and longest == 1 and counts[1] > 0.3 * len(pooled):
        return f"no step of {len(pooled)} accepted more than 1 of {drafts} drafts, though {counts[1]} accepted one"
    return _forced_answer(known, counts, max(longest, drafts))


def _forced_answer(known: Sequence[tuple[Transcript, list[int]]], counts: Counter[int], drafts: int) -> str | None:
    """A single answer that accepts the same number, or one of two neighbours, in every step, and never none or all:
    by the shares of all steps that is next to impossible, and no easy or hard text leads a drafter to it."""
    total = counts.total()
    for transcript, sizes in known:
        low, high = min(sizes), max(sizes)
        share = sum(counts[size] for size in {low, high}) / total
        if len(sizes) < LONG_ANSWER or not 0 < low <= high < drafts or high > low + 1:
            continue
        if share ** len(sizes) * len(known) < IMPOSSIBLE:
            said = f"{low} drafts" if low == high else f"{low} or {high} drafts"
            return f"the answer to {transcript.question} accepted {said} in each of its {len(sizes)} steps"
    return None


def _narrow_averages(transcripts: Sequence[Transcript]) -> str | None:
    """Forced acceptance that only averages show: they differ less than any drafter's. With a mean between two whole
    numbers, steps that are always one of these two have the least variance there is."""
    found = [s for t in transcripts if (s := steps_of(t)) is not None and s.steps >= LONG_ANSWER]
    if len(found) < 2 * ENOUGH_ANSWERS:
        return None
    mean = sum(s.rate * s.steps for s in found) / sum(s.steps for s in found)
    fraction = mean - int(mean)
    least = max(fraction * (1 - fraction), 0.01)
    ratio = sum(s.steps * (s.rate - mean) ** 2 for s in found) / (len(found) - 1) / least
    if mean < 1.0 or ratio >= 2.0:  # below one accepted draft, a drafter of one token is as narrow
        return None
    return f"{len(found)} answers all accept {mean:.2f} drafts per step: less spread than drafts of any kind have"


def can_tell_forced(transcripts: Sequence[Transcript]) -> bool:
    known = [item for item in transcripts if item.error is None and degeneration(item.text) is None]
    if sum(len(sizes) for _, sizes in step_sizes(known)) >= ENOUGH_STEPS:
        return True
    found = [s for t in known if (s := steps_of(t)) is not None and s.steps >= LONG_ANSWER]
    return len(found) >= 2 * ENOUGH_ANSWERS and sum(s.rate for s in found) >= len(found)


@dataclass(frozen=True)
class PassComparison:
    """Accepted drafts per step of two passes over the same questions, and the answers that fell on their own."""

    answers: int
    before: float
    after: float
    fallen: list[str]
    steps: int
    streamed: bool = False

    @property
    def fell(self) -> bool:
        return self.steps >= ENOUGH_STEPS and self.before > 0.1 and _is_fall(self.before, self.after, self.streamed)


def compare_passes(before: Sequence[Transcript], after: Sequence[Transcript]) -> PassComparison | None:
    """None where one of the passes tells no steps. The same text is drafted the same way, up to rounding: an answer
    with another text is compared in the mean only."""
    earlier = {item.question: steps for item in before if (steps := steps_of(item)) is not None}
    pairs = [(earlier[i.question], s) for i in after if i.question in earlier and (s := steps_of(i)) is not None]
    if not pairs:
        return None
    fallen = [new.question for old, new in pairs if old.text == new.text and fell_from(old, new)]
    old_steps, new_steps = sum(old.steps for old, _ in pairs), sum(new.steps for _, new in pairs)
    old_rate = sum(old.drafts for old, _ in pairs) / old_steps
    new_rate = sum(new.drafts for _, new in pairs) / new_steps
    streamed = any(one.streamed for pair in pairs for one in pair)
    return PassComparison(len(pairs), old_rate, new_rate, fallen, new_steps, streamed)


def _is_fall(before: float, after: float, streamed: bool, merged: float = MERGED) -> bool:
    """Of accepted drafts per step. Pieces sent together in the earlier pass look like accepted drafts, in tokens per
    step by no more than their share."""
    return 1 + after < merged * (1 + before) if streamed else after < FALL * before


def fell_from(old: AnswerSteps, new: AnswerSteps) -> bool:
    """Whether the same text took far more steps than before."""
    if new.steps - old.steps < COLLAPSE_STEPS or new.rate >= COLLAPSED * old.rate:
        return False
    return _is_fall(old.rate, new.rate, old.streamed or new.streamed, MERGED_ONE)


def hopeless(transcripts: Sequence[Transcript], usual: float, short: Sequence[Transcript], judged: int) -> list[str]:
    """Answers that accept next to nothing, where `usual` drafts per step are accepted elsewhere, and where none of
    `judged` answers would do so by chance if it drafted as one of `short`."""
    found = [steps for item in transcripts if (steps := steps_of(item)) is not None]
    few = [s for s in found if s.steps >= LONG_ANSWER and s.rate < NEXT_TO_NOTHING * usual]
    return [s.question for s in few if chance_of_fewer(short, [s.steps], s.drafts) * judged < UNLIKELY]


def fewer_than_chance(transcripts: Sequence[Transcript], short: Sequence[Transcript], judged: int) -> bool:
    """Whether these answers together accept fewer drafts than those of one of `judged` groups would by chance. The
    passes over one question have the same steps, so they count once."""
    found: dict[str, list[AnswerSteps]] = {}
    for item in transcripts:
        if (steps := steps_of(item)) is not None:
            found.setdefault(item.question, []).append(steps)
    counts = [round(sum(s.steps for s in passes) / len(passes)) for passes in found.values()]
    accepted = sum(sum(s.drafts for s in passes) / len(passes) for passes in found.values())
    return chance_of_fewer(short, counts, accepted) * judged < UNLIKELY


def chance_of_fewer(short: Sequence[Transcript], steps: Sequence[int], accepted: float) -> float:
    """Chance that answers of so many steps accept `accepted` drafts or fewer together, if each drafts as one of `short`
    does: one of these is drawn for each, and then as many of its steps (a bootstrap in two stages). 1 where `short`
    tells no steps. Answers of few steps are put together, so that none of them speaks for a whole answer."""
    known = {id(item): sizes for item, sizes in step_sizes(short)}
    each = [known.get(id(item)) or _from_average(s) for item in short if (s := steps_of(item)) is not None]
    small = list(itertools.chain(*(sizes for sizes in each if len(sizes) < LONG_ANSWER)))
    units = [
        np.bincount(np.minimum(sizes, LONGEST_DRAFT)) / len(sizes)
        for sizes in [*each, small]
        if len(sizes) >= LONG_ANSWER
    ]
    if not units:
        return 1.0
    dice, total = np.random.default_rng(0), np.zeros(DRAWS)
    for count in steps:
        drawn = dice.integers(0, len(units), DRAWS)
        for place, shares in enumerate(units):
            here = np.flatnonzero(drawn == place)
            total[here] += dice.multinomial(count, shares, size=len(here)) @ np.arange(len(shares))
    return float(np.mean(total <= accepted))


def _from_average(steps: AnswerSteps) -> list[int]:
    """Accepted drafts of each step where only their mean is known: as unevenly as may be."""
    full = round(steps.drafts / MOST_DRAFTS)
    return [MOST_DRAFTS] * full + [0] * (steps.steps - full)


def counts_of_streams(transcripts: Sequence[Transcript]) -> list[TurnCounts]:
    """What users saw: each answer that tells its steps, the accepted drafts being the tokens that no step explains."""
    told = [(item, s) for item in transcripts if (s := steps_of(item)) is not None]
    return [
        TurnCounts(item.question, item.category, s.tokens, s.steps, s.drafts, None, None, FROM_STREAMS)
        for item, s in told
    ]


def counters_fault(counts: TurnCounts, streams: Sequence[Transcript]) -> str | None:
    """Why counters around a run cannot be those of its streams, or None. Counted are steps with drafts: a token that
    they do not explain came alone in a step without, so that it is seen in the stream. Pieces sent together hide steps
    and look like accepted drafts, one for each piece that is missing; nothing shows more steps than there were."""
    sizes = [size for item in streams for size in increments(item.counted, item.completion_tokens)[1:]]
    tokens = counts.tokens - counts.answers
    scale = tokens / max(1, sum(sizes))  # the counters may be of the same answers unstreamed
    pieces, several = scale * len(sizes), scale * sum(size > 1 for size in sizes)
    single = max(0, tokens - counts.steps - counts.accepted)
    steps = counts.steps + single
    said = f"{counts.steps} steps with {counts.accepted} accepted drafts are counted for {counts.tokens} tokens"
    if pieces > AGREE * steps:
        return f"{said}, and the streams brought them in {pieces:.0f} steps"
    if several > AGREE * (counts.steps + max(0.0, steps - pieces)):
        return f"{said}, and {several:.0f} steps of the streams brought more than one"
    if single > SINGLE * tokens and pieces < MERGED * steps:
        return f"{said}, which leaves {single} that came alone, and the streams brought them in {pieces:.0f} steps"
    return None


def mean_rate(transcripts: Sequence[Transcript]) -> tuple[float, int] | None:
    """Accepted drafts per step, and over how many steps; None where nothing tells."""
    found = [steps for item in transcripts if (steps := steps_of(item)) is not None]
    total = sum(steps.steps for steps in found)
    return (sum(s.drafts for s in found) / total, total) if total else None
