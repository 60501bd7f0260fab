"""Runs a server once.

Reports phases, waits for a real generation, checks health, passes on signals and the exit status,
and leaves no process of a rank behind.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import httpx
import psutil

from trtspec.client.addresses import bearer
from trtspec.client.client import RequestFailed, ask_once, generate_once, health, wait_ready
from trtspec.errors import TrtspecError, signals_handled
from trtspec.launch.reaper import FORWARDED, PR_SET_CHILD_SUBREAPER, UNKILLABLE, descendants, prctl
from trtspec.launch.server_launch import LogPatterns, ServerLaunch
from trtspec.report import announce, write_stderr

REAPER = Path(__file__).with_name("reaper.py")
KILLED = 128 + signal.SIGKILL  # exit status after SIGKILL
FIRST_GENERATION = 600.0  # seconds for the first generation, within the limit of the whole start
HEALTH_LOOKS = 8  # checks of /health without an answer until a server counts as hung
# Seconds until a loading server gets a second signal. vLLM 0.32's front end waits forever for an
# engine that SIGTERM ended while it loaded.
LOADING_GRACE = 5.0
# Seconds between two checks of a process, because a blocking wait would delay a signal that comes
# just before it.
POLL = 0.05
DYING = 2.0  # seconds between the last closed connection of a server that dies and its end
LOG_END = 5.0  # seconds for the rest of the log after the server's end
TAIL_LINES = 400  # last lines of the log in which a known failure is searched
SHOWN_LINES = 12  # last lines of the log that an error message repeats
CHUNK = 65536  # characters: a longer line is passed on in chunks, so that memory stays bounded
KEPT_LINE = 2000  # characters of a line that an error message may repeat


class ServerFailed(TrtspecError):
    """The failure of a server that ended with an error, or was stopped because of one.

    Args:
        status: exit status of the server, 1 if it has no status of its own.
    """

    def __init__(self, message: str, remedy: str, code: str, status: int = 1) -> None:
        super().__init__(message, remedy, code)
        self.exit_code = status


def run(launch: ServerLaunch) -> int:
    """Runs the server until it ends, and returns its exit status.

    The status is 0 if a ready server ended by itself. After a requested stop it is 0, 128 + the
    signal, or a launcher's own status. Raises ServerFailed with the cause and the status after any
    other end.
    """
    started = time.monotonic()
    already_there = set(descendants())
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # if the subreaper is killed, its processes become ours
    with _started(launch) as process, _forwarded_signals(process) as stop_signals:
        reader = LogReader(process.stdout, launch.patterns, started)
        reader.start()
        ready = False
        try:
            ready = _wait_ready(process, launch, started, stop_signals)
            if ready:
                seconds = time.monotonic() - started
                url = f"http://{launch.endpoint.host}:{launch.endpoint.port}"
                announce(f"trtspec: ready on {url} ({seconds:.0f} s); next: trtspec bench {url}")
                _wait_end(process, launch, stop_signals)
        finally:
            loading_grace = 0.0
            if stop_signals and not ready:  # because a loading server has its signal already
                loading_grace = min(launch.limits.stop_grace, LOADING_GRACE)
            reaper_killed = _end(process, launch.limits.stop_grace, loading_grace)
            _kill_adopted(already_there)
            prctl(PR_SET_CHILD_SUBREAPER, 0)
            reader.join(timeout=LOG_END)
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if process.returncode < 0 and not reaper_killed:
        name = signal.Signals(-process.returncode).name
        message = (
            f"another process ended the subreaper (process {process.pid}) with {name}; "
            "trtspec killed the server"
        )
        remedy = "find out what sent the signal, then start again"
        raise ServerFailed(message, remedy, "TS-SERVE-KILLED", status)
    if len(stop_signals) == 1 and status == KILLED and not ready:
        announce(
            "trtspec: stopped as requested: killed while it loaded, "
            f"as it did not end in {loading_grace:g} s"
        )
        return 128 + stop_signals[0]
    ended_as_requested = status in (0, *(128 + number for number in FORWARDED))
    if launch.own_statuses:  # because mpirun hides 128 + signal, any end but a kill counts
        ended_as_requested = status != KILLED
    if stop_signals and ended_as_requested:
        announce("trtspec: stopped as requested")
    elif status or not ready:
        _fail(launch, status, list(reader.tail), ready, len(stop_signals))
    return status


def _kill_adopted(already_there: set[int]) -> None:
    """Kills every process below this one, except the ids in `already_there`."""
    deadline = time.monotonic() + UNKILLABLE
    while (left := set(descendants()) - already_there) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(POLL)


@contextlib.contextmanager
def _started(launch: ServerLaunch) -> Iterator[subprocess.Popen[str]]:
    """Starts the server below its subreaper, in a session of its own.

    Yields the subreaper's process.

    Because of the session, Ctrl-C in the terminal only reaches trtspec. At the end of the block the
    subreaper ends all processes of the server.
    """
    control, held = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(REAPER), str(launch.limits.stop_grace), str(control)],
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
        # without a reader, the subreaper has ended already, and its status tells why
        with contextlib.suppress(BrokenPipeError), open(held, "w", closefd=False) as pipe:
            pipe.write(json.dumps(launch.argv) + "\n")
        yield process
    finally:
        os.close(held)  # ends the subreaper if it is still there


@contextlib.contextmanager
def _forwarded_signals(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Passes the FORWARDED signals on to the subreaper, and yields the list of those that came."""
    stop_signals: list[int] = []

    def forward(number: int, _frame: Any) -> None:
        """Notes one signal and passes it on."""
        stop_signals.append(number)
        process.send_signal(number)

    with signals_handled(forward, *FORWARDED):
        yield stop_signals


def _wait_ready(
    process: subprocess.Popen[str], launch: ServerLaunch, started: float, stop_signals: list[int]
) -> bool:
    """Waits until the server has generated. False if it ended or was asked to stop before.

    Raises ServerFailed if the server is not ready in time, or if another process answers on its
    port.

    Args:
        started: time of the start, by time.monotonic().
        stop_signals: signals that asked for the end so far.
    """
    endpoint = launch.endpoint
    startup = launch.limits.startup

    def ended() -> bool:
        """Whether the server ended, or a signal asked for its end."""
        return process.poll() is not None or bool(stop_signals)

    def left() -> float:
        """Seconds until the server must be ready."""
        return startup - (time.monotonic() - started)

    try:
        if not asyncio.run(wait_ready(endpoint.url, left(), health, ended, headers={})):
            return False
    except RequestFailed:
        message = f"the server was not ready after {startup:.0f} s"
        remedy = "look at the log above, or pass a larger `startup_timeout`"
        raise ServerFailed(message, remedy, "TS-SERVE-NOT-READY") from None
    other = foreign_listener(endpoint.port, process.pid)
    failure = ""
    if endpoint.generates and not other:
        seconds = min(FIRST_GENERATION, max(left(), 1.0))
        failure = _failure(endpoint.url, generate_once, seconds, bearer(endpoint.api_key))
    # a server that fails to generate may be dying, and its end has the better reason
    patience = time.monotonic() + (DYING if failure else 0.0)
    while not ended() and time.monotonic() < patience:
        time.sleep(POLL)
    if ended():
        return False
    if other:
        message = f"{other} answers on port {endpoint.port}, and this launch did not start it"
        raise ServerFailed(message, "stop it, or pass another `port`", "TS-SERVE-OTHER-SERVER")
    if failure:
        message = f"the server answers /health and does not generate: {failure}"
        remedy = "look at the log above; lower the load, or drop `head` to tell them apart"
        raise ServerFailed(message, remedy, "TS-SERVE-NOT-READY")
    return True


def foreign_listener(port: int, root: int) -> str | None:
    """Name of the process that listens on `port`, if it is not the process `root` or below it.

    None for our own process, or if the system does not show who listens.
    """
    with contextlib.suppress(psutil.Error, OSError):
        listeners = {
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }
        ours = {root, *(child.pid for child in psutil.Process(root).children(recursive=True))}
        # None: a process that we may not inspect, and that can be ours
        if listeners and listeners.isdisjoint({*ours, None}):
            pid = min(pid for pid in listeners if pid)
            return f"{psutil.Process(pid).name()} (process {pid})"
    return None


def _failure(
    url: str,
    look: Callable[[httpx.AsyncClient], Awaitable[None]],
    timeout: float,
    headers: dict[str, str],
) -> str:
    """Reason why the request `look` to a server fails, "" if it succeeds. `timeout`: seconds."""
    try:
        ask_once(url, look, timeout, headers)
    except RequestFailed as failure:
        return failure.message
    return ""


def _wait_end(
    process: subprocess.Popen[str], launch: ServerLaunch, stop_signals: list[int]
) -> None:
    """Waits until the server has ended, or a signal asked for its end.

    Raises ServerFailed if the server hangs, which means that it runs and /health does not answer.
    """
    interval = launch.limits.hung_after / HEALTH_LOOKS
    failed = 0
    last = time.monotonic()
    while process.poll() is None:
        time.sleep(POLL)
        if not interval or stop_signals or time.monotonic() - last < interval:
            continue
        unhealthy = _failure(launch.endpoint.url, partial(health, timeout=interval), interval, {})
        last = time.monotonic()
        if process.poll() is not None or stop_signals:
            continue
        if failed and not unhealthy:
            announce("trtspec: /health answers again")
        failed = failed + 1 if unhealthy else 0  # checks in a row
        if not failed:
            continue
        announce(f"trtspec: no answer from /health ({failed} of {HEALTH_LOOKS})")
        if failed >= HEALTH_LOOKS:
            message = (
                f"the server hangs: {failed} health checks in a row had no answer, "
                "so it was stopped"
            )
            remedy = "look at the log above; `hung_after` sets when a server counts as hung"
            raise ServerFailed(message, remedy, "TS-SERVE-HUNG")


def _end(process: subprocess.Popen[str], grace: float, loading_grace: float) -> bool:
    """Stops the subreaper, which ends every rank first. Returns whether it had to be killed.

    Args:
        grace: seconds between a signal and SIGKILL.
        loading_grace: seconds before the next signal of a server that loads. It has had one signal
            and has nothing to finish, so the next signal makes the subreaper kill every rank.
    """
    if loading_grace:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=loading_grace)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=2 * grace + 2 * UNKILLABLE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return True
    return False


def _fail(
    launch: ServerLaunch, status: int, tail: list[str], ready: bool, signal_count: int
) -> NoReturn:
    """Raises ServerFailed with the cause of the server's end.

    The cause is our kill, a known failure in the log, or the last lines of the log.

    Args:
        status: exit status of the server.
        tail: last lines of the log.
        ready: whether the server was ready before.
        signal_count: number of signals that asked for the end.
    """
    patterns = launch.patterns
    if signal_count > 1 and status == KILLED:
        message = "a second signal came, so the server was killed"
        remedy = "send one signal and wait for the end"
        raise ServerFailed(message, remedy, "TS-SERVE-KILLED", status)
    if signal_count and status == KILLED:
        grace = launch.limits.stop_grace
        message = f"the server did not end within {grace:g} s of the signal and was killed"
        raise ServerFailed(message, "give it longer with `stop_grace`", "TS-SERVE-KILLED", status)
    known = patterns.explain(tail)  # (message, remedy)
    phase = "while serving" if ready else "before it was ready"
    ended = f"{patterns.engine} ended {phase} with status {status}"
    if known is None and status == KILLED:
        cause = (
            "another process or the kernel killed it, most often because the host's memory ran out"
        )
        known = cause, "look at `dmesg`, and give the host more memory"
    if known is not None:
        raise ServerFailed(f"{ended}: {known[0]}", known[1], "TS-SERVE-ENDED", status or 1)
    last = "\n".join(f"  | {line}" for line in tail[-SHOWN_LINES:])
    message = f"{ended}; its last lines:\n{last}"
    raise ServerFailed(message, patterns.unknown, "TS-SERVE-ENDED", status or 1)


class LogReader(threading.Thread):
    """Thread that passes the log on to stderr, reports each phase once, and keeps the last lines.

    It empties the pipe even if stderr fails, because a server that cannot write its log blocks.

    Args:
        stream: the server's output.
        started: time of the start, by time.monotonic().
    """

    def __init__(self, stream: Any, patterns: LogPatterns, started: float) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self.patterns = patterns
        self.started = started
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.reported: set[str] = set()

    def run(self) -> None:
        """Reads the log until the server closes it."""
        with self.stream:
            while chunk := self.stream.readline(CHUNK):
                self.tail.append(chunk.rstrip("\n")[:KEPT_LINE])
                write_stderr(chunk)
                self._report_phase(chunk[:KEPT_LINE])

    def _report_phase(self, line: str) -> None:
        """Reports the phase that a line begins, if it was not reported before."""
        phase = self.patterns.phase(line)
        if phase is not None and phase not in self.reported:
            self.reported.add(phase)
            announce(f"trtspec: {phase} ({time.monotonic() - self.started:.0f} s)")
