"""Finds answers on which acceptance must not be measured: loops, noise and empty answers.

In a loop every draft is right, and in random text none is, so neither says anything about a head.
All functions are pure and need no tokenizer. The units of a text are its words and punctuation
marks.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORD = re.compile(r"\w+|[^\w\s]")  # a unit: a word or a single punctuation mark
NGRAM = 4
MIN_GRAMS = 24  # a ratio of fewer n-grams is not meaningful
LOOP_RATIO = 0.5  # an answer with a smaller share of distinct 4-grams is a loop
# Unicode categories that no language uses: control, unassigned, private use, surrogate
NOISE = ("Cc", "Cn", "Co", "Cs")
NOISE_SHARE = 0.1  # an answer with a larger share of noise characters is noise
RUN_SHARE = 0.1  # output is degenerate if a larger share of its answers is


def distinct_ratio(tokens: Sequence[Any], n: int = NGRAM) -> float | None:
    """Number of distinct n-grams over the number of n-grams in a sequence.

    None for fewer than MIN_GRAMS n-grams.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if len(grams) >= MIN_GRAMS else None


def mean_distinct_ratio(texts: Sequence[str], length: int | None = None) -> float | None:
    """Mean share of distinct 4-grams over the texts. None if every text is too short.

    `length`: number of units to which each text is cut, because the share decreases with length.
    """
    ratios = [distinct_ratio(WORD.findall(text)[:length]) for text in texts]
    known = [ratio for ratio in ratios if ratio is not None]
    return sum(known) / len(known) if known else None


def tail_period(text: str, repeats: int = 4, longest: int = 24) -> int | None:
    """Length of the block of units that a text repeats at its end.

    None if no block of up to `longest` units ends the text `repeats` times in a row.
    """
    tokens = WORD.findall(text)
    for period in range(1, longest + 1):
        size = period * repeats
        if len(tokens) >= max(size, MIN_GRAMS) and tokens[-size:] == tokens[-period:] * repeats:
            return period
    return None


def degeneration(text: str) -> str | None:
    """Returns why an answer is degenerate: "empty", "noise" or "loop". None if it is not."""
    if not text.strip():
        return "empty"
    # line breaks and tabs are control characters, but are not noise
    noise_count = sum(
        char == "\ufffd" or (unicodedata.category(char) in NOISE and char not in "\n\r\t")
        for char in text
    )
    if noise_count / len(text) > NOISE_SHARE:
        return "noise"
    ratio = distinct_ratio(WORD.findall(text))
    if tail_period(text) or (ratio is not None and ratio < LOOP_RATIO):
        return "loop"
    return None


@dataclass(frozen=True, kw_only=True)
class OutputQuality:
    """Quality of the output of a run: how many answers are degenerate.

    answers: number of answers
    empty: number of answers without text
    noise: number of answers with many characters that no language uses
    loop: number of answers that repeat themselves
    share: fraction of the answers that are degenerate
    distinct_4gram_ratio: mean share of distinct 4-grams, None if every answer is too short
    degenerate: whether the share is too large for acceptance to have a meaning
    """

    answers: int
    empty: int
    noise: int
    loop: int
    share: float
    distinct_4gram_ratio: float | None
    degenerate: bool

    @property
    def words(self) -> str:
        """Counts and ratio in words."""
        ratio = "not known"
        if self.distinct_4gram_ratio is not None:
            ratio = f"{self.distinct_4gram_ratio:.2f}"
        return (
            f"{self.answers} answers, {self.loop} loops, {self.empty} empty, {self.noise} noise; "
            f"distinct 4-grams {ratio}"
        )


def judge_run(texts: Sequence[str]) -> OutputQuality:
    """Counts the degenerate answers of a run. `texts`: all its answers."""
    reasons = [degeneration(text) for text in texts]
    degenerate_count = sum(reason is not None for reason in reasons)
    share = 0.0
    if texts:
        share = degenerate_count / len(texts)
    ratio = mean_distinct_ratio(texts)
    return OutputQuality(
        answers=len(texts),
        empty=reasons.count("empty"),
        noise=reasons.count("noise"),
        loop=reasons.count("loop"),
        share=round(share, 4),
        distinct_4gram_ratio=None if ratio is None else round(ratio, 4),
        degenerate=share > RUN_SHARE,
    )
