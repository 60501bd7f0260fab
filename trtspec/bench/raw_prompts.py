"""Questions that are more than text: tools, pictures, and what a recorded message says beside its text exist only in
chat requests. Asked without them, a question is another one, and a figure on it has no right to the data set's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtspec.bench.datasets import Question
from trtspec.errors import Problem, UsageError

BESIDE_TEXT = {"tool_calls": "recorded tool calls", "reasoning_content": "recorded reasoning"}
TEXT_ALONE = "read the figures as those of text alone, or leave the option out"


def beyond_text(question: Question) -> list[str]:
    """What of a question only a chat request can hold, in words; empty where it is text alone."""
    found = ["tools"] * bool(question.tools) + ["pictures"] * question.has_pictures
    return found + [words for key, words in BESIDE_TEXT.items() if any(m.get(key) for m in question.messages)]


def text_alone(questions: Sequence[Question], option: str) -> tuple[list[Question], list[Problem]]:
    """The questions that can be asked without a chat template, as `option` wants it, and a warning where others are
    left out. Raises UsageError where none can."""
    kept = [question for question in questions if not beyond_text(question)]
    left = [question for question in questions if beyond_text(question)]
    if not left:
        return kept, []
    message = f"{_some(left, len(questions), beyond_text)}, which a raw prompt cannot hold (for example {left[0].id})"
    if not kept:
        raise UsageError(f"{option} asks nothing: {message}", f"leave {option} out, or take a data set of text")
    return kept, [Problem("TS-BENCH-RAW-PROMPTS", "warning", option, f"{message}; they are left out", TEXT_ALONE)]


def asked_as_text(questions: Sequence[Question], option: str) -> list[Problem]:
    """A warning where prompts of a given length, which are text alone, drop something of their questions."""
    reduced = [question for question in questions if _beyond_one_text(question)]
    if not reduced:
        return []
    message = f"{_some(reduced, len(questions), _beyond_one_text)} (for example {reduced[0].id})"
    message += "; the prompts hold only their text"
    return [Problem("TS-BENCH-SIZED-PROMPTS", "warning", option, message, TEXT_ALONE)]


def sessions_left_out(questions: Sequence[Question], option: str) -> list[Problem]:
    """A warning where recorded sessions are not asked in a context of a given length: each of their requests has the
    length that was recorded. Raises UsageError where there is nothing else."""
    left = [question for question in questions if question.replay]
    if not left:
        return []
    message = f"{len(left)} of {len(questions)} questions are recorded sessions, whose requests have the length that "
    message += f"was recorded (for example {left[0].id})"
    if len(left) == len(questions):
        raise UsageError(f"{option} asks nothing: {message}", f"leave {option} out, or take a data set of questions")
    remedy = "read the figures as those of the other questions, or leave the option out"
    return [Problem("TS-BENCH-SIZED-PROMPTS", "warning", option, f"{message}; they are left out", remedy)]


def _beyond_one_text(question: Question) -> list[str]:
    return beyond_text(question) + ["recorded requests"] * bool(question.replay)


def _some(found: Sequence[Question], total: int, parts: Callable[[Question], list[str]]) -> str:
    what = " and ".join(dict.fromkeys(part for question in found for part in parts(question)))
    return f"{len(found)} of {total} questions have {what}"
