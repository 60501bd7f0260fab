"""`trtspec train`: an Eagle3 head from a target and its own answers, measured in the reference engine at the end. First
the options, the modes that use them, and the configuration file that may hold them."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trtspec.checkpoint.hub import resolve
from trtspec.cli.options import CountList, OutputFlags
from trtspec.errors import Interrupted, UsageError
from trtspec.files import load_file
from trtspec.heads.card import interval_text
from trtspec.heads.training.curve import run_directory, run_options
from trtspec.heads.training.options import (
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
from trtspec.report import Result, Table, progress_bar, say
from trtspec.specs import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trtspec.heads.training.curve import CurvePoint
    from trtspec.heads.training.options import FeatureSource
    from trtspec.heads.training.samples import Sample
    from trtspec.models.kimi import KimiModel

ACCEPTANCE_TOKENS, DRAFTS = (
    64,
    3,
)  # of an answer, and per step, when acceptance is measured at the end
DRY_RUN = Mode("--dry-run", "--dry-run")
WITH_LAYERS = Mode("a training run", "--features auto, memory or DIR")
# the target's layers run elsewhere, in a stream or in a live server, so no acceptance is measured at the end
WITHOUT_LAYERS = Mode("--features stream or URL", "--features stream or URL")


@dataclass(frozen=True, kw_only=True)
class TrainCommand(TrainOptions, OutputFlags):
    """What decides the loss curve, from TrainOptions, and where a run reads and writes."""

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
            "Source of the target's hidden states: auto, memory, a directory, stream, stream:DIR or a server URL."
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
    """(the command with what its --config file says where neither flag nor variable did, the file's counts of data
    that are not made yet, the options that came from the file). UsageError for a key that is no option, or a value
    that the option would refuse."""
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
    if unknown := sorted(set(values) - known):
        allowed = ", ".join(sorted(known | counts))
        raise UsageError(
            f"{command.config}: unknown training options {', '.join(unknown)}", f"known: {allowed}"
        )
    values = {key: value for key, value in values.items() if value is not None}
    read = made_of_file(TrainCommand, command.config, {"output": command.output, **values})
    found = {key: getattr(read, key) for key in values}
    chosen = {key: value for key, value in found.items() if key not in given(command)}
    return replace(command, **chosen), TrainingRecipe(**recipe), set(chosen)


def curve_options(command: TrainCommand) -> TrainOptions:
    """What decides the loss curve, checked."""
    layers = None if command.aux_layers is None else command.aux_layers.values
    return fill(TrainOptions, command, aux_layers=layers)


def train(command: TrainCommand) -> Result | None:
    """Train an Eagle3 draft head with ModelOpt on answers written by the target itself.

    The target runs once over the data; its hidden states are cached and reused in every epoch. An interrupted run
    leaves a usable head and is resumed when the command is repeated, with the same loss curve; a finished one can be
    extended by more epochs or steps. At the end, the acceptance of the head is measured on held-out prompts in the
    reference engine. Under torchrun, the processes share each batch.
    """
    typed, (command, recipe, from_file) = command, with_file(command)
    command = like_initial(command, given(typed) | from_file)
    features = feature_source(command.features)
    mode = DRY_RUN if command.dry_run else WITH_LAYERS if features.with_layers else WITHOUT_LAYERS
    command = checked(command, mode)
    for name in sorted(name for name in from_file if not uses(TrainCommand, name, mode)):
        where = f"{command.config}: {name} ({fields_of(TrainCommand)[name].typed})"
        raise UsageError(f"{where} is not used by {mode.name}", "remove it from the file")
    options = curve_options(command)
    if not command.target or not command.data:
        name = "DATA" if command.target else "TARGET"
        remedy = f"give it as an argument, or as `{name.lower()}:` in the --config file"
        raise UsageError(f"{name} is missing", remedy)
    deadline = None if command.max_time is None else time.monotonic() + 3600 * command.max_time
    run = fill(
        TrainingRun,
        command,
        target_dir=Path(),
        init=resolve(str(command.init)).directory if command.init else None,
        data=" ".join(command.data),
        deadline=deadline,
        again=command,
    )
    main = (
        os.environ.get("RANK", "0") == "0"
    )  # of the processes that torchrun starts, the one that writes and talks
    resumes = main and run_directory(run.output).check(run_options(run.output, run.again))
    if command.dry_run:
        from trtspec.heads.training.needs import dry_run
        from trtspec.specs import gpu_spec

        found = dry_run(
            command.target, command.data, features, run, options, recipe, gpu_spec(command.gpu)
        )
        return _needs(
            found | {"acceptance_prompts": command.acceptance_prompts, "resumes": resumes}
        )
    asked = mode is WITH_LAYERS and "acceptance_prompts" in given(typed) | from_file
    from trtspec.cli.doctor import require

    require("train")
    check_device(command.device)
    run = replace(run, target_dir=resolve(command.target).directory)
    record = _train(run, command.data, features, options, command.acceptance_prompts, asked)
    repeated = words(replace(typed, restart=False, force=False, dry_run=False))
    return _result(command.output, record, shlex.join(["trtspec", "train", *repeated]))


def _needs(found: dict[str, Any]) -> Result:
    """What a run would need: the ways to the target's states, then the commands that start an engine for them."""
    by_option = {"online": "memory", "stream": "stream[:DIR]", "dumps": "DIR", "server": "URL"}
    rows = [
        (by_option[name], str(way["gpus"]), f"{way['peak_bytes'] / 1e9:,.0f}", f"{way['disk_bytes'] / 1e9:,.0f}",
         way.get("why") or "possible")
        for name, way in found["ways"].items()
    ]  # fmt: skip
    layers = ", ".join(map(str, found["aux_layers"]))
    refused = sum(file["refused"] for file in found["files"])
    lines = [
        f"head    EAGLE-{found['eagle']} {found['attention'].upper()}, {found['parameters']:,} parameters",
        f"layers  {layers}",
        f"data    {found['samples']:,} samples, {found['tokens']:,} tokens, {found['steps']:,} steps"
        + f", {refused} rows refused" * bool(refused),
        f"states  {found['feature_bytes'] / 1e9:,.1f} GB",
        *(f"dumps by {engine}: {line}" for engine, line in found["dump_commands"].items()),
        *(f"server by {engine}: {line}" for engine, line in found["server_commands"].items()),
    ]
    columns = ("--features", "GPUs", "GB each", "GB of disk", "")
    table = Table(f"Ways on {found['gpu']}", columns, rows, text_columns=frozenset({0, 4}))
    return Result(found, tables=[table], lines=lines)


def like_initial(command: TrainCommand, chosen: set[str]) -> TrainCommand:
    """With the architecture of --init, but for what was chosen."""
    if command.init is None:
        return command
    from trtspec.checkpoint.hub import load_head

    head = load_head(str(command.init)).spec
    pruned = head.is_pruned
    theirs: dict[str, Any] = {
        "attention": head.attention,
        "eagle": head.eagle,
        "draft_vocab_size": head.draft_vocab_size if pruned else None,
        "intermediate_size": head.intermediate_size,
        "aux_layers": CountList(head.aux_layers) if head.aux_layers else None,
    }
    return replace(command, **{name: value for name, value in theirs.items() if name not in chosen})


def _train(
    run: TrainingRun,
    data: tuple[str, ...],
    features: FeatureSource,
    options: TrainOptions,
    prompts: int,
    asked: bool,
) -> dict[str, Any]:
    """Plans, trains and measures on `prompts`. Returns the record of the run in the main process, {} in the others.

    `asked`: the user gave --acceptance-prompts, so a measurement that is impossible is an error.
    """
    # OpenMP reads this when torch is loaded. Its threads wait busily, which stalls a run where cores are shared.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from trtspec.checkpoint.target_problems import require_target
    from trtspec.heads.training.plan import (
        check_run,
        make_plan,
    )  # only now: importing torch takes seconds
    from trtspec.heads.training.processes import process_group

    with process_group(run.device) as world:
        if not world.main:
            os.environ["TRTSPEC_QUIET"] = "1"
        options, spec = options.for_device(run.device), require_target(run.target_dir).spec
        plan = make_plan(run.target_dir, spec, data, options, features)
        check_run(run, plan, options)
        for line in plan.lines():
            say(line)
        if prompts and plan.features.with_layers and not plan.held_out:
            text = f"none of {len(plan.samples)} conversations is held out, so no acceptance is measured at the end"
            if asked:
                raise UsageError(
                    text, "give a larger --held-out or more data; or --acceptance-prompts 0"
                )
            say(text)

        from trtspec.heads.training.producers import open_target
        from trtspec.heads.training.run import (
            run_training,
            write_record,
        )  # ModelOpt takes many seconds

        model, whole = open_target(run.target_dir, plan, options.dtype, world.device(run.device))
        if not whole and asked and prompts:
            text = "--acceptance-prompts is not used where the target does not fit in memory beside its dumps"
            raise UsageError(text, "leave it out, serve both, then run `trtspec bench`")
        with progress_bar("training", plan.steps, "steps") as bar:
            record = run_training(
                run, model, plan, options, on_step=_shown(bar.advance), world=world
            )
    if not record or not prompts or not record["training"]["finished"]:
        return record
    if not whole:
        say(
            "Acceptance is not measured without the target's layers; serve both, then run `trtspec bench`"
        )
    elif record["held_out"]:
        held = [
            sample
            for sample in plan.samples
            if sample.id in set(record["held_out"]) and sample.prompt > 0
        ]
        record["acceptance"] = measure_acceptance(model, run, held[:prompts])
        write_record(run.output, plan.spec, record)
    return record


def measure_acceptance(
    model: KimiModel, run: TrainingRun, samples: Sequence[Sample]
) -> dict[str, Any]:
    """What the new head, drafting freely for greedy answers, has accepted on prompts that training never saw."""
    from trtspec.bench.statistics import by_category, summarize
    from trtspec.checkpoint.tokenizer import KimiTokenizer
    from trtspec.client.servers import TurnCounts
    from trtspec.engine.engine import Engine, EngineOptions, GenerationRequest
    from trtspec.models.head_weights import load_head
    from trtspec.models.precision import dtype_name

    say(f"Measuring acceptance on {len(samples)} held-out prompts")
    head = load_head(run.output, model, dtype=model.dtype, device=str(model.embed.weight.device))
    longest = max((sample.prompt for sample in samples), default=0) + ACCEPTANCE_TOKENS
    sizes = EngineOptions(DRAFTS, max_batch_size=8, max_seq_len=longest + DRAFTS)
    engine = Engine(model, head, sizes, tokenizer=KimiTokenizer(run.target_dir))
    done = engine.generate([
        GenerationRequest(sample.id, list(sample.tokens[: sample.prompt]), ACCEPTANCE_TOKENS) for sample in samples
    ])  # fmt: skip
    counts = []
    for sample in samples:
        answer = done[sample.id]
        stats, tokens = answer.stats, len(answer.token_ids)
        counted = stats.steps, stats.accepted, stats.drafted, tuple(stats.histogram)
        counts.append(
            TurnCounts(sample.id, sample.category or "", tokens, *counted, "the reference engine")
        )
    groups = {"all": summarize(counts)} | by_category(
        sorted((one for one in counts if one.category), key=lambda one: one.category)
    )
    rows = [
        {
            "category": name,
            "prompts": group.turns,
            "steps": group.steps or 0,
            "accepted": group.accepted or 0,
            "histogram": group.histogram or [],
            "acceptance_length": group.acceptance_length or 1.0,
            "acceptance_length_interval": group.acceptance_length_interval,  # 95 % over prompts; None for fewer than 3
            "by_position": group.cumulative or [],
        }
        for name, group in groups.items()
    ]
    about = {"draft_len": DRAFTS, "temperature": 0.0, "max_tokens": ACCEPTANCE_TOKENS}
    return {**about, "dtype": dtype_name(model.dtype), "prompts": len(samples), "rows": rows}


def _shown(advance: Callable[..., None]) -> Callable[[CurvePoint], None]:
    """Draws each step: the loss, and the agreement with the target at the first training-time-test steps."""
    done = 0

    def on_step(point: CurvePoint) -> None:
        nonlocal done
        shares = " ".join(f"{value:.2f}" for value in point.accuracy[:3])
        advance(point.step - done, f"loss {point.loss:.2f}  agree {shares}")
        done = point.step

    return on_step


def _result(output: Path, record: dict[str, Any], again: str) -> Result | None:
    """The end of a run, which the command `again` resumes; it fails where a signal ended it. None on the processes that
    do not write."""
    if not record:
        return None
    training = record["training"]
    values, lines = {"output": str(output), **record}, list(_lines(output, record))
    if training.get("finished", True):
        return Result(values, lines=lines)
    where = f"after step {training['steps']} of {training['total']}; {output} holds the head of that step"
    if training["stopped"] in ("SIGINT", "SIGTERM"):
        failure = Interrupted(f"stopped by {training['stopped']} {where}", f"resume with `{again}`")
        return Result(values, lines=lines, failure=failure)
    return Result(values, lines=lines, messages=[f"Time is up {where}. Resume with: {again}"])


def _lines(output: Path, record: dict[str, Any]) -> Iterator[str]:
    training = record["training"]
    shares = ", ".join(
        f"{value:.3f}" for value in training.get("held_out_accuracy", training["accuracy"])
    )
    yield f"head        {output}"
    yield f"parameters  {record['parameters']:,}"
    yield f"trained     {training['steps']} steps, {training['tokens_seen']:,} tokens"
    yield f"agreement   {shares} per training-time-test step"
    if estimate := training.get("estimated_acceptance_length"):
        yield f"estimate    {estimate:.3f} acceptance length on held-out answers, without generating"
    for row in record.get("acceptance", {}).get("rows", []):
        positions = ", ".join(f"{share:.2f}" for share in row["by_position"])
        where = f"{row['category']}, {row['prompts']} prompts; by draft {positions}"
        yield f"acceptance  {row['acceptance_length']:.3f}, 95 % interval {interval_text(row)} ({where})"
