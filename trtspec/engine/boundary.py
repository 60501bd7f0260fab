"""What every request passes on its way in: the connection with its time limits, its id, the key, the limits of its
body; and what no answer ever shows."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import sys
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h11
from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from trtspec.engine.protocol import ApiError

BODY_SECONDS = 60.0  # for a client to send its whole body
BODY_BYTES = 4 << 20  # of a body, beside BYTES_PER_TOKEN for each token of the context
BYTES_PER_TOKEN = 64
PARSED_AT_ONCE = 1 << 16  # larger bodies are parsed beside the event loop
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
HEADER_SECONDS = (
    10.0  # from connecting, or the first byte of a request, to its last header; for the rest of a refused body
)
STALLED_SECONDS = 60.0  # a client that reads nothing of its answer
PROBE_SECONDS = 0.5  # between two looks at a client that closed its sending side


class ClientConnection(H11Protocol):
    """A client that sends its headers slowly or stops reading its answer is cut off.

    A client may close its sending side and wait for its answer (`nc -N`, some proxies). That looks like one that is
    gone until something is written to it, so the server writes interim `100 Continue` responses, which HTTP clients
    skip: the kernel of a client that is gone answers them with a reset, and the request is cancelled.
    """

    timer: asyncio.TimerHandle | None = None
    stalled: asyncio.TimerHandle | None = None
    half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection open for an answer that is still to come."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        self.half_closed = True
        self._probe()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.timer, self.stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.half_closed:
            self.transport.close()
        else:
            self._watch_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error in the same form as every other."""
        text = json.dumps({"error": {"message": msg, "type": "invalid_request_error", "param": None, "code": None}})
        head = f"content-type: application/json\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
        self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}{text}".encode("ascii"))
        self.transport.close()

    def _watch_headers(self) -> None:
        """Starts the time limit when headers are awaited, ends it when they are here."""
        answered = self.cycle is None or self.cycle.response_complete
        incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)  # a body nobody waits for is read and dropped
        awaited = answered and incomplete and self.timeout_keep_alive_task is None
        if awaited and self.timer is None:
            self.timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)
        elif not awaited and self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _probe(self) -> None:
        if self.transport.is_closing() or self.cycle.response_started:
            return
        if self.conn.their_http_version == b"1.1":
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        self.loop.call_later(PROBE_SECONDS, self._probe)


@dataclass(frozen=True)
class Boundary:
    """ASGI middleware: gives every answer an `X-Request-Id` (the client's own where it sent one), asks for the API key
    below /v1, and turns an exception into status 500 without its text, which goes to the log."""

    app: ASGIApp
    api_key: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        name = _request_id(scope)
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode())]}
            await send(message)

        if self.api_key is not None and scope["path"].startswith("/v1") and not _has_key(scope, self.api_key):
            refusal = ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")
            await error_response(refusal)(scope, receive, send_named)
            return
        try:
            await self.app(scope, receive, send_named)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # a stop whose grace is over; raised on, it would be logged as a fault
            if not started:
                await error_response(ApiError("the server was stopped", status=503))(scope, receive, send_named)
        except Exception as error:
            log_exception(f"request {name}", error)
            if not started:
                await error_response(ApiError("internal error", status=500))(scope, receive, send_named)


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a request that is refused. What may be tried again says when."""
    headers = {**(headers or {}), **({"Retry-After": str(error.retry_after)} if error.retry_after else {})}
    return JSONResponse(error.to_dict(), status_code=error.status, headers=headers)


def log_exception(what: str, error: BaseException) -> None:
    """One line on stderr; the traceback only with TRTSPEC_DEBUG=1, since it shows paths and texts."""
    sys.stderr.write(f"trtspec: {what}: {type(error).__name__}: {str(error)[:500]}\n")
    if os.environ.get("TRTSPEC_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()


def body_limit(max_seq_len: int) -> int:
    """Bytes that a body may have: more than the longest prompt that fits needs, written with JSON's escapes."""
    return BODY_BYTES + BYTES_PER_TOKEN * max_seq_len


async def read_json(request: Request, limit: int) -> Any:
    """The JSON of a body of at most `limit` bytes. Raises ApiError 413, 408 or 400."""
    raw = await _read(request, limit)
    return await asyncio.to_thread(parse_json, raw) if len(raw) > PARSED_AT_ONCE else parse_json(raw)


def parse_json(raw: bytes) -> Any:
    """A body as JSON has it: no NaN, no text that UTF-8 cannot hold. Raises ApiError 400."""
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
        if SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError("the body holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError:
        raise ApiError("the body is not valid JSON") from None
    return value


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 15 or int(declared) > limit):
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {BODY_SECONDS:g} s", status=408) from None
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(f"the body has more than the {limit} bytes that are taken", status=413)


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _request_id(scope: Scope) -> str:
    sent = _header(scope, b"x-request-id")
    return sent if REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex


def _has_key(scope: Scope, key: str) -> bool:
    kind, _, sent = _header(scope, b"authorization").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(sent.strip().encode(), key.encode())


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
