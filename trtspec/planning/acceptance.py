"""Acceptance as the user measured it, by draft position, and what published curves say of the positions beyond.

Its height is never assumed: it comes from one figure or from results.json of bench. Acceptance length counts the bonus
token: AL(k) = 1 + a1 + a1 a2 + .. + a1..ak with the conditional acceptance a_j of draft j among the steps that accepted
draft j - 1.

A head drafts position j from its own guess at position j - 1, so a_j falls with j. Published curves share a shape at
different heights: a_1, then a_j = b r^(j - 2). Only the shape is taken from them. Its height is the user's: every rate
is raised to one power, so that the shape gives what the user measured. Data: data/acceptance_lengths.yaml; errors on
curves that were held out: docs/plan-model.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path

from trtspec import files
from trtspec.checkpoint.hub import engine_name
from trtspec.checkpoint.published import DRAFT_LEN, catalogue, known_head, known_target, real_pair
from trtspec.data_files import load_yaml
from trtspec.errors import Problem, TrtspecError, UsageError
from trtspec.foreign import user_path

EXAMPLE = "for example `acceptance` 2.62@3 (tokens per step with 3 drafts), or results.json of `trtspec bench`"
VALUE = re.compile(r"(\d+(?:\.\d+)?)(?:@(\d+))?")


@dataclass(frozen=True)
class Acceptance:
    """`known[j]` is the chance of draft j + 1 given all before it. Where only a length is known, `known` is empty and
    `length_at` holds that length and its number of drafts."""

    source: str
    known: tuple[float, ...] = ()
    length_at: tuple[float, int] | None = None
    doubts: tuple[str, ...] = ()  # what bench itself found wrong with the measurement
    model: str = ""  # the name under which bench's server knew it
    published: bool = False  # a published figure
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

    @property
    def measured_lengths(self) -> list[int]:
        """The draft lengths whose acceptance was measured, and does not rest on the published decay."""
        if self.length_at is not None:
            return [self.length_at[1]]
        return list(range(1, len(self.known) + 1))

    def decays(self, drafts: int) -> dict[str, Decay]:
        """The decay of each published curve by itself, between which the length for `drafts` drafts is not settled;
        none where it was measured."""
        return {} if drafts in self.measured_lengths else other_decays()


def parse_acceptance(text: str) -> Acceptance:
    """The acceptance of VALUE, VALUE@DRAFTS or a bench file. Raises UsageError."""
    path = user_path(text)
    if path.exists():
        return _from_bench(path / "results.json" if path.is_dir() else path)
    found = VALUE.fullmatch(text)
    if found is None:
        raise UsageError(
            f"`acceptance` {text!r} is neither a number nor a file that exists", EXAMPLE
        )
    value, drafts = float(found[1]), int(found[2] or DRAFT_LEN)
    if not 1 <= value <= drafts + 1:
        raise UsageError(
            f"{drafts} drafts give 1 to {drafts + 1} tokens per step, not {value}", EXAMPLE
        )
    source = (
        f"{value} tokens per step at {drafts} drafts, as given; VALUE@DRAFTS gives another length"
    )
    return Acceptance(source, length_at=(value, drafts))


def card_acceptance(head: str, target: str) -> Acceptance | None:
    """What was published for a head with its own target; None without a figure."""
    record, own = known_head(head), known_target(target)
    if record is None or own is None or not real_pair(head, target):
        return None
    measured = record.measured_on(own.id)
    if measured is None:
        return None
    dataset = next(iter(measured.figures))
    length, drafts = measured.length(dataset), measured.draft_len
    source = f"{length:g} tokens per step at {drafts} drafts on {dataset}, as published for {head} "
    source += (
        f"({measured.protocol}); your own traffic may differ, so measure it with `trtspec bench`"
    )
    return Acceptance(source, length_at=(length, drafts), published=True)


@cache
def most_published(target: str) -> tuple[int, int]:
    """The highest concurrency and the longest draft that were published for any head of a target; of all heads for a
    target that is not a published one."""
    own = known_target(target)
    heads = [head for head in catalogue().heads.values() if own is None or own.id in head.targets]
    measured = list(chain.from_iterable(head.acceptance for head in heads))
    loads = chain.from_iterable(each.speedups for each in measured)
    return max(loads, default=0), max((each.draft_len for each in measured), default=0)


def other_model(acceptance: Acceptance, target: str) -> list[Problem]:
    """A warning for a measurement of another model than the target."""
    name = acceptance.model
    names = {Path(model).resolve().name.casefold() for model in (name, engine_name(target))}
    if not name or len(names) == 1:
        return []
    message = f"the acceptance was measured on {name}, and this plan is for {target}"
    return [Problem("TS-PLAN-OTHER-MODEL", "warning", "acceptance", message)]


def _from_bench(path: Path) -> Acceptance:
    try:
        results = files.read_object(path)
        doubts = tuple(
            problem["message"]
            for problem in results.get("problems", ())
            if problem["severity"] != "info"
        )
        model = str((results.get("server") or {}).get("model") or "")
        source = f"{path}, served as {model}" if model else str(path)
        known = tuple(float(rate) for rate in results.get("conditional") or [] if rate is not None)
        if known:
            source += f": accepted by position, {results['steps']} steps"
            return Acceptance(source, known, doubts=doubts, model=model)
        steps, drafted, length = results["steps"], results["drafted"], results["acceptance_length"]
        if steps and drafted and length:
            drafts = max(1, round(drafted / steps))
            source += f": {length} tokens per step at {drafts} drafts"
            at = (min(float(length), drafts + 1.0), drafts)
            return Acceptance(source, length_at=at, doubts=doubts, model=model)
    except (OSError, TrtspecError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is not a results.json of `trtspec bench`", EXAMPLE) from None
    message = f"{path} holds no acceptance: its server did not report how many drafts were accepted"
    raise UsageError(message, "bench an endpoint that speculates, or give the figure: " + EXAMPLE)


def lengths(rates: Sequence[float]) -> list[float]:
    """Acceptance length for 1, 2, .. drafts, bonus token included, of conditional rates by position."""
    found, total, reached = [], 1.0, 1.0
    for rate in rates:
        reached *= rate
        total += reached
        found.append(total)
    return found


@dataclass(frozen=True)
class Decay:
    """Acceptance `first` of the first draft, `second` of the second, and `ratio` from each further one to the next."""

    first: float
    second: float
    ratio: float

    def rate(self, position: int) -> float:
        """Of draft `position`, counted from 1; never above 1."""
        return (
            self.first if position == 1 else min(0.999, self.second * self.ratio ** (position - 2))
        )

    def beyond(self, known: Sequence[float], drafts: int) -> list[float]:
        """Rates of positions len(known) + 1 .. drafts of a head whose first rates are `known`.

        The power is that of the known positions from the second on together; of the first where it is the only one.
        """
        if min(known) <= 0:
            return [0.0] * (drafts - len(known))
        start = 1 if len(known) > 1 else 0
        power = sum(map(math.log, known[start:])) / sum(
            math.log(self.rate(position)) for position in range(start + 1, len(known) + 1)
        )
        return [self.rate(position) ** power for position in range(len(known) + 1, drafts + 1)]

    def through(self, length: float, at: int, drafts: int) -> list[float]:
        """Rates of positions 1 .. drafts of a head with acceptance length `length` at `at` drafts (bisection)."""
        power = _power(self, length, at)
        return [self.rate(position) ** power for position in range(1, drafts + 1)]


@lru_cache(maxsize=1024)  # a plan asks for the same few at every one of its points
def _power(decay: Decay, length: float, at: int) -> float:
    """The power of the decay's rates that gives the acceptance length `length` at `at` drafts."""
    rates = [decay.rate(position) for position in range(1, at + 1)]
    low, high = 0.0, 200.0
    for _ in range(80):
        power = (low + high) / 2
        found = lengths([rate**power for rate in rates])[-1]
        low, high = (power, high) if found > length else (low, power)
    return low


@cache
def published_decay() -> Decay:
    return Decay(*load_yaml("acceptance_lengths.yaml")["published"])


@cache
def other_decays() -> dict[str, Decay]:
    """The decay of each published curve by its name: the range within which the shape is known."""
    rows = load_yaml("acceptance_lengths.yaml")["decays"]
    return {name: Decay(*row) for name, row in rows.items()}
