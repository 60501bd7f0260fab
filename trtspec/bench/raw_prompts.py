"""Questions that a raw prompt cannot hold: tools, pictures, and what a recorded message says beside its text exist only
in chat requests. Asked without them, a question is another one, and a figure on it has no right to the data set's name.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtspec.bench.datasets import Question
from trtspec.errors import Problem, UsageError

BESIDE_TEXT = {"tool_calls": "recorded tool calls", "reasoning_content": "recorded reasoning"}


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
    what = " and ".join(dict.fromkeys(part for question in left for part in beyond_text(question)))
    some = f"{len(left)} of {len(questions)} questions have {what}"
    message = f"{some}, which a raw prompt cannot hold (for example {left[0].id})"
    if not kept:
        raise UsageError(f"{option} asks nothing: {message}", f"leave {option} out, or take a data set of text")
    remedy = "read the figures as those of text alone, or leave the option out"
    return kept, [Problem("TS-BENCH-RAW-PROMPTS", "warning", option, f"{message}; they are left out", remedy)]
