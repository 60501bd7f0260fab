"""Sampling of tokens from logits, and acceptance of drafts.

All functions work on whole batches, have no side effects, and get their random numbers as
arguments.

Sampled verification follows Leviathan et al. 2023 (arXiv 2211.17192). Draft x is accepted with
probability min(1, p(x)/q(x)). At the first rejection, a token is drawn from max(p - q, 0),
normalised. If all drafts are accepted, one more token is drawn from p. The emitted tokens have
exactly the target's distribution p, for any distribution q of the drafter.
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
    """Sampling parameters of the S sampled rows of a batch. top_k is applied before top_p.

    rows: int64 [S], indices of the rows in the batch.
    temperature: float32 [S], above 0.
    top_p: float32 [S], mass of the likeliest tokens that are kept. 1: off. None: off in all rows.
    top_k: int64 [S], number of the likeliest tokens that are kept. 0 or less: off. None: off in all
        rows.
    max_top_k: largest top_k of the rows. 0 if top_k is off in a row.
    """

    rows: Tensor
    temperature: Tensor
    top_p: Tensor | None = None
    top_k: Tensor | None = None
    max_top_k: int = 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the sampling distribution, float32 [S, ..., V].

        `logits` [S, ..., V]: logits of the sampled rows only.
        """
        ones = [1] * (logits.dim() - 1)
        shape = (-1, *ones)  # broadcasts a parameter [S] over the other dimensions
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
        """Returns the sampling parameters of a batch. None if every sequence is greedy."""
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
    """Returns logits [..., V] with all but the largest set to -inf.

    Logits equal to the smallest kept logit are kept too.

    Args:
        logits: [..., V].
        top_k: int64 [..., 1], number of logits to keep. 0 or less keeps all.
        max_top_k: largest value in `top_k`, so that fewer logits are sorted. 0 if a row keeps all.
    """
    size = logits.shape[-1]
    kept = torch.where(top_k > 0, top_k, size).clamp(max=size)
    ordered = logits.topk(min(max_top_k, size) or size, dim=-1).values
    smallest_kept = (kept - 1).expand(*logits.shape[:-1], 1)  # its index in `ordered`
    threshold = ordered.gather(-1, smallest_kept)
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Returns the nucleus of probabilities [..., V], renormalised (arXiv 1904.09751).

    The nucleus is the smallest set of likeliest tokens with mass >= `top_p` [..., 1].
    """
    ordered, order = probs.sort(-1, descending=True)
    mass_before = ordered.cumsum(-1) - ordered  # mass of the likelier tokens
    # The likeliest token has nothing before it, and is always kept.
    dropped = (mass_before >= top_p) & (top_p < 1) & (mass_before > 0)
    kept = ordered.masked_fill(dropped, 0.0)
    result = torch.zeros_like(probs).scatter_(-1, order, kept)
    return result / result.sum(-1, keepdim=True)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draws one token per distribution by inverting the cumulative distribution.

    Returns token ids, int64 [...]. A token of probability zero is never drawn.

    Args:
        probs: [..., V], which need not be normalised.
        uniform: [...], random numbers in [0, 1).
    """
    # With a vocabulary of 163,840 tokens, sums in float32 would shift mass between tokens.
    cumulative = probs.double().cumsum(-1)
    threshold = uniform.double().unsqueeze(-1) * cumulative[..., -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return tokens.clamp(max=probs.shape[-1] - 1)


def leading(matches: Tensor, counts: Tensor | None = None) -> Tensor:
    """Number of accepted drafts of each row, int64 [B].

    Args:
        matches: bool [B, k], whether each draft is acceptable. Only leading true columns count.
        counts: int64 [B], number of drafts that a row offers. None: all rows offer k.
    """
    accepted = matches.long().cumprod(-1).sum(-1)
    if counts is not None:
        accepted = torch.minimum(accepted, counts)
    return accepted


def on_host(tokens: Tensor, accepted: Tensor) -> list[list[int]]:
    """Returns the tokens that each row emits, with one transfer from the device.

    Args:
        tokens: int64 [B, T], accepted drafts of each row, then one token of the target.
        accepted: int64 [B], number of accepted drafts of each row.
    """
    # The last column of a row is its number of accepted drafts.
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
    """Accepts or rejects drafts, and draws the token after the accepted drafts.

    Returns tokens (int64 [B, k+1]) and the number of accepted drafts (int64 [B]). Row b emits
    tokens[b, :accepted[b]+1].

    Args:
        target: float32 [B, k+1, V], target's distribution p after the last token and each draft.
        drafts: int64 [B, k], as target ids.
        draft_probs: float32 [B, k, Vd], drafter's distribution q of each draft. None: the drafter
            is deterministic, so q is 1 at the draft.
        uniform: [B, k+1], random numbers in [0, 1): k to accept drafts, and 1 to draw the token.
        draft_ids: int64 [Vd], target id of each token of the draft vocabulary. None: both
            vocabularies are the same.
        counts: int64 [B], number of drafts that each row offers. None: all rows offer k.
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
    # Equal to u < p / q, without a division by zero.
    accepted = leading(uniform[:, :width] * q_drafted < p, counts)

    final = target[rows, accepted]
    if width:
        # Index of the first rejected draft. The clamp is for rows that accepted all drafts.
        last = accepted.clamp(max=width - 1)
        offered = counts
        if offered is None:
            offered = torch.full_like(accepted, width)
        if q is None:
            rejected_id = drafts[rows, last].unsqueeze(1)
            rejected = torch.zeros_like(final).scatter_(1, rejected_id, float("inf"))
        else:
            rejected = q[rows, last]
        has_rejected = (accepted < offered).unsqueeze(1)
        final = torch.where(has_rejected, residual(final, rejected), final)
    tokens = torch.cat((drafts, drafts.new_zeros(len(drafts), 1)), 1)
    tokens[rows, accepted] = draw(final, uniform[:, width])
    return tokens, accepted


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Returns max(p - q, 0), normalised: the distribution after a rejected draft, [B, V].

    For a deterministic drafter, q is infinite at the draft, so that the draft is never drawn. If
    rounding leaves no mass, returns p.
    """
    excess = (p - q).clamp_(min=0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)


def token_logprobs(scores: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """Returns the log-probabilities of T chosen tokens, and of the likeliest alternatives.

    Args:
        scores: [T, V], log-probabilities of all tokens.
        tokens: ids of the chosen tokens.
        count: number of alternatives per chosen token.
    """
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
    """Returns `values` as a tensor on the device, without waiting for the device.

    `torch.tensor(..., device=device)` would wait. The CUDA driver stages a non-blocking copy of
    pageable memory (CUDA driver API, "API synchronization behavior").
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
