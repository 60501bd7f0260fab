"""`trtspec prove`: the proof run on a user's own GPUs, with one page and a verdict."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec import report
from trtspec.cli.options import Gpu, IntList, ThinkingOption
from trtspec.errors import CheckFailed, UsageError
from trtspec.records import DryRunOption, HeadOption, JsonOption, RestartOption, TargetArgument

if TYPE_CHECKING:
    from trtspec.bench.prove import ProveSetup

MARKS = {"pass": "pass   ", "fail": "FAIL   ", "skipped": "skipped"}
CONTEXTS = IntList((1000, 4000, 16000))


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    target: TargetArgument
    passed: Annotated[
        tuple[str, ...],
        typer.Argument(metavar="[-- OPTIONS]", help="After `--`: options of `trtspec serve` for every launch."),
    ] = ()
    head: HeadOption = None
    output: Annotated[
        Path | None, typer.Option("--output", "--output-dir", "-o", help="Directory of the proof; run again to resume.")
    ] = None
    backend: Annotated[
        Literal["trtllm", "vllm", "reference"], typer.Option(help="What serves; reference rehearses a proof on a CPU.")
    ] = "trtllm"
    gpu: Annotated[
        Gpu | None, typer.Option(help="GPU type to plan for.", show_default="the one that is installed, where known")
    ] = None
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of one server.")] = 4
    draft_len: Annotated[int, typer.Option(min=1, help="Longest draft; every shorter one is measured too.")] = 3
    dataset: Annotated[str, typer.Option(help="Questions, as for bench.")] = "nano"
    samples: Annotated[int, typer.Option(min=2, help="Questions of each measurement.")] = 80
    max_tokens: Annotated[int, typer.Option(min=16, help="Maximum tokens per answer.")] = 256
    thinking: ThinkingOption = None
    concurrency: Annotated[IntList, typer.Option(help="Numbers of parallel conversations.")] = IntList((1, 4, 16))
    contexts: Annotated[IntList, typer.Option(help="Prompt tokens of the long-context measurement.")] = CONTEXTS
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds until a server must be ready.")] = 7200.0
    restart: RestartOption = False
    dry_run: DryRunOption = False
    json_: JsonOption = False


def prove(options: ProveOptions) -> None:
    """Prove a target and its head on your own GPUs.

    Runs doctor, lint --installed, a plain and a speculating launch, bench and check, and compares memory and step times
    with the plan. A killed run resumes.
    """
    setup = _setup(options)
    if options.dry_run:
        _show_steps(setup, options.json_)
        return
    if options.output is None:
        raise UsageError("a proof needs a directory for its outputs", "pass -o DIR")
    from trtspec.cli.prove_run import prove_all
    from trtspec.client.addresses import key_header

    key_header()  # a key that bench cannot send is refused before hours of work
    lines = prove_all(setup, options.output, options.startup_timeout, options.restart)
    failed = [line.name for line in lines if line.status == "fail"]
    page = options.output / "report.html"
    if options.json_:
        report.print_json({"ok": not failed, "results": [asdict(line) for line in lines]})
    else:
        for line in lines:
            print(f"{MARKS[line.status]} {line.name}: {line.message}")
        print(f"page: {page}")
    if failed:
        raise CheckFailed(f"not proved: {', '.join(failed)}", f"see {page}")


def _setup(options: ProveOptions) -> ProveSetup:
    """What the options ask for. Raises UsageError for the first that cannot be."""
    from trtspec.bench.datasets import NANO, load_dataset
    from trtspec.bench.prove import ProveSetup
    from trtspec.cli.prove_run import refuse_own_options

    if options.head is None:
        raise UsageError("a proof needs a head", "trtspec prove TARGET --head HEAD -o DIR")
    refuse_own_options(options.passed)
    load_dataset(options.dataset, 2)
    return ProveSetup(
        target=absolute(options.target),
        head=absolute(options.head),
        backend=options.backend,
        draft_len=options.draft_len,
        gpu=options.gpu or _installed_gpu(),
        gpus=options.gpus,
        dataset=NANO if options.dataset == NANO else absolute(options.dataset),
        samples=options.samples,
        max_tokens=options.max_tokens,
        concurrency=options.concurrency.values,
        contexts=tuple(sorted(options.contexts.values)),
        serve_words=options.passed,
        thinking=options.thinking,
    )


def absolute(name: str) -> str:
    """`PATH` or `NAME=PATH` with an absolute path where it exists, so that a proof is resumed from any directory; a
    known name as it is."""
    for path in filter(None, (name, name.partition("=")[2])):
        if os.path.exists(os.path.expanduser(path)):
            return name.removesuffix(path) + os.path.abspath(os.path.expanduser(path))
    return name


def _installed_gpu() -> str | None:
    """The row of gpus.yaml that the first GPU of this machine is, where its name says so."""
    from trtspec.data_files import gpu_names
    from trtspec.launch.preflight import read_gpus

    found = read_gpus() or []
    words = found[0].name.lower().replace("-", " ").split() if found else []
    return next((name for name in gpu_names() if name in words), None)


def _show_steps(setup: ProveSetup, json_output: bool) -> None:
    import shlex

    from trtspec.bench.prove import STARTS, launches, serve_words, steps_of
    from trtspec.cli.demo_process import duration

    steps = steps_of(setup)
    rows: list[dict[str, Any]] = []
    for launch in ("", *launches(setup)):
        if launch:
            words = ("serve", *serve_words(setup, launch))
            rows.append({"step": f"serve-{launch}", "command": f"trtspec {shlex.join(words)}",
                         "seconds": STARTS[setup.backend]})  # fmt: skip
        for step in (step for step in steps if step.launch == launch):
            command = f"trtspec {shlex.join(step.words)}"
            rows.append({"step": step.name, "command": command, "seconds": round(step.seconds)})
    total = sum(row["seconds"] for row in rows)
    if json_output:
        report.print_json({"steps": rows, "seconds": round(total)})
        return
    for row in rows:
        print(f"{duration(row['seconds']):>14}  {row['step']:16} {row['command']}")
    print(f"{duration(total):>14}  altogether, by estimate")
