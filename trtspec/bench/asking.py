"""What the gate sends to a server and what comes back, which may be no answer: every failure is kept as what it was."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from trtspec.bench.transcript import AnswerTiming, AskedPrompt, Token, ToolReply, Transcript
from trtspec.client.client import (
    Answer,
    Endpoint,
    RequestSampling,
    complete,
    finite,
    request_body,
    stream_answer,
    token_count,
)
from trtspec.errors import TrtspecError

TOP = 5  # tokens told at each place: where three are as good as equal, rounding may choose the third
PAIR = 2  # for servers that refuse TOP: the gap needs the best two
TICK = 0.02  # seconds
TOGETHER = 0.001  # seconds between reads of one arrival
GIVE_UP = 8  # requests that failed one after another: the rest would fail as well
NOT_ASKED = "not asked: the requests before it failed one after another"
MISSHAPEN = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


@dataclass
class Asker:
    """Sends questions to one server. `timeout`: seconds that one answer may take. `stopped` says why it gave up."""

    client: httpx.AsyncClient
    endpoint: Endpoint
    max_tokens: int
    timeout: float
    concurrency: int
    logprobs: bool = False
    top: int = TOP
    per_chunk: bool = True  # whether usage is asked for in every chunk
    began: float = field(default_factory=time.perf_counter)
    stopped: str | None = None
    lags: list[tuple[float, float]] = field(default_factory=list)
    _failures: int = 0

    async def all(
        self, prompts: Sequence[AskedPrompt], streamed: bool, concurrency: int | None = None
    ) -> list[Transcript]:
        """Answers in order of the prompts."""
        slots = asyncio.Semaphore(concurrency or self.concurrency)

        async def one(prompt: AskedPrompt) -> Transcript:
            async with slots:
                return await (self.stream(prompt) if streamed else self.ask(prompt))

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    async def watch_clock(self) -> None:
        """Notes when this process is held up: what arrives then seems to arrive at once, and late."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            if now - before > 3 * TICK:
                self.lags.append((before, now))

    def _timing(
        self, started: float, finished: float, first: float | None = None, last: float | None = None
    ) -> AnswerTiming:
        lag = sum(max(0.0, min(end, finished) - max(start, started)) for start, end in self.lags)
        return AnswerTiming(
            started=started - self.began,
            first=None if first is None else first - started,
            last=None if last is None else last - started,
            total=finished - started,
            lag=lag,
        )

    def body(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> dict[str, Any]:
        return {**request_body(self.endpoint, messages, RequestSampling(self.max_tokens, 0.0), 0), **extra}

    async def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """One response. Raises TrtspecError with what went wrong, the time limit included."""
        if self.stopped:
            raise TrtspecError(NOT_ASKED)
        try:
            async with asyncio.timeout(self.timeout):
                return await complete(self.client, self.endpoint, body)
        except TimeoutError:
            raise TrtspecError(f"no answer within {self.timeout:g} s (--timeout)") from None

    async def ask(self, prompt: AskedPrompt) -> Transcript:
        """One answer that is not streamed, with log-probabilities where they are asked for."""
        body, started = self.body(prompt.messages, prompt.extra), time.perf_counter()
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top}
        try:
            found = read_answer(prompt, await self.reply(body))
        except TrtspecError as error:
            return self._failed(prompt, error.message)
        except MISSHAPEN as error:
            return self._failed(prompt, f"the answer is no chat completion ({type(error).__name__}: {error})")
        self._failures = 0
        return replace(found, timing=self._timing(started, time.perf_counter()))

    async def stream(self, prompt: AskedPrompt) -> Transcript:
        """One streamed answer. Log-probabilities are left out, as users do."""
        if self.stopped:
            return self._failed(prompt, NOT_ASKED)
        body = self.body(prompt.messages, prompt.extra)
        if self.per_chunk:
            body["stream_options"] = {"continuous_usage_stats": True}
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout):
                answer = await stream_answer(self.client, self.endpoint, body, prompt.question, prompt.category, 0)
        except TimeoutError:
            return self._failed(prompt, f"the stream did not end within {self.timeout:g} s (--timeout)")
        if answer.error:
            return self._failed(prompt, answer.error)
        try:
            found = _of_stream(prompt, answer)
        except MISSHAPEN as error:
            return self._failed(prompt, f"the stream is no chat completion ({type(error).__name__}: {error})")
        self._failures = 0
        first, last = (answer.chunks[0][0], answer.chunks[-1][0]) if answer.chunks else (None, None)
        return replace(found, timing=self._timing(started, answer.finished, first, last))

    async def tool(self, messages: list[dict[str, Any]], extra: dict[str, Any], question: str) -> ToolReply:
        """One answer to a request with tools or a form; a refusal is kept as `error`."""
        try:
            reply = await self.reply(self.body(messages, extra))
            found = replace(read_tool_reply(reply), question=question)
        except TrtspecError as error:
            self._count(error.message)
            return ToolReply(error=error.message, question=question)
        except MISSHAPEN as error:
            return ToolReply(error=f"no chat completion ({type(error).__name__}: {error})", question=question)
        self._failures = 0
        return found

    async def streamed_tool(self, messages: list[dict[str, Any]], extra: dict[str, Any], question: str) -> ToolReply:
        """One streamed answer to a request with tools, its calls put together as a client does."""
        if self.stopped:
            return ToolReply(error=NOT_ASKED, question=question)
        try:
            async with asyncio.timeout(self.timeout):
                answer = await stream_answer(
                    self.client, self.endpoint, self.body(messages, extra), question, "tools", 0
                )
        except TimeoutError:
            answer = Answer(question, "tools", 0, 0.0, error=f"the stream did not end within {self.timeout:g} s")
        if answer.error:
            self._count(answer.error)
            return ToolReply(error=answer.error, question=question)
        self._failures = 0
        return ToolReply(
            answer.tool_calls, _text(answer.text), None, question, _text(answer.reasoning), answer.finish_reason,
            answer.unindexed,
        )  # fmt: skip

    def _failed(self, prompt: AskedPrompt, reason: str) -> Transcript:
        self._count(reason)
        return Transcript(
            prompt.question, prompt.category, prompt.messages, "", None, None, prompt.group, prompt.extra, error=reason
        )

    def _count(self, reason: str) -> None:
        if declined(reason):
            return  # a refusal of this request says nothing about the next one
        self._failures += reason != NOT_ASKED
        if self._failures >= GIVE_UP and self.stopped is None:
            self.stopped = f"{GIVE_UP} requests failed one after another, the last one: {reason}"


def declined(error: str | None) -> bool:
    """Whether a server refused a request for what it asks: HTTP 4xx, save for 429, by which it asks to wait."""
    return error is not None and error.startswith("HTTP 4") and not error.startswith("HTTP 429")


def read_answer(prompt: AskedPrompt, reply: dict[str, Any]) -> Transcript:
    """A response that is not streamed.

    Raises one of MISSHAPEN where its fields are not those of the API."""
    choice = reply["choices"][0]
    message = choice["message"]
    reasoning = _text(message.get("reasoning_content") or message.get("reasoning"))
    content = (choice.get("logprobs") or {}).get("content")
    usage = reply.get("usage") or {}
    return Transcript(
        question=prompt.question,
        category=prompt.category,
        messages=prompt.messages,
        text=reasoning + _text(message.get("content")),
        finish_reason=_optional(choice.get("finish_reason"), str),
        tokens=[read_token(entry) for entry in content] if content else None,
        group=prompt.group,
        extra=prompt.extra,
        reasoned=len(reasoning),
        spelled=_spelled(content) if content else None,
        prompt_tokens=_tokens(usage.get("prompt_tokens")),
        completion_tokens=_tokens(usage.get("completion_tokens")),
        average=_number(choice.get("avg_decoded_tokens_per_iter")),
        spec_decode=_optional(choice.get("spec_decode"), dict),
    )


def _of_stream(prompt: AskedPrompt, answer: Answer) -> Transcript:
    return Transcript(
        question=prompt.question,
        category=prompt.category,
        messages=prompt.messages,
        text=answer.reasoning + answer.text,
        finish_reason=_optional(answer.finish_reason, str),
        tokens=None,
        group=prompt.group,
        extra=prompt.extra,
        reasoned=len(answer.reasoning),
        prompt_tokens=_optional(answer.prompt_tokens, int) or None,
        completion_tokens=_optional(answer.completion_tokens, int) or None,
        average=_number(answer.tokens_per_iteration),
        spec_decode=_optional(answer.spec_decode, dict),
        counted=answer.counted,
        pieces=len(answer.chunks),
        arrivals=_arrivals(answer),
    )


def _arrivals(answer: Answer) -> int:
    """At how many times pieces came: what a proxy sends at once may be read in several parts."""
    found, since = 0, -math.inf
    for when, _ in answer.chunks:
        if when - since > TOGETHER:
            found, since = found + 1, when
    return found


def read_token(entry: dict[str, Any]) -> Token:
    """One entry of choices[].logprobs.content. The runner-up is the best of top_logprobs that is not the token. What a
    grammar rules out may have a logarithm of zero, which is no distance."""
    top = sorted(entry.get("top_logprobs") or [], key=lambda item: -item["logprob"])
    top = [item for item in top if math.isfinite(item["logprob"])]
    text = _text(entry["token"])
    if not top:
        return Token(text, None, None)
    best = top[0]["logprob"]
    others: dict[str, float] = {}
    for item in top:  # the best first: where two are written alike, the better one counts
        if item["token"] != text:
            others.setdefault(_text(item["token"]), round(best - item["logprob"], 6))
    own = next((item for item in top if item["token"] == text), entry).get("logprob")
    behind = round(best - own, 6) if finite(own) is not None else others[_text(top[-1]["token"])]
    gap = round(best - top[1]["logprob"], 6) if len(top) > 1 else None
    return Token(text, next(iter(others), None), gap, others, max(0.0, behind))


def read_tool_reply(reply: dict[str, Any]) -> ToolReply:
    choice = reply["choices"][0]
    message = choice["message"]
    calls = [
        {"name": str(call["function"]["name"]), "arguments": str(call["function"]["arguments"])}
        for call in message.get("tool_calls") or []
    ]
    content = (choice.get("logprobs") or {}).get("content")
    return ToolReply(
        calls,
        _text(message.get("content")),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        finish_reason=_optional(choice.get("finish_reason"), str),
        tokens=[read_token(entry) for entry in content] if content else None,
    )


def _spelled(content: list[dict[str, Any]]) -> str:
    """The text of the tokens: a character may be spread over several, so their bytes are joined where they are told."""
    if all(isinstance(entry.get("bytes"), list) for entry in content):
        return b"".join(bytes(entry["bytes"]) for entry in content).decode("utf-8", "replace")
    return "".join(_text(entry["token"]) for entry in content)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"text expected, not {type(value).__name__}")
    return value.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate could not be written to a file


def _optional(value: Any, kind: type) -> Any:
    """None for anything that is not of this kind: servers leave fields out, and cheats fill them with anything."""
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _tokens(value: Any) -> int | None:
    return None if value is None else token_count(value)


def _number(value: Any) -> float | None:
    found = finite(value)
    return found if found is not None and found > 0 else None
