"""The options of `trtspec train`, the modes that use them, and the configuration file that may hold them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trtspec.cli.options import DryRunOption, ForceOption, Gpu, JsonOption, RestartOption
from trtspec.errors import UsageError
from trtspec.heads.training.options import (
    BestBy,
    EagleVersion,
    Launcher,
    LossName,
    Precision,
    Schedule,
    TrainingRecipe,
    TrainingRun,
    TrainOptions,
    read_config,
)
from trtspec.records import Mode, flag_of, given, parse, words
from trtspec.specs import Attention

CURVE, RUN = TrainOptions(), TrainingRun(Path(), "", Path())  # their defaults


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Those that decide the loss curve are fields of TrainOptions, where their defaults are too."""

    target: Annotated[str | None, typer.Argument(help="Target model: a checkpoint directory or a hub id.")] = None
    data: Annotated[
        tuple[str, ...],
        typer.Argument(
            help="Conversations answered by the target: files, each with =PASSES where it is to be seen more or less "
            "than once in an epoch; or a directory of dumps.",
            show_default=False,
        ),
    ] = ()
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the new head.")]
    attention: Annotated[Attention, typer.Option(help="Attention of the head.")] = CURVE.attention
    eagle: Annotated[EagleVersion, typer.Option(help="EAGLE version.")] = CURVE.eagle
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
    init: Annotated[Path | None, typer.Option(help="Start from the weights of this head.")] = None
    ttt_steps: Annotated[int, typer.Option(min=1, max=16, help="Training-time-test steps.")] = CURVE.ttt_steps
    ttt_decay: Annotated[
        float, typer.Option(help="Weight of each of these steps in the loss, relative to the step before.")
    ] = CURVE.ttt_decay
    loss: Annotated[LossName, typer.Option(help="Distance to the target's distribution.")] = CURVE.loss
    answer_only: Annotated[
        bool,
        typer.Option(
            "--answer-only/--all-tokens", help="Compute the loss on the target's own tokens only, or on all tokens."
        ),
    ] = CURVE.answer_only
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the data; more than a finished run had extend it.")
    ] = CURVE.epochs
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; replaces --epochs.")] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per batch, across all processes.")] = (
        CURVE.batch_size
    )
    accumulation: Annotated[int, typer.Option(min=1, help="Batches per optimizer step.")] = CURVE.accumulation
    seq_len: Annotated[int, typer.Option(min=8, help="Maximum sequence length in tokens.")] = CURVE.seq_len
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate.", show_default="by hidden size: 2e-3 at 256, 7e-5 at 7168"),
    ] = None
    schedule: Annotated[Schedule, typer.Option(help="Learning-rate schedule after the warm-up.")] = CURVE.schedule
    warmup: Annotated[
        float, typer.Option(min=0, help="Warm-up: a share of all steps, or from 1 on a number of steps.")
    ] = CURVE.warmup
    decay: Annotated[float, typer.Option(help="Share of all steps over which wsd decays.")] = CURVE.decay
    weight_decay: Annotated[float, typer.Option(min=0, help="AdamW's weight decay.")] = CURVE.weight_decay
    grad_clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = CURVE.grad_clip
    precision: Annotated[
        Precision, typer.Option(help="Precision of matrix products; auto: bf16 where the device supports it natively.")
    ] = CURVE.precision
    seed: Annotated[int, typer.Option(help="Random seed for weight initialisation and data order.")] = CURVE.seed
    deduplicate: Annotated[
        bool,
        typer.Option("--deduplicate/--keep-duplicates", help="Train only once on duplicate conversations."),
    ] = CURVE.deduplicate
    skip_bad_rows: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Skip up to N data rows that cannot be read; the run's record counts them."
        ),
    ] = CURVE.skip_bad_rows
    held_out: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of the conversations that is held out for evaluations.")
    ] = CURVE.held_out
    eval_data: Annotated[
        str | None, typer.Option(help="Conversations to evaluate on; replaces --held-out.", show_default=False)
    ] = None
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between evaluations.", show_default="a tenth of the run")
    ] = None
    features: Annotated[
        str,
        typer.Option(
            help="Source of the target's hidden states: auto, memory, a directory, stream, stream:DIR or a server URL."
        ),
    ] = "auto"
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with any of these options by name; flags and variables take precedence."),
    ] = None
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saved states.")] = RUN.save_every
    export_every: Annotated[
        int | None,
        typer.Option(min=0, help="Steps between exported heads; 0: none on the way.", show_default="--save-every"),
    ] = None
    keep: Annotated[int, typer.Option(min=1, help="Exported heads to keep, the newest.")] = RUN.keep
    best_by: Annotated[BestBy, typer.Option(help="Keep the head with the best held-out figure of this kind too.")] = (
        RUN.best_by
    )
    keep_state: Annotated[
        bool, typer.Option("--keep-state/--drop-state", help="Whether a finished run can be extended with more steps.")
    ] = RUN.keep_state
    max_time: Annotated[
        str | None,
        typer.Option(help="Stop in time and leave a usable head: 90m, 3h30m, 1-12:00:00.", show_default=False),
    ] = None
    activation_checkpointing: Annotated[
        bool,
        typer.Option("--activation-checkpointing", help="Compute activations twice in place of keeping them."),
    ] = RUN.activation_checkpointing
    log_with: Annotated[
        tuple[str, ...],
        typer.Option(help="Experiment tracker: tensorboard, wandb, mlflow or another of accelerate's."),
    ] = ()
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = RUN.device
    acceptance_prompts: Annotated[
        int, typer.Option(min=0, help="Held-out prompts for the final acceptance measurement; 0 skips it.")
    ] = 48
    gpu: Annotated[Gpu, typer.Option(help="GPU type assumed by --dry-run estimates and --print-launch.")] = "b200"
    nodes: Annotated[int, typer.Option(min=1, help="Nodes assumed by --dry-run and --print-launch.")] = 1
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs per node for --dry-run and --print-launch.", show_default="those of --gpu"),
    ] = None
    print_launch: Annotated[
        Launcher | None,
        typer.Option(help="Print what starts this run on these nodes (a script for sbatch: slurm) and stop."),
    ] = None
    dry_run: DryRunOption = False
    restart: RestartOption = False
    force: ForceOption = False
    json_: JsonOption = False


def _mode(record: str, name: str, how: str, without: tuple[str, ...]) -> Mode:
    """A mode that uses every option but these."""
    used = [(f.name, Any, field(default=None)) for f in fields(TrainCommand) if f.name not in without]
    return Mode(name, make_dataclass(record, used, frozen=True, kw_only=True), how)


SELECTING = ("dry_run", "print_launch")
CLUSTER = ("gpu", "nodes", "gpus_per_node")
FORECAST = _mode("TrainForecast", "--dry-run", "--dry-run", SELECTING)
LAUNCH = _mode("TrainLaunch", "--print-launch", "--print-launch", SELECTING)
WITH_LAYERS = _mode("TrainWithLayers", "a training run", "--features auto, memory or DIR", (*SELECTING, *CLUSTER))
# the target's layers run elsewhere, in a stream or in a live server, so no acceptance is measured at the end
WITHOUT_LAYERS = _mode(
    "TrainWithoutLayers",
    "--features stream or URL",
    "--features stream or URL",
    (*SELECTING, *CLUSTER, "acceptance_prompts"),
)
MODES = (FORECAST, LAUNCH, WITH_LAYERS, WITHOUT_LAYERS)
NOT_IN_FILES = ("config", "dry_run", "print_launch", "restart", "force", "json_", "output")  # they belong to one call


def with_file(command: TrainCommand) -> tuple[TrainCommand, TrainingRecipe, set[str]]:
    """(the command with what its --config file says where neither flag nor variable did, the file's counts of data
    that are not made yet, the options that came from the file). UsageError for a key that is no option, or a value
    that the option would refuse."""
    if command.config is None:
        return command, TrainingRecipe(), set()
    values = read_config(command.config)
    recipe = {key: values.pop(key) for key in [f.name for f in fields(TrainingRecipe)] if key in values}
    known = {f.name for f in fields(TrainCommand)} - set(NOT_IN_FILES)
    if unknown := sorted(set(values) - known):
        allowed = ", ".join(sorted(known | {f.name for f in fields(TrainingRecipe)}))
        raise UsageError(f"{command.config}: unknown training options {', '.join(unknown)}", f"known: {allowed}")
    found = _judged(command.config, {key: value for key, value in values.items() if value is not None})
    told = {key: value for key, value in found.items() if key not in given(command)}
    return replace(command, **told), TrainingRecipe(**recipe), set(told)


def _judged(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The values as the command line would make them of the same text."""
    places = {key: values.pop(key) for key in ("target", "data") if key in values}
    for key, value in values.items():
        if isinstance(value, list) and key != "log_with":
            values[key] = ",".join(map(str, value))
        elif key == "log_with":
            values[key] = tuple(map(str, value if isinstance(value, list) else [value]))
        elif not isinstance(value, bool):
            values[key] = str(value)
    try:
        line = words(replace(TrainCommand(output=Path("-")), **values), always=values)
        parsed = parse(TrainCommand, line, "trtspec train")
    except UsageError as error:
        raise UsageError(f"{path}: {error.message.partition(' does not parse: ')[2]}", "correct the file") from None
    found = {key: getattr(parsed, key) for key in values}
    if "target" in places:
        found["target"] = str(places["target"])
    if "data" in places:
        data = places["data"]
        found["data"] = tuple(map(str, data)) if isinstance(data, list) else (str(data),)
    return found


def refuse_from_file(command: TrainCommand, chosen: Mode, names: set[str]) -> None:
    """Raises UsageError for what a file sets and the mode does not use; a forecast uses all."""
    used = {f.name for f in fields(chosen.record)}
    for name in sorted(names - used - set(CLUSTER)):
        flag = flag_of(TrainCommand, name)
        raise UsageError(f"{command.config}: {name} ({flag}) is not used by {chosen.name}", "remove it from the file")


def curve_options(command: TrainCommand) -> TrainOptions:
    """What decides the loss curve, checked."""
    values = {f.name: getattr(command, f.name) for f in fields(TrainOptions)}
    if command.aux_layers is not None:
        try:
            values["aux_layers"] = tuple(int(part) for part in command.aux_layers.split(","))
        except ValueError:
            raise UsageError(
                f"--aux-layers {command.aux_layers!r} is not a list of numbers", "for example --aux-layers 1,29,57"
            ) from None
    return TrainOptions(**values).checked()


CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")  # Slurm's [days-]hours:minutes:seconds
PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
SECONDS = (86400, 3600, 60, 1)


def seconds_of(text: str) -> float:
    """Of `90m`, `1h30m`, `3600`, `2d` or Slurm's `1-12:00:00`; UsageError for anything else."""
    found = CLOCK.fullmatch(text.strip()) or PARTS.fullmatch(text.strip().lower())
    total = sum(float(part or 0) * unit for part, unit in zip(found.groups(), SECONDS, strict=True)) if found else 0.0
    if total <= 0:
        raise UsageError(f"--max-time {text!r} is no time", "for example 90m, 3h30m, 7200 or 1-12:00:00")
    return total
