"""Measures the acceptance of a live endpoint from its server's counters.

The names of the counters are in client/servers.py.
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
TIMEOUT_S = 10.0  # time limit of one reading, also if its bytes arrive slowly
FIGURES = ("steps", "drafted", "accepted")  # fields of Counters that a server may count


@dataclass
class Watch:
    """Speculation counters of a server, read repeatedly.

    path: path of the server's metrics, "" before the first reading
    source: description of the metrics
    keeps: names in FIGURES that the server counts
    counted: sums of the counters, including requests before the first reading
    acceptance_length: tokens per verification step since the previous reading, None without steps
    scrapes: number of readings that succeeded
    missed: number of readings that failed
    restarts: number of times that the server was started again
    failure: error of the last reading, "" if it succeeded, None before the first reading
    last: values of the server's counters at the last reading
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

        Raises TrtspecError if the server does not answer, or if it has no metrics of speculation.
        The error has the code NO_METRICS if no path ever had such metrics.
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
                        # a server that does not respond has no other path either
                        if error.status is None:
                            raise
                        reasons.append(f"{path} answers {error.status}")
                        absent += 1
                # raises RequestFailed with a better message if the server is not OpenAI-compatible
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
        """Reads the metrics at a path and adds their increase to the sums.

        Raises RequestFailed if there is no such page. Raises ValueError if the page has no metrics
        of speculation.
        """
        body = await fetch(client, path)
        self.take(body.decode("utf-8", "replace"))
        self.path = path
        self.scrapes += 1
        self.failure = ""

    def take(self, text: str) -> None:
        """Adds one page of metrics to the sums.

        Raises ValueError if the page has no metrics of speculation. `text`: metrics in Prometheus
        format, or TensorRT-LLM's iteration statistics as JSON.
        """
        means: list[float] = []
        # iteration statistics are a JSON list
        if text.lstrip().startswith("["):
            increase = read_iterations(text, self.source)
            self.source = "iteration statistics"
            self.keeps = FIGURES
        else:
            increase, means = self._take_samples(read_samples(text))
        self.acceptance_length = acceptance_length(increase.steps, increase.accepted)
        # a server without counters may report the acceptance length itself
        if means:
            self.acceptance_length = sum(means) / len(means)
        before = self.counted
        sums = [getattr(before, key) + getattr(increase, key) for key in FIGURES]
        self.counted = Counters(*sums)

    def _take_samples(self, samples: Samples) -> tuple[Counters, list[float]]:
        """Returns the increase of the counters, and acceptance lengths that the server reports.

        Raises ValueError if there are no metrics of speculation. `samples`: samples in Prometheus
        format by name.
        """
        names = adapter_of(samples)
        if names is None:
            raise ValueError("has no metrics of a server that is known")
        counters = counters_in(samples, names)
        # some servers report a mean in place of counters
        if counters is None and names.mean not in samples:
            raise ValueError(f"has {names.name} metrics and none of speculation")
        self.source = f"{names.name} metrics"
        self.keeps = ()
        # some servers count drafts but not steps, which are first in FIGURES
        if counters is not None:
            self.keeps = FIGURES if names.steps else FIGURES[1:]
        before = self.last
        self.last = counters or Counters()
        try:
            increase = counted_between(before, self.last)
        except ValueError:
            # the server was started again, so its counters began at 0
            increase = self.last
            self.restarts += 1
        means = [value for _, value in samples.get(names.mean, ())]
        # before any request, the reported mean is 0 or not a number
        valid = [mean for mean in means if 1 <= (finite(mean) or 0) < 2**53]
        return increase, valid

    def summary(self) -> dict[str, Any]:
        """Returns the JSON object of `watch --json`. A count is None if the server has no counter.

        `up` is whether the last reading succeeded.
        """
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
        """Returns the acceptance length since the previous reading, and all counts, in words.

        If the last reading failed, the error is returned instead.
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

MIN_BASELINE_STEPS = 200  # a category with fewer steps is not used as the baseline
# Variance of a mean over the steps of whole answers, divided by its variance for independent steps.
# Steps of one answer are alike.
DESIGN_EFFECT = 8.0
Z = 2.326  # quantile of the normal distribution for a one-sided test at 1 %


@dataclass(frozen=True)
class Baseline:
    """Acceptance that a live server is compared with: the lowest of all categories of a benchmark.

    No mix of the categories has a lower acceptance.

    category: name of the category
    steps: number of verification steps
    accepted_per_step: accepted drafts per verification step
    variance: variance of the mean of accepted drafts, multiplied by the number of steps
    """

    category: str
    steps: int
    accepted_per_step: float
    variance: float


def read_baseline(path: Path) -> Baseline:
    """Reads the baseline from a results.json of bench.

    Raises UsageError if the file is not a result of bench, if no category has enough verification
    steps, or if the category with the lowest acceptance has no accepted draft.
    """
    run = read_results(path)
    steps_by_category = {}
    mean_by_category = {}
    for name, summary in run.categories.items():
        steps = summary.steps or 0
        accepted = summary.accepted
        if steps >= MIN_BASELINE_STEPS and accepted is not None and not run.degenerate(name):
            steps_by_category[name] = steps
            mean_by_category[name] = accepted / steps
    if not mean_by_category:
        message = (
            f"{path} has no category with {MIN_BASELINE_STEPS} verification steps "
            "on output that is not degenerate"
        )
        remedy = "measure more: trtspec bench URL --samples 80 --max-tokens 256 -o DIR"
        raise UsageError(message, remedy)
    category = min(mean_by_category, key=lambda name: mean_by_category[name])
    steps = steps_by_category[category]
    mean = mean_by_category[category]
    if not mean:
        message = f"{path} has no accepted draft in {category}: no traffic can drop below that"
        remedy = "run trtspec inspect HEAD --against TARGET, then measure again"
        raise UsageError(message, remedy)
    turns = [turn for turn in run.turns_detail if turn.category == category]
    # If the server counts all answers together, the variance is unknown. A geometric distribution
    # is assumed, and its variance is multiplied by the effect of whole answers.
    variance = DESIGN_EFFECT * mean * (1 + mean)
    if len(turns) >= 2:
        # variance of the ratio estimator with answers as clusters (Cochran, Sampling Techniques,
        # 3rd ed., chapter 6)
        squares = sum((turn.accepted - mean * turn.steps) ** 2 for turn in turns)
        variance = squares / steps * len(turns) / (len(turns) - 1)
    return Baseline(category, steps, mean, variance)


@dataclass(frozen=True)
class WatchVerdict:
    """Verdict on the acceptance of a live server, compared with a baseline.

    drop: decrease of accepted drafts per step, as a fraction of the baseline, None if not measured
    significant_drop: smallest decrease that chance does not explain, None if not measured
    why: reason for a verdict other than pass
    """

    status: Literal["pass", "fail", "unmeasured"]
    drop: float | None = None
    significant_drop: float | None = None
    why: str = ""


def judge(watch: Watch, baseline: Baseline, max_drop: float, min_steps: int) -> WatchVerdict:
    """Judges whether accepted drafts per step decreased by more than `max_drop`.

    The verdict is fail if the decrease is also significant in a one-sided test at 1 %. The verdict
    is unmeasured if the steps are too few or unknown, or if chance may explain the decrease.

    Args:
        max_drop: Allowed decrease, as a fraction of the baseline.
        min_steps: Number of verification steps that a verdict needs.
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
    # The mean of n steps has the baseline's variance divided by n, and is normal for many steps.
    # The difference of two means has the sum of their variances.
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


# --- the exporter, which Prometheus reads ---

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
    """Source of the metrics that `watch` exports to Prometheus."""

    watch: Watch

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the last reading. The Prometheus client calls it at each scrape.

        A figure that the server does not count is absent.
        """
        summary = self.watch.summary()
        for name, key, family, text in METRICS:
            value = summary[key]
            if value is not None:
                yield family(f"trtspec_watch_{name}", text, value=value)


def start_exporter(listen: str, watch: Watch) -> str:
    """Serves the metrics of a watch until this process ends. Returns the URL of the metrics.

    `listen`: HOST:PORT, PORT or :PORT, by default on localhost. Raises UsageError if the address is
    invalid or in use.
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
    # a URL has an IPv6 address in brackets
    url_host = host
    if ":" in host:
        url_host = f"[{host}]"
    return f"http://{url_host}:{server.server_port}/metrics"
