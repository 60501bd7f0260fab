"""Greedy answers of one server with the gap between the two best tokens at every position: what the gate compares."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from trtspec import files
from trtspec.bench import adapters
from trtspec.bench.acceptance import TurnCounts
from trtspec.bench.client import Answer, Endpoint, RequestSampling, complete, new_client, request_body
from trtspec.bench.datasets import Question
from trtspec.bench.findings import RequestLimits
from trtspec.errors import TrtspecError, UsageError

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Finds a name in the documentation.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
TOOL_QUESTION = "Look up `parse_args` in the documentation."
TOOL_TOKENS = 256


@dataclass(frozen=True)
class Token:
    """One emitted token, the runner-up, and the gap between the best and the second logprob in nats."""

    text: str
    second: str | None
    gap: float | None


@dataclass(frozen=True)
class Transcript:
    """One greedy answer. `tokens` is None where the server gives no logprobs; then only texts can be compared."""

    question: str
    category: str
    messages: list[dict[str, Any]]
    text: str
    finish_reason: str | None
    tokens: list[Token] | None


@dataclass(frozen=True)
class ToolReply:
    """What came back for a request with tools. `error` holds the server's refusal."""

    calls: list[dict[str, str]] = field(default_factory=list)
    content: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Recording:
    """All answers of one server at temperature 0; written by --record, read by --against. `withheld` says why no
    log-probabilities were asked for."""

    url: str
    server: dict[str, Any]
    max_tokens: int
    transcripts: list[Transcript]
    tool: ToolReply
    counts: list[TurnCounts] = field(default_factory=list)
    withheld: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}


def read_recording(path: Path) -> Recording:
    """A file of --record. Raises UsageError when it is something else."""
    try:
        raw = files.read_object(path)
        read = TypeAdapter(Recording).validate_json(json.dumps(raw, allow_nan=False), strict=True)
        if any({"name", "arguments"} - set(call) for call in read.tool.calls):
            raise ValueError("a tool call has no name or no arguments")
        asked = [item.messages[-1]["content"] for item in read.transcripts]
        if not asked or not all(isinstance(text, str) for text in asked) or read.max_tokens < 1:
            raise ValueError("it holds no prompt that was answered")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _no_recording(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except KeyError as error:
        raise _no_recording(path, f"{error} is missing") from None
    except (OSError, TrtspecError, ValueError, IndexError) as error:
        raise _no_recording(path, str(error)) from None
    return read


def _no_recording(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{path} is not a recording of `trtspec check --record`: {reason}",
        "record one on the server without speculation: trtspec check URL --record FILE",
    )


PROBES = 4  # answers that show whether a server speculates


async def record(
    url: str,
    questions: Sequence[Question],
    max_tokens: int,
    concurrency: int,
    model: str | None = None,
    limits: Callable[[adapters.DetectedServer], RequestLimits] = lambda server: {},
    baseline: bool = False,
) -> Recording:
    """Asks the first turn of every question at temperature 0, then one question with a tool.

    Log-probabilities are not asked for where `limits` says that they end a speculating engine of this release, save of
    a server that shows by a few answers that it accepts no drafts; a `baseline` that does not tell is taken for plain.
    """
    async with new_client(url, concurrency) as client:
        server = await adapters.detect_server(client, model)
        endpoint = Endpoint(url, server.model)
        before = await adapters.read_counters(client, server)
        deadly = "logprobs" in limits(server).get("end_engine", ())
        if deadly:
            deadly = not await _runs_plain(client, endpoint, questions[:PROBES], max_tokens, baseline)
        pairs = await ask_all(client, endpoint, questions, max_tokens, concurrency, logprobs=not deadly)
        after = await adapters.read_counters(client, server)
        counts = [found for _, answer in pairs if (found := adapters.counts_of(answer)) is not None]
        if before and after and not counts:
            tokens = sum(answer.completion_tokens for _, answer in pairs)
            counts = [adapters.counts_between(before, after, "all", tokens)]
        tool = await ask_tool(client, endpoint)
    withheld = f"they can end a speculating engine of release {server.version}" if deadly else None
    answers = [transcript for transcript, _ in pairs]
    return Recording(url, server.to_dict(), max_tokens, answers, tool, counts, withheld)


async def _runs_plain(
    client: httpx.AsyncClient, endpoint: Endpoint, questions: Sequence[Question], max_tokens: int, untold: bool
) -> bool:
    """Whether a few answers, asked for without log-probabilities, came without accepted drafts; `untold` where none of
    them says."""
    pairs = await ask_all(client, endpoint, questions, max_tokens, 1, logprobs=False)
    counts = [found for _, answer in pairs if (found := adapters.counts_of(answer)) is not None]
    return not any(found.accepted for found in counts) if counts else untold


async def ask_all(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    questions: Sequence[Question],
    max_tokens: int,
    concurrency: int,
    logprobs: bool = True,
) -> list[tuple[Transcript, Answer]]:
    """In order of the questions. The first refusal of logprobs turns them off for the rest."""
    slots = asyncio.Semaphore(concurrency)
    first = await ask(client, endpoint, questions[0], max_tokens, logprobs=logprobs)
    with_logprobs = logprobs and first is not None

    async def one(question: Question) -> tuple[Transcript, Answer]:
        async with slots:
            found = await ask(client, endpoint, question, max_tokens, logprobs=with_logprobs)
            if found is None:
                found = await ask(client, endpoint, question, max_tokens, logprobs=False)
            assert found is not None
            return found

    rest = await asyncio.gather(*(one(question) for question in questions[1:]))
    return [first or await one(questions[0]), *rest]


async def ask(
    client: httpx.AsyncClient, endpoint: Endpoint, question: Question, max_tokens: int, logprobs: bool
) -> tuple[Transcript, Answer] | None:
    """One greedy answer; None when the server refuses the request with logprobs."""
    messages = [*question.opening, {"role": "user", "content": question.turns[0]}]
    body = request_body(endpoint, messages, RequestSampling(max_tokens, 0.0), 0)
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": 2}
    try:
        reply = await complete(client, endpoint, body)
    except TrtspecError:
        if logprobs:
            return None
        raise
    choice = reply["choices"][0]
    message = choice["message"]
    text = (message.get("reasoning_content") or "") + (message.get("content") or "")
    content = (choice.get("logprobs") or {}).get("content")
    tokens = [read_token(entry) for entry in content] if content else None
    answer = Answer(question.id, question.category, 0, started=0.0)
    answer.completion_tokens = (reply.get("usage") or {}).get("completion_tokens") or 0
    answer.tokens_per_iteration = choice.get("avg_decoded_tokens_per_iter")
    answer.spec_decode = choice.get("spec_decode")
    return Transcript(question.id, question.category, messages, text, choice.get("finish_reason"), tokens), answer


def read_token(entry: dict[str, Any]) -> Token:
    """One entry of choices[].logprobs.content. The runner-up is the best of top_logprobs that is not the token."""
    top = sorted(entry.get("top_logprobs") or [], key=lambda item: -item["logprob"])
    others = [item for item in top if item["token"] != entry["token"]]
    gap = round(abs(top[0]["logprob"] - top[1]["logprob"]), 6) if len(top) > 1 else None
    return Token(entry["token"], others[0]["token"] if others else None, gap)


async def ask_tool(client: httpx.AsyncClient, endpoint: Endpoint) -> ToolReply:
    """One greedy request with a tool; a refusal is kept as `error`."""
    messages = [{"role": "user", "content": TOOL_QUESTION}]
    body = request_body(endpoint, messages, RequestSampling(TOOL_TOKENS, 0.0), 0)
    try:
        reply = await complete(client, endpoint, {**body, "tools": [TOOL], "tool_choice": "auto"})
    except TrtspecError as error:
        return ToolReply(error=error.message)
    message = reply["choices"][0]["message"]
    calls = [
        {"name": str(call["function"]["name"]), "arguments": str(call["function"]["arguments"])}
        for call in message.get("tool_calls") or []
    ]
    return ToolReply(calls, message.get("content") or "")
