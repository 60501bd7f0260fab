"""The outside of the server: ids, the API key and body limits of requests, and errors of answers.

Clients that are slow to send or read are a proxy's business: docs/reference-engine.md names one.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import sys
import traceback
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trtspec.engine.bodies import ApiError, ChatBody, CompletionBody, parse_body

BODY_BYTES = 4 << 20  # of a body, beside BYTES_PER_TOKEN for each token of the context
BYTES_PER_TOKEN = 64
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}
PARSERS = ThreadPoolExecutor(2, "body")  # large bodies wait for each other, and nobody for them


class BodyRoute(APIRoute):
    """An endpoint whose body is read within the limits, and validated beside the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            # The client's content type is replaced: curl says that JSON is a form.
            headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
            return await handle(BodyRequest(scope, request.receive))

        return handler


class BodyRequest(Request):
    async def body(self) -> bytes:
        """At most `app.state.body_limit` bytes. Raises ApiError 413."""
        if not hasattr(self, "_body"):
            # An empty body becomes white space, which is not JSON either.
            self._body = await self._read(self.app.state.body_limit) or b" "
        return self._body

    async def json(self) -> Any:
        """The validated body. Raises ApiError 400."""
        raw = await self.body()
        model = BODIES[self.scope["path"]]
        return await asyncio.get_running_loop().run_in_executor(PARSERS, parse_body, model, raw)

    async def _read(self, limit: int) -> bytes:
        parts = []
        size = 0
        async for part in self.stream():
            parts.append(part)
            size += len(part)
            if size > limit:
                message = f"the body has more than the {limit} bytes that are taken"
                raise ApiError(message, status=413)
        return b"".join(parts)


def body_limit(max_seq_len: int) -> int:
    """Bytes that a body may have. The longest prompt fits, also with JSON's escapes."""
    return BODY_BYTES + BYTES_PER_TOKEN * max_seq_len


@dataclass(frozen=True)
class Boundary:
    """ASGI middleware around all endpoints.

    It gives every answer an `X-Request-Id`, the client's own if it sent one. It asks for the API
    key everywhere but at /health. An exception becomes status 500 without its text, which goes to
    the log. An answer to a body that was not read to its end closes the connection: a client could
    send on it for ever.
    """

    app: ASGIApp
    api_key: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent = headers.get("x-request-id", "")
        name = sent if REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        started = False
        unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"

        async def receive_body() -> Message:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                added = [(b"x-request-id", name.encode())]
                if unread:
                    added.append((b"connection", b"close"))
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        if (
            self.api_key is not None
            and scope["path"] != "/health"
            and not _has_key(headers, self.api_key)
        ):
            refusal = ApiError(
                "the API key is missing or wrong", status=401, code="invalid_api_key"
            )
            await error_response(refusal)(scope, receive, send_named)
            return
        try:
            await self.app(scope, receive_body, send_named)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # The server stops and its grace is over. Raised on, it would be logged as a fault.
            if not started:
                stopped = ApiError("the server was stopped", status=503)
                await error_response(stopped)(scope, receive, send_named)
        except Exception as error:
            log_exception(f"request {name}", error)
            if not started:
                fault = ApiError("internal error", status=500)
                await error_response(fault)(scope, receive, send_named)


def error_response(error: ApiError) -> JSONResponse:
    """The answer to a refused request. If a client may try again, a header says when."""
    return JSONResponse(error.to_dict(), status_code=error.status, headers=error.headers)


def log_exception(what: str, error: BaseException) -> None:
    """Writes one line to stderr.

    TRTSPEC_DEBUG=1 adds the traceback, which shows paths and texts.
    """
    sys.stderr.write(f"trtspec: {what}: {type(error).__name__}: {str(error)[:500]}\n")
    if os.environ.get("TRTSPEC_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()


def _has_key(headers: Headers, key: str) -> bool:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(credentials.strip().encode(), key.encode())
