"""Commands and servers that other commands start, and that end with the process that started them.

They also end if that process is killed (Linux). An interrupt at any moment leaves no process
behind.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trtspec.client.client import RequestFailed, generate_once, wait_ready
from trtspec.errors import TrtspecError, signals_handled
from trtspec.launch.preflight import check_port
from trtspec.launch.reaper import PR_SET_PDEATHSIG, prctl
from trtspec.report import create

STOP_SECONDS = 60.0  # time for a server to end before it is killed
TAIL_LINES = 25  # lines at the end of a log that an error message repeats
POLL_SECONDS = 0.02  # time between two checks of a process
PORT_POLL_SECONDS = 1.0  # time between two checks of a taken port


def run_trtspec(words: Sequence[str], output: Path) -> int:
    """Runs `trtspec WORDS` with its stdout in the file `output` and its stderr on the terminal.

    Returns the exit status.
    """
    with ExitStack() as files:
        out = files.enter_context(create(output))
        process = files.enter_context(child([sys.executable, "-m", "trtspec", *words], stdout=out))
        wait(process)
        os.fsync(out.fileno())
    return int(process.returncode)


@contextmanager
def served(
    words: Sequence[str], url: str, log: Path, seconds: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the server `trtspec WORDS` while the block runs. The block begins after one generation.

    Raises TrtspecError with the end of the log if the server ends, or is not ready in time.

    Args:
        words: words of the command after `trtspec`.
        url: address of the server.
        log: file for the server's output.
        seconds: time until the server must be ready.
    """
    # a session of its own: Ctrl-C reaches the caller alone, which then stops the server in order
    command = [sys.executable, "-m", "trtspec", *words]
    with (
        create(log) as stream,
        child(command, stdout=stream, stderr=stream, start_new_session=True) as process,
    ):
        failure = ""
        with deferred_signals() as noted:

            def stopped() -> bool:
                """Whether a signal came or the server ended, so that waiting is useless."""
                return bool(noted) or process.poll() is not None

            try:
                asyncio.run(wait_ready(url, seconds, generate_once, stopped))
            except RequestFailed:
                failure = f"was not ready after {seconds:.0f} s"
            if process.poll() is not None and not noted:
                failure = f"ended with status {process.returncode} before it was ready"
        if failure:
            message = f"the server {failure}; {log} ends:\n{tail(log)}"
            raise TrtspecError(message, f"trtspec {shlex.join(words)}")
        yield process


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process while the block runs, and stops it at the end of the block.

    The process also gets SIGTERM when the thread that started it dies. `options`: Popen's, except
    `env` and `preexec_fn`.
    """
    process = None
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    # in the child between fork and exec: SIGTERM when its parent dies, even by SIGKILL
    options["preexec_fn"] = partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        with deferred_signals():
            process = subprocess.Popen(command, env=environment, **options)
        yield process
    finally:
        if process is not None:
            stop(process)


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM while the block runs, and raises the first one at its end.

    The handlers of both raise KeyboardInterrupt. Inside Popen that leaves a process that nobody
    knows, or a lock that nobody releases.

    The block must poll the list, because Python handles a signal just before a blocking read only
    after the read.
    """
    noted: list[int] = []
    both = (signal.SIGINT, signal.SIGTERM)
    # an ignored signal stays ignored, as under nohup
    handled = [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]
    try:
        with signals_handled(lambda caught, _: noted.append(caught), *handled):
            yield noted
    finally:
        if noted:
            signal.raise_signal(noted[0])


def wait(process: subprocess.Popen[Any]) -> None:
    """Waits until the process has ended, or a signal came."""
    with deferred_signals() as noted:
        while process.poll() is None and not noted:
            time.sleep(POLL_SECONDS)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process by SIGTERM.

    Sends SIGKILL after STOP_SECONDS, or at once after another signal.
    """
    with deferred_signals() as noted:
        if process.poll() is not None:
            return
        process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while process.poll() is None and not noted and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()


def require_free_ports(first: int, count: int, patience: float = 0.0) -> None:
    """Raises TrtspecError with the first port that is still taken after `patience` seconds.

    The ports are `first` and the `count` - 1 after it.
    """
    deadline = time.monotonic() + patience
    for port in range(first, first + count):
        while problems := [*check_port("127.0.0.1", port)]:
            if time.monotonic() > deadline:
                remedy = f"pass `port` N: {count} free ports from N on"
                raise TrtspecError(problems[0].message, remedy)
            time.sleep(PORT_POLL_SECONDS)


def duration(seconds: float) -> str:
    """Time in seconds as text, such as `4.2 s`, `42 s` or `3 min 05 s`."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def tail(log: Path) -> str:
    """Last lines of a log, "(nothing)" for an empty log."""
    lines = log.read_bytes().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
    return "\n".join(lines) or "(nothing)"
