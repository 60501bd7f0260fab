"""An asynchronous client for any OpenAI-compatible server.

It sends requests, streams answers with the time of every chunk, and waits until a server is ready.

A streamed request starts when its header has been sent and its body follows: name lookup,
connecting, TLS and waiting for a free connection do not count. The time of a chunk is the network
read of its last byte, without parsing: chunks that a proxy sends at once have the same time.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from trtspec import files
from trtspec.client.addresses import key_header
from trtspec.errors import TrtspecError, UsageError, listed

T = TypeVar("T")
CHAT = "/v1/chat/completions"
RAW = "/v1/completions"  # a prompt without a chat template
# keys of a request that options set, and the remedy where `extra_body` has them; commands add their
# own
OWNED = {
    "model": "give `model`",
    "max_tokens": "give `max_tokens`",
    "max_completion_tokens": "give `max_tokens`",
    "temperature": "give `temperature`",
    "n": "leave it out: one answer is read of each request",
    "best_of": "leave it out: one answer is read of each request",
}
MOST_CALLS = 127  # larger indices come from broken servers and are put together here
MOST_LINE = 64 * 2**20  # bytes of one event
SILENCE_S = 600.0  # without a byte from the server, if no limit is set
# uvicorn, in front of vLLM, SGLang and trtllm-serve, closes a connection after 5 idle seconds; a
# request sent at that moment fails with a ReadError, so the client closes it first
KEPT_S = 2.0
POLL_S = 0.2  # between two requests to a server that is not ready
KEY = "set OPENAI_API_KEY to a key of the server"
# by the status of /v1/models
REMEDIES: dict[int | None, str] = {
    404: "check host and port",
    401: KEY,
    403: KEY,
}
LATE = ("not complete after", "no answer within")  # in the error of an answer that took too long


class RequestFailed(TrtspecError):
    """A request without a usable answer, and why.

    `status`: HTTP status of the response, None without a response.
    """

    def __init__(
        self, message: str, remedy: str = "look at the server's log", status: int | None = None
    ) -> None:
        super().__init__(message, remedy)
        self.status = status


@dataclass(frozen=True)
class RequestSampling:
    """Sampling of every answer. Answer i uses seed + i, so that sampled answers differ."""

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Answer:
    """One answer as received.

    Times are seconds of time.perf_counter(). `chunks` contains (time, characters).
    """

    question: str
    category: str
    turn: int
    started: float
    finished: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt, reused; None if the server does not tell
    finish_reason: str | None = None
    tokens_per_iteration: float | None = None
    spec_decode: dict[str, Any] | None = None
    error: str | None = None
    status: int | None = None  # other than 200, of the response or of an error event in its stream
    # id, name and arguments, joined from their chunks
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    unindexed: int = 0  # chunks of tool calls without the index of their call
    # tokens so far, from the token ids or the usage in chunks
    counted: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def first_token(self) -> float | None:
        return self.chunks[0][0] if self.chunks else None

    @property
    def written(self) -> str:
        """Reasoning, text and tool calls: an answer that is only a tool call is not empty."""
        calls = "".join(call["name"] + call["arguments"] for call in self.tool_calls)
        return self.reasoning + self.text + calls


def refuse_owned(extra_body: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    """Raises UsageError for the first key of `extra_body` that is in `owned`."""
    for key in extra_body:
        if key in owned:
            raise UsageError(f"`extra_body` must not set {key}", owned[key])


def new_client(
    url: str,
    concurrency: int = 64,
    timeout: float | None = None,
    headers: dict[str, str] | None = None,
    proxies: bool = False,
) -> httpx.AsyncClient:
    """A client of the server at `url`, a base URL without /v1.

    `timeout`: seconds that the server may stay silent. `headers`: by default the key of
    OPENAI_API_KEY. `proxies`: use the proxy variables of the environment. Raises UsageError if no
    header can carry the key.
    """
    if headers is None:
        headers = key_header()
    most = concurrency + 4
    limits = httpx.Limits(
        max_connections=most, max_keepalive_connections=most, keepalive_expiry=KEPT_S
    )
    silence = timeout or SILENCE_S
    times = httpx.Timeout(silence, connect=min(10, silence), pool=None)
    return httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=times, trust_env=proxies,
        verify=url.startswith("https"),  # loading certificates takes 20 ms
    )  # fmt: skip


async def fetch(
    client: httpx.AsyncClient, path: str, body: Any = None, timeout: float | None = None
) -> bytes:
    """The body of the 200 response to a GET of `path`, or to a POST of `body`.

    `timeout` as in `new_client`, for this request. Raises RequestFailed.
    """
    method = "GET" if body is None else "POST"
    times = timeout or httpx.USE_CLIENT_DEFAULT
    request = client.build_request(method, path, json=body, timeout=times)
    try:
        response = await client.send(request)
    except httpx.TimeoutException:
        limit = timeout or client.timeout.read or math.inf
        raise RequestFailed(f"{LATE[1]} {limit:g} s from {request.url}") from None
    except httpx.HTTPError as error:
        message = f"{request.url} does not answer: {describe(error)}"
        raise RequestFailed(message, "check host and port, or start the server there") from None
    if response.status_code != 200:
        status = response.status_code
        raise RequestFailed(error_message(status, response.text), status=status)
    return response.content


async def health(client: httpx.AsyncClient, timeout: float = 2.0) -> None:
    """Raises RequestFailed unless GET /health answers 200."""
    await fetch(client, "/health", timeout=timeout)


async def first_model(
    client: httpx.AsyncClient, timeout: float = 30.0, name: str | None = None
) -> dict[str, Any]:
    """The first entry of /v1/models, or the one called `name`, with an `id`.

    Raises RequestFailed, and UsageError if the server lists others and not `name`."""
    remedy = "start the server with `trtspec serve TARGET`, or wait for it with `wait_ready` 300"
    where = f"{str(client.base_url).rstrip('/')}/v1/models"
    try:
        models = files.parse_json(await fetch(client, "/v1/models", timeout=timeout))["data"]
        named = [model for model in models if isinstance(model, dict) and model.get("id")]
        entries = {str(model["id"]): model for model in named}
        first = models[0]["id"]
        if name is not None and name not in entries:
            serves = f"{where} lists {listed(entries)}, and not {name}"
            raise UsageError(serves, f"pass `model` {first}, or leave `model` out")
        if isinstance(first, str) and first:
            return dict(entries[name or first])
    except RequestFailed as failure:
        message = f"{where} answered {failure.message}" if failure.status else failure.message
        if "HTTPS" in message:
            remedy = "write http:// in place of https://"
        if failure.status == 404:
            message = f"{where} answered 404: this is not an OpenAI-compatible server"
        raise RequestFailed(message, REMEDIES.get(failure.status, remedy), failure.status) from None
    except (ValueError, LookupError, TypeError):
        pass
    raise RequestFailed(f"{where} answered 200 without a model", remedy, 200)


async def generate_once(client: httpx.AsyncClient) -> None:
    """Raises RequestFailed unless the server answers a prompt with one token."""
    model = (await first_model(client))["id"]
    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    await complete(client, RAW, body)


async def wait_ready(
    url: str,
    seconds: float,
    look: Callable[[httpx.AsyncClient], Awaitable[Any]] = first_model,
    stopped: Callable[[], Any] = lambda: False,
    headers: dict[str, str] | None = None,
) -> bool:
    """True once `look` succeeds, False once `stopped()` is true.

    Raises RequestFailed after `seconds`, with the last failure of `look`.
    """
    deadline = time.monotonic() + seconds
    async with new_client(url, 1, headers=headers) as client:
        while not stopped():
            try:
                async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                    await look(client)
                return True
            except TimeoutError:
                reason = f"{url} does not answer"
            except RequestFailed as failure:
                reason = failure.message
            if time.monotonic() >= deadline:
                remedy = "look at the server's log, or wait longer"
                raise RequestFailed(f"after {seconds:g} s {reason}", remedy)
            await asyncio.sleep(POLL_S)
    return False


def ask_once(
    url: str,
    look: Callable[[httpx.AsyncClient], Awaitable[T]],
    timeout: float | None = None,
    headers: dict[str, str] | None = None,
) -> T:
    """Returns or raises as `look` does, for synchronous code."""

    async def asked() -> T:
        async with new_client(url, 1, timeout, headers) as client:
            return await look(client)

    return asyncio.run(asked())


def remedy_for(error: str, otherwise: str) -> str:
    """The remedy for the error of an answer: more time for a late one, else `otherwise`."""
    late = any(words in error for words in LATE)
    return "allow more seconds with `timeout`" if late else otherwise


def describe(error: Exception) -> str:
    if isinstance(error, httpx.ConnectError) and "SSL" in str(error):
        return "it does not speak HTTPS"
    if isinstance(error, httpx.ConnectError):
        return "nothing accepts connections there"
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


def error_message(status: int, body: str) -> str:
    """The server's message, from OpenAI's nested or TensorRT-LLM's flat error body."""
    try:
        parsed = json.loads(body)
        text = parsed.get("error", parsed)
        if isinstance(text, dict):
            text = text.get("message", body)
    except (ValueError, AttributeError):
        text = body
    return f"HTTP {status}: {str(text)[:300]}"


def chat_body(
    model: str, messages: list[dict[str, Any]], sampling: RequestSampling, index: int
) -> dict[str, Any]:
    """The body of a chat request without streaming keys."""
    return {
        "model": model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed + index,
        "messages": messages,
    }


async def stream_answer(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    question: str,
    category: str,
    turn: int = 0,
    *,
    limit_s: float | None = None,
    on_event: Callable[[Answer], None] = lambda answer: None,
) -> Answer:
    """Sends one request and reads its stream. A body with `prompt` is not a chat.

    A failure is returned in `error`, never raised. An answer that is incomplete after `limit_s`
    seconds has failed. `on_event` gets the answer so far after each event.
    """
    answer = Answer(question, category, turn, started=time.perf_counter())
    path = CHAT
    if "prompt" in body:
        path = RAW

    async def trace(event: str, info: dict[str, Any]) -> None:
        if event.endswith(".send_request_headers.complete"):  # the body follows
            answer.started = time.perf_counter()

    streamed = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True, **body.get("stream_options", {})},
    }
    try:
        sending = client.stream("POST", path, json=streamed, extensions={"trace": trace})
        async with asyncio.timeout(limit_s), sending as response:
            status = response.status_code
            if status != 200:
                answer.status = status
                content = await response.aread()
                answer.error = error_message(status, content.decode("utf-8", "replace"))
            else:
                async for now, event in events(response):
                    absorb(answer, event, now)
                    on_event(answer)
    except TimeoutError:
        answer.error = f"{LATE[0]} {limit_s:g} s"
    except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
        answer.error = describe(error)
    except (AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
        fault = describe(error)
        answer.error = f"the stream has an event that is not a chat completion chunk ({fault})"
    answer.finished = time.perf_counter()
    if answer.error is None and answer.finish_reason is None:
        answer.error = "the stream ended without a finish_reason"
    return answer


async def events(response: httpx.Response) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Yields the JSON objects of a server-sent event stream up to [DONE].

    Each comes with the time of its last byte. Skips comment lines. Raises ValueError for invalid
    JSON.
    """
    pending = b""
    async for chunk in response.aiter_bytes():
        now = time.perf_counter()
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                return
            yield now, files.parse_json(payload)
        if len(pending) > MOST_LINE:
            raise ValueError(f"one event is longer than {MOST_LINE:,} bytes")


def absorb(answer: Answer, event: dict[str, Any], now: float) -> None:
    """Adds one stream event to an answer: text, usage, finish reason and speculation."""
    if event.get("error") or event.get("object") == "error":
        answer.status = _status_in(event)
        answer.error = error_message(answer.status, json.dumps(event))
        return
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = token_count(usage.get("prompt_tokens") or 0)
        answer.completion_tokens = token_count(usage.get("completion_tokens") or 0)
        reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        answer.cached_tokens = None if reused is None else token_count(reused)
        if not answer.token_ids:
            answer.counted.append(answer.completion_tokens)
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        text = (delta.get("content") if "delta" in choice else choice.get("text")) or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        answer.text += text
        answer.reasoning += reasoning
        called = sum(_absorb_call(answer, call) for call in delta.get("tool_calls") or [])
        ids = [token_count(token) for token in choice.get("token_ids") or []]
        prompt_ids = choice.get("prompt_token_ids") or event.get("prompt_token_ids")
        answer.prompt_ids = answer.prompt_ids or prompt_ids or []
        answer.token_ids += ids
        if ids:
            answer.counted.append(len(answer.token_ids))
        if text or reasoning or called or ids:
            answer.chunks.append((now, len(text) + len(reasoning) + called))
        reason = choice.get("finish_reason")
        if reason is not None and not isinstance(reason, str):
            raise ValueError(f"{str(reason)[:40]!r} is not a finish_reason")
        answer.finish_reason = reason or answer.finish_reason
        average = _ratio(choice.get("avg_decoded_tokens_per_iter"))
        answer.tokens_per_iteration = average or answer.tokens_per_iteration
        answer.spec_decode = _speculation(choice.get("spec_decode")) or answer.spec_decode


def _status_in(event: dict[str, Any]) -> int:
    """The HTTP status in an error event, flat or nested. 500 if its `code` is a word."""
    nested = event.get("error")
    codes = [str(each.get("code")) for each in (event, nested) if isinstance(each, dict)]
    return next((int(code) for code in codes if code.isdecimal() and len(code) == 3), 500)


def token_count(value: Any) -> int:
    """Returns `value` as a number of tokens.

    Raises ValueError for anything else that a server may send.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"{str(value)[:40]!r} is not a number of tokens")
    return int(value)


def finite(value: Any) -> float | None:
    """Returns `value` as a float.

    None unless it is a finite number. JSON integers have no limit and may overflow.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _ratio(value: Any) -> float | None:
    ratio = finite(value)
    if value is not None and (ratio is None or ratio < 0):
        raise ValueError(f"{str(value)[:40]!r} is not a number of tokens per iteration")
    return ratio


def _speculation(value: Any) -> dict[str, Any] | None:
    """Checks `spec_decode` of a choice. Raises ValueError for invalid counts."""
    if value is None:
        return None
    counts = {key: token_count(value[key]) for key in ("steps", "drafted", "accepted")}
    histogram = None
    if value.get("histogram"):
        histogram = [token_count(entry) for entry in value["histogram"]]
    return {**value, **counts, "histogram": histogram}


def _absorb_call(answer: Answer, call: dict[str, Any]) -> int:
    """Adds a call, or a chunk of the call at its `index`. Returns its number of characters."""
    index = token_count(call.get("index") or 0)
    function = call.get("function") or {}
    answer.unindexed += call.get("index") is None
    while len(answer.tool_calls) <= min(index, MOST_CALLS):
        answer.tool_calls.append({"id": "", "name": "", "arguments": ""})
    joined = answer.tool_calls[min(index, MOST_CALLS)]
    joined["id"] += call.get("id") or ""
    name = function.get("name") or ""
    arguments = function.get("arguments") or ""
    joined["name"] += name
    joined["arguments"] += arguments
    return len(name) + len(arguments)


async def complete(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Sends one request without streaming and returns the JSON of a response with a choice.

    Raises RequestFailed with the server's message, or with the start of any other response.
    """
    content = await fetch(client, path, {**body, "stream": False})
    try:
        reply = files.parse_json(content)
        if isinstance(reply["choices"][0], dict):
            return dict(reply)
    except (ValueError, LookupError, TypeError):
        pass
    start = " ".join(content[:80].decode("utf-8", "replace").split())
    message = f"HTTP 200, but not a chat completion: {start!r}"
    raise RequestFailed(message, "ask the server, not a proxy", 200)
