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
FAR = 0.1  # from the wanted length: it cannot be reached
FIRST_GUESS = 4.0  # characters per token
MOST_CHARACTERS = 64  # per token, of no text that anybody wrote


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
    client: httpx.AsyncClient, endpoint: Endpoint, questions: Sequence[Question], tokens: int, option: str
) -> list[Question]:
    """Every question with one turn whose prompt has about `tokens` tokens as the server counts them: cut, or behind
    text of the other questions, which begins elsewhere for each so that no two share a prefix.

    The server counts the first PROBED of them; the rest follow their characters per token. `option` is how the length
    was asked for. Raises UsageError below SMALLEST and where the chat template alone is longer, TrtspecError where the
    server does not count prompts or what it counts does not come near."""
    if tokens < SMALLEST:
        raise UsageError(f"{option} is less than {SMALLEST} tokens", "a chat template alone takes about as many")
    empty = replace(questions[0], turns=(".",), opening=(), replay=(), parts=(), tools=())
    length = _Length(client, endpoint, tokens, option, await prompt_tokens(client, endpoint, empty, option))
    if length.short >= tokens:
        message = f"{option}: {endpoint.base_url} counts {length.short} tokens for a prompt without words"
        raise UsageError(message, f"its chat template takes them: ask for more than {length.short} tokens")
    corpus = "\n\n".join(_words(question) for question in questions)
    lengths: list[int] = []
    for place, question in enumerate(questions[:PROBED]):
        first = lengths[-1] if lengths else round((tokens - length.short) * FIRST_GUESS)
        lengths.append(await length.found(question, corpus, (place, len(questions)), first))
    lengths += [round(sum(lengths) / len(lengths))] * (len(questions) - len(lengths))
    return [
        # the mark at the beginning keeps what was counted just now out of the server's prefix cache
        _sized(question, corpus, (place, len(questions)), lengths[place], f"({place}) ")
        for place, question in enumerate(questions)
    ]


@dataclass(frozen=True)
class _Length:
    """A search for the characters of a prompt of `tokens` tokens. `short`: what the server counts for one word."""

    client: httpx.AsyncClient
    endpoint: Endpoint
    tokens: int
    option: str
    short: int

    async def found(self, question: Question, corpus: str, at: tuple[int, int], length: int) -> int:
        """Of one question, the closest of TRIALS. Raises TrtspecError where none is within FAR."""
        tried: list[tuple[int, int, int]] = []  # distance, characters, tokens
        for _ in range(TRIALS):
            prompt = _sized(question, corpus, at, length, f"[{at[0]}] ")
            counted = await prompt_tokens(self.client, self.endpoint, prompt, self.option)
            tried.append((abs(counted - self.tokens), length, counted))
            if tried[-1][0] <= max(1, CLOSE * self.tokens):
                break
            length = max(1, round(length * (self.tokens - self.short) / max(1, counted - self.short)))
            length = min(length, MOST_CHARACTERS * self.tokens)
        distance, length, counted = min(tried)
        if distance > max(4, FAR * self.tokens):
            message = (
                f"{self.option}: {self.endpoint.base_url} counts {counted} tokens in a prompt of {length} characters"
            )
            raise TrtspecError(message, f"leave {self.option} out, or ask the server, not a proxy")
        return length


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


async def prompt_tokens(client: httpx.AsyncClient, endpoint: Endpoint, question: Question, option: str) -> int:
    """As the server counts the prompt, from an answer of one token; `option` asks for a length."""
    body = request_body(endpoint, question.request(0, []), RequestSampling(max_tokens=1), 0)
    body.pop("min_tokens", None)
    answer = await stream_answer(client, endpoint, body, question.id, question.category, 0)
    if answer.error or not answer.prompt_tokens:
        reason = answer.error or "it does not say how many tokens a prompt has"
        raise TrtspecError(f"{endpoint.base_url} cannot be given prompts of a length: {reason}", f"leave {option} out")
    return answer.prompt_tokens
