"""Counters of the engine: one record per iteration, and totals since the start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from trtspec.engine.prefix import PrefixStats
from trtspec.engine.sequence import Output


@dataclass(frozen=True)
class Iteration:
    """One engine step. `decoding` rows ran a round; `tokens` came out of it and of the prefills. `prefix`: what prefix
    reuse did since the start, where it is on."""

    number: int
    seconds: float
    active: int
    queued: int
    decoding: int
    prompt_tokens: int
    tokens: int
    drafted: int
    accepted: int
    prefix: PrefixStats | None = None

    def to_dict(self) -> dict[str, Any]:
        """The record under the names that trtllm-serve's /metrics uses, as far as they have a meaning here."""
        speculated = self.drafted > 0
        record: dict[str, Any] = {
            "iter": self.number,
            "iterLatencyMS": self.seconds * 1000,
            "numActiveRequests": self.active,
            "numQueuedRequests": self.queued,
            "inflightBatchingStats": {
                "numScheduledRequests": self.decoding,
                "numGenRequests": self.decoding,
                "numCtxTokens": self.prompt_tokens,
            },
            "specDecodingStats": {
                "numDraftTokens": self.drafted,
                "numAcceptedTokens": self.accepted,
                "numRequestsWithDraftTokens": self.decoding if speculated else 0,
                "acceptanceLength": 1 + self.accepted / self.decoding if speculated else 1.0,
            },
        }
        if self.prefix is not None:
            record["kvCacheStats"] = {
                "reusedBlocks": self.prefix.reused_blocks,
                "missedBlocks": self.prefix.missed_blocks,
                "cacheHitRate": self.prefix.hit_rate,
            }
        return record


@dataclass
class Totals:
    """Sums since the engine started. steps, drafted, accepted and histogram count rounds of rows, as `Stats` does."""

    histogram: list[int] = field(default_factory=list)
    iterations: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def record(
        self,
        outputs: Iterable[Output],
        *,
        decoding: int,
        active: int,
        queued: int,
        prompt_tokens: int,
        seconds: float,
        prefix: PrefixStats | None = None,
    ) -> Iteration:
        """Adds one engine step and returns its record."""
        tokens = drafted = accepted = 0
        for output in outputs:
            tokens += len(output.token_ids)
            if output.finish_reason:
                self.requests += 1
            if output.round is not None:
                offered, stood = output.round
                self.steps += 1
                drafted += offered
                accepted += stood
                self.histogram[stood] += 1
        self.iterations += 1
        self.prompt_tokens += prompt_tokens
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        counts = (active, queued, decoding, prompt_tokens, tokens, drafted, accepted)
        return Iteration(self.iterations, seconds, *counts, prefix=replace(prefix) if prefix else None)
