"""The training loop: AdamW on a head's objective over a schedule, resumable at any moment.

A run ends before its last step on Ctrl-C, a scheduler's SIGTERM, or when its time is up: the step under way is
finished, then the state and a head are written. In a group of processes all stop at the same step.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trtspec.errors import TrtspecError
from trtspec.heads.training.batches import MAX_HELD_OUT, TrainingData, collate, counted_positions, split_data
from trtspec.heads.training.curve import Curve, CurvePoint
from trtspec.heads.training.exports import Exports
from trtspec.heads.training.features import Features
from trtspec.heads.training.module import TrainingModule, head_parameters
from trtspec.heads.training.objective import Objective
from trtspec.heads.training.options import TrainOptions
from trtspec.heads.training.processes import ALONE, World
from trtspec.heads.training.state import KeptState, SavedRun, load_state, save_state, state_tensors


def learning_rate(step: int, total: int, peak: float, options: TrainOptions) -> float:
    """Of `step`, counted from 1, of `total`.

    A linear warm-up, `peak` at its last step, then by `schedule`: `cosine`, half a cosine down to 0 at the last step;
    `linear`, a straight line to 0; `constant`; `wsd` (warm-up, stable, decay: arXiv 2404.06395), constant, then a
    straight line to 0 over the last `decay` of all steps.
    """
    rising = warmup_steps(total, options.warmup)
    if step <= rising:
        return peak * step / rising
    done = (step - rising) / max(1, total - rising)
    match options.schedule:
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            return peak * (1 - done)
        case "wsd":
            falling = max(1, min(round(options.decay * total), total - rising))
            return peak * min(1.0, (total - step) / falling)
    return peak


def warmup_steps(total: int, warmup: float) -> int:
    """`warmup`: below 1 a share of all steps, from 1 on a number of them. One step at the least, which has the peak."""
    return max(1, round(warmup * total)) if warmup < 1 else min(round(warmup), total)


def walk(agree: Sequence[Sequence[bool]], answer: Sequence[int]) -> tuple[int, int]:
    """(verifications, accepted drafts) over one sample, from agreement on its answer: no engine, no generation.

    Greedy decoding of the answer is walked through as a server would do it. At each verification, the head's drafts
    count up to the first that is not the target's best token, the target adds one, and the next verification begins
    behind them. Drafts after the first were made with the answer's own tokens in place of the head's, which are the
    same as long as all before agreed and the answer is what the target says greedily. Acceptance length =
    1 + accepted / verifications; the draft length is the number of training-time-test steps.


    agree[k][q]: whether the draft of step k at row q is the target's best token; answer[t]: 1 where token t was
    written by the target. The first token of an answer comes from the prompt's own pass.
    """
    steps = accepted = place = 0
    while place < len(answer):
        end = place
        while end < len(answer) and answer[end]:
            end += 1
        known = max(place, 1)  # the last token that is known; the row before it drafts
        while known < end - 1:
            count = 0
            while count < min(len(agree), end - 1 - known) and agree[count][known - 1 + count]:
                count += 1
            steps += 1
            accepted += count
            known += count + 1
        place = end + 1
    return steps, accepted


TIME = "time"
REASONS = (TIME, "SIGTERM", "SIGINT")


class Stop:
    """Collects the reasons to stop while it is entered. A second signal of a kind acts at once, as without it."""

    def __init__(self, deadline: float | None = None) -> None:
        """`deadline`: of time.monotonic()."""
        self.deadline = deadline
        self.reason: str | None = None  # of the whole group, once `asked` has said so
        self._heard: set[str] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._heard.add(signal.Signals(number).name)
        signal.signal(number, self._before[number])

    def asked(self, world: World, reserve: float) -> bool:
        """Whether to stop now; `reserve`: seconds that another step with its saving would take."""
        if self.deadline is not None and time.monotonic() + reserve > self.deadline:
            self._heard.add(TIME)
        flags = world.sum(torch.tensor([float(reason in self._heard) for reason in REASONS]))
        self.reason = next((reason for reason, flag in zip(REASONS, flags.tolist(), strict=True) if flag), self.reason)
        return self.reason is not None


@dataclass
class Result:
    """What a run ended with. `steps` of `total` were done, fewer where `stopped` says why; `tokens` counts real (not
    padded) ones of this process's life."""

    steps: int
    total: int
    tokens: int = 0
    seconds: float = 0.0
    stopped: str | None = None

    @property
    def finished(self) -> bool:
        return self.steps == self.total

    def to_dict(self) -> dict[str, Any]:
        """For the record."""
        return {
            "steps": self.steps, "total": self.total, "finished": self.finished, "stopped": self.stopped,
            "seconds": round(self.seconds, 2),
        }  # fmt: skip


@dataclass
class Way:
    """How a run goes, which its curve does not depend on."""

    on_step: Callable[[CurvePoint], None] = lambda _: None
    stop: Stop = field(default_factory=Stop)
    exports: Exports | None = None
    recompute: bool = False  # activations in the backward pass, in place of keeping them


def train_head(
    model: TrainingModule,
    features: Features,
    options: TrainOptions,
    kept: KeptState,
    *,
    data: TrainingData | None = None,
    way: Way | None = None,
    world: World = ALONE,
) -> Result:
    """Trains in place. The state is saved as `kept` says; a rerun goes on from there and its curve
    is that of an uninterrupted run. Raises TrtspecError when the loss stops being a number."""
    way, data = way or Way(), (data or split_data(features.samples, options)).of(options)
    total = data.order.total
    stepper = Stepper(model, features, options, total, world, way.recompute)
    saved = load_state(kept.work, stepper.parameters, stepper.optimizer, kept.fingerprint, total)
    world.wait()  # nobody saves before everybody has read
    curve = Curve(kept.curve, saved.position) if world.main else None
    result = Result(saved.step, total)
    began, slowest, saving = time.monotonic(), 0.0, 0.0
    plan = list(data.order.steps())[saved.step :]
    for place, (step, window) in enumerate(plan):
        for _, coming in plan[place : place + 2]:
            for batch in coming:
                features.expect(world.share(batch))
        point = stepper.step(step, window)
        result.tokens += point.tokens
        point.tokens_per_second = result.tokens / (time.monotonic() - began)
        if data.held and options.evaluates(step, total):
            point.held_out = stepper.evaluate(data.held[:MAX_HELD_OUT])
        if curve:
            curve.add(point)
        slowest, result.steps = max(slowest, point.seconds), step
        stopping = step < total and way.stop.asked(world, slowest + saving)
        before = time.monotonic()
        if way.exports:
            way.exports.after(point, total)
        if stopping or step % kept.save_every == 0 or step == total:
            tensors = world.whole(state_tensors(stepper.parameters, stepper.optimizer))
            if curve:
                save_state(kept.work, tensors, SavedRun(step, total, curve.position, kept.fingerprint))
        saving = max(saving, time.monotonic() - before)
        way.on_step(point)
        if stopping:
            break
    if curve:
        curve.close()
    result.seconds, result.stopped = time.monotonic() - began, way.stop.reason
    return result


class Stepper:
    """Optimizer steps and evaluations over global batches, of which each process computes its share."""

    def __init__(
        self, model: TrainingModule, features: Features, options: TrainOptions, total: int, world: World,
        recompute: bool = False,
    ) -> None:  # fmt: skip
        self.features, self.options, self.total, self.world = features, options, total, world
        self.device = str(model.lm_head.weight.device)
        self.peak_lr = options.peak_lr(model.lm_head.in_features)
        self.objective = world.wrap(Objective(model, options, recompute))
        self.parameters = head_parameters(model)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=True
        )

    def step(self, step: int, window: list[list[int]]) -> CurvePoint:
        """One update from the batches of a window, each position of them weighing the same. Raises TrtspecError when
        loss or gradients are no numbers."""
        began, rate = time.monotonic(), learning_rate(step, self.total, self.peak_lr, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        counted = self._counted([index for batch in window for index in batch])
        parts = []
        for number, batch in enumerate(window):
            with self._apart() if number < len(window) - 1 else contextlib.nullcontext():
                loss, agree = self._loss(batch, counted)
                # the wrapper takes the mean over processes, the losses are parts of a sum
                (loss * self.world.size).backward()
            parts.append(_figures(loss, agree))
        total = nn.utils.clip_grad_norm_(self.parameters.values(), self.options.grad_clip)
        figures, norm = read_back(parts, total.full_tensor() if isinstance(total, DTensor) else total)
        value, shares = self._means(figures, counted)
        if not math.isfinite(value) or not math.isfinite(norm):
            raise TrtspecError(
                f"TS-TRAIN-DIVERGED the loss at step {step} is {value}, the gradient norm {norm}",
                "train again with a smaller --lr",
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(len(self.features.samples[index].tokens) for batch in window for index in batch)
        return CurvePoint(step, self.total, value, shares, rate, norm, tokens, time.monotonic() - began)

    @torch.no_grad()
    def evaluate(self, indices: list[int]) -> dict[str, Any]:
        """Loss and per-step accuracy on held-out samples, each counted position weighing the same; and, where the
        samples have answers, the estimated acceptance length (see `estimate`)."""
        counted = self._counted(indices)
        figures = torch.zeros(1 + self.options.ttt_steps, dtype=torch.float64)
        walked = torch.zeros(2, dtype=torch.float64)
        ordered = sorted(indices, key=lambda index: len(self.features.samples[index].tokens))
        for begin in range(0, len(ordered), self.options.batch_size):
            batch = ordered[begin : begin + self.options.batch_size]
            loss, agree = self._loss(batch, counted)
            figures += _figures(loss, agree).cpu()
            for row, index in enumerate(self.world.share(batch)):
                walked += torch.tensor(walk(agree[:, row].tolist(), self.features.samples[index].answer))
        value, shares = self._means(figures, counted)
        steps, accepted = self.world.sum(walked).tolist()
        found = {"loss": value, "accuracy": shares}
        return found | ({"acceptance_length": 1 + accepted / steps} if steps else {})

    def _counted(self, indices: list[int]) -> Tensor:
        samples = (self.features.samples[index] for index in indices)
        return torch.tensor(counted_positions(samples, self.options.ttt_steps, self.options.answer_only))

    def _means(self, figures: Tensor, counted: Tensor) -> tuple[float, list[float]]:
        """(loss, agreement by step) of the whole step, from this process's sums."""
        value, *right = self.world.sum(figures).tolist()
        return value, [one / max(1, count) for one, count in zip(right, counted.tolist(), strict=True)]

    def _apart(self) -> contextlib.AbstractContextManager:
        """Keeps replicated processes from adding up gradients before the last batch of a window."""
        return getattr(self.objective, "no_sync", contextlib.nullcontext)()

    def _loss(self, indices: list[int], counted: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, agreement [K, B, S]) of this process's rows of a batch, as parts of the step's sums."""
        mine = self.world.share(indices)
        batch = collate(self.features, mine or indices[:1], self.options.answer_only, self.device)
        if not mine:
            batch.places = batch.places[:0]  # fewer rows than processes: take part without counting
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.options.dtype == torch.bfloat16):
            known = counted.to(self.device, non_blocking=True)
            return self.objective(batch.tokens, batch.hidden, batch.aux, batch.places, known)


def _figures(loss: Tensor, agree: Tensor) -> Tensor:
    """The loss, then the agreeing positions of each step, float64."""
    return torch.cat([loss.detach().double()[None], agree.sum((1, 2)).double()])


def read_back(figures: list[Tensor], norm: Tensor) -> tuple[Tensor, float]:
    """(the sum of float64 `figures` on the host, the gradient's norm) in one transfer: the one wait of a step."""
    *known, length = torch.cat([torch.stack(figures).sum(0), norm.detach().double()[None]]).tolist()
    return torch.tensor(known, dtype=torch.float64), length
