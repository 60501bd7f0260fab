"""A launch over loopback: whose server it is, whether it hangs, and what becomes of the streams."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.command_line import free_port, wait_for

HERE = Path(__file__).parent
Launched = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def launch(port: int) -> Iterator[Launched]:
    running: list[subprocess.Popen[str]] = []

    def start(
        mode: str = "serve", redirect: str = "", env: dict[str, str] | None = None, **more: Any
    ) -> subprocess.Popen[str]:
        words = [sys.executable, str(HERE / "launch_one.py"), str(port), mode, json.dumps(more)]
        process = subprocess.Popen(
            ["sh", "-c", f"exec {shlex.join(words)} {redirect}"],
            stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
        )  # fmt: skip
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended with {process.wait()}:\n{seen[-3000:]}")


def server_below(process: subprocess.Popen[str]) -> psutil.Process:
    return next(
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if "tiny_server.py" in p.cmdline()[3]
    )


def test_ready_and_stopped_are_said_without_a_terminal(launch: Launched) -> None:
    process = launch()
    read_until(process, "trtspec: ready on http://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=300)
    assert process.returncode == 143 and "trtspec: stopped as requested" in log


@pytest.mark.parametrize(
    ("mode", "signals", "status", "says"),
    [
        ("tidy", 1, 0, "stopped as requested"),
        ("slow", 2, 137, "a second signal"),
        ("deaf", 1, 143, "did not end in 1 s"),
    ],
)
@pytest.mark.clock
def test_a_server_that_is_loading_has_a_moment_to_end(
    launch: Launched, mode: str, signals: int, status: int, says: str
) -> None:
    """While a server loads, the signal is passed on once, and it has a moment to end.

    One signal was passed on twice, and the second one killed. vLLM's front end does not listen
    while it loads.
    """
    process = launch(mode, limits={"stop_grace": 1.0} if mode == "deaf" else {})
    read_until(process, "loading")
    server = server_below(process)
    process.send_signal(signal.SIGTERM)
    if signals == 2:
        read_until(process, "tidying")
        process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=300)
    assert process.returncode == status and says in log, log
    assert not server.is_running()


def test_quiet_is_quiet(launch: Launched, port: int) -> None:
    process = launch(env={"TRTSPEC_QUIET": "1"})

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    wait_for(answers)
    process.send_signal(signal.SIGTERM)
    assert "trtspec:" not in process.communicate(timeout=300)[1]


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-"])
@pytest.mark.clock
def test_a_closed_stdin_does_not_break_the_control_pipe(launch: Launched, closed: str) -> None:
    process = launch(redirect=closed)
    read_until(process, "ready on")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 143


def test_another_server_on_the_port_is_not_ours(launch: Launched, port: int) -> None:
    other = subprocess.Popen(
        [sys.executable, "-I", "-S", str(HERE / "tiny_server.py"), str(port), "serve"]
    )
    try:
        process = launch("silent")
        _, log = process.communicate(timeout=300)
    finally:
        other.kill()
        other.wait()
    assert process.returncode == 1 and "ready" not in log
    assert (
        "TS-SERVE-OTHER-SERVER: " in log and f"(process {other.pid}) answers on port {port}" in log
    )


@pytest.mark.clock
def test_a_server_that_does_not_generate_is_ended(launch: Launched) -> None:
    process = launch("mute", first_generation=0.5)
    _, log = process.communicate(timeout=300)
    assert process.returncode == 1, log
    assert "does not generate: no answer within 0.5 s" in log and "Traceback" not in log


@pytest.mark.clock
def test_a_server_that_hangs_is_ended(launch: Launched) -> None:
    process = launch(limits={"hung_after": 0.8, "stop_grace": 1.0})
    read_until(process, "ready on")
    server = server_below(process)
    server.suspend()
    log = read_until(process, "TS-SERVE-HUNG")
    assert "no answer from /health (1 of 8)" in log and "8 health checks in a row" in log
    assert process.wait(300) == 1 and not server.is_running()


@pytest.mark.clock
def test_a_server_that_recovers_is_kept(launch: Launched) -> None:
    process = launch(limits={"hung_after": 4.0})
    read_until(process, "ready on")
    server = server_below(process)
    server.suspend()
    read_until(process, "no answer from /health (2 of 8)")
    server.resume()
    read_until(process, "/health answers again")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 143


def test_a_line_without_an_end_takes_no_memory(launch: Launched) -> None:
    process = launch("long-line")
    assert process.stderr is not None
    end, asked = b"", False
    while piece := os.read(process.stderr.fileno(), 2**16):
        if b"ready on" in (end := (end + piece)[-(2**17) :]) and not asked:
            process.send_signal(signal.SIGTERM)
            asked = True
    peak = int(end.rpartition(b"peak ")[2].split()[0])
    assert 0 < peak < 150


def test_a_proxy_is_not_asked_for_this_machine(launch: Launched) -> None:
    process = launch(env={"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""})
    read_until(process, "ready on")
