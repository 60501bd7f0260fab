"""The engine's log: passed on as it comes, its phases told once, its last lines kept, known failures explained."""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from trtspec.report import say

TAIL_LINES = 400
PERCENT = re.compile(r"\b(\d{1,3})%")
PERCENT_STEP = 10


@functools.cache
def _patterns() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("log_patterns.yaml").read_text(encoding="utf-8"))


def explain(lines: list[str]) -> tuple[str, str] | None:
    """(what happened, remedy) for the first known failure that the log names."""
    for known in _patterns()["failures"]:
        if any(re.search(known["pattern"], line) for line in lines):
            return known["says"], known["remedy"]
    return None


def phase(line: str) -> str | None:
    return next((p["says"] for p in _patterns()["phases"] if re.search(p["pattern"], line)), None)


class LogReader(threading.Thread):
    """Passes the engine's log on to stderr, tells each phase and tenth of the loading, keeps the last lines."""

    def __init__(self, stream: Any, started: float) -> None:
        super().__init__(daemon=True)
        self.stream, self.started = stream, started
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.said: set[str] = set()

    def run(self) -> None:
        # The pipe must be emptied whatever becomes of stderr: an engine that cannot log stands still.
        with self.stream:
            for line in self.stream:
                self.tail.append(line.rstrip("\n"))
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(line)
                    sys.stderr.flush()
                    self._tell(line)

    def _tell(self, line: str) -> None:
        now = phase(line)
        if now is None:
            return
        percent = PERCENT.search(line)
        if percent and 0 < int(percent[1]) < 100:
            now = f"{now}, {int(percent[1]) // PERCENT_STEP * PERCENT_STEP} %"
        if now not in self.said:
            self.said.add(now)
            say(f"trtspec: {now} ({time.monotonic() - self.started:.0f} s)")
