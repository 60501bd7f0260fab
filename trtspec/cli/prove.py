"""`trtspec prove`: the proof run on a user's own GPUs, in one bundle; `--import` weighs bundles from elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec import machine, report
from trtspec.cli.options import (
    DryRunOption,
    ForceOption,
    Gpu,
    HeadOption,
    JsonOption,
    RestartOption,
    ThinkingOption,
    numbers,
)
from trtspec.errors import CheckFailed, UsageError
from trtspec.records import Mode, narrow, refuse_empty, refuse_unused, without

if TYPE_CHECKING:
    from trtspec.bench.prove import ProveSetup
    from trtspec.bench.prove_bundle import ProofBundle
    from trtspec.bench.prove_gates import GateFinding, ServedRelease
    from trtspec.cli.prove_run import Proof

MARKS = {"pass": "pass   ", "fail": "FAIL   ", "skipped": "skipped"}
CONTEXTS = "1000,4000,16000"
FINDINGS, PATCH = "findings.json", "schemas.patch"  # what --import writes


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    target: Annotated[
        str | None, typer.Argument(help="Target model: a checkpoint directory or a hub id.", show_default=False)
    ] = None
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
    concurrency: Annotated[str, typer.Option(help="Numbers of parallel conversations.")] = "1,4,16"
    contexts: Annotated[str, typer.Option(help="Prompt tokens of the long-context measurement.")] = CONTEXTS
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds until a server must be ready.")] = 7200.0
    import_: Annotated[
        tuple[Path, ...],
        typer.Option("--import", help="Bundle of a proof: show what it verifies or refutes; repeatable."),
    ] = ()
    force: ForceOption = False
    restart: RestartOption = False
    dry_run: DryRunOption = False
    json_: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class ProveImport:
    """What `--import` uses; `output` gets findings.json and the patch."""

    import_: tuple[Path, ...]
    output: Path | None
    force: bool
    json_: bool


RUN = Mode("a proof run", without(ProveOptions, "import_", "force"), "leaving --import out")
IMPORT = Mode("--import", ProveImport, "--import BUNDLE")
MODES = (RUN, IMPORT)


def prove(options: ProveOptions) -> None:
    """Prove a target and its head on your own GPUs, in one bundle that can be given away.

    Runs doctor, lint --installed, a plain and a speculating launch, bench and check, and compares memory and step times
    with the plan. A killed run resumes. With --import, shows what bundles from elsewhere verify or refute.
    """
    refuse_empty(options)
    if options.import_:
        if options.output is None:
            refuse_unused(options, ("force",), "without --output")
        _import(narrow(options, IMPORT, MODES, selecting=("import_",)))
        return
    narrow(options, RUN, MODES, selecting=("import_",))
    setup = _setup(options)
    if options.dry_run:
        _show_steps(setup, options.json_)
        return
    if options.output is None:
        raise UsageError("a proof needs a directory for its outputs", "pass -o DIR")
    from trtspec.bench.client import key_header
    from trtspec.cli.prove_run import prove_all

    key_header()  # a key that bench cannot send is refused before hours of work
    proof = prove_all(setup, options.output, options.startup_timeout, options.restart)
    _show(proof, options.json_)
    if proof.failed:
        raise CheckFailed(f"not proved: {', '.join(proof.failed)}", f"see {options.output / 'report.html'}")


def _setup(options: ProveOptions) -> ProveSetup:
    """What the options ask for. Raises UsageError for the first that cannot be."""
    from trtspec.bench.datasets import load_dataset
    from trtspec.bench.prove import ProveSetup
    from trtspec.bench.prove_words import refuse_own_options
    from trtspec.cli.prove_inputs import absolute, absolute_data

    if options.target is None or options.head is None:
        missing = "a target" if options.target is None else "a head"
        raise UsageError(f"a proof needs {missing}", "trtspec prove TARGET --head HEAD -o DIR")
    refuse_own_options(options.passed)
    load_dataset(options.dataset, 2)
    return ProveSetup(
        target=absolute(options.target),
        head=absolute(options.head),
        backend=options.backend,
        draft_len=options.draft_len,
        gpu=options.gpu or _installed_gpu(),
        gpus=options.gpus,
        dataset=absolute_data(options.dataset),
        samples=options.samples,
        max_tokens=options.max_tokens,
        concurrency=tuple(numbers(options.concurrency, "--concurrency")),
        contexts=tuple(sorted(numbers(options.contexts, "--contexts"))),
        serve_words=options.passed,
        thinking=options.thinking,
    )


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
            name = "trtspec" if step.module == "trtspec" else f"python -m {step.module}"
            command = f"{name} {shlex.join(step.words)}"
            rows.append({"step": step.name, "command": command, "seconds": round(step.seconds)})
    total = sum(row["seconds"] for row in rows)
    if json_output:
        report.print_json({"steps": rows, "seconds": round(total)})
        return
    for row in rows:
        print(f"{duration(row['seconds']):>14}  {row['step']:16} {row['command']}")
    print(f"{duration(total):>14}  altogether, by estimate")


def _show(proof: Proof, json_output: bool) -> None:
    if json_output:
        report.print_json(proof.to_dict())
        return
    for line in proof.lines:
        print(f"{MARKS[line.status]} {line.name}: {line.message}")
    print(f"bundle: {proof.bundle} (sha256 {proof.sha256[:16]})")


def _import(options: ProveImport) -> None:
    from trtspec.bench.prove_bundle import read_bundle

    if options.output is not None:
        _refuse_place(options.output, options.force)
    bundles = [read_bundle(path) for path in options.import_]
    try:
        told = _weighed(bundles)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # whole, of another form
        names = ", ".join(bundle.name for bundle in bundles)
        message = f"what {names} holds is not that of a proof: {type(error).__name__}: {error}"
        raise UsageError(message, "pass the proof.tar.gz that `trtspec prove` wrote") from error
    if options.output is not None:
        report.write_json(options.output / FINDINGS, told)
        report.write_atomic(options.output / PATCH, told["patch"])
    if options.json_:
        report.print_json(told)
        return
    _show_import(told)


def _refuse_place(directory: Path, force: bool) -> None:
    """Raises UsageError where no directory can be, and for files that somebody may have edited."""
    above = machine.existing(directory)
    if not above.is_dir():
        raise UsageError(f"{above} is a file", f"-o names the directory of {FINDINGS} and {PATCH}")
    for name in (FINDINGS, PATCH):
        report.refuse_overwrite(directory / name, force)


def _weighed(bundles: list[ProofBundle]) -> dict[str, Any]:
    """findings.json: what the bundles say about schemas, gates and plan."""
    from dataclasses import asdict

    from trtspec.bench.prove import plan_findings
    from trtspec.bench.prove_bundle import request_outcomes
    from trtspec.bench.prove_constants import host_patch, refuted_host_us
    from trtspec.trtllm.schema_evidence import doubtful, patch, weigh
    from trtspec.trtllm.schema_observed import RequestObservation, observation

    seen = [observation(b.schema, f"{b.name} {b.sha256[:12]}", b.evidence["engine"]) for b in bundles if b.schema]
    told_of = [(b.evidence["engine"], request_outcomes(b.evidence), f"{b.name} {b.sha256[:12]}") for b in bundles]
    schemas = weigh(seen, [RequestObservation(*found) for found in told_of if found[1]])
    diff = patch(schemas)
    for bundle in bundles:
        host_us = refuted_host_us(plan_findings(bundle.evidence)) if bundle.evidence["backend"] == "trtllm" else None
        if host_us is not None:  # of several proofs the first: two patches of one line do not apply
            diff += host_patch(host_us, bundle.sha256[:12])
            break
    plans = [(bundle, finding) for bundle in bundles for finding in plan_findings(bundle.evidence)]
    gates, gates_weighed, gates_left = _weigh_gates(bundles)
    left = doubtful() | {"gates": gates_left}
    weighed = left.pop("weighed") + gates_weighed
    return {
        "weighed": weighed,
        "not_weighed": {what: count for what, count in left.items() if count},
        "bundles": [{"name": b.name, "sha256": b.sha256, "backend": b.evidence["backend"],
                     "engine": b.evidence["engine"], "verdict": b.verdict} for b in bundles],
        "schemas": [asdict(finding) for finding in schemas],
        "gates": [asdict(finding) for found, _ in gates for finding in found],
        "plan": [{"bundle": b.name, **asdict(f), "ratio": round(f.ratio, 4)} for b, f in plans],
        "patch": diff + "".join(text for _, text in gates),
    }  # fmt: skip


def _weigh_gates(bundles: list[ProofBundle]) -> tuple[list[tuple[list[GateFinding], str]], int, int]:
    """Findings and patch of each engine's file of gates; how many entries were weighed in all, and how many not."""
    from functools import partial

    from trtspec.bench.prove_gates import GateFile, gate_patch, served_release, weigh_gates
    from trtspec.data_files import DATA
    from trtspec.trtllm.deployment import RELEASES, gates
    from trtspec.vllm import options_passed, vllm_gates

    def served(bundle: ProofBundle) -> ServedRelease | None:
        return served_release(bundle, partial(options_passed, bundle.evidence["setup"].get("serve_words", ())))

    files = GateFile.read("trtllm", RELEASES, gates()), GateFile.read("vllm", DATA / "vllm_flags.yaml", vllm_gates())
    made = []
    for file in files:
        shown = [served(bundle) for bundle in bundles if bundle.evidence["backend"] == file.backend]
        found = weigh_gates(file, [one for one in shown if one is not None])
        made.append((found, gate_patch(file, found)))
    return made, sum(file.weighed() for file in files), sum(file.not_weighed() for file in files)


def _show_import(told: dict[str, Any]) -> None:
    for bundle in told["bundles"]:
        verdict = "proved" if bundle["verdict"]["ok"] else "not proved"
        print(f"{bundle['name']} {bundle['sha256'][:12]}: {bundle['backend']} {bundle['engine'] or ''}, {verdict}")
    for finding in told["schemas"]:
        print(f"{finding['weight']:9} {finding['line']}.yaml {finding['entry']}: {finding['message']}")
    for finding in told["gates"]:
        print(f"{finding['weight']:9} {finding['file'].rpartition('/')[2]} {finding['entry']}: {finding['message']}")
    for finding in told["plan"]:
        print(f"{finding['status']:9} plan {finding['what']}: planned {finding['planned']:.4g}, "
              f"measured {finding['measured']:.4g}")  # fmt: skip
    left = ", ".join(f"{count} {what}" for what, count in told["not_weighed"].items())
    print(f"{told['weighed']} gates and inferred or unknown entries were weighed; not weighed: {left}")
    sys.stdout.write(told["patch"])
