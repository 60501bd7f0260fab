"""Trains a head on a target's own answers, and measures its acceptance in the reference engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtspec import machine
from trtspec.checkpoint.target_problems import require_target
from trtspec.errors import UsageError
from trtspec.heads.training.train_options import FeatureSource, TrainingRun, TrainOptions
from trtspec.report import progress_bar, say

if TYPE_CHECKING:
    from trtspec.heads.training.curve import CurvePoint
    from trtspec.heads.training.samples import Sample
    from trtspec.heads.training.training_record import (
        AcceptanceRow,
        MeasuredAcceptance,
        TrainingRecord,
    )
    from trtspec.models.k2 import KimiModel

# settings of the final acceptance measurement
ACCEPTANCE_TOKENS = 64  # maximum tokens of an answer
DRAFTS = 3  # tokens drafted per verification step


def train_and_measure(
    run: TrainingRun,
    data: tuple[str, ...],
    features: FeatureSource,
    options: TrainOptions,
    prompts: int,
    asked: bool,
) -> TrainingRecord:
    """Trains a head, and measures its acceptance. Returns the record of the training run.

    The record is empty in all processes but the main one.

    data: files or directories of conversations.
    features: source of the target's hidden states.
    prompts: number of held-out prompts for the acceptance measurement. 0 for no measurement.
    asked: whether the user chose `prompts`. An impossible measurement is then an error.
    """
    # OpenMP reads the variable when torch is loaded. By default its threads wait in a busy loop,
    # which stalls training on shared cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from trtspec.heads.training.ranks import process_group
    from trtspec.heads.training.training_plan import MEMORY_SHARE, check_run, make_plan

    target_dir = run.target_dir
    run_device = run.device
    with process_group(run_device) as ranks:
        device = ranks.device(run_device)
        if not ranks.main:
            # only the main process writes messages
            os.environ["TRTSPEC_QUIET"] = "1"
        options = options.for_device(run_device)
        spec = require_target(target_dir).spec
        plan = make_plan(target_dir, spec, data, options, features)
        check_run(run, plan, options)
        for line in plan.lines():
            say(line)
        if prompts and features.with_layers and not plan.held_out:
            text = (
                f"none of {len(plan.samples)} conversations is held out, "
                "so no acceptance is measured at the end"
            )
            if asked:
                remedy = "give a larger `held_out` or more data; or `acceptance_prompts` 0"
                raise UsageError(text, remedy)
            say(text)

        # after the checks, because importing ModelOpt takes many seconds
        from trtspec.heads.training.training_run import run_training, write_record
        from trtspec.models.stream import LayerStream
        from trtspec.models.weights import load_target

        has_layers = features.with_layers
        if features.way == "dumps":
            # training reads the states from disk, but the acceptance measurement runs the layers
            stored_bytes = sum(path.stat().st_size for path in target_dir.glob("*.safetensors"))
            has_layers = stored_bytes <= MEMORY_SHARE * machine.free_memory()
        if has_layers:
            model = load_target(target_dir, dtype=options.dtype, device=device)
        else:
            with LayerStream(target_dir, dtype=options.dtype, device=device) as stream:
                model = stream.model_without_layers()
        if not has_layers and asked and prompts:
            text = (
                "`acceptance_prompts` is not used if the target does not fit in memory beside "
                "its dumps"
            )
            raise UsageError(text, "leave it out, serve both, then run `trtspec bench`")
        with progress_bar("training", plan.steps, "steps") as bar:

            def on_step(point: CurvePoint) -> None:
                """Shows a step's loss, and its agreement at the first training-time-test steps."""
                shares = " ".join(f"{value:.2f}" for value in point.accuracy[:3])
                note = f"loss {point.loss:.2f}  agree {shares}"
                bar.update(completed=point.step, note=note)

            record = run_training(run, model, plan, options, on_step=on_step, ranks=ranks)
    if not record or not prompts or not record["training"]["finished"]:
        return record
    if not has_layers:
        say(
            "Acceptance is not measured without the target's layers; "
            "serve both, then run `trtspec bench`"
        )
    elif record["held_out"]:
        ids = set(record["held_out"])
        # a sample without a prompt gives the engine nothing to answer
        held_out = [sample for sample in plan.samples if sample.id in ids and sample.prompt > 0]
        record["acceptance"] = measure_acceptance(model, run, held_out[:prompts])
        write_record(run.output, plan.spec, record)
    return record


def measure_acceptance(
    model: KimiModel, run: TrainingRun, samples: Sequence[Sample]
) -> MeasuredAcceptance:
    """Measures the acceptance of a trained head in greedy answers of the reference engine.

    samples: held-out samples, whose prompts are answered.
    """
    from trtspec.bench.statistics import by_category, summarize
    from trtspec.checkpoint.tokenizer import KimiTokenizer
    from trtspec.client.servers import TurnCounts
    from trtspec.engine.engine import Engine, EngineOptions
    from trtspec.engine.request import GenerationRequest
    from trtspec.models.head_weights import load_head
    from trtspec.models.precision import dtype_name

    say(f"Measuring acceptance on {len(samples)} held-out prompts")
    head = load_head(run.output, model, dtype=model.dtype, device=str(model.embed.weight.device))
    longest = max((sample.prompt for sample in samples), default=0) + ACCEPTANCE_TOKENS
    sizes = EngineOptions(DRAFTS, max_batch_size=8, max_seq_len=longest + DRAFTS)
    engine = Engine(model, head, sizes, tokenizer=KimiTokenizer(run.target_dir))
    requests = [
        GenerationRequest(sample.id, list(sample.tokens[: sample.prompt]), ACCEPTANCE_TOKENS)
        for sample in samples
    ]
    answers = engine.generate(requests)
    counts = []
    for sample in samples:
        answer = answers[sample.id]
        stats = answer.stats
        turn_counts = TurnCounts(
            sample.id,
            sample.category or "",
            len(answer.token_ids),
            stats.steps,
            stats.accepted,
            stats.drafted,
            tuple(stats.histogram),
            "the reference engine",
        )
        counts.append(turn_counts)
    categorized = [turn for turn in counts if turn.category]
    categorized.sort(key=lambda turn: turn.category)
    groups = {"all": summarize(counts)} | by_category(categorized)
    rows: list[AcceptanceRow] = [
        {
            "category": name,
            "prompts": group.turns,
            "steps": group.steps or 0,
            "accepted": group.accepted or 0,
            "histogram": group.histogram or [],
            "acceptance_length": group.acceptance_length or 1.0,
            # 95 % confidence interval over prompts; None for fewer than 3 prompts
            "acceptance_length_interval": group.acceptance_length_interval,
            "by_position": group.cumulative or [],
        }
        for name, group in groups.items()
    ]
    return {
        "draft_len": DRAFTS,
        "temperature": 0.0,
        "max_tokens": ACCEPTANCE_TOKENS,
        "dtype": dtype_name(model.dtype),
        "prompts": len(samples),
        "rows": rows,
    }
