"""Why a run ends before its last step: Ctrl-C, a scheduler's SIGTERM, or the time that it was given.

The step under way is finished, then the state and a head are written. In a group of processes all stop at the same
step, whichever of them noticed.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch

from trtspec.heads.training.processes import World

TIME = "time"
REASONS = (TIME, "SIGTERM", "SIGINT")


class Stop:
    """Collects the reasons to stop while it is entered. A second signal of a kind acts at once, as without it."""

    def __init__(self, deadline: float | None = None) -> None:
        """`deadline`: of time.monotonic()."""
        self.deadline = deadline
        self.reason: str | None = None  # of the whole group, once `asked` has said so
        self._heard: set[str] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._heard.add(signal.Signals(number).name)
        signal.signal(number, self._before[number])

    def asked(self, world: World, reserve: float) -> bool:
        """Whether to stop now; `reserve`: seconds that another step with its saving would take."""
        if self.deadline is not None and time.monotonic() + reserve > self.deadline:
            self._heard.add(TIME)
        flags = world.sum(torch.tensor([float(reason in self._heard) for reason in REASONS]))
        self.reason = next((reason for reason, flag in zip(REASONS, flags.tolist(), strict=True) if flag), self.reason)
        return self.reason is not None
