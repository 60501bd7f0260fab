"""The loop that trains a draft head, and its loss. It can resume after any kill.

The training-time test: a head drafts several tokens from every position of a sequence, and the loss
compares each draft with the target. At training-time-test step k, row q (index q of the sequence)
has two inputs. One is the head's own state, computed k drafts after the target's last state (row
q - k). The other is the token that follows row q in the text. So the head learns from its own
states, as it will when it drafts.

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

EVALUATIONS = 10  # evaluations on held-out samples in a whole run, unless `eval_every` is given
# The default peak learning rate falls with the hidden size: 2e-3 at 256, 7e-5 at Kimi's 7168.
PEAK_LR_TIMES_WIDTH = 0.5
MAX_DEFAULT_LR = 2e-3
MIN_CHUNK_POSITIONS = 64
# Logits of a chunk, by device type. In float32 they fit the cache of a CPU core, or take 1 GiB of a
# GPU.
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
    """Trains the head of `stepper` in place, with AdamW and a learning-rate schedule.

    Saves the state of the run every `run.save_every` optimizer steps, and after its last one. A
    second call with the same `fingerprint` resumes from the saved state, and its curve equals the
    curve of an uninterrupted run. Raises TrtspecError if the loss is NaN or infinite. Raises
    UsageError if the saved state belongs to another run.

    Args:
        fingerprint: options and digests of the inputs, which a resumed run must repeat.
        on_step: function that gets the figures of every optimizer step.
        export: function that writes the heads that are due after an optimizer step.
        stop: collector of the reasons to end before the last step.
    """
    ranks = stepper.ranks
    total = stepper.total
    parameters = stepper.parameters
    optimizer = stepper.optimizer
    saved = load_state(run, parameters, optimizer, fingerprint, total)
    resumed_at = saved.step
    ranks.wait()  # no process saves before all have read
    # Only the main process has a curve. It also saves the state.
    curve = Curve(run.curve, saved.position) if ranks.main else None
    result = TrainingResult(resumed_at, total)
    start = time.monotonic()
    longest_step_s = 0.0
    longest_save_s = 0.0
    steps = list(data.steps())[resumed_at:]
    evaluate_every = stepper.options.eval_every or max(1, total // EVALUATIONS)
    for index, (step, batches) in enumerate(steps):
        is_last = step == total
        # The states of the next step are fetched while this step computes.
        for _, expected_batches in steps[index : index + 2]:
            for batch in expected_batches:
                stepper.features.expect(ranks.share(batch))
        point = stepper.step(step, batches)
        result.tokens += point.tokens
        point.tokens_per_second = result.tokens / (time.monotonic() - start)
        if data.held and (is_last or step % evaluate_every == 0):
            point.held_out = stepper.evaluate(data.held[:MAX_HELD_OUT])
        if curve:
            curve.add(point)
        result.steps = step
        longest_step_s = max(longest_step_s, point.seconds)
        # The deadline must leave time for one more step and for saving it.
        stopping = not is_last and stop.should_stop(ranks, longest_step_s + longest_save_s)
        save_start = time.monotonic()
        export(point)
        if curve and (stopping or is_last or step % run.save_every == 0):
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
    """The progress of a run at the end of `train_head`.

    Args:
        steps: number of optimizer steps that are done, with the steps before a resume.
        total: number of optimizer steps of the whole run.
        tokens: number of tokens, without padding, that all processes have trained on in this call.
        stopped: reason why the run ended before its last step. None if the run is complete.
    """

    steps: int
    total: int
    tokens: int = 0
    stopped: str | None = None

    @property
    def finished(self) -> bool:
        return self.steps == self.total

    def to_dict(self) -> TrainingProgress:
        """Returns the fields that the provenance record keeps."""
        return {
            "steps": self.steps,
            "total": self.total,
            "finished": self.finished,
            "stopped": self.stopped,
        }


class Stepper:
    """Runs optimizer steps and evaluations. Each process computes its share of a global batch.

    Args:
        total: number of optimizer steps of the whole run, which the learning rate depends on.
    """

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

    def step(self, step: int, batches: list[list[int]]) -> CurvePoint:
        """Runs one optimizer step over several batches, and returns the figures of the step.

        All positions of the batches that count in the loss have the same weight. Raises
        TrtspecError if the loss or the gradient norm is NaN or infinite.

        Args:
            step: number of the optimizer step, counted from 1.
            batches: sample indices of each batch.
        """
        start = time.monotonic()
        rate = learning_rate(step, self.total, self.peak_lr, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        indices = list(chain.from_iterable(batches))
        counted = self._counted(indices)
        batch_sums = []
        # DistributedDataParallel averages the gradients of all processes at the last batch only. A
        # single process has no wrapper with `no_sync`.
        no_sync = getattr(self.objective, "no_sync", contextlib.nullcontext)
        for number, batch in enumerate(batches, 1):
            context = no_sync if number < len(batches) else contextlib.nullcontext
            with context():
                loss, agree = self._loss(batch, counted)
                # DistributedDataParallel divides by the number of processes. The losses of the
                # processes must add up.
                (loss * self.ranks.size).backward()
            batch_sums.append(_loss_and_agreement(loss, agree))
        gradient_norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.options.grad_clip)
        sums, norm = read_back(batch_sums, gradient_norm)
        loss_value, accuracy = self._means(sums, counted)
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
        """Evaluates the head on the held-out samples `indices`.

        Returns `loss`, and `accuracy` (agreement with the target, one fraction for each
        training-time-test step). Adds `acceptance_length`, in tokens per verification, if the
        samples have answers (see `simulate_acceptance`).
        """
        samples = self.features.samples
        counted = self._counted(indices)
        sums = torch.zeros(1 + self.options.ttt_steps, dtype=torch.float64)
        simulated = torch.zeros(2, dtype=torch.float64)  # verifications, accepted drafts
        # Samples of similar length share a batch, because shorter samples are padded.
        ordered = sorted(indices, key=lambda index: len(samples[index].tokens))
        size = self.options.batch_size
        for begin in range(0, len(ordered), size):
            batch = ordered[begin : begin + size]
            loss, agree = self._loss(batch, counted)
            sums += _loss_and_agreement(loss, agree).cpu()
            for row, index in enumerate(self.ranks.share(batch)):
                counts = simulate_acceptance(agree[:, row].tolist(), samples[index].answer)
                simulated += torch.tensor(counts)
        loss_value, accuracy = self._means(sums, counted)
        verifications, accepted = self.ranks.sum(simulated).tolist()
        evaluation: Evaluation = {"loss": loss_value, "accuracy": accuracy}
        if verifications:
            evaluation["acceptance_length"] = 1 + accepted / verifications
        return evaluation

    def _counted(self, indices: list[int]) -> Tensor:
        """Counts the positions of these samples that count in the loss.

        Returns int64 [K], one number for each training-time-test step.
        """
        samples = (self.features.samples[index] for index in indices)
        counts = counted_positions(samples, self.options.ttt_steps, self.options.answer_only)
        return torch.tensor(counts)

    def _means(self, sums: Tensor, counted: Tensor) -> tuple[float, list[float]]:
        """Adds up the sums of all processes, and divides the agreements by the counted positions.

        Returns the loss, and the fraction of drafts that agree with the target at each
        training-time-test step.

        Args:
            sums: loss and numbers of agreeing drafts of this process, float64 [1 + K].
        """
        loss, *agreeing = self.ranks.sum(sums).tolist()
        pairs = zip(agreeing, counted.tolist(), strict=True)
        return loss, [agreed / max(1, count) for agreed, count in pairs]

    def _loss(self, indices: list[int], counted: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the loss of this process's share of a batch.

        Returns this share's term of the optimizer step's loss. Also returns bool [K, B, S]: whether
        the draft of each training-time-test step and position agrees with the target.

        Args:
            counted: number of positions that count in the whole optimizer step, int64 [K].
        """
        share = self.ranks.share(indices)
        batch = collate(self.features, share or indices[:1], self.options.answer_only, self.device)
        if not share:
            # All processes must run the backward pass. Without a sample of its own, this process
            # computes the batch's first sample, of which no position counts.
            batch.positions = batch.positions[:0]
        is_bf16 = self.options.dtype == torch.bfloat16
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=is_bf16):
            counts = counted.to(self.device, non_blocking=True)
            terms: tuple[Tensor, Tensor] = self.objective(
                batch.tokens, batch.hidden, batch.aux, batch.positions, counts
            )
            return terms


def peak_learning_rate(options: TrainOptions, hidden_size: int) -> float:
    """Highest learning rate of the schedule: the option `lr`, or a default from `hidden_size`."""
    if options.lr is not None:
        return options.lr
    return min(MAX_DEFAULT_LR, PEAK_LR_TIMES_WIDTH / hidden_size)


def learning_rate(step: int, total: int, peak: float, options: TrainOptions) -> float:
    """Learning rate of optimizer step `step` (counted from 1) of `total`.

    The rate rises linearly, and reaches `peak` at the last step of the warm-up. After the warm-up,
    the schedule `constant` keeps the rate. The schedule `cosine` lowers it along half a cosine, to
    0 at step `total`.
    """
    # A warm-up below 1 is a share of the steps, at least one step. From 1 on it is their number.
    warmup = options.warmup
    warmup_steps = min(round(warmup), total)
    if warmup < 1:
        warmup_steps = max(1, round(warmup * total))
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if options.schedule == "constant":
        return peak
    angle = math.pi * (step - warmup_steps) / max(1, total - warmup_steps)
    return peak * 0.5 * (1 + math.cos(angle))


def _loss_and_agreement(loss: Tensor, agree: Tensor) -> Tensor:
    """Joins the loss and the number of agreeing drafts of each training-time-test step.

    Returns float64 [1 + K] on the device.

    Args:
        agree: bool [K, B, S].
    """
    loss_entry = loss.detach().double()[None]
    agreeing = agree.sum((1, 2)).double()
    return torch.cat([loss_entry, agreeing])


def read_back(batch_sums: list[Tensor], norm: Tensor) -> tuple[Tensor, float]:
    """Copies the figures of an optimizer step from the device to the host.

    Returns the total of `batch_sums` (float64) and the gradient norm. The function makes a single
    transfer, because the host waits for the device at each transfer.
    """
    summed = torch.stack(batch_sums).sum(0)
    norm_entry = norm.detach().double()[None]
    *sums, norm_value = torch.cat([summed, norm_entry]).tolist()
    return torch.tensor(sums, dtype=torch.float64), norm_value


def simulate_acceptance(agree: Sequence[Sequence[bool]], answer: Sequence[int]) -> tuple[int, int]:
    """Counts the verifications and the accepted drafts that a server would have over one sample.

    Runs no engine and generates no token. Each verification accepts the drafts before the first
    draft that is not the target's best token. The target adds one token, and the next verification
    begins after that token. The draft length is the number of training-time-test steps. The
    acceptance length is 1 + accepted / verifications.

    The head drafted with the answer's tokens as context, and a server drafts with the head's own
    tokens. The two contexts are the same up to the first refused draft of a greedy answer.

    Args:
        agree: `agree[k][q]` tells whether the draft of training-time-test step k at index q is the
            target's best token.
        answer: `answer[t]` is 1 if the target wrote token t. The first token of an answer comes
            from the prompt's own forward pass.
    """
    verifications = accepted = begin = 0
    while begin < len(answer):
        # `begin` to `end` is one answer: tokens in a row that the target wrote. It may be empty.
        end = begin
        while end < len(answer) and answer[end]:
            end += 1
        # The state before the last known token drafts, and token 0 has no state before it.
        last_known = max(begin, 1)
        while last_known < end - 1:
            drafts = min(len(agree), end - 1 - last_known)
            agreed = 0
            while agreed < drafts and agree[agreed][last_known - 1 + agreed]:
                agreed += 1
            verifications += 1
            accepted += agreed
            last_known += agreed + 1
        begin = end + 1
    return verifications, accepted


class Objective(nn.Module):
    """Computes the loss of the head in `model`, and which of its drafts agree with the target.

    In a group of processes DistributedDataParallel wraps this module.
    """

    def __init__(self, model: TrainingModule, options: TrainOptions) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def forward(
        self, tokens: Tensor, hidden: Tensor, aux: Tensor, positions: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes this batch's term of the loss of one optimizer step.

        The loss of an optimizer step is the mean over its counted positions at each
        training-time-test step k, summed over k with weights `ttt_decay`^k. The terms of all
        batches and processes add up to this loss. Also returns bool [K, B, S]: whether the draft of
        training-time-test step k at each position is the target's best token.

        Args:
            tokens: int64 [B, S].
            hidden: states [B, S, H] after the target's final norm.
            aux: captured layer outputs [B, S, n*H].
            positions: int64 [N], as in `TrainingBatch`.
            counted: number of positions that count in the whole optimizer step over all batches and
                processes, [K].
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
        # The state before a position drafts the position's next token.
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
    """Runs the head `steps` times, each time on the states of the training-time-test step before.

    Returns the states after the head's norm, [B, S, H] for each training-time-test step.

    Args:
        tokens: int64 [B, S].
        aux: captured layer outputs of the target, [B, S, n*H].
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
        # The next training-time-test step has each state at the following index of the sequence.
        state = output.roll(1, 1)
        states.append(normed)
    return states


class StepKeys:
    """Keys and values of the training-time-test steps so far, in place of a transformers cache.

    Each step has its own item in the tuples, because `module.ttt_attention` treats the first step
    and the later steps differently.
    """

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def update(
        self, key: Tensor, value: Tensor, *_: object
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Appends the keys and values of one step. Returns the keys and values of all steps."""
        self.keys = (*self.keys, key)
        self.values = (*self.values, value)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Returns 0, because the positions of every training-time-test step begin at 0."""
        return 0


class _LossWithGradients(torch.autograd.Function):
    """Autograd function for the sum of `losses` over the training-time-test steps.

    The forward pass also computes the gradients, chunk by chunk. So the backward pass needs no
    logits.
    """

    @staticmethod
    def forward(
        ctx: Any, teacher: Teacher, lm_head: Tensor, *states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss (float32 scalar) and the agreement, bool [K, N].

        Keeps the gradients in `ctx` for `backward`.
        """
        lm_head_gradient = torch.zeros_like(lm_head, dtype=torch.float32)
        gradients = Gradients(lm_head_gradient, [torch.zeros_like(state) for state in states])
        values, agree = losses(lm_head.to(teacher.lm_head.dtype), states, teacher, gradients)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(agree)
        return values.sum().float(), agree

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Returns the kept gradients, multiplied by the incoming gradient of the loss."""
        gradients: Gradients = ctx.gradients
        del ctx.gradients  # `ctx` may live longer, and the gradients are large
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
    """Computes EAGLE-3's loss (arXiv 2503.01840) as ModelOpt does: -sum p log q of each position.

    p is the target's distribution, and q the head's. Returns the weighted loss of each
    training-time-test step, float64 [K], and whether the head's best token is the target's best,
    bool [K, N]. A position whose depth is less than a step's number has no draft at that step. Such
    a position has loss 0 and agreement False. Softmax is computed in float32.

    Args:
        lm_head: weight [Vd, H] of the head's lm_head, in the dtype of the products.
        states: states after the head's norm, [B*S, H] for each training-time-test step.
        gradients: sums to which the gradients are added. None: no gradients are computed.
        chunk: number of positions whose logits exist at a time. None: CHUNK_ELEMENTS decides.
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
    """Number of positions of a chunk, whose logits over the draft vocabulary exist at a time.

    Args:
        vocabulary: number of tokens in the draft vocabulary.
        device: key of CHUNK_ELEMENTS.
    """
    return max(MIN_CHUNK_POSITIONS, CHUNK_ELEMENTS[device] // vocabulary)


@dataclass
class Gradients:
    """Gradients of the weighted sum of losses.

    Args:
        lm_head: gradient by the weight of the head's lm_head, float32 [Vd, H].
        states: gradients by the head's normed states, [B*S, H] for each training-time-test step.
    """

    lm_head: Tensor
    states: list[Tensor]

    def add(
        self, step: int, index: Tensor, logit_gradient: Tensor, rows: Tensor, lm_head: Tensor
    ) -> None:
        """Adds the gradients that follow from the gradient of a chunk's logits.

        Args:
            step: number of the training-time-test step, counted from 0.
            index: int64 [N], indices of the chunk's states in the flattened batch.
            logit_gradient: float32 [N, Vd], gradient by the logits `rows @ lm_head.T`.
            rows: [N, H], states of the chunk in the dtype of the products.
        """
        logit_gradient = logit_gradient.to(lm_head.dtype)
        # addmm_ needs equal dtypes, and saves a copy of the product.
        if logit_gradient.dtype == self.lm_head.dtype:
            self.lm_head.addmm_(logit_gradient.T, rows)
        else:
            self.lm_head.add_(logit_gradient.T @ rows)
        gradient = self.states[step]
        gradient.index_copy_(0, index, (logit_gradient @ lm_head).to(gradient.dtype))


@dataclass(frozen=True)
class Teacher:
    """The target's states and lm_head, and the positions that count in the loss.

    Args:
        hidden: states [B*S, H] after the target's final norm.
        lm_head: rows [Vd, H] of the target's lm_head for the draft vocabulary.
        positions: int64 [N], indices of the counted positions in the flattened batch. The head's
            draft for a position is computed at the index before.
        depth: int64 [N], index within its sequence of the state that drafts, counted from 0.
        weights: float32 [K], factor of a position's loss at each training-time-test step.
    """

    hidden: Tensor
    lm_head: Tensor
    positions: Tensor
    depth: Tensor
    weights: Tensor
