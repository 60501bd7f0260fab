"""`trtspec watch`: acceptance, loops and latency of a live endpoint over time, with alerts of a stated error rate."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtspec import report
from trtspec.cli.options import JsonOption, RestartOption
from trtspec.errors import CheckFailed, Problem, TrtspecError, UsageError
from trtspec.records import Mode, narrow, refuse_empty, refuse_unused, without

if TYPE_CHECKING:
    from trtspec.bench.watch import Watch
    from trtspec.bench.watch_baseline import WatchBaseline
    from trtspec.bench.watch_run import ProbePlan, WatchSource
    from trtspec.bench.watch_state import WatchSettings


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    url: Annotated[str, typer.Argument(help="Endpoint to watch.", show_default=False)]
    baseline: Annotated[
        Path | None,
        typer.Option(help="results.json of `trtspec bench`, or its directory: what the endpoint should accept."),
    ] = None
    metrics_url: Annotated[
        str | None, typer.Option(help="Where the metrics are, if not at URL: host and port.", show_default="URL")
    ] = None
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two readings of the metrics.")] = 15.0
    batch: Annotated[float, typer.Option(min=0.05, help="Minimum duration of a batch, in seconds.")] = 600.0
    min_steps: Annotated[int, typer.Option(min=50, help="Minimum number of verification steps in a batch.")] = 500
    learn: Annotated[float, typer.Option(min=0.0, help="Days of traffic from which the normal range is learned.")] = 1.0
    fall: Annotated[
        float, typer.Option(min=0.02, max=0.95, help="Relative fall of accepted drafts per step to detect.")
    ] = 0.15
    slower: Annotated[float, typer.Option(min=0.05, help="Relative rise of seconds per token to detect.")] = 0.5
    false_alarms: Annotated[
        float, typer.Option(min=1e-6, max=10.0, help="Maximum number of false alarms per series and day.")
    ] = 0.01
    probe: Annotated[
        float, typer.Option(min=0.0, help="Tokens per minute for prompts of its own, which also reveal loops; 0: none.")
    ] = 0.0
    dataset: Annotated[str, typer.Option(help="Prompts of --probe, as for bench.")] = "nano"
    model: Annotated[
        str | None, typer.Option(help="Model name for --probe.", show_default="the first one the server lists")
    ] = None
    thinking: Annotated[
        str | None,
        typer.Option(
            metavar="on|off|MODE",
            help="Thinking of --probe, as for bench.",
            show_default="the baseline's, else the server's",
        ),
    ] = None
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds allowed for one probe; with --once, for all its probes together.")
    ] = 120.0
    state: Annotated[
        Path | None,
        typer.Option(
            help="File that keeps what was learned, for later runs.",
            show_default="below ~/.local/state/trtspec",
        ),
    ] = None
    restart: RestartOption = False
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT for metrics of the watch itself; localhost without HOST.")
    ] = None
    once: Annotated[bool, typer.Option("--once", help="Read once and exit, with status 3 on an alert; for cron.")] = (
        False
    )
    json_: JsonOption = False


ONCE = Mode("--once", without(WatchOptions, "interval", "listen"), "--once")
ON = Mode("a continuous watch", WatchOptions, "leaving --once out")
MODES = (ONCE, ON)
PROBE_TOKENS = 64  # of one answer, where no baseline says how long its answers were


def watch(options: WatchOptions) -> None:
    """Watch acceptance, loops and latency of a live endpoint, and alert when they leave their normal range.

    Reads Prometheus metrics or TensorRT-LLM's iteration statistics; with --probe also asks prompts of its own. With
    --json prints one object per reading.
    """
    import time

    from trtspec.bench.watch_file import default_state, locked, open_watch
    from trtspec.bench.watch_state import WatchState

    refuse_empty(options)
    narrow(options, ONCE if options.once else ON, MODES, selecting=("once",))
    if not options.probe:
        refuse_unused(options, ["dataset", "model", "thinking", "timeout"], "without --probe")
    baseline, work = _baseline(options.baseline)
    source, settings = _source(options, baseline, work), _settings(options, work)
    path = options.state or default_state(source.url, source.metrics_url)
    elsewhere = source.metrics_url if source.metrics_url != source.url else ""
    fresh = WatchState(source.url, time.time(), settings, baseline.name if baseline else "", metrics_url=elsewhere)
    with locked(path):
        found = open_watch(path, fresh, baseline, options.restart)
        if baseline is not None and found.state.series["baseline"].test is None:
            raise UsageError(
                f"{options.baseline} holds too few answers to judge by", "trtspec bench URL --samples 80 -o DIR"
            )
        if options.once:
            _once(found, source, path, options.json_)
        else:
            _look_on(found, source, path, options)


def _once(found: Watch, source: WatchSource, path: Path, json_output: bool) -> None:
    """Raises CheckFailed where there are alerts; a state that could not be written fails a run without alerts."""
    alerts, unwritten = _look_once(found, source, path)
    if found.never_read and not alerts:
        raise TrtspecError(f"nothing could be read: {found.state.last_failure}", "start the server, or correct the URL")
    _show(found, alerts, json_output)
    if alerts:
        if unwritten is not None:
            report.announce(f"trtspec: {unwritten.message}")
        codes = ", ".join(sorted({alert.code for alert in alerts}))
        raise CheckFailed(f"{found.state.url}: {codes}", "see the alerts above")
    if unwritten is not None:
        raise unwritten


def _settings(options: WatchOptions, work: dict[str, Any]) -> WatchSettings:
    from trtspec.bench.watch_state import WatchSettings

    return WatchSettings(
        options.batch, options.min_steps, options.learn, options.fall, options.slower, options.false_alarms,
        (options.thinking or work.get("thinking")) if options.probe else None,
    )  # fmt: skip


def _source(options: WatchOptions, baseline: WatchBaseline | None, work: dict[str, Any]) -> WatchSource:
    from trtspec.bench.client import base_url
    from trtspec.bench.watch_run import WatchSource

    url = base_url(options.url)
    metrics_url = base_url(options.metrics_url, "--metrics-url") if options.metrics_url else url
    probe = _probes(options, baseline, work) if options.probe else None
    return WatchSource(url, metrics_url, probe)


def _probes(options: WatchOptions, baseline: WatchBaseline | None, work: dict[str, Any]) -> ProbePlan:
    """Requests as the baseline's were. Raises UsageError for a baseline that probes cannot be compared with."""
    from trtspec.bench.client import RequestSampling
    from trtspec.bench.datasets import left_out, load_dataset
    from trtspec.bench.measure import thinking_body
    from trtspec.bench.watch_run import ProbePlan

    questions = load_dataset(options.dataset).questions
    if missing := left_out(questions, tools=work.get("api", "chat") == "chat"):
        report.announce(f"--probe: {missing}")
    wanted = thinking_body(options.thinking)
    body = {**thinking_body(work.get("thinking")), **(work.get("extra_body") or {})}
    if baseline is not None:
        for name in ("isl", "osl", "under"):
            if work.get(name):
                what = f"{options.baseline} was measured with --{name}, which --probe does not repeat"
                raise UsageError(what, f"measure a baseline without --{name}, or leave --probe out")
        if any(_within(value, body.get(key)) != value for key, value in wanted.items()):
            mode = work.get("thinking") or "the server's default"
            what = f"--thinking {options.thinking} contradicts {options.baseline}, whose thinking was {mode}"
            raise UsageError(what, "leave --thinking out, or measure a baseline in this mode")
        if not {question.category for question in questions} & baseline.steps.mean.keys():
            what = f"no category of --dataset {options.dataset} is one of {options.baseline}"
            raise UsageError(what, f"pass the data set of the baseline: --dataset {work.get('dataset', 'NAME')}")
    sampling = RequestSampling(int(work.get("max_tokens", PROBE_TOKENS)), float(work.get("temperature", 0.0)))
    return ProbePlan(
        options.probe, questions, sampling, options.model, work.get("api", "chat"), {**wanted, **body}, options.timeout
    )


def _within(wanted: Any, found: Any) -> Any:
    """The part of an object that has the keys of another."""
    both = isinstance(wanted, dict) and isinstance(found, dict)
    return {key: found[key] for key in wanted if key in found} if both else found


def _baseline(path: Path | None) -> tuple[WatchBaseline | None, dict[str, Any]]:
    """What a results.json says about acceptance, and the workload it was measured under ({} without a file). Raises
    UsageError for a file that is no result, or tells too little about acceptance."""
    from trtspec.bench.results import read_results
    from trtspec.bench.watch_baseline import ENOUGH_STEPS, baseline_of

    if path is None:
        return None, {}
    read = read_results(path)
    file = path / "results.json" if path.is_dir() else path
    found = baseline_of(report.file_sha256(file)[:16], read.sound_categories, read.turns_detail)
    if found is None:
        raise UsageError(
            f"{path} has no category with {ENOUGH_STEPS} verification steps on output that is not degenerate",
            "measure more: trtspec bench URL --samples 80 --max-tokens 256 -o DIR, on a server that tells acceptance",
        )
    if nothing := found.nothing_accepted:
        raise UsageError(
            f"{path} has no accepted draft in {', '.join(nothing)}: no traffic can fall below that",
            "trtspec inspect HEAD --against TARGET, then measure again; or measure a data set without these categories",
        )
    return found, read.workload


def _look_once(found: Watch, source: WatchSource, path: Path) -> tuple[list[Problem], TrtspecError | None]:
    """The alerts, and why the state could not be written."""
    import asyncio
    import time

    from trtspec.bench.watch_file import write_state
    from trtspec.bench.watch_run import look_once

    asyncio.run(look_once(found, source))
    alerts = found.alerts(time.time())
    try:
        write_state(path, found.state)
    except TrtspecError as error:
        return alerts, error
    return alerts, None


@dataclass
class StateKeeper:
    """Writes the state after every look that ended a batch, and every minute. A failure is announced, once while its
    reason stays the same, and the watch continues."""

    path: Path
    batches: int = -1
    at: float = 0.0
    failure: str = ""

    def keep(self, found: Watch, always: bool = False) -> None:
        import time

        from trtspec.bench.watch_file import write_state

        now = time.monotonic()
        if not always and found.state.totals.batches == self.batches and now - self.at <= 60:
            return
        self.batches, self.at = found.state.totals.batches, now
        try:
            write_state(self.path, found.state)
            self.failure = ""
        except TrtspecError as error:
            if error.message != self.failure:
                report.announce(f"trtspec: {error.message}; the watch continues")
            self.failure = error.message


def _look_on(found: Watch, source: WatchSource, path: Path, options: WatchOptions) -> None:
    """Until SIGINT or SIGTERM; the state is also written at the end. Raises TrtspecError where that last time fails."""
    import asyncio
    import signal
    import time

    from trtspec.bench.watch_file import write_state
    from trtspec.bench.watch_run import WatchCollector, look_on, start_exporter

    collector, keeper = WatchCollector(), StateKeeper(path)
    collector.update(found, found.alerts(time.time()))  # those of an earlier run, until the first look
    address, end = start_exporter(options.listen, collector) if options.listen else ("", None)
    if address:
        report.announce(f"trtspec: metrics on {address}")

    def looked() -> None:
        alerts = found.alerts(time.time())
        collector.update(found, alerts)
        if options.json_:
            _print_line(found, alerts)
        for alert in alerts:
            if alert.code not in shown:
                report.announce("\n".join(report.problem_lines([alert])))
        shown.clear()
        shown.update(alert.code for alert in alerts)
        keeper.keep(found)

    async def run() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        await look_on(found, source, options.interval, looked, ended)

    shown: set[str] = set()
    try:
        asyncio.run(run())
    except BaseException:
        keeper.keep(found, always=True)
        raise
    finally:
        if end:
            end()
    write_state(path, found.state)


def _object(found: Watch, alerts: list[Problem]) -> dict[str, Any]:
    import time

    return {"ok": not alerts, **found.summary(time.time()), "problems": [alert.to_dict() for alert in alerts]}


def _print_line(found: Watch, alerts: list[Problem]) -> None:
    import json

    sys.stdout.write(json.dumps(_object(found, alerts), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _show(found: Watch, alerts: list[Problem], json_output: bool) -> None:
    told = _object(found, alerts)
    if json_output:
        report.print_json(told)
        return
    columns = ("series", "last", "normal", "statistic / threshold", "finds", "within", "state")
    rows = [_row(name, series) for name, series in told["series"].items()]
    note = f"false alarms: at most {found.settings.false_alarms:g} a day for each series"
    lines = [f"source: {told['source'] or 'nothing read yet'}; restarts {told['restarts']}, "
             f"missed scrapes {told['missed_scrapes']}"]  # fmt: skip
    if missed := told["missed_in_row"]:
        lines.append(f"this reading failed, {missed} in a row: {found.state.last_failure}")
    lines += [f"position {k}: {share:.3f} of steps" for k, share in told["positions"].items()]
    lines += [f"prompts {g} tokens: {c['accepted_per_step']:.3f} a step" for g, c in told["contexts"].items()]
    lines += [f"not measured: {what}" for what in told["not_measured"]]
    lines += report.problem_lines(alerts) or ["no alert"]
    report.print_tables([report.Table(f"watch {told['url']}", columns, rows, note)], lines)


def _row(name: str, series: dict[str, Any]) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    tested = series["threshold"] is not None
    within = f"{series['found_within_batches']} batches, {series['found_within_steps']} steps" if tested else "-"
    ratio = f"{series['statistic'] / series['threshold']:.2f}" if tested and series["batches"] else "-"
    state = "ALERT" if series["alarming"] else "normal" if tested else f"learning: {series['learned']}"
    if not series["batches"]:
        state = "not measured"
    elif missing := series["missing_batches"]:
        state += f", {missing} {'batch' if missing == 1 else 'batches'} ago"
    finds = f"{series['finds']:.0%}" if series["finds"] else "-"
    return [name, number(series["last"]), number(series["normal"]), ratio, finds, within, state]
