"""Prometheus text of the engine's totals. trtllm-serve's own /metrics is JSON; this one is for a scraper."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtspec.engine.engine import Engine


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
