"""`trtspec check`: the gate an endpoint passes before traffic: lossless, not degenerate, tool calls, acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trtspec import report
from trtspec.cli.options import ForceOption, JsonOption
from trtspec.errors import CheckFailed, UsageError

MARKS = {"pass": "pass   ", "fail": "FAIL   ", "skipped": "skipped"}


def check(
    url: Annotated[str, typer.Argument(help="The endpoint under test.", show_default=False)],
    record: Annotated[
        Path | None, typer.Option(help="Keep the greedy answers here, to compare another server with.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The same model without speculation: its URL, or a file of --record.")
    ] = None,
    min_acceptance: Annotated[float | None, typer.Option(help="Lowest acceptance length that passes.")] = None,
    dataset: Annotated[str, typer.Option(help="Prompts, as for bench; a recording brings its own.")] = "nano",
    samples: Annotated[int, typer.Option(min=1, help="Prompts asked.")] = 40,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer, in tokens; a recording brings its own.")
    ] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 4,
    near_tie: Annotated[
        float,
        typer.Option(min=0.0, help="Ceiling in nats on the measured rounding bound below which a divergence is a tie."),
    ] = 0.5,
    model: Annotated[str | None, typer.Option(help="Model name; default: the first of /v1/models.")] = None,
    force: ForceOption = False,
    json_output: JsonOption = False,
) -> None:
    """The gate: is speculation lossless, is the output sane, do tool calls live, is acceptance above the floor?

    Record the plain server first, then check the speculating one against the recording. Exit status 3 on a failure.
    """
    from trtspec.bench.check import run_checks

    if record is not None:
        report.refuse_overwrite(record, force)
    got, expected = collect(url, against, dataset, samples, max_tokens, concurrency, model)
    if record is not None:
        report.write_json(record, {**got.to_dict(), **_stamp(url)})
        report.say(f"recorded {len(got.transcripts)} answers in {record}")
    verdict = run_checks(got, expected, min_acceptance, near_tie)
    show(verdict, json_output)
    if not verdict["ok"]:
        failed = ", ".join(entry["name"] for entry in verdict["results"] if entry["status"] == "fail")
        raise CheckFailed(f"{url} failed: {failed}", "trtspec check ... --json shows every divergence")


def collect(
    url: str, against: str | None, dataset: str, samples: int, max_tokens: int, concurrency: int, model: str | None
) -> tuple[Any, Any]:
    """The recording of `url`, and the one it is compared with (read, or made now) or None."""
    import asyncio

    from trtspec.bench.client import base_url
    from trtspec.bench.datasets import Question, load_dataset
    from trtspec.bench.transcript import read_recording
    from trtspec.bench.transcript import record as ask_server

    expected = None
    if against is not None and "://" not in against:
        if not Path(against).is_file():
            raise UsageError(
                f"--against {against} is neither a file nor a URL", "pass a file of --record, or http://HOST:PORT"
            )
        expected = read_recording(Path(against))
        max_tokens = expected.max_tokens
        questions = [
            Question(t.question, t.category, (t.messages[-1]["content"],), tuple(t.messages[:-1]))
            for t in expected.transcripts
        ]
    else:
        questions = list(load_dataset(dataset, samples).questions)
    report.say(f"asking {url} {len(questions)} prompts at temperature 0")
    got = asyncio.run(ask_server(base_url(url), questions, max_tokens, concurrency, model))
    if against is not None and expected is None:
        report.say(f"asking {against} the same")
        expected = asyncio.run(ask_server(base_url(against), questions, max_tokens, concurrency))
    return got, expected


def show(verdict: dict[str, Any], json_output: bool) -> None:
    if json_output:
        report.print_json(verdict)
        return
    for entry in verdict["results"]:
        print(f"{MARKS[entry['status']]} {entry['name']}: {entry['message']}")
        if entry["status"] == "fail":
            print(f"        {entry['code']} -> {entry['remedy']}")


def _stamp(url: str) -> dict[str, Any]:
    stamp = report.provenance("check --record", {"endpoint": url}, {})
    return {"created": stamp["created"], "versions": stamp["versions"]}
