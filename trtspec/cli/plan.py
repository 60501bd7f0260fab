"""`trtspec plan`: does it fit, how fast, and which command serves it best."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtspec.cli.options import Gpu, IntList
from trtspec.planning.layout import LONGEST_DRAFT
from trtspec.records import Excludes, ForceOption, HeadOption, JsonOption, Needs, TargetArgument, checked

if TYPE_CHECKING:
    from trtspec.errors import Problem
    from trtspec.planning.decision import Decision, Targets
    from trtspec.planning.layout import Layout
    from trtspec.planning.points import Setting
    from trtspec.specs import GpuSpec, HeadSpec, ModelSpec

MoeKernel = Literal["TRTLLM", "CUTLASS", "DEEPGEMM", "MARLIN"]
CONCURRENCY = IntList((1, 4, 16, 64))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    target: TargetArgument
    head: HeadOption = None
    gpu: Annotated[Gpu, typer.Option(help="GPU type.", case_sensitive=False)] = "b200"
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of one server.")] = 4
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp", "--tp-size", min=1, help="Tensor-parallel size. Default: all GPUs; every layout is compared."
        ),
    ] = None
    ep: Annotated[
        int | None, typer.Option("--ep", "--ep-size", min=1, help="Expert-parallel size: 1 or all ranks.")
    ] = None
    attention_dp: Annotated[
        bool,
        typer.Option(
            "--attention-dp", help="Consider only attention data parallelism: each rank caches its own requests."
        ),
    ] = False
    isl: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 1024
    osl: Annotated[int, typer.Option(min=1, help="Answer tokens.")] = 1024
    concurrency: Annotated[
        IntList | None,
        typer.Option(
            show_default=f"{CONCURRENCY}; with --ttft or --tpot, all that fit in the cache",
            help="Concurrent requests of the whole server, such as 1,4,16.",
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        typer.Option(help="Measured acceptance: tokens per step as VALUE@DRAFTS, or results.json of `trtspec bench`."),
        Needs("head"),
    ] = None
    ttft: Annotated[
        float | None, typer.Option(metavar="MS", min=0.001, help="Upper limit of the mean time to the first token.")
    ] = None
    tpot: Annotated[
        float | None, typer.Option(metavar="MS", min=0.001, help="Upper limit of the mean time per output token.")
    ] = None
    max_draft: Annotated[
        int, typer.Option(min=1, max=LONGEST_DRAFT, help="Longest draft length to consider."), Needs("head")
    ] = 8
    kv_fraction: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            show_default="0.9; 0.75 with attention DP",
            help="The engine's free_gpu_memory_fraction.",
        ),
    ] = None
    moe_backend: Annotated[
        MoeKernel | None,
        typer.Option(show_default="the fastest measured for the format", help="MoE kernels to plan with."),
    ] = None
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw a plot: .png, .svg or .pdf.")] = None
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also print every draft length, the assumptions and the sources."),
        Excludes("json_", why="which holds everything"),
    ] = False
    force: Annotated[ForceOption, Needs("output")] = False
    json_: JsonOption = False

    @property
    def fixed(self) -> bool:
        """Whether one layout was asked for."""
        return self.tp is not None or self.ep is not None or self.attention_dp


def plan(options: PlanOptions) -> None:
    """Estimate whether a target fits, how fast it runs and what speculation gains, and print the best build-config
    command."""
    from trtspec.checkpoint.hub import load_head, load_target
    from trtspec.errors import CheckFailed
    from trtspec.planning.report import draw, text, to_dict
    from trtspec.report import print_json, problem_lines, write_stderr

    options = checked(options)
    if options.output is not None:
        _check_output(options.output, options.force)
    model = load_target(options.target).spec
    head = load_head(options.head).spec if options.head else None
    decision, setting = planned(options, model, head)
    names = (options.target, options.head)
    problems = _doubts(options, model, head, setting)
    if options.json_:
        print_json(to_dict(decision, model, names, setting) | {"problems": [problem.to_dict() for problem in problems]})
    else:
        write_stderr("".join(f"{line}\n" for line in problem_lines(problems)))
        sys.stdout.write(text(decision, model, names, setting, head=head, verbose=options.verbose))
    chosen = decision.best.plan if decision.best else decision.plans[0]
    if options.output is not None and chosen.points:
        draw(chosen, f"{options.target}, {chosen.layout.name}, {setting.gpu.name.upper()}", options.output)
    _fail_without_choice(decision, setting, options)
    if options.output is not None and not chosen.points:
        raise CheckFailed(f"no plot was drawn: the speed of {chosen.layout.name} is not known", "leave --output out")


def planned(options: PlanOptions, model: ModelSpec, head: HeadSpec | None) -> tuple[Decision, Setting]:
    """The decision for these options, and what it was made for. Raises UsageError."""
    from trtspec.data_files import gpu_spec
    from trtspec.planning.acceptance import card_acceptance, parse_acceptance
    from trtspec.planning.decision import Targets, decide
    from trtspec.planning.points import Setting, Workload

    gpu, targets = gpu_spec(options.gpu), Targets(options.ttft, options.tpot)
    if options.moe_backend is not None:
        _check_kernels(options.moe_backend, model, gpu)
    workload = Workload(options.isl, options.osl, _concurrencies(options, targets))
    acceptance = None
    if options.head is not None and head is not None:
        given = options.acceptance
        acceptance = parse_acceptance(given) if given else card_acceptance(options.head, options.target)
    setting = Setting(gpu, workload, acceptance, options.kv_fraction, options.max_draft, options.moe_backend)
    return decide(model, head, _layouts(options, model), setting, targets), setting


def _doubts(options: PlanOptions, model: ModelSpec, head: HeadSpec | None, setting: Setting) -> list[Problem]:
    """Warnings about the pair, and about acceptance that was measured elsewhere."""
    from trtspec.checkpoint.heads.pairing import pair_problems
    from trtspec.planning.acceptance import other_model

    if head is None:
        return []
    pair = pair_problems(head, model, head_id=options.head, target_id=options.target)
    found = [problem for problem in pair if problem.severity == "warning"]
    return found + (other_model(setting.acceptance, options.target) if setting.acceptance else [])


def _concurrencies(options: PlanOptions, targets: Targets) -> tuple[int, ...]:
    """Empty where a target is to be searched for."""
    if options.concurrency is None and targets.any:
        return ()
    return tuple(sorted((options.concurrency or CONCURRENCY).values))


def _layouts(options: PlanOptions, model: ModelSpec) -> list[Layout]:
    """The layout that was asked for, else every layout of these GPUs, tensor parallel first."""
    from trtspec.planning.layout import layout_of
    from trtspec.planning.points import layouts

    first = layout_of(model, options.gpus, options.tp, options.ep, options.attention_dp)
    return [first] if options.fixed else layouts(model, first.gpus)


def _check_kernels(kernel: str, model: ModelSpec, gpu: GpuSpec) -> None:
    from trtspec.errors import UsageError
    from trtspec.planning.step import measured_kernels

    known = measured_kernels(gpu, model.quant.format)
    if kernel not in known:
        message = f"no {kernel} kernels of {model.quant.format} experts on {gpu.name.upper()} are in the tables"
        remedy = f"choose one of {', '.join(known)}, or leave --moe-backend out" if known else "leave it out"
        raise UsageError(message, remedy)


def _fail_without_choice(decision: Decision, setting: Setting, options: PlanOptions) -> None:
    """Raises CheckFailed where nothing was recommended: it does not fit, does not run, or misses the targets."""
    from trtspec.errors import CheckFailed

    where = f"{options.gpus} x {setting.gpu.name.upper()}"
    if not decision.fits:
        message = f"{options.target} does not fit on {where} with requests of {setting.workload.tokens} tokens"
        raise CheckFailed(message, "use more GPUs or larger ones, or shorter requests")
    if decision.refused:
        raise CheckFailed(decision.refused[0].message, decision.refused[0].remedy, decision.refused[0].code)
    if decision.targets.any and decision.best is None:
        message = f"nothing on {where} meets the targets"
        raise CheckFailed(message, "the last lines of the plan name what is nearest and what would")
    if decision.best is None and not decision.able:
        raise CheckFailed(
            f"no layout on {where} holds that many requests of {setting.workload.tokens} tokens",
            "lower --concurrency, use more GPUs or larger ones, or shorter requests",
        )


def _check_output(path: Path, force: bool) -> None:
    from importlib.util import find_spec

    from trtspec.errors import MissingDependency
    from trtspec.planning.report import check_format
    from trtspec.report import refuse_overwrite

    check_format(path)
    refuse_overwrite(path, force)
    if find_spec("matplotlib") is None:
        raise MissingDependency("a plot needs matplotlib", 'pip install "trtspec[report]"')
