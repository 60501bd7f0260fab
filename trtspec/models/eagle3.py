"""An Eagle3 draft head: one decoder layer over captured target states and the next embedding.

EAGLE-3 (arXiv 2503.01840) and EAGLE-3.1 (arXiv 2605.09992), with latent (MLA) or Llama attention.
Input t pairs the target state of position t with the token of position t+1. Its rope index is t.

    x = W_fc c                      c = captured states, low to high (in EAGLE-3.1 after fc_norm)
    y' = x + Attn(concat(LN(E[token], input_layernorm), LN(x, hidden_norm)))
    y = y' + MLP(LN(y', post_attention_layernorm))
    logits = W_lm LN(y, norm)       next step: x = y, or LN(y, norm) in EAGLE-3.1 (norm_output)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.attention import AttentionStep, CausalMask, batch_step, prompt_step
from trtspec.models.layers import MLP, Linear, RMSNorm, embedding
from trtspec.models.mla import LatentAttention
from trtspec.models.rope import RotaryEmbedding
from trtspec.models.state import LatentCache, State, TextPiece
from trtspec.specs import HeadSpec


class Eagle3Head(nn.Module):
    """An Eagle3 draft head, as every server computes it. `head_weights.load_head` builds one.

    Shapes: B rows, T tokens of a call, H hidden size, Ht hidden size of the target, n_aux captured
    layers, Vd draft vocabulary.
    """

    # Target id of each draft id, int64 [Vd], ascending. None if the vocabulary is the target's.
    target_ids: Tensor | None

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        hidden = spec.hidden_size
        eps = spec.rms_norm_eps
        captured = spec.num_aux * spec.target_hidden_size
        self.fc = Linear(captured, hidden)
        if spec.fc_norm:
            self.fc_norm = nn.Parameter(torch.ones(spec.num_aux, spec.target_hidden_size))
        if spec.norm_before_fc:
            self.input_norm = RMSNorm(captured, eps)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        if spec.is_mla:
            # TensorRT-LLM and vLLM give a head's latent norms the eps of the config.
            self.self_attn: nn.Module = LatentAttention(spec, 2 * hidden, eps)
            rope_dim = spec.qk_rope_head_dim
        else:
            self.self_attn = LlamaAttention(spec, 2 * hidden)
            rope_dim = spec.head_dim
        self.rope = RotaryEmbedding(spec.rope, rope_dim, interleaved=spec.is_mla)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, spec.intermediate_size)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head: nn.Module = Linear(hidden, spec.draft_vocab_size)
        self.embed: nn.Module = embedding(spec.vocab_size, hidden)
        self.register_buffer("target_ids", None, persistent=False)

    def fuse(self, aux: Tensor) -> Tensor:
        """Fuses the captured layer outputs of the target into the head's input x [B, T, H].

        Args:
            aux: captured layer outputs from the lowest layer to the highest, [B, T, n_aux * Ht].
        """
        if self.spec.norm_before_fc:
            aux = self.input_norm(aux)
        if self.spec.fc_norm:
            states = aux.unflatten(-1, self.fc_norm.shape)
            normed = F.rms_norm(states, self.fc_norm.shape[1:], eps=self.spec.rms_norm_eps)
            aux = (normed * self.fc_norm).flatten(-2)
        fused: Tensor = self.fc(aux)
        return fused

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
        """Runs the head over the states x [B, T, H] and the tokens that follow them, int64 [B, T].

        Returns the states that the next draft step takes as x, and the normed states for `logits`.
        The two tensors are [B, T, H], or [B, 1, H] if `at` is given.

        start, cache, row, length: as in `batch_step`. A row's first state is at position start[b].
        at: int64 [B], index in T of the only output that each row needs. None: all T outputs.
        """
        step = batch_step(tokens, self.rope, x.dtype, start, cache, row, length)
        if at is None:
            return self._run(x, tokens, step)
        rows = torch.arange(len(x), device=x.device)
        return self._run(x, tokens, step, (rows, at))

    def prompts(
        self, x: Tensor, tokens: Tensor, pieces: Sequence[TextPiece], cache: State
    ) -> tuple[Tensor, Tensor]:
        """Runs the head over pieces of several texts, one after the other in a single row.

        Returns the same two tensors as `forward`, for the last position of each piece,
        [1, pieces, H].

        x: states of all pieces, [1, T, H].
        tokens: tokens that follow the states, int64 [1, T].
        """
        step = prompt_step(pieces, self.rope, x.dtype, cache, x.device)
        ends = [span.tokens.stop - 1 for span in step.spans]
        last = torch.tensor(ends).to(x.device, non_blocking=True)
        feedback, normed = self._run(x, tokens, step, (torch.zeros_like(last), last))
        return feedback.transpose(0, 1), normed.transpose(0, 1)

    def _run(
        self,
        x: Tensor,
        tokens: Tensor,
        step: AttentionStep,
        selected: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes the states for the next draft step, and the normed states for `logits`.

        selected: row indices [K] and position indices [K] of the outputs that are needed. The MLP
            runs for these outputs only, and the results are [K, 1, H]. None: the MLP runs for all
            outputs, and the results are [B, T, H].
        """
        embedded = self.input_layernorm(self.embed(tokens))
        states = self.hidden_norm(x)
        inputs = torch.cat((embedded, states), -1)
        y = x + self.self_attn(inputs, step)
        if selected is not None:
            y = y[selected].unsqueeze(1)
        y = y + self.mlp(self.post_attention_layernorm(y))
        normed = self.norm(y)
        feedback = normed if self.spec.norm_output else y
        return feedback, normed

    def logits(self, normed: Tensor) -> Tensor:
        """Computes the logits of the draft vocabulary, float32 [..., Vd], from normed [..., H]."""
        logits: Tensor = self.lm_head(normed)
        return logits.float()

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Returns the target's token ids of draft ids of any shape."""
        if self.target_ids is None:
            return draft_ids
        return self.target_ids[draft_ids]

    def new_cache(self, rows: int, max_len: int) -> State:
        """Makes an empty cache for `rows` drafts of up to `max_len` tokens, in the head's dtype.

        The cache has one layer. An entry is the latent and its rope key (MLA), or K and V (MHA).
        """
        weight = self.fc.weight
        width = self.spec.kv_elements_per_token
        return LatentCache(1, rows, max_len, width, weight.dtype, weight.device)


class LlamaAttention(nn.Module):
    """Multi-head attention with grouped keys and values (GQA). q, k and v share one weight matrix.

    The cache entry of a token has the rotated keys, then the values, [2 * K * D]. Shapes: N heads,
    K key-value heads, D size of a head.
    """

    def __init__(self, spec: HeadSpec, input_size: int) -> None:
        super().__init__()
        self.heads = spec.num_attention_heads
        self.kv_heads = spec.num_key_value_heads
        self.head_dim = spec.head_dim
        self.qkv_proj = Linear(input_size, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, spec.hidden_size)

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Computes the attention's output [B, T, H] for x [B, T, input]."""
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 2)
        q, k = step.rotate(qk).split((self.heads, self.kv_heads), 2)
        entry = torch.cat((k, v), 2).flatten(2)
        attended = step.attend(entry, q, self.attention)
        output: Tensor = self.o_proj(attended.flatten(2))
        return output

    def attention(self, queries: Tensor, entries: Tensor, mask: CausalMask) -> Tensor:
        """Computes the attention of the queries over the entries of the cache, [B, T, N, D].

        queries: rotated queries, [B, T, N, D].
        entries: entries of the cache, [B, S, 2 * K * D].
        """
        batch, tokens, *_ = queries.shape
        cached = entries.unflatten(-1, (2 * self.kv_heads, self.head_dim)).transpose(1, 2)
        keys, values = cached.chunk(2, 1)  # [B, K, S, D]
        # The heads of a group are further tokens of its one key: [B, K, G * T, D].
        grouped = queries.unflatten(2, (self.kv_heads, -1)).permute(0, 2, 3, 1, 4)
        scaled = grouped.flatten(2, 3) * self.head_dim**-0.5
        scores = torch.matmul(scaled, keys.mT).unflatten(2, (-1, tokens))
        scores = scores + mask.blocked[:, None, None]  # [B, K, G, T, S]
        weights = scores.softmax(-1, dtype=torch.float32).to(queries.dtype)
        attended: Tensor = torch.matmul(weights.flatten(2, 3), values).unflatten(2, (-1, tokens))
        return attended.permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, T, N, D]


def parameter_count(spec: HeadSpec) -> int:
    """Number of trainable parameters of a head, without the target's embedding."""
    with torch.device("meta"):
        head = Eagle3Head(spec)
    return sum(
        value.numel() for name, value in head.named_parameters() if not name.startswith("embed.")
    )
