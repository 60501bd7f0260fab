"""Reads what each inference server reports about speculation, in answers and in metrics.

bench and check read the report on one answer or run. watch reads the counters of all requests.
Every figure is returned with its `source`.

trtspec reference   `spec_decode` on each choice. Steps in /prometheus/metrics.
vLLM                Counters around a run that is alone on the server. Steps in /metrics.
TensorRT-LLM        `avg_decoded_tokens_per_iter` on each choice, prefill included. See below.
SGLang              Nothing for an answer. A mean in /metrics with --enable-metrics.

With enable_iter_perf_stats, TensorRT-LLM counts steps in the JSON of /metrics, and gives each
record to one reader only. With return_perf_metrics, it counts draft tokens in /prometheus/metrics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import httpx
from pydantic import Field

from trtspec.client.client import Answer, RequestFailed, fetch, first_model, token_count
from trtspec.files import parse_json

FROM_CHOICE = "spec_decode of each choice"
FROM_AVERAGE = "avg_decoded_tokens_per_iter of each choice (prefill counted as a step)"
FROM_COUNTERS = "vllm:spec_decode_num_* counters around the run"
# Tokens per iteration. Each iteration yields at least one token, but an average may be rounded.
MIN_AVERAGE = 0.99
# Seconds between two readings of counters. An iteration takes less, so equal readings are stable.
REREAD_S = 1.0
STABLE_TIMEOUT_S = 30.0  # counters that change for longer count the requests of other users
METADATA_S = 10.0  # time limit of a request for /metrics, /version and similar pages
Count = Annotated[int, Field(ge=0, lt=2**53)]  # exact as a float; checked where files are read
Samples = dict[str, list[tuple[Mapping[str, str], float]]]  # labels and value by name of a metric


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Description of an inference server: what it reports, and how it is asked.

    The name of a counter is given without `_total`, and is "" if the server has no such counter.

    name: short name of the server
    owner: value of `owned_by` in /v1/models
    prefix: beginning of the names of its Prometheus metrics
    steps: name of the counter of verification steps
    drafted: name of the counter of drafted tokens
    accepted: name of the counter of accepted draft tokens
    position: name of the counter of accepted draft tokens with a label `position`
    first: value of the label `position` for the first draft
    mean: name of a gauge of tokens per step, for a server without counters
    around_runs: whether bench reads the counters before and after a run, as answers report nothing
    dated: whether data files list request parameters that a release handles badly
    ids: request fields that make the server return token ids
    scores: method of check to get log-probabilities: echo, continuations, or "" for none
    """

    name: str
    owner: str
    prefix: str = ""
    steps: str = ""
    drafted: str = ""
    accepted: str = ""
    position: str = ""
    first: int = 0
    mean: str = ""
    around_runs: bool = False
    dated: bool = False
    ids: Mapping[str, bool] = field(default_factory=dict)
    scores: str = ""


REFERENCE = Adapter(
    name="reference",
    owner="trtspec",
    prefix="trtspec_",
    ids={"return_token_ids": True},
    scores="echo",
    steps="trtspec_spec_decode_steps",
    drafted="trtspec_spec_decode_draft_tokens",
    accepted="trtspec_spec_decode_accepted_tokens",
    first=1,
    position="trtspec_spec_decode_accepted_tokens_per_position",
)
VLLM = Adapter(
    name="vllm",
    owner="vllm",
    prefix="vllm:",
    around_runs=True,
    ids={"return_token_ids": True},
    scores="echo",
    steps="vllm:spec_decode_num_drafts",
    drafted="vllm:spec_decode_num_draft_tokens",
    accepted="vllm:spec_decode_num_accepted_tokens",
    position="vllm:spec_decode_num_accepted_tokens_per_pos",
)
TRTLLM = Adapter(
    name="trtllm", owner="tensorrt_llm", prefix="trtllm_", dated=True, ids={"detokenize": False},
    scores="continuations", drafted="trtllm_spec_decode_num_draft_tokens",
    accepted="trtllm_spec_decode_num_accepted_tokens",
)  # fmt: skip
SGLANG = Adapter(name="sglang", owner="sglang", prefix="sglang:", mean="sglang:spec_accept_length")
ADAPTERS = {adapter.name: adapter for adapter in (REFERENCE, VLLM, TRTLLM, SGLANG)}
UNKNOWN = Adapter(name="unknown", owner="", ids={"return_token_ids": True}, scores="echo")


@dataclass(frozen=True)
class DetectedServer:
    """Server that was found at a URL. A field is None if the server does not report it.

    kind: name of its adapter, a key of ADAPTERS or "unknown"
    model: name of the model that it serves
    draft_sampling: method by which it draws drafts
    context: number of tokens that it accepts, prompt and answer together
    """

    kind: str
    model: str
    version: str | None = None
    draft_sampling: str | None = None
    url: str | None = None
    context: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that are known, for the header of a journal with the server's answers."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        if self.kind == UNKNOWN.name:
            del known["kind"]
        return known

    @property
    def adapter(self) -> Adapter:
        """Description of this type of server."""
        return ADAPTERS.get(self.kind, UNKNOWN)


async def detect_server(client: httpx.AsyncClient, model: str | None = None) -> DetectedServer:
    """Identifies a server by the owner in its /v1/models, or by its /metrics.

    Raises RequestFailed if no server answers, or if it has no list of models and `model` is None.
    Raises UsageError if its list of models does not contain `model`.
    """
    entry: dict[str, Any] = {}
    try:
        entry = await first_model(client, name=model)
    except RequestFailed as failure:
        # a server without a list of models may still serve the given model
        if model is None or failure.status != 404:
            raise
    version: Any = None
    # /version is optional, and its form differs between servers
    with suppress(ValueError):
        version = parse_json(await _text(client, "/version"))
    if not isinstance(version, dict):
        version = {}
    adapters = ADAPTERS.values()
    owner = str(entry.get("owned_by", "")).lower()
    adapter = next((each for each in adapters if each.owner == owner), UNKNOWN)
    # a proxy may change the owner, but not the names of metrics
    if adapter is UNKNOWN:
        text = await _text(client, "/metrics")
        candidates = (each for each in adapters if each.around_runs and each.prefix in text)
        adapter = next(candidates, UNKNOWN)
    fields = ("version", "draft_sampling")
    reported = {key: version[key] for key in fields if isinstance(version.get(key), str)}
    url = str(client.base_url).rstrip("/")
    context = entry.get("max_model_len")
    if not isinstance(context, int):
        context = None
    return DetectedServer(adapter.name, model or entry["id"], url=url, context=context, **reported)


@dataclass(frozen=True)
class TurnCounts:
    """Counts of speculation in one answer, or in all answers of a round together.

    question: id of the question
    tokens: number of output tokens
    steps: number of verification steps, without the prefill
    accepted: number of accepted draft tokens, without `surplus`
    drafted: number of drafted tokens, None if it is not reported
    histogram: number of steps that accepted exactly j drafts, with `surplus`, None if not reported
    source: description of the server's report
    answers: number of answers
    questions: number of questions
    surplus: number of drafts accepted after the end of answers, which the client did not receive
    """

    question: str
    category: str
    tokens: Count
    steps: Count
    accepted: Count
    drafted: Count | None
    histogram: tuple[Count, ...] | None
    source: str
    answers: Count = 1
    questions: Count = 1
    surplus: Count = 0


@dataclass(frozen=True)
class Counters:
    """Values of a server's speculation counters at one time, or their increase between two times.

    steps: number of verification steps
    drafted: number of drafted tokens
    accepted: number of accepted draft tokens
    per_position: number of steps that accepted draft k, by k from 1
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: dict[int, int] = field(default_factory=dict)


def read_samples(text: str) -> Samples:
    """Returns the samples of a text in Prometheus format, by the name of the metric.

    Buckets of histograms are left out. Names lose their suffix `_total`, which not all servers add,
    and Dynamo's `trtllm:` becomes `trtllm_`. Raises ValueError if the text has another format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples: Samples = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    name = sample.name.removesuffix("_total").replace("trtllm:", "trtllm_", 1)
                    samples.setdefault(name, []).append((sample.labels, sample.value))
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
        raise ValueError("is not Prometheus text") from None
    return samples


def adapter_of(samples: Samples) -> Adapter | None:
    """Returns the adapter of the server that exports these metrics. None if it is unknown."""
    for adapter in ADAPTERS.values():
        if any(name.startswith(adapter.prefix) for name in samples):
            return adapter
    return None


def counters_in(samples: Samples, names: Adapter) -> Counters | None:
    """Returns the speculation counters in a server's metrics, summed over its engines.

    None if the server has no such counters. `steps` is 0 if the server counts only draft tokens.
    Raises ValueError if a value is not a count. `names`: adapter with the names of the counters.
    """
    # some servers count drafts but not steps
    if (names.steps or names.drafted) not in samples:
        return None
    positions: dict[int, int] = {}
    for labels, value in samples.get(names.position, ()):
        digits = labels.get("position", "")
        position = 0
        # drafts are short, so a long number is not a position
        if digits.isascii() and digits.isdigit() and len(digits) < 4:
            position = int(digits) - names.first + 1
        if position < 1:
            raise ValueError(f"has {names.position} of the position {labels.get('position')!r:.40}")
        positions[position] = positions.get(position, 0) + count_of(names.position, value)
    totals = []
    for name in (names.steps, names.drafted, names.accepted):
        totals.append(sum(count_of(name, value) for _, value in samples.get(name, ())))
    steps, drafted, accepted = totals
    return Counters(steps, drafted, accepted, positions)


def count_of(name: str, value: Any) -> int:
    """Returns `value` as an integer.

    Raises ValueError if it is not a whole number, or is negative. `name`: name of the counter, for
    the message.
    """
    try:
        return token_count(value)
    except ValueError:
        raise ValueError(f"has {name} {value!s:.40}, which is not a count") from None


def read_iterations(text: str, source: str = "") -> Counters:
    """Returns the sums of counts in TensorRT-LLM's iteration statistics.

    `text`: JSON list of the iterations since the last request. Raises ValueError if it is not such
    a list, or if the list of the first request is empty. `source`: "" on the first request.
    """
    records = parse_json(text)  # a list, as the text begins with [
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("is JSON, but not a list of iterations")
    # later lists may be empty if there was no traffic
    if not records and not source:
        raise ValueError("is an empty list: no iteration yet, or enable_iter_perf_stats is off")
    statistics = [record.get("specDecodingStats") for record in records]
    speculating = [each for each in statistics if isinstance(each, dict)]
    keys = ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")
    totals = []
    for key in keys:
        totals.append(sum(count_of(key, each.get(key)) for each in speculating))
    steps, drafted, accepted = totals
    return Counters(steps, drafted, accepted)


def counted_between(before: Counters, after: Counters) -> Counters:
    """Returns the increase of counters between two readings.

    Raises ValueError if a counter decreased, or if a position disappeared.
    """
    steps = after.steps - before.steps
    drafted = after.drafted - before.drafted
    accepted = after.accepted - before.accepted
    per_position = {
        position: count - before.per_position.get(position, 0)
        for position, count in sorted(after.per_position.items())
    }
    smallest = min(steps, drafted, accepted, *per_position.values())
    if smallest < 0 or before.per_position.keys() - after.per_position.keys():
        raise ValueError(
            "counts less after the run than before it: the server was started again, "
            "or several servers answer at this URL"
        )
    return Counters(steps, drafted, accepted, per_position)


async def read_counters(
    client: httpx.AsyncClient, server: DetectedServer, faults: list[str], until_stable: bool = False
) -> Counters | None:
    """Reads a server's speculation counters, if its answers do not report speculation.

    None if its answers report speculation, or if it has no such counters. None if a value is not a
    count, with the reason appended to `faults`.

    Args:
        until_stable: Waits until the counters no longer change, for about STABLE_TIMEOUT_S at most.
            A server may still be working on requests that their client has abandoned.
    """
    if not server.adapter.around_runs:
        return None
    deadline = time.monotonic() + STABLE_TIMEOUT_S
    before: Counters | None = None
    while True:
        try:
            samples = read_samples(await _text(client, "/metrics"))
            counters = counters_in(samples, server.adapter)
        except ValueError as error:
            faults.append(f"its /metrics {error}")
            return None
        # equal to the reading before, or without counters
        is_stable = counters in (None, before)
        if not until_stable or is_stable or time.monotonic() > deadline:
            return counters
        before = counters
        await asyncio.sleep(REREAD_S)


def counts_between(
    before: Counters, after: Counters, category: str, tokens: int, faults: list[str]
) -> TurnCounts | None:
    """Returns the speculation in all answers between two readings of the counters.

    None if a counter decreased or a position disappeared. The histogram is computed from the counts
    by position, and is None if there are none or if they contradict each other. A decrease and a
    contradiction are appended to `faults`.

    Args:
        category: Category of the questions that were asked.
        tokens: Number of output tokens in the answers.
    """
    try:
        counted = counted_between(before, after)
    except ValueError as error:
        faults.append(f"its /metrics {error}")
        return None
    histogram = None
    # number of steps that accepted at least j drafts, for each j from 0
    at_least = [counted.steps, *counted.per_position.values()]
    is_consecutive = list(counted.per_position) == list(range(1, len(at_least)))
    if not is_consecutive or at_least != sorted(at_least, reverse=True):
        faults.append(
            f"its /metrics counts {at_least[1:]} accepted drafts "
            f"by position in {counted.steps} steps"
        )
    elif counted.per_position:
        # the steps with exactly j drafts have at least j, but not at least j + 1
        pairs = zip(at_least, [*at_least[1:], 0], strict=True)
        histogram = tuple(count - next_count for count, next_count in pairs)
    counts = counted.steps, counted.accepted, counted.drafted, histogram
    return TurnCounts(f"all of {category}", category, tokens, *counts, FROM_COUNTERS)


def counts_of(answer: Answer) -> TurnCounts | None:
    """Returns the speculation that one answer reports. None if it reports nothing.

    TensorRT-LLM's report is an average, from which the numbers of steps and drafts are estimated.
    """
    spec = answer.spec_decode
    average = answer.tokens_per_iteration
    tokens = answer.completion_tokens
    if spec is not None:
        histogram = tuple(spec["histogram"]) if spec["histogram"] else None
        counts = spec["steps"], spec["accepted"], spec["drafted"], histogram
        return TurnCounts(answer.question, answer.category, tokens, *counts, FROM_CHOICE)
    if average is None or average < MIN_AVERAGE or not tokens:
        return None
    iterations = max(1, min(tokens, round(tokens / average)))
    steps = iterations - 1  # the server counts the prefill as an iteration
    accepted = tokens - iterations  # each iteration also yields a token of the target
    counted = steps, accepted, None, None
    return TurnCounts(answer.question, answer.category, tokens, *counted, FROM_AVERAGE)


def all_counts(answers: Sequence[Answer], faults: list[str]) -> list[TurnCounts]:
    """Returns the speculation that each answer reports.

    Answers that failed or report nothing are left out. Appends the first average below one token
    per iteration to `faults`.
    """
    good = [answer for answer in answers if not answer.error]
    # an average of 0 is from a server that did not count
    averages = [answer.tokens_per_iteration for answer in good if answer.tokens_per_iteration]
    low = next((average for average in averages if average < MIN_AVERAGE), None)
    if low:
        faults.append(
            f"its avg_decoded_tokens_per_iter is {low:g}, "
            "and each iteration brings at least one token"
        )
    counts = map(counts_of, good)
    return [reported for reported in counts if reported is not None]


async def _text(client: httpx.AsyncClient, path: str) -> str:
    """Returns the text of the page at `path`. "" if the server does not return such a page."""
    with suppress(RequestFailed):
        return (await fetch(client, path, timeout=METADATA_S)).decode("utf-8", "replace")
    return ""
