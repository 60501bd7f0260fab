"""The servers of a proof: started, waited for and ended, and the one that a killed run left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtspec import files, report
from trtspec.bench.prove import ProveSetup, serve_words
from trtspec.cli.demo_process import child, noted_signals, stop, tail
from trtspec.errors import TrtspecError
from trtspec.launch.preflight import used_memory
from trtspec.launch.readiness import generation_failure, is_healthy

POLL = 0.1
LEFT_OVER = 180.0  # seconds that the server of a killed run gets to end
NEVER = 2.0  # seconds of silence before a first look at a server's health


@contextmanager
def served(
    setup: ProveSetup, launch: str, work: Path, startup: float
) -> Iterator[tuple[subprocess.Popen[bytes], str, float]]:
    """`trtspec serve` until the block ends: the process, its URL, and the seconds until it was ready. Raises
    TrtspecError where it ends, or is not ready after `startup` seconds."""
    port = free_port()
    words = ["serve", *serve_words(setup, launch, port)]
    log = work / f"serve-{launch}.log"
    report.say(f"trtspec serve, {launch}")
    began = time.monotonic()
    with (
        log.open("wb") as stream,
        child([sys.executable, "-m", "trtspec", *words], stdout=stream, stderr=stream, **tied()) as process,
    ):
        note = {"pid": process.pid, "started": start_time(process.pid)}
        report.write_json(work / "server.json", note)
        url = f"http://127.0.0.1:{port}"
        wait_ready(process, url, log, startup)
        yield process, url, time.monotonic() - began
        stop(process)
    (work / "server.json").unlink(missing_ok=True)


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, startup: float) -> None:
    """Returns once a generation came back."""
    deadline = time.monotonic() + startup
    with noted_signals() as noted:
        while time.monotonic() < deadline and not noted:
            if process.poll() is not None:
                said = tail(log.read_bytes())[-1500:]
                raise TrtspecError(f"the server ended with status {process.returncode}; its log says:\n{said}")
            if is_healthy(url, NEVER) and generation_failure(url, 300.0) is None:
                return
            time.sleep(POLL)
    raise TrtspecError(f"the server was not ready after {startup:.0f} s; see {log.name}")


def die_with_parent() -> None:
    """In a child between fork and exec: SIGTERM when its parent dies, even by SIGKILL (Linux's PR_SET_PDEATHSIG)."""
    LIBC.prctl(1, signal.SIGTERM)


LIBC = ctypes.CDLL(None)


def tied() -> dict[str, Any]:
    """Popen's options of every child; unlike the demo's commands, these may fetch a target from the hub."""
    found: dict[str, Any] = {"env": {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}}
    return found | ({"preexec_fn": die_with_parent} if sys.platform == "linux" else {})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_time(pid: int) -> float | None:
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def end_left_over(work: Path) -> None:
    """The server of a run that was killed holds the GPUs until it has ended. Raises TrtspecError when it does not."""
    path = work / "server.json"
    if not path.exists():
        return
    try:
        noted = files.read_object(path)
    except TrtspecError:
        noted = {}
    pid, started = noted.get("pid"), noted.get("started")
    deadline = time.monotonic() + LEFT_OVER
    while isinstance(pid, int) and started is not None and start_time(pid) == started:
        if time.monotonic() > deadline:
            raise TrtspecError(f"the server of an earlier run (process {pid}) does not end", f"kill {pid}")
        os.kill(pid, signal.SIGTERM)
        time.sleep(1.0)
    path.unlink(missing_ok=True)


def memory_of(pid: int) -> dict[str, Any]:
    """Bytes in use: of each GPU where nvidia-smi tells, and of the server's processes in the host's memory."""
    import psutil

    try:
        first = psutil.Process(pid)
        family = [first, *first.children(recursive=True)]
        resident = sum(process.memory_info().rss for process in family)
    except psutil.Error:
        resident = 0
    return {"per_gpu": used_memory(), "resident": resident}
