"""A server as it is seen from outside. Whether it is the one that was started. Its log: passed on as it comes, phases
reported once, last lines kept, known failures explained.
"""

from __future__ import annotations

import collections
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trtspec.report import say, write_stderr

if TYPE_CHECKING:
    import psutil
TAIL_LINES = 400
PIECE = 65536  # characters: a longer line is passed on in pieces, so that memory stays bounded
KEPT_LINE = 2000  # characters of a line that an error message may repeat
PERCENT = re.compile(r"\b(\d{1,3})%")
PERCENT_STEP = 10


@dataclass(frozen=True)
class ServerAddress:
    """Where a server answers. `model_names`: what /v1/models may call the model, for where the process that listens
    cannot be seen; empty accepts any. `generates`: whether it answers a prompt by itself; one half of a disaggregated
    pair does not. `local`: whether the process that listens is started below this one; Slurm's ranks are not.
    `api_key`: what requests below /v1 must carry."""

    host: str
    port: int
    model_names: tuple[str, ...] = ()
    generates: bool = True
    local: bool = True
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """As a client on this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def stranger(endpoint: ServerAddress, root: int) -> str | None:
    """What answers at `endpoint`, in words, when it is not a process below `root`; None when it is, or when nobody can
    tell and the model has the right name."""
    from trtspec.client.addresses import bearer
    from trtspec.client.client import RequestFailed, ask_once, first_model

    if endpoint.local:
        owned = _listens_below(endpoint.port, root)
        if owned is not None:
            return None if owned else _listener(endpoint.port)
    if not endpoint.model_names:
        return None
    try:
        served = ask_once(endpoint.url, partial(first_model, timeout=10.0), headers=bearer(endpoint.api_key))["id"]
    except RequestFailed:
        return None  # a server that cannot say its model fails to generate too, and that says why
    return None if served in endpoint.model_names else f"a server of the model {served!r}"


def _listens_below(port: int, root: int) -> bool | None:
    """Whether `root` or a process below it listens on `port`; None where one of them may not be looked into."""
    import psutil

    hidden = False
    for process in _family(root):
        try:
            sockets = process.net_connections(kind="tcp")
        except psutil.AccessDenied:
            hidden = True
            continue
        except psutil.NoSuchProcess:
            continue
        if any(socket.status == psutil.CONN_LISTEN and socket.laddr.port == port for socket in sockets):
            return True
    return None if hidden else False


def _family(root: int) -> Iterator[psutil.Process]:
    import psutil

    try:
        first = psutil.Process(root)
        yield from [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return


def _listener(port: int) -> str:
    import psutil

    try:
        sockets = psutil.net_connections(kind="tcp")
        pids = [s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr.port == port and s.pid]
        return f"{psutil.Process(pids[0]).name()} (process {pids[0]})"
    except (psutil.Error, OSError, IndexError):
        return "another process"


@dataclass(frozen=True)
class LogPatterns:
    """What the log of one engine means. `phases` and `failures` are {pattern, says} and {pattern, says, remedy}, the
    first match wins; `unknown` is the remedy for a failure that no pattern knows."""

    engine: str
    phases: tuple[dict[str, str], ...] = ()
    failures: tuple[dict[str, str], ...] = ()
    unknown: str = ""

    @classmethod
    def load(cls, path: Path) -> LogPatterns:
        read: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        return cls(read["engine"], tuple(read["phases"]), tuple(read["failures"]), read["unknown"])

    def explain(self, lines: list[str]) -> tuple[str, str] | None:
        """(what happened, remedy) for the first known failure that the log names."""
        for known in self.failures:
            if any(re.search(known["pattern"], line) for line in lines):
                return known["says"], known["remedy"]
        return None

    def phase(self, line: str) -> str | None:
        return next((phase["says"] for phase in self.phases if re.search(phase["pattern"], line)), None)


class LogReader(threading.Thread):
    """Passes the log on to stderr, reports each phase and tenth of the loading, keeps the last lines in `tail`.

    The pipe is emptied whatever becomes of stderr: a server that cannot write its log blocks.
    """

    def __init__(self, stream: Any, patterns: LogPatterns, started: float) -> None:
        super().__init__(daemon=True)
        self.stream, self.patterns, self.started = stream, patterns, started
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.reported: set[str] = set()

    def run(self) -> None:
        with self.stream:
            while piece := self.stream.readline(PIECE):
                self.tail.append(piece.rstrip("\n")[:KEPT_LINE])
                write_stderr(piece)
                self._report_phase(piece[:KEPT_LINE])

    def _report_phase(self, line: str) -> None:
        now = self.patterns.phase(line)
        if now is None:
            return
        percent = PERCENT.search(line)
        if percent and 0 < int(percent[1]) < 100:
            now = f"{now}, {int(percent[1]) // PERCENT_STEP * PERCENT_STEP} %"
        if now not in self.reported:
            self.reported.add(now)
            say(f"trtspec: {now} ({time.monotonic() - self.started:.0f} s)")
