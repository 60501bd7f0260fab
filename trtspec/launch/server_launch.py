"""The description of one server to start: its address, time limits, log patterns and command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtspec.data_files import load_yaml


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server.

    Args:
        generates: whether the server answers a prompt by itself, unlike half a disaggregated pair.
        api_key: key that requests below /v1 must carry. None if the server needs no key.
    """

    host: str
    port: int
    generates: bool = True
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """URL for clients on this machine."""
        # an address to listen on all interfaces is not an address to connect to
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        if ":" in host:  # IPv6
            host = f"[{host}]"
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Limits:
    """Time limits of a server, in seconds.

    Args:
        startup: time until the server must be ready.
        stop_grace: time between a signal and SIGKILL.
        hung_after: time without an answer from /health until a ready server counts as hung, 0 for
            never.
    """

    startup: float = 7200.0
    stop_grace: float = 30.0
    hung_after: float = 120.0


@dataclass(frozen=True)
class LogPatterns:
    """The meaning of an engine's log.

    Args:
        engine: name of the engine for people.
        phases: {pattern, says} of each phase of the start. The first match counts.
        failures: {pattern, says, remedy} of each known failure. The first match counts.
        unknown: remedy for a failure without a pattern.
    """

    engine: str
    phases: Sequence[dict[str, str]] = ()
    failures: Sequence[dict[str, str]] = ()
    unknown: str = ""

    @classmethod
    def load(cls, path: Path) -> LogPatterns:
        """Reads the patterns of an engine from a YAML file."""
        return cls(**load_yaml(path))

    def explain(self, lines: list[str]) -> tuple[str, str] | None:
        """Returns the message and remedy of the first known failure in the log's lines, or None."""
        for failure in self.failures:
            if any(re.search(failure["pattern"], line) for line in lines):
                return failure["says"], failure["remedy"]
        return None

    def phase(self, line: str) -> str | None:
        """Message of the phase that a line of the log begins. None for any other line."""
        for phase in self.phases:
            if re.search(phase["pattern"], line):
                return phase["says"]
        return None


@dataclass(frozen=True, kw_only=True)
class ServerLaunch:
    """A server and how to start it.

    Args:
        argv: words of the command.
        endpoint: address of the server.
        patterns: meaning of the engine's log.
        env: variables that are added to the environment.
        own_statuses: whether `argv` begins with a launcher such as mpirun, whose exit status after
            a signal is its own.
    """

    argv: list[str]
    endpoint: ServerAddress
    patterns: LogPatterns
    env: dict[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    own_statuses: bool = False
