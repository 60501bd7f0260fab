"""The published Kimi targets and Eagle3 heads of data/models.yaml: a typed record each, by hub id.

A key that no record has is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter

from trtspec.data_files import load_yaml
from trtspec.errors import TrtspecError, UsageError, nearest
from trtspec.families.family import Family
from trtspec.foreign import parse_hub_id

LAYER_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
DRAFT_LEN = 3  # if nobody says another
WHOLE = "all"  # a figure of all questions of a data set
ThinkingLevel = Literal["on", "off", "low", "medium", "high"]


@dataclass(frozen=True, kw_only=True)
class PublishedAcceptance:
    """Tokens per step that were published for a head, and how they were measured.

    `figures`: by data set, of all its questions or by category. `mean`: what bench calls
    such a figure. `speedups`: over no speculation by concurrency, None if only the concurrency was
    published.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    figures: dict[str, float | dict[str, float]]
    source: str
    engine: str = "engine not stated"
    target: str | None = None
    draft_len: int = DRAFT_LEN
    thinking: ThinkingLevel | None = None
    max_tokens: int | None = None
    mean: Literal["acceptance_length", "per_question_mean"] = "acceptance_length"
    speedups: dict[int, float | None] = field(default_factory=dict)

    @property
    def protocol(self) -> str:
        """How the figures were measured, and their source."""
        stated = {
            "": self.target,
            "thinking": self.thinking,
            "max_tokens": self.max_tokens,
        }
        words = [f"{name} {value}".strip() for name, value in stated.items() if value]
        return f"{', '.join([self.engine, *words])}: {self.source}"

    def of(self, dataset: str) -> dict[str, float]:
        """The figures of a data set by category, WHOLE among them. {} if it was not measured."""
        figures = self.figures.get(dataset, {})
        return figures if isinstance(figures, dict) else {WHOLE: figures}

    def length(self, dataset: str) -> float:
        """The figure of all questions, else the mean of the categories."""
        figures = self.of(dataset)
        return figures.get(WHOLE) or round(sum(figures.values()) / len(figures), 3)


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """Fields of every record. `unverified`: fields that nobody here read in the published file."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    kind: ClassVar[Literal["target", "head"]]
    id: str
    config: dict[str, Any] | None
    licence: str | None
    sources: dict[str, str]
    unverified: list[str]
    parameters: int | None = None
    bytes: int | None = None
    shards: int | None = None
    released: str | None = None
    aliases: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PublishedTarget(PublishedModel):
    """A target. `base`: its checkpoint before quantization. `thinks`: whether it may reason."""

    kind: ClassVar[Literal["target", "head"]] = "target"
    config: dict[str, Any]
    family: str
    format: str
    thinks: bool
    base: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedHead(PublishedModel):
    """A head, published for `targets`.

    `published_on`: engines that its file was made for. `owns`: which optional tensors the file
    holds. The first of `acceptance` is what plan takes.
    """

    kind: ClassVar[Literal["target", "head"]] = "head"
    dialect: str
    targets: list[str]
    trained_with: str | None
    published_on: list[str] = field(default_factory=list)
    owns: dict[str, bool] = field(default_factory=dict)
    acceptance: list[PublishedAcceptance] = field(default_factory=list)

    @property
    def draft_len(self) -> int:
        """The draft length that the head is served with unless another is asked for."""
        return self.acceptance[0].draft_len if self.acceptance else DRAFT_LEN

    def measured_on(self, target: str) -> PublishedAcceptance | None:
        """The first measurement that holds for this target, else the first one."""
        for measured in self.acceptance:
            if measured.target in (None, target):
                return measured
        return self.acceptance[0] if self.acceptance else None


@dataclass(frozen=True)
class Catalogue:
    """The records by hub id. `refused`: why a model is not served, by its id."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    targets: dict[str, PublishedTarget]
    heads: dict[str, PublishedHead]
    refused: dict[str, str]


@cache
def catalogue() -> Catalogue:
    """The parsed file with exclude patterns written out. Its `common` is shared by its rows."""
    data = load_yaml("models.yaml")
    del data["common"]
    for name, row in (data["targets"] | data["heads"]).items():
        row["id"] = name
        config = row["config"] or {}
        quantization = config.get("quantization_config") or {}
        if "ignore" in quantization:
            quantization["ignore"] = expand_patterns(quantization["ignore"])
    return TypeAdapter(Catalogue).validate_python(data)


def expand_patterns(patterns: list[str]) -> list[str]:
    """Writes `{a..b}` out as one pattern per layer.

    Published lists are in text order (1, 10, 11, .., 2, 20).
    """
    if not any(LAYER_RANGE.search(pattern) for pattern in patterns):
        return list(patterns)
    expanded = []
    for pattern in patterns:
        layer_range = LAYER_RANGE.search(pattern)
        if layer_range is None:
            expanded.append(pattern)
            continue
        for layer in range(int(layer_range[1]), int(layer_range[2]) + 1):
            expanded.append(LAYER_RANGE.sub(str(layer), pattern))
    return sorted(expanded)


def known(name_or_id: str) -> PublishedTarget | PublishedHead | None:
    """The record of a published id, whatever its revision, or None.

    Upper and lower case are the same. Raises TrtspecError for ids that are known and refused, such
    as Kimi-K3.
    """
    hub_id = parse_hub_id(name_or_id)
    if hub_id is None:
        return None
    wanted = hub_id.name.casefold()
    for name, reason in catalogue().refused.items():
        if name.casefold() == wanted:
            remedy = "trtspec serves K2, K2-Thinking, K2.5, K2.6 and K2.7-Code"
            raise TrtspecError(f"{hub_id} is {reason}", remedy)
    records: list[PublishedTarget | PublishedHead]
    records = [*catalogue().targets.values(), *catalogue().heads.values()]
    for record in records:
        if wanted in map(str.casefold, (record.id, *record.aliases)):
            return record
    return None


def known_head(name: str) -> PublishedHead | None:
    """The record of a published head. None for every other name."""
    record = known(name)
    return record if isinstance(record, PublishedHead) else None


def known_target(name: str) -> PublishedTarget | None:
    """The record of a published target. None for every other name."""
    record = known(name)
    return record if isinstance(record, PublishedTarget) else None


def reasoning_parser(family: Family, name: str, engine: str) -> str | None:
    """The name that `engine` has for a target's reasoning parser. None if it does not think."""
    record = known_target(name)
    thinks = family.thinks if record is None else record.thinks
    return family.reasoning_parsers[engine] if thinks else None


def require_published(name: str, dataset: str) -> None:
    """Raises UsageError if no acceptance was published for a head, or none on the data set."""
    record = known(name)
    if isinstance(record, PublishedTarget):
        heads = [head.id for head in catalogue().heads.values() if record.id in head.targets]
        message = f"{name} is a target, and acceptance is published for heads"
        raise UsageError(message, f"pass a head of it: {', '.join(heads) or 'none is published'}")
    figures: dict[str, Any] = {}
    if record is not None:
        for measured in record.acceptance:
            figures |= measured.figures
    if re.split("[:=]", dataset)[0] not in figures:
        message = f"no acceptance was published for {name} on {dataset}, as far as is known here"
        published = ", ".join(figures) or "nothing"
        raise UsageError(message, f"published on: {published}")


def similar_id(name_or_id: str) -> str | None:
    """The published id with nearly the same spelling. None if the id is itself published."""
    names = [*catalogue().targets, *catalogue().heads]
    wanted = name_or_id.partition("@")[0]
    return None if wanted in names else nearest(wanted, names)


def published_as(name: str) -> str | None:
    """The published id that ends in this name, or None."""
    ids = [*catalogue().targets, *catalogue().heads]
    suffix = f"/{name.casefold()}"
    return next((id for id in ids if id.casefold().endswith(suffix)), None)


def real_pair(head_id: str, target_id: str) -> bool | None:
    """Whether the head was published for the target. None if either id is not a known one."""
    head = known_head(head_id)
    target = known_target(target_id)
    if head is None or target is None:
        return None
    return target.id in head.targets
