"""A server as it is seen from outside. Whether it is ready: it is the one that was started, /health says so, and a real
generation comes back. Its log: passed on as it comes, phases reported once, last lines kept, known failures explained.
"""

from __future__ import annotations

import collections
import functools
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trtspec.report import say, write_stderr

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

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


@functools.cache
def opener() -> OpenerDirector:
    """Never through a proxy: http_proxy is set on many clusters, and a proxy does not reach this machine's loopback."""
    from urllib.request import ProxyHandler, build_opener  # here, as psutil below: a dry run has no use for 40 ms

    return build_opener(ProxyHandler({}))


def is_healthy(url: str, timeout: float = 2.0) -> bool:
    """Whether GET /health answers 200 within `timeout` seconds."""
    from http.client import HTTPException

    try:
        with opener().open(f"{url}/health", timeout=timeout) as response:
            return response.status == 200
    except (OSError, ValueError, HTTPException):
        return False


def stranger(endpoint: ServerAddress, root: int) -> str | None:
    """What answers at `endpoint`, in words, when it is not a process below `root`; None when it is, or when nobody can
    tell and the model has the right name."""
    from http.client import HTTPException

    if endpoint.local:
        owned = _listens_below(endpoint.port, root)
        if owned is not None:
            return None if owned else _listener(endpoint.port)
    if not endpoint.model_names:
        return None
    try:
        served = model_name(endpoint.url, 10.0, endpoint.api_key)
    except (OSError, ValueError, HTTPException, LookupError, TypeError):
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


def generation_failure(url: str, timeout: float, key: str | None = None) -> str | None:
    """None when one token comes back within `timeout` seconds, else the reason in words."""
    import urllib.error
    from http.client import HTTPException

    try:
        body = {"model": model_name(url, timeout, key), "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        choices = _json(f"{url}/v1/completions", body, timeout, key)["choices"]
        return None if choices else "the answer has no choices"
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
    except urllib.error.URLError as error:
        timed_out = isinstance(error.reason, TimeoutError)
        return f"no answer within {timeout:g} s" if timed_out else str(error.reason)
    except HTTPException as error:  # the server went away in the middle of its answer
        return f"the answer broke off: {type(error).__name__}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def model_name(url: str, timeout: float, key: str | None = None) -> str:
    """What /v1/models calls the model. Raises what a broken connection or another kind of answer raises."""
    return str(_json(f"{url}/v1/models", None, timeout, key)["data"][0]["id"])


def _json(url: str, body: dict[str, Any] | None, timeout: float, key: str | None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    from urllib.request import Request

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = Request(url, data, headers)
    with opener().open(request, timeout=timeout) as response:
        return json.loads(response.read())


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

    The pipe is emptied whatever becomes of stderr: a server that cannot write its log stands still.
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
