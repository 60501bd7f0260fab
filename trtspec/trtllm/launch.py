"""Runs `trtllm-serve` once: own process group, phases, readiness by a real generation, signals and status through."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trtspec.errors import TrtspecError
from trtspec.report import say
from trtspec.trtllm.readiness import generates, is_healthy

TAIL_LINES = 400
PR_SET_PDEATHSIG = 1


class EngineFailed(TrtspecError):
    """The engine ended with an error; its exit status becomes ours."""

    def __init__(self, message: str, remedy: str, status: int) -> None:
        super().__init__(message, remedy)
        self.exit_code = status


@dataclass(frozen=True)
class Launch:
    """`env` is added to the environment. Times in seconds."""

    argv: list[str]
    host: str
    port: int
    env: dict[str, str] = field(default_factory=dict)
    startup_timeout: float = 7200.0
    generation_timeout: float = 300.0
    stop_grace: float = 30.0


@functools.cache
def _patterns() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("log_patterns.yaml").read_text(encoding="utf-8"))


def explain(lines: list[str]) -> tuple[str, str] | None:
    """(what happened, remedy) for the first known failure that the log names."""
    for known in _patterns()["failures"]:
        if any(re.search(known["pattern"], line) for line in lines):
            return known["says"], known["remedy"]
    return None


def phase(line: str) -> str | None:
    return next((p["says"] for p in _patterns()["phases"] if re.search(p["pattern"], line)), None)


class LogReader(threading.Thread):
    """Passes the engine's log on to stderr, says each phase once, and keeps the last lines."""

    def __init__(self, stream: Any, started: float) -> None:
        super().__init__(daemon=True)
        self.stream, self.started = stream, started
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.said: set[str] = set()

    def run(self) -> None:
        for line in self.stream:
            self.tail.append(line.rstrip("\n"))
            sys.stderr.write(line)
            sys.stderr.flush()
            now = phase(line)
            if now and now not in self.said:
                self.said.add(now)
                say(f"trtspec: {now} ({time.monotonic() - self.started:.0f} s)")


def run(launch: Launch) -> int:
    """Blocks until the engine ends; returns 0. Raises EngineFailed with its status and the cause otherwise."""
    started = time.monotonic()
    process = subprocess.Popen(
        launch.argv,
        env={**os.environ, **launch.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    reader = LogReader(process.stdout, started)
    reader.start()
    with _forwarded_signals(process) as asked:
        try:
            ready = _wait_ready(process, launch, started, asked)
            if ready:
                say(f"trtspec: ready on http://{launch.host}:{launch.port} ({time.monotonic() - started:.0f} s)")
            _wait(process, asked, launch.stop_grace)
        finally:
            _end_group(process, launch.stop_grace)
            reader.join(timeout=5)
    return _status(process.returncode, list(reader.tail), ready, asked)


def _die_with_parent() -> None:
    """The engine gets SIGTERM when this process is killed, so that nothing is left holding the GPUs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _forwarded_signals(process: subprocess.Popen[str]) -> Iterator[list[tuple[int, float]]]:
    """SIGINT and SIGTERM go to the whole group; the list holds what was asked for and when."""
    asked: list[tuple[int, float]] = []

    def forward(number: int, _frame: Any) -> None:
        asked.append((number, time.monotonic()))
        _signal_group(process, number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait_ready(process: subprocess.Popen[str], launch: Launch, started: float, asked: list[tuple[int, float]]) -> bool:
    """True once a generation came back; False when the engine ended or was told to end before."""
    base_url = f"http://{_reachable(launch.host)}:{launch.port}"
    while time.monotonic() - started < launch.startup_timeout:
        if process.poll() is not None or asked:
            return False
        if is_healthy(base_url):
            failure = generates(base_url, launch.generation_timeout)
            if failure is None:
                return True
            if process.poll() is not None or asked:
                return False
            _end_group(process, launch.stop_grace)
            message = f"the server answers /health and does not generate: {failure}"
            raise EngineFailed(message, "look at the log above; lower the load, or drop --head to tell them apart", 1)
        time.sleep(0.2)
    _end_group(process, launch.stop_grace)
    message = f"the server was not ready after {launch.startup_timeout:.0f} s"
    raise EngineFailed(message, "look at the log above, or pass a larger --startup-timeout", 1)


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)


def _wait(process: subprocess.Popen[str], asked: list[tuple[int, float]], grace: float) -> None:
    """Until the engine ends; one that ignores a signal for `grace` seconds is killed."""
    while process.poll() is None:
        if asked and time.monotonic() - asked[0][1] > grace:
            _signal_group(process, signal.SIGKILL)
        time.sleep(0.1)


def _signal_group(process: subprocess.Popen[str], number: int) -> bool:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _end_group(process: subprocess.Popen[str], grace: float) -> None:
    """No orphans: whatever is left of the group is asked to end, then killed."""
    if not _signal_group(process, signal.SIGTERM):
        process.poll()
        return
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        process.poll()
        if not _signal_group(process, 0):
            return
        time.sleep(0.05)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _status(returncode: int, tail: list[str], ready: bool, asked: list[tuple[int, float]]) -> int:
    status = returncode if returncode >= 0 else 128 - returncode
    if asked and returncode in (0, -asked[0][0]):
        say("trtspec: stopped as asked")
        if status:
            raise SystemExit(status)
    if status == 0:
        return 0
    known = explain(tail)
    when = "while serving" if ready else "before it was ready"
    if returncode == -signal.SIGKILL and known is None:
        known = "it was killed, most often because the host's memory ran out", "look at `dmesg`, give it more memory"
    if known is not None:
        raise EngineFailed(f"trtllm-serve ended {when} with status {status}: {known[0]}", known[1], status)
    last = "\n".join(f"  | {line}" for line in tail[-12:])
    raise EngineFailed(f"trtllm-serve ended {when} with status {status}; its last lines:\n{last}", "", status)
