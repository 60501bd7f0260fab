"""Judging a difference between two greedy runs: rounding at a near-tie, or a real one.

If two computations of the same logits differ by at most e, their argmax can only differ where the best logit leads
the second by at most 2e, in both. e is measured, never assumed: by computing the same positions in the shapes that
plain and speculative decoding use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtspec.engine.sequence import Completion

if TYPE_CHECKING:
    from trtspec.models.kimi import KimiModel


@dataclass(frozen=True)
class Divergence:
    """The first token at which two runs differ; `gap` is the larger lead of best over second logit in the two runs."""

    index: int
    token: int
    other_token: int
    gap: float

    def near_tie(self, bound: float) -> bool:
        """True when logits that differ by at most `bound` explain it."""
        return self.gap <= 2 * bound


def first_divergence(plain: Completion, other: Completion) -> Divergence | None:
    """Compares two completions of the same greedy request, both recorded with `record_gaps`; None: the same tokens."""
    for index, (left, right) in enumerate(zip(plain.token_ids, other.token_ids, strict=False)):
        if left != right:
            return Divergence(index, left, right, max(plain.gaps[index], other.gaps[index]))
    if len(plain.token_ids) != len(other.token_ids):  # equal tokens, so the end cannot be the model's doing
        index = min(len(plain.token_ids), len(other.token_ids))
        return Divergence(index, -1, -1, float("inf"))
    return None


@torch.inference_mode()
def rounding_bound(target: KimiModel, sequences: Iterable[list[int]], shapes: Iterable[tuple[int, int]]) -> float:
    """Largest difference of any logit of the same position between the given (rows, tokens per call) shapes.

    Each sequence is decoded through the cache once per shape, every row holding the same tokens.
    """
    shapes = list(shapes)
    bound = 0.0
    for tokens in sequences:
        reference, *others = (_logits(target, tokens, rows, width) for rows, width in shapes)
        for other in others:
            bound = max(bound, float((other - reference).abs().max()))
    return bound


def _logits(target: KimiModel, tokens: list[int], rows: int, width: int) -> Tensor:
    """Logits [len(tokens), V] of the last row when `rows` equal rows are computed `width` tokens at a time."""
    device = target.embed.weight.device
    block = torch.tensor(tokens, device=device).expand(rows, -1)
    cache = target.new_cache(rows, len(tokens))
    parts = []
    for begin in range(0, len(tokens), width):
        start = torch.full((rows,), begin, device=device)
        parts.append(target(block[:, begin : begin + width], start, cache).logits[-1])
    return torch.cat(parts)
