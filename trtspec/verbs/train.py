"""Trains a head on a target's own answers, and measures it in the reference engine at the end."""

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

# when acceptance is measured at the end
ACCEPTANCE_TOKENS = 64  # per answer
DRAFTS = 3  # per step


def train_and_measure(
    run: TrainingRun,
    data: tuple[str, ...],
    features: FeatureSource,
    options: TrainOptions,
    prompts: int,
    asked: bool,
) -> TrainingRecord:
    """Plans, trains and measures on `prompts`.

    Returns the record of the run in the main process, {} in the others.
    `asked`: the user gave `acceptance_prompts`, so a measurement that is impossible is an error.
    """
    # OpenMP reads this when torch is loaded. Its threads wait busily, which stalls a run on shared
    # cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from trtspec.heads.training.ranks import process_group
    from trtspec.heads.training.training_plan import MEMORY_SHARE, check_run, make_plan

    target_dir = run.target_dir
    run_device = run.device
    with process_group(run_device) as ranks:
        device = ranks.device(run_device)
        if not ranks.main:
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

        # only now: importing ModelOpt takes many seconds
        from trtspec.heads.training.training_run import run_training, write_record
        from trtspec.models.stream import LayerStream
        from trtspec.models.weights import load_target

        # embeddings, final norm and lm_head suffice where the states come from elsewhere
        whole = features.with_layers
        if features.way == "dumps":
            stored = sum(path.stat().st_size for path in target_dir.glob("*.safetensors"))
            whole = stored <= MEMORY_SHARE * machine.free_memory()
        if whole:
            model = load_target(target_dir, dtype=options.dtype, device=device)
        else:
            with LayerStream(target_dir, dtype=options.dtype, device=device) as stream:
                model = stream.model_without_layers()
        if not whole and asked and prompts:
            text = (
                "`acceptance_prompts` is not used where the target does not fit in memory beside "
                "its dumps"
            )
            raise UsageError(text, "leave it out, serve both, then run `trtspec bench`")
        with progress_bar("training", plan.steps, "steps") as bar:

            def on_step(point: CurvePoint) -> None:
                """Draws the loss and the agreement at the first training-time-test steps."""
                shares = " ".join(f"{value:.2f}" for value in point.accuracy[:3])
                note = f"loss {point.loss:.2f}  agree {shares}"
                bar.update(completed=point.step, note=note)

            record = run_training(run, model, plan, options, on_step=on_step, ranks=ranks)
    if not record or not prompts or not record["training"]["finished"]:
        return record
    if not whole:
        say(
            "Acceptance is not measured without the target's layers; "
            "serve both, then run `trtspec bench`"
        )
    elif record["held_out"]:
        ids = set(record["held_out"])
        held = [sample for sample in plan.samples if sample.id in ids and sample.prompt > 0]
        record["acceptance"] = measure_acceptance(model, run, held[:prompts])
        write_record(run.output, plan.spec, record)
    return record


def measure_acceptance(
    model: KimiModel, run: TrainingRun, samples: Sequence[Sample]
) -> MeasuredAcceptance:
    """Measures the new head's acceptance in greedy answers to prompts that training never saw."""
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
    done = engine.generate(requests)
    counts = []
    for sample in samples:
        answer = done[sample.id]
        stats = answer.stats
        tokens = len(answer.token_ids)
        counted = stats.steps, stats.accepted, stats.drafted, tuple(stats.histogram)
        counts.append(
            TurnCounts(sample.id, sample.category or "", tokens, *counted, "the reference engine")
        )
    labelled = [turn for turn in counts if turn.category]
    labelled.sort(key=lambda turn: turn.category)
    groups = {"all": summarize(counts)} | by_category(labelled)
    rows: list[AcceptanceRow] = [
        {
            "category": name,
            "prompts": group.turns,
            "steps": group.steps or 0,
            "accepted": group.accepted or 0,
            "histogram": group.histogram or [],
            "acceptance_length": group.acceptance_length or 1.0,
            # 95 % over prompts; None for fewer than 3
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
