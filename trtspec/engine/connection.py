"""One HTTP connection of the reference server: uvicorn's, with time limits and answers for half-closed clients."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

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
