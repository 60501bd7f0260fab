"""`trtspec bench`: acceptance, throughput and latency of running endpoints, with a report."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec import report
from trtspec.cli.junit import failure_in, is_failure
from trtspec.cli.options import (
    CountList,
    IntList,
    JsonObject,
    NamedUrl,
    RateList,
    Share,
    ThinkingOption,
    request_limits_of,
)
from trtspec.errors import CheckFailed, Interrupted, UsageError, has_errors
from trtspec.records import Excludes, ForceOption, JsonOption, Needs

if TYPE_CHECKING:
    from trtspec.bench.load import ServiceLevel
    from trtspec.bench.measure import BenchWorkload
    from trtspec.bench.results import BenchResults


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    url: Annotated[NamedUrl, typer.Argument(help="OpenAI-compatible endpoint, as URL or NAME=URL.", show_default=False)]
    output: Annotated[
        Path | None,
        typer.Option("--output", "--output-dir", "-o", help="Directory for results, answers and the HTML report."),
    ] = None
    dataset: Annotated[
        str,
        typer.Option(
            help="Questions: a data set by name (mt-bench, speed-bench, gsm8k, ...), NAME=FILE for a local copy of "
            "one, a file or directory, a hub id, or nano for the built-in set."
        ),
    ] = "nano"
    split: Annotated[
        str | None, typer.Option(help="Split of a hub data set.", show_default="the data set's own, or train")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first N rows of the data set.")] = None
    turns: Annotated[int | None, typer.Option(min=1, help="Ask at most N turns of each question or trace.")] = None
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Replay recorded conversations: ask for every assistant message again."),
    ] = False
    samples: Annotated[
        CountList, typer.Option(help="Questions to ask: one number, or one per load; 0 asks all of them.")
    ] = CountList((0,))
    concurrency: Annotated[
        IntList,
        typer.Option(help="Numbers of parallel conversations; each is measured separately."),
        Excludes("rate", why="which does not limit how many are in flight"),
    ] = IntList((1, 4, 16))
    rate: Annotated[
        RateList | None,
        typer.Option(help="New conversations per second instead of --concurrency, at random (Poisson) times: 0.5,1,2."),
    ] = None
    max_tokens: Annotated[
        int,
        typer.Option(min=1, help="Maximum tokens per answer."),
        Excludes("osl", why="which is the length of every answer"),
    ] = 256
    isl: Annotated[int | None, typer.Option(min=1, help="Tokens of every prompt, made of the data set's text.")] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Target, as directory or hub id, whose tokenizer counts prompts for --isl and --under context=TOKENS.",
            show_default="the model that the server names",
        ),
        Needs("isl", "under=context=*"),
    ] = None
    osl: Annotated[
        int | None, typer.Option(min=1, help="Tokens of every answer, past the model's own end; for timings only.")
    ] = None
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0
    thinking: Annotated[ThinkingOption, Excludes("api=completions", why="which has no chat template")] = None
    under: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="CONDITION",
            help="Ask everything again under a condition: context=TOKENS, template=none, system=TEXT|FILE; repeatable.",
        ),
    ] = ()
    seed: Annotated[int, typer.Option(help="Base random seed: answer i uses seed + i.")] = 0
    against_url: Annotated[
        tuple[NamedUrl, ...],
        typer.Option(help="NAME=URL of a further endpoint, measured in alternating rounds; repeatable."),
    ] = ()
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rounds that the questions are divided into.",
            show_default="1; 3 of several servers, 5 with --choose-draft",
        ),
    ] = None
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Short requests before the measurement.", show_default="highest concurrency"),
    ] = None
    goodput: Annotated[
        str | None,
        typer.Option(help="Service level in ms, to count the answers that keep it: ttft:500,tpot:20,e2el:5000."),
    ] = None
    compare: Annotated[
        tuple[Path, ...],
        typer.Option(
            help="Results of an earlier run to compare this one with; exit status 3 on a regression. Repeatable: with "
            "four runs or more of the same setup, speed is judged too."
        ),
    ] = ()
    max_regression: Annotated[
        Share | None,
        typer.Option(
            help="Largest fall that --compare accepts, such as 5% or 0.05; what cannot be compared is then an error.",
            show_default="0",
        ),
        Needs("compare"),
    ] = None
    choose_draft: Annotated[
        bool,
        typer.Option("--choose-draft", help="Propose the draft length, or a schedule of them, for these loads."),
        Excludes("rate", why="at which the load is no setting"),
    ] = False
    at: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="K=URL|RESULTS",
            help="A server with K drafts, or its results, for --choose-draft; K=0 is one without a head. With the URL "
            "argument: the length of that server, where it does not tell. Repeatable.",
        ),
        Needs("choose_draft"),
    ] = ()
    trtllm_version: Annotated[
        str | None,
        typer.Option(help="TensorRT-LLM release that --choose-draft writes a schedule for.", show_default="one length"),
        Needs("choose_draft"),
    ] = None
    api: Annotated[
        Literal["chat", "completions"], typer.Option(help="completions sends raw prompts, without a chat template.")
    ] = "chat"
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the first one the server lists")] = None
    extra_body: Annotated[
        JsonObject, typer.Option(help="JSON object merged into every request, of keys that no option sets.")
    ] = JsonObject("{}", {})
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds allowed for one answer; a slower one has failed.")
    ] = 600.0
    wait_ready: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for the server to name its model.")] = 0.0
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted run in --output; failed answers are asked again."),
        Needs("output"),
    ] = False
    beside: Annotated[
        tuple[Path, ...],
        typer.Option(help="Results of runs on other data sets, to show in the same report; repeatable."),
        Needs("output", "markdown"),
    ] = ()
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None
    junit: Annotated[Path | None, typer.Option(help="Also write the findings to this JUnit XML file.")] = None
    force: Annotated[ForceOption, Needs("output")] = False
    json_: JsonOption = False


def bench(options: BenchOptions) -> None:
    """Measure acceptance by category, and throughput and latency by load, of any OpenAI-compatible endpoint.

    Acceptance is available from trtspec's reference backend, trtllm-serve, vLLM and SGLang. Values that a server does
    not report are null.
    """
    from trtspec.bench import choose_draft
    from trtspec.bench.compare import compare
    from trtspec.bench.results import read_whole

    _refuse_overwrite(options)
    earlier = [read_whole(path) for path in options.compare]
    others = [read_whole(path) for path in options.beside]
    named, stored = served_at(options.at)
    meaning = schedule_meaning(options.trtllm_version)
    urls, lengths = measured(endpoints(options.url, options.against_url), named)
    with failure_in(options.junit, "bench"):
        work = workload(options, urls)
        choose_draft.refuse_stored(stored, work.describe())
        results, answers = run(urls, work, options)
    if earlier:
        comparison = compare(results, earlier[0], options.max_regression, earlier[1:])
        results = replace(results, comparison=comparison, problems=[*results.problems, *comparison.problems])
    unchosen: UsageError | None = None
    if options.choose_draft:
        try:
            choice = chosen(results, lengths, stored, meaning, options.trtllm_version)
            results = replace(results, draft_choice=choice)
        except UsageError as error:
            unchosen = error  # what was measured is written and shown before
    write(options, results, answers, others)
    show(results, options.json_)
    if unchosen:
        raise unchosen
    if has_errors(results.problems):
        wrong = ", ".join(dict.fromkeys(p.code for p in results.problems if p.severity == "error"))
        raise CheckFailed(f"the measurement is not valid: {wrong}, see above", "fix them and run bench again")


def _refuse_overwrite(options: BenchOptions) -> None:
    """Refuses an output that stands and is not the one that this run continues."""
    from trtspec.bench.raw_results import RAW_FILE

    begun = options.output is not None and (options.output / RAW_FILE).is_file()
    resumed = options.resume and begun
    if options.output is not None and not resumed:
        try:
            report.refuse_overwrite(options.output, options.force)
        except UsageError as error:
            more = "; --resume continues an interrupted run" if begun else ""
            raise UsageError(error.message, error.remedy + more) from None
    for path in (options.markdown, options.junit):
        if path is not None and not is_failure(path):
            report.refuse_overwrite(path, options.force or resumed)


def workload(options: BenchOptions, urls: Collection[str]) -> BenchWorkload:
    """What the options ask of these servers; UsageError names the first option that cannot be."""
    from trtspec.bench import choose_draft, conditions
    from trtspec.bench.datasets import DatasetChoice, load_dataset
    from trtspec.bench.measure import BenchWorkload
    from trtspec.client.client import RequestSampling

    levels = options.concurrency.values
    rates = () if options.rate is None else options.rate.values
    choice = DatasetChoice(split=options.split, limit=options.limit, turns=options.turns, replay=options.replay)
    dataset = load_dataset(options.dataset, choice=choice)
    if dataset.licence:
        report.say(f"{dataset.name}: licence {dataset.licence} ({dataset.source})")
    return BenchWorkload(
        dataset=dataset,
        sampling=RequestSampling(options.osl or options.max_tokens, options.temperature, options.seed),
        concurrency=levels,
        samples=samples_per_level(options.samples, len(rates or levels)),
        rounds=options.rounds or (1 if len(urls) == 1 else choose_draft.ROUNDS if options.choose_draft else 3),
        api=options.api,
        extra_body=options.extra_body.value,
        rates=rates,
        thinking=options.thinking,
        warmup=options.warmup,
        limit_s=options.timeout,
        promise=None if options.goodput is None else promise_of(options.goodput),
        isl=options.isl,
        osl=options.osl,
        tokenizer=options.tokenizer,
        conditions=tuple(conditions.parse(options.under)),
    )


def run(urls: dict[str, str], work: BenchWorkload, options: BenchOptions) -> tuple[BenchResults, list[dict[str, Any]]]:
    """Runs the measurement, which keeps every answer in raw.jsonl, and stamps it with versions and time."""
    import asyncio

    from trtspec.bench import assembly, measure
    from trtspec.bench.raw_results import RAW_FILE, RawResults
    from trtspec.client.addresses import key_header
    from trtspec.client.client import wait_ready
    from trtspec.report import progress_bar

    key_header()  # a key that cannot be sent is refused before anything is written
    if options.wait_ready:
        for url in urls.values():
            asyncio.run(wait_ready(url, options.wait_ready))
    path = options.output / RAW_FILE if options.output else None
    header = {"workload": work.describe(), "endpoints": urls, "model": options.model}
    with (
        progress_bar("asking", len(urls) * work.turns(), "answers") as bar,
        RawResults(path, header, restart=not options.resume) as raw,
    ):
        progress = measure.Progress(bar.say, lambda answer: bar.advance(1), raw)
        try:
            with interrupted_by_sigterm():
                found = asyncio.run(measure.measure(urls, work, options.model, progress, request_limits_of))
        except (KeyboardInterrupt, asyncio.CancelledError):
            kept = f"what was answered is in {path}" if path else "nothing is kept without --output"
            again = "give the same command with --resume" if path else "give --output, which --resume continues"
            raise Interrupted(f"stopped; {kept}", again) from None
        results = assembly.assemble(*found)
        answers = assembly.answer_records(found[0])
    stamp = report.provenance("bench", {"endpoints": urls}, work.describe())
    return replace(results, created=stamp["created"], versions=stamp["versions"]), answers


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM, with which a scheduler ends a job, unwinds like Ctrl-C."""

    def interrupt(number: int, frame: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def served_at(entries: Sequence[str]) -> tuple[dict[str, tuple[int, str]], dict[int, BenchResults]]:
    """`--at`: endpoints to measure by name (with their draft length and URL), and stored results by draft length."""
    from trtspec.bench.results import read_whole
    from trtspec.client.addresses import shown

    named: dict[str, tuple[int, str]] = {}
    stored: dict[int, BenchResults] = {}
    for entry in entries:
        length, _, place = entry.partition("=")
        if not length.isdigit() or not place:
            raise UsageError(f"--at {shown(entry)} is not K=URL or K=RESULTS", "write --at 3=http://127.0.0.1:8003")
        if int(length) in {*stored, *(drafts for drafts, _ in named.values())}:
            raise UsageError(f"--at {shown(entry)}: {length} drafts are given twice", "name each length once")
        if Path(place).exists():
            stored[int(length)] = read_whole(Path(place))
        elif "://" not in place and not re.match(r"[^/]+:\d", place):
            raise UsageError(
                f"--at {shown(entry)}: there is no such file or directory",
                "pass what bench -o wrote, or the URL of a server, such as http://127.0.0.1:8003",
            )
        else:
            named[f"draft-{length}"] = (int(length), place)
    return named, stored


def measured(urls: dict[str, str], named: dict[str, tuple[int, str]]) -> tuple[dict[str, str], dict[str, int]]:
    """(endpoints to measure, draft lengths by name). `--at` of a URL that is measured anyway only says its length.

    Raises UsageError where two lengths are given for one URL."""
    from trtspec.client.addresses import server_url

    found = dict(urls)
    lengths: dict[str, int] = {}
    for name, (length, url) in named.items():
        address = server_url(url, f"--at {length}:")
        known = next((other for other, place in found.items() if place == address), None)
        if known in lengths:
            raise UsageError(f"--at {length}={url}: it is also given {lengths[known]} drafts", "name what it serves")
        if known is None and name in found:
            raise UsageError(f"the name {name} is given twice", "give each endpoint its own name")
        found.setdefault(known or name, address)
        lengths[known or name] = length
    return found, lengths


def schedule_meaning(version: str | None) -> dict[str, Any]:
    """What the keys of draft_len_schedule mean to a release; empty where it has none or nobody knows."""
    if version is None:
        return {}
    from trtspec.trtllm.schema import schema_for

    return dict(schema_for(version).agreed(lambda one: one.behaviour("draft_len_schedule")) or {})


def chosen(
    results: BenchResults,
    named: dict[str, int],
    stored: dict[int, BenchResults],
    meaning: dict[str, Any],
    version: str | None,
) -> dict[str, Any]:
    """The proposal of --choose-draft."""
    from trtspec.bench import choose_draft

    loads = choose_draft.choose(choose_draft.served_by(results.all, named, stored), apart=stored)
    return choose_draft.propose(loads, meaning, version, results.workload["osl"]).to_dict()


def write(
    options: BenchOptions, results: BenchResults, answers: list[dict[str, Any]], others: Sequence[BenchResults]
) -> None:
    """results.json, answers.jsonl (with the texts) and report.html, and what a CI job reads."""
    from trtspec.bench import ci_reports
    from trtspec.bench.report import bench_html

    directory = options.output
    if directory is not None:
        lines = "".join(json.dumps(a, ensure_ascii=False) + "\n" for a in answers)
        report.write_json(directory / "results.json", results.to_dict())
        report.write_atomic(directory / "answers.jsonl", lines)
        report.write_atomic(directory / "report.html", bench_html(results, others))
        if results.draft_choice:
            # for `xargs -a DIR/build-config.args trtspec build-config TARGET --head HEAD`
            words = "".join(shlex.quote(word) + "\n" for word in results.draft_choice["options"])
            report.write_atomic(directory / "build-config.args", words)
        report.say(f"wrote {directory / 'results.json'}, answers.jsonl and report.html")
    if options.markdown is not None:
        report.write_atomic(options.markdown, ci_reports.markdown(results, others))
    if options.junit is not None:
        report.write_atomic(options.junit, ci_reports.bench_xml(results))
    ci_reports.annotate(ci_reports.problem_annotations(results.problems))


def show(results: BenchResults, json_output: bool) -> None:
    """The results on stdout: one JSON object, or tables."""
    if json_output:
        detail = ("turns_detail", "questions_detail")
        report.print_json({key: value for key, value in results.to_dict().items() if key not in detail})
        return
    from trtspec.bench import tables

    report.print_tables(
        tables.all_tables(results), [tables.quality_line(results), *report.problem_lines(results.problems)]
    )


def promise_of(text: str) -> ServiceLevel:
    from trtspec.bench.load import ServiceLevel

    try:
        return ServiceLevel.parse(text)
    except ValueError as error:
        remedy = "write --goodput ttft:500,tpot:20,e2el:5000"
        raise UsageError(f"--goodput {text} is not a service level: {error}", remedy) from None


def endpoints(url: NamedUrl, others: Sequence[NamedUrl]) -> dict[str, str]:
    """NAME -> base URL; the first is the one the results are about."""
    from trtspec.client.addresses import server_url, shown

    found = {url.name or "endpoint": server_url(url.url, "the URL")}
    for other in others:
        if not other.name:
            remedy = "write NAME=URL, for example plain=http://127.0.0.1:8001"
            raise UsageError(f"--against-url {shown(other.url)} has no name", remedy)
        if other.name in found:
            raise UsageError(f"the name {other.name} is given twice", "give each endpoint its own name")
        found[other.name] = server_url(other.url, f"--against-url {other.name}:")
    return found


def samples_per_level(samples: CountList, levels: int) -> tuple[int | None, ...]:
    """`0` = all questions everywhere; one number for all concurrencies, or one for each."""
    found = samples.values
    if len(found) not in (1, levels):
        raise UsageError(f"--samples {samples} does not fit {levels} loads", "give one number, or one for each load")
    return tuple((value or None) for value in (found * levels if len(found) == 1 else found))
