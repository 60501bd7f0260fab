"""From logits to probabilities to tokens, and which drafts are accepted.

All are pure functions over whole batches. They take their random numbers as arguments.

Sampled verification is Leviathan et al. 2023 (arXiv 2211.17192). Draft x is kept with probability
min(1, p(x)/q(x)). At the first rejection a token is drawn from max(p - q, 0), normalised. If all
are kept, one more is drawn from p. The result has exactly the target's distribution p, whatever the
drafter's distribution q was.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtspec.engine.sequence import Sequence, TokenLogprobs


@dataclass(frozen=True)
class BatchSampling:
    """Parameters of the S sampled rows of a batch. top_k comes before top_p.

    rows: int64 [S], in the batch.
    temperature: float32 [S], above 0.
    top_p: float32 [S], keeps the smallest set of likeliest tokens with that mass. 1: off. None: off
        in all rows.
    top_k: int64 [S], keeps the k likeliest tokens. 0: off. None: off in all rows.
    max_top_k: the largest top_k. 0 if it is unknown or if a row has top_k off.
    """

    rows: Tensor
    temperature: Tensor
    top_p: Tensor | None = None
    top_k: Tensor | None = None
    max_top_k: int = 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The sampling distribution, float32 [S, ..., V], of these rows' logits [S, ..., V]."""
        shape = (-1, *([1] * (logits.dim() - 1)))
        logits = logits.float()
        # The best logit becomes 0 first. A tiny temperature then gives -inf to all others, and
        # never inf to the best.
        scaled = (logits - logits.amax(-1, keepdim=True)) / self.temperature.view(shape)
        if self.top_k is not None:
            scaled = keep_top_k(scaled, self.top_k.view(shape), self.max_top_k)
        probs = scaled.softmax(-1)
        if self.top_p is not None:
            probs = keep_top_p(probs, self.top_p.view(shape))
        return probs

    @staticmethod
    def of(sequences: list[Sequence], device: torch.device) -> BatchSampling | None:
        """The parameters of a batch. None if every sequence is greedy."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.sampled]
        if not rows:
            return None
        requests = [sequences[row].request for row in rows]
        temperatures = [request.temperature for request in requests]
        top_p = [request.top_p for request in requests]
        top_k = [request.top_k for request in requests]
        return BatchSampling(
            on_device(rows, device),
            on_device(temperatures, device, torch.float32),
            on_device(top_p, device) if min(top_p) < 1 else None,
            on_device(top_k, device) if max(top_k) > 0 else None,
            max_top_k=max(top_k) if min(top_k) > 0 else 0,
        )


def keep_top_k(logits: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """Sets all but the `top_k` [..., 1] largest logits to -inf. 0 keeps all.

    Logits equal to the last one that is kept are kept too. If `max_top_k` is known, as in
    BatchSampling, fewer logits are sorted.
    """
    size = logits.shape[-1]
    kept = torch.where(top_k > 0, top_k, size).clamp(max=size)
    ordered = logits.topk(min(max_top_k, size) or size, dim=-1).values
    threshold = ordered.gather(-1, (kept - 1).expand(*logits.shape[:-1], 1))
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Nucleus sampling (arXiv 1904.09751).

    Keeps the smallest set of likeliest tokens with mass >= top_p, renormalised.
    """
    ordered, order = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered  # mass of the likelier tokens; the first is always kept
    kept = ordered.masked_fill((before >= top_p) & (top_p < 1) & (before > 0), 0.0)
    result = torch.zeros_like(probs).scatter_(-1, order, kept)
    return result / result.sum(-1, keepdim=True)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draws token ids int64 [...] by the inverse distribution function.

    Sums in float64: with a vocabulary of 163840 float32 would shift mass between tokens. A token of
    probability zero is never drawn.

    Args:
        probs: [..., V], need not be normalised.
        uniform: [...] in [0, 1).
    """
    cumulative = probs.double().cumsum(-1)
    threshold = uniform.double().unsqueeze(-1) * cumulative[..., -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return tokens.clamp(max=probs.shape[-1] - 1)


def leading(matches: Tensor, counts: Tensor | None = None) -> Tensor:
    """Accepted drafts per row, int64 [B]: how many leading columns of `matches` are true.

    Args:
        matches: bool [B, k].
        counts: int64 [B], how many of a row's drafts are offered. None: all.
    """
    accepted = matches.long().cumprod(-1).sum(-1)
    if counts is not None:
        accepted = torch.minimum(accepted, counts)
    return accepted


def on_host(tokens: Tensor, accepted: Tensor) -> list[list[int]]:
    """The tokens that each row emits, in one transfer from the device.

    These are the accepted (int64 [B]) first tokens (int64 [B, T]) of the row, and one more.
    """
    rows = torch.cat((tokens, accepted.unsqueeze(1)), 1).tolist()
    return [row[: row[-1] + 1] for row in rows]


def accept_sampled(
    target: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    uniform: Tensor,
    *,
    draft_ids: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (tokens int64 [B, k+1], accepted int64 [B]). Row b emits tokens[b, :accepted[b]+1].

    Args:
        target: float32 [B, k+1, V], p after the last token and after each draft.
        drafts: int64 [B, k], in target ids.
        draft_probs: float32 [B, k, Vd], the q from which each draft was drawn. None: the drafter is
            deterministic, q = 1.
        uniform: [B, k+1] in [0, 1), a number to accept each draft, and one to draw the token after.
        draft_ids: int64 [Vd], the draft vocabulary in target ids. None: the two are the same.
        counts: as in `leading`.
    """
    width = drafts.shape[1]
    rows = torch.arange(len(drafts), device=drafts.device)
    columns = drafts.unsqueeze(-1)
    p = target[:, :width].gather(-1, columns).squeeze(-1)
    q = draft_probs
    if q is not None and draft_ids is not None:
        # q is zero for tokens that a pruned draft vocabulary lacks.
        q = q.new_zeros(*q.shape[:-1], target.shape[-1]).index_copy_(-1, draft_ids, q)
    q_drafted = torch.ones_like(p) if q is None else q.gather(-1, columns).squeeze(-1)
    accepted = leading(uniform[:, :width] * q_drafted < p, counts)

    final = target[rows, accepted]
    if width:
        last = accepted.clamp(max=width - 1)
        offered = counts
        if offered is None:
            offered = torch.full_like(accepted, width)
        if q is None:
            rejected_id = drafts[rows, last].unsqueeze(1)
            rejected = torch.zeros_like(final).scatter_(1, rejected_id, float("inf"))
        else:
            rejected = q[rows, last]
        final = torch.where((accepted < offered).unsqueeze(1), residual(final, rejected), final)
    tokens = torch.cat((drafts, drafts.new_zeros(len(drafts), 1)), 1)
    tokens[rows, accepted] = draw(final, uniform[:, width])
    return tokens, accepted


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) of [B, V], normalised. p itself if rounding leaves nothing.

    A deterministic drafter's q is infinite at the draft, which is then never drawn.
    """
    left = (p - q).clamp_(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass, p)


def token_logprobs(scores: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """The scores [T, V] of the chosen tokens [T], and the `count` best ones of each row."""
    columns = torch.tensor(tokens, device=scores.device).unsqueeze(-1)
    chosen = scores.gather(-1, columns).squeeze(-1).tolist()
    top = scores.topk(min(count, scores.shape[-1]), -1)
    ids = top.indices.tolist()
    values = top.values.tolist()
    return [
        TokenLogprobs(token, chosen[row], array("i", ids[row]), array("d", values[row]))
        for row, token in enumerate(tokens)
    ]


def on_device(values: list[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies `values` to a tensor of the device, without the wait of `torch.tensor` there.

    The driver stages a copy from memory that is not pinned (CUDA driver API, "API synchronization
    behavior").
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
