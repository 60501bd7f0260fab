"""Starts stand-in servers as real processes on loopback, one for each setting of a session."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import ROOT, Done, program, ran
from trtspec.bench.load import assemble, measure
from trtspec.bench.questions.datasets import load_dataset
from trtspec.bench.results import (
    BenchResults,
    EndpointResult,
    LevelResult,
    QuestionSpeed,
    StatedWorkload,
    Throughput,
)  # fmt: skip
from trtspec.bench.statistics import summarize
from trtspec.client.client import RequestSampling
from trtspec.client.servers import DetectedServer, TurnCounts
from trtspec.client.text_quality import judge_run

PACED = Path(__file__).with_name("paced_server.py")
STAND_IN = Path(__file__).with_name("stand_in.py")
TOPICS = {
    "code": "Write a function that",
    "docs": "Explain the module that",
    "list": "Name three things that",
}


SERVER = DetectedServer("reference", "m")
WORKLOAD = StatedWorkload(
    dataset="d",
    dataset_sha256="0",
    licence=None,
    questions=40,
    turns=40,
    template="t",
    thinking=None,
    system=None,
    concurrency=[1, 4, 16],
    rates=[],
    rounds=1,
    max_tokens=9,
    temperature=0.0,
    seed=0,
)
NO_RATES = Throughput(
    requests=1, errors=0, output_tokens=1, wall_s=1.0, tokens_per_s=1.0,
    ttft_s=None, inter_token_s=None, itl_s=None,
)  # fmt: skip


def results_of(
    turns: list[TurnCounts],
    speeds: Sequence[QuestionSpeed] = (),
    loads: Sequence[int] = (),
    **changed: Any,
) -> BenchResults:
    """A run of bench with these counts, and speeds by question, at each load."""
    summary, sound = vars(summarize(turns)), judge_run([])
    level = summary | {
        "throughput": NO_RATES,
        "rounds": [1.0],
        "degeneration": sound,
    }
    found = summary | {
        "name": "new",
        "url": "u",
        "server": SERVER,
        "categories": {},
        "degeneration": sound,
        "concurrency": [LevelResult(**level, concurrency=load) for load in loads],
        "turns_detail": turns,
        "questions_detail": list(speeds),
        "workload": WORKLOAD,
        "endpoints": {},
        "problems": [],
    }
    return BenchResults(**(found | changed))


def ci_steps(directory: Path, **variables: str) -> tuple[dict[str, Any], Callable[[str], Done]]:
    """The steps of configs/ci/endpoint.yml by name, and a function that runs one in `directory`."""
    job = yaml.safe_load((ROOT / "configs/ci/endpoint.yml").read_text())["jobs"]["endpoint"]
    shim = program(directory / "bin" / "trtspec", f'exec {sys.executable} -m trtspec "$@"')
    path = f"{shim.parent}:{os.environ['PATH']}"
    env = {**os.environ, **job["env"], "PATH": path, "PYTHONPATH": str(ROOT), **variables}
    steps = {step.get("name") or step["uses"]: step for step in job["steps"]}

    def run(name: str) -> Done:
        return ran("bash", "-ec", steps[name]["run"], cwd=directory, env=env)

    return steps, run


async def answering(
    answer: Callable[[str, Any], bytes | None], then: Callable[[str], Awaitable[Any]]
) -> Any:  # fmt: skip
    """Awaits `then(url)` while a server answers with `answer(path, body)`.

    `answer` returns the bytes of a 200, or None for a 404.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head, body = await reader.readuntil(b"\r\n\r\n"), None
                if head.startswith(b"POST"):
                    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    body = json.loads(await reader.readexactly(size))
                data = answer(head.split(b" ", 2)[1].decode(), body)
                status = 404 if data is None else 200
                data = data or b""
                writer.write(
                    b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data
                )
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        return await then(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def measured(
    urls: dict[str, str], source: Path | str, *, samples: int | None = None, max_tokens: int = 64,
    temperature: float = 0.0, concurrency: tuple[int, ...] = (2,), **settings: Any,
) -> BenchResults:  # fmt: skip
    """A whole run of bench on questions of `source`."""
    dataset, sampling = load_dataset(str(source), samples), RequestSampling(max_tokens, temperature)
    work = measure.BenchWorkload(dataset, sampling, concurrency, **settings)
    return assemble.assemble(asyncio.run(measure.measure(urls, work)))


def timed(run: EndpointResult, step_s: float) -> Any:
    """The run as measured on a machine that takes `step_s` a step.

    On a plain server each token is a step.
    """
    steps, tokens = Counter[str](), Counter[str]()
    for turn in run.turns_detail:
        steps[turn.question] += turn.steps + turn.answers
        tokens[turn.question] += turn.tokens
    speeds = []
    for speed in run.questions_detail:
        step_tokens = tokens[speed.question] / (steps[speed.question] or 1) or 1.0
        speeds.append(replace(speed, seconds=step_s * speed.tokens / step_tokens))
    return replace(run, questions_detail=speeds)


@pytest.fixture(scope="session")
def stand_in() -> Iterator[Callable[..., str]]:
    """stand_in(kind="vllm", loop=True) -> base URL of a running server with these settings."""
    running: dict[str, str] = {}
    forking: list[subprocess.Popen[str]] = []

    def start(**settings: object) -> str:
        key = json.dumps(settings, sort_keys=True)
        if not forking:
            pipe = subprocess.PIPE
            forking.append(
                subprocess.Popen(
                    [sys.executable, str(STAND_IN)], stdin=pipe, stdout=pipe, text=True
                )
            )
        if key not in running:
            asked, told = forking[0].stdin, forking[0].stdout
            assert asked is not None and told is not None
            asked.write(f"{key}\n")
            asked.flush()
            port = told.readline()
            assert port, "the stand-in servers died"
            running[key] = f"http://127.0.0.1:{int(port)}"
        return running[key]

    yield start
    for process in forking:
        process.communicate(timeout=300)


@pytest.fixture
def paced() -> Iterator[Callable[..., str]]:
    """paced(ttft_s=0.1) -> base URL of a running paced server."""
    running: list[subprocess.Popen[str]] = []

    def start(**settings: Any) -> str:
        command = [sys.executable, str(PACED), json.dumps(settings)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        told = running[-1].stdout
        assert told is not None
        return f"http://127.0.0.1:{int(told.readline())}"

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 two-category-and-one prompts, the first of each category with two turns."""
    lines = []
    for index in range(36):
        category = list(TOPICS)[index % 3]
        turns = [f"{TOPICS[category]} sorts {index} numbers"]
        if index < 3:
            turns.append("Now make it shorter")
        lines.append(json.dumps({"question_id": index, "category": category, "turns": turns}))
    path = tmp_path_factory.mktemp("dataset") / "questions.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path
