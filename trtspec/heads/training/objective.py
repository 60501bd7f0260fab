"""What a draft head is trained to minimise, and the training-time test: a head drafts several tokens on from every
position at once, and is judged at each.

At step k, row q holds the state that the head made k drafts after the target's last one (row q - k) and the token that
follows row q in the text. The head therefore meets its own states in training, as it will when it drafts. ModelOpt's
own loop computes the same function (a test compares them) with all logits in memory.

Logits of a whole batch over a vocabulary of 163,840 do not fit beside a head: 20,000 tokens are 13 GB for each
training-time-test step. Here the target's distribution and the head's logits exist for a chunk of positions at a time,
and the gradients are taken while they are there, so nothing over the vocabulary is kept for the backward pass. The
products are those of the plain formula; only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trtspec.heads.training.module import TrainingModule
from trtspec.heads.training.options import TrainOptions

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**28}  # logits of a chunk: the cache of a CPU core, 1 GiB of a GPU


@dataclass(frozen=True)
class Positions:
    """The positions that count. `target` int64 [N]: where the target's distribution is, as places in the flattened
    batch; the head's row is the one before. `depth` int64 [N]: that row within its sequence, counted from 0.
    `weights` float32 [K]: the factor of a position's loss at each training-time-test step."""

    target: Tensor
    depth: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Teacher:
    """The target's end: `hidden` [B*S, H] after its final norm, `lm_head` [Vd, H] its rows of the draft vocabulary."""

    hidden: Tensor
    lm_head: Tensor


def cross_entropy(p: Tensor, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """-sum p log q, EAGLE-3's own (arXiv 2503.01840) and ModelOpt's; the gradient of the logits is q - p."""
    value = -torch.linalg.vecdot(p, log_q)
    return value, log_q.exp_().sub_(p)


def kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """sum p (log p - log q): cross entropy less the target's own entropy, so the same gradient and 0 at best."""
    value = torch.linalg.vecdot(p, log_p - log_q)
    return value, log_q.exp_().sub_(p)


def reverse_kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """sum q (log q - log p), which seeks one mode; the gradient is q (log q - log p - value)."""
    q = log_q.exp()
    apart = log_q.sub_(log_p)
    value = torch.linalg.vecdot(q, apart)
    return value, apart.sub_(value[:, None]).mul_(q)


def total_variation(p: Tensor, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """sum |p - q| / 2: one minus the chance that a draft drawn from q is accepted. With s the sign of q - p, halved,
    the gradient is q (s - sum q s)."""
    q = log_q.exp_()
    apart = q - p
    value = apart.abs().sum(-1) / 2
    sign = apart.sign_().mul_(0.5)
    return value, sign.sub_(torch.linalg.vecdot(q, sign)[:, None]).mul_(q)


# (p, log p, log q), each float32 [N, V] -> (value [N], gradient of the logits [N, V]); log q may be overwritten
FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "cross-entropy": cross_entropy, "kl": kl, "reverse-kl": reverse_kl, "total-variation": total_variation,
}  # fmt: skip


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


def losses(
    name: str, lm_head: Tensor, states: tuple[Tensor, ...], teacher: Teacher, positions: Positions,
    gradients: Gradients | None = None, chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weighted loss of each step float64 [K], whether the best draft is the target's best token bool [K, N]).

    lm_head [Vd, H] and states, K times [B*S, H] after the head's norm, in the dtype of the products; softmax and sums
    in float32. `gradients` are filled where given. `chunk`: positions at a time, by default CHUNK_ELEMENTS of logits.
    Positions whose row is above a step's depth have no draft at that step: they weigh nothing, and agree with nothing.
    """
    count, steps = len(positions.target), len(states)
    chunk = chunk or max(64, CHUNK_ELEMENTS["cuda" if lm_head.is_cuda else "cpu"] // lm_head.shape[0])
    values = torch.zeros(steps, dtype=torch.float64, device=lm_head.device)
    agree = torch.zeros(steps, count, dtype=torch.bool, device=lm_head.device)
    for begin in range(0, count, chunk):
        part = slice(begin, begin + chunk)
        places, depth = positions.target[part], positions.depth[part]
        wanted = teacher.hidden[places].to(lm_head.dtype) @ teacher.lm_head.T
        best = wanted.argmax(-1, keepdim=True)
        log_p = torch.log_softmax(wanted, -1, dtype=torch.float32)
        p = log_p.exp()
        for step, state in enumerate(states):
            rows = state[places - 1].to(lm_head.dtype)
            drafted = rows @ lm_head.T
            # argmax is not vectorized on a CPU, amax is
            agree[step, part] = (drafted.gather(-1, best)[:, 0] >= drafted.amax(-1)) & (depth >= step)
            weight = (depth >= step) * positions.weights[step]
            value, gradient = FORMULAS[name](p, log_p, torch.log_softmax(drafted, -1, dtype=torch.float32))
            values[step] += torch.dot(value.double(), weight.double())
            if gradients is not None:
                gradients.add(step, places - 1, gradient.mul_(weight[:, None]).to(lm_head.dtype), rows, lm_head)
    return values, agree


class _Loss(torch.autograd.Function):
    """`losses`, summed over the steps, whose gradients are there when the forward pass is done."""

    @staticmethod
    def forward(ctx: Any, name: str, teacher: Teacher, positions: Positions, lm_head: Tensor, *states: Tensor):
        gradients = Gradients(torch.zeros_like(lm_head, dtype=torch.float32), [torch.zeros_like(s) for s in states])
        values, agree = losses(name, lm_head.to(teacher.lm_head.dtype), states, teacher, positions, gradients)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(agree)
        return values.sum().float(), agree

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found: Gradients = ctx.gradients
        del ctx.gradients
        return None, None, None, found.lm_head.mul_(grads[0]), *(part.mul_(grads[0]) for part in found.states)


def draft_loss(
    name: str, lm_head: Tensor, states: tuple[Tensor, ...], teacher: Teacher, positions: Positions
) -> tuple[Tensor, Tensor]:
    """(the weighted sum of `losses` over the steps, a float32 scalar with gradients; agreement [K, N])."""
    with torch.autocast(lm_head.device.type, enabled=False):
        if torch.is_grad_enabled():
            return _Loss.apply(name, teacher, positions, lm_head, *states)
        values, agree = losses(name, lm_head.to(teacher.lm_head.dtype), states, teacher, positions)
        return values.sum().float(), agree


class StepKeys:
    """Keys and values of the steps so far, for attention modules that take a cache of transformers: each step's apart,
    in a tuple, because `decoder.ttt_attention` looks at them apart."""

    def __init__(self, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        self.keys, self.values = keys, values

    def update(self, key: Tensor, value: Tensor, *_: object) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        self.keys, self.values = (*self.keys, key), (*self.values, value)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0


def draft_states(
    model: TrainingModule, tokens: Tensor, aux: Tensor, steps: int, recompute: bool = False
) -> list[Tensor]:
    """The head's states after its norm, [B, S, H] for each training-time-test step.

    tokens int64 [B, S]; aux [B, S, n*H]. `recompute`: the layer's activations are computed again in the backward pass
    in place of being kept, for a third more time.
    """
    head = model.eagle_module
    with torch.no_grad():
        following = model.embed_tokens(tokens.roll(-1, 1))
    places = torch.arange(tokens.shape[1], device=tokens.device)[None]

    def step(state: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        cache = StepKeys(kept[: len(kept) // 2], kept[len(kept) // 2 :])
        normed, output, _ = head(state, following, None, position_ids=places, past_key_values=cache, use_cache=True)
        return normed, output.roll(1, 1), cache.keys[-1], cache.values[-1]

    state, found = head.fc(aux), []
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()
    for _ in range(steps):
        arguments = (state, *keys, *values)
        normed, state, key, value = checkpoint(step, *arguments, use_reentrant=False) if recompute else step(*arguments)
        keys, values = (*keys, key), (*values, value)
        found.append(normed)
    return found


class Objective(nn.Module):
    """Loss and agreement of one training module: what is wrapped for several processes."""

    def __init__(self, model: TrainingModule, options: TrainOptions, recompute: bool = False) -> None:
        super().__init__()
        self.model, self.options, self.recompute = model, options, recompute

    def forward(
        self, tokens: Tensor, hidden: Tensor, aux: Tensor, places: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(this batch's part of the loss, its part of the agreement [K, B, S] by the row that drafts, bool).

        tokens int64 [B, S]; hidden [B, S, H] after the target's final norm; aux [B, S, n*H]; places int64 [N] as in
        `TrainingBatch`; counted [K]: the positions of the whole step, over all of whose batches and processes the parts
        of the loss add up. The loss is the mean over positions, summed over the steps with weights `ttt_decay`^k.
        """
        steps, model = self.options.ttt_steps, self.model
        dtype = torch.bfloat16 if torch.is_autocast_enabled(tokens.device.type) else model.target_rows.dtype
        normed = draft_states(model, tokens, aux.to(dtype), steps, self.recompute)
        rows, length = tokens.shape
        decay = self.options.ttt_decay ** torch.arange(steps, device=tokens.device)
        positions = Positions(places, places % length - 1, (decay / counted.clamp_min(1)).float())
        teacher = Teacher(hidden.flatten(0, 1), model.target_rows)
        flat = tuple(state.flatten(0, 1) for state in normed)
        loss, agree = draft_loss(self.options.loss, model.eagle_module.lm_head.weight, flat, teacher, positions)
        agreement = torch.zeros(steps, rows * length, dtype=torch.bool, device=tokens.device)
        agreement[:, places - 1] = agree
        return loss, agreement.view(steps, rows, length)
