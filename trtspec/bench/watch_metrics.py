"""Prometheus metrics of a watch. docker/monitoring has alert rules and a dashboard for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtspec.bench.watch import Watch
from trtspec.errors import Problem, UsageError

CODES = (
    "TS-WATCH-ACCEPTANCE", "TS-WATCH-BASELINE", "TS-WATCH-SLOW", "TS-WATCH-LOOPS", "TS-WATCH-ERRORS", "TS-WATCH-GONE",
    "TS-WATCH-NOT-SPECULATING",
)  # fmt: skip


class WatchCollector(Collector):
    """What the last look found. The families are made by the watch's own thread and replaced as a whole."""

    def __init__(self) -> None:
        self.families: list[Metric] = []

    def update(self, watch: Watch, alerts: Sequence[Problem]) -> None:
        self.families = [*_counters(watch), *_acceptance(watch), *_tests(watch), *_alerts(watch, alerts)]

    def collect(self) -> Iterator[Metric]:
        yield from self.families


def _counters(watch: Watch) -> Iterator[Metric]:
    totals = watch.state.totals
    looks = CounterMetricFamily("trtspec_watch_scrapes", "Looks at the endpoint.", labels=["result"])
    looks.add_metric(["ok"], totals.scrapes)
    looks.add_metric(["missed"], totals.missed_scrapes)
    yield looks
    for name, text, value in (
        ("restarts", "Times that the endpoint's counters started again.", totals.resets),
        ("steps", "Verification steps in ended batches.", totals.steps),
        ("accepted_tokens", "Accepted draft tokens in ended batches.", totals.accepted),
        ("batches", "Ended batches.", totals.batches),
        ("probes", "Prompts sent by the watch itself.", totals.probes),
        ("probe_failures", "Probes that failed.", totals.probe_failures),
        ("degenerate_answers", "Probes answered with nothing, noise or a loop.", totals.degenerate),
    ):
        yield CounterMetricFamily(f"trtspec_watch_{name}", text, value=value)
    yield GaugeMetricFamily("trtspec_watch_up", "1 while the last look succeeded.", value=not watch.state.missed_in_row)


def _acceptance(watch: Watch) -> Iterator[Metric]:
    state, last = watch.state, watch.state.last_batch
    if last:
        yield GaugeMetricFamily(
            "trtspec_watch_acceptance_per_step", "Accepted drafts per step, last batch.", value=last["acceptance"]
        )
        yield GaugeMetricFamily(
            "trtspec_watch_last_batch_timestamp_seconds", "When the last batch ended.", value=last["ended"]
        )
    if "token_s" in last:
        yield GaugeMetricFamily("trtspec_watch_token_seconds", "Seconds per token, last batch.", value=last["token_s"])
    positions = GaugeMetricFamily(
        "trtspec_watch_position_acceptance", "Share of steps that accepted this draft.", labels=["position"]
    )
    for position, share in state.positions.items():
        positions.add_metric([str(position)], share)
    contexts = GaugeMetricFamily(
        "trtspec_watch_context_acceptance_per_step",
        "Accepted drafts per step of probes, by prompt tokens.",
        labels=["prompt_tokens"],
    )
    for group, (steps, accepted) in state.contexts.items():
        contexts.add_metric([group], accepted / steps)
    yield positions
    yield contexts


def _tests(watch: Watch) -> Iterator[Metric]:
    families = {
        name: GaugeMetricFamily(f"trtspec_watch_{name}", text, labels=["series"])
        for name, text in (
            ("normal", "What is normal of this series; latency in seconds per token."),
            ("statistic_ratio", "CUSUM over its threshold; an alarm from 1 on."),
            ("found_within_batches", "Batches within which 95 of 100 falls are found."),
            ("learned_batches", "Batches that what is normal was learned from."),
        )
    }
    for name, series in watch.state.series.items():
        families["learned_batches"].add_metric([name], len(series.learned))
        if series.test is None or series.reference is None:
            continue
        normal = series.reference.mean
        families["normal"].add_metric([name], math.exp(-normal) if name == "latency" else normal)
        families["statistic_ratio"].add_metric([name], series.statistic / series.test.threshold)
        families["found_within_batches"].add_metric([name], series.test.detect_within)
    yield from families.values()


def _alerts(watch: Watch, alerts: Sequence[Problem]) -> Iterator[Metric]:
    firing = {problem.code for problem in alerts}
    now = GaugeMetricFamily("trtspec_watch_alert", "1 while the alert fires.", labels=["code"])
    since = CounterMetricFamily("trtspec_watch_alerts", "Times that the alert began.", labels=["code"])
    for code in CODES:
        now.add_metric([code], code in firing)
        since.add_metric([code], watch.state.totals.alerts.get(code, 0))
    yield now
    yield since


def start_exporter(listen: str, collector: WatchCollector) -> tuple[str, Callable[[], None]]:
    """Serves the metrics on HOST:PORT, a PORT or :PORT (localhost, unless a host is named). Returns the URL and what
    ends the server. Raises UsageError for an address that cannot be listened on."""
    from prometheus_client import start_http_server

    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "localhost"
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        number = int(port)
        server, thread = start_http_server(number, addr=host, registry=registry)
    except (ValueError, OverflowError):
        raise UsageError(f"--listen {listen} is not HOST:PORT", "write --listen localhost:9777") from None
    except OSError as error:
        raise UsageError(
            f"--listen {listen}: {error.strerror or error}", "choose another port, or an address of this machine"
        ) from None

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.server_port}/metrics", end
