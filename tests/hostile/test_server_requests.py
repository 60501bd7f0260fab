"""Hostile requests by the thousand, and a soak, against the reference server with kimi-nano.

Its head drafts. Sixteen greedy streams run all the while and must get what serial decoding without
drafts gives. TRTSPEC_HOSTILE_REQUESTS (20000) and TRTSPEC_SOAK_REQUESTS (10000) set the numbers,
TRTSPEC_SEED the sequence (1). TRTSPEC_SCHEMATHESIS_PYTHON names a Python with schemathesis (`make
test-oracles` makes one); without it that part is skipped, and the other generators send all of the
requests.
"""

import asyncio
import json
import os
import re
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.command_line import SEED
from tests.engine.conftest import Running, launch, wait_until_idle
from tests.hostile.crowd import Crowd, Good, Right, Soak, Watch, streamed_text
from tests.hostile.requests import COMPLETIONS, Attacks, post
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.models.weights import load_target

HEAD = DATA / "kimi-nano-eagle3"
HOSTILE = int(os.environ.get("TRTSPEC_HOSTILE_REQUESTS", "20000"))
SOAK = int(os.environ.get("TRTSPEC_SOAK_REQUESTS", "10000"))
SCHEMATHESIS = os.environ.get("TRTSPEC_SCHEMATHESIS_PYTHON", "")
AT_ONCE = 256
STREAMS, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 32, 64, 32
HEALTH_SECONDS = 1.0
GROWTH = (
    32 << 20
)  # bytes that the process may have more at the end than when half of the time was over

pytestmark = [pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def right() -> Right:
    torch.set_num_threads(1)
    directory = kimi_nano_dir()
    tokenizer = KimiTokenizer(directory)
    lines = (directory / "prompts_heldout.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    prompts = [
        tokenizer.encode_chat(json.loads(line)["messages"])[1][-PROMPT_TOKENS:] for line in lines
    ]
    engine = Engine(
        load_target(directory, dtype=torch.float32),
        options=EngineOptions(max_batch_size=1, max_seq_len=PROMPT_TOKENS + NEW_TOKENS + 8),
        tokenizer=tokenizer,
    )
    lengths = [(8, 16, NEW_TOKENS)[number % 3] for number in range(PROMPTS)]
    asked = zip(prompts, lengths, strict=True)
    done = engine.generate(
        [GenerationRequest(str(number), *pair) for number, pair in enumerate(asked)]
    )
    return Right(prompts, lengths, [done[str(number)].text for number in range(PROMPTS)])


@pytest.fixture
def server() -> Iterator[Running]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = ("max_batch_size=32", "max_seq_len=512", "max_queue=1024")
    # few reused prefixes: what they may hold is full long before memory is first read
    running = launch(kimi_nano_dir(), str(HEAD), *sizes, f"prefix_bytes={8 << 20}")
    yield running
    if running.process.poll() is None:
        running.process.kill()
    running.process.wait()


def place(server: Running) -> tuple[str, int]:
    url = httpx.URL(server.url)
    return url.host, url.port or 80


def by_schemathesis(server: Running, count: int, folder: Path) -> tuple[int, str]:
    """(requests sent, findings) of an unmodified schemathesis over our document.

    It sends positive and negative cases. One worker: hypothesis sets Python's recursion limit,
    which breaks what CPython 3.11 parses in another thread.
    """
    operations = len(httpx.get(f"{server.url}/openapi.json").json()["paths"])
    command = [
        str(Path(SCHEMATHESIS).absolute()),
        "-m",
        "schemathesis.cli",
        "run",
        f"{server.url}/openapi.json",
    ]
    command += ["--mode", "all"]
    command += [
        "--phases",
        "coverage,fuzzing",
        "-n",
        str(max(1, count // operations)),
        "--workers",
        "1",
    ]
    # what JSON Schema cannot say (a token outside the vocabulary, a grammar without an answer) is
    # refused all the same
    command += [
        "--exclude-checks",
        "positive_data_acceptance",
        "--continue-on-failure",
        "--no-shrink",
        "--no-color",
    ]
    command += ["--generation-database", "none", "--seed", str(SEED), "--request-timeout", "120"]
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("schemathesis_hooks.py")),
    }
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=3600
    )
    sent = sum(int(number) for number in re.findall(r"Test cases:\s*(\d+) generated", done.stdout))
    return sent, "" if done.returncode == 0 else (done.stdout + done.stderr)[-6000:]


def test_hostile_requests_cost_nobody_anything(
    server: Running, right: Right, tmp_path: Path
) -> None:
    good = Good(server.url, right)
    watch = Watch(*place(server), server.process.pid)
    watch.start()
    stop, began = threading.Event(), time.monotonic()
    threads = [threading.Thread(target=good.run, args=(number, stop)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    crowd = Crowd(*place(server))
    sent, found = 0, ""
    try:
        if SCHEMATHESIS:
            sent, found = by_schemathesis(server, HOSTILE // 4, tmp_path)
            assert sent or found, "schemathesis sent nothing"
        asyncio.run(crowd.run(Attacks(SEED).next, HOSTILE - sent))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        watch.end()
    # schemathesis comes first and asks for less: what the other kinds need for the first time is no
    # leak
    settled = watch.memory[len(watch.memory) // 2 :]
    grown = max(settled[-len(settled) // 5 :]) - max(settled[: len(settled) // 5])
    print(
        f"\nseed {SEED}: {sent + crowd.sent} requests ({sent} of schemathesis) in "
        f"{time.monotonic() - began:.0f} s"
    )
    print(f"statuses {dict(crowd.statuses)}, kinds {dict(crowd.kinds)}")
    print(
        f"good streams: {good.right} right, {len(good.wrong)} wrong, "
        f"{good.refused} told to come back"
    )
    print(
        f"/health: {len(watch.memory)} asked, longest {watch.longest:.2f} s, "
        f"{len(watch.failed)} failed"
    )
    size = len(watch.memory)
    tenths = [max(watch.memory[size * n // 10 : size * (n + 1) // 10]) >> 20 for n in range(10)]
    print(f"memory: most in each tenth {tenths} MiB, grown {grown >> 20} MiB", flush=True)
    assert not good.wrong, good.wrong[:3]
    assert not crowd.bad, "\n".join(crowd.bad[:10])
    assert not found, found
    assert good.right >= STREAMS and not watch.failed
    assert watch.longest < HEALTH_SECONDS
    assert grown < GROWTH
    wait_until_idle(server)
    assert not [line for line in server.log if "Traceback" in line or "request " in line], "".join(
        server.log
    )
    if not SCHEMATHESIS:
        pytest.skip("TRTSPEC_SCHEMATHESIS_PYTHON is not set: the rest passed without schemathesis")


def test_soak(server: Running, right: Right) -> None:
    """At its end a stop finishes what runs, and takes nothing more."""
    process, began = psutil.Process(server.process.pid), time.monotonic()
    soak = Soak(Crowd(*place(server)), right, Attacks(SEED))
    threads = process.num_threads()
    asyncio.run(soak.run(SOAK, AT_ONCE))
    ended = time.monotonic()
    wait_until_idle(server)
    left = time.monotonic() - ended
    print(
        f"\n{SOAK} requests, {AT_ONCE} at once, {dict(soak.ended)}, "
        f"in {time.monotonic() - began:.0f} s"
    )
    print(
        f"{len(soak.wrong)} wrong, idle {left:.0f} s later, {process.memory_info().rss >> 20} MiB",
        flush=True,
    )
    assert not soak.wrong, "\n".join(soak.wrong[:5])
    assert not soak.crowd.bad, soak.crowd.bad[:5]
    assert process.num_threads() <= threads + 40  # the pool of the event loop

    bodies = [right.body(index, stream=True) for index in range(STREAMS)]
    answers = asyncio.run(stopped_in_the_middle(server, bodies))
    assert [streamed_text(answer) for answer in answers] == right.texts[:STREAMS]
    assert server.process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


async def stopped_in_the_middle(server: Running, bodies: list[dict[str, object]]) -> list[bytes]:
    """The answers to streams during which the server got SIGTERM: all had begun."""
    links = [await asyncio.open_connection(*place(server)) for _ in bodies]
    for (_, writer), body in zip(links, bodies, strict=True):
        writer.write(post(COMPLETIONS, json.dumps(body).encode()))
    begun = [await reader.readexactly(1) for reader, _ in links]
    server.process.terminate()
    return [first + await reader.read() for first, (reader, _) in zip(begun, links, strict=True)]
