"""The loop that trains a draft head, and its loss. It can resume after any kill.

The training-time test: a head drafts several tokens from every position at once, and is judged at
each. At step k, row q has two inputs. One is the head's own state, made k drafts after the target's
last state (row q - k). The other is the token that follows row q in the text. So the head learns
from its own states, as it will when it drafts.

Logits of a whole batch over a vocabulary of 163,840 do not fit beside a head: 20,000 tokens are 13
GB for each training-time-test step. Here the target's distribution and the head's logits exist for
a chunk of positions at a time. The gradients are taken while they exist, so nothing over the
vocabulary is kept for the backward pass. The products are those in the plain formula. Only the
order of sums differs.

Ctrl-C, a scheduler's SIGTERM or a time limit ends a run before its last step. The step under way is
finished, then state and head are written. In a group of processes all stop at the same step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trtspec.errors import TrtspecError
from trtspec.heads.training.curve import Curve, CurvePoint
from trtspec.heads.training.ranks import Ranks, Stop
from trtspec.heads.training.samples import MAX_HELD_OUT, TrainingData, counted_positions
from trtspec.heads.training.saved import Fingerprint, SavedRun, load_state, save_state
from trtspec.heads.training.states import Features, collate
from trtspec.heads.training.train_options import TrainingRun, TrainOptions
from trtspec.heads.training.training_record import Evaluation, TrainingProgress

if TYPE_CHECKING:
    # ModelOpt takes many seconds, and a dry run needs none of it.
    from trtspec.heads.training.module import TrainingModule

EVALUATIONS = 10  # held-out points of the learning curve
PEAK_LR_TIMES_WIDTH = 0.5  # the learning rate falls with width: 2e-3 at 256, 7e-5 at Kimi's 7168
# Logits of a chunk: they fit the cache of a CPU core, and take 1 GiB of a GPU.
CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**28}
# Bytes per logit of a chunk: the target's product (bf16) and distribution (float32), the head's
# product (bf16), its log-probabilities, which become the gradient (float32), and the gradient for
# the products (bf16).
LOGIT_BYTES = 2 + 4 + 2 + 4 + 2


def train_head(
    stepper: Stepper,
    data: TrainingData,
    run: TrainingRun,
    fingerprint: Fingerprint,
    *,
    on_step: Callable[[CurvePoint], None],
    export: Callable[[CurvePoint], None],
    stop: Stop,
) -> TrainingResult:
    """Trains the module of `stepper` in place by AdamW over a schedule.

    Saves the state every `run.save_every` steps. A second call with the same `fingerprint` resumes
    there, and its curve equals the curve of an uninterrupted run. Raises TrtspecError if the loss
    is NaN or infinite.

    Args:
        export: writes the heads that are due after a step.
    """
    ranks = stepper.ranks
    total = stepper.total
    parameters = stepper.parameters
    optimizer = stepper.optimizer
    saved = load_state(run, parameters, optimizer, fingerprint, total)
    resumed_at = saved.step
    ranks.wait()  # no process saves before all have read
    curve = Curve(run.curve, saved.position) if ranks.main else None
    result = TrainingResult(resumed_at, total)
    start = time.monotonic()
    longest_step_s = 0.0
    longest_save_s = 0.0
    steps = list(data.steps())[resumed_at:]
    evaluate_every = stepper.options.eval_every or max(1, total // EVALUATIONS)
    for index, (step, window) in enumerate(steps):
        for _, next_window in steps[index : index + 2]:
            for batch in next_window:
                stepper.features.expect(ranks.share(batch))
        point = stepper.step(step, window)
        result.tokens += point.tokens
        point.tokens_per_second = result.tokens / (time.monotonic() - start)
        if data.held and (step == total or step % evaluate_every == 0):
            point.held_out = stepper.evaluate(data.held[:MAX_HELD_OUT])
        if curve:
            curve.add(point)
        result.steps = step
        longest_step_s = max(longest_step_s, point.seconds)
        stopping = step < total and stop.asked(ranks, longest_step_s + longest_save_s)
        save_start = time.monotonic()
        export(point)
        if curve and (stopping or step % run.save_every == 0 or step == total):
            state = SavedRun(step, total, curve.position, fingerprint)
            save_state(run, parameters, optimizer, state)
        longest_save_s = max(longest_save_s, time.monotonic() - save_start)
        on_step(point)
        if stopping:
            break
    if curve:
        curve.close()
    result.stopped = stop.reason
    return result


@dataclass
class TrainingResult:
    """The result of a run: `steps` of `total` were done.

    Args:
        tokens: tokens since this process started, without padding.
        stopped: why the run ended before its last step. None if it did not.
    """

    steps: int
    total: int
    tokens: int = 0
    stopped: str | None = None

    @property
    def finished(self) -> bool:
        return self.steps == self.total

    def to_dict(self) -> TrainingProgress:
        """The result for the provenance record."""
        return {
            "steps": self.steps,
            "total": self.total,
            "finished": self.finished,
            "stopped": self.stopped,
        }


class Stepper:
    """Optimizer steps and evaluations. Each process computes its share of a global batch."""

    def __init__(
        self,
        model: TrainingModule,
        features: Features,
        options: TrainOptions,
        total: int,
        ranks: Ranks,
    ) -> None:
        self.features = features
        self.options = options
        self.total = total
        self.ranks = ranks
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
        """Updates the head once from the batches of a window. All their positions weigh the same.

        Raises TrtspecError if the loss or the gradient norm is NaN or infinite.
        """
        start = time.monotonic()
        rate = learning_rate(step, self.total, self.peak_lr, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        indices = list(chain.from_iterable(window))
        counted = self._counted(indices)
        batch_figures = []
        # Replicated processes add up their gradients at the last batch of the window.
        no_sync = getattr(self.objective, "no_sync", contextlib.nullcontext)
        for number, batch in enumerate(window, 1):
            context = no_sync if number < len(window) else contextlib.nullcontext
            with context():
                loss, agree = self._loss(batch, counted)
                # The wrapper takes the mean over processes, and the losses are terms of a sum.
                (loss * self.ranks.size).backward()
            batch_figures.append(_figures(loss, agree))
        gradient_norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.options.grad_clip)
        figures, norm = read_back(batch_figures, gradient_norm)
        loss_value, accuracy = self._means(figures, counted)
        if not math.isfinite(loss_value) or not math.isfinite(norm):
            message = (
                f"TS-TRAIN-DIVERGED the loss at step {step} is {loss_value}, "
                f"the gradient norm {norm}"
            )
            raise TrtspecError(message, "train again with a smaller `lr`")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(len(self.features.samples[index].tokens) for index in indices)
        seconds = time.monotonic() - start
        return CurvePoint(step, self.total, loss_value, accuracy, rate, norm, tokens, seconds)

    @torch.no_grad()
    def evaluate(self, indices: list[int]) -> Evaluation:
        """Loss and accuracy by step on held-out samples. All counted positions weigh the same.

        Has the acceptance length too if the samples have answers (see `simulate_acceptance`).
        """
        samples = self.features.samples
        counted = self._counted(indices)
        figures = torch.zeros(1 + self.options.ttt_steps, dtype=torch.float64)
        simulated = torch.zeros(2, dtype=torch.float64)  # verifications, accepted drafts
        ordered = sorted(indices, key=lambda index: len(samples[index].tokens))
        size = self.options.batch_size
        for begin in range(0, len(ordered), size):
            batch = ordered[begin : begin + size]
            loss, agree = self._loss(batch, counted)
            figures += _figures(loss, agree).cpu()
            for row, index in enumerate(self.ranks.share(batch)):
                counts = simulate_acceptance(agree[:, row].tolist(), samples[index].answer)
                simulated += torch.tensor(counts)
        loss_value, accuracy = self._means(figures, counted)
        verifications, accepted = self.ranks.sum(simulated).tolist()
        evaluation: Evaluation = {"loss": loss_value, "accuracy": accuracy}
        if verifications:
            evaluation["acceptance_length"] = 1 + accepted / verifications
        return evaluation

    def _counted(self, indices: list[int]) -> Tensor:
        """int64 [K]: positions of these samples that count at each training-time-test step."""
        samples = (self.features.samples[index] for index in indices)
        counts = counted_positions(samples, self.options.ttt_steps, self.options.answer_only)
        return torch.tensor(counts)

    def _means(self, figures: Tensor, counted: Tensor) -> tuple[float, list[float]]:
        """(loss, agreement by step) over all processes, from this process's sums."""
        loss, *agreeing = self.ranks.sum(figures).tolist()
        pairs = zip(agreeing, counted.tolist(), strict=True)
        return loss, [agreed / max(1, count) for agreed, count in pairs]

    def _loss(self, indices: list[int], counted: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, agreement [K, B, S]) of this process's rows, as terms of the step's sums."""
        share = self.ranks.share(indices)
        batch = collate(self.features, share or indices[:1], self.options.answer_only, self.device)
        if not share:
            # Fewer rows than processes: this process computes a row that does not count.
            batch.positions = batch.positions[:0]
        is_bf16 = self.options.dtype == torch.bfloat16
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=is_bf16):
            counts = counted.to(self.device, non_blocking=True)
            terms: tuple[Tensor, Tensor] = self.objective(
                batch.tokens, batch.hidden, batch.aux, batch.positions, counts
            )
            return terms


def peak_learning_rate(options: TrainOptions, hidden_size: int) -> float:
    """The option `lr`, by default from the head's width."""
    if options.lr is not None:
        return options.lr
    return min(2e-3, PEAK_LR_TIMES_WIDTH / hidden_size)


def learning_rate(step: int, total: int, peak: float, options: TrainOptions) -> float:
    """The learning rate of `step`, counted from 1, of `total`.

    Rises linearly and reaches `peak` at the last step of the warm-up. By `schedule` it then falls
    along half a cosine to 0 at the last step, or stays.
    """
    # A warm-up below 1 is a share of the steps, at least one step. From 1 on it is their number.
    warmup_steps = min(round(options.warmup), total)
    if options.warmup < 1:
        warmup_steps = max(1, round(options.warmup * total))
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if options.schedule == "constant":
        return peak
    angle = math.pi * (step - warmup_steps) / max(1, total - warmup_steps)
    return peak * 0.5 * (1 + math.cos(angle))


def _figures(loss: Tensor, agree: Tensor) -> Tensor:
    """float64 [1 + K]: the loss, then the number of agreeing positions of each step."""
    loss_figure = loss.detach().double()[None]
    agreeing = agree.sum((1, 2)).double()
    return torch.cat([loss_figure, agreeing])


def read_back(figures: list[Tensor], norm: Tensor) -> tuple[Tensor, float]:
    """(sum of float64 `figures` on the host, gradient norm).

    Reads both in one transfer, which is the only wait of a step.
    """
    summed = torch.stack(figures).sum(0)
    norm_figure = norm.detach().double()[None]
    *sums, length = torch.cat([summed, norm_figure]).tolist()
    return torch.tensor(sums, dtype=torch.float64), length


def simulate_acceptance(agree: Sequence[Sequence[bool]], answer: Sequence[int]) -> tuple[int, int]:
    """(verifications, accepted drafts) over one sample. Runs no engine and generates nothing.

    The answer is verified as a server would do it. At each verification the head's drafts count up
    to the first that is not the target's best token. The target adds one token, and the next
    verification begins after it. Drafts after the first were made with the answer's own tokens in
    place of the head's. Both are the same while all drafts before agreed and the answer is the
    target's greedy answer. Acceptance length = 1 + accepted / verifications. The draft length is
    the number of training-time-test steps.

    Args:
        agree: `agree[k][q]` tells whether the draft of step k at row q is the target's best token.
        answer: `answer[t]` is 1 if the target wrote token t. The first token of an answer comes
            from the prompt's own pass.
    """
    verifications = accepted = begin = 0
    while begin < len(answer):
        end = begin
        while end < len(answer) and answer[end]:
            end += 1
        known = max(begin, 1)  # the last known token; the row before it drafts
        while known < end - 1:
            longest = min(len(agree), end - 1 - known)
            count = 0
            while count < longest and agree[count][known - 1 + count]:
                count += 1
            verifications += 1
            accepted += count
            known += count + 1
        begin = end + 1
    return verifications, accepted


class Objective(nn.Module):
    """Loss and agreement of one training module. Several processes wrap this module."""

    def __init__(self, model: TrainingModule, options: TrainOptions) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def forward(
        self, tokens: Tensor, hidden: Tensor, aux: Tensor, positions: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(this batch's term of the loss, its agreement bool [K, B, S] by the row that drafts).

        The loss is the mean over the positions of the step, summed over the training-time-test
        steps with weights `ttt_decay`^k. The terms of all batches and processes add up to it.

        Args:
            tokens: int64 [B, S].
            hidden: [B, S, H], after the target's final norm.
            aux: [B, S, n*H].
            positions: int64 [N], as in `TrainingBatch`.
            counted: [K], positions of the step over all batches and processes.
        """
        model = self.model
        steps = self.options.ttt_steps
        device = tokens.device
        dtype = model.target_rows.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.bfloat16
        normed = draft_states(model, tokens, aux.to(dtype), steps)
        rows, length = tokens.shape
        decay = self.options.ttt_decay ** torch.arange(steps, device=device)
        weights = (decay / counted.clamp_min(1)).float()
        depth = positions % length - 1
        teacher = Teacher(hidden.flatten(0, 1), model.target_rows, positions, depth, weights)
        states = tuple(state.flatten(0, 1) for state in normed)
        lm_head = model.eagle_module.lm_head.weight
        # `losses` chooses the dtype of each product itself.
        with torch.autocast(lm_head.device.type, enabled=False):
            if torch.is_grad_enabled():
                loss, agree = _LossWithGradients.apply(teacher, lm_head, *states)
            else:
                values, agree = losses(lm_head.to(teacher.lm_head.dtype), states, teacher)
                loss = values.sum().float()
        agreement = torch.zeros(steps, rows * length, dtype=torch.bool, device=device)
        agreement[:, positions - 1] = agree
        return loss, agreement.view(steps, rows, length)


def draft_states(model: TrainingModule, tokens: Tensor, aux: Tensor, steps: int) -> list[Tensor]:
    """The head's states after its norm, [B, S, H] for each training-time-test step.

    Args:
        tokens: int64 [B, S].
        aux: [B, S, n*H].
    """
    head = model.eagle_module
    with torch.no_grad():
        next_embeddings = model.embed_tokens(tokens.roll(-1, 1))
    position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
    state = head.fc(aux)
    cache = StepKeys()
    states = []
    for _ in range(steps):
        normed, output, _ = head(
            state,
            next_embeddings,
            None,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        # The state of a row goes to the row that drafts the next token from it.
        state = output.roll(1, 1)
        states.append(normed)
    return states


class StepKeys:
    """Keys and values of the steps so far, in place of a cache of transformers.

    Each step has its own item in the tuples, because `module.ttt_attention` reads them by step.
    """

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def update(
        self, key: Tensor, value: Tensor, *_: object
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        self.keys = (*self.keys, key)
        self.values = (*self.values, value)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0


class _LossWithGradients(torch.autograd.Function):
    """`losses`, summed over the steps.

    The forward pass also computes the gradients, chunk by chunk, so no logits are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, teacher: Teacher, lm_head: Tensor, *states: Tensor
    ) -> tuple[Tensor, Tensor]:
        lm_head_gradient = torch.zeros_like(lm_head, dtype=torch.float32)
        gradients = Gradients(lm_head_gradient, [torch.zeros_like(state) for state in states])
        values, agree = losses(lm_head.to(teacher.lm_head.dtype), states, teacher, gradients)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(agree)
        return values.sum().float(), agree

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gradients: Gradients = ctx.gradients
        del ctx.gradients
        factor = grads[0]
        lm_head_gradient = gradients.lm_head.mul_(factor)
        state_gradients = [gradient.mul_(factor) for gradient in gradients.states]
        return None, lm_head_gradient, *state_gradients


def losses(
    lm_head: Tensor,
    states: tuple[Tensor, ...],
    teacher: Teacher,
    gradients: Gradients | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """EAGLE-3's loss (arXiv 2503.01840) as ModelOpt has it: -sum p log q of each position.

    Returns (weighted loss of each step, float64 [K], whether the best draft is the target's best
    token, bool [K, N]). A row above a step's depth has no draft at that step. It weighs nothing and
    agrees with nothing. Softmax and sums are float32.

    Args:
        lm_head: [Vd, H] in the dtype of the products.
        states: K times [B*S, H], after the head's norm.
        gradients: is filled, if given.
        chunk: positions at a time. None: as many as CHUNK_ELEMENTS of logits.
    """
    count = len(teacher.positions)
    steps = len(states)
    chunk = chunk or chunk_positions(lm_head.shape[0], "cuda" if lm_head.is_cuda else "cpu")
    values = torch.zeros(steps, dtype=torch.float64, device=lm_head.device)
    agree = torch.zeros(steps, count, dtype=torch.bool, device=lm_head.device)
    for begin in range(0, count, chunk):
        span = slice(begin, begin + chunk)
        positions = teacher.positions[span]
        depth = teacher.depth[span]
        target_logits = teacher.hidden[positions].to(lm_head.dtype) @ teacher.lm_head.T
        best = target_logits.argmax(-1, keepdim=True)
        p = torch.log_softmax(target_logits, -1, dtype=torch.float32).exp_()
        for step, state in enumerate(states):
            rows = state[positions - 1].to(lm_head.dtype)
            logits = rows @ lm_head.T
            has_draft = depth >= step
            # argmax is not vectorized on a CPU, amax is.
            is_best = logits.gather(-1, best)[:, 0] >= logits.amax(-1)
            agree[step, span] = is_best & has_draft
            weight = has_draft * teacher.weights[step]
            log_q = torch.log_softmax(logits, -1, dtype=torch.float32)
            value = -torch.linalg.vecdot(p, log_q)
            values[step] += torch.dot(value.double(), weight.double())
            # The gradient by the logits is q - p. It overwrites log_q.
            gradient = log_q.exp_().sub_(p)
            if gradients is not None:
                gradient.mul_(weight[:, None])
                gradients.add(step, positions - 1, gradient, rows, lm_head)
    return values, agree


def chunk_positions(vocabulary: int, device: str) -> int:
    """How many positions have logits over the draft vocabulary at a time."""
    return max(64, CHUNK_ELEMENTS[device] // vocabulary)


@dataclass
class Gradients:
    """Gradients of the weighted sum of losses.

    `lm_head` (float32): by the head's lm_head. `states`: by the states of each step.
    """

    lm_head: Tensor
    states: list[Tensor]

    def add(self, step: int, index: Tensor, logits: Tensor, rows: Tensor, lm_head: Tensor) -> None:
        """Adds the gradients that follow from the gradient of a chunk's logits.

        logits: float32 [N, Vd], the gradient by `rows @ lm_head.T`. rows [N, H] are the states at
        `index` int64 [N].
        """
        logits = logits.to(lm_head.dtype)
        if logits.dtype == self.lm_head.dtype:
            self.lm_head.addmm_(logits.T, rows)
        else:
            self.lm_head.add_(logits.T @ rows)
        gradient = self.states[step]
        gradient.index_copy_(0, index, (logits @ lm_head).to(gradient.dtype))


@dataclass(frozen=True)
class Teacher:
    """The target's output, and the positions that count.

    Args:
        hidden: [B*S, H], after the target's final norm.
        lm_head: [Vd, H], rows of the draft vocabulary.
        positions: int64 [N], where the target's distribution is in the flattened batch. The head
            drafts at the row before.
        depth: int64 [N], the drafting row within its sequence, counted from 0.
        weights: float32 [K], factor of a position's loss at each training-time-test step.
    """

    hidden: Tensor
    lm_head: Tensor
    positions: Tensor
    depth: Tensor
    weights: Tensor
