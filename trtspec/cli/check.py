"""`trtspec check`: the gate an endpoint passes before traffic: lossless, not degenerate, tool calls, acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtspec import report
from trtspec.cli.junit import failure_in, is_failure
from trtspec.cli.options import IntListOrNone, request_limits_of
from trtspec.client.addresses import shown
from trtspec.errors import CheckFailed, UsageError
from trtspec.records import Excludes, ForceOption, JsonOption, Mode, Modes, Needs, checked, refuse_empty

if TYPE_CHECKING:
    from trtspec.bench.battery import Battery
    from trtspec.bench.check import GateVerdict
    from trtspec.bench.transcript import Recording

MARKS = {"pass": "pass   ", "fail": "FAIL   ", "skipped": "skipped"}


ALONE = Mode("`check` without --against", "`check` without --against")
SERVER = Mode("--against URL", "--against URL")
RECORDING = Mode("--against FILE", "--against FILE")
OWN_PROMPTS = Modes(ALONE, SERVER)  # a recording brings its own


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    url: Annotated[str, typer.Argument(help="Endpoint to check.", show_default=False)]
    record: Annotated[
        Path | None, typer.Option(help="Save the greedy answers to this file, as a baseline for another server.")
    ] = None
    against: Annotated[
        str | None,
        typer.Option(help="Baseline, the same model without speculation: its URL, or a file written by --record."),
    ] = None
    min_acceptance: Annotated[float | None, typer.Option(help="Minimum acceptance length.")] = None
    require: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Row that fails, instead of being skipped, if it cannot be measured; repeatable. "
            "`all` requires every row."
        ),
    ] = ()
    dataset: Annotated[str, typer.Option(help="Prompts, as for bench; a recording brings its own."), OWN_PROMPTS] = (
        "nano"
    )
    samples: Annotated[
        int,
        typer.Option(min=1, help="Number of prompts, and of tool requests; a recording brings its own."),
        OWN_PROMPTS,
    ] = 60
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum tokens per answer; a recording brings its own."), OWN_PROMPTS
    ] = 128
    contexts: Annotated[
        IntListOrNone,
        typer.Option(help="Lengths, in tokens, of long prompts; 0 asks none. A recording brings its own."),
        OWN_PROMPTS,
    ] = IntListOrNone((512, 2048, 8192))
    context_samples: Annotated[
        int, typer.Option(min=1, help="Long prompts of each length."), OWN_PROMPTS, Excludes("contexts=0")
    ] = 4
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum number of requests in flight.")] = 4
    near_tie: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Upper limit, in nats, of the measured rounding bound below which a divergence counts as a tie.",
        ),
        Modes(SERVER, RECORDING),
    ] = 0.5
    logprobs: Annotated[
        bool,
        typer.Option("--logprobs", help="Request log-probabilities even from releases that may crash on them."),
    ] = False
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds allowed for one answer.")] = 120.0
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the first one the server lists")] = None
    junit: Annotated[Path | None, typer.Option(help="Also write the verdict as JUnit XML to this file.")] = None
    force: Annotated[ForceOption, Needs("record", "junit")] = False
    json_: JsonOption = False


def check(options: CheckOptions) -> None:
    """Check that users get what the model says: output matches the baseline, tool calls work, acceptance holds.

    Record the plain server first, then check the speculating one against the recording. What cannot be measured is
    skipped and named. Exits with status 3 when a check fails.
    """
    refuse_empty(options)
    _refuse_shared_files(options)
    for path in (options.record, options.junit):
        if path is not None and not (path == options.junit and is_failure(path)):
            report.refuse_overwrite(path, options.force)
    with failure_in(options.junit, "check"):
        verdict = _verdict(options)
    show(verdict, options)
    if verdict.failed:
        message = f"{options.url} failed: {', '.join(verdict.failed)}"
        raise CheckFailed(message, "trtspec check ... --json shows every divergence")


def _refuse_shared_files(options: CheckOptions) -> None:
    """A file that is written is no other file of the command: a server would be its own baseline the next time."""
    recorded = Path(options.against) if options.against and "://" not in options.against else None
    files = {"--against": recorded, "--record": options.record, "--junit": options.junit}
    places: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        if flag in ("--record", "--junit") and (other := places.get(path.resolve())):
            raise UsageError(f"{other} and {flag} name one file, {path}", f"give {flag} another file")
        places[path.resolve()] = flag


def _verdict(options: CheckOptions) -> GateVerdict:
    from trtspec.bench.baseline import failures, speculation
    from trtspec.bench.check import GateLimits, refuse_unknown_rows, run_checks

    mode = _mode(options)
    options = checked(options, mode)
    refuse_unknown_rows(options.require)
    got, expected = collect(options, mode)
    if options.record is not None:
        report.write_json(options.record, {**got.to_dict(), **_stamp(options.url)})
        report.say(f"recorded {len(got.transcripts)} answers in {options.record}")
        if drafts := speculation(got):
            report.announce(f"{options.record} is no baseline: this server speculates ({drafts})")
        elif expected is None and (failed := failures(got)):
            report.announce(f"{options.record} is no whole baseline, record it again: {failed}")
        elif expected is None:
            report.say(f"next: trtspec check URL --against {options.record}, for the server with speculation")
    limits = GateLimits(min_acceptance=options.min_acceptance, near_tie=options.near_tie, require=options.require)
    return run_checks(got, expected, limits)


def _mode(options: CheckOptions) -> Mode:
    if options.against is None:
        return ALONE
    if "://" in options.against:
        return SERVER
    if not Path(options.against).is_file():
        raise UsageError(
            f"--against {shown(options.against)} is neither a file nor a URL",
            "pass a file written by --record, or http://HOST:PORT",
        )
    return RECORDING


def collect(options: CheckOptions, mode: Mode) -> tuple[Recording, Recording | None]:
    """The recording of `url`, and the one it is compared with (read, or made now) or None."""
    import asyncio
    from dataclasses import replace

    from trtspec.bench.battery import battery_of
    from trtspec.bench.recorder import RecorderOptions
    from trtspec.bench.recorder import record as ask_server
    from trtspec.bench.transcript import read_recording
    from trtspec.client.addresses import server_url

    url = server_url(options.url)
    against = options.against or ""
    other = server_url(against, "--against") if mode is SERVER else ""
    expected = read_recording(Path(against)) if mode is RECORDING else None
    asked = battery_of(expected) if expected else _battery(options)
    # a server that is recorded as the baseline, or named as it, should run without speculation
    baseline = mode is ALONE and bool(options.record)
    settings = RecorderOptions(
        concurrency=options.concurrency,
        model=options.model,
        limits=request_limits_of,
        baseline=baseline,
        logprobs=options.logprobs,
        timeout=options.timeout,
    )
    report.say(f"asking {options.url} {len(asked.prompts)} prompts at temperature 0")
    got = asyncio.run(ask_server(url, asked, settings))
    if got.withheld:
        report.say(f"log-probabilities are not asked for: {got.withheld}")
    if mode is SERVER:
        report.say(f"asking {options.against} the same")
        plain = replace(settings, baseline=True, model=None)
        expected = asyncio.run(ask_server(other, asked, plain))
    return got, expected


def _battery(options: CheckOptions) -> Battery:
    from trtspec.bench.battery import make_battery
    from trtspec.bench.questions.datasets import left_out, load_dataset

    questions = load_dataset(options.dataset, options.samples).questions
    if missing := left_out(questions, tools=False):
        report.announce(f"{options.dataset}: {missing}; the tools that check offers are its own")
    return make_battery(questions, options.max_tokens, options.contexts.values, options.context_samples)


def show(verdict: GateVerdict, options: CheckOptions) -> None:
    """The verdict on stdout, as lines or as one JSON object, and wherever else it was asked for."""
    from trtspec.bench.report import ci

    if options.junit is not None:
        report.write_atomic(options.junit, ci.check_xml(verdict))
        report.say(f"wrote {options.junit}")
    if options.json_:
        report.print_json(verdict.to_dict())
    else:
        for line in lines(verdict):
            print(line)
    ci.annotate(ci.check_annotations(verdict))


def lines(verdict: GateVerdict) -> list[str]:
    """One line per row, remedies below, and at the end what a rare fault has to fear."""
    from trtspec.bench.gate import RARE, answers_needed

    found = []
    for row in verdict.results:
        found.append(f"{MARKS[row.status]} {row.name}: {row.message}")
        if row.status == "fail":
            found.append(f"        {row.code} -> {row.remedy}")
    powers = {row.name: row for row in verdict.results if row.seen is not None and row.power is not None}
    weak = [
        f"{name} {100 * (row.power or 0):.0f} % ({row.seen})" for name, row in powers.items() if (row.power or 0) < 0.95
    ]
    found.append(
        f"a fault in {100 * RARE:g} % of the answers shows with 95 % or more in {len(powers) - len(weak)} of "
        f"{len(powers)} rows (that needs {answers_needed()} answers)" + (f"; less in {', '.join(weak)}" if weak else "")
    )
    return found


def _stamp(url: str) -> dict[str, Any]:
    stamp = report.provenance("check --record", {"endpoint": url}, {})
    return {"created": stamp["created"], "versions": stamp["versions"]}
