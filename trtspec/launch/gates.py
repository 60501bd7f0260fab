"""What came with a release of an engine, where nobody wrote down with which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

State = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Gate:
    """`what` is possible from `by` on, is known to be impossible up to `after`, and unknown between the two."""

    name: str
    what: str
    after: str
    by: str
    source: str

    def state(self, version: Version) -> State:
        if version <= Version(self.after):
            return "no"
        return "yes" if version >= Version(self.by) else "unknown"

    @property
    def interval(self) -> str:
        return f"after {self.after}, by {self.by}"
