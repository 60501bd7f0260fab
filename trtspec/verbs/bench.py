"""Measures running endpoints, and compares the results with earlier measurements.

Contains the options of bench, and turns them into endpoints, a workload and results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trtspec import report
from trtspec.errors import (
    CheckFailed,
    Interrupted,
    TrtspecError,
    UsageError,
    errors_in,
    has_errors,
    listed,
    termination_as_interrupt,
)
from trtspec.records import Excludes, ForceOption, JsonOption, Needs, argument, fill, option
from trtspec.verbs.options import (
    ExtraBody,
    IntList,
    JsonObject,
    NamedUrl,
    RateList,
    ThinkingOption,
    WaitReadyOption,
)

if TYPE_CHECKING:
    from trtspec.bench.load.measure import BenchWorkload, RequestLimits
    from trtspec.bench.results import BenchResults
    from trtspec.client.servers import DetectedServer

ROUNDS = 5  # default for several servers, because their intervals need several rounds


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `trtspec bench`."""

    url: Annotated[NamedUrl, argument("OpenAI-compatible endpoint, as URL or NAME=URL.")]
    output: Annotated[
        Path | None,
        option(
            "Directory for results, answers and the HTML report.", "--output", "--output-dir", "-o"
        ),
    ] = None
    dataset: Annotated[
        str,
        option(
            "Questions: a data set by name (mt-bench, speed-bench, gsm8k, ...), NAME=FILE for a "
            "local copy of one, a file or directory of questions or of recorded request bodies, "
            "a hub id, or nano for the built-in set.",
        ),
    ] = "nano"
    samples: Annotated[int, option("Questions to ask at each load; 0 asks all of them.", min=0)] = 0
    concurrency: Annotated[
        IntList,
        option("Numbers of parallel conversations; each is measured separately."),
        Excludes("rate"),
    ] = IntList((1, 4, 16))
    rate: Annotated[
        RateList | None,
        option(
            "New conversations per second instead of --concurrency, at random (Poisson) times: "
            "0.5,1,2."
        ),
    ] = None
    recorded_times: Annotated[
        bool,
        option("Send recorded requests at the `timestamp` of their rows, in milliseconds."),
        Excludes("rate", "rounds"),
    ] = False
    max_tokens: Annotated[int, option("Maximum tokens per answer.", min=1)] = 256
    temperature: Annotated[
        float, option("Sampling temperature; 0 is greedy.", min=0.0, group="Requests")
    ] = 0.0
    thinking: ThinkingOption = None
    system: Annotated[
        str | None, option("System prompt before every question.", metavar="TEXT", group="Requests")
    ] = None
    seed: Annotated[int, option("Base random seed: answer i uses seed + i.", group="Requests")] = 0
    against_url: Annotated[
        tuple[NamedUrl, ...],
        option(
            "NAME=URL of a further endpoint, measured in alternating rounds; repeatable.",
            group="Comparison",
        ),
    ] = ()
    rounds: Annotated[
        int | None,
        option(
            "Rounds that the questions are divided into.",
            default=f"1; {ROUNDS} of several servers",
            min=1,
            group="Comparison",
        ),
    ] = None
    warmup: Annotated[
        int | None,
        option(
            "Short requests before the measurement.",
            default="highest concurrency",
            min=0,
            group="Requests",
        ),
    ] = None
    compare: Annotated[
        tuple[Path, ...],
        option(
            "Results of an earlier run to compare this one with; exit status 3 on a regression. "
            "Repeatable: with four runs or more of one setup, speed is judged too.",
            group="Comparison",
        ),
    ] = ()
    max_regression: Annotated[
        float | None,
        option(
            "Largest fall that --compare accepts, such as 0.05; what cannot be compared is then an "
            "error.",
            default="0",
            min=0,
            max=0.99,
            group="Comparison",
        ),
        Needs("compare"),
    ] = None
    choose_draft: Annotated[
        bool,
        option(
            "Propose one of the measured draft lengths: the number that is the NAME of each "
            "server.",
            group="Comparison",
        ),
        Excludes("rate"),
    ] = False
    card: Annotated[
        str | None,
        option(
            "Published head of the server, to show its published acceptance beside.", metavar="HEAD"
        ),
    ] = None
    model: Annotated[
        str | None,
        option("Model name.", default="the first one the server lists", group="Requests"),
    ] = None
    extra_body: ExtraBody = JsonObject("{}", {})
    timeout: Annotated[
        float,
        option(
            "Seconds allowed for one answer; a slower one has failed.", min=0.1, group="Requests"
        ),
    ] = 600.0
    wait_ready: WaitReadyOption = 0.0
    resume: Annotated[
        bool,
        option("Continue an interrupted run in --output; failed answers are asked again."),
        Needs("output"),
    ] = False
    force: Annotated[ForceOption, Needs("output")] = False
    json_: JsonOption = False


def run_bench(options: BenchOptions) -> tuple[BenchResults, TrtspecError | None]:
    """Measures the endpoints. Returns the results and the failure (None if the results are valid).

    Writes results.json and report.html if `output` is given.
    """
    from trtspec.bench import choose_draft
    from trtspec.bench.compare import compare, refuse_different
    from trtspec.bench.report.bench import bench_html
    from trtspec.bench.results import read_results
    from trtspec.checkpoint.published import require_published

    if options.card is not None:
        require_published(options.card, options.dataset)
    _refuse_overwrite(options)
    earlier = {f"`compare` {path}": read_results(path) for path in options.compare}
    urls, draft_lens = endpoints(options)
    if options.choose_draft:
        for name, url in urls.items():
            if name not in draft_lens:
                remedy = f"write K={url}, K being the drafts of a step; 0 is without a head"
                raise UsageError(f"`choose_draft` needs the draft length of {url}", remedy)
    work = workload(options, urls)
    refuse_different(work.describe(), earlier)
    earlier_servers = {source: record.server for source, record in earlier.items()}
    results = run(urls, work, options, earlier_servers)
    if earlier:
        comparison = compare(results, list(earlier.values()), options.max_regression)
        problems = [*results.problems, *comparison.problems]
        results = replace(results, comparison=comparison, problems=problems)
    failure: TrtspecError | None = None
    if options.choose_draft:
        try:
            served = choose_draft.by_draft_len(results.all, draft_lens)
            results = replace(results, draft_choice=choose_draft.choose(served))
        except UsageError as error:
            failure = error  # raised later, after the results are written and shown
    if failure is None and has_errors(results.problems):
        wrong = listed(problem.code for problem in errors_in(results.problems))
        failure = CheckFailed(
            f"the measurement is not valid: {wrong}, see above", "fix them and run bench again"
        )
    if options.output is not None:
        report.write_json(options.output / "results.json", results.to_dict())
        report.write_atomic(options.output / "report.html", bench_html(results))
        report.say(f"wrote {options.output / 'results.json'} and report.html")
    return results, failure


def _refuse_overwrite(options: BenchOptions) -> None:
    """Raises UsageError if the output exists, unless `resume` continues it or `force` is given."""
    from trtspec.bench.load.journal import ANSWERS

    has_answers = options.output is not None and (options.output / ANSWERS).is_file()
    if options.output is not None and not (options.resume and has_answers):
        remedy = "pass `force`, or choose another `output`"
        if has_answers:
            remedy += "; `resume` continues an interrupted run"
        report.refuse_overwrite(options.output, options.force, remedy)


def workload(options: BenchOptions, urls: Collection[str]) -> BenchWorkload:
    """Returns the workload that the options describe.

    urls: names of the endpoints.
    Raises UsageError for an invalid option.
    """
    from trtspec.bench.load.measure import BenchWorkload
    from trtspec.bench.questions.datasets import load_dataset
    from trtspec.client.client import RequestSampling

    dataset = load_dataset(options.dataset, options.samples or None)
    if dataset.licence:
        report.say(f"{dataset.name}: licence {dataset.licence} ({dataset.source})")
    rounds = options.rounds or (1 if len(urls) == 1 else ROUNDS)
    rates = options.rate.values if options.rate is not None else ()
    if options.recorded_times:
        rates = (dataset.recorded_rate(),)
        rounds = 1
    return fill(
        BenchWorkload,
        options,
        dataset=dataset,
        sampling=fill(RequestSampling, options),
        concurrency=options.concurrency.values,
        rounds=rounds,
        extra_body=options.extra_body.value,
        rates=rates,
        limit_s=options.timeout,
    )


def run(
    urls: dict[str, str],
    work: BenchWorkload,
    options: BenchOptions,
    servers: Mapping[str, DetectedServer],
) -> BenchResults:
    """Runs the measurement and returns its results, with versions and the current time.

    Writes every answer to answers.jsonl in the output directory, if any.

    urls: base URL of each endpoint, by name.
    servers: servers of the earlier results that are compared, by their source.
    """
    import asyncio

    from trtspec.bench.load import assemble, measure
    from trtspec.bench.load.journal import ANSWERS, RunJournal
    from trtspec.client.addresses import key_header
    from trtspec.client.client import wait_ready
    from trtspec.report import progress_bar

    key_header()  # a key that cannot be sent is refused before anything is written
    if options.wait_ready:
        for url in urls.values():
            asyncio.run(wait_ready(url, options.wait_ready))
    path = options.output / ANSWERS if options.output else None
    header = {"workload": asdict(work.describe())}
    with (
        progress_bar("asking", unit="answers") as bar,
        RunJournal(path, header, restart=not options.resume) as journal,
    ):
        asking = measure.measure(
            urls,
            work,
            options.model,
            journal=journal,
            bar=bar,
            limits=request_limits_of,
            earlier=servers,
        )
        try:
            with termination_as_interrupt():
                measurement = asyncio.run(asking)
        except (KeyboardInterrupt, asyncio.CancelledError):
            kept = "nothing is kept without `output`"
            remedy = "give `output`, which `resume` continues"
            if path:
                kept = f"what was answered is in {path}"
                remedy = "give the same command with `resume`"
            raise Interrupted(f"stopped; {kept}", remedy) from None
        results = assemble.assemble(measurement)
    return replace(results, card=options.card, created=report.now(), versions=report.versions())


def endpoints(options: BenchOptions) -> tuple[dict[str, str], dict[str, int]]:
    """Returns the base URL of each endpoint by name, and the draft lengths by name.

    An endpoint has a draft length if the user named it by a number. The first endpoint is the
    measured one. The others are compared with it.
    """
    from trtspec.client.addresses import server_url, shown

    urls: dict[str, str] = {}
    draft_lens: dict[str, int] = {}
    for named in (options.url, *options.against_url):
        name = named.name or "endpoint"
        if named.name.isdigit():
            # the first endpoint keeps its usual name, so that results compare with other runs
            name = f"draft-{named.name}" if urls else "endpoint"
            draft_lens[name] = int(named.name)
        if urls and not named.name:
            remedy = "write NAME=URL, for example plain=http://127.0.0.1:8001"
            raise UsageError(f"`against_url` {shown(named.url)} has no name", remedy)
        if name in urls:
            message = f"`against_url` {named.name}: another endpoint has this name"
            raise UsageError(message, "give each endpoint its own name")
        urls[name] = server_url(named.url, f"`against_url` {named.name}:" if urls else "the URL")
    return urls, draft_lens


def request_limits_of(server: DetectedServer) -> RequestLimits:
    """Returns the request parameters that a server's release mishandles with speculation.

    The keys are the effects, such as `end_engine`. {} if the release is unknown.
    """
    from trtspec.trtllm.rules.speculation import request_limits
    from trtspec.trtllm.schema import schema_for

    if not server.adapter.dated or server.version is None:
        return {}
    try:
        return request_limits(schema_for(server.version))
    except UsageError:  # the server reports a text that is not a release, such as a branch
        return {}
