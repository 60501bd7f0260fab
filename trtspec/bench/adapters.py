"""Where acceptance figures come from, per server. Every figure carries its `source`; nothing is guessed.

| server | source | histogram |
|---|---|---|
| trtspec reference | `spec_decode` on each choice | yes |
| trtllm-serve | `avg_decoded_tokens_per_iter` on each choice: steps = tokens / average, prefill included | no |
| vLLM | counters vllm:spec_decode_num_* around a run, which must be alone on the server | from positions |
| SGLang | `avg_spec_accept_length` of /server_info, the server's own mean since its start | no |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from trtspec.bench import metrics
from trtspec.bench.acceptance import TurnCounts
from trtspec.bench.client import Answer, finite, first_model
from trtspec.files import parse_json

FROM_CHOICE = "spec_decode of each choice"
FROM_AVERAGE = "avg_decoded_tokens_per_iter of each choice (prefill counted as a step)"
FROM_COUNTERS = "vllm:spec_decode_num_* counters around the run"
FROM_STREAMS = "usage in the chunks of streams"
FROM_SGLANG = "avg_spec_accept_length of /server_info (mean since the server's start)"
LEAST_AVERAGE = 0.99  # tokens per iteration: each brings one, and an average may be rounded
SETTLED_S = 1.0  # between two readings of counters that no longer change; a step of an engine takes less
RESTLESS_S = 30.0  # after which somebody else is on the server


@dataclass(frozen=True)
class ServerKind:
    """One kind of server: its `owned_by` in /v1/models, the names of its counters in /metrics where bench needs them,
    and the paths at which it tells its mean acceptance length since its start. `dated`: what it does with request
    parameters under speculation is known by release. `survives_logprobs`: no release is known that a request for
    log-probabilities ends under speculation (this repository's tests ask both)."""

    name: str
    owner: str
    counters: metrics.MetricNames | None = None
    mean_paths: tuple[str, ...] = ()
    dated: bool = False
    survives_logprobs: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        ServerKind("reference", "trtspec", survives_logprobs=True),
        ServerKind("trtllm", "tensorrt_llm", dated=True),
        ServerKind("vllm", "vllm", metrics.VLLM, survives_logprobs=True),
        ServerKind("sglang", "sglang", mean_paths=("/server_info", "/get_server_info")),  # the second is the older one
    )
}
UNKNOWN = ServerKind("unknown", "")
VERSION_KEYS = ("version", "draft_sampling")


@dataclass(frozen=True)
class DetectedServer:
    """What answers at a URL. `kind` is one of KINDS, or unknown. `draft_sampling` says how it chooses the drafts of
    sampled requests, where it tells."""

    kind: str
    model: str
    version: str | None = None
    draft_sampling: str | None = None

    @property
    def row(self) -> ServerKind:
        return KINDS.get(self.kind, UNKNOWN)

    def to_dict(self) -> dict[str, Any]:
        found = {"kind": self.kind, "model": self.model, "version": self.version}
        return found | {"draft_sampling": self.draft_sampling}


async def detect_server(client: httpx.AsyncClient, model: str | None = None) -> DetectedServer:
    """Asks /v1/models for the owner, then /version and /metrics. Raises TrtspecError when nothing answers."""
    entry = await first_model(client)
    version = await _get_json(client, "/version")
    named = version if isinstance(version, dict) else {}
    owner = str(entry.get("owned_by", "")).lower()
    kind = next((kind for kind in KINDS.values() if kind.owner == owner), UNKNOWN)
    if named.get("backend") == "reference" or "trtspec" in named:
        kind = KINDS["reference"]
    if kind is UNKNOWN:
        text = await _get_text(client, "/metrics")
        kind = next((kind for kind in KINDS.values() if kind.counters and kind.counters.prefix in text), UNKNOWN)
    version, drafts = (value if isinstance(value := named.get(key), str) else None for key in VERSION_KEYS)
    return DetectedServer(kind.name, model or entry["id"], version, drafts)


async def read_counters(
    client: httpx.AsyncClient, server: DetectedServer, faults: list[str] | None = None
) -> metrics.Counters | None:
    """The server's speculation counters, or None where it has none or does not speculate. What it has that are no
    counts is None too, with the reason added to `faults`."""
    if server.row.counters is None:
        return None
    try:
        return metrics.read_counters(await _get_text(client, "/metrics"), server.row.counters)
    except ValueError as error:
        _note(faults, f"its /metrics {error}")
        return None


async def settled_counters(
    client: httpx.AsyncClient, server: DetectedServer, faults: list[str] | None = None
) -> metrics.Counters | None:
    """`read_counters` once they no longer change: a server goes on for a while with requests that a client gave up."""
    deadline = time.monotonic() + RESTLESS_S
    found = await read_counters(client, server, faults)
    while found is not None and time.monotonic() < deadline:
        await asyncio.sleep(SETTLED_S)
        again = await read_counters(client, server, faults)
        if again == found:
            break
        found = again
    return found


def counts_between(
    before: metrics.Counters, after: metrics.Counters, category: str, tokens: int, faults: list[str] | None = None
) -> TurnCounts | None:
    """The whole run between two readings as one entry; the histogram follows from the per-position counts. None where
    the readings are not of one run; what is left out has its reason added to `faults`."""
    try:
        counted = metrics.counted_between(before, after)
    except ValueError as error:
        _note(faults, f"its /metrics {error}")
        return None
    histogram = metrics.histogram_of(counted)
    if counted.per_position and histogram is None:
        reached = list(counted.per_position.values())
        _note(faults, f"its /metrics counts {reached} accepted drafts by position in {counted.steps} steps")
    return TurnCounts(
        question=f"all of {category}",
        category=category,
        tokens=tokens,
        steps=counted.steps,
        accepted=counted.accepted,
        drafted=counted.drafted,
        histogram=histogram,
        source=FROM_COUNTERS,
    )


def _note(faults: list[str] | None, fault: str) -> None:
    if faults is not None and fault not in faults:
        faults.append(fault)


def counts_of(answer: Answer) -> TurnCounts | None:
    """What one answer itself says about its speculation, or None when it says nothing."""
    spec = answer.spec_decode
    if spec is not None and all(is_count(spec.get(key)) for key in ("steps", "accepted", "drafted")):
        histogram = spec.get("histogram")
        known = isinstance(histogram, (list, tuple)) and histogram and all(is_count(entry) for entry in histogram)
        return TurnCounts(
            question=answer.question,
            category=answer.category,
            tokens=answer.completion_tokens,
            steps=spec["steps"],
            accepted=spec["accepted"],
            drafted=spec["drafted"],
            histogram=tuple(histogram) if known and histogram else None,
            source=FROM_CHOICE,
        )
    average = answer.tokens_per_iteration
    if average is not None and average >= LEAST_AVERAGE and answer.completion_tokens:
        steps = max(1, min(answer.completion_tokens, round(answer.completion_tokens / average)))
        return TurnCounts(
            question=answer.question,
            category=answer.category,
            tokens=answer.completion_tokens,
            steps=steps,
            accepted=answer.completion_tokens - steps,
            drafted=None,
            histogram=None,
            source=FROM_AVERAGE,
            prefill_in_steps=True,
        )
    return None


def is_count(value: Any) -> bool:
    """A whole number that is not negative; a server may say anything."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def all_counts(answers: Sequence[Answer], faults: list[str] | None = None) -> list[TurnCounts]:
    """`counts_of` for every answer without an error that tells something. An average that is none has its reason added
    to `faults`."""
    good = [answer for answer in answers if not answer.error]
    low = next((answer.tokens_per_iteration for answer in good if is_too_low(answer.tokens_per_iteration)), None)
    if low is not None:
        _note(faults, f"its avg_decoded_tokens_per_iter is {low:g}, and each iteration brings at least one token")
    found = (counts_of(answer) for answer in good)
    return [counts for counts in found if counts is not None]


def is_too_low(average: float | None) -> bool:
    """Whether so few tokens per iteration cannot be; 0 is told by a server that did not count."""
    return average is not None and 0 < average < LEAST_AVERAGE


async def running_mean(
    client: httpx.AsyncClient, server: DetectedServer, tokens: int, faults: list[str] | None = None
) -> list[TurnCounts]:
    """One entry from the mean that the server keeps since its start, or nothing where it keeps none. A mean that is
    none has its reason added to `faults`."""
    info: Any = None
    for path in server.row.mean_paths:
        info = info or await _get_json(client, path)
    states = info.get("internal_states") if isinstance(info, dict) else None
    first = states[0] if isinstance(states, list) and states else None
    told = first.get("avg_spec_accept_length") if isinstance(first, dict) else None
    if not told or not tokens:
        return []
    length = finite(told)
    if length is None or not 1 <= length <= tokens:
        _note(faults, f"its avg_spec_accept_length is {str(told)[:40]!r}, which is no mean over {tokens} tokens")
        return []
    steps = max(1, round(tokens / length))
    return [TurnCounts("all", "all", tokens, steps, tokens - steps, None, None, FROM_SGLANG)]


async def _get_json(client: httpx.AsyncClient, path: str) -> Any:
    try:
        return parse_json(await _get_text(client, path))
    except ValueError:
        return {}


async def _get_text(client: httpx.AsyncClient, path: str) -> str:
    try:
        response = await client.get(path, timeout=10)
        return response.content.decode("utf-8", "replace") if response.status_code == 200 else ""
    except httpx.HTTPError:
        return ""
