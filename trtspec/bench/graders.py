"""Whether an answer is right: the last thing that it calls its answer, against the one that is known."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Literal

Grader = Literal["number", "choice", "exact", "contains"]
GRADERS: tuple[Grader, ...] = ("number", "choice", "exact", "contains")
NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)")
MARKED = re.compile(r"####\s*(.+)")  # where GSM8K writes the answer of a row
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
SAID = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)\s*\**\s*([^\n]+)", re.IGNORECASE)
LETTER = re.compile(r"\b([A-J])\b")


@dataclass(frozen=True)
class GradedTask:
    """One question with the answer that is right."""

    id: str
    question: str
    answer: str
    grader: Grader


def grade(task: GradedTask, text: str) -> bool:
    """Whether an answer is right; the last thing that it calls its answer counts."""
    if task.grader == "contains":
        return _plain(task.answer) in _plain(text)
    said = final_answer(text)
    if task.grader == "number":
        return number(said, last=True) == number(task.answer) is not None
    if task.grader == "choice":
        letters = LETTER.findall(said)
        return bool(letters) and letters[0] == task.answer
    return _plain(said) == _plain(task.answer)


def final_answer(text: str) -> str:
    """Behind the last ####, in the last \\boxed{}, behind the last `answer is`; else the whole text."""
    for pattern in (MARKED, BOXED, SAID):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip()
    return text.strip()


def number(text: str, last: bool = False) -> Decimal | None:
    """The only number in a text, or its last one; thousands may be separated by commas."""
    found = NUMBER.findall(text)
    if not found or (len(found) > 1 and not last):
        return None
    try:
        return Decimal(found[-1].replace(",", "").rstrip(".")).normalize()
    except InvalidOperation:
        return None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .*`\"'")
