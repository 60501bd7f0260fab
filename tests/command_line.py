"""`trtspec ...` through its entry point, in this process or in one of its own.

A run has the status, stdout and stderr that a shell gets.
"""

import asyncio
import contextlib
import io
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from trtspec.cli.app import main
from trtspec.cli.inspect import InspectOptions, inspect
from trtspec.report import Result

ROOT = Path(__file__).parents[1]
TRTSPEC = [sys.executable, "-m", "trtspec"]
SEED = int(os.environ.get("TRTSPEC_SEED", "1"))


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def problem_codes(report: Any) -> set[str]:
    """The codes of a report's problems."""
    return {problem["code"] for problem in report["problems"]}


def trtspec(*words: object, **environment: str) -> Done:
    """Runs the command with additional variables, in a terminal too wide to wrap tables."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["trtspec", *map(str, words)]),
        mock.patch.dict(os.environ, {"COLUMNS": "9999"} | environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stopped:
            status = (
                stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
            )
    return Done(status, out.getvalue(), err.getvalue())


def succeeded(*words: object, **environment: str) -> Done:
    """Like `trtspec`, but the test fails unless the status is 0."""
    done = trtspec(*words, **environment)
    assert done.status == 0, done
    return done


def process(*words: object, **environment: str) -> Done:
    """Runs the command in a process of its own, with these additional variables."""
    return ran(*TRTSPEC, *words, env=os.environ | environment, timeout=900)


def ran(*command: object, **options: Any) -> Done:
    """Runs any command, with options of `subprocess.run`."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    return Done(done.returncode, done.stdout, done.stderr)


def printed(*command: object, **options: Any) -> str:
    """What the command prints; the test fails unless its status is 0."""
    done = ran(*command, **options)
    assert done.status == 0, done
    return done.stdout


def printed_json(*command: object, **options: Any) -> Any:
    """The JSON in the last line of that."""
    return json.loads(printed(*command, **options).splitlines()[-1])


@contextlib.contextmanager
def served(port: int, *command: object) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process of a server that this command starts on the port.

    It answers when the block begins, and is ended with it.
    """
    from trtspec.client.client import wait_ready

    url, process = f"http://127.0.0.1:{port}", subprocess.Popen(list(map(str, command)))
    try:
        assert asyncio.run(wait_ready(url, 300, stopped=lambda: process.poll() is not None)), (
            "the server ended"
        )
        yield url, process
    finally:
        process.terminate()
        process.wait(timeout=300)


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened in {seconds:g} s"
        time.sleep(0.01)


def calls_of(run: Callable[[], object]) -> int:
    """Python calls of a run in all its threads: its length, on a machine of any speed."""
    calls = itertools.count()
    with traced(lambda: next(calls)):
        run()
    return next(calls)


def killed_at(call: float, run: Callable[[], object]) -> bool:
    """Runs it in a fork that SIGKILL ends at this call; False if the run ended before."""
    calls = itertools.count()

    def kill_at_call() -> None:
        if next(calls) >= call:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        status = 1
        try:
            with traced(kill_at_call):
                run()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


@contextlib.contextmanager
def traced(on_call: Callable[[], object]) -> Iterator[None]:
    def trace(*_: object) -> None:
        on_call()

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)


def inspected(path: object, against: object = None, sample: int | None = None) -> Result:
    """What `trtspec inspect` finds, before it is printed."""
    against = None if against is None else str(against)
    return inspect(InspectOptions(path=str(path), against=against, sample=sample))


def program(path: Path, script: str) -> Path:
    """An executable file with this shell script, in a directory that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


class LocalServer(ThreadingHTTPServer):
    """Answers on a port of this machine, free or given, until it is shut down."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class LocalHandler(BaseHTTPRequestHandler):
    """Sends whole answers, their headers alone to HEAD."""

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        """Header names have underscores in place of hyphens."""
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.write(body)

    def write(self, body: bytes) -> None:
        self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:
        pass


class FixedServer(LocalServer):
    """Gives the text that `bodies` holds for a path; 404 for others."""

    def __init__(self, bodies: dict[str, str], port: int = 0) -> None:
        self.bodies = bodies
        super().__init__(_Handler, port)


class _Handler(LocalHandler):
    server: FixedServer

    def do_GET(self) -> None:
        body = self.server.bodies.get(self.path)
        self.answer(404 if body is None else 200, (body or "").encode())


def free_port() -> int:
    """A port outside those of outgoing connections, so that it stays free until a server starts."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            port = 20000 + secrets.randbelow(12000)
            probe.bind(("127.0.0.1", port))
            return port


def alive(pid: int) -> bool:
    """Whether this process runs; a zombie only waits for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
