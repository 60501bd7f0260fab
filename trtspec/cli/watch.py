"""`trtspec watch`: acceptance of a live endpoint, as a Prometheus metric or as one verdict against a baseline."""

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
    """Read acceptance of a live endpoint from its server's counters, and export it as a Prometheus metric.

    The counters are Prometheus metrics or TensorRT-LLM's iteration statistics. --json prints one object per reading.
    --once compares accepted drafts per step since the server's start with --baseline, and ends with status 3 below it.
    """
    from trtspec.client.addresses import server_url

    url = server_url(options.url)
    return asyncio.run(_judge_once(url, options) if options.once else _watch_on(url, options))


async def _judge_once(url: str, options: WatchOptions) -> report.Result:
    """Fails unless the verdict is `pass`. Raises TrtspecError if nothing could be read."""
    from trtspec.bench.watch import Watch, judge, read_baseline
    from trtspec.client.client import new_client

    if options.baseline is None:
        remedy = "trtspec bench URL --samples 80 -o DIR, and later trtspec watch URL --once --baseline DIR"
        raise UsageError("--once judges against a baseline, and --baseline is missing", remedy)
    found, baseline = Watch(url), read_baseline(options.baseline)
    async with new_client(url) as client:
        await found.read(client)
    verdict = judge(found, baseline, options.max_drop, options.min_steps)
    code = "TS-WATCH-BASELINE" if verdict.status == "fail" else "TS-WATCH-UNMEASURED"
    problems = [Problem(code, "error", url, verdict.why)] if verdict.why else []
    expected = (
        f"baseline: acceptance length {1 + baseline.accepted_per_step:.2f} ({baseline.category})"
    )
    message = f"{url}: {'below the baseline' if verdict.status == 'fail' else 'NOT PROVEN'}: {verdict.why}"
    wrong = CheckFailed(message, problems[0].remedy) if problems else None
    values = {**found.summary(), **asdict(verdict), "baseline": asdict(baseline)}
    return report.Result(
        values, problems, lines=[found.line(), expected, verdict.status], failure=wrong
    )


async def _watch_on(url: str, options: WatchOptions) -> None:
    """Until SIGINT or SIGTERM."""
    from trtspec.bench.watch import NO_METRICS, Watch, start_exporter
    from trtspec.client.client import new_client

    found, ended = Watch(url), asyncio.Event()
    if options.listen:
        report.announce(f"trtspec: metrics on {start_exporter(options.listen, found)}")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with new_client(url) as client:
        while not ended.is_set():
            try:
                await found.read(client)
            except TrtspecError as error:
                if error.code == NO_METRICS:
                    raise
            shown = {"ok": not found.failure, **found.summary(), "problems": []}
            sys.stdout.write(
                (json.dumps(shown, ensure_ascii=False) if options.json_ else found.line()) + "\n"
            )
            sys.stdout.flush()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), options.interval)
