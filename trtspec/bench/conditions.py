"""The same questions under several conditions (`--under`): behind a long context, without a chat template, with a
system prompt. A head that was trained without one of them shows it here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtspec.bench.datasets import Question
from trtspec.errors import UsageError
from trtspec.files import read_text

FORMS = "context=TOKENS, template=none, system=TEXT or system=FILE"


@dataclass(frozen=True)
class Condition:
    """One of `--under`. `context`: tokens of the prompt, cut or filled with text of other questions."""

    label: str
    context: int | None = None
    raw: bool = False
    system: str | None = None

    def applied(self, question: Question) -> Question:
        """A question under this condition, in a category of its own. The context is filled where tokens are counted."""
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
            words = read_text(path) if path.is_file() else value
            found.append(
                Condition("system prompt" if not path.is_file() else f"system prompt {path.name}", system=words)
            )
        else:
            raise UsageError(f"--under {text} is not a condition", f"it is one of {FORMS}")
    if len({condition.label for condition in found}) < len(found):
        raise UsageError("--under names a condition twice", "name each once")
    return found


def under(questions: Sequence[Question], conditions: Sequence[Condition]) -> list[Question]:
    """Every question under every condition, condition by condition."""
    return [condition.applied(question) for condition in conditions for question in questions] or list(questions)
