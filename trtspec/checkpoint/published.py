"""Reads the published Kimi targets and Eagle3 heads of data/models.yaml, a typed record per hub id.

Keys that a record does not have are errors.
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
DRAFT_LEN = 3  # default number of draft tokens
WHOLE = "all"  # name of the figure for all questions of a data set
ThinkingLevel = Literal["on", "off", "low", "medium", "high"]


@dataclass(frozen=True, kw_only=True)
class PublishedAcceptance:
    """Acceptance lengths (tokens per step of the target) that were published for a head.

    figures: acceptance length of each data set, or of each of its categories.
    source: publication of the figures.
    target: hub id of the target. None: the publication does not state it.
    draft_len: number of draft tokens per step.
    max_tokens: largest number of tokens of an answer. None if it is not stated.
    mean: name that `trtspec bench` gives to such a mean.
    speedups: speed relative to no speculation, by concurrency. None if only the concurrency was
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
        """Text that says how the figures were measured, and their source."""
        stated = {
            "": self.target,
            "thinking": self.thinking,
            "max_tokens": self.max_tokens,
        }
        words = [f"{name} {value}".strip() for name, value in stated.items() if value]
        return f"{', '.join([self.engine, *words])}: {self.source}"

    def of(self, dataset: str) -> dict[str, float]:
        """Returns the acceptance lengths of a data set by category. {} if it was not measured.

        A single figure for the data set has the category WHOLE.
        """
        figures = self.figures.get(dataset, {})
        return figures if isinstance(figures, dict) else {WHOLE: figures}

    def length(self, dataset: str) -> float:
        """Returns the acceptance length on a data set, in tokens per step of the target.

        If only categories were published, returns their mean.
        """
        figures = self.of(dataset)
        return figures.get(WHOLE) or round(sum(figures.values()) / len(figures), 3)


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """Record of a published checkpoint.

    id: hub id.
    config: contents of config.json. None if they are not known.
    sources: addresses that the facts come from, by name.
    unverified: names of fields that were not checked in the published files.
    parameters: number of parameters.
    bytes: bytes of the weights.
    shards: number of weight files.
    released: date of the release.
    aliases: other hub ids of the same checkpoint.
    """

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
    """Record of a published target.

    family: name of its release.
    format: storage format of its weights.
    thinks: whether it may reason before it answers.
    base: hub id of the checkpoint that it was quantized from. None if it is not quantized.
    """

    kind: ClassVar[Literal["target", "head"]] = "target"
    config: dict[str, Any]
    family: str
    format: str
    thinks: bool
    base: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedHead(PublishedModel):
    """Record of a published Eagle3 head.

    dialect: name of its layout.
    targets: hub ids of the targets that it was published for.
    trained_with: project that trained it. None if it is not known.
    published_on: names of the engines that its file was made for.
    owns: whether the file holds lm_head, embed_tokens and d2t, by these names.
    acceptance: measurements. `trtspec plan` uses the first.
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
        """Default number of draft tokens for the head."""
        return self.acceptance[0].draft_len if self.acceptance else DRAFT_LEN

    def measured_on(self, target: str) -> PublishedAcceptance | None:
        """Returns the first measurement on this target, or on a target that was not stated.

        Without such a measurement, returns the first of all. None if nothing was measured.
        """
        for measured in self.acceptance:
            if measured.target in (None, target):
                return measured
        return self.acceptance[0] if self.acceptance else None


@dataclass(frozen=True)
class Catalogue:
    """Records of data/models.yaml.

    targets: records of targets by hub id.
    heads: records of heads by hub id.
    refused: reason why trtspec does not serve a model, by its hub id.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    targets: dict[str, PublishedTarget]
    heads: dict[str, PublishedHead]
    refused: dict[str, str]


@cache
def catalogue() -> Catalogue:
    """Reads data/models.yaml once. Ranges in exclude patterns are expanded."""
    data = load_yaml("models.yaml")
    del data["common"]  # YAML anchors that the records refer to
    for name, row in (data["targets"] | data["heads"]).items():
        row["id"] = name
        config = row["config"] or {}
        quantization = config.get("quantization_config") or {}
        if "ignore" in quantization:
            quantization["ignore"] = expand_patterns(quantization["ignore"])
    return TypeAdapter(Catalogue).validate_python(data)


def expand_patterns(patterns: list[str]) -> list[str]:
    """Returns the patterns with each `{a..b}` expanded to one pattern per layer.

    If any pattern has a range, the result is sorted as text (1, 10, 11, .., 2, 20), as published
    lists are.
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
    """Returns the record of a published id, whatever its revision. None for every other name.

    Upper and lower case are equal. Raises TrtspecError if the id is known and trtspec does not
    serve the model, such as Kimi-K3.
    """
    hub_id = parse_hub_id(name_or_id)
    if hub_id is None:
        return None
    folded_id = hub_id.name.casefold()
    for name, reason in catalogue().refused.items():
        if name.casefold() == folded_id:
            remedy = "pass a K2, K2-Thinking, K2.5, K2.6 or K2.7-Code checkpoint"
            raise TrtspecError(f"{hub_id} is {reason}", remedy)
    records: list[PublishedTarget | PublishedHead]
    records = [*catalogue().targets.values(), *catalogue().heads.values()]
    for record in records:
        ids = (record.id, *record.aliases)
        if folded_id in map(str.casefold, ids):
            return record
    return None


def known_head(name: str) -> PublishedHead | None:
    """Returns the record of a published head. None for every other name."""
    record = known(name)
    return record if isinstance(record, PublishedHead) else None


def known_target(name: str) -> PublishedTarget | None:
    """Returns the record of a published target. None for every other name."""
    record = known(name)
    return record if isinstance(record, PublishedTarget) else None


def reasoning_parser(family: Family, name: str, engine: str) -> str | None:
    """Returns the name that `engine` gives to a target's reasoning parser.

    None if the target does not reason. A published record has priority over the family.
    """
    record = known_target(name)
    thinks = family.thinks if record is None else record.thinks
    return family.reasoning_parsers[engine] if thinks else None


def require_published(name: str, dataset: str) -> None:
    """Raises UsageError if no acceptance of a head was published on the data set."""
    record = known(name)
    if isinstance(record, PublishedTarget):
        heads = [head.id for head in catalogue().heads.values() if record.id in head.targets]
        message = f"{name} is a target, and acceptance is published for heads"
        raise UsageError(message, f"pass a head of it: {', '.join(heads) or 'none is published'}")
    figures: dict[str, Any] = {}
    if record is not None:
        for measured in record.acceptance:
            figures |= measured.figures
    # A data set may be written as NAME:CONFIG or NAME=FILE.
    if re.split("[:=]", dataset)[0] not in figures:
        message = f"no acceptance was published for {name} on {dataset}, as far as is known here"
        published = ", ".join(figures) or "none"
        raise UsageError(message, f"pass a published data set (known: {published})")


def similar_id(name_or_id: str) -> str | None:
    """Returns the published id with nearly the same spelling. None if the id is published."""
    names = [*catalogue().targets, *catalogue().heads]
    wanted = name_or_id.partition("@")[0]
    return None if wanted in names else nearest(wanted, names)


def published_as(name: str) -> str | None:
    """Returns the published id whose last part is this name, or None."""
    ids = [*catalogue().targets, *catalogue().heads]
    suffix = f"/{name.casefold()}"
    return next((id for id in ids if id.casefold().endswith(suffix)), None)


def real_pair(head_id: str, target_id: str) -> bool | None:
    """Whether the head was published for the target. None if either id is not published."""
    head = known_head(head_id)
    target = known_target(target_id)
    if head is None or target is None:
        return None
    return target.id in head.targets
