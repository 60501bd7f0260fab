"""The training loop: AdamW on ModelOpt's loss, warm-up and cosine decay, resumable at any moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trtspec.errors import TrtspecError
from trtspec.heads.batches import Batch, batches_of_epoch, collate, split_held_out
from trtspec.heads.features import Features
from trtspec.heads.options import TrainOptions
from trtspec.heads.plan import steps_of
from trtspec.heads.state import Curve, load_state, save_state
from trtspec.heads.train import TrainingModule, head_parameters, loss_and_accuracy

EVALUATIONS = 10  # held-out points of the learning curve
MAX_HELD_OUT = 64  # sequences per evaluation


@dataclass
class Point:
    """One step of the curve; `accuracy` is the top-1 agreement with the target per training-time-test step."""

    step: int
    total: int
    loss: float
    accuracy: list[float]
    tokens_per_second: float


@dataclass
class Result:
    """What a run ended with. `held_out` lists {step, loss, accuracy}; `tokens` counts real (not padded) ones."""

    steps: int
    tokens: int
    seconds: float
    held_out: list[dict[str, Any]] = field(default_factory=list)
    held_out_ids: list[str] = field(default_factory=list)


def train_head(
    model: TrainingModule,
    features: Features,
    options: TrainOptions,
    *,
    work: Path,
    curve_path: Path,
    fingerprint: dict[str, Any],
    save_every: int = 100,
    on_step: Callable[[Point], None] = lambda _: None,
) -> Result:
    """Trains in place. The state is saved to `work` every `save_every` steps; a rerun goes on from there and its curve
    is that of an uninterrupted run. Raises TrtspecError when the loss stops being a number."""
    train, held = split_held_out([s.id for s in features.samples], options.held_out, options.seed)
    lengths = [len(sample.tokens) for sample in features.samples]
    device = str(model.lm_head.weight.device)
    parameters = head_parameters(model)
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=True
    )
    done, position = load_state(work, parameters, optimizer, fingerprint)
    curve = Curve(curve_path)
    curve.cut(position)
    total = steps_of(len(train), options)
    every = max(1, total // EVALUATIONS)
    result = Result(total, 0, 0.0, held_out_ids=[features.samples[index].id for index in held])
    began = time.monotonic()
    for step, indices in _plan(lengths, train, options, total):
        if step <= done:
            continue
        batch = collate(features, indices, options.answer_only, device)
        point = _step(model, batch, parameters, optimizer, options, step, total)
        result.tokens += batch.real_tokens
        point.tokens_per_second = result.tokens / (time.monotonic() - began)
        curve.write({"step": step, "loss": point.loss, "accuracy": point.accuracy, "tokens": batch.real_tokens})
        on_step(point)
        if held and (step % every == 0 or step == total):
            curve.write({"step": step, "held_out": evaluate(model, features, held[:MAX_HELD_OUT], options)})
        if step % save_every == 0 or step == total:
            save_state(work, parameters, optimizer, step=step, position=curve.position, fingerprint=fingerprint)
    curve.close()
    result.seconds = time.monotonic() - began
    return result


def _plan(lengths: list[int], train: list[int], options: TrainOptions, total: int) -> Iterator[tuple[int, list[int]]]:
    """(step from 1, sample indices), epoch after epoch until `total` steps."""
    step = epoch = 0
    while step < total:
        for indices in batches_of_epoch(lengths, train, options.batch_size, options.seed, epoch)[: total - step]:
            step += 1
            yield step, indices
        epoch += 1


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Linear warm-up over `warmup` of the steps, then half a cosine down to zero."""
    rising = max(1, round(warmup * total))
    if step <= rising:
        return peak * step / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


def _step(
    model: TrainingModule,
    batch: Batch,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    options: TrainOptions,
    step: int,
    total: int,
) -> Point:
    rate = learning_rate(step, total, options.peak_lr(model.lm_head.in_features), options.warmup)
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=options.precision == "bf16"):
        loss, accuracy = loss_and_accuracy(model, batch.tokens, batch.hidden, batch.aux, batch.loss_mask)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters.values(), options.grad_clip)
    if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
        raise TrtspecError(
            f"TS-TRAIN-DIVERGED the loss at step {step} is {loss.item()}, the gradient norm {norm.item()}",
            "train again with a smaller --lr",
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Point(step, total, loss.item(), accuracy, 0.0)


@torch.no_grad()
def evaluate(model: TrainingModule, features: Features, indices: list[int], options: TrainOptions) -> dict[str, Any]:
    """Loss and per-step accuracy on held-out samples, averaged over batches by their counted positions."""
    weight, loss_sum, correct = 0.0, 0.0, [0.0] * options.ttt_steps
    ordered = sorted(indices, key=lambda index: len(features.samples[index].tokens))
    for begin in range(0, len(ordered), options.batch_size):
        batch = collate(features, ordered[begin : begin + options.batch_size], options.answer_only, str(model.device))
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            loss, accuracy = loss_and_accuracy(model, batch.tokens, batch.hidden, batch.aux, batch.loss_mask)
        counted = float(batch.loss_mask.sum())
        weight += counted
        loss_sum += counted * loss.item()
        correct = [total + counted * value for total, value in zip(correct, accuracy, strict=True)]
    scale = max(weight, 1.0)
    return {"loss": loss_sum / scale, "accuracy": [value / scale for value in correct]}
