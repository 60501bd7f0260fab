"""What is done to questions before they are asked: conditions (`--under`) and prompts of a given length (`--isl`).

A head that was trained without a long context, without a bare prompt or without a system prompt shows it under that
condition. Prompts of a given length are made of text that somebody wrote: never of random ids, on which acceptance and
routing of experts are those of no user.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten

import httpx

from trtspec.bench.client import Endpoint, RequestSampling, request_body, stream_answer
from trtspec.bench.datasets import Question
from trtspec.bench.raw_prompts import beyond_text
from trtspec.errors import TrtspecError, UsageError
from trtspec.files import read_text

FORMS = "context=TOKENS, template=none, system=TEXT or system=FILE"
SMALLEST = 32  # tokens; a chat template alone takes about as many
TRIALS = 4
PROBED = 4
CLOSE = 0.01
TITLE = 32  # characters of a system prompt that its condition is called by
FIRST_GUESS = 4.0  # characters per token


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
        condition.applied(question)
        for condition in conditions
        for question in questions
        if not (condition.raw and beyond_text(question))
    ] or list(questions)


async def fitted(
    client: httpx.AsyncClient, endpoint: Endpoint, questions: Sequence[Question], tokens: int
) -> list[Question]:
    """Every question with one turn whose prompt has about `tokens` tokens as the server counts them: cut, or behind
    text of the other questions, which begins elsewhere for each so that no two share a prefix.

    The server counts the first PROBED of them; the rest follow their characters per token. Raises UsageError below
    SMALLEST, TrtspecError where the server does not count prompts."""
    if tokens < SMALLEST:
        raise UsageError(f"--isl {tokens} is less than {SMALLEST} tokens", "a chat template alone takes about as many")
    corpus = "\n\n".join(_words(question) for question in questions)
    short = await prompt_tokens(client, endpoint, replace(questions[0], turns=(".",), opening=(), replay=(), parts=()))
    lengths = [round((tokens - short) * FIRST_GUESS)]
    for place, question in enumerate(questions[:PROBED]):
        length = lengths[-1]
        for _ in range(TRIALS):
            counted = await prompt_tokens(client, endpoint, _sized(question, corpus, (place, len(questions)), length))
            if abs(counted - tokens) <= max(1, CLOSE * tokens):
                break
            length = max(1, round(length * (tokens - short) / max(1, counted - short)))
        lengths.append(length)
    typical = round(sum(lengths[1:]) / len(lengths[1:]))
    return [
        # the number at the beginning keeps what was counted just now out of the server's prefix cache
        _sized(
            question, corpus, (place, len(questions)), (lengths[1:] + [typical] * len(questions))[place], f"({place}) "
        )
        for place, question in enumerate(questions)
    ]


def _words(question: Question) -> str:
    said = [message["content"] for message in question.messages if isinstance(message["content"], str)]
    return "\n".join([*said, *question.turns])


def _sized(question: Question, corpus: str, at: tuple[int, int], length: int, before: str = "") -> Question:
    """`length` characters: the question at the end, other questions' text from place `at` (i of n) before it."""
    asked = _words(question)[-length:]
    missing = length - len(asked) - 2
    if missing > 0:
        start = len(corpus) * at[0] // at[1]
        text = (corpus[start:] + "\n\n" + corpus) * (1 + missing // max(1, len(corpus)))
        asked = f"{text[:missing]}\n\n{asked}"
    return replace(question, turns=(before + asked,), opening=(), parts=(), replay=(), tools=())


async def prompt_tokens(client: httpx.AsyncClient, endpoint: Endpoint, question: Question) -> int:
    """As the server counts the prompt, from an answer of one token."""
    body = request_body(endpoint, question.request(0, []), RequestSampling(max_tokens=1), 0)
    body.pop("min_tokens", None)
    answer = await stream_answer(client, endpoint, body, question.id, question.category, 0)
    if answer.error or not answer.prompt_tokens:
        reason = answer.error or "it does not say how many tokens a prompt has"
        raise TrtspecError(f"{endpoint.base_url} cannot be given prompts of a length: {reason}", "leave --isl out")
    return answer.prompt_tokens
