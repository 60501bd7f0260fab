"""Acceptance of a live endpoint, from the counters that its server keeps.

client/servers.py knows their names.
"""

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
    Samples,
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
TIMEOUT_S = 10.0  # of one reading, however slowly its bytes come
FIGURES = ("steps", "drafted", "accepted")


@dataclass
class Watch:
    """The readings of the server at `url`.

    `keeps`: the FIGURES that the server counts. `counted`: their sums, with those before the first
    reading. `acceptance_length`: of the last interval. `failure`: why the last reading failed. ""
    if it succeeded, None before the first one. `last`: the last counters of the server.
    """

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
    last: Counters = field(default_factory=Counters)

    async def read(self, client: httpx.AsyncClient) -> None:
        """Reads the metrics once.

        Raises TrtspecError if the server does not answer, with the code NO_METRICS if it never had
        metrics of speculation.
        """
        reasons = []
        absent = 0
        remedy = documented()[NO_METRICS]["remedy"]
        paths = (self.path,) if self.path else PATHS
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for path in paths:
                    try:
                        await self._read_path(client, path)
                        return
                    except ValueError as error:
                        reasons.append(f"{path} {error}")
                    except RequestFailed as error:
                        if error.status is None:
                            raise
                        reasons.append(f"{path} answers {error.status}")
                        absent += 1
                # raises RequestFailed if this is not an OpenAI-compatible server
                if absent == len(PATHS):
                    await first_model(client)
            failure = f"{self.url} gives no metrics of speculation: {'; '.join(reasons)}"
        except TimeoutError:
            failure = f"{self.url} does not answer within {TIMEOUT_S:g} s"
            remedy = "look at the server's log"
        except RequestFailed as error:
            failure = error.message
            remedy = error.remedy
        self.missed += 1
        self.failure = failure
        self.acceptance_length = None
        code = None
        if len(reasons) == len(PATHS):
            code = NO_METRICS
        raise TrtspecError(failure, remedy, code)

    async def _read_path(self, client: httpx.AsyncClient, path: str) -> None:
        """Counts the metrics at a path.

        Raises ValueError or RequestFailed if it has none of speculation.
        """
        body = await fetch(client, path)
        self.take(body.decode("utf-8", "replace"))
        self.path = path
        self.scrapes += 1
        self.failure = ""

    def take(self, text: str) -> None:
        """Counts one body of metrics. Raises ValueError if it has no metrics of speculation."""
        means: list[float] = []
        if text.lstrip().startswith("["):
            grown = read_iterations(text, self.source)
            self.source = "iteration statistics"
            self.keeps = FIGURES
        else:
            grown, means = self._take_samples(read_samples(text))
        self.acceptance_length = acceptance_length(grown.steps, grown.accepted)
        if means:
            self.acceptance_length = sum(means) / len(means)
        before = self.counted
        sums = [getattr(before, key) + getattr(grown, key) for key in FIGURES]
        self.counted = Counters(*sums)

    def _take_samples(self, samples: Samples) -> tuple[Counters, list[float]]:
        """Returns the growth of the counters, and acceptance lengths that the server reports.

        Raises ValueError without metrics of speculation.
        """
        names = adapter_of(samples)
        if names is None:
            raise ValueError("has no metrics of a server that is known")
        counters = counters_in(samples, names)
        if counters is None and names.mean not in samples:
            raise ValueError(f"has {names.name} metrics and none of speculation")
        self.source = f"{names.name} metrics"
        self.keeps = ()
        if counters is not None:
            self.keeps = FIGURES if names.steps else FIGURES[1:]
        before = self.last
        self.last = counters or Counters()
        try:
            grown = counted_between(before, self.last)
        except ValueError:
            # the server was started again: everything that it counts is new
            grown = self.last
            self.restarts += 1
        means = [value for _, value in samples.get(names.mean, ())]
        valid = [mean for mean in means if 1 <= (finite(mean) or 0) < 2**53]
        return grown, valid

    def summary(self) -> dict[str, Any]:
        """Returns the keys of `--json`. A count is None if the server does not keep it."""
        counts = {key: getattr(self.counted, key) for key in self.keeps}
        return {
            "url": self.url,
            "source": self.source or None,
            "up": self.failure == "",
            "scrapes": self.scrapes,
            "missed_scrapes": self.missed,
            "restarts": self.restarts,
            **dict.fromkeys(FIGURES),
            **counts,
            "acceptance_length": self.acceptance_length,
        }

    def line(self) -> str:
        """Returns the last interval's acceptance length and all counts in words.

        Returns the reason instead if the last reading failed.
        """
        if self.failure:
            return self.failure
        counts = [f"{getattr(self.counted, key):,} {key}" for key in self.keeps]
        length = "not measured, no steps"
        if self.acceptance_length:
            length = f"{self.acceptance_length:.2f}"
        return (
            f"{self.source}: acceptance length {length}; in all {', '.join(counts) or 'no counts'}"
        )


# --- the verdict against a baseline ---

ENOUGH_STEPS = 200  # of a category in a baseline, to judge by it
# variance of a mean over the steps of whole answers, over its variance for independent steps
DESIGN_EFFECT = 8.0
Z = 2.326  # one-sided 1 % of the normal distribution


@dataclass(frozen=True)
class Baseline:
    """The category of a results.json that accepts least: no mix of its categories accepts less.

    `variance`: of the accepted drafts, by step.
    """

    category: str
    steps: int
    accepted_per_step: float
    variance: float


def read_baseline(path: Path) -> Baseline:
    """Reads the baseline of a results.json.

    Raises UsageError if the file is not a result of bench, or if it says too little about
    acceptance.
    """
    run = read_results(path)
    steps_of = {}
    mean_of = {}
    for name, summary in run.categories.items():
        steps = summary.steps or 0
        accepted = summary.accepted
        if steps >= ENOUGH_STEPS and accepted is not None and not run.degenerate(name):
            steps_of[name] = steps
            mean_of[name] = accepted / steps
    if not mean_of:
        message = (
            f"{path} has no category with {ENOUGH_STEPS} verification steps "
            "on output that is not degenerate"
        )
        remedy = "measure more: trtspec bench URL --samples 80 --max-tokens 256 -o DIR"
        raise UsageError(message, remedy)
    category = min(mean_of, key=lambda name: mean_of[name])
    steps = steps_of[category]
    mean = mean_of[category]
    if not mean:
        message = f"{path} has no accepted draft in {category}: no traffic can drop below that"
        raise UsageError(message, "trtspec inspect HEAD --against TARGET, then measure again")
    turns = [turn for turn in run.turns_detail if turn.category == category]
    # a server that counts all answers together: a geometric distribution, with the effect of whole
    # answers
    variance = DESIGN_EFFECT * mean * (1 + mean)
    if len(turns) >= 2:
        # ratio estimator with answers as clusters (Cochran, Sampling Techniques, 3rd ed., chapter
        # 6)
        squares = sum((turn.accepted - mean * turn.steps) ** 2 for turn in turns)
        variance = squares / steps * len(turns) / (len(turns) - 1)
    return Baseline(category, steps, mean, variance)


@dataclass(frozen=True)
class WatchVerdict:
    """The verdict against a baseline.

    `drop`: of accepted drafts per step, as a share of the baseline. `significant_drop`: the
    smallest drop that chance does not explain. Both are None if not measured. `why`: the reason if
    it did not pass.
    """

    status: Literal["pass", "fail", "unmeasured"]
    drop: float | None = None
    significant_drop: float | None = None
    why: str = ""


def judge(watch: Watch, baseline: Baseline, max_drop: float, min_steps: int) -> WatchVerdict:
    """Fails a significant drop of accepted drafts per step that is larger than `max_drop`.

    The test is one-sided, at 1 %. Unmeasured if the steps are too few or unknown, or if chance may
    explain the drop.
    """
    if "steps" not in watch.keeps:
        why = f"{watch.source} do not count verification steps, the unit of the baseline"
        return WatchVerdict("unmeasured", why=why)
    steps = watch.counted.steps
    if steps < min_steps:
        why = f"{steps} verification steps are counted, and a verdict needs {min_steps}"
        return WatchVerdict("unmeasured", why=why)
    mean = baseline.accepted_per_step
    drop = 1 - watch.counted.accepted / steps / mean
    # The mean of n steps has the baseline's variance over n, and is normal for many steps.
    variance = baseline.variance * (1 / steps + 1 / baseline.steps)
    significant = Z * math.sqrt(variance) / mean
    if drop <= max_drop:
        return WatchVerdict("pass", drop, significant)
    fewer = f"{100 * drop:.1f} % fewer accepted drafts per step"
    why = f"{fewer} than {baseline.category} of the baseline"
    if drop <= significant:
        why += f"; at {steps} steps only a drop above {100 * significant:.1f} % is significant"
        return WatchVerdict("unmeasured", drop, significant, why)
    why += f"; at most {100 * max_drop:g} % are allowed"
    return WatchVerdict("fail", drop, significant, why)


# --- the exporter ---

# name, key of the summary, type and help of each metric
METRICS = (
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
)


@dataclass(eq=False)
class WatchCollector(Collector):
    """The metrics of a watch, for Prometheus. A figure that the server does not count is absent."""

    watch: Watch

    def collect(self) -> Iterator[Metric]:
        summary = self.watch.summary()
        for name, key, family, text in METRICS:
            value = summary[key]
            if value is not None:
                yield family(f"trtspec_watch_{name}", text, value=value)


def start_exporter(listen: str, watch: Watch) -> str:
    """Serves the metrics until this process ends, and returns their URL.

    `listen`: HOST:PORT, PORT or :PORT. The default host is localhost. Raises UsageError if it
    cannot be listened on.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "localhost"
    registry = CollectorRegistry()
    registry.register(WatchCollector(watch))
    try:
        server, _ = start_http_server(int(port), addr=host, registry=registry)
    except (ValueError, OverflowError, OSError) as error:
        reason = getattr(error, "strerror", None) or "it is not HOST:PORT"
        remedy = "write `listen` localhost:9777, or choose another port"
        raise UsageError(f"`listen` {listen}: {reason}", remedy) from None
    shown = host
    if ":" in host:
        shown = f"[{host}]"
    return f"http://{shown}:{server.server_port}/metrics"
