"""Acceptance of a live endpoint, from the counters that its server keeps; client/servers.py says which and where."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtspec.bench.results import read_results
from trtspec.bench.statistics import acceptance_length
from trtspec.client.client import RequestFailed, fetch, finite, first_model
from trtspec.client.servers import (
    Counters,
    adapter_of,
    counted_between,
    counters_in,
    read_iterations,
    read_samples,
)
from trtspec.data_files import documented
from trtspec.errors import TrtspecError, UsageError

NO_METRICS = "TS-WATCH-NO-METRICS"
PATHS = ("/prometheus/metrics", "/metrics")
TIMEOUT = 10.0  # seconds of one reading, however slowly its bytes come
ENOUGH_STEPS = 200  # of a category in a baseline, to say what it accepts
FIGURES = ("steps", "drafted", "accepted")
DESIGN_EFFECT = (
    8.0  # variance of a mean over the steps of whole answers, over that of independent steps
)
Z = 2.326  # one-sided 1 % of the normal distribution


@dataclass
class Watch:
    """What was read of the server at `url`. `counted` begins with what the server counted before the first reading;
    `keeps` names those of its figures that the server counts. `failure`: why the last reading failed, None before the
    first one. `acceptance_length`: of the last interval."""

    url: str
    path: str = ""
    source: str = ""
    keeps: tuple[str, ...] = ()
    counted: Counters = field(default_factory=Counters)
    acceptance_length: float | None = None
    scrapes: int = 0
    missed: int = 0
    restarts: int = 0
    failure: str | None = None
    last: Counters = field(default_factory=Counters)  # the server's own counters

    async def read(self, client: httpx.AsyncClient) -> None:
        """Reads once. Raises TrtspecError if the server does not answer, with the code NO_METRICS if it has never had
        metrics of speculation."""
        reasons = []
        absent = 0
        remedy = documented()[NO_METRICS]["remedy"]
        try:
            async with asyncio.timeout(TIMEOUT):
                for path in [self.path] if self.path else PATHS:
                    try:
                        self.take((await fetch(client, path)).decode("utf-8", "replace"))
                    except ValueError as error:
                        reasons.append(f"{path} {error}")
                    except RequestFailed as error:
                        if error.status is None:
                            raise
                        reasons.append(f"{path} answers {error.status}")
                        absent += 1
                    else:
                        self.path, self.scrapes, self.failure = path, self.scrapes + 1, ""
                        return
                if absent == len(PATHS):
                    await first_model(client)  # says so if this is not an OpenAI-compatible server
            failure = f"{self.url} gives no metrics of speculation: {'; '.join(reasons)}"
        except TimeoutError:
            failure = f"{self.url} does not answer within {TIMEOUT:g} s"
            remedy = "look at the server's log"
        except RequestFailed as error:
            failure, remedy = error.message, error.remedy
        self.missed, self.failure, self.acceptance_length = self.missed + 1, failure, None
        code = NO_METRICS if len(reasons) == len(PATHS) else None
        raise TrtspecError(failure, remedy, code)

    def take(self, text: str) -> None:
        """Counts what one body of metrics says. Raises ValueError for anything but metrics of speculation."""
        if text.lstrip().startswith("["):
            grown, means = read_iterations(text, self.source), []
            self.source, self.keeps = "iteration statistics", FIGURES
        else:
            samples = read_samples(text)
            names = adapter_of(samples)
            if names is None:
                raise ValueError("has no metrics of a server that is known")
            now = counters_in(samples, names)
            means = [
                value
                for _, value in samples.get(names.mean, ())
                if 1 <= (finite(value) or 0) < 2**53
            ]
            if now is None and names.mean not in samples:
                raise ValueError(f"has {names.name} metrics and none of speculation")
            self.source = f"{names.name} metrics"
            self.keeps = () if now is None else FIGURES if names.steps else FIGURES[1:]
            self.last, before = now or Counters(), self.last
            try:
                grown = counted_between(before, self.last)
            except ValueError:  # the server was started again: all that it counts is new
                grown, self.restarts = self.last, self.restarts + 1
        self.acceptance_length = (
            sum(means) / len(means) if means else acceptance_length(grown.steps, grown.accepted)
        )
        self.counted = Counters(
            *(getattr(self.counted, key) + getattr(grown, key) for key in FIGURES)
        )

    def summary(self) -> dict[str, Any]:
        """The keys of `--json`; a count is None if the server does not keep it."""
        found = {
            "url": self.url,
            "source": self.source or None,
            "up": self.failure == "",
            "scrapes": self.scrapes,
        }
        found |= {"missed_scrapes": self.missed, "restarts": self.restarts}
        found |= {key: getattr(self.counted, key) if key in self.keeps else None for key in FIGURES}
        return found | {"acceptance_length": self.acceptance_length}

    def line(self) -> str:
        """The last interval's acceptance length and all counts in words, or why the last reading failed."""
        counts = ", ".join(f"{getattr(self.counted, key):,} {key}" for key in self.keeps)
        length = (
            f"{self.acceptance_length:.2f}" if self.acceptance_length else "not measured, no steps"
        )
        return (
            self.failure
            or f"{self.source}: acceptance length {length}; in all {counts or 'no counts'}"
        )


@dataclass(frozen=True)
class Baseline:
    """The category of a results.json that accepts least: no mix of its categories accepts less. `variance`: what one
    step adds to the variance of the accepted drafts."""

    category: str
    steps: int
    accepted_per_step: float
    variance: float


def read_baseline(path: Path) -> Baseline:
    """Raises UsageError for a file that is not a result of bench, or that says too little about acceptance.

    The variance is that of a ratio estimator with answers as clusters (Cochran, Sampling Techniques, 3rd ed., chapter
    6); for a server that counts all answers together, that of a geometric distribution times DESIGN_EFFECT."""
    run = read_results(path)
    enough = {
        name: (found.steps, found.accepted)
        for name, found in run.categories.items()
        if found.steps
        and found.steps >= ENOUGH_STEPS
        and found.accepted is not None
        and not run.degenerate(name)
    }
    if not enough:
        what = f"{path} has no category with {ENOUGH_STEPS} verification steps on output that is not degenerate"
        raise UsageError(
            what, "measure more: trtspec bench URL --samples 80 --max-tokens 256 -o DIR"
        )
    category, (steps, accepted) = min(enough.items(), key=lambda item: item[1][1] / item[1][0])
    if not accepted:
        what = f"{path} has no accepted draft in {category}: no traffic can drop below that"
        raise UsageError(what, "trtspec inspect HEAD --against TARGET, then measure again")
    mean = accepted / steps
    turns = [turn for turn in run.turns_detail if turn.category == category]
    squares = sum((turn.accepted - mean * turn.steps) ** 2 for turn in turns)
    variance = (
        DESIGN_EFFECT * mean * (1 + mean)
        if len(turns) < 2
        else squares / steps * len(turns) / (len(turns) - 1)
    )
    return Baseline(category, steps, mean, variance)


@dataclass(frozen=True)
class Verdict:
    """`drop`: of accepted drafts per step, relative to the baseline; `significant_drop`: the smallest one that chance
    does not explain. None: not measured. `why` it did not pass."""

    status: Literal["pass", "fail", "unmeasured"]
    drop: float | None = None
    significant_drop: float | None = None
    why: str = ""


def judge(watch: Watch, baseline: Baseline, max_drop: float, min_steps: int) -> Verdict:
    """Fails a drop of accepted drafts per step that is larger than `max_drop` and significant at 1 %, one-sided.

    The mean of n steps has the variance v / n, with the v of the baseline, and its distribution is normal for many
    steps: a drop from the mean m of N steps is significant above z sqrt(v / n + v / N) / m."""
    steps, mean = watch.counted.steps, baseline.accepted_per_step
    if "steps" not in watch.keeps:
        why = f"{watch.source} do not count verification steps, the unit of the baseline"
        return Verdict("unmeasured", why=why)
    if steps < min_steps:
        why = f"{steps} verification steps are counted, and a verdict needs {min_steps}"
        return Verdict("unmeasured", why=why)
    drop = 1 - watch.counted.accepted / steps / mean
    significant = Z * math.sqrt(baseline.variance * (1 / steps + 1 / baseline.steps)) / mean
    if drop <= max_drop:
        return Verdict("pass", drop, significant)
    why = f"{100 * drop:.1f} % fewer accepted drafts per step than {baseline.category} of the baseline"
    if drop <= significant:
        why = f"{why}; at {steps} steps only a drop above {100 * significant:.1f} % is significant"
        return Verdict("unmeasured", drop, significant, why)
    return Verdict("fail", drop, significant, f"{why}; at most {100 * max_drop:g} % are allowed")


@dataclass(eq=False)
class WatchCollector(Collector):
    """The metrics of a watch, for Prometheus. What the server does not count is absent."""

    watch: Watch

    def collect(self) -> Iterator[Metric]:
        found = self.watch.summary()
        for name, key, family, text in (
            ("up", "up", GaugeMetricFamily, "1 if the last reading succeeded."),
            ("scrapes", "scrapes", CounterMetricFamily, "Readings that succeeded."),
            ("missed_scrapes", "missed_scrapes", CounterMetricFamily, "Readings that failed."),
            (
                "restarts",
                "restarts",
                CounterMetricFamily,
                "Times that the server's counters went backwards.",
            ),
            ("steps", "steps", CounterMetricFamily, "Verification steps."),
            ("draft_tokens", "drafted", CounterMetricFamily, "Drafted tokens."),
            ("accepted_tokens", "accepted", CounterMetricFamily, "Accepted draft tokens."),
            (
                "acceptance_length",
                "acceptance_length",
                GaugeMetricFamily,
                "1 + accepted / steps, last interval.",
            ),
        ):
            if found[key] is not None:
                yield family(f"trtspec_watch_{name}", text, value=found[key])


def start_exporter(listen: str, watch: Watch) -> str:
    """Serves the metrics on HOST:PORT, a PORT or :PORT (localhost, unless a host is named) as long as this process
    lives. Returns the URL. Raises UsageError for an address that cannot be listened on."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "localhost"
    registry = CollectorRegistry()
    registry.register(WatchCollector(watch))
    try:
        server, _ = start_http_server(int(port), addr=host, registry=registry)
    except (ValueError, OverflowError, OSError) as error:
        reason = getattr(error, "strerror", None) or "it is not HOST:PORT"
        raise UsageError(
            f"`listen` {listen}: {reason}", "write `listen` localhost:9777, or choose another port"
        ) from None
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.server_port}/metrics"
