"""Exchanges of `trtspec check`: a request to a server with its answer.

A recording is a JSONL file of exchanges, such as:

{"key": "text 3", "kind": "text", "run": "stream", "path": "/v1/completions", "body": {...},
"token_ids": [...], ...}
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import TypeAdapter

from trtspec.client.client import CHAT, Answer, RequestFailed, absorb, complete, stream_answer
from trtspec.client.servers import counts_of
from trtspec.errors import UsageError
from trtspec.files import missing, read_bytes


@dataclass(frozen=True)
class Score:
    """Log-probabilities of the scoring server at one position of an answer, in nats.

    chosen: log-probability of the answer's token
    top: log-probabilities of the likeliest tokens, in decreasing order
    """

    chosen: float
    top: tuple[float, ...]

    @property
    def nats_behind(self) -> float:
        """Difference in log-probability between the likeliest token and the answer's token."""
        return self.top[0] - self.chosen


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Request of a check, with its answer. The fields from `error` on are the answer.

    key: name of the request, equal for requests that ask for the same output
    kind: probe that the request serves, one of bench/check/kinds.py
    run: way in which the request is sent, such as ids, chat or warm, or `withheld`
    path: path of the URL
    body: JSON of the request, without the model's name
    template_ids: token ids of a chat's prompt in our own chat template
    error: message if the request failed
    status: HTTP status if it is not 200
    calls: id, name and arguments of each tool call
    unindexed: number of chunks of tool calls that lack the call's index
    finish: finish_reason of the server
    prompt_ids: token ids of the prompt as the server read it
    raw: text of `token_ids` before any parser
    counted: total number of tokens after each chunk
    arrivals: number of network reads that contained tokens
    steps: number of verification steps, the larger of the number of chunks and the server's number
    choices: texts or token ids of all choices, for a request with `n`
    scores: score of each entry of `token_ids`, by the server without speculation
    """

    key: str
    kind: str
    run: str
    path: str = CHAT
    body: dict[str, Any] = field(default_factory=dict)
    template_ids: tuple[int, ...] = ()
    error: str | None = None
    status: int | None = None
    content: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, str], ...] = ()
    unindexed: int = 0
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    raw: str = ""
    counted: tuple[int, ...] = ()
    arrivals: int = 0
    steps: int | None = None
    choices: tuple[str, ...] = ()
    scores: tuple[Score, ...] = ()

    @property
    def name(self) -> tuple[str, str]:
        """Key and run, which identify an exchange in its recording."""
        return self.key, self.run

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt as the server should read it."""
        return self.body.get("prompt") or self.template_ids

    @property
    def size(self) -> int:
        """Number of tokens of the answer. 0 if the server reports neither ids nor usage."""
        return len(self.token_ids) or self.completion_tokens or 0

    @property
    def refused(self) -> bool:
        """Whether the server refused the request as invalid.

        A timeout (408) or a busy server (429) does not count as a refusal.
        """
        status = self.status
        return status is not None and 400 <= status < 500 and status not in (408, 429)

    @property
    def answered(self) -> bool:
        """Whether the answer is complete."""
        return self.error is None and self.finish is not None


async def ask(client: httpx.AsyncClient, model: str, asked: Exchange, timeout: float) -> Exchange:
    """Sends a request and returns the exchange with its answer.

    A failure is returned in the field `error`, never raised. `timeout`: seconds until a streamed
    answer must be complete.
    """
    body = {"model": model, **asked.body}
    if body.get("stream"):
        answer = await stream_answer(client, body, asked.key, asked.kind, limit_s=timeout)
        return answered(asked, answer)
    answer = Answer(asked.key, asked.kind, 0, started=time.perf_counter())
    try:
        reply = await complete(client, asked.path, body)
        if "n" in body:
            choices = [str(each.get("token_ids") or each["text"]) for each in reply["choices"]]
            asked = replace(asked, choices=tuple(choices))
        # a whole response is read like a stream with one event
        for choice in reply["choices"]:
            choice["delta"] = choice.pop("message", None) or {"content": choice.get("text")}
            for index, call in enumerate(choice["delta"].get("tool_calls") or []):
                call.setdefault("index", index)
        absorb(answer, reply, time.perf_counter())
        # one event does not show verification steps
        answer.counted = []
    except RequestFailed as failure:
        answer.error = failure.message
        answer.status = failure.status
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        answer.error = f"the response is not a chat completion ({type(error).__name__}: {error})"
    return answered(asked, answer)


def answered(asked: Exchange, answer: Answer) -> Exchange:
    """Returns the exchange of a request with the fields of its answer."""
    counts = counts_of(answer)
    step_counts = []
    if counts:
        step_counts.append(counts.steps)
    if answer.counted:
        # the first count is for the token of the prefill, which is not a verification step
        distinct_counts = set(answer.counted)
        step_counts.append(len(distinct_counts) - 1)
    steps = max(step_counts, default=None)
    chat = asked.path == CHAT
    # a chat's stream may omit the chunks in which its parser held text back, with their token ids
    has_all_ids = not chat or len(answer.token_ids) >= answer.completion_tokens
    return replace(
        asked,
        error=answer.error,
        status=answer.status,
        content=answer.text,
        reasoning=answer.reasoning,
        calls=tuple(answer.tool_calls),
        unindexed=answer.unindexed,
        finish=answer.finish_reason,
        prompt_tokens=answer.prompt_tokens or None,
        completion_tokens=answer.completion_tokens or None,
        prompt_ids=tuple(answer.prompt_ids) if chat else (),
        token_ids=tuple(answer.token_ids) if has_all_ids else (),
        counted=tuple(answer.counted),
        arrivals=len({moment for moment, _ in answer.chunks}),
        steps=steps,
    )


LINES: TypeAdapter[Exchange] = TypeAdapter(Exchange)


def to_line(exchange: Exchange) -> bytes:
    """Returns the line of a recording for an exchange, as UTF-8 JSON with a line feed."""
    return LINES.dump_json(exchange, exclude_defaults=True) + b"\n"


def read_recording(path: Path) -> list[Exchange]:
    """Reads the exchanges of a recording, in the order of its lines.

    Raises UsageError if the file does not exist, or is not a recording.
    """
    remedy = "make it with: trtspec check URL --record FILE"
    try:
        lines = read_bytes(path, remedy=remedy).splitlines()
    except FileNotFoundError:
        raise missing(path, remedy) from None
    exchanges = []
    for number, line in enumerate(lines, 1):
        try:
            exchanges.append(LINES.validate_json(line))
        except ValueError:
            message = f"{path}, line {number}, is not an exchange of a recording"
            raise UsageError(message, remedy) from None
    if not exchanges:
        raise UsageError(f"{path} has no exchanges", remedy)
    return exchanges
