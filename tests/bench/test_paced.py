"""Times against a server whose truth is known, and against other people's load generators on it.

The peers run in environments of their own, named by TRTSPEC_GUIDELLM_PYTHON and
TRTSPEC_VLLM_PYTHON.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bench.conftest import measured
from tests.bench.load_generators import Load, figures, guidellm, vllm_bench_serve, word_tokenizer
from tests.json_files import write_lines
from trtspec.bench.results import BenchResults
from trtspec.client import client as client_module
from trtspec.client.client import RequestSampling, chat_body, new_client, stream_answer

pytestmark = pytest.mark.clock
TTFT, GAP, TOKENS, PER_CHUNK = 0.2, 0.05, 40, 2
TPOT = GAP * (TOKENS / PER_CHUNK - 1) / (TOKENS - 1)


@pytest.fixture
def paced(paced: Callable[..., str]) -> Callable[..., str]:
    pace = {"ttft_s": TTFT, "gap_s": GAP, "tokens": TOKENS, "per_chunk": PER_CHUNK}
    return lambda **settings: paced(**(pace | settings))


def run(url: str, dataset: Path, **options: Any) -> BenchResults:
    return measured(
        {"e": url}, dataset, max_tokens=TOKENS, **{"samples": 8, "warmup": 0, **options}
    )


def truth(url: str) -> dict[str, float]:
    """Medians of the times at which the server really wrote."""
    written = httpx.get(f"{url}/truth", trust_env=False).json()
    return {key: statistics.median(entry[key] for entry in written) for key in written[0]}


def codes(results: BenchResults) -> set[str]:
    return {problem.code for problem in results.problems}


async def raw_first_token(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], body: dict[str, Any]
) -> float:
    """Seconds from writing a request to reading its first text, over a bare socket."""
    reader, writer = connection
    data, came, first = json.dumps(body).encode(), b"", None
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    started = time.perf_counter()
    writer.write(head.encode() + data)
    while not came.endswith(b"0\r\n\r\n"):
        came += await reader.read(2**16)
        first = time.perf_counter() if first is None and b'"content"' in came else first
    assert first is not None
    return first - started


def test_the_client_adds_next_to_nothing_to_the_first_token(
    paced: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client adds next to nothing to a bare socket.

    It is measured in processor time of this process, to which no other process can add.
    """
    monkeypatch.setattr(client_module.time, "perf_counter", time.process_time)
    url = paced(ttft_s=0.01, gap_s=0.001, tokens=4)
    body = chat_body("paced", [{"role": "user", "content": "Why?"}], RequestSampling(4), 0)

    async def differences() -> list[float]:
        found = []
        connection = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        async with new_client(url) as client:
            for _ in range(40):
                bare = await raw_first_token(connection, {**body, "stream": True})
                answer = await stream_answer(client, body, "q", "c", 0)
                assert answer.error is None and answer.first_token is not None
                found.append(answer.first_token - answer.started - bare)
        connection[1].close()
        return found

    found = asyncio.run(differences())[1:]
    print(
        f"{1000 * statistics.median(found):.2f} ms more than a bare socket, "
        f"median of {len(found)} pairs"
    )
    assert statistics.median(found) < 0.006


def test_waiting_for_a_connection_is_not_counted(paced: Callable[..., str]) -> None:
    """Of eight requests on five connections, three start their clocks after others are answered."""
    url = paced(ttft_s=0.3, gap_s=0.001, tokens=4)
    body = chat_body("paced", [{"role": "user", "content": "Why?"}], RequestSampling(4), 0)

    async def times() -> list[tuple[float, float]]:
        async with new_client(url, concurrency=1) as client:
            asked = [stream_answer(client, body, "q", "c", 0) for _ in range(8)]
            return sorted((a.started, a.first_token or 0.0) for a in await asyncio.gather(*asked))

    answers = asyncio.run(times())
    earliest = min(first_token for _, first_token in answers[:5])
    assert all(started >= earliest for started, _ in answers[5:]), answers


def test_a_buffering_proxy_is_named(paced: Callable[..., str], dataset: Path) -> None:
    held = run(paced(hold=True, ttft_s=0.02, gap_s=0.005), dataset)
    assert "TS-BENCH-BUFFERED" in codes(held)
    pieces = run(paced(burst=10, ttft_s=0.02, gap_s=0.005), dataset)
    assert "TS-BENCH-BUFFERED" in codes(pieces)


def test_open_loop_keeps_its_rate_whatever_the_server_does(
    paced: Callable[..., str], dataset: Path
) -> None:
    results = run(paced(ttft_s=0.5, gap_s=0.0, tokens=10), dataset, rates=(16.0,), samples=36)
    level = results.concurrency[0]
    assert level.rate == 16.0 and level.label == "16 requests/s" and level.throughput.requests == 39
    waited = sum(speed.seconds for speed in results.questions_detail)
    assert waited >= 2 * level.throughput.wall_s, "a closed loop has one in flight"
    # 36 conversations at Poisson times of seed 0, whose gaps are known
    assert level.throughput.wall_s >= 0.6 * 36 / 16


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("slots", [1, 2])
def test_within_3_percent_of_the_truth(
    paced: Callable[..., str], tmp_path: Path, slots: int
) -> None:
    """24 questions of one turn, so that the slots are busy to the end."""
    url = paced()
    results = run(url, prompts(tmp_path), samples=24, concurrency=(slots,))
    speed, wrote = results.concurrency[0].throughput, truth(url)
    assert speed.ttft_s and speed.itl_s and speed.tokens_per_s and speed.inter_token_s
    assert speed.output_tokens == TOKENS * speed.requests
    assert "TS-BENCH-NO-ACCEPTANCE" in codes(results) and "TS-BENCH-BUFFERED" not in codes(results)
    figures = {
        "TTFT": (speed.ttft_s.p50, wrote["ttft_s"]),
        "ITL": (speed.itl_s.mean, wrote["gap_s"]),
    }
    figures["TPOT"] = (speed.inter_token_s.p50, wrote["gap_s"] * TPOT / GAP)
    figures["tokens/s"] = (speed.tokens_per_s, slots * TOKENS / wrote["request_s"])
    for name, (ours, true) in figures.items():
        print(
            f"{slots} at a time, {name}: {ours:.5g} measured, {true:.5g} true, "
            f"{100 * (ours / true - 1):+.2f} %"
        )
        assert ours == pytest.approx(true, rel=0.03), name


def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": f"Tell me about the number {i}"} for i in range(24)]
    return write_lines(tmp_path / "prompts.jsonl", rows)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("peer", [guidellm, vllm_bench_serve])
def test_within_3_percent_of_another_load_generator(
    paced: Callable[..., str], tmp_path: Path, peer: Callable[[Load, Path], dict[str, float]]
) -> None:
    url, questions = paced(), prompts(tmp_path)
    theirs = peer(
        Load(url, "paced", questions, 24, 2, TOKENS, word_tokenizer(tmp_path / "words")),
        tmp_path / "peer.json",
    )
    ours = figures(run(url, questions, samples=24))
    for key, value in theirs.items():
        print(
            f"{key}: {ours[key]:.5g} here, {value:.5g} by {peer.__name__}, "
            f"{100 * (ours[key] / value - 1):+.2f} %"
        )
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=0.03), key
