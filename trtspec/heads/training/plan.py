"""What a training run will do and need, known before a state is computed or ModelOpt imported."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import UsageError
from trtspec.heads.data.samples import Sample, read_samples
from trtspec.heads.training.batches import split_held_out
from trtspec.heads.training.features import Features, all_dumps, bytes_per_token, find_dumps
from trtspec.heads.training.options import (
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
        }


def make_plan(
    target_dir: Path, target: ModelSpec, data: Path, options: TrainOptions, features: FeatureSource
) -> TrainingPlan:
    """Reads and tokenizes the data and sizes everything. `data` may be a directory of ModelOpt dumps."""
    spec = _head_spec(target, options)
    dumped: Features | None
    if data.is_dir():
        dumped, features = all_dumps(data, target, spec.num_aux), Dumped(data)
        samples = dumped.samples
    else:
        samples = read_samples(data, KimiTokenizer(target_dir), options.seq_len)
        named = features.directory if isinstance(features, Dumped) else None
        dumped = find_dumps(samples, named, target, spec.num_aux) if named else None
    tokens = sum(len(sample.tokens) for sample in samples)
    size = tokens * bytes_per_token(target, spec.num_aux)
    bounded = isinstance(features, InMemory) and features.bounded
    if bounded and size > MEMORY_SHARE * psutil.virtual_memory().available:
        raise UsageError(
            f"the states of {tokens:,} tokens take {size / 2**30:.1f} GiB, more than half of the free memory",
            "pass --features DIR to keep them on disk, or less data",
        )
    where = InMemory() if bounded else features
    steps = steps_of(_training_samples(samples, options), options)
    return TrainingPlan(spec, samples, tokens, steps, _count(spec), size, where, dumped=dumped)


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
    return TrainingPlan(spec, [], tokens, steps_of(training, options), _count(spec), size, features, recipe.samples)


def _head_spec(target: ModelSpec, options: TrainOptions) -> HeadSpec:
    return new_head_spec(
        target,
        attention=options.attention,
        eagle=options.eagle,
        draft_vocab_size=options.draft_vocab_size,
        intermediate_size=options.intermediate_size,
        aux_layers=options.aux_layers,
    )


def _training_samples(samples: list[Sample], options: TrainOptions) -> int:
    return len(split_held_out([sample.id for sample in samples], options.held_out, options.seed)[0])


def _count(spec: HeadSpec) -> int:
    """Trainable parameters: the head's own, without the target's embedding."""
    with torch.device("meta"):
        head = Eagle3Head(spec)
    return sum(value.numel() for name, value in head.named_parameters() if not name.startswith("embed."))


def steps_of(samples: int, options: TrainOptions) -> int:
    """Optimizer steps of the whole run, epochs counted in whole batches."""
    return options.steps or options.epochs * math.ceil(samples / options.batch_size)


def estimated_seconds(plan: TrainingPlan, options: TrainOptions) -> float:
    """Training time on this machine: 6 FLOP per parameter, token and training-time-test step, at the rate of a small
    matrix multiplication timed here. States of the target are not counted."""
    per_pass = plan.tokens * 6 * plan.parameters * options.ttt_steps
    passes = plan.steps * options.batch_size / max(1, len(plan.samples))
    left, right = (torch.ones(shape, dtype=options.dtype) for shape in ((1024, 512), (512, 1024)))
    torch.mm(left, right)
    began, rounds = time.perf_counter(), 10
    for _ in range(rounds):
        torch.mm(left, right)
    rate = rounds * 2 * 1024 * 512 * 1024 / (time.perf_counter() - began)
    return per_pass * passes / (rate * GEMM_EFFICIENCY)
