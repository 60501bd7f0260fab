"""Texts with what a target computed on them, and how often an Eagle3 head's first draft agrees with it.

Teacher-forced: one causal pass of the head over a text gives its first draft at every position, from the target's own
states. So one pass judges a head, and another one the same head with something in it exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.kimi import KimiModel

FORWARD_TOKENS = 2048


@dataclass(frozen=True)
class CapturedText:
    """Row t of each tensor belongs to position t.

    tokens int64 [S]; `begin` >= 1 is the first token that the target wrote; choices int64 [S]: the target's likeliest
    token after each position; states: outputs [S, Ht] of the captured layers.
    """

    tokens: Tensor
    begin: int
    choices: Tensor
    states: dict[int, Tensor]

    def aux(self, layers: Iterable[int]) -> Tensor:
        """The states of `layers` side by side, [S, n * Ht]: what a head's fc reads."""
        return torch.cat([self.states[layer] for layer in layers], -1)

    @property
    def previous(self) -> list[int]:
        """The tokens after which a first draft is judged; `wanted` holds what the target takes there."""
        return self.tokens[self.begin :].tolist()

    @property
    def wanted(self) -> Tensor:
        """int64 [S - begin]: the target's choice after each token that it wrote."""
        return self.choices[self.begin :]


@torch.inference_mode()
def capture(target: KimiModel, tokens: list[int], begin: int, layers: tuple[int, ...]) -> CapturedText:
    """Runs the target once over a text of which it wrote the tokens from `begin` on; `layers` ascend."""
    device = target.embed.weight.device
    output = target(torch.tensor([tokens], device=device), aux_layers=layers)
    assert output.aux is not None
    parts = output.aux[0].chunk(len(layers), -1)
    states = {layer: part.clone() for layer, part in zip(layers, parts, strict=True)}
    return CapturedText(torch.tensor(tokens), begin, output.logits[0].argmax(-1).cpu(), states)


@torch.inference_mode()
def first_draft_hits(head: Eagle3Head, layers: tuple[int, ...], texts: list[CapturedText]) -> list[Tensor]:
    """For each text, bool [S - begin]: whether the first draft after each written token is what the target takes.

    Row t of the head pairs the state at t with the token at t+1 and drafts the token at t+2. Texts of similar length
    run together, padded on the right: a causal pass does not see what comes later.
    """
    weight, hits = head.fc.weight, {}
    for batch in _similar_length(texts):
        longest = max(len(texts[at].tokens) for at in batch)
        aux = weight.new_zeros(len(batch), longest - 1, head.fc.in_features)
        following = torch.zeros(len(batch), longest - 1, dtype=torch.int64)
        for row, at in enumerate(batch):
            count = len(texts[at].tokens) - 1
            aux[row, :count] = texts[at].aux(layers)[:-1].to(weight.device, weight.dtype)
            following[row, :count] = texts[at].tokens[1:]
        _, normed = head(head.fuse(aux), following.to(weight.device), None, None)
        for row, at in enumerate(batch):
            rows = normed[row, texts[at].begin - 1 : len(texts[at].tokens) - 1]
            hits[at] = head.to_target_ids(head.logits(rows).argmax(-1)).cpu() == texts[at].wanted
    return [hits[at] for at in range(len(texts))]


def _similar_length(texts: list[CapturedText]) -> Iterator[list[int]]:
    """Numbers of texts, short ones first, in batches of at most FORWARD_TOKENS padded tokens."""
    batch: list[int] = []
    for at in sorted(range(len(texts)), key=lambda at: len(texts[at].tokens)):
        if batch and (len(batch) + 1) * len(texts[at].tokens) > FORWARD_TOKENS:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch
