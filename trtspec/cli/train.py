"""`trtspec train`: an Eagle3 head from a target and its own answers.

The reference engine measures the head at the end. The file begins with the options, the modes that
use them, and the configuration file that may hold them.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trtspec.checkpoint.hub import load_head, resolve
from trtspec.errors import Interrupted, UsageError, nearest
from trtspec.files import load_file
from trtspec.heads.card import interval_text
from trtspec.heads.training.curve import run_directory, run_options
from trtspec.heads.training.train_options import (
    TrainingRecipe,
    TrainingRun,
    TrainOptions,
    feature_source,
)
from trtspec.machine import check_device
from trtspec.records import (
    OUTPUT,
    JsonOption,
    Mode,
    Modes,
    argument,
    checked,
    fields_of,
    fill,
    given,
    made_of_file,
    option,
    uses,
    words,
)
from trtspec.report import Result, Table
from trtspec.specs import Gpu
from trtspec.verbs.options import CountList, OutputFlags

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trtspec.heads.training.needs import WayNeeds
    from trtspec.heads.training.training_record import TrainingRecord

DRY_RUN = Mode("--dry-run", "--dry-run")
WITH_LAYERS = Mode("a training run", "--features auto, memory or DIR")
# the target's layers run elsewhere, in a stream or in a live server, so no acceptance is measured
# at the end
WITHOUT_LAYERS = Mode("--features stream or URL", "--features stream or URL")


@dataclass(frozen=True, kw_only=True)
class TrainCommand(TrainOptions, OutputFlags):
    """The options of a run: TrainOptions decides the loss curve, the rest its input and output."""

    target: Annotated[str | None, argument("Target model: a checkpoint directory or a hub id.")] = (
        None
    )
    data: Annotated[
        tuple[str, ...],
        argument("Conversations answered by the target: files, or directories of these."),
    ] = ()
    output: Annotated[Path, option("Directory for the new head.", "-o")]
    aux_layers: Annotated[  # the text; TrainOptions has its numbers
        CountList | None,
        option(
            "Layers whose outputs the head reads, counted from 0.",
            default="1,L//2-1,L-4",
            group="Head",
        ),
    ] = None  # type: ignore[assignment]
    init: Annotated[
        Path | None,
        option("Start from the weights of this head, with its architecture.", group="Head"),
    ] = None
    features: Annotated[
        str,
        option(
            "Source of the target's hidden states: auto, memory, a directory, stream, stream:DIR "
            "or a server URL."
        ),
    ] = "auto"
    config: Annotated[
        Path | None,
        option("YAML file with any of these options by name; flags and variables take precedence."),
    ] = None
    save_every: Annotated[int, option("Steps between saved states.", min=1, group="Run")] = (
        TrainingRun.save_every
    )
    max_time: Annotated[
        float | None,
        option(
            "Hours in which the run must end; it leaves a usable head.",
            metavar="HOURS",
            min=0.01,
            group="Run",
        ),
    ] = None
    device: Annotated[str, option("cpu or cuda.", group="Run")] = TrainingRun.device
    acceptance_prompts: Annotated[
        int,
        option(
            "Held-out prompts for the final acceptance measurement; 0 skips it.", min=0, group="Run"
        ),
        Modes(DRY_RUN, WITH_LAYERS),
    ] = 48
    gpu: Annotated[
        Gpu, option("GPU type whose memory --dry-run compares with.", group="Run"), Modes(DRY_RUN)
    ] = "b200"
    json_: JsonOption = False


NOT_IN_FILES = ("config", *OUTPUT)  # they belong to one call


def with_file(command: TrainCommand) -> tuple[TrainCommand, TrainingRecipe, set[str]]:
    """Adds the options of the --config file that neither a flag nor a variable sets.

    Returns the command, the file's counts of data that do not exist yet, and the names of the
    options from the file. Raises UsageError for a key that is not an option, or an invalid value.
    """
    if command.config is None:
        return command, TrainingRecipe(), set()
    loaded = load_file(command.config) or {}
    if not isinstance(loaded, dict):
        raise UsageError(
            f"{command.config} is not a mapping of option names to values",
            "see `trtspec train --help`",
        )
    values = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    counts = {field.name for field in fields(TrainingRecipe)}
    recipe = {key: values.pop(key) for key in counts if key in values}
    known = {field.name for field in fields(TrainCommand)} - set(NOT_IN_FILES)
    unknown = sorted(set(values) - known)
    if unknown:
        remedy = f"known: {', '.join(sorted(known | counts))}"
        flags = {"--" + name.replace("_", "-"): name for name in known}
        near = nearest(unknown[0], flags, "options")
        if near:
            remedy = f"did you mean {flags[near]}?"
        message = f"{command.config}: unknown training options {', '.join(unknown)}"
        raise UsageError(message, remedy)
    values = {key: value for key, value in values.items() if value is not None}
    read = made_of_file(TrainCommand, command.config, {"output": command.output, **values})
    parsed = {key: getattr(read, key) for key in values}
    chosen = {key: value for key, value in parsed.items() if key not in given(command)}
    return replace(command, **chosen), TrainingRecipe(**recipe), set(chosen)


def train(command: TrainCommand) -> Result | None:
    """Train an Eagle3 draft head with ModelOpt on answers written by the target itself.

    The target runs once over the data. Its hidden states are cached and reused in every epoch. An
    interrupted run leaves a usable head and is resumed when the command is repeated, with the same
    loss curve. A finished run can be extended by more epochs or steps. At the end, the acceptance
    of the head is measured on held-out prompts in the reference engine. Under torchrun, the
    processes share each batch.
    """
    typed = command
    command, recipe, from_file = with_file(command)
    command = like_initial(command, typed, from_file)
    features = feature_source(command.features)
    mode = WITH_LAYERS if features.with_layers else WITHOUT_LAYERS
    if command.dry_run:
        mode = DRY_RUN
    command = checked(command, mode)
    unused = sorted(name for name in from_file if not uses(TrainCommand, name, mode))
    for name in unused:
        where = f"{command.config}: {name} ({fields_of(TrainCommand)[name].typed})"
        raise UsageError(f"{where} is not used by {mode.name}", "remove it from the file")
    layers = None if command.aux_layers is None else command.aux_layers.values
    options = fill(TrainOptions, command, aux_layers=layers)
    if not command.target or not command.data:
        name = "data" if command.target else "target"
        remedy = f"give it as an argument, or as `{name}:` in the file of `config`"
        raise UsageError(f"`{name}` is missing", remedy)
    deadline = None if command.max_time is None else time.monotonic() + 3600 * command.max_time
    run = fill(
        TrainingRun,
        command,
        target_dir=Path(),
        init=resolve(str(command.init)).directory if command.init else None,
        data=" ".join(command.data),
        deadline=deadline,
        output_options=command,
    )
    # torchrun starts several processes; the main one writes and prints
    main = os.environ.get("RANK", "0") == "0"
    resumes = main and run_directory(run.output).check(run_options(run.output, run.output_options))
    if command.dry_run:
        from trtspec.heads.training.needs import dry_run
        from trtspec.specs import gpu_spec

        gpu = gpu_spec(command.gpu)
        needs = dry_run(command.target, command.data, features, run, options, recipe, gpu)
        needs |= {"acceptance_prompts": command.acceptance_prompts, "resumes": resumes}
        return _needs(needs)
    asked = mode is WITH_LAYERS and "acceptance_prompts" in given(typed) | from_file
    from trtspec.verbs.doctor import require
    from trtspec.verbs.train import train_and_measure

    require("train")
    check_device(command.device)
    run = replace(run, target_dir=resolve(command.target).directory)
    record = train_and_measure(
        run, command.data, features, options, command.acceptance_prompts, asked
    )
    repeated = words(replace(typed, restart=False, force=False, dry_run=False))
    return _result(command.output, record, shlex.join(["trtspec", "train", *repeated]))


def _needs(needs: dict[str, Any]) -> Result:
    """Returns the needs of a run, and the commands that start an engine for the target's states."""
    by_option = {"online": "memory", "stream": "stream[:DIR]", "dumps": "DIR", "server": "URL"}
    ways: dict[str, WayNeeds] = needs["ways"]
    rows = [
        (
            by_option[name],
            str(way["gpus"]),
            f"{way['peak_bytes'] / 1e9:,.0f}",
            f"{way['disk_bytes'] / 1e9:,.0f}",
            way.get("why") or "possible",
        )
        for name, way in ways.items()
    ]
    layers = ", ".join(map(str, needs["aux_layers"]))
    attention = needs["attention"].upper()
    data = f"{needs['samples']:,} samples, {needs['tokens']:,} tokens, {needs['steps']:,} steps"
    refused = sum(file["refused"] for file in needs["files"])
    if refused:
        data += f", {refused} rows refused"
    lines = [
        f"head    EAGLE-{needs['eagle']} {attention}, {needs['parameters']:,} parameters",
        f"layers  {layers}",
        f"data    {data}",
        f"states  {needs['feature_bytes'] / 1e9:,.1f} GB",
        *(f"dumps by {engine}: {line}" for engine, line in needs["dump_commands"].items()),
        *(f"server by {engine}: {line}" for engine, line in needs["server_commands"].items()),
    ]
    columns = ("--features", "GPUs", "GB each", "GB of disk", "")
    table = Table(f"Ways on {needs['gpu']}", columns, rows, text_columns=frozenset({0, 4}))
    return Result(needs, tables=[table], lines=lines)


def like_initial(command: TrainCommand, typed: TrainCommand, from_file: set[str]) -> TrainCommand:
    """Returns the command with the architecture of --init, except for options that the user set."""
    if command.init is None:
        return command
    head = load_head(str(command.init)).spec
    architecture: dict[str, Any] = {
        "attention": head.attention,
        "eagle": head.eagle,
        "draft_vocab_size": head.draft_vocab_size if head.is_pruned else None,
        "intermediate_size": head.intermediate_size,
        "aux_layers": CountList(head.aux_layers) if head.aux_layers else None,
    }
    chosen = given(typed) | from_file
    inherited = {name: value for name, value in architecture.items() if name not in chosen}
    return replace(command, **inherited)


def _result(output: Path, record: TrainingRecord, resume: str) -> Result | None:
    """Returns the result of a run, which is a failure if a signal ended the run.

    `resume`: the command that continues the run. None in the processes that do not write.
    """
    if not record:
        return None
    training = record["training"]
    values = {"output": str(output), **record}
    lines = list(_lines(output, record))
    if training.get("finished", True):
        return Result(values, lines=lines)
    where = (
        f"after step {training['steps']} of {training['total']}; "
        f"{output} holds the head of that step"
    )
    stopped = training["stopped"]
    if stopped in ("SIGINT", "SIGTERM"):
        failure = Interrupted(f"stopped by {stopped} {where}", f"resume with `{resume}`")
        return Result(values, lines=lines, failure=failure)
    return Result(values, lines=lines, messages=[f"Time is up {where}. Resume with: {resume}"])


def _lines(output: Path, record: TrainingRecord) -> Iterator[str]:
    training = record["training"]
    accuracy = training.get("held_out_accuracy", training["accuracy"])
    shares = ", ".join(f"{value:.3f}" for value in accuracy)
    yield f"head        {output}"
    yield f"parameters  {record['parameters']:,}"
    yield f"trained     {training['steps']} steps, {training['tokens_seen']:,} tokens"
    yield f"agreement   {shares} per training-time-test step"
    estimate = training.get("estimated_acceptance_length")
    if estimate:
        length = f"{estimate:.3f} acceptance length"
        yield f"estimate    {length} on held-out answers, without generating"
    for row in record.get("acceptance", {}).get("rows", []):
        positions = ", ".join(f"{share:.2f}" for share in row["by_position"])
        where = f"{row['category']}, {row['prompts']} prompts; by draft {positions}"
        interval = f"95 % interval {interval_text(row)}"
        yield f"acceptance  {row['acceptance_length']:.3f}, {interval} ({where})"
