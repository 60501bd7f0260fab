"""The loop that trains a draft head: AdamW over a schedule, resumable at any moment; and what it minimises.

The training-time test: a head drafts several tokens from every position at once, and is judged at each. At step k,
row q has two inputs. One is the head's own state, made k drafts after the target's last state (row q - k). The other
is the token that follows row q in the text. So the head learns from its own states, as it will when it drafts.

Logits of a whole batch over a vocabulary of 163,840 do not fit beside a head: 20,000 tokens are 13 GB for each
training-time-test step. Here the target's distribution and the head's logits exist for a chunk of positions at a time.
The gradients are taken while they exist, so nothing over the vocabulary is kept for the backward pass. The products are
those of the plain formula; only the order of sums differs.

Ctrl-C, a scheduler's SIGTERM or a time limit ends a run before its last step. The step under way is finished, then
state and head are written. In a group of processes all stop at the same step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trtspec.errors import TrtspecError
from trtspec.heads.training.curve import Curve, CurvePoint
from trtspec.heads.training.ranks import SINGLE_PROCESS, Stop, Ranks
from trtspec.heads.training.samples import MAX_HELD_OUT, counted_positions, split_data
from trtspec.heads.training.saved import SavedRun, load_state, save_state
from trtspec.heads.training.states import Features, collate
from trtspec.heads.training.train_options import TrainingRun, TrainOptions

if TYPE_CHECKING:
    from trtspec.heads.training.module import (
        TrainingModule,
    )  # ModelOpt takes many seconds, and a dry run needs none

EVALUATIONS = 10  # held-out points of the learning curve
PEAK_LR_TIMES_WIDTH = 0.5  # the learning rate falls with width: 2e-3 at 256, 7e-5 at Kimi's 7168
CHUNK_ELEMENTS = {
    "cpu": 2**18,
    "cuda": 2**28,
}  # logits of a chunk: the cache of a CPU core, 1 GiB of a GPU
# of one logit while a chunk is computed: the target's product (bf16) and distribution (float32), the head's product
# (bf16) and its log-probabilities, which become the gradient (float32), and that gradient for the products (bf16)
LOGIT_BYTES = 2 + 4 + 2 + 4 + 2


def train_head(
    model: TrainingModule,
    features: Features,
    options: TrainOptions,
    run: TrainingRun,
    fingerprint: dict[str, Any],
    *,
    on_step: Callable[[CurvePoint], None] = lambda _: None,
    export: Callable[[CurvePoint], None] = lambda _: None,
    stop: Stop | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> TrainingResult:
    """Trains in place. The state is saved every `run.save_every` steps; a rerun with the same `fingerprint` resumes
    there, and its curve is that of an uninterrupted run. `export` writes the heads that are due after a step.

    Raises TrtspecError when the loss is NaN or infinite.
    """
    stop, data = stop or Stop(), split_data(features.samples, options)
    total = data.total
    stepper = Stepper(model, features, options, total, ranks)
    saved = load_state(run, stepper.parameters, stepper.optimizer, fingerprint, total)
    ranks.wait()  # nobody saves before everybody has read
    curve = Curve(run.curve, saved.position) if ranks.main else None
    result = TrainingResult(saved.step, total)
    began, slowest, saving = time.monotonic(), 0.0, 0.0
    plan = list(data.steps())[saved.step :]
    evaluated_every = options.eval_every or max(1, total // EVALUATIONS)
    for place, (step, window) in enumerate(plan):
        for _, coming in plan[place : place + 2]:
            for batch in coming:
                features.expect(ranks.share(batch))
        point = stepper.step(step, window)
        result.tokens += point.tokens
        point.tokens_per_second = result.tokens / (time.monotonic() - began)
        if data.held and (step == total or step % evaluated_every == 0):
            point.held_out = stepper.evaluate(data.held[:MAX_HELD_OUT])
        if curve:
            curve.add(point)
        slowest, result.steps = max(slowest, point.seconds), step
        stopping = step < total and stop.asked(ranks, slowest + saving)
        before = time.monotonic()
        export(point)
        if curve and (stopping or step % run.save_every == 0 or step == total):
            now = SavedRun(step, total, curve.position, fingerprint)
            save_state(run, stepper.parameters, stepper.optimizer, now)
        saving = max(saving, time.monotonic() - before)
        on_step(point)
        if stopping:
            break
    if curve:
        curve.close()
    result.stopped = stop.reason
    return result


@dataclass
class TrainingResult:
    """What a run ended with. `steps` of `total` were done, fewer where `stopped` says why; `tokens` counts real (not
    padded) ones of this process's life."""

    steps: int
    total: int
    tokens: int = 0
    stopped: str | None = None

    @property
    def finished(self) -> bool:
        return self.steps == self.total

    def to_dict(self) -> dict[str, Any]:
        """For the record."""
        return {
            "steps": self.steps,
            "total": self.total,
            "finished": self.finished,
            "stopped": self.stopped,
        }


class Stepper:
    """Optimizer steps and evaluations over global batches, of which each process computes its share."""

    def __init__(
        self,
        model: TrainingModule,
        features: Features,
        options: TrainOptions,
        total: int,
        ranks: Ranks,
    ) -> None:
        self.features, self.options, self.total, self.ranks = features, options, total, ranks
        self.device = str(model.lm_head.weight.device)
        self.peak_lr = peak_learning_rate(options, model.lm_head.in_features)
        self.objective = ranks.wrap(Objective(model, options))
        self.parameters = dict(model.eagle_module.named_parameters())  # by their exported names
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=0.0,
            betas=(0.9, 0.95),
            weight_decay=options.weight_decay,
            fused=True,
        )

    def step(self, step: int, window: list[list[int]]) -> CurvePoint:
        """One update from the batches of a window, each position of them weighing the same. Raises TrtspecError when
        loss or gradients are NaN or infinite."""
        began, rate = time.monotonic(), learning_rate(step, self.total, self.peak_lr, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        counted = self._counted([index for batch in window for index in batch])
        parts = []
        # replicated processes add up their gradients at the last batch of the window
        no_sync = getattr(self.objective, "no_sync", contextlib.nullcontext)
        for number, batch in enumerate(window):
            with no_sync() if number < len(window) - 1 else contextlib.nullcontext():
                loss, agree = self._loss(batch, counted)
                # the wrapper takes the mean over processes, the losses are parts of a sum
                (loss * self.ranks.size).backward()
            parts.append(_figures(loss, agree))
        length = nn.utils.clip_grad_norm_(self.parameters.values(), self.options.grad_clip)
        figures, norm = read_back(parts, length)
        value, shares = self._means(figures, counted)
        if not math.isfinite(value) or not math.isfinite(norm):
            raise TrtspecError(
                f"TS-TRAIN-DIVERGED the loss at step {step} is {value}, the gradient norm {norm}",
                "train again with a smaller `lr`",
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(
            len(self.features.samples[index].tokens) for batch in window for index in batch
        )
        return CurvePoint(
            step, self.total, value, shares, rate, norm, tokens, time.monotonic() - began
        )

    @torch.no_grad()
    def evaluate(self, indices: list[int]) -> dict[str, Any]:
        """Loss and per-step accuracy on held-out samples, each counted position weighing the same; and, where the
        samples have answers, the acceptance length (see `simulate_acceptance`)."""
        counted = self._counted(indices)
        figures = torch.zeros(1 + self.options.ttt_steps, dtype=torch.float64)
        walked = torch.zeros(2, dtype=torch.float64)
        ordered = sorted(indices, key=lambda index: len(self.features.samples[index].tokens))
        for begin in range(0, len(ordered), self.options.batch_size):
            batch = ordered[begin : begin + self.options.batch_size]
            loss, agree = self._loss(batch, counted)
            figures += _figures(loss, agree).cpu()
            for row, index in enumerate(self.ranks.share(batch)):
                walked += torch.tensor(
                    simulate_acceptance(agree[:, row].tolist(), self.features.samples[index].answer)
                )
        value, shares = self._means(figures, counted)
        steps, accepted = self.ranks.sum(walked).tolist()
        found = {"loss": value, "accuracy": shares}
        return found | ({"acceptance_length": 1 + accepted / steps} if steps else {})

    def _counted(self, indices: list[int]) -> Tensor:
        samples = (self.features.samples[index] for index in indices)
        return torch.tensor(
            counted_positions(samples, self.options.ttt_steps, self.options.answer_only)
        )

    def _means(self, figures: Tensor, counted: Tensor) -> tuple[float, list[float]]:
        """(loss, agreement by step) of the whole step, from this process's sums."""
        value, *right = self.ranks.sum(figures).tolist()
        return value, [
            one / max(1, count) for one, count in zip(right, counted.tolist(), strict=True)
        ]

    def _loss(self, indices: list[int], counted: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, agreement [K, B, S]) of this process's rows of a batch, as parts of the step's sums."""
        mine = self.ranks.share(indices)
        batch = collate(self.features, mine or indices[:1], self.options.answer_only, self.device)
        if not mine:
            batch.places = batch.places[:0]  # fewer rows than processes: take part without counting
        with torch.autocast(
            batch.tokens.device.type, torch.bfloat16, enabled=self.options.dtype == torch.bfloat16
        ):
            known = counted.to(self.device, non_blocking=True)
            return self.objective(batch.tokens, batch.hidden, batch.aux, batch.places, known)


def peak_learning_rate(options: TrainOptions, hidden_size: int) -> float:
    return options.lr if options.lr is not None else min(2e-3, PEAK_LR_TIMES_WIDTH / hidden_size)


def learning_rate(step: int, total: int, peak: float, options: TrainOptions) -> float:
    """The rate of `step`, counted from 1, of `total`: a linear warm-up with `peak` at its last step, then by `schedule`
    half a cosine down to 0 at the last step, or `peak` to the end."""
    # the warm-up is a share of the steps, or from 1 on a number of them; one step at the least
    share = options.warmup < 1
    rising = max(1, round(options.warmup * total)) if share else min(round(options.warmup), total)
    if step <= rising:
        return peak * step / rising
    if options.schedule == "constant":
        return peak
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


def _figures(loss: Tensor, agree: Tensor) -> Tensor:
    """The loss, then the agreeing positions of each step, float64."""
    return torch.cat([loss.detach().double()[None], agree.sum((1, 2)).double()])


def read_back(figures: list[Tensor], norm: Tensor) -> tuple[Tensor, float]:
    """(the sum of float64 `figures` on the host, the gradient's norm) in one transfer: the one wait of a step."""
    *known, length = torch.cat([torch.stack(figures).sum(0), norm.detach().double()[None]]).tolist()
    return torch.tensor(known, dtype=torch.float64), length


def simulate_acceptance(agree: Sequence[Sequence[bool]], answer: Sequence[int]) -> tuple[int, int]:
    """(verifications, accepted drafts) over one sample, from agreement on its answer: no engine, no generation.

    The answer is verified as a server would do it. At each verification the head's drafts count up to the first that is
    not the target's best token. The target adds one token, and the next verification begins behind it. Drafts after the
    first were made with the answer's own tokens in place of the head's. Both are the same while all drafts before
    agreed and the answer is the target's greedy one. Acceptance length = 1 + accepted / verifications; the draft length
    is the number of training-time-test steps.

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


class Objective(nn.Module):
    """Loss and agreement of one training module: what is wrapped for several processes."""

    def __init__(self, model: TrainingModule, options: TrainOptions) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(
        self, tokens: Tensor, hidden: Tensor, aux: Tensor, places: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(this batch's part of the loss, its part of the agreement [K, B, S] by the row that drafts, bool).

        tokens int64 [B, S]; hidden [B, S, H] after the target's final norm; aux [B, S, n*H]; places int64 [N] as in
        `TrainingBatch`; counted [K]: the positions of the whole step, over all of whose batches and processes the parts
        of the loss add up. The loss is the mean over positions, summed over the steps with weights `ttt_decay`^k.
        """
        steps, model = self.options.ttt_steps, self.model
        dtype = (
            torch.bfloat16
            if torch.is_autocast_enabled(tokens.device.type)
            else model.target_rows.dtype
        )
        normed = draft_states(model, tokens, aux.to(dtype), steps)
        rows, length = tokens.shape
        decay = self.options.ttt_decay ** torch.arange(steps, device=tokens.device)
        weights = (decay / counted.clamp_min(1)).float()
        teacher = Teacher(
            hidden.flatten(0, 1), model.target_rows, places, places % length - 1, weights
        )
        flat = tuple(state.flatten(0, 1) for state in normed)
        lm_head = model.eagle_module.lm_head.weight
        # `losses` chooses the dtype of each product itself
        with torch.autocast(lm_head.device.type, enabled=False):
            if torch.is_grad_enabled():
                loss, agree = _LossWithGradients.apply(teacher, lm_head, *flat)
            else:
                values, agree = losses(lm_head.to(teacher.lm_head.dtype), flat, teacher)
                loss = values.sum().float()
        agreement = torch.zeros(steps, rows * length, dtype=torch.bool, device=tokens.device)
        agreement[:, places - 1] = agree
        return loss, agreement.view(steps, rows, length)


def draft_states(model: TrainingModule, tokens: Tensor, aux: Tensor, steps: int) -> list[Tensor]:
    """The head's states after its norm, [B, S, H] for each training-time-test step.

    tokens int64 [B, S]; aux [B, S, n*H].
    """
    head = model.eagle_module
    with torch.no_grad():
        following = model.embed_tokens(tokens.roll(-1, 1))
    places = torch.arange(tokens.shape[1], device=tokens.device)[None]
    state, cache, found = head.fc(aux), StepKeys(), []
    for _ in range(steps):
        normed, output, _ = head(
            state, following, None, position_ids=places, past_key_values=cache, use_cache=True
        )
        state = output.roll(
            1, 1
        )  # the state of a row goes to the row that drafts the next token from it
        found.append(normed)
    return found


class StepKeys:
    """Keys and values of the steps so far, for attention modules that take a cache of transformers: each step's apart,
    in a tuple, because `module.ttt_attention` looks at them apart."""

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def update(
        self, key: Tensor, value: Tensor, *_: object
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        self.keys, self.values = (*self.keys, key), (*self.values, value)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0


class _LossWithGradients(torch.autograd.Function):
    """`losses`, summed over the steps. The forward pass makes the gradients too, chunk by chunk: no logits are kept."""

    @staticmethod
    def forward(ctx: Any, teacher: Teacher, lm_head: Tensor, *states: Tensor):
        gradients = Gradients(
            torch.zeros_like(lm_head, dtype=torch.float32), [torch.zeros_like(s) for s in states]
        )
        values, agree = losses(lm_head.to(teacher.lm_head.dtype), states, teacher, gradients)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(agree)
        return values.sum().float(), agree

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found: Gradients = ctx.gradients
        del ctx.gradients
        return None, found.lm_head.mul_(grads[0]), *(part.mul_(grads[0]) for part in found.states)


def losses(
    lm_head: Tensor,
    states: tuple[Tensor, ...],
    teacher: Teacher,
    gradients: Gradients | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(weighted loss of each step float64 [K], whether the best draft is the target's best token bool [K, N]).

    lm_head [Vd, H] and states, K times [B*S, H] after the head's norm, in the dtype of the products; softmax and sums
    in float32. `gradients` are filled where given. `chunk`: positions at a time, by default CHUNK_ELEMENTS of logits.
    Positions whose row is above a step's depth have no draft at that step: they weigh nothing, and agree with nothing.
    """
    count, steps = len(teacher.places), len(states)
    chunk = chunk or chunk_positions(lm_head.shape[0], "cuda" if lm_head.is_cuda else "cpu")
    values = torch.zeros(steps, dtype=torch.float64, device=lm_head.device)
    agree = torch.zeros(steps, count, dtype=torch.bool, device=lm_head.device)
    for begin in range(0, count, chunk):
        part = slice(begin, begin + chunk)
        places, depth = teacher.places[part], teacher.depth[part]
        wanted = teacher.hidden[places].to(lm_head.dtype) @ teacher.lm_head.T
        best = wanted.argmax(-1, keepdim=True)
        p = torch.log_softmax(wanted, -1, dtype=torch.float32).exp_()
        for step, state in enumerate(states):
            rows = state[places - 1].to(lm_head.dtype)
            drafted = rows @ lm_head.T
            # argmax is not vectorized on a CPU, amax is
            agree[step, part] = (drafted.gather(-1, best)[:, 0] >= drafted.amax(-1)) & (
                depth >= step
            )
            weight = (depth >= step) * teacher.weights[step]
            value, gradient = cross_entropy(p, torch.log_softmax(drafted, -1, dtype=torch.float32))
            values[step] += torch.dot(value.double(), weight.double())
            if gradients is not None:
                gradients.add(
                    step,
                    places - 1,
                    gradient.mul_(weight[:, None]).to(lm_head.dtype),
                    rows,
                    lm_head,
                )
    return values, agree


def chunk_positions(vocabulary: int, device: str) -> int:
    """How many positions have logits over the draft vocabulary at a time."""
    return max(64, CHUNK_ELEMENTS[device] // vocabulary)


@dataclass
class Gradients:
    """Of the weighted sum of losses: by the head's lm_head (float32) and by the states of each step."""

    lm_head: Tensor
    states: list[Tensor]

    def add(self, step: int, places: Tensor, logits: Tensor, rows: Tensor, lm_head: Tensor) -> None:
        """From the gradient of the logits [N, Vd] that `rows` [N, H], at `places` of the batch, gave."""
        if logits.dtype == self.lm_head.dtype:
            self.lm_head.addmm_(logits.T, rows)
        else:
            self.lm_head.add_(logits.T @ rows)
        self.states[step].index_copy_(0, places, (logits @ lm_head).to(self.states[step].dtype))


@dataclass(frozen=True)
class Teacher:
    """The target's end: `hidden` [B*S, H] after its final norm, `lm_head` [Vd, H] its rows of the draft vocabulary; and
    the positions that count. `places` int64 [N]: where its distribution is in the flattened batch; the head's row is
    the one before. `depth` int64 [N]: that row within its sequence, counted from 0. `weights` float32 [K]: the factor
    of a position's loss at each training-time-test step."""

    hidden: Tensor
    lm_head: Tensor
    places: Tensor
    depth: Tensor
    weights: Tensor


def cross_entropy(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """(-sum p log q [N], its gradient q - p by the logits [N, V]), EAGLE-3's loss (arXiv 2503.01840) and ModelOpt's.

    p, log_q float32 [N, V]: what the target says and what the head says; log_q is overwritten.
    """
    value = -torch.linalg.vecdot(p, log_q)
    return value, log_q.exp_().sub_(p)
