"""What is done to questions before they are asked: conditions (`--under`) and prompts of a given length (`--isl`).

A head that was trained without a long context, without a bare prompt or without a system prompt shows it under that
condition. Prompts of a given length are made of text that somebody wrote: never of random ids, on which acceptance and
routing of experts are those of no user.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from trtspec.bench.datasets import Question, text_of
from trtspec.bench.raw_prompts import beyond_text
from trtspec.checkpoint.hub import cached_snapshot, hub_id_and_entry, local_directory
from trtspec.errors import TrtspecError, UsageError
from trtspec.files import read_text
from trtspec.report import say

if TYPE_CHECKING:
    from trtspec.checkpoint.tokenizer import KimiTokenizer

FORMS = "context=TOKENS, template=none, system=TEXT or system=FILE"
TITLE = 32  # characters of a system prompt that its condition is called by
BETWEEN = "\n\n"


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

    def holds(self, question: Question) -> bool:
        """Whether it can be asked under this condition and still be the same question."""
        return not (self.raw and beyond_text(question)) and not (self.context and question.replay)


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
            found.append(Condition(f"system prompt {_fingerprint(words)} ({title})", system=words))
        else:
            raise UsageError(f"--under {text} is not a condition", f"it is one of {FORMS}")
    if len({condition.label for condition in found}) < len(found):
        raise UsageError("--under names a condition twice", "name each once")
    return found


def _fingerprint(text: str) -> str:
    """Two texts that begin alike, or lie in files of one name, are two conditions."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:8]


def under(questions: Sequence[Question], conditions: Sequence[Condition]) -> list[Question]:
    """Every question under every condition that it can be asked under, condition by condition."""
    return [
        condition.applied(question) for condition in conditions for question in questions if condition.holds(question)
    ] or list(questions)


@dataclass(frozen=True)
class PromptSizes:
    """Prompts of a given length, by the tokenizer of `target` (a directory or a hub id). `raw`: no chat template is
    used; `thinking` as for the template, None where that decides."""

    target: str
    raw: bool = False
    thinking: bool | None = None

    def fitted(self, questions: Sequence[Question], tokens: int, option: str) -> list[Question]:
        """Every question with one turn whose prompt has `tokens` tokens: its text is cut, or put behind text of the
        other questions, which begins elsewhere for each, and numbered so that no two share a prefix. Tools, pictures
        and opening messages stay as they are and count. Raises UsageError where these are longer, or no tokenizer is
        here.

        `option` is how the length was asked for."""
        tokenizer = read_tokenizer(self.target, option)
        corpus = tokenizer.encode(BETWEEN.join(_words(question) for question in questions) + BETWEEN)
        between = tokenizer.encode(BETWEEN)
        found = []
        for place, question in enumerate(questions):
            fixed = self._tokens(tokenizer, _asking(question, f"({place}) "))
            if fixed >= tokens:
                message = f"{option}: {question.id} has {fixed} tokens beside its text"
                what = "chat template, tools, pictures and earlier messages take"
                raise UsageError(message, f"its {what} them: ask for more than {fixed} tokens")
            asked = tokenizer.encode("\n".join(question.turns))[fixed - tokens :]
            missing = tokens - fixed - len(asked) - len(between)
            if missing > 0:
                start = len(corpus) * place // len(questions)
                text = (corpus[start:] + corpus) * (1 + missing // len(corpus))
                asked = [*text[:missing], *between, *asked]
            found.append(_asking(question, f"({place}) {tokenizer.decode(asked)}"))
        counted = [self._tokens(tokenizer, question) for question in found]
        say(f"{option}: prompts of {min(counted)} to {max(counted)} tokens by the tokenizer of {self.target}")
        return found

    def _tokens(self, tokenizer: KimiTokenizer, question: Question) -> int:
        messages = question.request(0, [])
        if self.raw or question.raw:
            return len(tokenizer.encode(BETWEEN.join(text_of(message) for message in messages)))
        return len(tokenizer.encode_chat(messages, list(question.tools) or None, thinking=self.thinking)[1])


def read_tokenizer(target: str, option: str) -> KimiTokenizer:
    """Of a directory, or of a hub id that is in the cache. Raises UsageError where there is none."""
    from trtspec.checkpoint.tokenizer import KimiTokenizer

    remedy = "name the target with --tokenizer: a directory, or a hub id whose tokenizer `hf download ID` has fetched"
    try:
        hub_id, _ = hub_id_and_entry(target)
        directory = cached_snapshot(hub_id, complete=False) if hub_id else local_directory(target)
        if directory is None:
            raise UsageError(f"{hub_id} is not in the hub cache", "")
        return KimiTokenizer(directory)
    except TrtspecError as error:
        raise UsageError(f"{option}: no tokenizer of {target} is here ({error.message})", remedy) from None


def as_text(question: Question) -> Question:
    """All words of a question as one user message, without its tools and pictures."""
    return replace(question, turns=(_words(question),), opening=(), replay=(), parts=(), tools=())


def whole(question: Question) -> Question:
    """A question as a context can be put before it: as text where it is no more than text, else with what stays."""
    return question if beyond_text(question) else as_text(question)


def _words(question: Question) -> str:
    said = [text_of(message) for message in question.messages if message["content"]]
    return "\n".join([*said, *question.turns])


def _asking(question: Question, text: str) -> Question:
    """A question whose turns are one, with all their pictures and this text."""
    shown = tuple(itertools.chain.from_iterable(question.parts))
    return replace(question, turns=(text,), parts=(shown,) if shown else ())
