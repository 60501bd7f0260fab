"""An Eagle3 draft head: one decoder layer over the target's captured states and the next token's embedding.

EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1 (arXiv 2605.09992), with latent (MLA) or Llama attention. Row t pairs the
target state of position t with the token of position t+1; its rope index is t.

    x = W_fc c                      c = captured states, low to high; EAGLE-3.1 norms each one first (fc_norm)
    y' = x + Attn(concat(LN(E[token]; input_layernorm), LN(x; hidden_norm)))
    y = y' + MLP(LN(y'; post_attention_layernorm))
    logits = W_lm LN(y; norm)       next step: x = y, or LN(y; norm) in EAGLE-3.1 (norm_output)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.layers import (
    MLP,
    AttentionStep,
    CausalMask,
    LatentAttention,
    Linear,
    PackedStep,
    RMSNorm,
    RopeTables,
    embedding,
)
from trtspec.models.state import LatentCache, State, TextPiece
from trtspec.specs import HeadSpec


class LlamaAttention(nn.Module):
    """Multi-head attention with grouped keys and values; q, k and v are one matrix, rope pairs are (i, i + d/2)."""

    def __init__(self, spec: HeadSpec, input_size: int) -> None:
        super().__init__()
        heads, kv_heads, head_dim = (
            spec.num_attention_heads,
            spec.num_key_value_heads,
            spec.head_dim,
        )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.qkv_proj = Linear(input_size, (heads + 2 * kv_heads) * head_dim)
        self.o_proj = Linear(heads * head_dim, spec.hidden_size)

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """x [B, T, input] -> [B, T, H]. Cached per token: rotated keys, then values, [2 * kv_heads * head_dim]."""
        batch, tokens, _ = x.shape
        qkv = self.qkv_proj(x).view(batch, tokens, -1, self.head_dim)
        rotated = step.rotate(qkv[:, :, : self.heads + self.kv_heads])
        entry = torch.cat(
            (rotated[:, :, self.heads :], qkv[:, :, self.heads + self.kv_heads :]), 2
        ).flatten(2)
        return self.o_proj(step.attend(entry, rotated[:, :, : self.heads], self.mix))

    def mix(self, queries: Tensor, entries: Tensor, mask: CausalMask) -> Tensor:
        """Attention of queries [B, T, heads, D] over cached entries [B, S, 2 * kv_heads * D] -> [B, T, heads * D]."""
        batch, tokens, *_ = queries.shape
        cached = entries.unflatten(-1, (2 * self.kv_heads, self.head_dim)).transpose(1, 2)
        groups = self.heads // self.kv_heads
        grouped = queries.unflatten(2, (self.kv_heads, groups)).permute(0, 2, 3, 1, 4)
        keys, values = cached[:, : self.kv_heads], cached[:, self.kv_heads :]
        scores = torch.matmul(
            grouped.flatten(2, 3) * self.head_dim**-0.5, keys.transpose(2, 3)
        )  # [B, kv, G*T, S]
        scores = scores.unflatten(2, (groups, tokens)) + mask.blocked[:, None, None]
        weights = scores.softmax(-1, dtype=torch.float32).to(queries.dtype).flatten(2, 3)
        attended = torch.matmul(weights, values).unflatten(2, (groups, tokens))  # [B, kv, G, T, D]
        return attended.permute(0, 3, 1, 2, 4).reshape(batch, tokens, -1)


class Eagle3Head(nn.Module):
    """The function that every server computes for a head of shape `spec`. Build with `head_weights.load_head`."""

    target_ids: (
        Tensor | None
    )  # of each draft id, int64 [Vd], ascending; None when the vocabulary is the target's

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        hidden, captured = spec.hidden_size, spec.num_aux * spec.target_hidden_size
        self.fc = Linear(captured, hidden)
        if spec.fc_norm:
            self.fc_norm = nn.Parameter(torch.ones(spec.num_aux, spec.target_hidden_size))
        if spec.norm_before_fc:
            self.input_norm = RMSNorm(captured, spec.rms_norm_eps)
        self.input_layernorm = RMSNorm(hidden, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(hidden, spec.rms_norm_eps)
        self.mla = spec.is_mla
        if (
            self.mla
        ):  # TensorRT-LLM and vLLM give a head's latent norms the config's eps, not the class's
            self.self_attn: nn.Module = LatentAttention(spec, 2 * hidden, spec.rms_norm_eps)
        else:
            self.self_attn = LlamaAttention(spec, 2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden, spec.rms_norm_eps)
        self.mlp = MLP(hidden, spec.intermediate_size)
        self.norm = RMSNorm(hidden, spec.rms_norm_eps)
        self.lm_head: nn.Module = Linear(hidden, spec.draft_vocab_size)
        self.embed: nn.Module = embedding(spec.vocab_size, hidden)
        self.register_buffer("target_ids", None, persistent=False)
        self.rope = RopeTables(
            spec.rope, spec.qk_rope_head_dim if self.mla else spec.head_dim, interleaved=self.mla
        )

    def new_cache(self, rows: int, max_len: int) -> State:
        """A cache for `rows` drafts of up to `max_len` tokens, in the head's dtype: one layer, as wide as the latent
        (MLA) or as K and V together (MHA)."""
        weight = self.fc.weight
        return LatentCache(
            1, rows, max_len, self.spec.kv_elements_per_token, weight.dtype, weight.device
        )

    def fuse(self, aux: Tensor) -> Tensor:
        """aux [B, T, n_aux * Ht], low layer to high -> x [B, T, H]. Once per row that has a true target state."""
        if self.spec.norm_before_fc:
            aux = self.input_norm(aux)
        if self.spec.fc_norm:
            states = aux.unflatten(-1, self.fc_norm.shape)
            aux = (
                F.rms_norm(states, self.fc_norm.shape[1:], eps=self.spec.rms_norm_eps)
                * self.fc_norm
            ).flatten(-2)
        return self.fc(aux)

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        start: Tensor | None,
        cache: State | None,
        row: int = 0,
        length: int | None = None,
        at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, H] with tokens int64 [B, T] -> (feedback, normed), both [B, T, H], or [B, 1, H] of position at[b] of
        each row where `at` int64 [B] is given.

        `start`, `cache`, `row` and `length` as in `AttentionStep`; a row's first state is at position start[b].
        """
        batch, count, _ = x.shape
        tables = self.rope.of(cache.max_len if cache else count, x.device)
        step = AttentionStep(batch, count, start, tables, self.mla, x.dtype, cache, row, length)
        return self._run(
            x, tokens, step, None if at is None else (torch.arange(batch, device=x.device), at)
        )

    def prompts(
        self, x: Tensor, tokens: Tensor, pieces: Sequence[TextPiece], cache: State
    ) -> tuple[Tensor, Tensor]:
        """x [1, N, H] with tokens int64 [1, N], of pieces of texts one behind the other -> (feedback, normed) of each
        one's last position, [1, pieces, H]."""
        step = PackedStep(pieces, cache, self.rope.of(cache.max_len, x.device), self.mla, x.dtype)
        last = torch.tensor([span.tokens.stop - 1 for span in step.spans]).to(
            x.device, non_blocking=True
        )
        feedback, normed = self._run(x, tokens, step, (torch.zeros_like(last), last))
        return feedback.transpose(0, 1), normed.transpose(0, 1)

    def _run(
        self, x: Tensor, tokens: Tensor, step: AttentionStep, kept: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """`kept`: rows and positions, [K] each; what comes behind attention is computed for them alone, [K, 1, H]."""
        inputs = torch.cat((self.input_layernorm(self.embed(tokens)), self.hidden_norm(x)), -1)
        y = x + self.self_attn(inputs, step)
        if kept is not None:
            y = y[kept].unsqueeze(1)
        y = y + self.mlp(self.post_attention_layernorm(y))
        normed = self.norm(y)
        return (normed if self.spec.norm_output else y), normed

    def logits(self, normed: Tensor) -> Tensor:
        """normed [..., H] -> float32 [..., Vd]."""
        return self.lm_head(normed).float()

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids, any shape -> ids of the target's vocabulary."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]


def parameter_count(spec: HeadSpec) -> int:
    """Trainable parameters: the head's own, without the target's embedding."""
    with torch.device("meta"):
        head = Eagle3Head(spec)
    return sum(
        value.numel() for name, value in head.named_parameters() if not name.startswith("embed.")
    )
