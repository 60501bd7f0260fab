"""What a training run will do and need, known before a state is computed or ModelOpt imported."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import UsageError
from trtspec.heads.data.samples import Sample
from trtspec.heads.training.batches import TrainingData, read_mixture, split_data, steps_of
from trtspec.heads.training.features import Features, all_dumps, bytes_per_token, check_room, find_dumps, states_of
from trtspec.heads.training.options import (
    DataFiles,
    Dumped,
    FeatureSource,
    InMemory,
    TrainingRecipe,
    TrainOptions,
    new_head_spec,
)
from trtspec.models.eagle3 import Eagle3Head
from trtspec.specs import HeadSpec, ModelSpec

MEMORY_SHARE = 0.5  # of the free memory that --features auto may fill with states
GEMM_EFFICIENCY = 0.35  # of a bare matrix multiplication's rate that a training step reaches (measured, hidden 256)


@dataclass
class TrainingPlan:
    """What a run will do, known before any state is computed."""

    spec: HeadSpec
    samples: list[Sample]
    tokens: int
    steps: int
    parameters: int
    feature_bytes: int
    features: FeatureSource
    data: TrainingData | None = None  # which samples make up which step; None in a plan made without the data
    files: list[dict[str, Any]] = field(default_factory=list)  # what became of each data file
    counted: int | None = None  # samples of a plan made without the data
    dumped: Features | None = None  # the states, where a directory holds them already

    def to_dict(self) -> dict[str, Any]:
        return {
            "attention": self.spec.attention,
            "eagle": self.spec.eagle,
            "aux_layers": list(self.spec.aux_layers or ()),
            "draft_vocab_size": self.spec.draft_vocab_size,
            "samples": len(self.samples) if self.counted is None else self.counted,
            "tokens": self.tokens,
            "steps": self.steps,
            "parameters": self.parameters,
            "feature_bytes": self.feature_bytes,
            "features": str(self.features),
            "held_out": len(self.data.held) if self.data else None,
            "files": self.files,
        }


def make_plan(
    target_dir: Path, target: ModelSpec, data: DataFiles | Path, options: TrainOptions, features: FeatureSource
) -> TrainingPlan:
    """Reads and tokenizes the data and sizes everything. `data` may be a directory of ModelOpt dumps."""
    spec = _head_spec(target, options)
    of = states_of(target_dir, spec.aux_layers or ())
    data = data if isinstance(data, DataFiles) else DataFiles(((str(data), 1.0),))
    dumped: Features | None
    told: list[dict[str, Any]] = []
    if directory := data.directory:
        dumped, features = all_dumps(directory, target, spec.num_aux, of), Dumped(directory)
        samples, chosen = dumped.samples, split_data(dumped.samples, options)
    else:
        mixture = read_mixture(data, KimiTokenizer(target_dir), options)
        samples, chosen, told = mixture.samples, mixture.data, mixture.told
        named = features.directory if isinstance(features, Dumped) else None
        dumped = find_dumps(samples, named, target, spec.num_aux, of) if named else None
        if dumped:  # of other tokens than ours, where the engine cut or rendered otherwise
            samples = dumped.samples
            chosen = replace(chosen, order=replace(chosen.order, lengths=[len(sample.tokens) for sample in samples]))
    tokens = sum(len(sample.tokens) for sample in samples)
    size = tokens * bytes_per_token(target, spec.num_aux)
    if isinstance(features, Dumped) and dumped is None:
        check_room(features.directory, size, tokens)
    bounded = isinstance(features, InMemory) and features.bounded
    if bounded and size > MEMORY_SHARE * psutil.virtual_memory().available:
        raise UsageError(
            f"the states of {tokens:,} tokens take {size / 2**30:.1f} GiB, more than half of the free memory",
            "pass --features DIR to keep them on disk, or less data",
        )
    where = InMemory() if bounded else features
    steps = chosen.order.total
    return TrainingPlan(spec, samples, tokens, steps, _count(spec), size, where, chosen, told, dumped=dumped)


def plan_without_data(
    target: ModelSpec, options: TrainOptions, recipe: TrainingRecipe, data: Path, features: FeatureSource
) -> TrainingPlan:
    """The sizes of a run whose target or data are not on this machine, from the recipe's counts; `samples` stays
    empty. UsageError when the recipe does not tell them."""
    if recipe.samples is None or recipe.mean_tokens is None:
        raise UsageError(
            f"the target or {data} is not on this machine, so its tokens cannot be counted",
            "put `samples:` and `mean_tokens:` into the --config file, or fetch both first",
        )
    spec = _head_spec(target, options)
    tokens = recipe.samples * min(recipe.mean_tokens, options.seq_len)
    training = round(recipe.samples * (1 - options.held_out))
    size = tokens * bytes_per_token(target, spec.num_aux)
    return TrainingPlan(
        spec, [], tokens, steps_of(training, options), _count(spec), size, features, counted=recipe.samples
    )


def _head_spec(target: ModelSpec, options: TrainOptions) -> HeadSpec:
    return new_head_spec(
        target,
        attention=options.attention,
        eagle=options.eagle,
        draft_vocab_size=options.draft_vocab_size,
        intermediate_size=options.intermediate_size,
        aux_layers=options.aux_layers,
    )


def _count(spec: HeadSpec) -> int:
    """Trainable parameters: the head's own, without the target's embedding."""
    with torch.device("meta"):
        head = Eagle3Head(spec)
    return sum(value.numel() for name, value in head.named_parameters() if not name.startswith("embed."))


def estimated_seconds(plan: TrainingPlan, options: TrainOptions) -> float:
    """Training time on this machine: 6 FLOP per parameter, token and training-time-test step, at the rate of a small
    matrix multiplication timed here. States of the target are not counted."""
    per_pass = plan.tokens * 6 * plan.parameters * options.ttt_steps
    passes = plan.steps * options.batch_size * options.accumulation / max(1, len(plan.samples))
    left, right = (torch.ones(shape, dtype=options.dtype) for shape in ((1024, 512), (512, 1024)))
    torch.mm(left, right)
    began, rounds = time.perf_counter(), 10
    for _ in range(rounds):
        torch.mm(left, right)
    rate = rounds * 2 * 1024 * 512 * 1024 / (time.perf_counter() - began)
    return per_pass * passes / (rate * GEMM_EFFICIENCY)
