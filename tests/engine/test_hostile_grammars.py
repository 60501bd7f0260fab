"""Grammars that would stop a server, beside innocent requests: who waits, memory, and the end.

TRTSPEC_HOSTILE_GRAMMARS (1000) is their number, TRTSPEC_SEED (1) chooses them, TRTSPEC_ROUNDS (5)
how often all of it is done; what is printed and held to are medians over the rounds.
"""

import asyncio
import multiprocessing
import os
import random
import ssl
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest

from tests.command_line import SEED, wait_for
from tests.engine.conftest import end, launch
from tests.hostile.requests import GRAMMARS, SCHEMAS

COUNT = int(os.environ.get("TRTSPEC_HOSTILE_GRAMMARS", "1000"))
ROUNDS = int(os.environ.get("TRTSPEC_ROUNDS", "5"))
AT_ONCE, VICTIMS = 64, 4
KNOWN = {"type": "json_object"}  # compiled before the others come


def all_of(draw: random.Random) -> dict[str, Any]:
    """1.4 KB for minutes and gigabytes: the automata of 38 patterns multiplied."""
    first = draw.randrange(4)
    patterns = [
        {"type": "string", "pattern": f"(a|b)*a(a|b){{{first + number}}}"} for number in range(38)
    ]
    return {"type": "json_schema", "json_schema": {"schema": {"allOf": patterns}}}


def regex(draw: random.Random, depth: int = 0) -> str:
    if depth > 3 or draw.random() < 0.2:
        return draw.choice(("a", "b", ".", "[a-f]", "\\w", "\\p{L}", "(a|b)*a"))
    parts = [regex(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    joined = draw.choice(("", "|", "")).join(parts)
    return f"({joined}){draw.choice(('*', '+', '?', '{9}', '{200}', '{3,900}', ''))}"


def schema(draw: random.Random, depth: int = 0) -> Any:
    kind = (
        draw.choice(("object", "array", "string", "enum", "anyOf", "ref"))
        if depth < 3
        else "string"
    )
    if kind == "object":
        names = [f"p{number}" for number in range(draw.choice((1, 5, 200)))]
        return {
            "type": "object",
            "properties": {name: schema(draw, depth + 1) for name in names[:9]}
            | dict.fromkeys(names[9:], {"type": "integer"}),
            "required": names[::2],
        }
    if kind == "array":
        return {
            "type": "array",
            "items": schema(draw, depth + 1),
            "maxItems": draw.choice((3, 500, 10**6)),
        }
    if kind == "anyOf":
        return {"anyOf": [schema(draw, depth + 1) for _ in range(draw.choice((2, 9)))]}
    if kind == "enum":
        return {"enum": [f"{draw.random()}" for _ in range(draw.choice((3, 900)))]}
    return {"$ref": "#"} if kind == "ref" else {"type": "string", "pattern": regex(draw)}


def attack(draw: random.Random) -> dict[str, Any]:
    form: dict[str, Any] = draw.choice(
        (
            all_of(draw),
            {"type": "regex", "regex": draw.choice((*GRAMMARS, regex(draw), regex(draw)))},
            {"type": "json_schema", "json_schema": {"schema": draw.choice(SCHEMAS)}},
            {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "object", "properties": {"x": schema(draw)}}},
            },
        )
    )
    return {"prompt": "x", "max_tokens": 32, "n": draw.choice((1, 1, 16)), "response_format": form}


@dataclass
class Seen:
    gaps: list[float] = field(default_factory=list)
    innocents: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def bystanders(url: str, begun: Event, done: Event) -> Seen:
    """Until `done`, victims stream without a grammar and innocents ask for short answers.

    Innocents ask one after the other.
    """
    seen = Seen()

    async def victim(client: httpx.AsyncClient) -> None:
        body = {"prompt": "once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while not done.is_set():
            last, waits = (
                time.monotonic(),
                seen.innocents,
            )  # for the first chunk, then between chunks
            async with client.stream("POST", f"{url}/v1/completions", json=body) as stream:
                async for _ in stream.aiter_lines():
                    waits.append(time.monotonic() - last)
                    last, waits = time.monotonic(), seen.gaps

    async def innocent(client: httpx.AsyncClient, form: dict[str, str] | None) -> None:
        while not done.is_set():
            began = time.monotonic()
            body = {"prompt": "x", "max_tokens": 8, "response_format": form}
            answer = await client.post(f"{url}/v1/completions", json=body)
            while (
                answer.status_code == 429
            ):  # the queue is full of generations: it comes again, and its time runs on
                await asyncio.sleep(int(answer.headers["retry-after"]))
                answer = await client.post(f"{url}/v1/completions", json=body)
            seen.innocents.append(time.monotonic() - began)
            if answer.status_code != 200:
                seen.wrong.append(answer.text[:300])
            await asyncio.sleep(0.1)

    async with clients(VICTIMS + 2) as ours:
        known = {"prompt": "x", "response_format": KNOWN}
        assert (await ours[0].post(f"{url}/v1/completions", json=known)).is_success
        begun.set()
        await asyncio.gather(
            *map(victim, ours[2:]), innocent(ours[0], None), innocent(ours[1], KNOWN)
        )
    return seen


async def attackers(url: str, number: int, count: int) -> Seen:
    seen = Seen()
    draw = random.Random(f"{SEED} {number}")
    bodies = [attack(draw) for _ in range(count)]

    async def attacker(client: httpx.AsyncClient) -> None:
        while bodies:
            body = bodies.pop()
            began = time.monotonic()
            try:
                answer = await client.post(
                    f"{url}/v1/completions", json=body, timeout=draw.choice((0.2, 300, 300, 300))
                )
            except (
                httpx.TimeoutException
            ):  # a client that leaves, on a busy machine before it was connected
                continue
            seen.statuses[answer.status_code] += 1
            if answer.status_code != 200:
                seen.refusals.append(time.monotonic() - began)
            if answer.status_code not in (200, 400, 429, 503):
                seen.wrong.append(answer.text[:300])
            if answer.status_code == 503:
                assert answer.headers["retry-after"]

    async with clients(AT_ONCE) as ours:
        await asyncio.gather(*map(attacker, ours))
    return seen


@asynccontextmanager
async def clients(count: int) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Each with its own pool: in a shared one, requests wait seconds for it."""
    context = ssl.create_default_context()
    async with AsyncExitStack() as stack:
        made = [httpx.AsyncClient(timeout=300, verify=context) for _ in range(count)]
        yield [await stack.enter_async_context(client) for client in made]


def watched(url: str, begun: Event, done: Event) -> Seen:
    return asyncio.run(bystanders(url, begun, done))


def one_round(url: str, number: int, count: int) -> Seen:
    """Others run in a process of their own: no wait is due to the attackers' client."""
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager, ProcessPoolExecutor(1, context) as pool:
        begun, done = manager.Event(), manager.Event()
        others = pool.submit(watched, url, begun, done)
        assert begun.wait(300)
        time.sleep(0.3)
        seen = asyncio.run(attackers(url, number, count))
        done.set()
        found = others.result()
    return replace(
        found, refusals=seen.refusals, statuses=seen.statuses, wrong=found.wrong + seen.wrong
    )


def run(target_dir: Path, count: int, rounds: int) -> tuple[list[Seen], float, float]:
    """The rounds, the memory growth (share of the process) and seconds until SIGTERM ended it."""
    running = launch(target_dir, "-", "max_batch_size=16", "max_seq_len=256", "prefix_bytes=0")
    process = psutil.Process(running.process.pid)
    try:
        if rounds > 1:  # what is needed for the first time is no leak
            one_round(running.url, 0, count)
        before = process.memory_info().rss
        found = [one_round(running.url, number + 1, count) for number in range(rounds)]
        new = {"prompt": "x", "response_format": {"type": "regex", "regex": f"[a-f]{{{rounds}}}"}}
        url = f"{running.url}/v1/completions"
        # it still compiles, on a busy machine after it asked to come again
        wait_for(lambda: httpx.post(url, json=new, timeout=300).is_success)
        grown = process.memory_info().rss / before - 1
        assert len(process.children(recursive=True)) <= 4
    finally:
        began = time.monotonic()
        running.process.terminate()
        end(running)
    return found, grown, time.monotonic() - began


def report(found: list[Seen], grown: float, ended: float) -> dict[str, float]:
    medians = {
        name: statistics.median(max(getattr(seen, name), default=0.0) for seen in found)
        for name in ("gaps", "innocents", "refusals")
    }
    told = ", ".join(f"{name} {value:.2f} s" for name, value in medians.items())
    print(
        f"\nseed {SEED}, {len(found)} rounds, medians of the longest: {told}; "
        f"memory {grown:+.1%}; ended {ended:.1f} s"
    )
    print("statuses", dict(sum((seen.statuses for seen in found), Counter())), flush=True)
    return medians


@pytest.mark.clock
def test_hostile_grammars_cost_their_senders_alone(target_dir: Path) -> None:
    """A few of them, without limits on time, which hold on a quiet machine."""
    found, grown, ended = run(target_dir, 24, 1)
    report(found, grown, ended)
    assert not found[0].wrong, found[0].wrong[:3]
    assert found[0].statuses[400] + found[0].statuses[503]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.clock
@pytest.mark.alone
def test_a_thousand_hostile_grammars(target_dir: Path) -> None:
    found, grown, ended = run(target_dir, COUNT, ROUNDS)
    medians = report(found, grown, ended)
    assert not any(seen.wrong for seen in found), [seen.wrong[:3] for seen in found]
    assert medians["gaps"] <= 0.5 and medians["innocents"] <= 2 and medians["refusals"] <= 2
    assert grown <= 0.05 and ended < 35
