"""Outer layer of the server: request ids, API key, limits of bodies, and error responses.

The server has no defence against clients that send or read slowly. docs/reference-engine.md names a
proxy for this.
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

# Largest body: BODY_BYTES, and BYTES_PER_TOKEN more for each token of the context.
BODY_BYTES = 4 << 20
BYTES_PER_TOKEN = 64
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}
# Threads that parse bodies, so that a large body blocks at most other bodies.
PARSERS = ThreadPoolExecutor(2, "body")


class BodyRoute(APIRoute):
    """Route whose requests are BodyRequests, with limited bodies that threads validate."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler of the route, which FastAPI calls for each request."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            # The client's content type is replaced, because curl sends JSON as a form.
            headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            headers.append((b"content-type", b"application/json"))
            scope = {**request.scope, "headers": headers}
            return await handle(BodyRequest(scope, request.receive))

        return handler


class BodyRequest(Request):
    """Request whose body is limited in size and validated in a thread."""

    async def body(self) -> bytes:
        """Returns the body. Raises ApiError 413 if it is longer than `app.state.body_limit`."""
        if not hasattr(self, "_body"):
            # An empty body becomes white space, because FastAPI does not parse an empty one. Both
            # are invalid JSON.
            self._body = await self._read(self.app.state.body_limit) or b" "
        return self._body

    async def json(self) -> Any:
        """Returns the validated body of the path's model. Raises ApiError 400 if it is invalid."""
        raw = await self.body()
        model = BODIES[self.scope["path"]]
        return await asyncio.get_running_loop().run_in_executor(PARSERS, parse_body, model, raw)

    async def _read(self, limit: int) -> bytes:
        """Returns the bytes that the client sends. Raises ApiError 413 beyond `limit` bytes."""
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
    """Largest size of a body in bytes. The longest prompt fits, even if JSON escapes it."""
    return BODY_BYTES + BYTES_PER_TOKEN * max_seq_len


@dataclass(frozen=True)
class Boundary:
    """ASGI middleware around all endpoints.

    Every response has an `X-Request-Id`, which is the client's own id if it is valid. All paths but
    /health need the API key. An exception becomes status 500, and only the log has its text. The
    connection closes after a response to a request whose body was not read completely. Otherwise a
    client could send such a body forever.

    app: the inner ASGI app.
    api_key: key that requests must have. None: requests need no key.
    """

    app: ASGIApp
    api_key: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
        started = False  # whether the response has begun
        # Whether the client may still send parts of the body.
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
                added = [(b"x-request-id", request_id.encode())]
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
            return  # nobody reads a response
        except asyncio.CancelledError:
            # The server stops, and its grace period is over. uvicorn would log the exception as a
            # fault.
            if not started:
                stopped = ApiError("the server was stopped", status=503)
                await error_response(stopped)(scope, receive, send_named)
        except Exception as error:
            log_exception(f"request {request_id}", error)
            if not started:
                fault = ApiError("internal error", status=500)
                await error_response(fault)(scope, receive, send_named)


def error_response(error: ApiError) -> JSONResponse:
    """Returns the response to a refused request, with Retry-After if the error has it."""
    return JSONResponse(error.to_dict(), status_code=error.status, headers=error.headers)


def log_exception(what: str, error: BaseException) -> None:
    """Writes one line about an exception to stderr. `what`: where the exception came from.

    The environment variable TRTSPEC_DEBUG=1 adds the traceback, which shows paths and texts.
    """
    sys.stderr.write(f"trtspec: {what}: {type(error).__name__}: {str(error)[:500]}\n")
    if os.environ.get("TRTSPEC_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()


def _has_key(headers: Headers, key: str) -> bool:
    """Whether the header `Authorization` is `Bearer` with this key."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    # Compared in constant time, so that response times do not reveal the key.
    return hmac.compare_digest(credentials.strip().encode(), key.encode())
