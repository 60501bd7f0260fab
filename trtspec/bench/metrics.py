"""The Prometheus text that servers answer at their metrics paths: under which names each kind of server counts, and
its counters read strictly.

`bench` reads vLLM's counters around a run and `watch` reads those of every kind: the names, the parser of the text and
what counts as a count are the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtspec.bench.client import finite

MOST = float(2**53)  # whole numbers up to here are exact in a double
Samples = dict[str, list[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True)
class MetricNames:
    """How one kind of server calls its counters, without `_total`. `steps` is empty where verification steps are not
    counted. `first` is the number of the first draft position in the `position` label. `mean`: a gauge of tokens per
    step in place of counters."""

    kind: str
    prefix: str
    steps: str = ""
    drafted: str = ""
    accepted: str = ""
    position: str = ""
    first: int = 0
    mean: str = ""


VLLM = MetricNames(
    "vllm", "vllm:", steps="vllm:spec_decode_num_drafts", drafted="vllm:spec_decode_num_draft_tokens",
    accepted="vllm:spec_decode_num_accepted_tokens", position="vllm:spec_decode_num_accepted_tokens_per_pos",
)  # fmt: skip
NAMES = (
    MetricNames(
        "reference", "trtspec_", steps="trtspec_spec_decode_steps", drafted="trtspec_spec_decode_draft_tokens",
        accepted="trtspec_spec_decode_accepted_tokens", first=1,
        position="trtspec_spec_decode_accepted_tokens_per_position",
    ),
    VLLM,
    MetricNames(
        "trtllm", "trtllm_", drafted="trtllm_spec_decode_num_draft_tokens",
        accepted="trtllm_spec_decode_num_accepted_tokens",
    ),
    MetricNames("sglang", "sglang:", mean="sglang:spec_accept_length"),
)  # fmt: skip


@dataclass(frozen=True)
class Counters:
    """A reading of a server's speculation counters: verification steps, drafted and accepted tokens, and the steps
    that accepted draft k (from 1)."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: dict[int, int] = field(default_factory=dict)


def read_samples(text: str) -> Samples:
    """Every sample of a Prometheus text by its name, without `_total` (clients differ) and without buckets; Dynamo's
    `trtllm:` is written `trtllm_`. Raises ValueError for what is no such text."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Samples = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    name = sample.name.removesuffix("_total").replace("trtllm:", "trtllm_", 1)
                    found.setdefault(name, []).append((sample.labels, sample.value))
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
        raise ValueError("is not Prometheus text") from None
    return found


def names_in(samples: Samples) -> MetricNames | None:
    """Whose metrics these are, or None for those of no server that is known."""
    return next((names for names in NAMES if any(name.startswith(names.prefix) for name in samples)), None)


def is_total(value: Any) -> bool:
    """Whether a sample can be a counter's: finite and not negative."""
    return finite(value) is not None and 0 <= value <= MOST


def draft_position(labels: Mapping[str, str], names: MetricNames) -> int | None:
    """The draft (from 1) that a sample is about, or None where its label names none."""
    digits = labels.get("position", "")
    place = int(digits) - names.first + 1 if digits.isascii() and digits.isdigit() and len(digits) < 4 else 0
    return place if place > 0 else None


def read_counters(text: str, names: MetricNames) -> Counters | None:
    """The counters of one server, summed over its engines, or None where it has none of speculation. Raises ValueError
    in words for counters that are no counts."""
    return counters_in(read_samples(text), names)


def counters_in(samples: Samples, names: MetricNames) -> Counters | None:
    """`read_counters` of samples; `steps` is 0 where a server counts draft tokens alone."""
    if (names.steps or names.drafted) not in samples:
        return None
    positions: dict[int, int] = {}
    for labels, value in samples.get(names.position, ()):
        place = draft_position(labels, names)
        if place is None:
            raise ValueError(f"has {names.position} of the position {labels.get('position')!r:.40}")
        positions[place] = positions.get(place, 0) + count_of(names.position, value)
    steps, drafted, accepted = (
        sum(count_of(name, value) for _, value in samples.get(name, ()))
        for name in (names.steps, names.drafted, names.accepted)
    )
    return Counters(steps, drafted, accepted, positions)


def count_of(name: str, value: Any) -> int:
    """A whole number that is not negative. Raises ValueError, which names it, for anything else."""
    if not is_total(value) or value != int(value):
        raise ValueError(f"has {name} {value!s:.40}, which is no count")
    return int(value)


def counted_between(before: Counters, after: Counters) -> Counters:
    """What was counted between two readings. Raises ValueError in words where it is less than nothing."""
    found = Counters(
        after.steps - before.steps,
        after.drafted - before.drafted,
        after.accepted - before.accepted,
        {place: count - before.per_position.get(place, 0) for place, count in sorted(after.per_position.items())},
    )
    fewest = min(found.steps, found.drafted, found.accepted, *found.per_position.values())
    if fewest < 0 or before.per_position.keys() - after.per_position.keys():
        raise ValueError("counts less after the run than before it: it was started again, or is several servers")
    return found


def histogram_of(counted: Counters) -> tuple[int, ...] | None:
    """Entry j = steps that accepted exactly j drafts, or None where no positions are told or they are no part of the
    steps."""
    reached = [counted.steps, *counted.per_position.values()]
    whole = list(counted.per_position) == list(range(1, len(reached)))
    if len(reached) == 1 or not whole or reached != sorted(reached, reverse=True):
        return None
    return tuple(here - there for here, there in zip(reached, [*reached[1:], 0], strict=True))
