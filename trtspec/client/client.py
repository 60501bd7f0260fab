"""Asynchronous client for any OpenAI-compatible server.

The client sends requests, streams answers with the time of every chunk, and waits until a server is
ready.

A streamed request starts when its header has been sent and before its body. Name lookup,
connecting, TLS and waiting for a free connection therefore do not count. A chunk has the time of
the network read of its last byte, without parsing. Chunks that a proxy sends at once have the same
time.
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
# Keys of a request that options set, with the remedy if `extra_body` has one. Commands add further
# keys.
OWNED = {
    "model": "give `model`",
    "max_tokens": "give `max_tokens`",
    "max_completion_tokens": "give `max_tokens`",
    "temperature": "give `temperature`",
    "n": "leave it out: one answer is read of each request",
    "best_of": "leave it out: one answer is read of each request",
}
MAX_CALL_INDEX = 127  # only faulty servers send larger indices; such calls are joined to this one
MAX_EVENT_BYTES = 64 * 2**20
SILENCE_S = 600.0  # longest time without a byte from the server, if no limit is given
# uvicorn, in front of vLLM, SGLang and trtllm-serve, closes a connection after 5 idle seconds. A
# request sent at that moment fails with a ReadError, so the client closes the connection first.
KEEPALIVE_S = 2.0
POLL_S = 0.2  # between two requests to a server that is not ready
SET_KEY = "set OPENAI_API_KEY to a key of the server"
# remedies by the HTTP status of /v1/models
REMEDIES: dict[int | None, str] = {
    404: "check host and port",
    401: SET_KEY,
    403: SET_KEY,
}
# beginnings of the errors of an answer that took too long
INCOMPLETE = "not complete after"
NO_ANSWER = "no answer within"


class RequestFailed(TrtspecError):
    """Error of a request without a usable answer.

    status: HTTP status of the response, None without a response
    """

    def __init__(
        self, message: str, remedy: str = "look at the server's log", status: int | None = None
    ) -> None:
        super().__init__(message, remedy)
        self.status = status


@dataclass(frozen=True)
class RequestSampling:
    """Sampling parameters of requests.

    seed: seed of the first request, to which a later request adds its index to differ
    """

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0


@dataclass
class Answer:
    """Answer of a server as received so far. Times are in seconds of time.perf_counter().

    question: id of the question
    category: category of the question
    turn: index of the question's turn
    started: time at which the request was sent
    finished: time at which the answer ended
    chunks: time and number of characters of each chunk that has text or tokens
    cached_tokens: number of reused prompt tokens, None if the server does not report it
    tokens_per_iteration: average reported by TensorRT-LLM, prefill included
    spec_decode: counts of speculation reported by the reference server
    error: message if the request failed
    status: HTTP status if it is not 200, of the response or of an error event in the stream
    tool_calls: id, name and arguments of each call, joined from their chunks
    unindexed: number of chunks of tool calls that lack the call's index
    counted: total number of tokens after each chunk
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
    cached_tokens: int | None = None
    finish_reason: str | None = None
    tokens_per_iteration: float | None = None
    spec_decode: dict[str, Any] | None = None
    error: str | None = None
    status: int | None = None
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    unindexed: int = 0
    counted: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def first_token(self) -> float | None:
        """Time of the first chunk. None before it."""
        return self.chunks[0][0] if self.chunks else None

    @property
    def written(self) -> str:
        """Everything that the model wrote: reasoning, text and tool calls."""
        calls = "".join(call["name"] + call["arguments"] for call in self.tool_calls)
        return self.reasoning + self.text + calls


def refuse_owned(extra_body: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    """Raises UsageError if `extra_body` has a key that an option sets.

    `owned`: remedies by key.
    """
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
    """Returns a client of the server at `url`, a base URL without /v1.

    Raises UsageError if the key cannot be sent in a header.

    Args:
        concurrency: Number of requests that are open at once.
        timeout: Seconds without a byte from the server after which a request fails.
        headers: None for the key in the environment variable OPENAI_API_KEY.
        proxies: Whether environment variables such as HTTP_PROXY are used.
    """
    if headers is None:
        headers = key_header()
    # a few connections more, so that /metrics and /health do not wait
    max_connections = concurrency + 4
    limits = httpx.Limits(
        max_connections=max_connections,
        max_keepalive_connections=max_connections,
        keepalive_expiry=KEEPALIVE_S,
    )
    silence = timeout or SILENCE_S
    timeouts = httpx.Timeout(silence, connect=min(10, silence), pool=None)
    return httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=timeouts, trust_env=proxies,
        verify=url.startswith("https"),  # without TLS, saves 20 ms of loading certificates
    )  # fmt: skip


async def fetch(
    client: httpx.AsyncClient, path: str, body: Any = None, timeout: float | None = None
) -> bytes:
    """Sends a GET, or a POST with a JSON `body`, and returns the body of the response.

    `timeout`: seconds without a byte from the server, None for the client's. Raises RequestFailed
    if no response arrives, or if its status is not 200.
    """
    method = "GET" if body is None else "POST"
    request_timeout = timeout or httpx.USE_CLIENT_DEFAULT
    request = client.build_request(method, path, json=body, timeout=request_timeout)
    try:
        response = await client.send(request)
    except httpx.TimeoutException:
        limit = timeout or client.timeout.read or math.inf
        raise RequestFailed(f"{NO_ANSWER} {limit:g} s from {request.url}") from None
    except httpx.HTTPError as error:
        message = f"{request.url} does not answer: {describe(error)}"
        raise RequestFailed(message, "check host and port, or start the server there") from None
    if response.status_code != 200:
        status = response.status_code
        raise RequestFailed(error_message(status, response.text), status=status)
    return response.content


async def health(client: httpx.AsyncClient, timeout: float = 2.0) -> None:
    """Requests /health. Raises RequestFailed if the status is not 200 within `timeout` seconds."""
    await fetch(client, "/health", timeout=timeout)


async def first_model(
    client: httpx.AsyncClient, timeout: float = 30.0, name: str | None = None
) -> dict[str, Any]:
    """Returns the entry of the model called `name` in /v1/models, or the first entry for None.

    Raises RequestFailed if the server does not answer or lists no model. Raises UsageError if it
    lists models, but not `name`.
    """
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
        if failure.status == 404:
            message = f"{where} answered 404: this is not an OpenAI-compatible server"
        raise RequestFailed(message, REMEDIES.get(failure.status, remedy), failure.status) from None
    # JSON of another form has no model either
    except (ValueError, LookupError, TypeError):
        pass
    raise RequestFailed(f"{where} answered 200 without a model", remedy, 200)


async def generate_once(client: httpx.AsyncClient) -> None:
    """Requests one token. Raises RequestFailed if the server does not generate it."""
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
    """Waits until a server is ready. Returns True, or False if `stopped` became true before.

    Raises RequestFailed if the server is not ready after `seconds`.

    Args:
        look: Request that succeeds if the server is ready, and raises RequestFailed if it is not.
        stopped: Says whether to give up, for example because the server's process ended.
        headers: None for the key in the environment variable OPENAI_API_KEY.
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
    """Runs an asynchronous request from synchronous code. Returns or raises as `look` does.

    `timeout`: seconds without a byte from the server. `headers`: None for the key in the
    environment variable OPENAI_API_KEY.
    """

    async def asked() -> T:
        async with new_client(url, 1, timeout, headers) as client:
            return await look(client)

    return asyncio.run(asked())


def remedy_for(error: str, otherwise: str) -> str:
    """Returns the remedy for the error of an answer.

    The remedy for an answer that took too long is more time. `otherwise`: remedy for other errors.
    """
    late = INCOMPLETE in error or NO_ANSWER in error
    return "allow more seconds with `timeout`" if late else otherwise


def describe(error: Exception) -> str:
    """Returns a message for an exception of httpx or of reading a response."""
    if isinstance(error, httpx.ConnectError) and "SSL" in str(error):
        return "it does not speak HTTPS; write http:// in place of https://"
    if isinstance(error, httpx.ConnectError):
        return "nothing accepts connections there"
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


def error_message(status: int, body: str) -> str:
    """Returns the HTTP status with the server's message.

    OpenAI's error body has the message in an object `error`, TensorRT-LLM's at the top. Any other
    body is the message itself.
    """
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
    """Returns the JSON of a chat request, without `stream`.

    `index`: number that is added to the seed.
    """
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
    """Sends one request and reads its streamed answer. A body with `prompt` is not a chat.

    A failure is returned in the answer's `error`, never raised.

    Args:
        body: JSON of the request.
        limit_s: Seconds after which an incomplete answer has failed.
        on_event: Called with the answer so far after each event.
    """
    answer = Answer(question, category, turn, started=time.perf_counter())
    path = CHAT
    if "prompt" in body:
        path = RAW

    async def trace(event: str, info: dict[str, Any]) -> None:
        # connecting does not count, so the request starts when its header has been sent
        if event.endswith(".send_request_headers.complete"):
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
        answer.error = f"{INCOMPLETE} {limit_s:g} s"
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
    """Yields the events of a server-sent event stream up to [DONE].

    An event is the time at which its last byte was read, and its JSON object. Raises ValueError if
    an event is not JSON or is longer than MAX_EVENT_BYTES.
    """
    pending = b""
    async for chunk in response.aiter_bytes():
        now = time.perf_counter()
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            # other lines are comments, names of events and empty lines
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                return
            yield now, files.parse_json(payload)
        if len(pending) > MAX_EVENT_BYTES:
            raise ValueError(f"one event is longer than {MAX_EVENT_BYTES:,} bytes")


def absorb(answer: Answer, event: dict[str, Any], now: float) -> None:
    """Adds one event of a stream to an answer.

    An event has text, token ids, usage, a finish reason or a report on speculation. `now`: time at
    which the event was read. Raises ValueError if a number or the finish reason is invalid.
    """
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
        # token ids show the number of tokens too, and are counted with their choice
        if not answer.token_ids:
            answer.counted.append(answer.completion_tokens)
    for choice in event.get("choices") or []:
        _absorb_content(answer, choice, now, event.get("prompt_token_ids"))
        reason = choice.get("finish_reason")
        if reason is not None and not isinstance(reason, str):
            raise ValueError(f"{str(reason)[:40]!r} is not a finish_reason")
        answer.finish_reason = reason or answer.finish_reason
        average = _ratio(choice.get("avg_decoded_tokens_per_iter"))
        answer.tokens_per_iteration = average or answer.tokens_per_iteration
        answer.spec_decode = _speculation(choice.get("spec_decode")) or answer.spec_decode


def _absorb_content(answer: Answer, choice: dict[str, Any], now: float, prompt_ids: Any) -> None:
    """Adds the text, reasoning, tool calls and token ids of a choice to an answer.

    `prompt_ids`: token ids of the prompt in the event, None if it has none. Some servers send them
    in the choice. Raises ValueError if a token id or the index of a call is not a number.
    """
    delta = choice.get("delta") or {}
    # a raw completion has its text in the choice itself
    text = (delta.get("content") if "delta" in choice else choice.get("text")) or ""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    answer.text += text
    answer.reasoning += reasoning
    call_chars = sum(_absorb_call(answer, call) for call in delta.get("tool_calls") or [])
    ids = [token_count(token) for token in choice.get("token_ids") or []]
    # only the first event has the prompt
    prompt_ids = choice.get("prompt_token_ids") or prompt_ids
    answer.prompt_ids = answer.prompt_ids or prompt_ids or []
    answer.token_ids += ids
    if ids:
        answer.counted.append(len(answer.token_ids))
    # a choice without text and tokens, such as the last with its finish reason, is not a chunk
    if text or reasoning or call_chars or ids:
        answer.chunks.append((now, len(text) + len(reasoning) + call_chars))


def _status_in(event: dict[str, Any]) -> int:
    """Returns the HTTP status in an error event. 500 if the event has none.

    The status is the `code` of the event, or of its object `error`.
    """
    nested = event.get("error")
    codes = [str(each.get("code")) for each in (event, nested) if isinstance(each, dict)]
    # some servers write a word as the code
    statuses = [int(code) for code in codes if code.isdecimal() and len(code) == 3]
    return next(iter(statuses), 500)


def token_count(value: Any) -> int:
    """Returns `value`, part of a server's JSON, as a number of tokens.

    Raises ValueError if it is not a whole number from 0 to 2**53.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"{str(value)[:40]!r} is not a number of tokens")
    return int(value)


def finite(value: Any) -> float | None:
    """Returns `value`, part of a server's JSON, as a float. None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    # a JSON integer may be too large for a float
    except OverflowError:
        return None


def _ratio(value: Any) -> float | None:
    """Returns an average number of tokens per iteration. None for None.

    Raises ValueError if `value` is not a number, or is negative.
    """
    ratio = finite(value)
    if value is not None and (ratio is None or ratio < 0):
        raise ValueError(f"{str(value)[:40]!r} is not a number of tokens per iteration")
    return ratio


def _speculation(value: Any) -> dict[str, Any] | None:
    """Returns the object `spec_decode` of a choice with valid counts. None for None.

    Raises ValueError if a count is not a number of tokens.
    """
    if value is None:
        return None
    counts = {key: token_count(value[key]) for key in ("steps", "drafted", "accepted")}
    histogram = None
    if value.get("histogram"):
        histogram = [token_count(entry) for entry in value["histogram"]]
    return {**value, **counts, "histogram": histogram}


def _absorb_call(answer: Answer, call: dict[str, Any]) -> int:
    """Adds a tool call, or a chunk of one, to the answer. Returns its number of characters.

    The `index` of a chunk says which call it belongs to.
    """
    index = min(token_count(call.get("index") or 0), MAX_CALL_INDEX)
    function = call.get("function") or {}
    answer.unindexed += call.get("index") is None
    while len(answer.tool_calls) <= index:
        answer.tool_calls.append({"id": "", "name": "", "arguments": ""})
    joined = answer.tool_calls[index]
    joined["id"] += call.get("id") or ""
    name = function.get("name") or ""
    arguments = function.get("arguments") or ""
    joined["name"] += name
    joined["arguments"] += arguments
    return len(name) + len(arguments)


async def complete(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Sends one request without streaming and returns the JSON of the response.

    Raises RequestFailed if the request fails, or if the response has no choice.
    """
    content = await fetch(client, path, {**body, "stream": False})
    try:
        reply = files.parse_json(content)
        if isinstance(reply["choices"][0], dict):
            return dict(reply)
    # JSON of another form is reported like text
    except (ValueError, LookupError, TypeError):
        pass
    text = content[:80].decode("utf-8", "replace")
    start = " ".join(text.split())
    message = f"HTTP 200, but not a chat completion: {start!r}"
    raise RequestFailed(message, "ask the server, not a proxy", 200)
