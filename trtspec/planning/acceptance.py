"""Acceptance as the user measured it: a curve over the draft position, from one figure or from results.json of bench.

It is never assumed. Acceptance length counts the bonus token: AL(k) = 1 + a1 + a1 a2 + .. + a1..ak with the conditional
acceptance a_j of draft j among the steps that accepted draft j - 1.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import UsageError

EXAMPLE = (
    "for example --acceptance 2.62@3 (tokens per step, measured with 3 drafts), or results.json of `trtspec bench`"
)
VALUE = re.compile(r"(\d+(?:\.\d+)?)(?:@(\d+))?")


@dataclass(frozen=True)
class Acceptance:
    """`conditional[j]` is the chance of draft j + 1 given all before it; positions beyond repeat the last one."""

    conditional: tuple[float, ...]
    source: str
    flat: bool  # one rate stands for every position, because only a length is known
    doubts: tuple[str, ...] = ()  # what bench itself found wrong with the measurement

    @property
    def measured(self) -> int:
        """Draft positions that the measurement covers."""
        return len(self.conditional)

    def length(self, drafts: int) -> float:
        """Tokens per verification step with `drafts` drafts, bonus token included."""
        total, reached = 1.0, 1.0
        for position in range(drafts):
            reached *= self.conditional[min(position, self.measured - 1)]
            total += reached
        return total


def flat_rate(length: float, drafts: int) -> float:
    """The constant conditional acceptance whose chain of `drafts` drafts has this acceptance length (bisection)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        found = 1 + sum(middle**k for k in range(1, drafts + 1))
        low, high = (middle, high) if found < length else (low, middle)
    return (low + high) / 2


def parse_acceptance(text: str, concurrency: int | None = None) -> dict[str, Acceptance]:
    """By workload: the whole measurement as "all", and each category of a bench file. Raises UsageError."""
    path = Path(text).expanduser()
    if path.exists():
        return _from_bench(path / "results.json" if path.is_dir() else path)
    found = VALUE.fullmatch(text)
    if found is None:
        raise UsageError(f"--acceptance {text!r} is neither a number nor a file that exists", EXAMPLE)
    value, drafts = float(found[1]), int(found[2] or 3)
    if 0 < value < 1:
        return {"all": Acceptance((value,) * drafts, f"{value} of the drafts at each position, as given", True)}
    if not 1 <= value <= drafts + 1:
        raise UsageError(f"{drafts} drafts give 1 to {drafts + 1} tokens per step, not {value}", EXAMPLE)
    measured = f"{value} tokens per step at {drafts} drafts, as given"
    measured += "" if found[2] else " (3 drafts: the length of the model cards; write VALUE@DRAFTS for another)"
    return {"all": Acceptance((flat_rate(value, drafts),) * drafts, measured, True)}


def _from_bench(path: Path) -> dict[str, Acceptance]:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        groups = {"all": results, **results["categories"]}
        doubts = tuple(problem["message"] for problem in results.get("problems", ()) if problem["severity"] != "info")
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not a results.json of `trtspec bench`", EXAMPLE) from None
    found = {name: _from_group(group, f"{path}, {name}", doubts) for name, group in groups.items()}
    measured = {name: item for name, item in found.items() if item is not None}
    if "all" not in measured:
        message = f"{path} tells no acceptance: its server did not say how many drafts were accepted"
        raise UsageError(message, "bench an endpoint that speculates, or give the figure: " + EXAMPLE)
    return measured


def _from_group(group: dict[str, Any], source: str, doubts: tuple[str, ...]) -> Acceptance | None:
    curve = [rate for rate in group.get("conditional") or [] if rate is not None]
    if curve:
        return Acceptance(tuple(curve), f"{source}: accepted by position, {group['steps']} steps", False, doubts)
    steps, drafted, length = group.get("steps"), group.get("drafted"), group.get("acceptance_length")
    if not steps or not drafted or not length:
        return None
    drafts = max(1, round(drafted / steps))
    rate = flat_rate(min(length, drafts + 1), drafts)
    return Acceptance((rate,) * drafts, f"{source}: {length} tokens per step at {drafts} drafts", True, doubts)
