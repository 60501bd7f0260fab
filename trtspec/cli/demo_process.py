"""Runs the commands that `trtspec demo` is made of, and the servers they talk to; nothing is left running."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    import httpx

READY_SECONDS = 180
STOP_SECONDS = 20
TAIL_LINES = 25
POLL_SECONDS = 0.02


@dataclass
class DemoStep:
    """One command as it was run. `expected` and `seconds` in seconds."""

    stage: int
    purpose: str
    command: str
    expected: float
    seconds: float = 0.0
    status: int | None = None


@dataclass
class Chain:
    """The demo's commands in order, in one working directory; stages are numbered as they begin."""

    directory: Path
    stages: int
    steps: list[DemoStep] = field(default_factory=list)
    stage: int = 0
    quiet: bool = False

    def begin(self, title: str, about: str, expected: float) -> None:
        """Announces a stage: what it does and about how long it takes."""
        self.stage += 1
        self.say(f"\n[{self.stage}/{self.stages}] {title} (about {duration(expected)})\n    {about}")

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def run(self, arguments: Sequence[str], purpose: str, expected: float, allowed: tuple[int, ...] = (0,)) -> str:
        """Runs `trtspec ARGUMENTS` and returns its stdout. Raises TrtspecError with its output when it fails."""
        return self.run_module("trtspec", arguments, purpose, expected, allowed)

    def run_module(
        self, module: str, arguments: Sequence[str], purpose: str, expected: float, allowed: tuple[int, ...] = (0,)
    ) -> str:
        """As `run`, for any module of this interpreter."""
        shown = shlex.join(arguments)
        name = "trtspec" if module == "trtspec" else f"python -m {module}"
        step = DemoStep(self.stage, purpose, f"{name} {shown}", expected)
        self.steps.append(step)
        self.say(f"    $ {step.command}")
        began = time.monotonic()
        log = self.directory / "logs" / f"{len(self.steps):02d}-{purpose.replace(' ', '-')}.out"
        # stderr stays the terminal's, so that progress bars and messages are seen as they come
        with (
            log.open("wb") as stream,
            child([sys.executable, "-m", module, *arguments], stdout=stream) as process,
        ):
            wait(process)
        step.seconds, step.status = time.monotonic() - began, process.returncode
        output = log.read_bytes()
        if step.status not in allowed:
            raise TrtspecError(
                f"`{step.command}` ended with status {step.status} after {duration(step.seconds)}; "
                f"its output ({log}):\n{tail(output)}",
                "the message above says why; run that command by hand to look closer",
            )
        note = "" if step.status == 0 else f", with findings (status {step.status}) that the report shows"
        self.say(f"      {purpose}: done in {duration(step.seconds)}{note}")
        return output.decode("utf-8", "replace")

    def run_json(
        self, arguments: Sequence[str], purpose: str, expected: float, allowed: tuple[int, ...] = (0,)
    ) -> dict[str, Any]:
        """As `run`, for commands with --json."""
        output = self.run([*arguments, "--json"], purpose, expected, allowed)
        try:
            found = json.loads(output)
        except ValueError:
            raise TrtspecError(f"`{self.steps[-1].command}` printed no JSON:\n{tail(output.encode())}") from None
        return found

    @contextmanager
    def server(self, name: str, arguments: Sequence[str], port: int) -> Iterator[str]:
        """`trtspec serve ARGUMENTS` until the block ends; yields its URL once /health answers 200."""
        from trtspec.client.client import health

        command = ["serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
        self.say(f"    $ trtspec {shlex.join(command)} &")
        log = self.directory / "logs" / f"serve-{name}.log"
        step = DemoStep(self.stage, f"serve {name}", f"trtspec {shlex.join(command)}", 0)
        self.steps.append(step)
        began = time.monotonic()
        with log.open("wb") as stream:
            # its own session: Ctrl-C reaches the demo alone, which then stops the server in order
            whole = [sys.executable, "-m", "trtspec", *command]
            with child(whole, stdout=stream, stderr=stream, start_new_session=True) as process:
                url = f"http://127.0.0.1:{port}"
                until_ready(process, url, log, READY_SECONDS, health)
                step.seconds = time.monotonic() - began
                yield url
        step.status = 0 if process.returncode in (0, -15, 143) else process.returncode

    def to_dicts(self) -> list[dict[str, Any]]:
        return [asdict(step) for step in self.steps]


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted in the block and raised at its end.

    Their handlers raise KeyboardInterrupt: inside Popen that leaves behind a process that nobody knows, or a lock that
    nobody releases. A block polls and looks at the list, because Python handles a signal that comes just before a
    blocking read or wait only after it.
    """
    noted: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heard = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    try:
        for number in heard:
            signal.signal(number, lambda caught, _: noted.append(caught))
        yield noted
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)
        if noted:
            signal.raise_signal(noted[0])


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives no longer than the block. `options` are Popen's; `env` is `environment()` unless given."""
    process = None
    try:
        with noted_signals():
            process = subprocess.Popen(command, env=options.pop("env", None) or environment(), **options)
        yield process
    finally:
        if process is not None:
            stop(process)


def wait(process: subprocess.Popen[Any]) -> None:
    """Returns when the process has ended."""
    with noted_signals() as noted:
        while process.poll() is None and not noted:
            time.sleep(POLL_SECONDS)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL when that is not enough, or at once when another signal asks."""
    with noted_signals() as noted:
        if process.poll() is not None:
            return
        process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while process.poll() is None and not noted and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()


def until_ready(
    process: subprocess.Popen[bytes],
    url: str,
    log: Path,
    seconds: float,
    look: Callable[[httpx.AsyncClient], Awaitable[None]],
) -> None:
    """Returns once `look` raises nothing. Raises TrtspecError with the log when the server ends or takes too long."""
    from trtspec.client.client import RequestFailed, wait_ready

    with noted_signals() as noted:
        try:
            asyncio.run(wait_ready(url, seconds, look, lambda: noted or process.poll() is not None, {}))
        except RequestFailed:
            message = f"the server was not ready after {seconds:.0f} s; see {log}"
            raise TrtspecError(message, "look at its log") from None
        if process.poll() is not None and not noted:
            raise TrtspecError(
                f"the server ended with status {process.returncode} before it was ready; {log} says:\n"
                f"{tail(log.read_bytes())}",
                "run that serve command by hand",
            )


def environment() -> dict[str, str]:
    """The children's environment: nothing is fetched, and a shell's proxies stay out of loopback traffic."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def free_ports(first: int, count: int) -> None:
    """Raises TrtspecError naming the first port that is taken, before any work is done."""
    for port in range(first, first + count):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError as error:
                remedy = f"pass --port N with {count} free ports from N on"
                raise TrtspecError(f"port {port} is taken: {error.strerror}", remedy) from None


def duration(seconds: float) -> str:
    """`42 s` or `3 min 05 s`."""
    whole = round(seconds)
    return (
        f"{seconds:.1f} s" if seconds < 10 else f"{whole} s" if whole < 90 else f"{whole // 60} min {whole % 60:02d} s"
    )


def tail(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
    return "\n".join(lines) or "(nothing)"
