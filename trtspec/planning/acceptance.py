"""Acceptance as it was measured, and its estimate beyond the measured positions.

The level of acceptance is never assumed. It comes from one figure, from results.json of bench, or
from a figure that was published for the same head and target.
The acceptance length counts the bonus token: AL(k) = 1 + a1 + a1 a2 + .. + a1..ak. The conditional
acceptance a_j is the share of steps that accepted draft j among the steps that accepted draft j -
1.

A head drafts position j from its own guess at position j - 1, so a_j falls with j. Published
acceptance by position has the same shape at different levels: a_1, and a_j = b r^(j - 2) from the
second on. Only the shape is taken from published figures. Every rate is raised to one power, so
that the shape gives the value that the user measured. Data: data/acceptance_lengths.yaml. Errors on
held-out figures: docs/plan-model.md.
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
MAX_RATE = 0.999  # largest rate of a position that was not measured
MAX_POWER = 200.0  # power that brings every rate of a published decay to nearly 0
BISECTION_STEPS = 80  # more than the bits of a float


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a head's drafts, by position or as one length.

    Args:
        source: where the figures come from, in words.
        known: `known[j]` is the chance that draft j + 1 is accepted if all before are. Empty if
            only a length was measured.
        length_at: (acceptance length in tokens, number of drafts). None if positions were measured.
        doubts: problems that bench found in the measurement.
        model: name under which bench's server served the model, "" if it is not known.
        published: whether the acceptance is a published figure.
        decay: decay of the positions that are not known. None for the published decay.
    """

    source: str
    known: tuple[float, ...] = ()
    length_at: tuple[float, int] | None = None
    doubts: tuple[str, ...] = ()
    model: str = ""
    published: bool = False
    decay: Decay | None = None

    def length(self, drafts: int, decay: Decay | None = None) -> float:
        """Number of tokens per verification step with `drafts` drafts, bonus token included.

        `decay`: decay of the positions that are not known. None for the acceptance's own decay.
        """
        if not drafts:
            return 1.0
        if self.length_at is not None and self.length_at[1] == drafts:
            return self.length_at[0]
        return lengths(self.rates(drafts, decay))[-1]

    def rates(self, drafts: int, decay: Decay | None = None) -> list[float]:
        """Conditional acceptance of the positions 1 to `drafts`.

        `decay`: decay of the positions that are not known. None for the acceptance's own decay.
        """
        decay = decay or self.decay or published_decay()
        if self.length_at is not None:  # no position was measured, so all rates are estimated
            power = _power(decay, *self.length_at)
            return [decay.rate(position) ** power for position in range(1, drafts + 1)]
        return [*self.known[:drafts], *decay.beyond(self.known, drafts)]

    @property
    def measured_lengths(self) -> list[int]:
        """Draft lengths whose acceptance was measured and needs no decay."""
        if self.length_at is not None:
            return [self.length_at[1]]
        return list(range(1, len(self.known) + 1))

    def decays(self, drafts: int) -> dict[str, Decay]:
        """Decays of the published curves by name.

        Their acceptance lengths for `drafts` drafts are the limits of the estimate. Empty if the
        length for `drafts` drafts was measured.
        """
        if drafts in self.measured_lengths:
            return {}
        return other_decays()


def lengths(rates: Sequence[float]) -> list[float]:
    """Acceptance lengths for 1, 2, .. drafts, bonus token included, from conditional rates."""
    result = []
    length = 1.0
    reached = 1.0  # the chance that all drafts so far are accepted
    for rate in rates:
        reached *= rate
        length += reached
        result.append(length)
    return result


def parse_acceptance(text: str) -> Acceptance:
    """Reads the user's acceptance: VALUE, VALUE@DRAFTS, or the path of bench's results.

    Raises UsageError if the text is not a possible value and not a file with an acceptance.
    """
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
    """Reads the acceptance in a results.json of bench.

    Raises UsageError if it has no acceptance.
    """
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
    """Acceptance by position in bench's results, or the length. None if bench measured neither.

    Args:
        path: path of the results, for messages.
        results: contents of results.json.
    """
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
    # a rounded number of drafts can give fewer tokens than the measured length
    length_at = (min(float(length), drafts + 1.0), drafts)
    return Acceptance(source, length_at=length_at, doubts=doubts, model=model)


def card_acceptance(head: str, target: str) -> Acceptance | None:
    """Acceptance that was published for a head with its own target. None if none was published."""
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
    """Highest concurrency and longest draft with a published acceptance of any head for a target.

    For a target that is not a published one, heads of all targets count.
    """
    published_target = known_target(target)
    concurrency = 0
    drafts = 0
    for head in catalogue().heads.values():
        if published_target is None or published_target.id in head.targets:
            for measured in head.acceptance:
                concurrency = max([concurrency, *measured.speedups])  # speed-ups by concurrency
                drafts = max(drafts, measured.draft_len)
    return concurrency, drafts


def other_model(acceptance: Acceptance, target: str) -> list[Problem]:
    """Warns if the acceptance was measured on another model than the target.

    Returns one problem, or [] if the names agree or the measured model is not known.
    """
    measured_on = acceptance.model
    if not measured_on:
        return []
    # only the last part of both names, because a server may serve a local copy
    measured_name = Path(measured_on).resolve().name
    target_name = Path(engine_name(target)).resolve().name
    if measured_name.casefold() == target_name.casefold():
        return []
    message = f"the acceptance was measured on {measured_on}, and this plan is for {target}"
    return [Problem("TS-PLAN-OTHER-MODEL", "warning", "acceptance", message)]


@dataclass(frozen=True)
class Decay:
    """The fall of conditional acceptance with the position of the draft.

    Args:
        first: acceptance of the first draft, between 0 and 1.
        second: acceptance of the second draft.
        ratio: acceptance of each further draft divided by the acceptance of the draft before.
    """

    first: float
    second: float
    ratio: float

    def rate(self, position: int) -> float:
        """Conditional acceptance of the draft at `position`, counted from 1. At most 1."""
        if position == 1:
            return self.first
        return min(MAX_RATE, self.second * self.ratio ** (position - 2))

    def beyond(self, known: Sequence[float], drafts: int) -> list[float]:
        """Conditional acceptance of the positions len(known) + 1 to `drafts`.

        The rates of the decay are raised to one power that fits the known positions. The first
        position only counts if it is the only known one.
        """
        if min(known) <= 0:  # after a position without acceptance no draft is reached
            return [0.0] * (drafts - len(known))
        start = 1 if len(known) > 1 else 0  # the first rate is not part of the geometric fall
        positions = range(start + 1, len(known) + 1)
        known_logs = sum(math.log(rate) for rate in known[start:])
        decay_logs = sum(math.log(self.rate(position)) for position in positions)
        power = known_logs / decay_logs
        return [self.rate(position) ** power for position in range(len(known) + 1, drafts + 1)]


@lru_cache(maxsize=1024)  # because a plan needs the same few powers at each of its points
def _power(decay: Decay, length: float, drafts: int) -> float:
    """Power of the decay's rates that gives an acceptance length of `length`, by bisection."""
    rates = [decay.rate(position) for position in range(1, drafts + 1)]
    low = 0.0
    high = MAX_POWER
    for _ in range(BISECTION_STEPS):
        power = (low + high) / 2
        # A larger power makes every rate smaller.
        if lengths([rate**power for rate in rates])[-1] > length:
            low = power
        else:
            high = power
    return low


@cache
def published_decay() -> Decay:
    """Decay that the published acceptance of heads has in common."""
    return Decay(*load_yaml("acceptance_lengths.yaml")["published"])


@cache
def other_decays() -> dict[str, Decay]:
    """Decay of each published curve, by the name of the curve."""
    rows = load_yaml("acceptance_lengths.yaml")["decays"]
    return {name: Decay(*row) for name, row in rows.items()}
