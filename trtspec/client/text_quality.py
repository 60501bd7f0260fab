"""Whether acceptance may be measured on a text: finds loops, empty answers and noise.

Speculation is easy on a loop (every draft is right) and hopeless on random ids, so a figure from
either says nothing about a head. All functions are pure and need no tokenizer: units are words and
punctuation marks.
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
# categories that no language writes: control, unassigned, private use, surrogate
NOISE = ("Cc", "Cn", "Co", "Cs")
NOISE_SHARE = 0.1  # of the characters of an answer
RUN_SHARE = 0.1  # a run is degenerate when more than this share of its answers is


def distinct_ratio(tokens: Sequence[Any], n: int = NGRAM) -> float | None:
    """Distinct n-grams over n-grams of one sequence. None below MIN_GRAMS n-grams."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if len(grams) >= MIN_GRAMS else None


def mean_distinct_ratio(texts: Sequence[str], length: int | None = None) -> float | None:
    """Mean over texts of `distinct_ratio`, each cut to its first `length` units.

    Ratios fall with length.
    """
    ratios = [distinct_ratio(WORD.findall(text)[:length]) for text in texts]
    known = [ratio for ratio in ratios if ratio is not None]
    return sum(known) / len(known) if known else None


def tail_period(text: str, repeats: int = 4, longest: int = 24) -> int | None:
    """Length in units of a block that ends the text `repeats` times in a row, or None."""
    tokens = WORD.findall(text)
    for period in range(1, longest + 1):
        size = period * repeats
        if len(tokens) >= max(size, MIN_GRAMS) and tokens[-size:] == tokens[-period:] * repeats:
            return period
    return None


def degeneration(text: str) -> str | None:
    """Why an answer is degenerate ("empty", "noise", "loop"), or None."""
    if not text.strip():
        return "empty"
    noise = sum(
        char == "\ufffd" or unicodedata.category(char) in NOISE and char not in "\n\r\t"
        for char in text
    )
    if noise / len(text) > NOISE_SHARE:
        return "noise"
    ratio = distinct_ratio(WORD.findall(text))
    if tail_period(text) or (ratio is not None and ratio < LOOP_RATIO):
        return "loop"
    return None


@dataclass(frozen=True, kw_only=True)
class OutputQuality:
    """Counts of degenerate answers, their share, and the distinct 4-gram ratio of a run."""

    answers: int
    empty: int
    noise: int
    loop: int
    share: float
    distinct_4gram_ratio: float | None
    degenerate: bool

    @property
    def words(self) -> str:
        ratio = "not known"
        if self.distinct_4gram_ratio is not None:
            ratio = f"{self.distinct_4gram_ratio:.2f}"
        return (
            f"{self.answers} answers, {self.loop} loops, {self.empty} empty, {self.noise} noise; "
            f"distinct 4-grams {ratio}"
        )


def judge_run(texts: Sequence[str]) -> OutputQuality:
    """Counts the degenerate answers of a run."""
    reasons = [degeneration(text) for text in texts]
    bad = sum(reason is not None for reason in reasons)
    ratio = mean_distinct_ratio(texts)
    return OutputQuality(
        answers=len(texts),
        empty=reasons.count("empty"),
        noise=reasons.count("noise"),
        loop=reasons.count("loop"),
        share=round(bad / len(texts), 4) if texts else 0.0,
        distinct_4gram_ratio=None if ratio is None else round(ratio, 4),
        degenerate=bool(texts) and bad / len(texts) > RUN_SHARE,
    )
