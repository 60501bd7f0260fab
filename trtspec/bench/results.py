"""What `bench` found, as records: tables, plots, the report and results.json are all made of them.

A record's fields are the keys of the JSON contract; a group of answers, a concurrency, an endpoint and the whole run
each repeat the acceptance of all their answers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from trtspec import files
from trtspec.bench.acceptance import AcceptanceSummary
from trtspec.client.servers import Count, DetectedServer, TurnCounts
from trtspec.client.text_quality import OutputQuality
from trtspec.errors import Problem, TrtspecError, UsageError

Read = TypeVar("Read")
NotNegative = Annotated[float, Field(ge=0)]
SCHEMA = 1  # of results.json


@dataclass(frozen=True)
class LatencySpread:
    """Mean and percentiles; seconds, or tokens per second."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Answers per second that kept a promise to users, and their share of all requests."""

    promise: str
    requests_per_s: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rates over the rounds of one level. `steady_tokens_per_s` counts only the time in which every slot was busy, a
    fair figure for a comparison: the tail, where slots run empty, would else reward the luckier last answer.

    `inter_token_s` is TPOT, the mean of an answer's tokens after the first; `itl_s` is between chunks as they arrive,
    of several tokens each under speculation. `prompt_tokens` and `answer_tokens`: per request, as the server counts."""

    requests: int
    errors: int
    output_tokens: int
    wall_s: float
    tokens_per_s: float | None
    steady_tokens_per_s: float | None
    tokens_per_s_per_user: LatencySpread | None
    ttft_s: LatencySpread | None
    inter_token_s: LatencySpread | None
    request_s: LatencySpread | None
    cached_prompt_tokens: int | None
    itl_s: LatencySpread | None = None
    requests_per_s: float | None = None
    prompt_tokens: LatencySpread | None = None
    answer_tokens: LatencySpread | None = None
    goodput: Goodput | None = None


@dataclass(frozen=True)
class QuestionSpeed:
    """One conversation at one level: what two runs are paired by. Seconds are spent waiting for its answers; `decoded`
    tokens came in `decode_s` seconds after the first of each answer, in `round` of the level."""

    level: str
    question: str
    category: str
    tokens: Count
    seconds: NotNegative
    ttft_s: NotNegative | None = None
    decoded: Count = 0
    decode_s: NotNegative = 0.0
    round: Count = 0


@dataclass(frozen=True, kw_only=True)
class LevelResult(AcceptanceSummary):
    """One concurrency, or with `rate` so many new conversations per second, of which at most `concurrency` were in
    flight. `rounds`: output tokens per second of each."""

    concurrency: int
    rate: float | None = None
    categories: dict[str, AcceptanceSummary]
    throughput: Throughput
    rounds: list[float]
    degeneration: OutputQuality

    @property
    def label(self) -> str:
        return level_label(self.concurrency, self.rate)


@dataclass(frozen=True, kw_only=True)
class EndpointResult(AcceptanceSummary):
    """One endpoint: acceptance over all levels and by category, and one entry per level. `quality`: of the output of
    each category."""

    name: str
    url: str
    server: DetectedServer
    categories: dict[str, AcceptanceSummary]
    degeneration: OutputQuality
    concurrency: list[LevelResult]
    turns_detail: list[TurnCounts] = field(default_factory=list)
    questions_detail: list[QuestionSpeed] = field(default_factory=list)
    quality: dict[str, OutputQuality] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PairRatio:
    """Speed of one endpoint over another's: round by round, the median and the range. No rounds and null where the
    output of either was degenerate."""

    of: str
    over: str
    per_round: list[float]
    median: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class InterleavedLevel:
    """One concurrency of endpoints measured in alternating rounds. `tokens_per_s`: by endpoint and round."""

    concurrency: int
    metric: str
    tokens_per_s: dict[str, list[float]]
    ratios: list[PairRatio]
    rate: float | None = None

    @property
    def label(self) -> str:
        return level_label(self.concurrency, self.rate)

    def pair(self, of: str, over: str) -> PairRatio | None:
        return next((pair for pair in self.ratios if (pair.of, pair.over) == (of, over)), None)


@dataclass(frozen=True, kw_only=True)
class ComparedFigure:
    """One figure of this run over the same of an earlier one. `low` and `high` hold the interval at the confidence that
    all judged figures together need; `finds` is the smallest fall that this many pairs find in 80 % of runs, and
    `pairs_for_5_percent` how many find one of 5 %. `verdict`: regression, improvement, no change found, or not judged.
    `paired_by`: question, round, run, or group (of questions that were counted together)."""

    figure: str
    ratio: float
    low: float | None
    high: float | None
    pairs: int
    paired_by: str
    judged: bool
    verdict: str
    finds: float | None = None
    pairs_for_5_percent: int | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """This run over an earlier one. `differs`: what of the workload is not the same. `confidence`: of each interval.
    `runs`: how many earlier runs there are; `old` is the first of them."""

    old: dict[str, Any]
    differs: list[str]
    max_regression: float
    confidence: float
    figures: list[ComparedFigure]
    problems: list[Problem]
    runs: int = 1


@dataclass(frozen=True, kw_only=True)
class BenchResults(EndpointResult):
    """results.json: the first endpoint's own figures, the others under `endpoints`, ratios under `interleaved`."""

    schema: int = SCHEMA
    workload: dict[str, Any]
    endpoints: dict[str, EndpointResult]
    interleaved: list[InterleavedLevel] | None
    problems: list[Problem]
    comparison: Comparison | None = None
    created: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    draft_choice: dict[str, Any] | None = None

    @property
    def all(self) -> list[EndpointResult]:
        return [self, *self.endpoints.values()]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StatedWorkload:
    """What tables and titles say of every workload; BenchWorkload.describe writes it, and more."""

    dataset: str
    dataset_sha256: str
    questions: list[Count]
    concurrency: list[Count]
    rates: list[float]
    max_tokens: Count
    temperature: float
    template: str
    seed: int


@dataclass(frozen=True)
class WholeResults:
    """What a report of several runs needs of results.json beside its records."""

    workload: StatedWorkload


def from_dict(found: dict[str, Any]) -> BenchResults:
    """The records of what `to_dict` made. Raises pydantic's ValidationError for anything else."""
    return _adapter(BenchResults).validate_python(found)


@dataclass(frozen=True)
class StoredCounts:
    steps: Count | None = None
    accepted: Count | None = None


@dataclass(frozen=True)
class StoredAcceptance:
    """What a watch reads of results.json."""

    categories: dict[str, StoredCounts]
    turns_detail: list[TurnCounts] = field(default_factory=list)
    quality: dict[str, Any] = field(default_factory=dict)

    @property
    def sound_counts(self) -> dict[str, tuple[int, int]]:
        """(steps, accepted) of each category that has both, without noise and loops: acceptance on them is no norm."""
        looping = {name for name, found in self.quality.items() if (found or {}).get("degenerate")}
        known = {name: (found.steps or 0, found.accepted) for name, found in self.categories.items()}
        return {name: (n, got) for name, (n, got) in known.items() if n and got is not None and name not in looping}


def level_label(concurrency: int, rate: float | None) -> str:
    """How a level is called in tables: at a given rate the concurrency is a finding, not a setting."""
    return f"concurrency {concurrency}" if rate is None else f"{rate:g} requests/s"


def read_results(path: Path) -> StoredAcceptance:
    """What a watch reads of results.json of a directory or a file. Raises UsageError when it is not one."""
    return _read(path, lambda found: _adapter(StoredAcceptance).validate_json(json.dumps(found), strict=True))


def read_whole(path: Path) -> BenchResults:
    """All of results.json of a directory or a file, with all that tables say of its workload. Raises UsageError when it
    is not one."""
    return _read(path, _whole)


def _whole(found: dict[str, Any]) -> BenchResults:
    _adapter(WholeResults).validate_python(found)
    return from_dict(found)


def _read(path: Path, records: Callable[[dict[str, Any]], Read]) -> Read:
    file = path / "results.json" if path.is_dir() else path
    try:
        found = files.read_object(file)
        if found.get("schema", SCHEMA) != SCHEMA:
            raise ValueError(f"its schema is {str(found['schema'])[:40]!r}, and this release reads {SCHEMA}")
        return records(found)
    except ValidationError as error:
        raise _no_result(file, files.first_fault(error)) from None
    except (OSError, TrtspecError, ValueError) as error:
        raise _no_result(file, str(error)) from None


def _no_result(file: Path, reason: str) -> UsageError:
    return UsageError(
        f"{file} is not a result of `trtspec bench`: {reason}",
        "pass the directory given to bench -o, or its results.json",
    )


@functools.cache
def _adapter(record: type) -> TypeAdapter[Any]:
    return TypeAdapter(record)
