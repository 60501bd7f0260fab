"""`trtspec train`: an Eagle3 head from a target and its own answers, measured in the reference engine at the end."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trtspec.cli import train_options as option
from trtspec.cli.options import DryRunOption, ForceOption, JsonOption
from trtspec.errors import TrtspecError, UsageError
from trtspec.report import print_json, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from trtspec.heads.training.options import TrainingRecipe, TrainOptions
    from trtspec.heads.training.plan import TrainingPlan
    from trtspec.heads.training.processes import World
    from trtspec.heads.training.state import CurvePoint
    from trtspec.models.kimi import KimiModel

ACCEPTANCE_PROMPTS = 48
OVERRIDES = (
    "attention", "eagle", "draft_vocab_size", "intermediate_size", "ttt_steps", "epochs", "steps", "lr", "seq_len",
    "batch_size", "seed", "answer_only",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What is trained on what, and where it goes: everything that does not change the loss curve."""

    target: str
    data: Path
    features: str
    init: Path | None
    output: Path
    device: str
    save_every: int
    acceptance_prompts: int


def train(
    context: typer.Context,
    output: option.OutputOption,
    target: option.TargetArgument = None,
    data: option.DataArgument = None,
    attention: option.AttentionOption = None,
    eagle: option.EagleOption = None,
    draft_vocab_size: option.DraftVocabOption = None,
    intermediate_size: option.IntermediateOption = None,
    aux_layers: option.AuxLayersOption = None,
    ttt_steps: option.TttOption = None,
    features: option.FeaturesOption = None,
    epochs: option.EpochsOption = None,
    steps: option.StepsOption = None,
    lr: option.LrOption = None,
    seq_len: option.SeqLenOption = None,
    batch_size: option.BatchOption = None,
    seed: option.SeedOption = None,
    answer_only: option.AnswerOnlyOption = None,
    init: option.InitOption = None,
    config: option.ConfigOption = None,
    save_every: option.SaveEveryOption = 100,
    device: option.DeviceOption = "cpu",
    acceptance_prompts: option.AcceptancePromptsOption = ACCEPTANCE_PROMPTS,
    gpu: option.GpuOption = "b200",
    restart: option.RestartOption = False,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json_output: JsonOption = False,
) -> None:
    """Train an Eagle3 draft head with ModelOpt on answers that the target itself wrote.

    The target runs once over the data and its states are reused in every epoch. An interrupted run goes on when the
    same command is given again. At the end the head drafts freely on held-out prompts in the reference engine. Under
    torchrun or accelerate launch the processes share each batch.
    """
    from trtspec.heads.training.options import read_options, read_recipe

    recipe = read_recipe(config)
    given = {name: context.params[name] for name in OVERRIDES} | {"aux_layers": _layers(aux_layers)}
    options = read_options(config, given)
    name, rows = _needed(target or recipe.target, "TARGET"), Path(_needed(data or recipe.data, "DATA"))
    start = init or (Path(recipe.init) if recipe.init else None)
    run = Run(name, rows, features or recipe.features, start, output, device, save_every, acceptance_prompts)
    if dry_run:
        print_json(_forecast(run, options, recipe, gpu))
        return
    main = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts, the one that writes and talks
    if main:
        _prepare(output, restart, force)
    record = _train(run, options)
    if main and json_output:
        print_json({"output": str(output), **record})
    elif main:
        _show(output, record)


def _needed(value: Any, name: str) -> str:
    if value is None:
        raise UsageError(f"{name} is missing", f"give it as an argument, or as `{name.lower()}:` in the --config file")
    return str(value)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--aux-layers {text!r} is not a list of numbers", "for example --aux-layers 1,29,57"
        ) from None


def _forecast(run: Run, options: TrainOptions, recipe: TrainingRecipe, gpu: str) -> dict[str, Any]:
    """Sizes and costs. A target that is not on this machine, or data not made yet, are taken from the recipe."""
    from trtspec.checkpoint.hub import resolve
    from trtspec.data_files import gpu_spec
    from trtspec.heads.training.forecast import forecast
    from trtspec.heads.training.plan import estimated_seconds, make_plan, plan_without_data

    resolved = resolve(run.target, allow_download=False)
    spec, options = resolved.target_spec(), options.for_device(run.device)
    stored = sum(path.stat().st_size for path in resolved.path.glob("*.safetensors")) if resolved.path else 0
    stored = stored or int((resolved.known or {}).get("bytes") or 0)
    here = resolved.path is not None and run.data.exists()
    if here:
        assert resolved.path is not None
        plan = make_plan(resolved.path, spec, run.data, options, run.features)
        found = plan.to_dict() | {"estimated_seconds": round(estimated_seconds(plan, options), 1)}
    else:
        plan = plan_without_data(spec, options, recipe, run.data, run.features)
        found = plan.to_dict()
    return found | {"measured": here, **forecast(plan, spec, options, stored, gpu_spec(gpu), run.target)}


def _prepare(output: Path, restart: bool, force: bool) -> None:
    """Refuses to write over a finished head; leaves an interrupted run of this output alone unless told otherwise."""
    import shutil

    from trtspec.heads.training.options import WORK_NAME
    from trtspec.report import refuse_overwrite

    running = (output / WORK_NAME).is_dir()
    if not running and output.is_dir() and [p for p in output.iterdir() if p.name != "training.jsonl"]:
        refuse_overwrite(output, force)
    if restart or (force and not running):
        shutil.rmtree(output / WORK_NAME, ignore_errors=True)


def _train(run: Run, options: TrainOptions) -> dict[str, Any]:
    """Plans, trains and measures; the record of the run, empty in all processes but the main one."""
    # OpenMP reads this when torch is loaded. Threads that spin long for each other stop the run where cores are shared.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from trtspec.checkpoint.hub import resolve
    from trtspec.heads.training.plan import make_plan  # only now: importing torch takes seconds
    from trtspec.heads.training.processes import joined

    resolved = resolve(run.target)
    if resolved.path is None:
        raise TrtspecError(f"{run.target} is not on this machine", f"run `hf download {resolved.hub_id}`")
    with joined(run.device) as world:
        if not world.main:
            os.environ["TRTSPEC_QUIET"] = "1"
        options = options.for_device(run.device)
        plan = make_plan(resolved.path, resolved.target_spec(), run.data, options, run.features)
        return _train_and_measure(run, resolved.path, plan, options, world)


def _train_and_measure(
    run: Run, target_dir: Path, plan: TrainingPlan, options: TrainOptions, world: World
) -> dict[str, Any]:
    import torch

    from trtspec.cli.train_measure import measure_acceptance
    from trtspec.heads.progress import progress_bar
    from trtspec.heads.training.run import run_training
    from trtspec.heads.training.state import write_record

    say(
        f"Training an EAGLE-{plan.spec.eagle} {plan.spec.attention.upper()} head of {plan.parameters / 1e6:.1f} M "
        f"parameters on {plan.tokens:,} tokens, {plan.steps} steps"
    )
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    model, whole = _target(target_dir, plan, dtype, world.device(run.device))
    with progress_bar("training", plan.steps, "steps") as advance:
        record = run_training(
            target_dir, model, plan, options, run.output, data=run.data, init=run.init, save_every=run.save_every,
            device=run.device, on_step=_shown(advance), world=world,
        )  # fmt: skip
    if not whole and run.acceptance_prompts:
        say("Acceptance is not measured without the target's layers; serve both, then run `trtspec bench`")
    elif record and run.acceptance_prompts and record["held_out"]:
        record["acceptance"] = measure_acceptance(
            target_dir, model, run.output, plan, record["held_out"], run.acceptance_prompts
        )
        write_record(run.output, plan.spec, record)
    return record


def _target(target_dir: Path, plan: TrainingPlan, dtype: Any, device: str) -> tuple[KimiModel, bool]:
    """(the target, whether with its layers). Its embeddings, final norm and lm_head suffice where the states come by
    another way: streamed, from a server, or from dumps of a target that does not fit."""
    import psutil

    from trtspec.heads.training.features_server import is_served
    from trtspec.heads.training.features_stream import is_streamed
    from trtspec.heads.training.plan import MEMORY_SHARE
    from trtspec.models.stream import LayerStream
    from trtspec.models.weights import load_target

    stored = sum(path.stat().st_size for path in target_dir.glob("*.safetensors"))
    large = stored > MEMORY_SHARE * psutil.virtual_memory().available
    apart = is_streamed(plan.features) or is_served(plan.features) or (large and plan.dumped is not None)
    if not apart:
        return load_target(target_dir, dtype=dtype, device=device), True
    with LayerStream(target_dir, dtype=dtype, device=device) as stream:
        return stream.ends(), False


def _shown(advance: Callable[..., None]) -> Callable[[CurvePoint], None]:
    """Draws each step: the loss, its course so far, the agreement with the target at the first training-time-test
    steps, the last held-out loss."""
    from trtspec.heads.progress import sparkline

    losses: list[float] = []
    done, held = 0, ""

    def on_step(point: CurvePoint) -> None:
        nonlocal done, held
        losses.append(point.loss)
        held = f"  held out {point.held_out['loss']:.2f}" if point.held_out else held
        shares = " ".join(f"{value:.2f}" for value in point.accuracy[:3])
        speed = f"{point.tokens_per_second:.0f} tok/s"
        advance(point.step - done, f"loss {point.loss:.2f} {sparkline(losses, 12)}  agree {shares}  {speed}{held}")
        done = point.step

    return on_step


def _show(output: Path, record: dict[str, Any]) -> None:
    training = record["training"]
    shares = ", ".join(f"{value:.3f}" for value in training.get("held_out_accuracy", training["accuracy"]))
    print(f"head        {output}")
    print(f"parameters  {record['parameters']:,}")
    print(f"trained     {training['steps']} steps, {training['tokens_seen']:,} tokens, {training['seconds']:.0f} s")
    print(f"agreement   {shares} per training-time-test step")
    for row in record.get("acceptance", {}).get("rows", []):
        positions = ", ".join(f"{share:.2f}" for share in row["by_position"])
        where = f"{row['category']}, {row['prompts']} prompts; by draft {positions}"
        print(f"acceptance  {row['acceptance_length']:.3f} ({where})")
