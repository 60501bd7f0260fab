"""Odd, rude and broken clients: each gets its own refusal, and nobody else notices."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.command_line import wait_for
from tests.engine.conftest import (
    Running,
    error_of,
    launch,
    served,
    streamed,
    wait_until_idle,
)
from tests.hostile.requests import PRIVATE_USE
from tests.tiny import make_head
from trtspec.engine.boundary import body_limit

MAX_SEQ_LEN = 256


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Iterator[Running]:
    head = make_head(tmp_path_factory.mktemp("head"), target_dir, attention="mha")
    with served(
        target_dir, str(head), "max_batch_size=2", f"max_seq_len={MAX_SEQ_LEN}", "max_queue=6"
    ) as running:
        yield running


def complete(server: Running, **body: object) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": "once", "max_tokens": 8, **body},
        timeout=300,
    )


def chat(server: Running, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body)


BAD_BODIES = [
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "n": 1e30}',
    b'{"prompt": "x", "stop": ["' + b"a" * 1001 + b'"]}',
    b'{"prompt": "x", "stop": [' + b",".join([b'"a"'] * 65) + b"]}",
    b'{"prompt": "x", "stop_token_ids": [-1]}',
    b'{"prompt": "x", "stop_token_ids": [99999], "min_tokens": 3}',
    b'{"prompt": "x", "repetition_penalty": 1e-300}',
    (
        b'{"prompt": "x", "response_format": {"type": "json_schema", '
        b'"json_schema": {"schema": {"$ref": "#"}}}}'
    ),
    b'{"prompt": "x", "response_format": {"type": "regex", "regex": "(a{1000}){1000}"}, "n": 6}',
    (
        b'{"prompt": "x", "response_format": {"type": "regex", "regex": "a"}, "min_tokens": 7}'
    ),  # nothing is left
    b'{"prompt": "x", "max_tokens": "8"}',
    b'{"prompt": "x", "max_tokens": true}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "model": "\\udfff"}',
    b'{"prompt": [9223372036854775808]}',
    b'{"prompt": [[]]}',
    b'{"prompt": ["a", 1]}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "' + b"a" * 1_000_000 + b'"}',
    b'{"prompt": [' + b",".join([b"1"] * 500_000) + b"]}",
    b'{"prompt": ' + json.dumps(["a"] * 9).encode() + b"}",  # more at once than run and wait
    b"\xff\xfe",
    b"",
    b"[]",
    b"null",
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: body[:40].decode("latin-1"))
@pytest.mark.clock
def test_a_bad_body_is_refused(server: Running, body: bytes) -> None:
    # Grammars compile at a low priority: on a busy machine the server may ask to come again first.
    for _ in range(60):
        answer = httpx.post(f"{server.url}/v1/completions", content=body, timeout=300)
        if answer.status_code != 503:
            break
        time.sleep(float(answer.headers["retry-after"]))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_a_stream_without_a_way_on_says_so(server: Running) -> None:
    form = {"type": "regex", "regex": "ab"}
    with streamed(server, response_format=form, min_tokens=7, temperature=0) as lines:
        error = error_of(list(lines)[-1])
    assert error["type"] == "invalid_request_error"
    assert "no answer can continue here" in error["message"]


NESTED = json.loads('{"a":' * 700 + "1" + "}" * 700)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": 7, "content": "x"}]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": 7}]},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"self": 1}},
        {"chat_template_kwargs": {"thinkign": True}},
        {"tools": [5]},
        {"messages": [{"role": "user", "content": f"{PRIVATE_USE}<|im_end|>"}]},
    ],
)
def test_a_bad_chat_is_refused(server: Running, fields: dict) -> None:
    answer = chat(server, **fields)
    assert answer.status_code == 400, answer.text
    assert "/" not in answer.json()["error"]["message"].replace("and/or", "")


def test_nothing_is_an_internal_error(server: Running) -> None:
    for fields in (
        {"tools": [{"type": "function", "function": NESTED}]},
        {"chat_template_kwargs": {"thinking": NESTED}},
        {"messages": [{"role": "\x00", "content": "\x00"}]},
    ):
        answer = chat(server, **fields)
        assert answer.status_code in (200, 400), answer.text


def test_cold_and_narrow_sampling_is_greedy(server: Running) -> None:
    greedy = complete(server, temperature=0).json()["choices"][0]["text"]
    for fields in (
        {"temperature": 1e-40},
        {"temperature": 1e-20},
        {"top_p": 1e-300},
        {"top_k": 1},
        {"temperature": 1e-320},
    ):
        assert complete(server, **fields).json()["choices"][0]["text"] == greedy, fields
    largest = complete(server, top_k=2**31 - 1, seed=2**63 - 1, n=2)
    assert largest.status_code == 200 and len(largest.json()["choices"]) == 2


def test_a_large_body_is_refused(server: Running) -> None:
    limit = body_limit(MAX_SEQ_LEN)
    told = httpx.post(f"{server.url}/v1/completions", content=b" " * (limit + 1))
    assert told.status_code == 413
    pieces = (b" " * 65536 for _ in range(limit // 65536 + 2))  # chunked: no length is told
    assert httpx.post(f"{server.url}/v1/completions", content=pieces).status_code == 413


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", b"413"), ("/nothing", b"404")])
def test_a_body_without_an_end_closes_the_connection(
    server: Running, path: str, status: bytes
) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=30) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.encode())
        answer = b""
        with contextlib.suppress(ConnectionError):  # a close while it sends may lose the answer
            for _ in range(body_limit(MAX_SEQ_LEN) // 65536 + 1):
                client.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
            while part := client.recv(65536):  # until the server closes
                answer += part
    if answer:
        assert answer.startswith(b"HTTP/1.1 " + status) and b"connection: close" in answer.lower()


def test_request_ids(server: Running) -> None:
    mine = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1"
    for odd in ("a b", "x" * 200, None):
        answer = httpx.get(f"{server.url}/nothing", headers={"X-Request-Id": odd} if odd else {})
        assert answer.status_code == 404
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_too_many_requests_are_told_when_to_come_back(server: Running) -> None:
    """Eight generations are all that run and wait here."""
    with streamed(server, max_tokens=96, ignore_eos=True, n=8) as lines:
        next(lines)
        refused = complete(server)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "queue_full"
        assert httpx.get(f"{server.url}/health", timeout=300).status_code == 200
        assert list(lines)[-1] == "data: [DONE]"
    assert complete(server).status_code == 200


def raw(server: Running) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=300)


def request_bytes(**fields: object) -> bytes:
    body = json.dumps({"prompt": "half", "max_tokens": 100, "ignore_eos": True, **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_are_gone_are_forgotten(server: Running, stream: bool) -> None:
    for _ in range(8):
        with raw(server) as connection:
            connection.sendall(request_bytes(stream=stream, max_tokens=240))
    # requests of the gone may still wait to be read, and fill the queue until they are forgotten
    wait_for(lambda: complete(server).status_code != 429)
    assert complete(server).status_code == 200
    wait_until_idle(server)


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"x" * 100_000, b"\r\n" * 1000]
)
def test_what_is_not_http_is_refused(server: Running, junk: bytes) -> None:
    with raw(server) as connection:
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer == b"" or answer.startswith(
        b"HTTP/1.1 40"
    )  # 404 of a version that is yet to come
    assert httpx.get(f"{server.url}/health").status_code == 200


NEED_THE_KEY = ("/v1/models", "/version", "/prometheus/metrics")


def test_the_key_is_asked_for(target_dir: Path) -> None:
    with served(target_dir, "-", "max_batch_size=1", "max_seq_len=64", "api_key=sesame") as running:
        assert httpx.get(f"{running.url}/health").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic sesame"},
            {"X": "\xff"},
        ):
            for path in (*NEED_THE_KEY, "/openapi.json", "/docs", "/nothing"):
                answer = httpx.get(
                    f"{running.url}{path}",
                    headers={k: v.encode("latin-1") for k, v in headers.items()},
                )
                assert (
                    answer.status_code == 401
                    and answer.json()["error"]["code"] == "invalid_api_key"
                )
        right = {"Authorization": "Bearer sesame"}
        for path in NEED_THE_KEY:
            assert httpx.get(f"{running.url}{path}", headers=right).status_code == 200


def test_a_dead_engine_ends_the_process(target_dir: Path) -> None:
    """Every answer that was being given ends in the same error."""
    running = launch(target_dir, "-", "max_batch_size=2", f"max_seq_len={MAX_SEQ_LEN}")
    asked = [streamed(running, max_tokens=240, ignore_eos=True) for _ in range(2)]
    with asked[0] as one, asked[1] as other:
        next(one), next(other)
        os.kill(running.process.pid, signal.SIGUSR1)
        for lines in (one, other):
            assert error_of(list(lines)[-1])["type"] == "server_error"
    assert running.process.wait(300) == 1
    assert any("the engine stopped" in line for line in running.log)
