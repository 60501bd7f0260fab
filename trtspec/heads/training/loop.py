"""The training loop: AdamW on ModelOpt's loss, warm-up and cosine decay, resumable at any moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trtspec.errors import TrtspecError
from trtspec.heads.training.batches import batches_of_epoch, collate, split_held_out
from trtspec.heads.training.features import Features
from trtspec.heads.training.module import Objective, TrainingModule, head_parameters
from trtspec.heads.training.options import TrainOptions
from trtspec.heads.training.plan import steps_of
from trtspec.heads.training.processes import World
from trtspec.heads.training.state import Curve, CurvePoint, KeptState, load_state, save_state, state_tensors

EVALUATIONS = 10  # held-out points of the learning curve
MAX_HELD_OUT = 64  # sequences per evaluation
ALONE = World()


@dataclass
class Result:
    """What a run ended with. `tokens` counts real (not padded) ones of this process's life."""

    steps: int
    tokens: int
    seconds: float
    held_out_ids: list[str] = field(default_factory=list)


def train_head(
    model: TrainingModule,
    features: Features,
    options: TrainOptions,
    kept: KeptState,
    *,
    on_step: Callable[[CurvePoint], None] = lambda _: None,
    world: World = ALONE,
) -> Result:
    """Trains in place. The state is saved as `kept` says; a rerun goes on from there and its curve
    is that of an uninterrupted run. Raises TrtspecError when the loss stops being a number."""
    train, held = split_held_out([s.id for s in features.samples], options.held_out, options.seed)
    total = steps_of(len(train), options)
    every = max(1, total // EVALUATIONS)
    stepper = Stepper(model, features, options, total, world)
    done, position = load_state(kept.work, stepper.parameters, stepper.optimizer, kept.fingerprint)
    world.wait()  # nobody saves before everybody has read
    curve = Curve(kept.curve, position) if world.main else None
    result = Result(total, 0, 0.0, held_out_ids=[features.samples[index].id for index in held])
    began = time.monotonic()
    plan = list(_plan([len(s.tokens) for s in features.samples], train, options, total))[done:]
    for place, (step, indices) in enumerate(plan):
        for _, coming in plan[place : place + 2]:
            features.expect(world.share(coming))
        point = stepper.step(step, indices)
        tokens = sum(len(features.samples[index].tokens) for index in indices)
        result.tokens += tokens
        point.tokens_per_second = result.tokens / (time.monotonic() - began)
        if held and (step % every == 0 or step == total):
            point.held_out = stepper.evaluate(held[:MAX_HELD_OUT])
        if curve:
            curve.add(point, tokens)
        if step % kept.save_every == 0 or step == total:
            tensors = world.whole(state_tensors(stepper.parameters, stepper.optimizer))
            if curve:
                save_state(kept.work, tensors, step, curve.position, kept.fingerprint)
        on_step(point)
    if curve:
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


class Stepper:
    """Optimizer steps and evaluations over global batches, of which each process computes its share."""

    def __init__(
        self, model: TrainingModule, features: Features, options: TrainOptions, total: int, world: World
    ) -> None:
        self.features, self.options, self.total, self.world = features, options, total, world
        self.device = str(model.lm_head.weight.device)
        self.peak_lr = options.peak_lr(model.lm_head.in_features)
        self.objective = world.wrap(Objective(model))
        self.parameters = head_parameters(model)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=True
        )

    def step(self, step: int, indices: list[int]) -> CurvePoint:
        """One update. Raises TrtspecError when loss or gradients are no numbers."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.total, self.peak_lr, self.options.warmup)
        loss, accuracy, _ = self._loss(indices)
        (loss * self.world.size).backward()  # the wrapper takes the mean over processes, the losses are parts of a sum
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.options.grad_clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        value, *shares = self.world.sum(torch.tensor([loss.item(), *accuracy], dtype=torch.float64)).tolist()
        if not math.isfinite(value) or not math.isfinite(norm.item()):
            raise TrtspecError(
                f"TS-TRAIN-DIVERGED the loss at step {step} is {value}, the gradient norm {norm.item()}",
                "train again with a smaller --lr",
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return CurvePoint(step, self.total, value, shares, 0.0)

    @torch.no_grad()
    def evaluate(self, indices: list[int]) -> dict[str, Any]:
        """Loss and per-step accuracy on held-out samples, averaged over batches by their counted positions."""
        sums, weight = torch.zeros(1 + self.options.ttt_steps, dtype=torch.float64), 0.0
        ordered = sorted(indices, key=lambda index: len(self.features.samples[index].tokens))
        for begin in range(0, len(ordered), self.options.batch_size):
            loss, accuracy, counted = self._loss(ordered[begin : begin + self.options.batch_size])
            figures = torch.tensor([loss.item(), *accuracy, counted], dtype=torch.float64)
            *values, counted = self.world.sum(figures).tolist()
            sums += counted * torch.tensor(values, dtype=torch.float64)
            weight += counted
        loss_mean, *shares = (sums / max(weight, 1.0)).tolist()
        return {"loss": loss_mean, "accuracy": shares}

    def _loss(self, indices: list[int]) -> tuple[Tensor, list[float], float]:
        """(loss, accuracy, counted positions) of this process's rows of a batch, as parts of the batch's sums."""
        mine = self.world.share(indices)
        batch = collate(self.features, mine or indices[:1], self.options.answer_only, self.device)
        if not mine:
            batch.loss_mask.zero_()  # fewer rows than processes: take part without counting
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.options.dtype == torch.bfloat16):
            loss, accuracy = self.objective(batch.tokens, batch.hidden, batch.aux, batch.loss_mask)
        return loss, accuracy, float(batch.loss_mask.sum())
