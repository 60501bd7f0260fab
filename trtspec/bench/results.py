"""results.json of `bench`, as records.

Tables, plots, the report and other commands read nothing else.

The fields of a record are the keys of the JSON contract. A level, an endpoint and the whole run
each repeat the acceptance of all their answers.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from trtspec import files
from trtspec.bench.statistics import (
    MIN_ROUNDS,
    AcceptanceSummary,
    Ratio,
    Units,
    most_tokens,
    paired_ratio,
    ratio,
)
from trtspec.client.client import Answer
from trtspec.client.servers import Count, DetectedServer, TurnCounts
from trtspec.client.text_quality import OutputQuality
from trtspec.errors import Problem, TrtspecError, UsageError

NotNegative = Annotated[float, Field(ge=0)]
SCHEMA = 3  # of results.json
ALL = "all"
BY_LENGTH, BY_REUSE, BY_MINUTE = "prompt length", "reused prompt", "minute"
adapter = functools.cache(TypeAdapter)  # making an adapter takes longer than reading a file with it


def _with_key(values: Any) -> Any:
    """Adds the key of a stored problem, which its JSON has as `where`."""
    if not isinstance(values, dict):
        return values
    return {"key": values.get("where"), **values}


StoredProblem = Annotated[Problem, BeforeValidator(_with_key)]


@dataclass(frozen=True)
class LatencySpread:
    """Mean and percentiles, in seconds."""

    mean: float
    p50: float
    p99: float


def inter_token(answer: Answer) -> float | None:
    """Returns TPOT: mean seconds between tokens after the first.

    None for fewer than two tokens or chunks.
    """
    tokens = answer.completion_tokens
    times = [when for when, _ in answer.chunks]
    if tokens < 2 or len(times) < 2:
        return None
    return (times[-1] - times[0]) / (tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rates over the rounds of one level.

    `inter_token_s`: TPOT, the mean of an answer's tokens after the first. `itl_s`: between chunks
    as they arrive, of several tokens each under speculation.
    """

    requests: int
    errors: int
    output_tokens: int
    wall_s: float
    tokens_per_s: float | None
    ttft_s: LatencySpread | None
    inter_token_s: LatencySpread | None
    itl_s: LatencySpread | None


@dataclass(frozen=True, kw_only=True)
class StatedWorkload:
    """The questions and settings of a run. A figure without them is not a measurement.

    `extra_body`: fields merged into every request. `recorded`: requests were sent as recorded,
    without this `max_tokens`, `temperature` and `seed`. `recorded_times`: at the times of their
    rows. `system`: a message before every question.
    """

    dataset: str
    dataset_sha256: str
    licence: str | None
    questions: Count
    turns: Count
    template: str
    thinking: str | None
    system: str | None
    concurrency: list[Count]
    rates: list[float]
    rounds: Count
    max_tokens: Count
    temperature: NotNegative
    seed: int
    limit_s: float | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    recorded: bool = False
    recorded_times: bool = False

    @property
    def loads(self) -> str:
        """The loads in words."""
        if self.recorded_times:
            return "as recorded"
        rates = [f"{rate:g}/s" for rate in self.rates]
        return " / ".join(rates or map(str, self.concurrency))

    @property
    def budget(self) -> str:
        """The length of answers in words."""
        return "lengths as recorded" if self.recorded else f"at most {self.max_tokens} tokens"


@dataclass(frozen=True, kw_only=True)
class SliceResult(AcceptanceSummary):
    """The answers of all loads that share one property. `by`: its name. `value`: its bound.

    `tokens_per_s`: output tokens over the time from request to end.
    """

    by: str
    value: Count
    answers: Count
    tokens_per_s: float | None
    ttft_s: LatencySpread | None


@dataclass(frozen=True)
class QuestionSpeed:
    """One conversation at one level, the unit that runs are paired by.

    `seconds`: spent waiting for its answers. `round`: the number of its round.
    """

    level: str
    question: str
    category: str
    tokens: Count
    seconds: NotNegative
    round: Count = 0


@dataclass(frozen=True, kw_only=True)
class LevelResult(AcceptanceSummary):
    """One load: conversations in flight, or a rate of new ones.

    `concurrency`: conversations in flight, 0 with a rate. `rate`: new ones per second. `rounds`:
    output tokens per second of each.
    """

    concurrency: int
    rate: float | None = None
    throughput: Throughput
    rounds: list[float]
    degeneration: OutputQuality

    @property
    def label(self) -> str:
        return level_label(self.concurrency, self.rate)

    @property
    def load(self) -> str:
        """The label in a table."""
        return str(self.concurrency) if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True, kw_only=True)
class EndpointResult(AcceptanceSummary):
    """One endpoint: acceptance over all levels and by category, and one entry per level.

    `degeneration`: quality of all output. `quality`: of the output of each category.
    """

    name: str
    url: str
    server: DetectedServer
    categories: dict[str, AcceptanceSummary]
    degeneration: OutputQuality
    concurrency: list[LevelResult]
    turns_detail: list[TurnCounts] = field(default_factory=list)
    questions_detail: list[QuestionSpeed] = field(default_factory=list)
    slices: list[SliceResult] = field(default_factory=list)
    quality: dict[str, OutputQuality] = field(default_factory=dict)

    @property
    def speculates(self) -> bool:
        return bool(self.steps) and self.drafted != 0

    @property
    def groups(self) -> dict[str, AcceptanceSummary]:
        """Acceptance by category. ALL holds the acceptance of all answers."""
        return {**self.categories, ALL: self}

    def degenerate(self, category: str = ALL) -> bool:
        """Whether the output of a category is degenerate, so that its acceptance is not shown."""
        if category == ALL:
            return self.degeneration.degenerate
        return category in self.quality and self.quality[category].degenerate

    def at(self, label: str) -> LevelResult | None:
        """The level with this label. None if it was not measured."""
        return next((level for level in self.concurrency if level.label == label), None)

    def speeds(self, label: str) -> dict[str, QuestionSpeed]:
        """Speeds at a level by question."""
        at_level = [speed for speed in self.questions_detail if speed.level == label]
        return {speed.question: speed for speed in at_level if speed.seconds > 0}


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Output tokens per second of `of` over `over`, paired by question, with its 95 % interval.

    The interval covers differences of questions, and of rounds and launches if there are several.
    """

    of: str
    over: str
    level: str
    ratio: Ratio
    questions: Count
    rounds: Count
    launches: Count = 1

    @property
    def covered(self) -> str:
        """The units of the interval in words."""
        launches = f"{self.launches} launches"
        if self.launches == 1:
            launches = "one launch"
        rounds = ""
        if self.rounds > 1:
            rounds = f" in {self.rounds} rounds"
        return f"{self.questions} questions{rounds} of {launches}"


@dataclass(frozen=True, kw_only=True)
class ComparedFigure:
    """One figure of this run over the same figure of an earlier run.

    `low` and `high`: its interval. None if it has none. `units`: questions or runs. `verdict`:
    regression, improvement, no change found, or not judged.
    """

    figure: str
    ratio: float
    low: float | None = None
    high: float | None = None
    units: int = 0
    paired_by: str = "question"
    verdict: str = "not judged"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """This run over `runs` earlier ones.

    `old`: name and URL of the first. `confidence`: of each interval.
    """

    old: dict[str, Any]
    runs: int
    max_regression: float
    confidence: float
    figures: list[ComparedFigure]
    problems: list[StoredProblem]


@dataclass(frozen=True, kw_only=True)
class LengthFigures:
    """One draft length at one load.

    `of_best`: its speed over the fastest length. None for the fastest.
    """

    draft_len: int
    acceptance_length: float | None
    tokens_per_s: float
    of_best: Ratio | None


@dataclass(frozen=True, kw_only=True)
class LoadChoice:
    """The draft lengths at one concurrency, shortest first.

    `best`: the shortest that may be as fast as the fastest.
    """

    concurrency: int
    lengths: list[LengthFigures]
    best: int


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """The proposed draft length: the median over all loads, the shorter of two.

    0: serve without the head.
    """

    loads: list[LoadChoice]
    draft_len: int


@dataclass(frozen=True, kw_only=True)
class BenchResults(EndpointResult):
    """results.json: the figures of the first endpoint, and what was measured beside it.

    `endpoints`: the other endpoints. `speedups`: ratios of the endpoints. `card`: the published
    head whose figures are shown beside the measured ones.
    """

    schema: int = SCHEMA
    workload: StatedWorkload
    endpoints: dict[str, EndpointResult]
    problems: list[StoredProblem]
    speedups: list[SpeedUp] = field(default_factory=list)
    comparison: Comparison | None = None
    created: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    draft_choice: DraftChoice | None = None
    card: str | None = None

    @property
    def all(self) -> list[EndpointResult]:
        """All endpoints, the first one first."""
        return [self, *self.endpoints.values()]

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["problems"] = [problem.to_dict() for problem in self.problems]
        if self.comparison is not None:
            problems = [problem.to_dict() for problem in self.comparison.problems]
            values["comparison"]["problems"] = problems
        return values


def level_label(concurrency: int, rate: float | None) -> str:
    """Returns the name of a level. With a rate the concurrency is a finding, not a setting."""
    return f"concurrency {concurrency}" if rate is None else f"{rate:g} requests/s"


def user_speed(endpoint: EndpointResult, label: str) -> Ratio | None:
    """Returns output tokens per second that a user sees at a level, over questions.

    The wait for the first counts.

    None for degenerate output, on which every drafter is fast.
    """
    level = endpoint.at(label)
    if level is None or level.degeneration.degenerate:
        return None
    speeds = endpoint.speeds(label).values()
    tokens = [speed.tokens for speed in speeds]
    seconds = [speed.seconds for speed in speeds]
    return ratio(tokens, seconds)


def speed_up(
    of: Sequence[EndpointResult], over: Sequence[EndpointResult], label: str
) -> SpeedUp | None:
    """Returns `user_speed` of one endpoint over another, paired by question.

    None if output is degenerate.

    `of` and `over` hold each launch of either endpoint.
    """
    endpoints = [*of, *over]
    if any(user_speed(endpoint, label) is None for endpoint in endpoints):
        return None
    speeds = [endpoint.speeds(label) for endpoint in endpoints]
    common = sorted(set.intersection(*map(set, speeds)))
    rounds = {speeds[0][question].round for question in common}
    # answers of one round share the state of the machine, so enough rounds are the units
    by_round = len(rounds) >= MIN_ROUNDS
    sides = [_speed_sums([side[question] for question in common], by_round) for side in speeds]
    launches = len(of)
    pairs = zip(sides[:launches], sides[launches:], strict=True)
    ratio = paired_ratio(*pairs, alike=by_round)
    if ratio is None:
        return None
    first = of[0]
    # a step gains no more than all its drafts
    ratio = ratio.within(0.0, most_tokens(first.steps, first.drafted))
    return SpeedUp(
        of=first.name,
        over=over[0].name,
        level=label,
        ratio=ratio,
        questions=len(common),
        rounds=len(rounds) if by_round else 1,
        launches=launches,
    )


def _speed_sums(speeds: Sequence[QuestionSpeed], by_round: bool) -> Units:
    """Sums (tokens, seconds) by round, or by question."""
    sums: dict[int | str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))
    for speed in speeds:
        unit = speed.round if by_round else speed.question
        sums[unit] += (speed.tokens, speed.seconds)
    return sums


def read_results(path: Path) -> BenchResults:
    """Reads results.json, or the results.json of a directory.

    Raises UsageError if it is not a result of bench.
    """
    file = path
    if path.is_dir():
        file = path / "results.json"
    remedy = "pass the directory given to bench -o, or its results.json"
    try:
        values = files.read_object(file)
        schema = values.get("schema", SCHEMA)
        if schema != SCHEMA:
            raise ValueError(f"its schema is {str(schema)[:40]!r}, and this release reads {SCHEMA}")
        results: BenchResults = adapter(BenchResults).validate_python(values)
        return results
    except FileNotFoundError:
        raise files.missing(file, remedy) from None
    except ValidationError as error:
        reason = files.first_fault(error)
    except (OSError, TrtspecError, ValueError) as error:
        reason = str(error)
    raise UsageError(f"{file} is not a result of `trtspec bench`: {reason}", remedy)
