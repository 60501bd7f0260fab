"""Acceptance as the user measured it, by draft position, and what published curves say of the positions beyond.

Its height is never assumed: it comes from one figure or from results.json of bench. Acceptance length counts the bonus
token: AL(k) = 1 + a1 + a1 a2 + .. + a1..ak with the conditional acceptance a_j of draft j among the steps that accepted
draft j - 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec import files
from trtspec.errors import TrtspecError, UsageError
from trtspec.planning.decay import Decay, lengths, other_decays, published_decay

EXAMPLE = (
    "for example --acceptance 2.62@3 (tokens per step, measured with 3 drafts), or results.json of `trtspec bench`"
)
VALUE = re.compile(r"(\d+(?:\.\d+)?)(?:@(\d+))?")


@dataclass(frozen=True)
class Acceptance:
    """`known[j]` is the chance of draft j + 1 given all before it. Where only a length is known, `known` is empty and
    `length_at` holds that length and its number of drafts."""

    source: str
    known: tuple[float, ...] = ()
    length_at: tuple[float, int] | None = None
    doubts: tuple[str, ...] = ()  # what bench itself found wrong with the measurement
    decay: Decay | None = None  # of the positions that are not known; None is the published one

    def rates(self, drafts: int, decay: Decay | None = None) -> list[float]:
        """Conditional acceptance of positions 1 .. drafts; what is not known follows `decay`, else its own."""
        decay = decay or self.decay or published_decay()
        if self.length_at is not None:
            return decay.through(*self.length_at, drafts)
        return [*self.known[:drafts], *decay.beyond(self.known, drafts)]

    def length(self, drafts: int, decay: Decay | None = None) -> float:
        """Tokens per verification step with `drafts` drafts, bonus token included."""
        if self.length_at is not None and self.length_at[1] == drafts:
            return self.length_at[0]
        return lengths(self.rates(drafts, decay))[-1] if drafts else 1.0

    def measured(self, drafts: int) -> bool:
        """Whether the length for that many drafts was measured, and does not rest on the published decay."""
        return drafts <= len(self.known) or (self.length_at is not None and drafts == self.length_at[1])

    def decays(self, drafts: int) -> dict[str, Decay]:
        """The decay of each published curve by itself, between which the length for `drafts` drafts is not settled;
        none where it was measured."""
        return {} if self.measured(drafts) else other_decays()

    def rests_on(self) -> str:
        """What is measured and what is extrapolated, in a sentence."""
        falls = "as in InferenceX's published curves of Kimi-K2.5"
        if self.length_at is not None:
            drafts = f"{self.length_at[1]} draft{'s' if self.length_at[1] > 1 else ''}"
            return f"measured for {drafts} alone; extrapolated for others {falls}, scaled to that length"
        positions = "position" if len(self.known) == 1 else f"{len(self.known)} positions"
        return f"measured for the first {positions}; extrapolated beyond {falls}, scaled to the measured ones"


def parse_acceptance(text: str) -> dict[str, Acceptance]:
    """By workload: the whole measurement as "all", and each category of a bench file. Raises UsageError."""
    path = Path(text).expanduser()
    if path.exists():
        return _from_bench(path / "results.json" if path.is_dir() else path)
    found = VALUE.fullmatch(text)
    if found is None:
        raise UsageError(f"--acceptance {text!r} is neither a number nor a file that exists", EXAMPLE)
    value, drafts = float(found[1]), int(found[2] or 3)
    if 0 < value < 1 and drafts:
        return {"all": Acceptance(f"{value} of the drafts at each of {drafts} positions, as given", (value,) * drafts)}
    if not 1 <= value <= drafts + 1:
        raise UsageError(f"{drafts} drafts give 1 to {drafts + 1} tokens per step, not {value}", EXAMPLE)
    measured = f"{value} tokens per step at {drafts} drafts, as given"
    measured += "" if found[2] else " (3 drafts: the length of the model cards; write VALUE@DRAFTS for another)"
    return {"all": Acceptance(measured, length_at=(value, drafts))}


def _from_bench(path: Path) -> dict[str, Acceptance]:
    try:
        results = files.read_object(path)
        groups = {"all": results, **results["categories"]}
        doubts = tuple(problem["message"] for problem in results.get("problems", ()) if problem["severity"] != "info")
        found = {name: _from_group(group, f"{path}, {name}", doubts) for name, group in groups.items()}
    except (OSError, TrtspecError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is not a results.json of `trtspec bench`", EXAMPLE) from None
    measured = {name: item for name, item in found.items() if item is not None}
    if "all" not in measured:
        message = f"{path} holds no acceptance: its server did not report how many drafts were accepted"
        raise UsageError(message, "bench an endpoint that speculates, or give the figure: " + EXAMPLE)
    return measured


def _from_group(group: dict[str, Any], source: str, doubts: tuple[str, ...]) -> Acceptance | None:
    known = tuple(float(rate) for rate in group.get("conditional") or [] if rate is not None)
    if known:
        return Acceptance(f"{source}: accepted by position, {group['steps']} steps", known, doubts=doubts)
    steps, drafted, length = group.get("steps"), group.get("drafted"), group.get("acceptance_length")
    if not steps or not drafted or not length:
        return None
    drafts = max(1, round(drafted / steps))
    at = (min(float(length), drafts + 1.0), drafts)
    return Acceptance(f"{source}: {length} tokens per step at {drafts} drafts", length_at=at, doubts=doubts)
