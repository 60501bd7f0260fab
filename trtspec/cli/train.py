"""`trtspec train`: an Eagle3 head from a target and its own answers, measured in the reference engine at the end."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec.cli.options import DryRunOption, ForceOption, Gpu, JsonOption, RestartOption
from trtspec.errors import TrtspecError, UsageError
from trtspec.records import Mode, given, narrow, refuse_unused
from trtspec.report import print_json, refuse_overwrite, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from trtspec.heads.training.options import FeatureSource, TrainingRecipe, TrainOptions
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
    features: FeatureSource
    init: Path | None
    output: Path
    device: str
    save_every: int
    acceptance_prompts: int
    asked_for_acceptance: bool


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """The options of `trtspec train`; heads.options.TrainOptions holds those that decide the loss curve."""

    target: Annotated[str | None, typer.Argument(help="Target model: a checkpoint directory or a hub id.")] = None
    data: Annotated[
        Path | None, typer.Argument(help="Conversations answered by the target (jsonl), or a directory of dumps.")
    ] = None
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the new head.")]
    attention: Annotated[
        Literal["mha", "mla"] | None, typer.Option(help="Attention of the head.", show_default="mla")
    ] = None
    eagle: Annotated[Literal["3", "3.1"] | None, typer.Option(help="EAGLE version.", show_default="3")] = None
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Draft only from this many most frequent tokens.", show_default="the whole vocabulary"
        ),
    ] = None
    intermediate_size: Annotated[
        int | None, typer.Option(min=1, help="MLP width of the head.", show_default="the target's")
    ] = None
    aux_layers: Annotated[
        str | None,
        typer.Option(help="Layers whose outputs the head reads, counted from 0.", show_default="1,L//2-1,L-4"),
    ] = None
    ttt_steps: Annotated[int | None, typer.Option(min=1, help="Training-time-test steps.", show_default="3")] = None
    features: Annotated[
        str | None,
        typer.Option(
            help="Source of the target's hidden states: auto, memory, a directory, stream, stream:DIR or a server URL.",
            show_default="auto",
        ),
    ] = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data.", show_default="3")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; replaces --epochs.")] = None
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate.", show_default="by hidden size: 2e-3 at 256, 7e-5 at 7168"),
    ] = None
    seq_len: Annotated[
        int | None, typer.Option(min=8, help="Maximum sequence length in tokens.", show_default="2048")
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step, across all processes.", show_default="8")
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Random seed for weight initialisation and data order.", show_default="0")
    ] = None
    answer_only: Annotated[
        bool | None,
        typer.Option(
            "--answer-only/--all-tokens",
            help="Compute the loss on the target's own tokens only, or on all tokens.",
            show_default="all-tokens",
        ),
    ] = None
    init: Annotated[Path | None, typer.Option(help="Start from the weights of this head.")] = None
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with these options, target and data; the command line takes precedence."),
    ] = None
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    acceptance_prompts: Annotated[
        int, typer.Option(min=0, help="Held-out prompts for the final acceptance measurement; 0 skips it.")
    ] = ACCEPTANCE_PROMPTS
    gpu: Annotated[Gpu, typer.Option(help="GPU type assumed by --dry-run estimates.")] = "b200"
    dry_run: DryRunOption = False
    restart: RestartOption = False
    force: ForceOption = False
    json_: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class TrainWithoutLayers:
    """The target's layers run elsewhere: in a stream, or in a live server. So no acceptance is measured at the end."""

    target: str | None
    data: Path | None
    output: Path
    attention: str | None
    eagle: str | None
    draft_vocab_size: int | None
    intermediate_size: int | None
    aux_layers: str | None
    ttt_steps: int | None
    features: str | None
    epochs: int | None
    steps: int | None
    lr: float | None
    seq_len: int | None
    batch_size: int | None
    seed: int | None
    answer_only: bool | None
    init: Path | None
    config: Path | None
    save_every: int
    device: str
    restart: bool
    force: bool
    json_: bool


@dataclass(frozen=True, kw_only=True)
class TrainWithLayers(TrainWithoutLayers):
    acceptance_prompts: int


@dataclass(frozen=True, kw_only=True)
class TrainForecast(TrainWithLayers):
    """Sizes and costs of a run; nothing is written."""

    gpu: str


FORECAST = Mode("--dry-run", TrainForecast, "--dry-run")
WITH_LAYERS = Mode("a training run", TrainWithLayers, "--features auto, memory or DIR")
WITHOUT_LAYERS = Mode("--features stream or URL", TrainWithoutLayers, "--features stream or URL")
MODES = (FORECAST, WITH_LAYERS, WITHOUT_LAYERS)


def train(command: TrainCommand) -> None:
    """Train an Eagle3 draft head with ModelOpt on answers written by the target itself.

    The target runs once over the data; its hidden states are cached and reused in every epoch. Resuming an interrupted
    run reproduces the same loss curve. At the end, the acceptance of the head is measured on held-out prompts in the
    reference engine. Under torchrun or accelerate launch, the processes share each batch.
    """
    from trtspec.heads.training.options import WORK_NAME, feature_source, read_recipe

    recipe = read_recipe(command.config)
    features = feature_source(command.features or recipe.features)
    narrow(command, _mode(command, features), MODES, selecting=("dry_run",))
    if command.steps is not None:
        refuse_unused(command, ["epochs"], "with --steps, which replaces it")
    name = _needed(command.target or recipe.target, "TARGET")
    data = Path(_needed(command.data or recipe.data, "DATA"))
    if data.is_dir():
        refuse_unused(command, ["features", "seq_len"], f"by {data}: the dumps hold the hidden states")
    start = command.init or (Path(recipe.init) if recipe.init else None)
    options = _options(command)
    run = Run(
        target=name,
        data=data,
        features=features,
        init=start,
        output=command.output,
        device=command.device,
        save_every=command.save_every,
        acceptance_prompts=command.acceptance_prompts,
        asked_for_acceptance="acceptance_prompts" in given(command),
    )
    main = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts, the one that writes and talks
    resumes = main and _resumes(command.output, command.restart, command.force)
    if command.dry_run:
        print_json(_forecast(run, options, recipe, command.gpu) | {"resumes": resumes})
        return
    if main and not resumes:
        shutil.rmtree(command.output / WORK_NAME, ignore_errors=True)
    record = _train(run, options)
    if main and command.json_:
        print_json({"output": str(command.output), **record})
    elif main:
        _show(command.output, record)


def _mode(command: TrainCommand, features: FeatureSource) -> Mode:
    if command.dry_run:
        return FORECAST
    return WITH_LAYERS if features.needs_layers else WITHOUT_LAYERS


def _options(command: TrainCommand) -> TrainOptions:
    """The command line over the config file over the defaults."""
    from trtspec.heads.training.options import read_options

    given = {name: getattr(command, name) for name in OVERRIDES} | {"aux_layers": _layers(command.aux_layers)}
    return read_options(command.config, given)


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
    about = {
        "output": str(run.output),
        "device": run.device,
        "init": str(run.init) if run.init else None,
        "save_every": run.save_every,
        "acceptance_prompts": run.acceptance_prompts,
        "options": options.to_dict() | {"lr": options.peak_lr(spec.hidden_size)},
    }
    return found | {"measured": here, **about, **forecast(plan, spec, options, stored, gpu_spec(gpu), run.target)}


def _resumes(output: Path, restart: bool, force: bool) -> bool:
    """Whether an interrupted run of this output is resumed. Raises UsageError where a finished head is in the way."""
    from trtspec.heads.training.options import WORK_NAME

    running = (output / WORK_NAME).is_dir()
    if not running and output.is_dir() and [p for p in output.iterdir() if p.name != "training.jsonl"]:
        refuse_overwrite(output, force)
    return running and not restart


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
    from trtspec.cli.train_measure import measure_acceptance
    from trtspec.heads.training.options import TrainingRun
    from trtspec.heads.training.run import run_training
    from trtspec.heads.training.state import write_record
    from trtspec.progress import progress_bar

    say(
        f"Training an EAGLE-{plan.spec.eagle} {plan.spec.attention.upper()} head of {plan.parameters / 1e6:.1f} M "
        f"parameters on {plan.tokens:,} tokens, {plan.steps} steps"
    )
    model, whole = _target(target_dir, plan, options.dtype, world.device(run.device))
    if not whole and run.asked_for_acceptance and run.acceptance_prompts:
        text = "--acceptance-prompts is not used where the target does not fit in memory beside its dumps"
        raise UsageError(text, "leave it out, serve both, then run `trtspec bench`")
    with progress_bar("training", plan.steps, "steps") as bar:
        work = TrainingRun(target_dir, run.data, run.output, run.init, run.save_every, run.device)
        record = run_training(work, model, plan, options, on_step=_shown(bar.advance), world=world)
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

    from trtspec.heads.training.plan import MEMORY_SHARE
    from trtspec.models.stream import LayerStream
    from trtspec.models.weights import load_target

    stored = sum(path.stat().st_size for path in target_dir.glob("*.safetensors"))
    large = stored > MEMORY_SHARE * psutil.virtual_memory().available
    apart = not plan.features.needs_layers or (large and plan.dumped is not None)
    if not apart:
        return load_target(target_dir, dtype=dtype, device=device), True
    with LayerStream(target_dir, dtype=dtype, device=device) as stream:
        return stream.ends(), False


def _shown(advance: Callable[..., None]) -> Callable[[CurvePoint], None]:
    """Draws each step: the loss, its course so far, the agreement with the target at the first training-time-test
    steps, the last held-out loss."""
    from trtspec.progress import sparkline

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
