"""Oversized requests are refused before they cost anything, and big answers block nobody."""

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.engine.conftest import served
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.bodies import ChatBody, CompletionBody
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.http_api import create_app
from trtspec.engine.prepare import Preparation
from trtspec.engine.worker import SCORES_IN_FLIGHT, Reservation, Worker
from trtspec.models.k2 import KimiModel

ASK = [{"role": "user", "content": "x"}]


@contextlib.asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Of the app in this process, while it lives."""
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x", timeout=300
        ) as client,
    ):
        yield client


async def until(happened: Callable[[], bool]) -> None:
    while not happened():
        await asyncio.sleep(0.01)


def test_a_burst_finds_a_bounded_queue(
    target: KimiModel, tokenizer: KimiTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 requests at once 8 are taken and the others refused, until there is room again.

    None of the 8 has moved by then.
    """
    engine = Engine(
        target, options=EngineOptions(max_batch_size=2, max_seq_len=64), tokenizer=tokenizer
    )
    gate, step = threading.Event(), engine.step
    monkeypatch.setattr(engine, "step", lambda: (gate.wait(120), step())[1])
    app = create_app(engine, tokenizer, "tiny-kimi", max_queue=6)
    seen: Counter[int] = Counter()

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": "x", "max_tokens": 2, "stream": number % 2 == 0}
        seen[(await client.post("/v1/completions", json=body)).status_code] += 1

    async def burst() -> None:
        async with client_of(app) as client:
            asked = [asyncio.create_task(ask(client, number)) for number in range(200)]
            try:
                await until(lambda: seen[429] == 192)
                assert seen == {429: 192}
            finally:
                gate.set()
            await asyncio.gather(*asked)
            assert seen == {429: 192, 200: 8}
            await asyncio.gather(*(ask(client, number) for number in range(8)))
            assert seen[200] == 16 and app.state.worker.reserved == set()

    asyncio.run(burst())


def test_the_role_comes_with_the_first_token(
    target: KimiModel, tokenizer: KimiTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream's first chunk has the role and the engine's first token, and is not sent before."""
    engine = Engine(
        target, options=EngineOptions(max_batch_size=1, max_seq_len=128), tokenizer=tokenizer
    )
    began, gate, step = threading.Event(), threading.Event(), engine.step
    monkeypatch.setattr(engine, "step", lambda: (began.set(), gate.wait(120), step())[2])
    app = create_app(engine, tokenizer, "tiny-kimi")
    asked = {"messages": ASK, "max_tokens": 4, "stream": True, "logprobs": True, "temperature": 0}
    sent: list[bytes] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [],
        "query_string": b"",
    }

    async def stream() -> None:
        incoming: asyncio.Queue[dict] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": json.dumps(asked).encode()})

        async def send(message: dict) -> None:
            sent.append(message.get("body", b""))  # the first, the headers, has none

        async with app.router.lifespan_context(app):
            answering = asyncio.create_task(app(scope, incoming.get, send))
            try:
                await until(lambda: began.is_set() and bool(sent))
                assert sent == [b""]
            finally:
                gate.set()
            await answering

    asyncio.run(stream())
    first = [json.loads(line[6:])["choices"][0] for line in sent[1].decode().splitlines() if line]
    assert first[0]["delta"]["role"] == "assistant"
    assert sum(len(choice["logprobs"]["content"]) for choice in first if choice["logprobs"]) == 1


def test_scores_of_a_request_are_limited(target: KimiModel, tokenizer: KimiTokenizer) -> None:
    """16 choices of 4,000 tokens with 20 alternatives are taken, more than the limit is not."""
    engine = Engine(
        target, options=EngineOptions(max_batch_size=1, max_seq_len=8192), tokenizer=tokenizer
    )
    preparation = Preparation(engine, tokenizer, "tiny-kimi")
    common = {"messages": ASK, "logprobs": True, "top_logprobs": 20}
    taken = preparation.call(ChatBody(**common, n=16, max_tokens=4000))
    assert taken.scores(8192) == 16 * 4000 * 21 < SCORES_IN_FLIGHT
    assert preparation.call(ChatBody(messages=ASK, n=16)).scores(8192) == 0
    echo = {"echo": True, "max_tokens": 0}
    completion = CompletionBody(prompt=[[1] * 50] * 3, logprobs=1, **echo)
    assert preparation.call(completion).scores(8192) == 3 * 51 * 2
    app = create_app(engine, tokenizer, "tiny-kimi")

    async def ask() -> list[httpx.Response]:
        async with client_of(app) as client:
            echoed = {"prompt": [[1] * 4095] * 24, "logprobs": 20, **echo}
            too_long = await client.post("/v1/completions", json={"prompt": "x" * 8200, "n": 2})
            assert too_long.status_code == 400, too_long.text
            answers = [
                await client.post("/v1/chat/completions", json={**common, "n": 16}),
                await client.post("/v1/completions", json=echoed),
            ]
            assert not app.state.worker.reserved, "what was refused holds nothing"
            return answers

    for answer in asyncio.run(ask()):
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprobs"
        assert str(SCORES_IN_FLIGHT) in answer.json()["error"]["message"]


def test_scores_in_flight_are_limited(target: KimiModel) -> None:
    worker = Worker(Engine(target, options=EngineOptions(max_batch_size=1, max_seq_len=64)), 7)
    first, second = Reservation(worker), Reservation(worker)
    assert first.take(generations=3) and first.take(scores=SCORES_IN_FLIGHT)
    assert (
        second.take(generations=5) and not second.take(scores=1) and not second.take(generations=1)
    )
    assert second.take(scores=0)
    first.release()
    first.release()
    assert second.take(scores=1)


BIG = {
    "chat": {
        "messages": ASK,
        "n": 16,
        "max_tokens": 4000,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
    },
    "echo": {"prompt": [[1] * 4000] * 16, "max_tokens": 0, "echo": True, "logprobs": 20},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["echo", "chat"])
@pytest.mark.clock
@pytest.mark.alone
def test_a_big_answer_blocks_nobody(target_dir: Path, kind: str) -> None:
    """/health answers within a second while 64,000 tokens with 20 alternatives each are written."""
    found: list[httpx.Response] = []
    with served(target_dir, "-", "max_batch_size=16", "max_seq_len=4160") as running:
        url = f"{running.url}/v1/{'chat/completions' if kind == 'chat' else 'completions'}"
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(url, json=BIG[kind], timeout=1800))
        )
        asking.start()
        waits: list[float] = []
        with httpx.Client(timeout=300) as client:
            while asking.is_alive():
                began = time.monotonic()
                assert client.get(f"{running.url}/health").status_code == 200
                waits.append(time.monotonic() - began)
                time.sleep(0.05)
        asking.join()
    scores = [choice["logprobs"] for choice in found[0].json()["choices"]]
    written = sum(
        len(score["content"] if kind == "chat" else score["top_logprobs"]) for score in scores
    )
    print(
        f"\n{len(found[0].content) >> 20} MiB; /health {len(waits)} times, "
        f"longest {max(waits):.2f} s"
    )
    assert written == 64_000
    assert max(waits) < 1, max(waits)
