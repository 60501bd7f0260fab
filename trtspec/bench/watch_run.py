"""Runs a watch: scrapes, probes, serves the watch's own metrics. One look with `--once`, else
until somebody ends it. docker/monitoring has alert rules and a dashboard for the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtspec.bench import adapters, text_quality
from trtspec.bench.acceptance import TurnCounts
from trtspec.bench.asking import declined
from trtspec.bench.client import Answer, Api, Endpoint, RequestSampling, new_client, request_body, stream_answer
from trtspec.bench.datasets import Question
from trtspec.bench.load import inter_token
from trtspec.bench.steps import MOST_TOKENS, increments
from trtspec.bench.watch import ProbeAnswer, Watch
from trtspec.bench.watch_sources import NoMetrics, SpeculationGone, look
from trtspec.errors import Problem, TrtspecError, UsageError

MOST_PROBES = 8  # of one --once
PROBE_LIMIT = 120.0  # seconds
CODES = (
    "TS-WATCH-ACCEPTANCE", "TS-WATCH-BASELINE", "TS-WATCH-NOTHING-ACCEPTED", "TS-WATCH-SLOW", "TS-WATCH-LOOPS",
    "TS-WATCH-ERRORS", "TS-WATCH-GONE", "TS-WATCH-NOT-SPECULATING", "TS-WATCH-SEVERAL-SERVERS",
)  # fmt: skip


@dataclass(frozen=True)
class ProbePlan:
    """Prompts of watch's own, in this order and again; `tokens_per_minute` is what they may cost on average. `api` and
    `extra_body` as for bench. A probe that is not complete after `limit_s` seconds has failed."""

    tokens_per_minute: float
    questions: tuple[Question, ...]
    sampling: RequestSampling
    model: str | None = None
    api: Api = "chat"
    extra_body: dict[str, Any] = field(default_factory=dict)
    limit_s: float = PROBE_LIMIT

    @property
    def interval(self) -> float:
        """Seconds between two probes."""
        return 60.0 * self.sampling.max_tokens / self.tokens_per_minute


@dataclass(frozen=True)
class WatchSource:
    """Where to look: the endpoint, its metrics where they are elsewhere, and how to probe it (None: not at all).
    `metrics` False where the endpoint is known to have none."""

    url: str
    metrics_url: str
    probe: ProbePlan | None


async def look_once(watch: Watch, source: WatchSource) -> None:
    """One scrape, and the probes that are due since the last look: all of them within the time limit of one. What
    there was no time for is in `watch.not_measured`."""
    async with new_client(source.metrics_url) as metrics, new_client(source.url) as client:
        before = watch.state.last_look
        told = await scrape(watch, metrics, needed=source.probe is None)
        if source.probe is None:
            return
        if watch.state.missed_in_row and told:
            watch.not_measured.append("probes: none was sent, because the metrics could not be read")
            return
        waited = time.time() - before if before is not None else 0.0
        due = max(1, min(MOST_PROBES, int(waited / source.probe.interval)))
        began, whole = time.monotonic(), source.probe.limit_s
        for number in range(due):
            left = whole - (time.monotonic() - began) if number else whole
            if left <= 0 or not await probe(watch, client, source.probe, not told, left):
                why = f"the first {number} took the {whole:g} s of --timeout"
                watch.not_measured.append(f"probes: {due - number} of {due} due, because {why}")
                return


async def look_on(
    watch: Watch, source: WatchSource, interval: float, looked: Callable[[], None], ended: asyncio.Event
) -> None:
    """Looks every `interval` seconds until `ended`; `looked` is called after each look. At most one probe is under way
    beside the looks, which do not wait for it. Never raises for what the endpoint does."""
    async with new_client(source.metrics_url) as metrics, new_client(source.url) as client:
        next_probe, probing = time.monotonic(), None
        while not ended.is_set():
            began = time.monotonic()
            told = await scrape(watch, metrics, needed=source.probe is None)
            if probing is not None and probing.done():
                probing.result()  # an error that is no failed answer ends the watch
                probing = None
            if source.probe is not None and began >= next_probe and probing is None:
                probing = asyncio.create_task(probe(watch, client, source.probe, not told, source.probe.limit_s))
                next_probe = began + source.probe.interval
            looked()
            left = max(0.0, interval - (time.monotonic() - began))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), timeout=left)
        if probing is not None:
            probing.cancel()
            await asyncio.wait([probing])


async def scrape(watch: Watch, client: httpx.AsyncClient, needed: bool) -> bool:
    """Whether the endpoint has metrics to read; a look that failed counts as one that has. Raises NoMetrics where
    there are none and they are `needed`."""
    now = time.time()
    try:
        watch.scraped(now, await look(client, watch.state.memory))
    except SpeculationGone as error:
        watch.without_speculation(now, error.message)
    except NoMetrics:
        if needed and not watch.state.totals.scrapes:
            raise
        if needed:
            watch.missed(now, "it answers and its metrics are gone")
        return False
    except TrtspecError as error:
        watch.missed(now, error.message)
    return True


async def probe(watch: Watch, client: httpx.AsyncClient, plan: ProbePlan, alone: bool, left_s: float) -> bool:
    """Asks the next question and gives the answer to the watch: a failure where it is not complete within the plan's
    limit. Returns False, and gives nothing, where it had only `left_s` seconds and that was less."""
    number = watch.state.totals.probes
    question = plan.questions[number % len(plan.questions)]
    try:
        async with asyncio.timeout(left_s):
            answer = await _asked(watch, client, plan, question)
    except TrtspecError as error:
        answer = Answer(question.id, question.category, 0, 0.0, error=error.message)
    except TimeoutError:
        if left_s < plan.limit_s:
            return False
        answer = Answer(question.id, question.category, 0, 0.0, error=f"not complete after {plan.limit_s:g} s")
    if alone and answer.error is not None:
        watch.missed(time.time(), answer.error)
    elif alone:
        watch.state.missed_in_row = 0
    watch.probed(time.time(), probe_answer(answer), alone)
    return True


async def _asked(watch: Watch, client: httpx.AsyncClient, plan: ProbePlan, question: Question) -> Answer:
    """With the tokens counted at each piece of the stream, which shows the steps; without where that is refused."""
    messages, tools = question.first_request()
    server = await adapters.detect_server(client, plan.model)
    endpoint = Endpoint(str(client.base_url), server.model, plan.api, plan.extra_body)
    body = request_body(endpoint, messages, plan.sampling, 0)
    if tools and plan.api == "chat":
        body["tools"] = tools
    if watch.streams_count:
        counting = {**body, "stream_options": {**body.get("stream_options", {}), "continuous_usage_stats": True}}
        answer = await stream_answer(client, endpoint, counting, question.id, question.category, 0)
        if not declined(answer.error):
            return answer
    answer = await stream_answer(client, endpoint, body, question.id, question.category, 0)
    watch.streams_count = watch.streams_count and answer.error is not None
    return answer


def probe_answer(answer: Answer) -> ProbeAnswer:
    """What the watch keeps of an answer; its text is judged and dropped."""
    counts = adapters.counts_of(answer) or _streamed_counts(answer) if answer.error is None else None
    if counts is not None and counts.prefill_in_steps and counts.steps > 1:
        counts = replace(counts, steps=counts.steps - 1)  # the prefill drafts nothing
    first = answer.first_token - answer.started if answer.first_token is not None else None
    return ProbeAnswer(
        answer.category,
        answer.prompt_tokens,
        counts,
        text_quality.degeneration(answer.written),
        answer.error,
        first,
        inter_token(answer),
    )


def _streamed_counts(answer: Answer) -> TurnCounts | None:
    """The steps that the pieces of a stream show, the first piece being the prefill's; there can be no fewer steps, so
    acceptance is from above. None where usage came only at the end."""
    sizes = increments(answer.counted, answer.completion_tokens)[1:]
    if not sizes or answer.completion_tokens > MOST_TOKENS:
        return None
    accepted = Counter(size - 1 for size in sizes)
    histogram = tuple(accepted[size] for size in range(max(accepted) + 1))
    return TurnCounts(
        answer.question, answer.category, answer.completion_tokens, len(sizes), sum(sizes) - len(sizes), None,
        histogram, adapters.FROM_STREAMS,
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
    yield GaugeMetricFamily("trtspec_watch_started_seconds", "When the watch began.", value=watch.state.began)
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
            ("series_batches", "Batches that had a value for this series; without any it is not judged."),
            ("missing_batches", "Batches since the last one that had a value for this series."),
        )
    }
    for name, series in watch.state.series.items():
        families["series_batches"].add_metric([name], series.batches)
        families["missing_batches"].add_metric([name], series.missing)
        families["learned_batches"].add_metric([name], len(series.learned))
        if series.test is None or series.reference is None:
            continue
        normal = series.reference.mean
        families["normal"].add_metric([name], math.exp(-normal) if name == "latency" else normal)
        if series.batches:  # what was never measured is not near 0, but absent
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
