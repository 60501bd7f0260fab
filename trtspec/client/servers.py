"""The figures of speculation that each kind of server reports, and their names.

Every figure carries its `source`.

For one answer or run, which bench and check read, and for all traffic, which watch reads:

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
LEAST_AVERAGE = 0.99  # tokens per iteration: each brings one, and an average may be rounded
SETTLED_S = 1.0  # between two equal readings of settled counters; a step of an engine takes less
RESTLESS_S = 30.0  # counters that still change after it belong to other users
METADATA_S = 10.0  # limit for /metrics, /version and the like
Count = Annotated[int, Field(ge=0, lt=2**53)]  # exact as a float; checked where files are read
Samples = dict[str, list[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One kind of server. `owner`: its `owned_by` in /v1/models.

    `prefix` begins the names of its Prometheus metrics. `steps`, `drafted`, `accepted` and
    `position` name its counters without `_total` ("": not counted). `first` is the number of the
    first draft in the `position` label. `mean` names a gauge of tokens per step in place of
    counters. `around_runs`: bench reads the counters around a run, because answers say nothing.

    `dated`: what it does with request parameters under speculation is known by release.

    `ids`: request fields by which it returns token ids. `scores`: how check gets the probability of
    given tokens: by `echo` of a prompt, by `continuations` of one token, or not at all.
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
    """The server at a URL.

    `kind`: a name of ADAPTERS, or unknown. `draft_sampling`: how it draws drafts, if known.
    `context`: tokens of prompt and answer that it accepts, if known.
    """

    kind: str
    model: str
    version: str | None = None
    draft_sampling: str | None = None
    url: str | None = None
    context: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """The known fields, for the header of a journal of its answers."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        if self.kind == UNKNOWN.name:
            del known["kind"]
        return known

    @property
    def adapter(self) -> Adapter:
        return ADAPTERS.get(self.kind, UNKNOWN)


async def detect_server(client: httpx.AsyncClient, model: str | None = None) -> DetectedServer:
    """Asks /v1/models for the owner, then /version and /metrics.

    Raises RequestFailed if nothing answers, or if the server has no list of models and `model` is
    not given. Raises UsageError if its list does not have `model`.
    """
    entry: dict[str, Any] = {}
    try:
        entry = await first_model(client, name=model)
    except RequestFailed as failure:
        if model is None or failure.status != 404:
            raise
    version: Any = None
    with suppress(ValueError):
        version = parse_json(await _text(client, "/version"))
    if not isinstance(version, dict):
        version = {}
    adapters = ADAPTERS.values()
    owner = str(entry.get("owned_by", "")).lower()
    adapter = next((each for each in adapters if each.owner == owner), UNKNOWN)
    if adapter is UNKNOWN:
        text = await _text(client, "/metrics")
        candidates = (each for each in adapters if each.around_runs and each.prefix in text)
        adapter = next(candidates, UNKNOWN)
    reported = {
        key: value
        for key in ("version", "draft_sampling")
        if isinstance(value := version.get(key), str)
    }
    url = str(client.base_url).rstrip("/")
    context = entry.get("max_model_len")
    if not isinstance(context, int):
        context = None
    return DetectedServer(adapter.name, model or entry["id"], url=url, context=context, **reported)


@dataclass(frozen=True)
class TurnCounts:
    """Speculation in one answer.

    `steps` counts verification steps, not the prefill. `drafted` and `histogram` are None if the
    server does not report them.

    Counters of a whole run give one entry for `answers` to `questions`. `surplus`: accepted drafts
    past the end of answers, which nobody received. `accepted` excludes and `histogram` includes
    them.
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
    """A reading of a server's speculation counters.

    They count verification steps, drafted and accepted tokens, and by position k (from 1) the steps
    that accepted draft k.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: dict[int, int] = field(default_factory=dict)


def read_samples(text: str) -> Samples:
    """Every sample of a Prometheus text by its name, without buckets.

    Names lose `_total` (clients differ), and Dynamo's `trtllm:` becomes `trtllm_`. Raises
    ValueError for any other text.
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
    """The kind of server that exports these metrics. None if it is unknown."""
    for adapter in ADAPTERS.values():
        if any(name.startswith(adapter.prefix) for name in samples):
            return adapter
    return None


def counters_in(samples: Samples, names: Adapter) -> Counters | None:
    """The speculation counters of a server, summed over its engines.

    None if it has no such counters. `steps` is 0 if it counts draft tokens alone. Raises ValueError
    for invalid counts.
    """
    if (names.steps or names.drafted) not in samples:
        return None
    positions: dict[int, int] = {}
    for labels, value in samples.get(names.position, ()):
        digits = labels.get("position", "")
        position = 0
        if digits.isascii() and digits.isdigit() and len(digits) < 4:
            position = int(digits) - names.first + 1
        if position < 1:
            raise ValueError(f"has {names.position} of the position {labels.get('position')!r:.40}")
        positions[position] = positions.get(position, 0) + count_of(names.position, value)
    steps, drafted, accepted = (
        sum(count_of(name, value) for _, value in samples.get(name, ()))
        for name in (names.steps, names.drafted, names.accepted)
    )
    return Counters(steps, drafted, accepted, positions)


def count_of(name: str, value: Any) -> int:
    """Returns `value` as a count.

    Raises ValueError with `name` unless it is a whole number that is not negative.
    """
    try:
        return token_count(value)
    except ValueError:
        raise ValueError(f"has {name} {value!s:.40}, which is not a count") from None


def read_iterations(text: str, source: str = "") -> Counters:
    """The counts in TensorRT-LLM's iteration statistics.

    The text is a list of the iterations since the last request for them. Raises ValueError for any
    other text, and for an empty list on the first request (no `source`): the engine may not collect
    statistics.
    """
    records = parse_json(text)  # a list, as the text begins with [
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("is JSON, but not a list of iterations")
    if not records and not source:
        raise ValueError("is an empty list: no iteration yet, or enable_iter_perf_stats is off")
    statistics = [record.get("specDecodingStats") for record in records]
    speculating = [each for each in statistics if isinstance(each, dict)]
    keys = ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")
    steps, drafted, accepted = (
        sum(count_of(key, each.get(key)) for each in speculating) for key in keys
    )
    return Counters(steps, drafted, accepted)


def counted_between(before: Counters, after: Counters) -> Counters:
    """Counts between two readings. Raises ValueError if a counter decreased."""
    steps = after.steps - before.steps
    drafted = after.drafted - before.drafted
    accepted = after.accepted - before.accepted
    per_position = {
        position: count - before.per_position.get(position, 0)
        for position, count in sorted(after.per_position.items())
    }
    fewest = min(steps, drafted, accepted, *per_position.values())
    if fewest < 0 or before.per_position.keys() - after.per_position.keys():
        raise ValueError(
            "counts less after the run than before it: it was started again, or is several servers"
        )
    return Counters(steps, drafted, accepted, per_position)


async def read_counters(
    client: httpx.AsyncClient, server: DetectedServer, faults: list[str], settled: bool = False
) -> Counters | None:
    """The server's counters, if bench reads them around runs.

    None if it has no counters or does not speculate, and for invalid counts, with the reason
    appended to `faults`. `settled`: waits until they no longer change, since a server finishes
    requests that their client has abandoned.
    """
    if not server.adapter.around_runs:
        return None
    deadline = time.monotonic() + RESTLESS_S
    before: Counters | None = None
    while True:
        try:
            counters = counters_in(read_samples(await _text(client, "/metrics")), server.adapter)
        except ValueError as error:
            faults.append(f"its /metrics {error}")
            return None
        if not settled or counters in (None, before) or time.monotonic() > deadline:
            return counters
        before = counters
        await asyncio.sleep(SETTLED_S)


def counts_between(
    before: Counters, after: Counters, category: str, tokens: int, faults: list[str]
) -> TurnCounts | None:
    """The run between two readings as one entry, with the histogram from the counts by position.

    None if a counter decreased. The reason for a missing entry or histogram is appended to
    `faults`.
    """
    try:
        counted = counted_between(before, after)
    except ValueError as error:
        faults.append(f"its /metrics {error}")
        return None
    histogram = None
    reached = [counted.steps, *counted.per_position.values()]
    consecutive = list(counted.per_position) == list(range(1, len(reached)))
    if not consecutive or reached != sorted(reached, reverse=True):
        faults.append(
            f"its /metrics counts {reached[1:]} accepted drafts "
            f"by position in {counted.steps} steps"
        )
    elif counted.per_position:  # entry j: steps that accepted exactly j drafts
        pairs = zip(reached, [*reached[1:], 0], strict=True)
        histogram = tuple(count - further for count, further in pairs)
    counts = counted.steps, counted.accepted, counted.drafted, histogram
    return TurnCounts(f"all of {category}", category, tokens, *counts, FROM_COUNTERS)


def counts_of(answer: Answer) -> TurnCounts | None:
    """Speculation as one answer reports it. None if it reports nothing."""
    spec = answer.spec_decode
    average = answer.tokens_per_iteration
    tokens = answer.completion_tokens
    if spec is not None:
        histogram = tuple(spec["histogram"]) if spec["histogram"] else None
        counts = spec["steps"], spec["accepted"], spec["drafted"], histogram
        return TurnCounts(answer.question, answer.category, tokens, *counts, FROM_CHOICE)
    if average is None or average < LEAST_AVERAGE or not tokens:
        return None
    iterations = max(1, min(tokens, round(tokens / average)))
    # the server counts the prefill as an iteration
    counted = iterations - 1, tokens - iterations, None, None
    return TurnCounts(answer.question, answer.category, tokens, *counted, FROM_AVERAGE)


def all_counts(answers: Sequence[Answer], faults: list[str]) -> list[TurnCounts]:
    """`counts_of` for every answer without an error, if it is not None.

    Appends to `faults` the first average below one token per iteration. An average of 0 is from a
    server that did not count.
    """
    good = [answer for answer in answers if not answer.error]
    averages = [answer.tokens_per_iteration for answer in good if answer.tokens_per_iteration]
    low = next((average for average in averages if average < LEAST_AVERAGE), None)
    if low:
        faults.append(
            f"its avg_decoded_tokens_per_iter is {low:g}, "
            "and each iteration brings at least one token"
        )
    return [counts for answer in good if (counts := counts_of(answer)) is not None]


async def _text(client: httpx.AsyncClient, path: str) -> str:
    """The page at `path`, empty if the server has no such page."""
    with suppress(RequestFailed):
        return (await fetch(client, path, timeout=METADATA_S)).decode("utf-8", "replace")
    return ""
