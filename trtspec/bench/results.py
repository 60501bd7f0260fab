"""Contents of results.json, the output of `bench`, as dataclasses.

Tables, plots, the report and other commands read only this file. The field names are the keys of
the JSON file, which are documented and stable. A level, an endpoint and the whole run each contain
the acceptance of all their answers.
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
SCHEMA = 3  # version of the format of results.json
ALL = "all"  # name of the category that contains all answers
# properties by which answers are grouped
BY_LENGTH, BY_REUSE, BY_MINUTE = "prompt length", "reused prompt", "minute"
# cached, because creating an adapter takes longer than reading a file with it
adapter = functools.cache(TypeAdapter)


def _with_key(values: Any) -> Any:
    """Returns the JSON object of a problem with a `key`, which the file calls `where`.

    Other values are returned unchanged, so that pydantic reports the fault.
    """
    if not isinstance(values, dict):
        return values
    return {"key": values.get("where"), **values}


StoredProblem = Annotated[Problem, BeforeValidator(_with_key)]


@dataclass(frozen=True)
class LatencySpread:
    """Mean, median and 99th percentile of latencies, in seconds."""

    mean: float
    p50: float
    p99: float


def inter_token(answer: Answer) -> float | None:
    """Returns the time per output token (TPOT): mean seconds between tokens after the first.

    None if the answer has fewer than two tokens or chunks.
    """
    tokens = answer.completion_tokens
    times = [moment for moment, _ in answer.chunks]
    if tokens < 2 or len(times) < 2:
        return None
    return (times[-1] - times[0]) / (tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Numbers of requests and tokens, token rate and latencies over the rounds of one level.

    requests: number of requests sent
    errors: number of requests that failed
    output_tokens: number of tokens in answers that did not fail
    wall_s: wall time of the rounds in seconds
    tokens_per_s: output tokens per second over all users
    ttft_s: time from the request to the first token
    inter_token_s: mean time between tokens after the first (TPOT) of each answer
    itl_s: time between chunks as they arrive, which have several tokens under speculation
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
    """Questions and settings of a run.

    questions: number of questions
    turns: number of answers that an endpoint gives at each level
    template: description of the chat template
    thinking: level of thinking that was requested
    system: message before every question
    concurrency: number of conversations in flight at each level
    rates: number of conversations that begin per second at each level, replaces `concurrency`
    rounds: number of parts into which the questions are divided
    limit_s: seconds after which an answer has failed
    extra_body: request fields merged into every request
    recorded: whether requests were sent as recorded, without `max_tokens`, `temperature` and `seed`
    recorded_times: whether conversations began at the times recorded in the data set
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
        """Loads of the run in words, such as "1 / 4" or "2/s"."""
        if self.recorded_times:
            return "as recorded"
        rates = [f"{rate:g}/s" for rate in self.rates]
        return " / ".join(rates or map(str, self.concurrency))

    @property
    def budget(self) -> str:
        """Limit of the answers' length in words."""
        return "lengths as recorded" if self.recorded else f"at most {self.max_tokens} tokens"


@dataclass(frozen=True, kw_only=True)
class SliceResult(AcceptanceSummary):
    """Figures of the answers, at any load, that share one property.

    by: name of the property, such as BY_MINUTE
    value: upper bound of the prompt length, or lower bound of another property
    answers: number of answers
    tokens_per_s: output tokens over the seconds from request to end, summed over the answers
    ttft_s: time from the request to the first token
    """

    by: str
    value: Count
    answers: Count
    tokens_per_s: float | None
    ttft_s: LatencySpread | None


@dataclass(frozen=True)
class QuestionSpeed:
    """Speed of one conversation at one level. Runs are compared conversation by conversation.

    level: label of the level
    question: id of the question
    tokens: number of output tokens
    seconds: time from request to end, summed over the answers
    round: index of the round
    """

    level: str
    question: str
    category: str
    tokens: Count
    seconds: NotNegative
    round: Count = 0


@dataclass(frozen=True, kw_only=True)
class LevelResult(AcceptanceSummary):
    """Results of one endpoint at one load.

    concurrency: number of conversations in flight, 0 with a rate
    rate: new conversations per second, None without a rate
    rounds: output tokens per second of each round
    degeneration: number of degenerate answers
    """

    concurrency: int
    rate: float | None = None
    throughput: Throughput
    rounds: list[float]
    degeneration: OutputQuality

    @property
    def label(self) -> str:
        """Name of the level in sentences."""
        return level_label(self.concurrency, self.rate)

    @property
    def load(self) -> str:
        """Short name of the level in tables."""
        return str(self.concurrency) if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True, kw_only=True)
class EndpointResult(AcceptanceSummary):
    """Results of one endpoint, with its acceptance over all levels.

    categories: acceptance by category of the questions
    degeneration: number of degenerate answers over all levels
    concurrency: results by level of load
    turns_detail: speculation in each answer, or in each round
    questions_detail: speed of each conversation
    slices: results by minute, prompt length and reused share of the prompt
    quality: number of degenerate answers by category
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
        """Whether the server reports verification steps, and does not report 0 drafts."""
        return bool(self.steps) and self.drafted != 0

    @property
    def groups(self) -> dict[str, AcceptanceSummary]:
        """Acceptance by category. The entry ALL is the acceptance over all answers."""
        return {**self.categories, ALL: self}

    def degenerate(self, category: str = ALL) -> bool:
        """Returns whether too many answers of a category are degenerate to show its acceptance."""
        if category == ALL:
            return self.degeneration.degenerate
        return category in self.quality and self.quality[category].degenerate

    def at(self, label: str) -> LevelResult | None:
        """Returns the results at the level with this label. None if it was not measured."""
        return next((level for level in self.concurrency if level.label == label), None)

    def speeds(self, label: str) -> dict[str, QuestionSpeed]:
        """Returns the speeds of the conversations at a level by question id."""
        at_level = [speed for speed in self.questions_detail if speed.level == label]
        # a conversation that took no time has no speed
        return {speed.question: speed for speed in at_level if speed.seconds > 0}


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Speed-up: output tokens per second of one endpoint over another, paired by question.

    of: name of the endpoint whose speed is the numerator
    over: name of the endpoint whose speed is the denominator
    level: label of the load
    ratio: speed-up with its 95 % confidence interval over questions, rounds and launches
    questions: number of questions that both endpoints answered
    rounds: number of rounds if the interval is over rounds, otherwise 1
    launches: number of times that each server was started and measured
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
        """Numbers of questions, rounds and launches that the interval covers, in words."""
        launches = f"{self.launches} launches"
        if self.launches == 1:
            launches = "one launch"
        rounds = ""
        if self.rounds > 1:
            rounds = f" in {self.rounds} rounds"
        return f"{self.questions} questions{rounds} of {launches}"


@dataclass(frozen=True, kw_only=True)
class ComparedFigure:
    """Ratio of one figure of this run to the same figure of an earlier run.

    figure: name of the figure
    ratio: new value over earlier value
    low: lower end of the ratio's interval, None without an interval
    high: upper end of the ratio's interval, None without an interval
    units: number of questions or runs that the interval is over
    paired_by: question or run
    verdict: regression, improvement, no change found, or not judged
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
    """Comparison of this run with earlier runs.

    old: name and URL of the endpoint in the first earlier run
    runs: number of earlier runs
    max_regression: decrease that is allowed, as a fraction
    confidence: confidence level of each interval, as a fraction
    """

    old: dict[str, Any]
    runs: int
    max_regression: float
    confidence: float
    figures: list[ComparedFigure]
    problems: list[StoredProblem]


@dataclass(frozen=True, kw_only=True)
class LengthFigures:
    """Figures of one draft length at one load.

    acceptance_length: tokens per verification step
    tokens_per_s: output tokens per second of a user
    of_best: speed divided by the speed of the fastest draft length, None for the fastest
    """

    draft_len: int
    acceptance_length: float | None
    tokens_per_s: float
    of_best: Ratio | None


@dataclass(frozen=True, kw_only=True)
class LoadChoice:
    """Figures of all draft lengths at one load.

    lengths: figures by draft length, the shortest first
    best: shortest draft length that may be as fast as the fastest
    """

    concurrency: int
    lengths: list[LengthFigures]
    best: int


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """Proposed draft length, with the figures of all lengths.

    loads: figures by load
    draft_len: median of the best draft lengths over all loads, 0 to serve without the head
    """

    loads: list[LoadChoice]
    draft_len: int


@dataclass(frozen=True, kw_only=True)
class BenchResults(EndpointResult):
    """Contents of results.json: results of the first endpoint, and of the run.

    schema: version of the format
    endpoints: results of the other endpoints by name
    speedups: speed of one endpoint over another, by level
    comparison: comparison with earlier runs, None if there was none
    created: time at which the run ended
    draft_choice: proposed draft length, None if none was requested
    card: name of the published head whose figures are shown with the measured figures
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
        """Results of all endpoints, in the order in which they were given."""
        return [self, *self.endpoints.values()]

    def to_dict(self) -> dict[str, Any]:
        """Returns the results as the JSON object of results.json."""
        values = asdict(self)
        values["problems"] = [problem.to_dict() for problem in self.problems]
        if self.comparison is not None:
            problems = [problem.to_dict() for problem in self.comparison.problems]
            values["comparison"]["problems"] = problems
        return values


def level_label(concurrency: int, rate: float | None) -> str:
    """Returns the name of a level of load.

    `rate`: new conversations per second. With a rate, the label leaves the concurrency out.
    """
    return f"concurrency {concurrency}" if rate is None else f"{rate:g} requests/s"


def user_speed(endpoint: EndpointResult, label: str) -> Ratio | None:
    """Returns the output tokens per second of one user at a level, with an interval over questions.

    The time to the first token counts. None if the level was not measured, has too few questions or
    degenerate output. Every drafter is fast on degenerate output.
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
    """Returns the speed of one endpoint over another for a user, paired by question.

    None if a user's speed is not known for an endpoint, or if they share too few questions.

    Args:
        of: Results of the first endpoint, one per launch.
        over: Results of the second endpoint, one per launch.
        label: Name of the level of load.
    """
    endpoints = [*of, *over]
    if any(user_speed(endpoint, label) is None for endpoint in endpoints):
        return None
    speeds = [endpoint.speeds(label) for endpoint in endpoints]
    common = sorted(set.intersection(*map(set, speeds)))
    rounds = {speeds[0][question].round for question in common}
    # answers of one round share the state of the machine, so rounds are independent units if there
    # are enough
    by_round = len(rounds) >= MIN_ROUNDS
    sides = []
    for endpoint_speeds in speeds:
        common_speeds = [endpoint_speeds[question] for question in common]
        sides.append(_speed_sums(common_speeds, by_round))
    launches = len(of)
    pairs = zip(sides[:launches], sides[launches:], strict=True)
    ratio = paired_ratio(*pairs, alike=by_round)
    if ratio is None:
        return None
    first = of[0]
    # the speed-up cannot exceed the tokens of a step whose drafts are all accepted
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
    """Returns the sums of tokens and seconds as an array [2], by round index or by question id."""
    sums: dict[int | str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))
    for speed in speeds:
        unit = speed.round if by_round else speed.question
        sums[unit] += (speed.tokens, speed.seconds)
    return sums


def read_results(path: Path) -> BenchResults:
    """Reads a results.json. `path`: the file, or the directory that contains it.

    Raises UsageError if the file does not exist or is not a result of bench.
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
