"""From logits to probabilities to tokens. Pure functions over whole batches; randomness comes in as uniform numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from trtspec.engine.sequence import TokenLogprobs


def probabilities(
    logits: Tensor, temperature: Tensor, top_p: Tensor | None = None, top_k: Tensor | None = None, most: int = 0
) -> Tensor:
    """The sampling distribution, float32 [N, ..., V], of logits [N, ..., V].

    `temperature` float32 [N] is > 0; `top_k` int64 [N] (0 = off) keeps the k likeliest tokens, then `top_p` float32 [N]
    (1 = off) keeps the smallest set whose mass reaches top_p. None for either means that no row asks for it. `most` is
    at least the largest top_k; 0: it is not known, or a row has top_k off.
    """
    shape = (-1, *([1] * (logits.dim() - 1)))
    logits = logits.float()
    # the best logit becomes 0 first: a tiny temperature then gives -inf to all others, never inf to the best
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.view(shape)
    if top_k is not None:
        scaled = keep_top_k(scaled, top_k.view(shape), most)
    probs = scaled.softmax(-1)
    return probs if top_p is None else keep_top_p(probs, top_p.view(shape))


def keep_top_k(logits: Tensor, top_k: Tensor, most: int = 0) -> Tensor:
    """Sets all but the `top_k` largest logits (and those equal to the last of them) to -inf; 0 keeps all.

    No top_k is above `most`, unless that is 0.
    """
    size = logits.shape[-1]
    kept = torch.where(top_k > 0, top_k, size).clamp(max=size)
    ordered = logits.topk(min(most, size) or size, dim=-1).values
    threshold = ordered.gather(-1, (kept - 1).expand(*logits.shape[:-1], 1))
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Nucleus sampling (arXiv 1904.09751): the smallest set of likeliest tokens with mass >= top_p, renormalised."""
    ordered, order = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered  # mass of the likelier tokens; the first is always kept
    kept = ordered.masked_fill((before >= top_p) & (top_p < 1) & (before > 0), 0.0)
    result = torch.zeros_like(probs).scatter_(-1, order, kept)
    return result / result.sum(-1, keepdim=True)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Token ids int64 [...] by the inverse distribution function: probs [..., V], uniform numbers [...] in [0, 1).

    Summed in float64: with a vocabulary of 163840 float32 would shift mass between tokens. Unnormalised probs are fine;
    a token of probability zero is never drawn.
    """
    cumulative = probs.double().cumsum(-1)
    threshold = uniform.double().unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)


def token_logprobs(scores: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """The chosen tokens' scores [T, V] and the `count` best ones of each row."""
    chosen = scores.gather(-1, torch.tensor(tokens, device=scores.device).unsqueeze(-1)).squeeze(-1).tolist()
    top = scores.topk(min(count, scores.shape[-1]), -1)
    ids, values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(token, chosen[row], list(zip(ids[row], values[row], strict=True)))
        for row, token in enumerate(tokens)
    ]
