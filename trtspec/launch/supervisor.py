"""Runs the engine once: phases, readiness by a real generation, signals and status through, no rank left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.launch.engine_log import LogReader, explain
from trtspec.launch.guard import FORWARDED, UNKILLABLE
from trtspec.launch.readiness import generates, is_healthy
from trtspec.report import say

GUARD = Path(__file__).with_name("guard.py")
UNKNOWN = (
    "no known failure: start with `-- --log_level debug`; `trtspec doctor` checks this machine, `trtspec lint` the file"
)
KILLED = 128 + signal.SIGKILL


class EngineFailed(TrtspecError):
    """The engine ended with an error; its exit status becomes ours."""

    def __init__(self, message: str, remedy: str, status: int) -> None:
        super().__init__(message, remedy)
        self.exit_code = status


@dataclass(frozen=True)
class Launch:
    """`env` is added to the environment. Times in seconds. `generates`: whether a ready server answers a prompt by
    itself; one half of a disaggregated pair does not, and is ready when it is healthy. `own_statuses`: `argv` starts
    with a launcher such as mpirun, whose status after a signal is its own."""

    argv: list[str]
    host: str
    port: int
    env: dict[str, str] = field(default_factory=dict)
    startup_timeout: float = 7200.0
    generation_timeout: float = 300.0
    stop_grace: float = 30.0
    generates: bool = True
    own_statuses: bool = False


def run(launch: Launch) -> int:
    """Blocks until the engine ends; returns 0. Raises EngineFailed with its status and the cause otherwise."""
    started = time.monotonic()
    with _guarded(launch) as process, _forwarded_signals(process) as asked:
        reader = LogReader(process.stdout, started)
        reader.start()
        try:
            ready = _wait_ready(process, launch, started, asked)
            if ready:
                say(f"trtspec: ready on http://{launch.host}:{launch.port} ({time.monotonic() - started:.0f} s)")
            while process.poll() is None:  # a signal just before a blocking wait would be handled only after it
                time.sleep(0.05)
        finally:
            _end(process, launch.stop_grace)
            reader.join(timeout=5)
    if asked and process.returncode != KILLED and launch.own_statuses:
        say("trtspec: stopped as asked")  # mpirun and srun have statuses of their own for that, 1 among them
        raise SystemExit(process.returncode)
    return _status(process.returncode, list(reader.tail), ready, bool(asked), launch.stop_grace)


@contextlib.contextmanager
def _guarded(launch: Launch) -> Iterator[subprocess.Popen[str]]:
    """The engine below its guard, in a session of its own: a Ctrl-C of the terminal comes to us alone."""
    control, held = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), str(launch.stop_grace), str(control), *launch.argv],
            env={**os.environ, **launch.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=(control,),
        )
        os.close(control)
        yield process
    finally:
        os.close(held)  # ends the guard if it is still there


@contextlib.contextmanager
def _forwarded_signals(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP go to the guard; the list holds what was asked for."""
    asked: list[int] = []

    def forward(number: int, _frame: Any) -> None:
        asked.append(number)
        process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait_ready(process: subprocess.Popen[str], launch: Launch, started: float, asked: list[int]) -> bool:
    """True once a generation came back; False when the engine ended or was told to end before."""
    base_url = f"http://{_reachable(launch.host)}:{launch.port}"
    while time.monotonic() - started < launch.startup_timeout:
        if process.poll() is not None or asked:
            return False
        if is_healthy(base_url):
            failure = generates(base_url, launch.generation_timeout) if launch.generates else None
            if failure is None:
                return True
            if process.poll() is not None or asked:
                return False
            _end(process, launch.stop_grace)
            message = f"the server answers /health and does not generate: {failure}"
            raise EngineFailed(message, "look at the log above; lower the load, or drop --head to tell them apart", 1)
        time.sleep(0.2)
    _end(process, launch.stop_grace)
    message = f"the server was not ready after {launch.startup_timeout:.0f} s"
    raise EngineFailed(message, "look at the log above, or pass a larger --startup-timeout", 1)


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)


def _end(process: subprocess.Popen[str], grace: float) -> None:
    """The guard ends every rank, then itself."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=2 * grace + 2 * UNKILLABLE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _status(status: int, tail: list[str], ready: bool, asked: bool, grace: float) -> int:
    status = status if status >= 0 else 128 - status  # the guard itself was killed
    if asked and status == KILLED:
        message = f"the engine did not end within {grace:g} s of the signal and was killed"
        raise EngineFailed(message, "give it longer with --stop-grace", status)
    if asked and status in (0, *(128 + number for number in FORWARDED)):
        say("trtspec: stopped as asked")
        if status:
            raise SystemExit(status)
    if status == 0:
        return 0
    known = explain(tail)
    when = "while serving" if ready else "before it was ready"
    if status == KILLED and known is None:
        known = "it was killed, most often because the host's memory ran out", "look at `dmesg`, give it more memory"
    if known is not None:
        raise EngineFailed(f"trtllm-serve ended {when} with status {status}: {known[0]}", known[1], status)
    last = "\n".join(f"  | {line}" for line in tail[-12:])
    raise EngineFailed(f"trtllm-serve ended {when} with status {status}; its last lines:\n{last}", UNKNOWN, status)
