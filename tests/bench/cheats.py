"""Runs the gate against servers of `cheating_server.py`, in this process; the servers are one process beside it."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtspec.bench.battery import make_battery
from trtspec.bench.check import GateLimits, GateVerdict, run_checks
from trtspec.bench.questions.datasets import Question
from trtspec.bench.recorder import RecorderOptions, record
from trtspec.bench.transcript import Recording
from trtspec.cli.options import request_limits_of

SERVER = Path(__file__).with_name("cheating_server.py")
TOPICS = ("sorts", "reads", "writes", "joins", "finds", "sends")


@contextmanager
def running(directory: Path) -> Iterator[str]:
    """The process; yields http://127.0.0.1:PORT."""
    port_file = directory / "port"
    process = subprocess.Popen([sys.executable, str(SERVER), str(port_file)])
    try:
        limit = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None and time.monotonic() < limit, "the cheating server did not start"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text()}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def at(base: str, kind: str, cheat: str = "honest", share: float = 1, *options: str) -> str:
    return "/".join([base, ",".join([kind, cheat, str(share), *options])])


def questions(count: int) -> list[Question]:
    return [Question(str(i), "all", (f"Write a function that {TOPICS[i % 6]} {i} numbers",)) for i in range(count)]


def recorded(url: str, samples: int, baseline: bool = False, contexts: tuple[int, ...] = (), **more: Any) -> Recording:
    asked = make_battery(questions(samples), 128, contexts, more.pop("per_context", 3))
    settings = {"concurrency": 4, "limits": request_limits_of, "timeout": 20.0, **more}
    return asyncio.run(record(url, asked, RecorderOptions(baseline=baseline, **settings)))


@functools.cache
def plain(base: str, samples: int, contexts: tuple[int, ...] = (), per_context: int = 3) -> Recording:
    """The honest server without speculation, asked once."""
    return recorded(at(base, "plain"), samples, True, contexts, per_context=per_context)


def judged(got: Recording, expected: Recording | None, **limits: Any) -> GateVerdict:
    return run_checks(got, expected, GateLimits(**limits))


def codes(verdict: GateVerdict) -> set[str]:
    return {row.code for row in verdict.results if row.status == "fail"}


def statuses(verdict: GateVerdict) -> dict[str, str]:
    return {row.name: row.status for row in verdict.results}
