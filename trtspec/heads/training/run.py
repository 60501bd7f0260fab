"""One training run from data to a written head: what `trtspec train` does, without its command line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.read import head_spec
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.heads.data.samples import Sample, coverage, draft_vocabulary
from trtspec.heads.training import module as train
from trtspec.heads.training.features import Features, compute_features, empty_features, write_dumps
from trtspec.heads.training.features_server import ServedFeatures, served_model
from trtspec.heads.training.features_stream import refuse_several, stream_features
from trtspec.heads.training.loop import ALONE, Result, train_head
from trtspec.heads.training.options import Dumped, Served, Streamed, TrainingRun, TrainOptions
from trtspec.heads.training.plan import TrainingPlan
from trtspec.heads.training.processes import World
from trtspec.heads.training.state import CurvePoint, KeptState, write_head, write_record
from trtspec.models.stream import LayerStream
from trtspec.progress import progress_bar
from trtspec.report import file_sha256, provenance
from trtspec.specs import HeadSpec, ModelSpec

if TYPE_CHECKING:
    from trtspec.models.kimi import KimiModel


def gather_features(model: KimiModel, plan: TrainingPlan, world: World = ALONE) -> Features:
    """The states of all samples: from dumps where they exist, else computed (and dumped when a directory was given)."""
    if plan.dumped is not None:
        return plan.dumped
    with progress_bar("states of the target", plan.tokens / world.size, "tokens") as bar:
        features = _compute_together(model, plan.samples, plan.spec.aux_layers or (), bar.advance, world)
    if isinstance(plan.features, Dumped) and world.main:
        write_dumps(features, plan.features.directory)
    return features


def _compute_together(
    model: KimiModel, samples: list[Sample], layers: tuple[int, ...], advance: Callable[[int], None], world: World
) -> Features:
    """Each process runs the target over its part of the samples and hears the states of the others."""
    if world.size == 1:
        return compute_features(model, samples, layers, advance)
    bounds = [len(samples) * rank // world.size for rank in range(world.size + 1)]
    mine = compute_features(model, samples[bounds[world.rank] : bounds[world.rank + 1]], layers, advance)
    whole = empty_features(samples, model.spec.hidden_size, len(layers))
    for source in range(world.size):
        rows = slice(whole.offsets[bounds[source]], whole.offsets[bounds[source + 1]])
        if source == world.rank:
            whole.hidden[rows], whole.aux[rows] = mine.hidden, mine.aux
        for part in (whole.hidden[rows], whole.aux[rows]):
            world.broadcast(part.view(torch.uint8), source)  # gloo knows no bf16
    return whole


def run_training(
    run: TrainingRun,
    model: KimiModel,
    plan: TrainingPlan,
    options: TrainOptions,
    *,
    on_step: Callable[[CurvePoint], None] = lambda _: None,
    world: World = ALONE,
) -> dict[str, Any]:
    """Trains and writes the head to the run's output; returns its provenance record, `held_out` (sample ids) included.

    An interrupted run continues from its last saved state when called again with the same arguments. In a group of
    processes all train and the main one writes. With streamed or served states the model may lack its decoder layers.
    """
    options = options.for_device(run.device)
    ids = _draft_ids(plan, options, model.spec)
    module = _fresh_module(plan.spec, model, options, ids, world)
    if run.init is not None:
        train.load_head_tensors(module, initial_tensors(run.init))
    source = _source(run.target_dir, plan.samples, run.init)
    kept = KeptState(run.work, run.curve, {"options": options.to_dict(), **source}, run.save_every)
    with closing(_features(run, model, plan, options, world)) as features:
        result = train_head(module, features, options, kept, on_step=on_step, world=world)
    tensors = train.head_tensors(module, whole=world.whole)
    if not world.main:
        return {}
    write_head(run.output, tensors, plan.spec, model.spec)
    training = _summary_of_run(run.curve, plan, options, result, ids) | {
        "processes": world.size, "sharded": world.sharded
    }  # fmt: skip
    named = {"target": run.target_dir.name, "data": run.data.name}
    record = provenance(
        "train", named | _renamed(source), options.to_dict(),
        parameters=plan.parameters, training=training, held_out=result.held_out_ids,
    )  # fmt: skip
    write_record(run.output, plan.spec, record)
    shutil.rmtree(run.work, ignore_errors=True)
    return record


def _features(run: TrainingRun, model: KimiModel, plan: TrainingPlan, options: TrainOptions, world: World) -> Features:
    """The states of all samples, or a promise of them: a stream makes, a server sends them while training."""
    match plan.features:
        case Served(urls):
            longest = max(len(sample.tokens) for sample in plan.samples)
            client = partial(train.state_client, urls, served_model(urls[0]), longest)
            client()  # what is missing is missed before the run begins
            return ServedFeatures(plan.samples, model.spec, plan.spec.num_aux, model.norm, client)
        case Streamed():
            refuse_several(world.size)
            where = {"device": str(model.embed.weight.device), "threads": min(8, torch.get_num_threads())}
            stream = LayerStream(run.target_dir, dtype=model.dtype, **where)  # type: ignore[arg-type]
            return stream_features(stream, plan, options, run.work, _target_digest(run.target_dir))
    return gather_features(model, plan, world)


def _source(target_dir: Path, samples: list[Sample], init: Path | None) -> dict[str, Any]:
    """Digests of what the run starts from; a resumed run must find the same."""
    return {
        "data": _data_digest(samples),
        "target": _target_digest(target_dir),
        "init": file_sha256(init / "model.safetensors") if init else None,
    }


def _renamed(source: dict[str, Any]) -> dict[str, Any]:
    """The digests under their names in provenance.json."""
    return {"target_config": source["target"], "data_sha256": source["data"], "init_sha256": source["init"]}


def _summary_of_run(
    curve: Path, plan: TrainingPlan, options: TrainOptions, result: Result, ids: list[int] | None
) -> dict[str, Any]:
    training = summary(curve) | {
        "samples": len(plan.samples) - len(result.held_out_ids),
        "held_out": len(result.held_out_ids),
        "steps": result.steps,
        "seconds": round(result.seconds, 2),
        "peak_lr": options.peak_lr(plan.spec.hidden_size),
    }
    if ids is not None:
        training["draft_vocabulary_coverage"] = coverage(plan.samples, ids)
    return training


def _fresh_module(
    spec: HeadSpec, model: KimiModel, options: TrainOptions, ids: list[int] | None, world: World
) -> train.TrainingModule:
    """ModelOpt's module with the head's initial weights, which depend on the seed alone."""
    torch.manual_seed(options.seed)
    device = model.embed.weight.device
    return train.build(
        spec,
        model.spec,
        model.embed.weight.to(device, options.dtype),
        model.lm_head.weight.to(device, options.dtype),
        ttt_steps=options.ttt_steps,
        target_ids=None if ids is None else torch.tensor(ids, device=device),
        total=world.sum,
    )


def _draft_ids(plan: TrainingPlan, options: TrainOptions, target: ModelSpec) -> list[int] | None:
    if not plan.spec.has_d2t:
        return None
    return draft_vocabulary(plan.samples, plan.spec.draft_vocab_size, target.vocab_size)


def initial_tensors(head: Path) -> dict[str, torch.Tensor]:
    """Tensors of an existing head in ModelOpt's names, whichever of the two namings it has.

    Raises TrtspecError for a head in which `trtspec inspect` finds an error.
    """
    checkpoint = Checkpoint.open(head)
    head_spec(checkpoint, values=True)
    stored = LazyTensors(checkpoint)
    drop = ("embed_tokens.weight", "t2d")
    named = {name.replace("midlayer.", "layers.0."): stored[name] for name in stored.names() if name not in drop}
    return {name: value.float() if value.is_floating_point() else value for name, value in named.items()}


def _data_digest(samples: list[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(repr((sample.id, sample.tokens)).encode())
    return digest.hexdigest()


def _target_digest(target_dir: Path) -> str:
    """Config and the sizes of the weight files: enough to notice another target without reading a terabyte."""
    digest = hashlib.sha256((target_dir / "config.json").read_bytes())
    for path in sorted(target_dir.glob("*.safetensors")):
        digest.update(f"{path.name}:{os.path.getsize(path)}".encode())
    return digest.hexdigest()


def summary(curve: Path) -> dict[str, Any]:
    """Averages over the last twentieth of the curve, the tokens of all of it, and its last held-out point."""
    rows = [json.loads(line) for line in curve.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "loss" in row]
    held = [{"step": row["step"], **row["held_out"]} for row in rows if "held_out" in row]
    last = steps[-max(1, len(steps) // 20) :]
    found = {
        "tokens_seen": sum(row["tokens"] for row in steps),
        "loss": sum(row["loss"] for row in last) / len(last),
        "accuracy": [sum(values) / len(last) for values in zip(*(row["accuracy"] for row in last), strict=True)],
    }
    if held:
        found |= {"held_out_loss": held[-1]["loss"], "held_out_accuracy": held[-1]["accuracy"], "curve": held}
    return found
