"""Where acceptance figures come from, per server. Every figure carries its `source`; nothing is guessed.

| server | source | histogram |
|---|---|---|
| trtspec reference | `spec_decode` on each choice | yes |
| trtllm-serve | `avg_decoded_tokens_per_iter` on each choice: steps = tokens / average, prefill included | no |
| vLLM | counters vllm:spec_decode_num_* around a run, which must be alone on the server | from positions |
| SGLang | `avg_spec_accept_length` of /server_info, the server's own mean since its start | no |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from trtspec.bench.acceptance import TurnCounts
from trtspec.bench.client import Answer, first_model

FROM_CHOICE = "spec_decode of each choice"
FROM_AVERAGE = "avg_decoded_tokens_per_iter of each choice (prefill counted as a step)"
FROM_COUNTERS = "vllm:spec_decode_num_* counters around the run"
FROM_SGLANG = "avg_spec_accept_length of /server_info (mean since the server's start)"
METRIC = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)")


@dataclass(frozen=True)
class ServerKind:
    """One kind of server: its `owned_by` in /v1/models, the prefix of its names in /metrics, the prefix of its
    speculation counters there, and the paths at which it tells its mean acceptance length since its start. `dated`:
    what it does with request parameters under speculation is known by release. `survives_logprobs`: no release is known
    that a request for log-probabilities ends under speculation (this repository's tests ask both)."""

    name: str
    owner: str
    metrics: str = ""
    counters: str = ""
    mean_paths: tuple[str, ...] = ()
    dated: bool = False
    survives_logprobs: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        ServerKind("reference", "trtspec", survives_logprobs=True),
        ServerKind("trtllm", "tensorrt_llm", dated=True),
        ServerKind("vllm", "vllm", "vllm:", "vllm:spec_decode_num_", survives_logprobs=True),
        ServerKind("sglang", "sglang", mean_paths=("/server_info", "/get_server_info")),  # the second is the older one
    )
}
UNKNOWN = ServerKind("unknown", "")


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


@dataclass(frozen=True)
class Counters:
    """A reading of vLLM's counters: verification steps, drafted and accepted tokens, accepted per position."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: dict[int, int] = field(default_factory=dict)


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
        metrics = await _get_text(client, "/metrics")
        kind = next((kind for kind in KINDS.values() if kind.metrics and kind.metrics in metrics), UNKNOWN)
    return DetectedServer(kind.name, model or str(entry["id"]), named.get("version"), named.get("draft_sampling"))


async def read_counters(client: httpx.AsyncClient, server: DetectedServer) -> Counters | None:
    """The server's speculation counters, or None where it has none or does not speculate."""
    if not server.row.counters:
        return None
    return parse_counters(await _get_text(client, "/metrics"), server.row.counters)


def parse_counters(text: str, prefix: str = KINDS["vllm"].counters) -> Counters | None:
    """Sums the counters over all label sets (engines); the `_total` suffix is optional, as clients differ."""
    sums: dict[str, float] = {}
    positions: dict[int, int] = {}
    for line in text.splitlines():
        match = METRIC.match(line)
        if not match or not match["name"].startswith(prefix):
            continue
        name = match["name"].removesuffix("_total")
        if name.endswith("_per_pos"):
            position = re.search(r'position="(\d+)"', match["labels"] or "")
            if position:
                index = int(position[1])
                positions[index] = positions.get(index, 0) + int(float(match["value"]))
        else:
            sums[name] = sums.get(name, 0.0) + float(match["value"])
    if f"{prefix}drafts" not in sums:
        return None
    return Counters(
        steps=int(sums[f"{prefix}drafts"]),
        drafted=int(sums.get(f"{prefix}draft_tokens", 0)),
        accepted=int(sums.get(f"{prefix}accepted_tokens", 0)),
        per_position=positions,
    )


def counts_between(before: Counters, after: Counters, category: str, tokens: int) -> TurnCounts:
    """The whole run between two readings as one entry; the histogram follows from the per-position counts."""
    steps = after.steps - before.steps
    reached = [steps]
    for position in sorted(after.per_position):
        reached.append(after.per_position[position] - before.per_position.get(position, 0))
    histogram = tuple(here - there for here, there in zip(reached, [*reached[1:], 0], strict=True))
    return TurnCounts(
        question=f"all of {category}",
        category=category,
        tokens=tokens,
        steps=steps,
        accepted=after.accepted - before.accepted,
        drafted=after.drafted - before.drafted,
        histogram=histogram if after.per_position else None,
        source=FROM_COUNTERS,
    )


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
    if answer.tokens_per_iteration and answer.completion_tokens:
        steps = max(1, round(answer.completion_tokens / answer.tokens_per_iteration))
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


def all_counts(answers: Sequence[Answer]) -> list[TurnCounts]:
    """`counts_of` for every answer without an error that tells something."""
    found = (counts_of(answer) for answer in answers if not answer.error)
    return [counts for counts in found if counts is not None]


async def running_mean(client: httpx.AsyncClient, server: DetectedServer, tokens: int) -> list[TurnCounts]:
    """One entry from the mean that the server keeps since its start, or nothing where it keeps none."""
    info: Any = None
    for path in server.row.mean_paths:
        info = info or await _get_json(client, path)
    states = info.get("internal_states") if isinstance(info, dict) else None
    length = states[0].get("avg_spec_accept_length") if states else None
    if not length or not tokens:
        return []
    steps = max(1, round(tokens / length))
    return [TurnCounts("all", "all", tokens, steps, tokens - steps, None, None, FROM_SGLANG)]


async def _get_json(client: httpx.AsyncClient, path: str) -> Any:
    try:
        response = await client.get(path, timeout=10)
        return response.json() if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}


async def _get_text(client: httpx.AsyncClient, path: str) -> str:
    try:
        response = await client.get(path, timeout=10)
        return response.text if response.status_code == 200 else ""
    except httpx.HTTPError:
        return ""
