"""`trtspec bench`: acceptance, throughput and latency of running endpoints, with a report."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec import report
from trtspec.cli.options import ForceOption, JsonOption
from trtspec.cli.values import json_object, numbers, request_limits_of
from trtspec.errors import CheckFailed, UsageError, has_errors
from trtspec.records import refuse_unused

if TYPE_CHECKING:
    from trtspec.bench.measure import BenchWorkload
    from trtspec.bench.results import BenchResults


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    url: Annotated[str, typer.Argument(help="OpenAI-compatible endpoint, as URL or NAME=URL.", show_default=False)]
    output: Annotated[
        Path | None,
        typer.Option("--output", "--output-dir", "-o", help="Directory for results, answers and the HTML report."),
    ] = None
    dataset: Annotated[
        str, typer.Option(help="Questions: a .jsonl of turns, messages or prompts, or nano for the built-in set.")
    ] = "nano"
    samples: Annotated[
        str, typer.Option(help="Questions to ask: one number, or one per concurrency; 0 asks all of them.")
    ] = "0"
    concurrency: Annotated[
        str, typer.Option(help="Numbers of parallel conversations; each is measured separately.")
    ] = "1,4,16"
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 256
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option(help="Base random seed: answer i uses seed + i.")] = 0
    against_url: Annotated[
        tuple[str, ...],
        typer.Option(help="NAME=URL of a further endpoint, measured in alternating rounds; repeatable."),
    ] = ()
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds that the questions are divided into.", show_default="1; 3 with --against-url"),
    ] = None
    compare: Annotated[Path | None, typer.Option(help="Results of an earlier run to compare this one with.")] = None
    api: Annotated[
        Literal["chat", "completions"], typer.Option(help="completions sends raw prompts, without a chat template.")
    ] = "chat"
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the first one the server lists")] = None
    extra_body: Annotated[str, typer.Option(help="JSON object merged into every request.")] = "{}"
    force: ForceOption = False
    json_: JsonOption = False


def bench(options: BenchOptions) -> None:
    """Measure acceptance by category, and throughput and latency by concurrency, of any OpenAI-compatible endpoint.

    Acceptance is available from trtspec's reference backend, trtllm-serve, vLLM and SGLang. Values that a server does
    not report are null.
    """
    from trtspec.bench.compare import compare
    from trtspec.bench.results import read_results

    if options.output is None:
        refuse_unused(options, ["force"], "without --output")
    else:
        report.refuse_overwrite(options.output, options.force)
    old = read_results(options.compare) if options.compare else None
    results, answers = run(endpoints(options.url, options.against_url), workload(options), options.model)
    if old is not None:
        comparison = compare(results, old)
        results = replace(results, comparison=comparison, problems=[*results.problems, *comparison.problems])
    if options.output is not None:
        write(options.output, results, answers)
    show(results, options.json_)
    if has_errors(results.problems):
        raise CheckFailed("the measurement is not valid: see the problems above", "fix them and run bench again")


def workload(options: BenchOptions) -> BenchWorkload:
    """What the options ask for; UsageError names the first option that cannot be."""
    from trtspec.bench.client import RequestSampling
    from trtspec.bench.datasets import load_dataset
    from trtspec.bench.measure import BenchWorkload

    levels = numbers(options.concurrency, "--concurrency")
    return BenchWorkload(
        dataset=load_dataset(options.dataset),
        sampling=RequestSampling(options.max_tokens, options.temperature, options.seed),
        concurrency=tuple(levels),
        samples=samples_per_level(options.samples, len(levels)),
        rounds=options.rounds or (3 if options.against_url else 1),
        api=options.api,
        extra_body=json_object(options.extra_body, "--extra-body"),
    )


def run(urls: dict[str, str], work: BenchWorkload, model: str | None) -> tuple[BenchResults, list[dict[str, Any]]]:
    """Runs the measurement and stamps it with versions and time."""
    import asyncio

    from trtspec.bench import measure
    from trtspec.progress import progress_bar

    with progress_bar("asking", len(urls) * work.turns(), "answers") as bar:
        results, answers = asyncio.run(
            measure.measure(urls, work, model, bar.say, lambda answer: bar.advance(1), request_limits_of)
        )
    stamp = report.provenance("bench", {"endpoints": urls}, work.describe())
    return replace(results, created=stamp["created"], versions=stamp["versions"]), answers


def write(directory: Path, results: BenchResults, answers: list[dict[str, Any]]) -> None:
    """results.json, answers.jsonl (with the texts) and report.html."""
    from trtspec.bench.report import bench_html

    report.write_json(directory / "results.json", results.to_dict())
    report.write_atomic(directory / "answers.jsonl", "".join(json.dumps(a, ensure_ascii=False) + "\n" for a in answers))
    report.write_atomic(directory / "report.html", bench_html(results))
    report.say(f"wrote {directory / 'results.json'}, answers.jsonl and report.html")


def show(results: BenchResults, json_output: bool) -> None:
    """The results on stdout: one JSON object, or tables."""
    if json_output:
        report.print_json({key: value for key, value in results.to_dict().items() if key != "turns_detail"})
        return
    from trtspec.bench import tables

    found = [tables.acceptance_by_category(results, results), tables.throughput_table(results)]
    found += [table for name in results.endpoints if (table := tables.ratio_table(results, name))]
    if results.comparison:
        found.append(tables.comparison_table(results.comparison))
    report.print_tables(found, [tables.quality_line(results), *report.problem_lines(results.problems)])


def endpoints(url: str, others: Sequence[str]) -> dict[str, str]:
    """NAME -> base URL; the first is the one the results are about."""
    from trtspec.bench.client import base_url

    found: dict[str, str] = {}
    for position, text in enumerate([url, *others]):
        match = re.match(r"^([A-Za-z][\w.-]*)=(.+)$", text)
        if position and not match:
            raise UsageError(
                f"--against-url {text} has no name", "write NAME=URL, for example plain=http://127.0.0.1:8001"
            )
        name, address = (match[1], match[2]) if match else ("endpoint", text)
        if name in found:
            raise UsageError(f"the name {name} is given twice", "give each endpoint its own name")
        found[name] = base_url(address)
    return found


def samples_per_level(text: str, levels: int) -> tuple[int | None, ...]:
    """`0` = all questions everywhere; one number for all concurrencies, or one for each."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--samples {text} is not a number or a list of numbers", "write --samples 80") from None
    if len(found) not in (1, levels) or min(found) < 0:
        raise UsageError(f"--samples {text} does not fit {levels} concurrencies", "give one number, or one for each")
    return tuple((value or None) for value in (found * levels if len(found) == 1 else found))
