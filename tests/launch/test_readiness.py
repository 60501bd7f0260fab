"""A server that dies in the middle of an answer is not ready, and nothing but a reason comes of it."""

from __future__ import annotations

import socket
import threading

import pytest

from trtspec.launch.server import generation_failure, is_healthy

CUT = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 96\r\n\r\n"


@pytest.mark.parametrize("answer", [CUT, b"HTTP/1.1 2", b"\x00\xff\r\n\r\n"], ids=["no body", "cut status", "no HTTP"])
def test_an_answer_that_breaks_off_is_a_reason(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert is_healthy(url) is (answer == CUT)
        assert generation_failure(url, 5.0)
        thread.join(5)
