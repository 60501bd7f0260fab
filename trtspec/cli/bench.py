"""`trtspec bench`: acceptance, throughput and latency of running endpoints, with a report."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtspec import report
from trtspec.cli.options import ForceOption, JsonOption
from trtspec.cli.values import json_object, numbers
from trtspec.errors import CheckFailed, MissingDependency, UsageError

if TYPE_CHECKING:
    from trtspec.bench.client import RequestSampling
    from trtspec.bench.measure import BenchWorkload


def bench(
    url: Annotated[str, typer.Argument(help="An OpenAI-like endpoint, as URL or NAME=URL.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "--output-dir", "-o", help="Directory for results.json and report.html.")
    ] = None,
    dataset: Annotated[
        str, typer.Option(help="A .jsonl of turns, messages or prompt; nano = the shipped ones.")
    ] = "nano",
    samples: Annotated[str, typer.Option(help="Questions asked: one number, or one per concurrency; 0 = all.")] = "0",
    concurrency: Annotated[str, typer.Option(help="Conversations in flight, one measurement each.")] = "1,4,16",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Answer i is sampled with seed + i.")] = 0,
    against_url: Annotated[
        list[str] | None, typer.Option(help="NAME=URL of an endpoint measured in alternating rounds; repeatable.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Parts the questions are split in; default 1, or 3 with --against-url.")
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="Results of an earlier run to set this one against.")] = None,
    api: Annotated[str, typer.Option(help="chat or completions (raw prompts, no chat template).")] = "chat",
    model: Annotated[str | None, typer.Option(help="Model name; default: the first of /v1/models.")] = None,
    extra_body: Annotated[str, typer.Option(help="JSON object merged into every request.")] = "{}",
    choose_draft: Annotated[
        bool, typer.Option("--choose-draft", help="Recommend a draft length (not built yet).")
    ] = False,
    force: ForceOption = False,
    json_output: JsonOption = False,
) -> None:
    """Measures acceptance by category, throughput and latency by concurrency, of any OpenAI-like endpoint.

    Acceptance needs a server that tells: trtspec's reference backend, trtllm-serve, vLLM, SGLang.
    """
    if choose_draft:
        raise MissingDependency(
            "`bench --choose-draft` is not built yet in this version",
            "run bench once per draft length and use --compare",
        )
    from trtspec.bench import compare as comparison
    from trtspec.bench.client import RequestSampling

    if output is not None:
        report.refuse_overwrite(output, force)
    old = comparison.read_results(compare) if compare else None
    rounds = rounds or (3 if against_url else 1)
    work = workload(
        dataset, samples, concurrency, rounds, RequestSampling(max_tokens, temperature, seed), api, extra_body
    )
    results, answers = run(endpoints(url, against_url or []), work, model)
    if old is not None:
        results["comparison"] = comparison.compare(results, old)
        results["problems"] += results["comparison"]["problems"]
    if output is not None:
        write(output, results, answers)
    show(results, json_output)
    if any(problem["severity"] == "error" for problem in results["problems"]):
        raise CheckFailed("the measurement is not sound: see the problems above", "fix them and run bench again")


def workload(
    dataset: str, samples: str, concurrency: str, rounds: int, sampling: RequestSampling, api: str, extra_body: str
) -> BenchWorkload:
    """What the options ask for; UsageError names the first option that cannot be."""
    from trtspec.bench.datasets import load_dataset
    from trtspec.bench.measure import BenchWorkload

    if api not in ("chat", "completions"):
        raise UsageError(f"--api {api} is neither chat nor completions", "pass --api chat")
    levels = numbers(concurrency, "--concurrency")
    return BenchWorkload(
        dataset=load_dataset(dataset),
        sampling=sampling,
        concurrency=tuple(levels),
        samples=samples_per_level(samples, len(levels)),
        rounds=rounds,
        api=api,
        extra_body=json_object(extra_body, "--extra-body"),
    )


def run(urls: dict[str, str], work: BenchWorkload, model: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs the measurement and stamps it with versions and time."""
    import asyncio

    from trtspec.bench import measure

    with progress(len(urls) * work.turns()) as (say, advance):
        results, answers = asyncio.run(measure.measure(urls, work, model, say, lambda answer: advance()))
    stamp = report.provenance("bench", {"endpoints": urls}, work.describe())
    return {**results, "created": stamp["created"], "versions": stamp["versions"]}, answers


@contextmanager
def progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """(say, advance): lines above a bar of `total` answers on a terminal; lines alone, or nothing, elsewhere."""
    if not sys.stderr.isatty() or os.environ.get("TRTSPEC_QUIET") == "1":
        yield report.say, lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("answers"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.console.print(text, markup=False, highlight=False), lambda: bar.advance(task)


def write(directory: Path, results: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    """results.json, answers.jsonl (with the texts) and report.html."""
    from trtspec.bench.report import bench_html

    report.write_json(directory / "results.json", results)
    report.write_atomic(directory / "answers.jsonl", "".join(json.dumps(a, ensure_ascii=False) + "\n" for a in answers))
    report.write_atomic(directory / "report.html", bench_html(results))
    report.say(f"wrote {directory / 'results.json'}, answers.jsonl and report.html")


def show(results: dict[str, Any], json_output: bool) -> None:
    """The results on stdout: one JSON object, or tables."""
    if json_output:
        report.print_json({key: value for key, value in results.items() if key != "turns_detail"})
        return
    from trtspec.bench import tables
    from trtspec.errors import Problem

    found = [tables.acceptance_by_category(results), tables.throughput_table(results)]
    found += [t for name in results["endpoints"] if (t := tables.ratio_table(results, name))]
    if results.get("comparison"):
        found.append(tables.comparison_table(results["comparison"]))
    problems = report.problem_lines([Problem(**problem) for problem in results["problems"]])
    tables.print_tables(found, [tables.quality_line(results), *problems])


def endpoints(url: str, others: list[str]) -> dict[str, str]:
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
