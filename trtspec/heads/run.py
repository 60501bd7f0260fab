"""One training run from data to a written head: what `trtspec train` does, without its command line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.heads import train
from trtspec.heads.data import Sample, coverage, draft_vocabulary
from trtspec.heads.export import write_head, write_record
from trtspec.heads.features import Features, compute_features, dump_path, read_dumps, write_dumps
from trtspec.heads.loop import Point, train_head
from trtspec.heads.options import WORK_NAME, TrainOptions
from trtspec.heads.plan import Plan
from trtspec.heads.progress import progress_bar
from trtspec.report import file_sha256, provenance
from trtspec.specs import HeadSpec, ModelSpec

if TYPE_CHECKING:
    from trtspec.models.kimi import KimiModel


def gather_features(model: KimiModel, plan: Plan) -> Features:
    """The states of all samples: from dumps where they exist, else computed (and dumped when a directory was given)."""
    layers = plan.spec.aux_layers or ()
    directory = None if plan.features == "memory" else Path(plan.features)
    if directory and directory.is_dir() and all(dump_path(directory, s).exists() for s in plan.samples):
        return read_dumps(directory, model.spec, len(layers))
    with progress_bar("states of the target", plan.tokens, "tokens") as advance:
        features = compute_features(model, plan.samples, layers, advance)
    if directory:
        write_dumps(features, directory)
    return features


def run_training(
    target_dir: Path,
    model: KimiModel,
    plan: Plan,
    options: TrainOptions,
    output: Path,
    *,
    data: Path,
    init: Path | None = None,
    save_every: int = 100,
    device: str = "cpu",
    on_step: Callable[[Point], None] = lambda _: None,
) -> dict[str, Any]:
    """Trains and writes the head to `output`; returns its provenance record, `held_out` (sample ids) included.

    An interrupted run continues from its last saved state when called again with the same arguments.
    """
    spec, work = plan.spec, output / WORK_NAME
    ids = _draft_ids(plan, options, model.spec)
    module = _fresh_module(spec, model, options, ids, device)
    if init is not None:
        train.load_head_tensors(module, initial_tensors(init))
    fingerprint = {
        "options": options.to_dict(),
        "data": _data_digest(plan.samples),
        "target": _target_digest(target_dir),
        "init": file_sha256(init / "model.safetensors") if init else None,
    }
    features = gather_features(model, plan)
    result = train_head(
        module,
        features,
        options,
        work=work,
        curve_path=output / "training.jsonl",
        fingerprint=fingerprint,
        save_every=save_every,
        on_step=on_step,
    )
    write_head(output, train.head_tensors(module), spec, model.spec)
    training = summary(output / "training.jsonl") | {
        "samples": len(plan.samples) - len(result.held_out_ids),
        "held_out": len(result.held_out_ids),
        "steps": result.steps,
        "seconds": round(result.seconds, 2),
        "peak_lr": options.peak_lr(spec.hidden_size),
    }
    if ids is not None:
        training["draft_vocabulary_coverage"] = coverage(plan.samples, ids)
    record = provenance(
        "train",
        {
            "target": target_dir.name,
            "target_config": fingerprint["target"],
            "data": data.name,
            "data_sha256": fingerprint["data"],
        },
        options.to_dict(),
        parameters=plan.parameters,
        training=training,
        held_out=result.held_out_ids,
    )
    write_record(output, spec, record)
    shutil.rmtree(work, ignore_errors=True)
    return record


def _fresh_module(
    spec: HeadSpec, model: KimiModel, options: TrainOptions, ids: list[int] | None, device: str
) -> train.TrainingModule:
    """ModelOpt's module with the head's initial weights, which depend on the seed alone."""
    torch.manual_seed(options.seed)
    frozen = torch.bfloat16 if options.precision == "bf16" else torch.float32
    return train.build(
        spec,
        model.spec,
        model.embed.weight.to(device, frozen),
        model.lm_head.weight.to(device, frozen),
        ttt_steps=options.ttt_steps,
        target_ids=None if ids is None else torch.tensor(ids, device=device),
    )


def _draft_ids(plan: Plan, options: TrainOptions, target: ModelSpec) -> list[int] | None:
    if not plan.spec.has_d2t:
        return None
    return draft_vocabulary(plan.samples, plan.spec.draft_vocab_size, target.vocab_size)


def initial_tensors(head: Path) -> dict[str, torch.Tensor]:
    """Tensors of an existing head in ModelOpt's names, whichever of the two namings it has."""
    stored = LazyTensors(Checkpoint.open(head))
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
    held = [row["held_out"] for row in rows if "held_out" in row]
    last = steps[-max(1, len(steps) // 20) :]
    found = {
        "tokens_seen": sum(row["tokens"] for row in steps),
        "loss": sum(row["loss"] for row in last) / len(last),
        "accuracy": [sum(values) / len(last) for values in zip(*(row["accuracy"] for row in last), strict=True)],
    }
    if held:
        found |= {"held_out_loss": held[-1]["loss"], "held_out_accuracy": held[-1]["accuracy"]}
    return found
