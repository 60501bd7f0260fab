"""`trtspec plan`: does it fit, how fast, with which sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.cli import plan_options as opt
from trtspec.cli.options import ForceOption, HeadOption, JsonOption, TargetArgument
from trtspec.cli.values import numbers

if TYPE_CHECKING:
    from trtspec.planning.acceptance import Acceptance
    from trtspec.planning.planner import Plan, Workload
    from trtspec.specs import GpuSpec, HeadSpec, ModelSpec


def plan(
    target: TargetArgument,
    head: HeadOption = None,
    gpu: opt.GpuOption = "b200",
    gpus: opt.GpusOption = 4,
    tp: opt.TpOption = None,
    ep: opt.EpOption = None,
    attention_dp: opt.AttentionDpOption = False,
    isl: opt.IslOption = 1024,
    osl: opt.OslOption = 1024,
    concurrency: opt.ConcurrencyOption = "1,4,16,64",
    acceptance: opt.AcceptanceOption = None,
    max_draft: opt.MaxDraftOption = 7,
    kv_fraction: opt.KvFractionOption = 0.9,
    moe_backend: opt.MoeOption = None,
    output: opt.OutputOption = None,
    force: ForceOption = False,
    json_: JsonOption = False,
) -> None:
    """Say whether a target fits, how fast it runs, and what speculation with your acceptance is worth."""
    from trtspec.data_files import gpu_spec
    from trtspec.errors import CheckFailed
    from trtspec.planning.acceptance import parse_acceptance
    from trtspec.planning.planner import Workload
    from trtspec.planning.report import text, to_dict
    from trtspec.report import print_json
    from trtspec.trtllm.names import load_head, load_target

    if output is not None:
        _check_output(output, force)
    model = load_target(target).spec
    draft = load_head(head).spec if head else None
    measured = parse_acceptance(acceptance) if acceptance else None
    workload = Workload(isl, osl, tuple(sorted(numbers(concurrency, "--concurrency"))))
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
        from trtspec.planning.plot import draw

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
    from trtspec.planning.layout import layout_of
    from trtspec.planning.planner import layouts, plan

    first = layout_of(model, *asked)
    chosen = [first] if fixed else layouts(model, first.gpus)
    return [plan(model, head, gpu, layout, workload, acceptance, **sizes) for layout in chosen]


def _check_output(path: Path, force: bool) -> None:
    from importlib.util import find_spec

    from trtspec.errors import MissingDependency
    from trtspec.planning.plot import check_format
    from trtspec.report import refuse_overwrite

    check_format(path)
    refuse_overwrite(path, force)
    if find_spec("matplotlib") is None:
        raise MissingDependency("a plot needs matplotlib", 'pip install "trtspec[report]"')
