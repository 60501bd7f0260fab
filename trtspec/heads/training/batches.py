"""Which samples make up which step: a pure function of the seed, so that a resumed run continues the same sequence."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from trtspec.heads.training.features import Features

WINDOW_BATCHES = 16  # samples are sorted by length within this many batches: little padding, much shuffling


@dataclass
class TrainingBatch:
    """tokens, loss_mask [B, S]; hidden [B, S, H]; aux [B, S, n_aux*H]; padded on the right."""

    tokens: Tensor
    hidden: Tensor
    aux: Tensor
    loss_mask: Tensor
    real_tokens: int


def split_held_out(ids: list[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """(training indices, held-out indices): the samples whose ids hash lowest, `share` of them, one at the least when
    there are ten; a sample's place does not depend on the order of the data."""

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}:{ids[index]}".encode()).digest()

    count = round(share * len(ids))
    if share > 0 and count == 0 and len(ids) >= 10:
        count = 1
    held = sorted(sorted(range(len(ids)), key=rank)[:count])
    chosen = set(held)
    return [index for index in range(len(ids)) if index not in chosen], held


def batches_of_epoch(lengths: list[int], indices: list[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Every index once: shuffled, sorted by length within windows, cut into batches, the batches shuffled."""
    shuffler = random.Random(f"{seed}:{epoch}")
    order = list(indices)
    shuffler.shuffle(order)
    window = WINDOW_BATCHES * batch_size
    batches = []
    for begin in range(0, len(order), window):
        part = sorted(order[begin : begin + window], key=lambda index: lengths[index])
        batches += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    shuffler.shuffle(batches)
    return batches


def collate(features: Features, indices: list[int], answer_only: bool, device: str = "cpu") -> TrainingBatch:
    """Gathers the samples' states. The mask marks positions whose *next* token counts: every one but the last, or
    those before a token that the target wrote."""
    length = max(len(features.samples[index].tokens) for index in indices)
    tokens = torch.zeros(len(indices), length, dtype=torch.int64)
    mask = torch.zeros(len(indices), length)
    features.expect(indices)
    states = [features.states(index) for index in indices]
    hidden, aux = (torch.zeros(len(indices), length, part.shape[-1], dtype=torch.bfloat16) for part in states[0])
    for row, index in enumerate(indices):
        sample = features.samples[index]
        count = len(sample.tokens)
        tokens[row, :count] = torch.tensor(sample.tokens)
        hidden[row, :count], aux[row, :count] = states[row]
        if answer_only:
            mask[row, : count - 1] = torch.tensor(sample.answer[1:], dtype=torch.float32)
        else:
            mask[row, :count] = 1.0
    real = sum(len(features.samples[index].tokens) for index in indices)
    return TrainingBatch(tokens.to(device), hidden.to(device), aux.to(device), mask.to(device), real)
