"""`trtspec plan`: does it fit, how fast, with which sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec.cli.options import ForceOption, JsonOption

if TYPE_CHECKING:
    from trtspec.plan.acceptance import Acceptance
    from trtspec.plan.planner import Plan, Workload
    from trtspec.specs import GpuSpec, HeadSpec, ModelSpec

Gpu = Literal["b200", "b300", "gb200", "gb300", "h200", "h100"]
Moe = Literal["TRTLLM", "CUTLASS", "DEEPGEMM", "MARLIN"]


def plan(
    target: Annotated[str, typer.Argument(help="Checkpoint directory or hub id of the target.")],
    head: Annotated[str | None, typer.Option(help="Eagle3 head: directory or hub id.")] = None,
    gpu: Annotated[Gpu, typer.Option(help="Kind of GPU.")] = "b200",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of one server.")] = 4,
    tp: Annotated[
        int | None, typer.Option("--tp", "--tp-size", min=1, help="Tensor-parallel size. Default: all GPUs.")
    ] = None,
    ep: Annotated[
        int | None, typer.Option("--ep", "--ep-size", min=1, help="Ranks that share whole experts: 1, or all.")
    ] = None,
    attention_dp: Annotated[bool, typer.Option("--attention-dp", help="Each rank caches its own requests.")] = False,
    isl: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    osl: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 1024,
    concurrency: Annotated[str, typer.Option(help="Requests at a time, such as 1,4,16.")] = "1,4,16,64",
    acceptance: Annotated[
        str | None,
        typer.Option(help="Tokens per step that you measured, VALUE@DRAFTS, or results.json of `trtspec bench`."),
    ] = None,
    max_draft: Annotated[int, typer.Option(min=1, max=16, help="Longest draft to look at.")] = 7,
    kv_fraction: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="free_gpu_memory_fraction of the engine.")
    ] = 0.9,
    moe_backend: Annotated[
        Moe | None, typer.Option(help="MoE kernels. Default: the fastest that the engine can be told to use.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw a plot: .png, .svg or .pdf.")] = None,
    force: ForceOption = False,
    json_: JsonOption = False,
) -> None:
    """Say whether a target fits, how fast it runs, and what speculation with your acceptance is worth."""
    from trtspec.data_files import gpu_spec
    from trtspec.errors import CheckFailed
    from trtspec.plan.acceptance import parse_acceptance
    from trtspec.plan.planner import Workload
    from trtspec.plan.report import text, to_dict
    from trtspec.report import print_json
    from trtspec.trtllm.subject import load_head, load_target

    if output is not None:
        _check_output(output, force)
    model = load_target(target).spec
    draft = load_head(head).spec if head else None
    measured = parse_acceptance(acceptance) if acceptance else None
    workload = Workload(isl, osl, _numbers(concurrency))
    device = gpu_spec(gpu)
    fixed = tp is not None or ep is not None or attention_dp
    sizes: dict[str, Any] = {"fraction": kv_fraction, "longest": max_draft, "kernel": moe_backend}
    layout = (gpus, tp, ep, attention_dp) if fixed else (gpus, None, None, False)
    plans = _plans(model, draft, device, layout, fixed, workload, measured, sizes)
    if json_:
        print_json(to_dict(target, head, device, plans))
    else:
        sys.stdout.write(text(target, draft, head, device, plans))
    if output is not None and plans[0].points:
        from trtspec.plan.plot import draw

        draw(plans[0], f"{target}, {plans[0].memory.layout.name}, {device.name.upper()}", output)
    if not any(item.fits for item in plans):
        raise CheckFailed(
            f"{target} does not fit on {gpus} x {device.name.upper()} with requests of {workload.tokens} tokens",
            "use more GPUs or larger ones, or shorter requests",
        )


def _plans(
    model: ModelSpec,
    head: HeadSpec | None,
    gpu: GpuSpec,
    asked: tuple[int, int | None, int | None, bool],
    fixed: bool,
    workload: Workload,
    acceptance: dict[str, Acceptance] | None,
    sizes: dict[str, Any],
) -> list[Plan]:
    """The layout that was asked for, else every layout of these GPUs, tensor parallel first."""
    from trtspec.plan.layout import layout_of
    from trtspec.plan.planner import layouts, plan

    first = layout_of(model, *asked)
    chosen = [first] if fixed else layouts(model, first.gpus)
    return [plan(model, head, gpu, layout, workload, acceptance, **sizes) for layout in chosen]


def _numbers(text: str) -> tuple[int, ...]:
    from trtspec.errors import UsageError

    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UsageError(f"--concurrency {text!r} is not a list of numbers", "for example --concurrency 1,4,16")
    return tuple(sorted(set(numbers)))


def _check_output(path: Path, force: bool) -> None:
    from importlib.util import find_spec

    from trtspec.errors import MissingDependency
    from trtspec.plan.plot import check_format
    from trtspec.report import refuse_overwrite

    check_format(path)
    refuse_overwrite(path, force)
    if find_spec("matplotlib") is None:
        raise MissingDependency("a plot needs matplotlib", 'pip install "trtspec[report]"')
