"""Conditions of `--under`: the same questions with a long context, without a chat template, with a system prompt.

A head that was trained without one of these accepts less there. A long context is text of the other questions, never
random ids, on which acceptance is that of no user.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten

from trtspec.bench.questions.datasets import Question, text_of
from trtspec.errors import Problem, UsageError
from trtspec.files import read_text

FORMS = "context=TOKENS, template=none, system=TEXT or system=FILE"
TITLE = 32  # characters of a system prompt in the label of its condition
CALIBRATION = 4000  # characters of text whose tokens the server counts


@dataclass(frozen=True)
class Condition:
    """One of `--under`. `context`: tokens of the prompt, filled with text of the other questions."""

    label: str
    context: int | None = None
    raw: bool = False
    system: str | None = None

    def applied(self, question: Question) -> Question:
        """The question under this condition, in a category of its own. `with_context` adds the context."""
        opening = question.opening
        if self.system is not None:
            kept = [message for message in opening if message["role"] != "system"]
            opening = ({"role": "system", "content": self.system}, *kept)
        name = f"{question.id} ({self.label})"
        return replace(question, id=name, category=self.label, raw=self.raw, opening=opening)


def parse(texts: Sequence[str]) -> list[Condition]:
    """The conditions that were asked for, behind the questions as they are. Raises UsageError."""
    found = [Condition("as they are")] if texts else []
    for text in texts:
        name, _, value = text.partition("=")
        if name == "context" and value.isdigit() and int(value):
            found.append(Condition(f"context of {int(value):,}", context=int(value)))
        elif name == "template" and value == "none":
            found.append(Condition("no chat template", raw=True))
        elif name == "system" and value:
            path = Path(value)
            words, title = (read_text(path), path.name) if path.is_file() else (value, shorten(value, TITLE))
            digest = hashlib.sha256(words.encode("utf-8")).hexdigest()[:8]  # two texts may begin alike
            found.append(Condition(f"system prompt {digest} ({title})", system=words))
        else:
            raise UsageError(f"`under` {text} is not a condition", f"it is one of {FORMS}")
    if len({condition.label for condition in found}) < len(found):
        raise UsageError("`under` names a condition twice", "name each once")
    return found


def under(questions: Sequence[Question], conditions: Sequence[Condition]) -> list[Question]:
    """Every question under every condition that can hold it; a raw prompt holds text alone."""
    asked = [c.applied(q) for c in conditions for q in questions if not (c.raw and q.beyond_text)]
    return asked if conditions else list(questions)


def left_out_problems(questions: Sequence[Question], conditions: Sequence[Condition]) -> list[Problem]:
    """A warning where raw prompts leave questions out."""
    left = [question for question in questions if question.beyond_text]
    if not left or not any(condition.raw for condition in conditions):
        return []
    message = (
        f"{len(left)} of {len(questions)} questions have tools, pictures or recorded calls, which a raw prompt cannot "
        f"hold (for example {left[0].id}); they are left out"
    )
    remedy = "read the figures as those of the other questions"
    return [Problem("TS-BENCH-RAW-PROMPTS", "warning", "`under` template=none", message, remedy)]


def calibration_text(questions: Sequence[Question]) -> str:
    """Text of the questions whose tokens the server counts, for `with_context`."""
    text = _corpus(questions)
    return (text * (1 + CALIBRATION // max(1, len(text))))[:CALIBRATION]


def with_context(
    questions: Sequence[Question], conditions: Sequence[Condition], characters_per_token: float
) -> list[Question]:
    """The questions with those of a long context behind text of the other questions, which begins elsewhere for each
    and is numbered, so that no two share a prefix."""
    sizes = {c.label: round(c.context * characters_per_token) for c in conditions if c.context}
    corpus, found = _corpus(questions), list[Question]()
    for place, question in enumerate(questions):
        missing = sizes.get(question.category, 0) - len(question.turns[0]) if question.turns else 0
        if missing > 0:
            start = len(corpus) * place // len(questions)
            filler = (corpus[start:] + corpus * (1 + missing // len(corpus)))[:missing]
            turns = (f"({place}) {filler}\n\n{question.turns[0]}", *question.turns[1:])
            question = replace(question, turns=turns)
        found.append(question)
    return found


def _corpus(questions: Sequence[Question]) -> str:
    texts = [text for q in questions for text in (*(text_of(m) for m in q.opening if m["content"]), *q.turns)]
    return "\n\n".join(dict.fromkeys(texts)) + "\n\n"
