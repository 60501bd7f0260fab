"""One server to start, as data: where it will answer, how long it may take, what its log means, and its command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtspec.data_files import load_yaml


@dataclass(frozen=True)
class ServerAddress:
    """Where a server answers. `generates`: whether it answers a prompt by itself; one half of a disaggregated pair does
    not. `api_key`: what requests below /v1 must carry."""

    host: str
    port: int
    generates: bool = True
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """As a client on this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Limits:
    """Seconds: until it must be ready, between a signal and SIGKILL, and without an answer from /health until a ready
    server counts as hung (0: never)."""

    startup: float = 7200.0
    stop_grace: float = 30.0
    hung_after: float = 120.0


@dataclass(frozen=True)
class LogPatterns:
    """What the log of one engine means. `phases` and `failures` are {pattern, says} and {pattern, says, remedy}, the
    first match wins; `unknown` is the remedy for a failure that no pattern knows."""

    engine: str
    phases: Sequence[dict[str, str]] = ()
    failures: Sequence[dict[str, str]] = ()
    unknown: str = ""

    @classmethod
    def load(cls, path: Path) -> LogPatterns:
        return cls(**load_yaml(path))

    def explain(self, lines: list[str]) -> tuple[str, str] | None:
        """(what happened, remedy) for the first known failure that the log names."""
        named = (
            known
            for known in self.failures
            if any(re.search(known["pattern"], line) for line in lines)
        )
        return next(((known["says"], known["remedy"]) for known in named), None)

    def phase(self, line: str) -> str | None:
        return next(
            (phase["says"] for phase in self.phases if re.search(phase["pattern"], line)), None
        )


@dataclass(frozen=True, kw_only=True)
class ServerLaunch:
    """`env` is added to the environment. `own_statuses`: `argv` starts with a launcher such as mpirun, whose status
    after a signal is its own."""

    argv: list[str]
    endpoint: ServerAddress
    patterns: LogPatterns
    env: dict[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    own_statuses: bool = False
