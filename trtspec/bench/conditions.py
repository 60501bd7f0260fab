"""What is done to questions before they are asked: conditions (`--under`) and prompts of a given length (`--isl`).

A head that was trained without a long context, without a bare prompt or without a system prompt shows it under that
condition. Prompts of a given length are made of text that somebody wrote: never of random ids, on which acceptance and
routing of experts are those of no user.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten

import httpx

from trtspec.bench.client import Endpoint, RequestSampling, request_body, stream_answer
from trtspec.bench.datasets import Message, Question, text_of
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


async def fitted(
    client: httpx.AsyncClient, endpoint: Endpoint, questions: Sequence[Question], tokens: int, option: str
) -> list[Question]:
    """Every question with one turn whose prompt has about `tokens` tokens as the server counts them: its text is cut,
    or put behind text of the other questions, which begins elsewhere for each so that no two share a prefix. Tools,
    pictures and opening messages stay as they are and count.

    The server counts the first PROBED of them whole, and of the rest what stays; their text follows the characters per
    token. `option` is how the length was asked for. Raises UsageError below SMALLEST and where what stays is longer,
    TrtspecError where the server does not count prompts or what it counts does not come near."""
    if tokens < SMALLEST:
        raise UsageError(f"{option} is less than {SMALLEST} tokens", "a chat template alone takes about as many")
    fixed = await _fixed_tokens(client, endpoint, questions, option)
    most = max(fixed)
    if most >= tokens:
        question = questions[fixed.index(most)]
        where, what = "for a prompt without words", "chat template takes"
        if _stays(question):
            where, what = (
                f"beside the text of {question.id}",
                "chat template, tools, pictures and earlier messages take",
            )
        message = f"{option}: {endpoint.base_url} counts {most} tokens {where}"
        raise UsageError(message, f"its {what} them: ask for more than {most} tokens")
    corpus = "\n\n".join(_words(question) for question in questions)
    per_token, lengths = FIRST_GUESS, list[int]()
    for place, question in enumerate(questions[:PROBED]):
        search = _Length(client, endpoint, tokens, option, fixed[place])
        at = (place, len(questions))
        lengths.append(await search.found(question, corpus, at, max(1, round(per_token * (tokens - fixed[place])))))
        per_token = lengths[-1] / (tokens - fixed[place])
    per_token = sum(lengths) / sum(tokens - short for short in fixed[:PROBED])
    lengths += [max(1, round(per_token * (tokens - short))) for short in fixed[PROBED:]]
    return [
        # the mark at the beginning keeps what was counted just now out of the server's prefix cache
        _sized(question, corpus, (place, len(questions)), lengths[place], f"({place}) ")
        for place, question in enumerate(questions)
    ]


async def _fixed_tokens(
    client: httpx.AsyncClient, endpoint: Endpoint, questions: Sequence[Question], option: str
) -> list[int]:
    """Of each question, the tokens of all but its text: equal tools, pictures and openings are counted once."""
    counted: dict[str, int] = {}
    found = []
    for question in questions:
        key = json.dumps(_stays(question))
        if key not in counted:
            counted[key] = await prompt_tokens(client, endpoint, _asking(question, "."), option)
        found.append(counted[key])
    return found


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


def as_text(question: Question) -> Question:
    """All words of a question as one user message, without its tools and pictures."""
    return replace(question, turns=(_words(question),), opening=(), replay=(), parts=(), tools=())


def whole(question: Question) -> Question:
    """A question as a context can be put before it: as text where it is no more than text, else with what stays."""
    return question if beyond_text(question) else as_text(question)


def _words(question: Question) -> str:
    said = [text_of(message) for message in question.messages if message["content"]]
    return "\n".join([*said, *question.turns])


def _stays(question: Question) -> list[Message]:
    """What a length leaves alone: pictures, opening messages and tools."""
    return [*itertools.chain.from_iterable(question.parts), *question.opening, *question.tools]


def _asking(question: Question, text: str) -> Question:
    """A question whose turns are one, with all their pictures and this text."""
    shown = tuple(itertools.chain.from_iterable(question.parts))
    return replace(question, turns=(text,), parts=(shown,) if shown else ())


def _sized(question: Question, corpus: str, at: tuple[int, int], length: int, before: str = "") -> Question:
    """`length` characters: the question at the end, other questions' text from place `at` (i of n) before it."""
    asked = "\n".join(question.turns)[-length:]
    missing = length - len(asked) - 2
    if missing > 0:
        start = len(corpus) * at[0] // at[1]
        text = (corpus[start:] + "\n\n" + corpus) * (1 + missing // max(1, len(corpus)))
        asked = f"{text[:missing]}\n\n{asked}"
    return _asking(question, before + asked)


async def prompt_tokens(client: httpx.AsyncClient, endpoint: Endpoint, question: Question, option: str) -> int:
    """As the server counts the prompt, from an answer of one token; `option` asks for a length."""
    body = request_body(endpoint, question.request(0, []), RequestSampling(max_tokens=1), 0)
    body.pop("min_tokens", None)
    if question.tools:
        body["tools"] = list(question.tools)
    answer = await stream_answer(client, endpoint, body, question.id, question.category, 0)
    if answer.error or not answer.prompt_tokens:
        reason = answer.error or "it does not say how many tokens a prompt has"
        raise TrtspecError(f"{endpoint.base_url} cannot be given prompts of a length: {reason}", f"leave {option} out")
    return answer.prompt_tokens
