"""One server to start, as data: its address, time limits, the meaning of its log, its command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtspec.data_files import load_yaml


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server.

    `generates`: whether it answers a prompt by itself, unlike half a disaggregated pair. `api_key`:
    the key that requests below /v1 must carry.
    """

    host: str
    port: int
    generates: bool = True
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        if ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Limits:
    """Time limits of a server, in seconds.

    `startup`: until it must be ready. `stop_grace`: between a signal and SIGKILL. `hung_after`:
    without an answer from /health until a ready server counts as hung, 0 for never.
    """

    startup: float = 7200.0
    stop_grace: float = 30.0
    hung_after: float = 120.0


@dataclass(frozen=True)
class LogPatterns:
    """The meaning of an engine's log.

    `phases` are {pattern, says}, `failures` {pattern, says, remedy}, and the first match wins.
    `unknown`: the remedy for a failure without a pattern.
    """

    engine: str
    phases: Sequence[dict[str, str]] = ()
    failures: Sequence[dict[str, str]] = ()
    unknown: str = ""

    @classmethod
    def load(cls, path: Path) -> LogPatterns:
        return cls(**load_yaml(path))

    def explain(self, lines: list[str]) -> tuple[str, str] | None:
        """The message and remedy of the first known failure in the log, or None."""
        for failure in self.failures:
            if any(re.search(failure["pattern"], line) for line in lines):
                return failure["says"], failure["remedy"]
        return None

    def phase(self, line: str) -> str | None:
        for phase in self.phases:
            if re.search(phase["pattern"], line):
                return phase["says"]
        return None


@dataclass(frozen=True, kw_only=True)
class ServerLaunch:
    """A server and how to start it.

    `env`: additions to the environment. `own_statuses`: `argv` starts with a launcher such as
    mpirun, which has statuses of its own after a signal.
    """

    argv: list[str]
    endpoint: ServerAddress
    patterns: LogPatterns
    env: dict[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    own_statuses: bool = False
