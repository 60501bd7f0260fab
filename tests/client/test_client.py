"""The client against servers that break off, stay silent, close or answer something else."""

import asyncio
import math
import socket
import threading
import time
from functools import partial
from typing import Any

import pytest

from trtspec.client import client
from trtspec.client.client import (
    Answer,
    RequestFailed,
    absorb,
    ask_once,
    first_model,
    generate_once,
    health,
    new_client,
    wait_ready,
)

CUT = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 96\r\n\r\n"


@pytest.mark.parametrize(
    "answer", [CUT, b"HTTP/1.1 2", b"\x00\xff\r\n\r\n"], ids=["no body", "cut status", "no HTTP"]
)
def test_an_answer_that_breaks_off_is_a_reason(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(3):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for look in (health, first_model, generate_once):
            with pytest.raises(RequestFailed, match=f"{url}/.* does not answer: "):
                ask_once(url, look, 5.0)
        thread.join(5)


@pytest.mark.clock
def test_a_connection_is_not_used_when_the_server_is_about_to_close_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request never goes over a connection that the server is about to close.

    The server resets one over which a request comes after more than the time that clients keep it:
    what uvicorn does at 5 s, without the luck that it takes to meet the moment.
    """
    resets, model = [], b'{"data": [{"id": "m"}]}'
    monkeypatch.setattr(client, "KEEPALIVE_S", 0.2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        idle_since = math.inf
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            if time.monotonic() - idle_since > client.KEEPALIVE_S:
                resets.append(1)
                writer.transport.abort()
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(model) + model)
            await writer.drain()
            idle_since = time.monotonic()
        writer.close()

    async def asked_twice() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with (
            server,
            new_client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as asking,
        ):
            assert (await first_model(asking))["id"] == "m"
            await asyncio.sleep(client.KEEPALIVE_S + 0.1)
            assert (await first_model(asking))["id"] == "m"

    asyncio.run(asked_twice())
    assert not resets


@pytest.mark.clock
def test_waiting_for_a_silent_server_ends_in_time() -> None:
    """It accepts connections and never answers, as some do while they load.

    Patience within a look would not end.
    """

    async def waited() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            with pytest.raises(RequestFailed, match=f"after 0.2 s {url} does not answer"):
                await wait_ready(url, 0.2, partial(first_model, timeout=3600))

    asyncio.run(waited())


def test_waiting_ends_when_there_is_nothing_to_wait_for() -> None:
    assert asyncio.run(wait_ready("http://127.0.0.1:9", 60, stopped=lambda: True)) is False


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            {"object": "error", "message": "too long", "code": "context_length_exceeded"},
            "HTTP 500: too long",
        ),
        ({"object": "error", "message": "too long", "code": 400}, "HTTP 400: too long"),
        ({"error": {"message": "too long", "code": "404"}}, "HTTP 404: too long"),
        (
            {"error": {"message": "too long", "code": True}, "code": "9" * 5000},
            "HTTP 500: too long",
        ),
        ({"error": "too long", "code": None}, "HTTP 500: too long"),
    ],
)
def test_an_error_in_a_stream_keeps_the_servers_words(error: dict[str, Any], says: str) -> None:
    answer = Answer("q", "c", 0, started=0.0)
    absorb(answer, error, 0.0)
    assert (answer.error, answer.status) == (says, int(says[5:8]))
