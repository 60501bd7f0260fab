"""Defines `trtspec plan`, which estimates whether a target fits, its speed and its best layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from trtspec.planning.layout import LONGEST_DRAFT
from trtspec.records import HeadOption, JsonOption, Needs, TargetArgument, option
from trtspec.report import Result
from trtspec.specs import Gpu
from trtspec.verbs.options import IntList

if TYPE_CHECKING:
    from trtspec.errors import Problem
    from trtspec.planning.decision import Decision
    from trtspec.planning.points import Setting


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `trtspec plan`."""

    target: TargetArgument
    head: HeadOption = None
    gpu: Annotated[Gpu, option("GPU type.", case_sensitive=False)] = "b200"
    gpus: Annotated[int, option("GPUs of one server.", min=1)] = 4
    tp_size: Annotated[
        int | None,
        option(
            "Tensor-parallel size. Default: all GPUs; every layout is compared.",
            "--tp-size",
            "--tp",
            min=1,
            group="Layout",
        ),
    ] = None
    ep_size: Annotated[
        int | None,
        option("Expert-parallel size: 1 or all ranks.", "--ep-size", "--ep", min=1, group="Layout"),
    ] = None
    attention_dp: Annotated[
        bool,
        option(
            "Consider only attention data parallelism: each rank caches its own requests.",
            group="Layout",
        ),
    ] = False
    isl: Annotated[int, option("Prompt tokens.", min=1)] = 1024
    osl: Annotated[int, option("Answer tokens.", min=1)] = 1024
    concurrency: Annotated[IntList, option("Concurrent requests of the whole server.")] = IntList(
        (1, 4, 16, 64)
    )
    acceptance: Annotated[
        str | None,
        option(
            "Measured acceptance: tokens per step as VALUE@DRAFTS, or results.json of "
            "`trtspec bench`."
        ),
        Needs("head"),
    ] = None
    ttft: Annotated[
        float | None,
        option(
            "Upper limit of the mean time to the first token, in milliseconds.",
            metavar="MS",
            min=1,
            group="Limits",
        ),
    ] = None
    tpot: Annotated[
        float | None,
        option(
            "Upper limit of the mean time per output token, in milliseconds.",
            metavar="MS",
            min=1,
            group="Limits",
        ),
    ] = None
    max_draft: Annotated[
        int | None,
        option(
            "Longest draft length to consider.",
            default="lengths whose acceptance was measured",
            min=1,
            max=LONGEST_DRAFT,
            group="Layout",
        ),
        Needs("head"),
    ] = None
    kv_fraction: Annotated[
        float | None,
        option(
            "The engine's free_gpu_memory_fraction.",
            default="0.9; 0.75 with attention DP",
            min=0.01,
            max=1.0,
            group="Layout",
        ),
    ] = None
    json_: JsonOption = False


def plan(options: PlanOptions) -> Result:
    """Estimate whether a target fits, how fast it runs and what speculation gains.

    Prints the best build-config command.
    """
    from trtspec.planning.tables import no_choice, tables_and_lines, to_dict
    from trtspec.trtllm.deployment import choose_version
    from trtspec.trtllm.rules.from_data import support_problems
    from trtspec.trtllm.schema import schema_for

    decision = choose_layout(options)
    tables, lines = ((), ()) if decision.refused else tables_and_lines(decision)
    setting = decision.setting
    version, _ = choose_version(None)
    release_problems = support_problems(schema_for(version), setting.model, setting.head)
    problems = _warnings(setting) + release_problems
    values = to_dict(decision) | {"version": version}
    return Result(values, problems, tables, lines, no_choice(decision))


def choose_layout(options: PlanOptions) -> Decision:
    """Returns the best layout for the options, with all layouts that were compared.

    Raises UsageError for invalid options.
    """
    from trtspec.checkpoint.hub import find_target, load_head
    from trtspec.planning.acceptance import card_acceptance, parse_acceptance
    from trtspec.planning.decision import decide
    from trtspec.planning.layout import layout_of
    from trtspec.planning.points import Setting, Workload, layouts
    from trtspec.specs import gpu_spec

    model = find_target(options.target).spec
    concurrency = tuple(sorted(options.concurrency.values))
    acceptance = None
    if options.head is not None:
        if options.acceptance:
            acceptance = parse_acceptance(options.acceptance)
        else:
            acceptance = card_acceptance(options.head, options.target)
    head = load_head(options.head).spec if options.head else None
    setting = Setting(
        options.target,
        model,
        options.head,
        head,
        gpu_spec(options.gpu),
        Workload(options.isl, options.osl, concurrency),
        acceptance,
        options.kv_fraction,
        options.max_draft,
        options.ttft,
        options.tpot,
    )
    requested = layout_of(options.gpus, options.tp_size, options.ep_size, options.attention_dp)
    is_fixed = options.tp_size is not None or options.ep_size is not None or options.attention_dp
    # without a requested layout: every layout of the GPUs
    candidates = [requested] if is_fixed else layouts(model, requested.gpus)
    return decide(candidates, setting)


def _warnings(setting: Setting) -> list[Problem]:
    """Returns the warnings about a target and its head. [] without a head.

    Includes a warning if the acceptance was measured on another model.
    """
    from trtspec.checkpoint.heads.pairing import learned_problems, pair_problems
    from trtspec.checkpoint.hub import resolve
    from trtspec.planning.acceptance import other_model

    if setting.head is None:
        return []
    problems = pair_problems(
        setting.head, setting.model, head_id=setting.head_name, target_id=setting.target
    )
    names = (setting.head_name or "", setting.target)
    head, target = [resolve(name, weights=False) for name in names]
    problems += learned_problems(head, target)
    # `trtspec inspect HEAD --against TARGET` reports the errors of a pair
    warnings = [problem for problem in problems if problem.severity == "warning"]
    if setting.acceptance:
        warnings += other_model(setting.acceptance, setting.target)
    return warnings
