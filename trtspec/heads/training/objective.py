"""The training-time test: a head drafts several tokens on from every position at once, and is judged at each.

At step k, row q holds the state that the head made k drafts after the target's last one (row q - k) and the token that
follows row q in the text. The head therefore meets its own states in training, as it will when it drafts. ModelOpt's
own loop computes the same function (a test compares them) with all logits in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trtspec.heads.training.loss import Positions, Teacher, draft_loss
from trtspec.heads.training.module import TrainingModule
from trtspec.heads.training.options import TrainOptions


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
