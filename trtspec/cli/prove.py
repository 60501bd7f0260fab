"""Defines `trtspec prove`, which proves a target and its head on the user's own GPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from trtspec.errors import (
    CheckFailed,
    Problem,
    UsageError,
    errors_in,
    termination_as_interrupt,
)
from trtspec.launch.serve_options import REFERENCE, ServeOptions
from trtspec.records import (
    DryRunOption,
    JsonOption,
    TargetArgument,
    argument,
    click_command,
    fill,
    option,
    ready,
)
from trtspec.report import Result, next_command, versions
from trtspec.specs import Gpu
from trtspec.verbs.options import IntList, RowName, ThinkingOption

if TYPE_CHECKING:
    from trtspec.bench.prove import ProveSetup

# options of serve that a proof sets by itself, or that start more than a server on this machine
OWN_OPTIONS = (
    "--head", "--draft-len", "--draft-sampling", "--backend", "--tp-size", "--host", "--port",
    "--config", "--dry-run", "--disaggregated", "--role", "--nodes", "--gpus-per-node",
    "--launcher", "--launcher-args",
)  # fmt: skip
MAX_TOKENS = 256  # default limit of an answer


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """Options of `trtspec prove`."""

    target: TargetArgument
    passed: Annotated[
        tuple[str, ...],
        argument("After `--`: options of `trtspec serve` for both launches.", "[-- OPTIONS]"),
    ] = ()
    head: Annotated[str, option("Eagle3 head: a directory or a hub id.", metavar="HEAD")]
    output: Annotated[Path, option("Directory of the proof; run again to resume.", "-o")] = Path(
        "proof"
    )
    backend: Annotated[
        Literal["trtllm", "vllm", "reference"],
        option("What serves; reference rehearses a proof on a CPU."),
    ] = "trtllm"
    gpu: Annotated[Gpu | None, option("GPU type, to plan first and compare.")] = None
    gpus: Annotated[int, option("GPUs of one server.", min=1)] = 4
    card: Annotated[
        bool,
        option(
            "Measure as the head's card did: its data set, thinking, tokens per answer and draft "
            "length, unless given; and show its figures beside.",
            group="Questions",
        ),
    ] = False
    draft_len: Annotated[int | None, option("Tokens drafted per step. Default: 3.", min=1)] = None
    dataset: Annotated[
        str | None, option("Questions, as for bench. Default: nano.", group="Questions")
    ] = None
    thinking: ThinkingOption = None
    samples: Annotated[int, option("Questions at each concurrency.", min=3, group="Questions")] = 80
    max_tokens: Annotated[
        int | None,
        option("Maximum tokens per answer. Default: 256.", min=16, group="Questions"),
    ] = None
    concurrency: Annotated[
        IntList, option("Numbers of parallel conversations.", group="Questions")
    ] = IntList((1, 4, 16))
    accept_unmeasured: Annotated[
        tuple[RowName, ...], option("Row of check that may stay unmeasured; repeatable.")
    ] = ()
    accept_slower: Annotated[
        bool, option("Status 0 also if speculation is slower at a concurrency.")
    ] = False
    port: Annotated[
        int,
        option(
            "First of two ports on 127.0.0.1: with the head, alone.",
            min=1,
            max=65534,
            group="Servers",
        ),
    ] = 8310
    launches: Annotated[
        int,
        option(
            "Launches of either server; with two or more, intervals cover what launches differ by.",
            min=1,
            group="Servers",
        ),
    ] = 1
    startup_timeout: Annotated[
        float, option("Seconds until a server must be ready.", min=1, group="Servers")
    ] = 7200.0
    dry_run: DryRunOption = False
    json_: JsonOption = False


def prove(options: ProveOptions) -> Result:
    """Prove on your own GPUs that a head makes its target faster and leaves its output the same.

    Launches the target with its head, and without it. Runs bench and check on both. Writes a page
    with a verdict. --dry-run prints the script. A killed run resumes.
    """
    _refuse_own_options(options.passed)
    from trtspec.bench import prove as proving
    from trtspec.bench.questions.datasets import load_dataset, locate
    from trtspec.client.addresses import key_header

    setup = _setup(options)
    locate(setup.dataset)  # raises UsageError for an unknown data set
    steps = proving.script(setup, options.output)
    engine = None
    if not options.dry_run:
        engine = _engine(options.backend)
    _check_launches(setup, launching=not options.dry_run)
    if options.dry_run:
        text = proving.shell_text(setup, options.output, steps)
        comment = "" if options.accept_slower else "# ends with status 3 if slower at a load\n"
        return Result({"script": text}, text=text + comment)
    dataset = load_dataset(setup.dataset, setup.samples)
    # a resumed proof must have the same values
    identity = {"engine": engine, "dataset_sha256": dataset.sha256}
    key_header()  # raises an error for an invalid API key, before hours of work
    with termination_as_interrupt():
        evidence = proving.prove(setup, steps, options.output, identity, options.startup_timeout)
    page = options.output / "report.html"
    lines = [evidence.sentence, f"page: {page}", f"evidence: {options.output / 'evidence.json'}"]
    failure = None
    if evidence.verdict != "SAFE":
        failure = CheckFailed(f"not proved: {evidence.verdict}", f"see {page}")
    elif not evidence.proved and not options.accept_slower:
        remedy = f"see {page}; pass `accept_slower` if that load does not matter"
        failure = CheckFailed("not proved: slower than the target alone", remedy)
    else:
        lines.append(next_command("build-config", options.target, "--head", options.head))
    return Result(asdict(evidence), lines=lines, failure=failure)


def _setup(options: ProveOptions) -> ProveSetup:
    """Returns the settings of the proof.

    An option replaces the setting of the head's card (with `card`), which replaces the default.
    Raises UsageError if `card` is given and the catalogue has no acceptance of the head for the
    data set.
    """
    from trtspec.bench.prove import ProveSetup
    from trtspec.bench.questions import datasets
    from trtspec.checkpoint.published import PublishedAcceptance, known_head, require_published

    record = known_head(options.head) if options.card else None
    published = record.measured_on(options.target) if record is not None else None
    protocol = published or PublishedAcceptance(figures={}, source="")
    card_datasets = [name for name in protocol.figures if name in datasets.catalogue()]
    # the first data set of the card that can be loaded
    dataset = options.dataset or (card_datasets or [datasets.NANO])[0]
    if options.card:
        require_published(options.head, dataset)
    return fill(
        ProveSetup,
        options,
        dataset=dataset,
        thinking=options.thinking or protocol.thinking,
        max_tokens=options.max_tokens or protocol.max_tokens or MAX_TOKENS,
        draft_len=options.draft_len or protocol.draft_len,
        gpu=options.gpu,
        concurrency=options.concurrency.values,
        serve_words=options.passed,
    )


def _check_launches(setup: ProveSetup, *, launching: bool) -> None:
    """Runs the checks of `trtspec serve` for both servers of the proof.

    Raises TrtspecError for an error that would end a launch.

    launching: whether a launch follows, and not only a dry run.
    """
    from trtspec.bench.prove import PLAIN, SPECULATING, serve_words
    from trtspec.launch.preflight import refuse_errors
    from trtspec.verbs.serve import plan_server, reference_problems

    def problems_of(options: ServeOptions) -> list[Problem]:
        """Returns the problems of the server with these options."""
        options = ready(replace(options, dry_run=not launching))
        if options.mode is REFERENCE:
            return reference_problems(options)
        return plan_server(options).problems

    command = click_command("serve", ServeOptions, problems_of)
    for server in (SPECULATING, PLAIN):
        words = serve_words(setup, server)[1:]
        problems = command.main(words, prog_name="trtspec serve", standalone_mode=False)
        # Servers of a killed proof may still hold the ports. The launch waits for the ports.
        errors = [error for error in errors_in(problems) if error.code != "TS-SERVE-PORT"]
        refuse_errors(errors)


def _refuse_own_options(words: tuple[str, ...]) -> None:
    """Raises UsageError if an option for the servers is one that the proof sets by itself.

    words: options of `trtspec serve`.
    """
    # the words after `--` are options of the engine
    for word in takewhile("--".__ne__, words):
        flag = word.partition("=")[0]
        if flag in OWN_OPTIONS:
            remedy = (
                "leave it out; a proof sets head, draft length, GPUs and address of its servers "
                "by its own options"
            )
            raise UsageError(f"{flag} cannot be passed to the servers of a proof", remedy)


def _engine(backend: str) -> str | None:
    """Returns the version of the installed engine. None if the engine does not report a version.

    Raises MissingDependency if the engine is not installed.
    """
    from trtspec.trtllm.serve.command import PROGRAM, engine_version
    from trtspec.verbs.doctor import require
    from trtspec.vllm import PROGRAM as VLLM

    if backend == "reference":
        require("prove --backend reference")
        return versions()["trtspec"]
    if backend == "trtllm":
        PROGRAM.require()
        return engine_version()
    VLLM.require()
    return VLLM.version()
