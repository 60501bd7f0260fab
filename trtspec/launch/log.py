"""A server's log: passed on as it comes, its phases reported once, its last lines kept, known failures explained."""

from __future__ import annotations

import collections
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trtspec.report import say, write_stderr

TAIL_LINES = 400
PIECE = 65536  # characters: a longer line is passed on in pieces, so that memory stays bounded
KEPT_LINE = 2000  # characters of a line that an error message may repeat
PERCENT = re.compile(r"\b(\d{1,3})%")
PERCENT_STEP = 10


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
