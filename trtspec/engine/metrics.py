"""Figures of the server: times of each request as trtllm-serve's /perf_metrics has them, and Prometheus text of the
engine's totals (trtllm-serve's own /metrics is JSON; that one is for a scraper)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtspec.engine.engine import Engine
from trtspec.engine.sequence import Output, Stats


@dataclass
class RequestTimes:
    """When one request arrived at the server and at the engine, when its prompt was taken up, and when its tokens were
    made and taken over by the server: seconds of the monotonic clock, as trtllm-serve has them."""

    id: str
    server_arrival: float
    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    server_first_token: float = 0.0
    last_token: float = 0.0
    first_iteration: int = 0
    last_iteration: int = 0
    stats: Stats | None = None

    def add(self, output: Output, made: float, iteration: int) -> None:
        """Counts what a step made."""
        if not self.first_token:
            self.scheduled, self.first_iteration = output.scheduled, iteration
            self.first_token, self.server_first_token = made, time.monotonic()
        self.last_token, self.last_iteration = made, iteration
        self.stats = output.stats or self.stats

    def to_dict(self) -> dict[str, Any]:
        """The record under trtllm-serve's names."""
        metrics: dict[str, Any] = {
            "first_iter": self.first_iteration,
            "last_iter": self.last_iteration,
            "timing_metrics": {
                "server_arrival_time": self.server_arrival,
                "arrival_time": self.arrival,
                "first_scheduled_time": self.scheduled,
                "first_token_time": self.first_token,
                "server_first_token_time": self.server_first_token,
                "last_token_time": self.last_token,
            },
        }
        if self.stats is not None and self.stats.drafted:
            metrics["speculative_decoding"] = {
                "acceptance_rate": self.stats.accepted / self.stats.drafted,
                "total_accepted_draft_tokens": self.stats.accepted,
                "total_draft_tokens": self.stats.drafted,
            }
        return {"request_id": self.id, "perf_metrics": metrics}


class EngineCollector(Collector):
    """Reads the engine's totals at the moment of the scrape."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        totals = self.engine.totals
        counters = {
            "requests": (totals.requests, "Requests that ended."),
            "prompt_tokens": (totals.prompt_tokens, "Prompt tokens prefilled."),
            "generation_tokens": (totals.tokens, "Tokens generated."),
            "engine_iterations": (totals.iterations, "Engine steps."),
            "spec_decode_steps": (totals.steps, "Verification steps, counted per sequence."),
            "spec_decode_draft_tokens": (totals.drafted, "Draft tokens verified."),
            "spec_decode_accepted_tokens": (totals.accepted, "Draft tokens accepted."),
        }
        if self.engine.prefix is not None:
            prefix = self.engine.prefix.stats
            counters["prefix_tokens"] = (prefix.tokens, "Prompt tokens looked up among computed prefixes.")
            counters["prefix_cached_tokens"] = (prefix.cached_tokens, "Prompt tokens that needed no computation.")
            counters["prefix_evicted_blocks"] = (prefix.evicted_blocks, "Blocks of prefixes that made room for others.")
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"trtspec_{name}", text, value=value)
        positions = CounterMetricFamily(
            "trtspec_spec_decode_accepted_tokens_per_position",
            "Steps that accepted this draft position.",
            labels=["position"],
        )
        for position in range(1, len(totals.histogram)):
            positions.add_metric([str(position)], sum(totals.histogram[position:]))
        yield positions
        yield GaugeMetricFamily("trtspec_requests_running", "Requests in the batch.", value=len(self.engine.batch))
        yield GaugeMetricFamily("trtspec_requests_waiting", "Requests in the queue.", value=len(self.engine.waiting))


def prometheus_text(engine: Engine) -> bytes:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return generate_latest(registry)
