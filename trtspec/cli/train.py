"""`trtspec train`: an Eagle3 head from a target and its own answers, measured in the reference engine at the end."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.cli.train_options import (
    FORECAST,
    LAUNCH,
    MODES,
    SELECTING,
    WITH_LAYERS,
    WITHOUT_LAYERS,
    TrainCommand,
    curve_options,
    refuse_from_file,
    seconds_of,
    with_file,
)
from trtspec.errors import Interrupted, TrtspecError, UsageError
from trtspec.heads.training.curve import foreign, is_finished, remove_run
from trtspec.heads.training.options import (
    WORK_NAME,
    DataFiles,
    FeatureSource,
    TrainingRun,
    check_trackers,
    feature_source,
)
from trtspec.records import Mode, given, narrow, note, refuse_unused, words
from trtspec.report import print_json, progress_bar, refuse_overwrite, say, sparkline

if TYPE_CHECKING:
    from collections.abc import Callable

    from trtspec.checkpoint.hub import Resolved
    from trtspec.heads.training.curve import CurvePoint
    from trtspec.heads.training.forecast import TrainingNodes
    from trtspec.heads.training.options import TrainingRecipe, TrainOptions
    from trtspec.heads.training.plan import TrainingPlan
    from trtspec.heads.training.processes import World
    from trtspec.models.kimi import KimiModel


@dataclass(frozen=True)
class Run:
    """What is trained on what, and how: everything that does not change the loss curve. `work.target_dir` is known
    when the target's name was looked up."""

    target: str
    data: DataFiles
    features: FeatureSource
    work: TrainingRun
    acceptance_prompts: int
    asked_for_acceptance: bool
    again: str  # the command that goes on with this run


def train(command: TrainCommand) -> None:
    """Train an Eagle3 draft head with ModelOpt on answers written by the target itself.

    The target runs once over the data; its hidden states are cached and reused in every epoch. An interrupted run
    leaves a usable head and is resumed when the command is repeated, with the same loss curve; a finished one can be
    extended by more epochs or steps. At the end, the acceptance of the head is measured on held-out prompts in the
    reference engine. Under torchrun or accelerate launch, the processes share each batch.
    """
    typed, (command, recipe, from_file) = command, with_file(command)
    features = feature_source(command.features)
    mode = _mode(command, features)
    narrow(typed, mode, MODES, selecting=SELECTING)
    refuse_from_file(command, mode, from_file)
    if command.print_launch:
        refuse_unused(typed, ["dry_run"], "by --print-launch, which starts nothing")
    if command.steps is not None:
        refuse_unused(typed, ["epochs"], "with --steps, which replaces it")
    if command.eval_data is not None:
        refuse_unused(typed, ["held_out"], "with --eval-data, which replaces it")
    files = DataFiles.named(_needed(command.data, "DATA"), command.eval_data)
    if files.directory:
        refuse_unused(typed, ["features", "seq_len"], f"by {files}: the dumps hold the hidden states")
    options = curve_options(command)
    run = Run(
        target=_needed(command.target, "TARGET"),
        data=files,
        features=features,
        work=_work(command, files),
        acceptance_prompts=command.acceptance_prompts,
        asked_for_acceptance="acceptance_prompts" in given(typed) | from_file,
        again=shlex.join(["trtspec", "train", *words(replace(typed, restart=False, force=False, dry_run=False))]),
    )
    if command.print_launch:
        print(_launch_text(typed, run, options), end="")
        return
    main = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts, the one that writes and talks
    resumes = main and _resumes(command.output, command.restart, command.force)
    if command.dry_run:
        print_json(_forecast(run, options, recipe, typed) | {"resumes": resumes})
        return
    if main and not resumes:
        remove_run(command.output)
    _report(run, _train(run, options), command.json_)


def _mode(command: TrainCommand, features: FeatureSource) -> Mode:
    if command.print_launch:
        return LAUNCH
    if command.dry_run:
        return FORECAST
    return WITH_LAYERS if features.needs_layers else WITHOUT_LAYERS


def _needed(value: Any, name: str) -> Any:
    if not value:
        raise UsageError(f"{name} is missing", f"give it as an argument, or as `{name.lower()}:` in the --config file")
    return value


def _work(command: TrainCommand, files: DataFiles) -> TrainingRun:
    """`--max-time` counts from the start of this process, its imports included."""
    deadline = None
    if command.max_time is not None:
        import psutil

        began = time.monotonic() - (time.time() - psutil.Process().create_time())
        deadline = began + seconds_of(command.max_time)
    same = ("output", "init", "save_every", "export_every", "keep", "best_by", "keep_state", "activation_checkpointing")
    values = {name: getattr(command, name) for name in (*same, "log_with", "device")}
    return TrainingRun(target_dir=Path(), data=str(files), deadline=deadline, **values)


def _cluster(command: TrainCommand) -> TrainingNodes:
    from trtspec.data_files import gpu_spec
    from trtspec.heads.training.forecast import TrainingNodes

    return TrainingNodes(command.nodes, command.gpus_per_node or gpu_spec(command.gpu).gpus_per_node)


def _launch_words(command: TrainCommand, **changes: Any) -> list[str]:
    """The arguments of this run, for GPUs unless --device says otherwise; without what only describes the cluster."""
    device = command.device if "device" in given(command) else "cuda"
    plain: dict[str, Any] = {"gpu": "b200", "nodes": 1, "gpus_per_node": None, "print_launch": None, "dry_run": False}
    if "data" in changes:
        changes["data"] = (str(changes["data"]),)
    return words(replace(command, device=device, **plain, **changes), always=("device",))


def _launch_text(command: TrainCommand, run: Run, options: TrainOptions) -> str:
    """Raises TrtspecError for a target that is neither here nor a known id, or does not fit the GPUs as the run would
    have it there."""
    from trtspec.checkpoint.hub import resolve
    from trtspec.data_files import gpu_spec
    from trtspec.heads.training.forecast import launch_text, require_room

    assert command.print_launch is not None
    if "device" not in given(command) or command.device != "cpu":
        require_room(run.features, _stored_bytes(resolve(run.target, allow_download=False)), gpu_spec(command.gpu))
    cluster = _cluster(command)
    if cluster.gpus > options.batch_size:
        idle = f"{cluster.gpus} processes and {options.batch_size} sequences per step: the others only wait"
        note(f"{idle}; pass --batch-size {cluster.gpus}, or fewer GPUs")
    return launch_text(command.print_launch, _launch_words(command), cluster, Path.cwd())


def _stored_bytes(resolved: Resolved) -> int:
    """Of the target's weights: here, or as published."""
    stored = sum(path.stat().st_size for path in resolved.path.glob("*.safetensors")) if resolved.path else 0
    return stored or int((resolved.known or {}).get("bytes") or 0)


def _forecast(run: Run, options: TrainOptions, recipe: TrainingRecipe, command: TrainCommand) -> dict[str, Any]:
    """Sizes and costs, after every check that the run makes. A target that is not on this machine, or data not made
    yet, are taken from the recipe."""
    from trtspec.checkpoint.hub import resolve
    from trtspec.checkpoint.target_problems import require_target
    from trtspec.data_files import gpu_spec
    from trtspec.heads.training.forecast import UsersCommand, forecast, require_way
    from trtspec.heads.training.plan import check_run, estimated_seconds, make_plan, plan_without_data

    resolved = resolve(run.target, allow_download=False)
    spec, options = resolved.target_spec(), options.for_device(run.work.device)
    stored = _stored_bytes(resolved)
    here = resolved.path is not None and not run.data.missing()
    check_trackers(run.work.log_with)
    if here:
        assert resolved.path is not None
        spec = require_target(resolved.path).spec
        plan = make_plan(resolved.path, spec, run.data, options, run.features)
        found = plan.to_dict() | {"estimated_seconds": round(estimated_seconds(plan, options), 1)}
        found |= check_run(replace(run.work, target_dir=resolved.path), plan, options)
    else:
        plan = plan_without_data(spec, options, recipe, Path(str(run.data)), run.features)
        found = plan.to_dict()
    work = run.work
    about = {
        "output": str(work.output),
        "device": work.device,
        "init": str(work.init) if work.init else None,
        "save_every": work.save_every,
        "export_every": work.exports,
        "keep": work.keep,
        "best_by": work.best_by,
        "keep_state": work.keep_state,
        "max_seconds": None if work.deadline is None else round(work.deadline - time.monotonic(), -1),
        "activation_checkpointing": work.activation_checkpointing,
        "log_with": list(work.log_with),
        "acceptance_prompts": run.acceptance_prompts,
        "options": options.to_dict() | {"lr": options.peak_lr(spec.hidden_size)},
        "warnings": warnings_of(plan),
    }
    typed = UsersCommand(run.target, str(run.data), partial(_launch_words, command, target=run.target))
    costs = forecast(plan, spec, options, stored, gpu_spec(command.gpu), _cluster(command), typed)
    if str(run.features) != "auto":
        require_way(run.features, costs)
    return found | {"measured": here, **about, **costs}


def warnings_of(plan: TrainingPlan) -> list[str]:
    """What engines cannot do with the head that is to be trained."""
    from trtspec.checkpoint.heads.dialects import ENGINES

    return [text for engine in ENGINES.values() if (text := engine.cannot_load(plan.spec))]


def _resumes(output: Path, restart: bool, force: bool) -> bool:
    """Whether the run that this output holds goes on. Raises UsageError where something else is in the way."""
    finished = is_finished(output)
    if (output / WORK_NAME).is_dir() and not restart and not (finished and force):
        return True
    if finished or foreign(output):
        refuse_overwrite(output, force)
    return False


def _train(run: Run, options: TrainOptions) -> dict[str, Any]:
    """Plans, trains and measures; the record of the run, empty in all processes but the main one."""
    # OpenMP reads this when torch is loaded. Threads that spin long for each other stop the run where cores are shared.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from trtspec.checkpoint.hub import resolve
    from trtspec.checkpoint.target_problems import require_target
    from trtspec.heads.training.plan import make_plan  # only now: importing torch takes seconds
    from trtspec.heads.training.processes import joined

    resolved = resolve(run.target)
    if resolved.path is None:
        raise TrtspecError(f"{run.target} is not on this machine", f"run `hf download {resolved.hub_id}`")
    run = replace(run, work=replace(run.work, target_dir=resolved.path))
    with joined(run.work.device) as world:
        if not world.main:
            os.environ["TRTSPEC_QUIET"] = "1"
        check_trackers(run.work.log_with)
        options = options.for_device(run.work.device)
        spec = require_target(resolved.path).spec
        plan = make_plan(resolved.path, spec, run.data, options, run.features)
        return _train_and_measure(run, plan, options, world)


def _train_and_measure(run: Run, plan: TrainingPlan, options: TrainOptions, world: World) -> dict[str, Any]:
    from trtspec.heads.training.plan import check_run

    check_run(run.work, plan, options)
    _say_what(plan)

    from trtspec.cli.train_measure import measure_acceptance  # only now: importing ModelOpt takes many seconds
    from trtspec.heads.training.run import run_training, write_record

    target_dir = run.work.target_dir
    model, whole = _target(target_dir, plan, options.dtype, world.device(run.work.device))
    if not whole and run.asked_for_acceptance and run.acceptance_prompts:
        text = "--acceptance-prompts is not used where the target does not fit in memory beside its dumps"
        raise UsageError(text, "leave it out, serve both, then run `trtspec bench`")
    with progress_bar("training", plan.steps, "steps") as bar:
        record = run_training(run.work, model, plan, options, on_step=_shown(bar.advance), world=world)
    if not record or not run.acceptance_prompts or not record["training"]["finished"]:
        return record
    if not whole:
        say("Acceptance is not measured without the target's layers; serve both, then run `trtspec bench`")
    elif record["held_out"]:
        record["acceptance"] = measure_acceptance(
            target_dir, model, run.work.output, plan, record["held_out"], run.acceptance_prompts
        )
        write_record(run.work.output, plan.spec, record)
    return record


def _say_what(plan: TrainingPlan) -> None:
    """What is trained on what, before the work begins."""
    for told in plan.files:
        left = [f"{told[key]} {text}" for key, text in LEFT_OUT.items() if told.get(key)]
        if left:
            say(f"{told['file']}: {told['conversations']} conversations, {' and '.join(left)}")
    for warning in warnings_of(plan):
        say(f"warning: {warning}")
    say(
        f"Training an EAGLE-{plan.spec.eagle} {plan.spec.attention.upper()} head of {plan.parameters / 1e6:.1f} M "
        f"parameters on {plan.tokens:,} tokens, {plan.steps} steps"
    )


LEFT_OUT = {
    "bad_rows": "rows skipped that cannot be read",
    "duplicates": "duplicates left out",
    "in_eval_data": "left out because they are evaluated on",
}


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


def _report(run: Run, record: dict[str, Any], as_json: bool) -> None:
    """The end of a run for the one who called it; Interrupted where a signal ended it."""
    if not record:
        return
    output, training = run.work.output, record["training"]
    if as_json:
        print_json({"output": str(output), **record})
    else:
        _show(output, record)
    if training.get("finished", True):
        return
    where = f"after step {training['steps']} of {training['total']}; {output} holds the head of that step"
    if training["stopped"] in ("SIGINT", "SIGTERM"):
        raise Interrupted(f"stopped by {training['stopped']} {where}", f"resume with `{run.again}`")
    say(f"Time is up {where}. Resume with: {run.again}")


def _show(output: Path, record: dict[str, Any]) -> None:
    training = record["training"]
    shares = ", ".join(f"{value:.3f}" for value in training.get("held_out_accuracy", training["accuracy"]))
    print(f"head        {output}")
    print(f"parameters  {record['parameters']:,}")
    print(f"trained     {training['steps']} steps, {training['tokens_seen']:,} tokens, {training['seconds']:.0f} s")
    print(f"agreement   {shares} per training-time-test step")
    if estimate := training.get("estimated_acceptance_length"):
        print(f"estimate    {estimate:.3f} acceptance length on held-out answers, without generating")
    for row in record.get("acceptance", {}).get("rows", []):
        positions = ", ".join(f"{share:.2f}" for share in row["by_position"])
        where = f"{row['category']}, {row['prompts']} prompts; by draft {positions}"
        print(f"acceptance  {row['acceptance_length']:.3f} ({where})")
