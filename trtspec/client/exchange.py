"""One request and its answer.

A recording is a JSONL file of exchanges, and every verdict is about exchanges.

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
    """Natural logarithms of probabilities by the scoring server.

    `chosen`: of one token. `top`: of the likeliest tokens, in order.
    """

    chosen: float
    top: tuple[float, ...]

    @property
    def nats_behind(self) -> float:
        """How far the chosen token is behind the likeliest."""
        return self.top[0] - self.chosen


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """`key`: exchanges with equal keys ask for the same output.

    `kind`: a probe of bench/check/kinds.py. `run`: ids, chat, stream, warm, crowd, later, again, or
    withheld if it is not asked. `body` lacks the model's name. `template_ids`: the prompt of a chat
    by our own chat template.

    The rest is the answer. `raw`: the text of `token_ids` before any parser. `counted`: tokens so
    far at each chunk. `arrivals`: network reads that brought tokens. `steps`: verification steps,
    the more of what the chunks show and the server claims. `choices`: all choices of a request with
    `n`. `scores`: one for each of `token_ids`, by the server without speculation.
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
        return self.key, self.run

    @property
    def prompt(self) -> Sequence[int]:
        """The prompt as it should be read."""
        return self.body.get("prompt") or self.template_ids

    @property
    def size(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) or self.completion_tokens or 0

    @property
    def refused(self) -> bool:
        """Whether the server refused the request by name."""
        status = self.status
        return status is not None and 400 <= status < 500 and status not in (408, 429)

    @property
    def answered(self) -> bool:
        return self.error is None and self.finish is not None


async def ask(client: httpx.AsyncClient, model: str, asked: Exchange, timeout: float) -> Exchange:
    """Sends the request and returns the exchange with its answer.

    A failure is returned in `error`, never raised.
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
        for choice in reply["choices"]:
            choice["delta"] = choice.pop("message", None) or {"content": choice.get("text")}
            for index, call in enumerate(choice["delta"].get("tool_calls") or []):
                call.setdefault("index", index)
        absorb(answer, reply, time.perf_counter())
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
        answer.error = f"the response is no chat completion ({type(error).__name__}: {error})"
    return answered(asked, answer)


def answered(asked: Exchange, answer: Answer) -> Exchange:
    """The request with its answer."""
    counts = counts_of(answer)
    claimed = [counts.steps] if counts else []
    shown = [len(set(answer.counted)) - 1] if answer.counted else []
    steps = max([*claimed, *shown], default=None)
    chat = asked.path == CHAT
    # a chat's stream may leave out the chunks in which its parser held text back, and their tokens
    whole = not chat or len(answer.token_ids) >= answer.completion_tokens
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
        token_ids=tuple(answer.token_ids) if whole else (),
        counted=tuple(answer.counted),
        arrivals=len({moment for moment, _ in answer.chunks}),
        steps=steps,
    )


LINES: TypeAdapter[Exchange] = TypeAdapter(Exchange)


def to_line(exchange: Exchange) -> bytes:
    """One line of a recording."""
    return LINES.dump_json(exchange, exclude_defaults=True) + b"\n"


def read_recording(path: Path) -> list[Exchange]:
    """The exchanges of a file. Raises UsageError for a file that is not a recording."""
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
