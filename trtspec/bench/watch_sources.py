"""What a running server tells about its speculation, read as increments since the last look.

| server | where | acceptance | positions |
|---|---|---|---|
| trtspec reference | /prometheus/metrics | counters | yes |
| vLLM | /metrics | counters vllm:spec_decode_num_* | yes |
| TensorRT-LLM with return_perf_metrics | /prometheus/metrics | counters trtllm_spec_* of draft tokens | no |
| TensorRT-LLM with enable_iter_perf_stats | /metrics | JSON, one record per iteration, given to one reader only | no |
| SGLang with --enable-metrics | /metrics | gauge sglang:spec_accept_length, its own mean | no |

Dynamo passes its worker's metrics through under the worker's names, or with `trtllm:` as prefix.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from trtspec.bench.client import describe, finite
from trtspec.bench.metrics import MetricNames, Samples, draft_position, is_total, names_in, read_samples
from trtspec.errors import TrtspecError
from trtspec.files import parse_json

PATHS = ("/prometheus/metrics", "/metrics")
TIMEOUT = 10.0  # seconds of one scrape, however slowly its bytes come
MOST_BYTES = 64 * 2**20
START = "process_start_time_seconds"
SAME_START = 2.0  # seconds by which a server's own start time moves when its clock is corrected
MOST_KEPT = 4096  # counters of one endpoint, those that it no longer shows included


class NoMetrics(TrtspecError):
    """A server answers and tells nothing that watch can read."""

    default_code = "TS-WATCH-NO-METRICS"


class NoSpeculation(ValueError):
    """Metrics of a known server, without those of speculation."""


class SpeculationGone(TrtspecError):
    """A server told about its speculation before, and its metrics no longer have it."""

    default_code = "TS-WATCH-NOT-SPECULATING"


@dataclass
class Increment:
    """What a server did since the last look. `steps` are verification steps, or draft tokens where `per` says so;
    `positions[k]` counts the steps that accepted draft k (from 1). `tokens`: generated, at least; None where nothing
    tells. `answers`: of these tokens the first ones, which take no verification step, where told. `slow_s` over
    `slow_n` is seconds per token. `older`: the server began before the one that answered last."""

    steps: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    positions: dict[int, float] = field(default_factory=dict)
    tokens: float | None = None
    slow_s: float = 0.0
    slow_n: float = 0.0
    per: str = "step"
    resets: int = 0
    missed: int = 0  # iterations that another reader took
    first_look: bool = False
    older: bool = False
    answers: float = 0.0


@dataclass
class MetricsMemory:
    """What the last look found, kept to make increments of totals. `source` in words, `path` where it was found."""

    source: str = ""
    path: str = ""
    totals: dict[str, float] = field(default_factory=dict)
    born: float = 0.0  # Unix time at which the counters began, where told
    iteration: int | None = None
    running: float | None = None
    waiting: float | None = None


async def look(client: httpx.AsyncClient, memory: MetricsMemory) -> Increment:
    """One scrape, in at most TIMEOUT seconds. Updates `memory` only when it succeeds. Raises TrtspecError when the
    server does not answer, its subclass NoMetrics when it tells nothing about speculation."""
    try:
        async with asyncio.timeout(TIMEOUT):
            return await _look(client, memory)
    except TimeoutError:
        message = f"{client.base_url} does not answer: its metrics were not complete after {TIMEOUT:g} s"
        raise TrtspecError(message, "look at the server's log") from None


async def _look(client: httpx.AsyncClient, memory: MetricsMemory) -> Increment:
    reasons = []
    for path in [memory.path] if memory.path else PATHS:
        try:
            response = await client.get(path)
        except httpx.HTTPError as error:
            raise TrtspecError(f"{client.base_url} does not answer: {describe(error)}", "start the server") from None
        body = response.content[: MOST_BYTES + 1]
        if response.status_code != 200 or len(body) > MOST_BYTES:
            reasons.append(f"{path} answers {response.status_code}")
            continue
        try:
            increment = read_body(body.decode("utf-8", "replace"), memory)
        except NoSpeculation as error:
            if memory.path:
                message = f"{client.base_url}: {path} {error}"
                raise SpeculationGone(message, "look at how the server was started") from None
            reasons.append(f"{path} {error}")
            continue
        except ValueError as error:
            reasons.append(f"{path} {error}")
            continue
        memory.path = path
        return increment
    if memory.path:
        raise TrtspecError(f"{client.base_url} no longer gives its metrics: {'; '.join(reasons)}", "look at its log")
    raise NoMetrics(
        f"{client.base_url} gives no metrics of speculation: {'; '.join(reasons)}",
        "set return_perf_metrics or enable_iter_perf_stats in TensorRT-LLM's YAML, or pass --probe TOKENS_PER_MINUTE",
    )


def read_body(text: str, memory: MetricsMemory) -> Increment:
    """The increment of one answer, Prometheus text or JSON. Raises ValueError in words for anything else."""
    if text.lstrip().startswith("["):
        return read_iterations(parse_json(text), memory)
    samples = read_samples(text)
    names = names_in(samples)
    if names is None:
        raise ValueError("has no metrics of a server that is known")
    return _read_samples(samples, names, memory)


def _read_samples(samples: Samples, names: MetricNames, memory: MetricsMemory) -> Increment:
    counters = {name for name in (names.steps, names.drafted, names.accepted) if name}
    needed = counters - {names.accepted}  # TensorRT-LLM shows no counter of accepted tokens before the first one
    if not (needed and needed <= samples.keys()) and names.mean not in samples:
        raise NoSpeculation(f"has {names.kind} metrics and none of speculation")
    latency = next((name for name in names.latency if f"{name}_sum" in samples), "")
    answers = f"{names.answers}_count" if f"{names.answers}_count" in samples else names.answers
    wanted = [*counters, names.position, names.tokens, answers, f"{latency}_sum", f"{latency}_count"]
    births = (START, *(f"{name}_created" for name in counters))
    born = max((value for name in births for _, value in samples.get(name, ()) if is_total(value)), default=0.0)
    known = {} if memory.born and born > memory.born + SAME_START else memory.totals
    drafts = _draft_length(samples, names)
    found = Increment(per="step" if names.steps or names.mean or drafts else "draft token")
    found.first_look = not memory.totals
    totals: dict[str, float] = {}
    grown: dict[str, float] = {}
    for name in wanted:
        for labels, value in samples.get(name, ()):
            place = draft_position(labels, names) if name == names.position else 0
            if name in counters and not is_total(value):
                raise ValueError(f"has {name} {value}, which is no count")
            if place is None or not is_total(value):
                continue
            key = name + "".join(f"|{label}={labels[label]}" for label in sorted(labels))
            before = known.get(key, 0.0)
            found.resets += value < before
            totals[key] = value
            growth = value if value < before else value - before
            where = f"{name}|{place}" if place else name
            grown[where] = grown.get(where, 0.0) + growth
    kept = {} if found.resets else known  # a series that is missing once begins where it was
    found.resets = int(found.resets > 0 or known is not memory.totals)
    _fill(found, grown, names, latency, drafts)
    found.answers = grown.get(answers, 0.0) if names.tokens in grown else 0.0
    if names.mean in samples:
        _from_mean(found, samples[names.mean], memory)
    if found.first_look:  # what happened before the first look is not traffic of now
        found = Increment(per=found.per, first_look=True)
    elif 0 < born < memory.born - SAME_START:
        found = Increment(per=found.per, older=True)
    totals = {**kept, **totals} if len(kept) < MOST_KEPT else totals
    memory.totals, memory.source = totals or {"seen": 1.0}, f"{names.kind} counters"
    memory.born = float(born) or memory.born
    memory.running, memory.waiting = (_gauge(samples, name) for name in (names.running, names.waiting))
    return found


def _draft_length(samples: Samples, names: MetricNames) -> float | None:
    """Drafts of one verification step, where the server's configuration names one number."""
    told = {labels.get(names.draft_length, "") for labels, _ in samples.get(names.config, ())}
    word = told.pop() if len(told) == 1 else ""
    return float(word) if word.isascii() and word.isdigit() and 0 < len(word) < 4 and int(word) else None


def _fill(found: Increment, grown: Mapping[str, float], names: MetricNames, latency: str, drafts: float | None) -> None:
    found.drafted, found.accepted = grown.get(names.drafted, 0.0), grown.get(names.accepted, 0.0)
    found.steps = grown.get(names.steps, 0.0) if names.steps else found.drafted / (drafts or 1.0)
    found.slow_s, found.slow_n = grown.get(f"{latency}_sum", 0.0), grown.get(f"{latency}_count", 0.0)
    found.tokens = grown.get(names.tokens) if names.tokens else None
    if found.tokens is None and latency and names.answer_latency:  # only an answer of two tokens or more has one
        found.tokens = 2 * found.slow_n
    for key, value in grown.items():
        if names.position and key.startswith(f"{names.position}|"):
            found.positions[int(key.rpartition("|")[2])] = value


def _from_mean(found: Increment, gauges: list[tuple[Mapping[str, str], float]], memory: MetricsMemory) -> None:
    """Steps and accepted drafts that the server's own mean and its tokens imply."""
    known = [value for _, value in gauges if math.isfinite(value) and value >= 1]
    if known and found.tokens:
        mean = sum(known) / len(known)
        found.steps = found.tokens / mean
        found.accepted = found.tokens - found.steps


def _gauge(samples: Samples, name: str) -> float | None:
    return sum(value for _, value in samples[name] if is_total(value)) if name in samples else None


def read_iterations(records: Any, memory: MetricsMemory) -> Increment:
    """TensorRT-LLM's iteration statistics: a list that was collected since somebody last asked for it.

    Raises ValueError where it is none, or where the engine does not collect them.
    """
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError("is JSON and no list of iterations")
    if not records and memory.iteration is None and not memory.source:
        raise ValueError("is an empty list: no iteration yet, or enable_iter_perf_stats is off")
    found = Increment(first_look=memory.iteration is None, tokens=0.0)
    last = memory.iteration
    for record in records:
        number = record.get("iter")
        if isinstance(number, int) and is_total(number):
            if last is not None and number <= last:
                found.resets = 1
            elif last is not None:
                found.missed += number - last - 1
            last = number
        spec, batch = (_object(record.get(key)) for key in ("specDecodingStats", "inflightBatchingStats"))
        asked = _number(spec.get("numRequestsWithDraftTokens"))
        found.steps += asked
        found.drafted += _number(spec.get("numDraftTokens"))
        found.accepted += _number(spec.get("numAcceptedTokens"))
        generating = _number(batch.get("numGenRequests"))
        tokens = generating + _number(spec.get("numAcceptedTokens"))
        found.tokens = (found.tokens or 0.0) + tokens
        if generating:  # each request waits for the whole iteration and gets its share of the tokens
            found.slow_s += generating * _number(record.get("iterLatencyMS")) / 1000
            found.slow_n += tokens
        memory.running = _number(record.get("numActiveRequests"))
        memory.waiting = _number(record.get("numQueuedRequests"))
    memory.iteration, memory.source = last, "iteration statistics"
    return found


def _number(value: Any) -> float:
    found = finite(value)
    return found if found is not None and is_total(found) else 0.0


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
