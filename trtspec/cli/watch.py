"""Defines `trtspec watch`, which reads the acceptance of a live endpoint from its counters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from trtspec import report
from trtspec.errors import CheckFailed, Problem, TrtspecError, UsageError
from trtspec.records import Excludes, JsonOption, Needs, argument, option


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Options of `trtspec watch`."""

    url: Annotated[str, argument("Server whose metrics are read.")]
    interval: Annotated[
        float, option("Seconds between two readings.", min=0.05), Excludes("once")
    ] = 15.0
    listen: Annotated[
        str | None,
        option("HOST:PORT for Prometheus metrics of the watch; localhost without HOST."),
        Excludes("once"),
    ] = None
    once: Annotated[bool, option("Judge once; status 3 unless --baseline is reached.")] = False
    baseline: Annotated[
        Path | None, option("results.json of `trtspec bench`, or its directory."), Needs("once")
    ] = None
    max_drop: Annotated[
        float,
        option("Largest relative drop of accepted drafts per step that passes.", min=0.0, max=0.95),
        Needs("once"),
    ] = 0.15
    min_steps: Annotated[
        int, option("Verification steps that a verdict needs.", min=50), Needs("once")
    ] = 500
    json_: JsonOption = False


def watch(options: WatchOptions) -> report.Result | None:
    """Read acceptance of a live endpoint from its server's counters.

    Exports it as a Prometheus metric. The counters are Prometheus metrics or TensorRT-LLM's
    iteration statistics. --json prints one object per reading. --once compares accepted drafts per
    step since the server's start with --baseline, and ends with status 3 below it.
    """
    from trtspec.client.addresses import server_url

    url = server_url(options.url)
    if options.once:
        return asyncio.run(_judge_once(url, options))
    asyncio.run(_watch_on(url, options))
    return None


async def _judge_once(url: str, options: WatchOptions) -> report.Result:
    """Reads the counters once, and compares the acceptance with the baseline.

    The result is a failure unless the verdict is `pass`. Raises TrtspecError if the counters cannot
    be read.
    """
    from trtspec.bench.watch import Watch, judge, read_baseline
    from trtspec.client.client import new_client

    if options.baseline is None:
        remedy = (
            "trtspec bench URL --samples 80 -o DIR, and later "
            "trtspec watch URL --once --baseline DIR"
        )
        raise UsageError("--once judges against a baseline, and --baseline is missing", remedy)
    readings = Watch(url)
    baseline = read_baseline(options.baseline)
    async with new_client(url) as client:
        await readings.read(client)
    verdict = judge(readings, baseline, options.max_drop, options.min_steps)
    # too few steps for a verdict
    code = "TS-WATCH-UNMEASURED"
    outcome = "NOT PROVEN"
    if verdict.status == "fail":
        code = "TS-WATCH-BASELINE"
        outcome = "below the baseline"
    problems = [Problem(code, "error", url, verdict.why)] if verdict.why else []
    expected = (
        f"baseline: acceptance length {1 + baseline.accepted_per_step:.2f} ({baseline.category})"
    )
    failure = None
    if problems:
        failure = CheckFailed(f"{url}: {outcome}: {verdict.why}", problems[0].remedy)
    values = {**readings.summary(), **asdict(verdict), "baseline": asdict(baseline)}
    lines = [readings.line(), expected, verdict.status]
    return report.Result(values, problems, lines=lines, failure=failure)


async def _watch_on(url: str, options: WatchOptions) -> None:
    """Prints a reading after each interval until SIGINT or SIGTERM.

    Raises TrtspecError if the server has no metrics about speculation.
    """
    from trtspec.bench.watch import NO_METRICS, Watch, start_exporter
    from trtspec.client.client import new_client

    readings = Watch(url)
    ended = asyncio.Event()
    if options.listen:
        report.announce(f"trtspec: metrics on {start_exporter(options.listen, readings)}")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with new_client(url) as client:
        while not ended.is_set():
            try:
                await readings.read(client)
            except TrtspecError as error:
                # a server that restarts answers later; one without metrics never will
                if error.code == NO_METRICS:
                    raise
            line = readings.line()
            if options.json_:
                values = {"ok": not readings.failure, **readings.summary(), "problems": []}
                line = json.dumps(values, ensure_ascii=False)
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), options.interval)
