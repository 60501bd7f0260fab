"""Acceptance as the user measured it, and what published curves show beyond the measured positions.

Its height is never assumed: it comes from one figure or from results.json of bench. Acceptance
length counts the bonus token: AL(k) = 1 + a1 + a1 a2 + .. + a1..ak. The conditional acceptance a_j
is the share of steps that accepted draft j among the steps that accepted draft j - 1.

A head drafts position j from its own guess at position j - 1, so a_j falls with j. Published curves
share a shape at different heights: a_1, then a_j = b r^(j - 2). Only the shape is taken from them.
Every rate is raised to one power, so that the shape gives what the user measured. Data:
data/acceptance_lengths.yaml. Errors on curves that were held out: docs/plan-model.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from trtspec import files
from trtspec.checkpoint.hub import engine_name
from trtspec.checkpoint.published import DRAFT_LEN, catalogue, known_head, known_target, real_pair
from trtspec.data_files import load_yaml
from trtspec.errors import Problem, TrtspecError, UsageError
from trtspec.foreign import user_path

EXAMPLE = (
    "for example `acceptance` 2.62@3 (tokens per step with 3 drafts), or results.json of "
    "`trtspec bench`"
)
VALUE = re.compile(r"(\d+(?:\.\d+)?)(?:@(\d+))?")
MAX_RATE = 0.999  # of a position that was not measured
MAX_POWER = 200.0  # raises every rate of a published curve to nearly 0


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a head's drafts, by position or as one length.

    Args:
        known: `known[j]` is the chance of draft j + 1 given all before it. Empty if only a length
            was measured.
        length_at: (acceptance length, its number of drafts) if only a length was measured.
        doubts: what bench itself found wrong with the measurement.
        model: the name under which bench's server served the model.
        published: whether it is a published figure.
        decay: decay of the positions that are not known, None for the published decay.
    """

    source: str
    known: tuple[float, ...] = ()
    length_at: tuple[float, int] | None = None
    doubts: tuple[str, ...] = ()
    model: str = ""
    published: bool = False
    decay: Decay | None = None

    def length(self, drafts: int, decay: Decay | None = None) -> float:
        """Tokens per verification step with `drafts` drafts, bonus token included."""
        if not drafts:
            return 1.0
        if self.length_at is not None and self.length_at[1] == drafts:
            return self.length_at[0]
        return lengths(self.rates(drafts, decay))[-1]

    def rates(self, drafts: int, decay: Decay | None = None) -> list[float]:
        """Conditional acceptance of positions 1 .. drafts.

        Positions that are not known follow `decay`. None: the acceptance's own decay.
        """
        decay = decay or self.decay or published_decay()
        if self.length_at is not None:
            power = _power(decay, *self.length_at)
            return [decay.rate(position) ** power for position in range(1, drafts + 1)]
        return [*self.known[:drafts], *decay.beyond(self.known, drafts)]

    @property
    def measured_lengths(self) -> list[int]:
        """The draft lengths whose acceptance was measured and does not rest on a decay."""
        if self.length_at is not None:
            return [self.length_at[1]]
        return list(range(1, len(self.known) + 1))

    def decays(self, drafts: int) -> dict[str, Decay]:
        """The decay of each published curve: the length for `drafts` drafts is between theirs.

        Empty if that length was measured.
        """
        if drafts in self.measured_lengths:
            return {}
        return other_decays()


def lengths(rates: Sequence[float]) -> list[float]:
    """Acceptance length for 1, 2, .. drafts, bonus token included, from conditional rates."""
    result = []
    length = 1.0
    reached = 1.0  # the chance that all drafts so far are accepted
    for rate in rates:
        reached *= rate
        length += reached
        result.append(length)
    return result


def parse_acceptance(text: str) -> Acceptance:
    """The acceptance of VALUE, VALUE@DRAFTS or a bench file. Raises UsageError."""
    path = user_path(text)
    if path.is_dir():
        return _from_bench(path / "results.json")
    if path.exists():
        return _from_bench(path)
    match = VALUE.fullmatch(text)
    if match is None:
        message = f"`acceptance` {text!r} is neither a number nor a file that exists"
        raise UsageError(message, EXAMPLE)
    length = float(match[1])
    drafts = int(match[2] or DRAFT_LEN)
    if not 1 <= length <= drafts + 1:
        message = f"{drafts} drafts give 1 to {drafts + 1} tokens per step, not {length}"
        raise UsageError(message, EXAMPLE)
    source = f"{length} tokens per step at {drafts} drafts, as given; "
    source += "VALUE@DRAFTS gives another length"
    return Acceptance(source, length_at=(length, drafts))


def _from_bench(path: Path) -> Acceptance:
    """The acceptance in a results.json. Raises UsageError if it has no acceptance."""
    try:
        acceptance = _measured_acceptance(path, files.read_object(path))
    except (OSError, TrtspecError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is not a results.json of `trtspec bench`", EXAMPLE) from None
    if acceptance is None:
        message = (
            f"{path} holds no acceptance: its server did not report how many drafts were accepted"
        )
        remedy = "bench an endpoint that speculates, or give the figure: " + EXAMPLE
        raise UsageError(message, remedy)
    return acceptance


def _measured_acceptance(path: Path, results: dict[str, Any]) -> Acceptance | None:
    """The acceptance by position, else the length. None if bench measured neither."""
    problems = [problem for problem in results.get("problems", ()) if problem["severity"] != "info"]
    doubts = tuple(problem["message"] for problem in problems)
    server = results.get("server") or {}
    model = str(server.get("model") or "")
    source = f"{path}, served as {model}" if model else str(path)
    rates = results.get("conditional") or []
    known = tuple(float(rate) for rate in rates if rate is not None)
    if known:
        source += f": accepted by position, {results['steps']} steps"
        return Acceptance(source, known, doubts=doubts, model=model)
    steps = results["steps"]
    drafted = results["drafted"]
    length = results["acceptance_length"]
    if not (steps and drafted and length):
        return None
    drafts = max(1, round(drafted / steps))
    source += f": {length} tokens per step at {drafts} drafts"
    length_at = (min(float(length), drafts + 1.0), drafts)
    return Acceptance(source, length_at=length_at, doubts=doubts, model=model)


def card_acceptance(head: str, target: str) -> Acceptance | None:
    """The figure published for a head with its own target. None if there is no figure."""
    published_head = known_head(head)
    published_target = known_target(target)
    if published_head is None or published_target is None or not real_pair(head, target):
        return None
    measured = published_head.measured_on(published_target.id)
    if measured is None:
        return None
    dataset = next(iter(measured.figures))
    length = measured.length(dataset)
    drafts = measured.draft_len
    source = f"{length:g} tokens per step at {drafts} drafts on {dataset}, as published for {head} "
    source += (
        f"({measured.protocol}); your own traffic may differ, so measure it with `trtspec bench`"
    )
    return Acceptance(source, length_at=(length, drafts), published=True)


@cache
def most_published(target: str) -> tuple[int, int]:
    """The highest concurrency and the longest draft published for any head of a target.

    For a target that is not a published one: of all heads.
    """
    published_target = known_target(target)
    concurrency = 0
    drafts = 0
    for head in catalogue().heads.values():
        if published_target is None or published_target.id in head.targets:
            for measured in head.acceptance:
                concurrency = max([concurrency, *measured.speedups])
                drafts = max(drafts, measured.draft_len)
    return concurrency, drafts


def other_model(acceptance: Acceptance, target: str) -> list[Problem]:
    """A warning if the acceptance was measured on another model than the target."""
    measured_on = acceptance.model
    paths = [Path(model).resolve() for model in (measured_on, engine_name(target))]
    if not measured_on or len({path.name.casefold() for path in paths}) == 1:
        return []
    message = f"the acceptance was measured on {measured_on}, and this plan is for {target}"
    return [Problem("TS-PLAN-OTHER-MODEL", "warning", "acceptance", message)]


@dataclass(frozen=True)
class Decay:
    """How conditional acceptance falls with the position of the draft.

    `first` and `second`: the acceptance of the first two drafts. `ratio`: from each further draft
    to the next.
    """

    first: float
    second: float
    ratio: float

    def rate(self, position: int) -> float:
        """Acceptance of draft `position`, counted from 1. Never above 1."""
        if position == 1:
            return self.first
        return min(MAX_RATE, self.second * self.ratio ** (position - 2))

    def beyond(self, known: Sequence[float], drafts: int) -> list[float]:
        """Rates of positions len(known) + 1 .. drafts of a head whose first rates are `known`.

        The rates of the decay are raised to one power, which fits the known positions from the
        second on together, or the first if no other is known.
        """
        if min(known) <= 0:
            return [0.0] * (drafts - len(known))
        start = 1 if len(known) > 1 else 0
        positions = range(start + 1, len(known) + 1)
        known_logs = sum(math.log(rate) for rate in known[start:])
        decay_logs = sum(math.log(self.rate(position)) for position in positions)
        power = known_logs / decay_logs
        return [self.rate(position) ** power for position in range(len(known) + 1, drafts + 1)]


@lru_cache(maxsize=1024)  # a plan needs the same few at every one of its points
def _power(decay: Decay, length: float, drafts: int) -> float:
    """The power of the decay's rates that gives an acceptance length, by bisection."""
    rates = [decay.rate(position) for position in range(1, drafts + 1)]
    low = 0.0
    high = MAX_POWER
    for _ in range(80):
        power = (low + high) / 2
        # A larger power makes every rate smaller.
        if lengths([rate**power for rate in rates])[-1] > length:
            low = power
        else:
            high = power
    return low


@cache
def published_decay() -> Decay:
    """The decay that published curves share."""
    return Decay(*load_yaml("acceptance_lengths.yaml")["published"])


@cache
def other_decays() -> dict[str, Decay]:
    """The decay of each published curve, by the curve's name."""
    rows = load_yaml("acceptance_lengths.yaml")["decays"]
    return {name: Decay(*row) for name, row in rows.items()}
