"""`trtspec check`: the gate an endpoint passes before traffic: lossless, not degenerate, tool calls, acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtspec import report
from trtspec.cli.options import ForceOption, JsonOption
from trtspec.cli.values import request_limits_of
from trtspec.errors import CheckFailed, UsageError
from trtspec.records import Mode, narrow, refuse_unused

if TYPE_CHECKING:
    from trtspec.bench.check import GateVerdict

MARKS = {"pass": "pass   ", "fail": "FAIL   ", "skipped": "skipped"}


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
    dataset: Annotated[str, typer.Option(help="Prompts, as for bench; a recording brings its own.")] = "nano"
    samples: Annotated[int, typer.Option(min=1, help="Number of prompts; a recording brings its own.")] = 40
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer; a recording brings its own.")] = 128
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum number of requests in flight.")] = 4
    near_tie: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Upper limit, in nats, of the measured rounding bound below which a divergence counts as a tie.",
        ),
    ] = 0.5
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the first one the server lists")] = None
    force: ForceOption = False
    json_: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class CheckAlone:
    url: str
    record: Path | None
    min_acceptance: float | None
    dataset: str
    samples: int
    max_tokens: int
    concurrency: int
    model: str | None
    force: bool
    json_: bool


@dataclass(frozen=True, kw_only=True)
class CheckAgainstServer(CheckAlone):
    against: str
    near_tie: float


@dataclass(frozen=True, kw_only=True)
class CheckAgainstRecording:
    """Prompts and lengths are the recording's."""

    url: str
    record: Path | None
    against: str
    min_acceptance: float | None
    concurrency: int
    near_tie: float
    model: str | None
    force: bool
    json_: bool


ALONE = Mode("`check` without --against", CheckAlone, "`check` without --against")
SERVER = Mode("--against URL", CheckAgainstServer, "--against URL")
RECORDING = Mode("--against FILE", CheckAgainstRecording, "--against FILE")
MODES = (ALONE, SERVER, RECORDING)


def check(options: CheckOptions) -> None:
    """Check that output matches the baseline, tool calls work, and acceptance meets the minimum.

    Record the plain server first, then check the speculating one against the recording. Exits with status 3 when a
    check fails.
    """
    from trtspec.bench.check import run_checks

    used = narrow(options, _mode(options), MODES)
    if options.record is None:
        refuse_unused(options, ["force"], "without --record")
    else:
        report.refuse_overwrite(options.record, options.force)
    got, expected = collect(used)
    if options.record is not None:
        report.write_json(options.record, {**got.to_dict(), **_stamp(options.url)})
        report.say(f"recorded {len(got.transcripts)} answers in {options.record}")
    verdict = run_checks(got, expected, options.min_acceptance, options.near_tie)
    show(verdict, options.json_)
    if verdict.failed:
        message = f"{options.url} failed: {', '.join(verdict.failed)}"
        raise CheckFailed(message, "trtspec check ... --json shows every divergence")


def _mode(options: CheckOptions) -> Mode:
    if options.against is None:
        return ALONE
    if "://" in options.against:
        return SERVER
    if not Path(options.against).is_file():
        raise UsageError(
            f"--against {options.against} is neither a file nor a URL",
            "pass a file written by --record, or http://HOST:PORT",
        )
    return RECORDING


def collect(options: CheckAlone | CheckAgainstServer | CheckAgainstRecording) -> tuple[Any, Any]:
    """The recording of `url`, and the one it is compared with (read, or made now) or None."""
    import asyncio

    from trtspec.bench.client import base_url
    from trtspec.bench.datasets import Question, load_dataset
    from trtspec.bench.transcript import read_recording
    from trtspec.bench.transcript import record as ask_server

    expected = None
    if isinstance(options, CheckAgainstRecording):
        expected = read_recording(Path(options.against))
        max_tokens = expected.max_tokens
        questions = [
            Question(t.question, t.category, (t.messages[-1]["content"],), tuple(t.messages[:-1]))
            for t in expected.transcripts
        ]
    else:
        questions, max_tokens = list(load_dataset(options.dataset, options.samples).questions), options.max_tokens
    report.say(f"asking {options.url} {len(questions)} prompts at temperature 0")
    url = base_url(options.url)
    asked = partial(ask_server, questions=questions, max_tokens=max_tokens, concurrency=options.concurrency)
    # a server that is recorded as the baseline, or named as it, should run without speculation
    baseline = isinstance(options, CheckAlone) and not isinstance(options, CheckAgainstServer) and bool(options.record)
    got = asyncio.run(asked(url, model=options.model, limits=request_limits_of, baseline=baseline))
    if got.withheld:
        report.say(f"log-probabilities are not asked for: {got.withheld}")
    if isinstance(options, CheckAgainstServer):
        report.say(f"asking {options.against} the same")
        expected = asyncio.run(asked(base_url(options.against), limits=request_limits_of, baseline=True))
    return got, expected


def show(verdict: GateVerdict, json_output: bool) -> None:
    if json_output:
        report.print_json(verdict.to_dict())
        return
    for found in verdict.results:
        print(f"{MARKS[found.status]} {found.name}: {found.message}")
        if found.status == "fail":
            print(f"        {found.code} -> {found.remedy}")


def _stamp(url: str) -> dict[str, Any]:
    stamp = report.provenance("check --record", {"endpoint": url}, {})
    return {"created": stamp["created"], "versions": stamp["versions"]}
