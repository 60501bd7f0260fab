"""The one decoder layer of a draft head while it is trained, and attention under the training-time test.

transformers' own Llama and DeepSeek-V3 attention modules, in a layer whose input norm is *not* applied to the hidden
state: an Eagle3 head norms the token embedding with `input_layernorm` and the hidden state with `hidden_norm`, each
once, inside the attention's input. A stock decoder layer would norm the hidden state a second time in training, with
a gain that no server applies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3MLP,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

TTT_ATTENTION = "trtspec_ttt"
SCORES = 2**26  # of a later step that are kept at once: above it, some rows at a time


class DraftLayer(nn.Module):
    """y' = x + Attn(concat(LN(E), LN(x))), y = y' + MLP(LN(y')). ModelOpt's hook does the norms and the concat."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def set_rope(self, rope: nn.Module) -> None:
        self.__dict__["rope"] = rope  # not a submodule: its buffers follow from the config and are never stored

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: object | None = None,
        **_: object,
    ) -> Tensor:
        """hidden_states [B, S, H] -> [B, S, H], the residual stream before the final norm."""
        position_embeddings = self.__dict__["rope"](hidden_states.float(), position_ids)
        attended, _weights = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=position_embeddings,
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LlamaDraftLayer(DraftLayer):
    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.set_rope(LlamaRotaryEmbedding(config))


class MlaDraftLayer(DraftLayer):
    def __init__(self, config: DeepseekV3Config, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DeepseekV3Attention(config, layer_idx)
        self.mlp = DeepseekV3MLP(config)
        self.input_layernorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.set_rope(DeepseekV3RotaryEmbedding(config))


def ttt_attention(
    module: nn.Module,
    query: Tensor,
    key: tuple[Tensor, ...],
    value: tuple[Tensor, ...],
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of training-time-test step k over the keys of steps 0..k, all of S rows.

    query [B, h, S, d], key and value k + 1 times [B, kv, S, d]. The states move right by one row each step: at step k
    row q drafts for the context that ends at row q-k, so it sees step-0 keys up to q-k and, of step i >= 1, only row
    q-(k-i). Only the first block needs a full score matrix; each later one is a diagonal. Padding stands on the right,
    where no real row looks, so `attention_mask` is not needed. Returns [B, S, h, d] for transformers' interface.
    """
    step = len(key) - 1
    groups = query.shape[1] // key[0].shape[1]
    if groups > 1:
        key, value = (tuple(part.repeat_interleave(groups, 1) for part in parts) for parts in (key, value))
    if step == 0:
        attended = _causal(query, key[0], value[0], scaling)
    else:
        own = [(_shift_right(key[i], step - i), _shift_right(value[i], step - i)) for i in range(1, step + 1)]
        attended = _later_step(query * scaling, key[0], value[0], own)
    return attended.transpose(1, 2), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0:  # the fused kernel wants equal widths; MLA's values are narrower than its keys
        value = F.pad(value, (0, missing))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return attended[..., :-missing] if missing > 0 else attended


def _later_step(query: Tensor, key: Tensor, value: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """`own`: (keys, values) of the steps from 1 on, moved so that each row finds its own there.

    Long sequences take some rows at a time, whose scores are computed again in the backward pass: memory grows with the
    length, not with its square.
    """
    batch, heads, rows, _ = query.shape
    if batch * heads * rows * rows <= SCORES:
        return _some_rows(0, query, key, value, *(part for pair in own for part in pair))
    count = max(16, SCORES // 4 // (batch * heads * rows))
    parts = []
    for begin in range(0, rows, count):
        some = slice(begin, begin + count)
        seen = slice(0, min(rows, begin + count))  # a row sees no later one
        ours = (part[:, :, some] for pair in own for part in pair)
        blocks = (query[:, :, some], key[:, :, seen], value[:, :, seen])
        parts.append(checkpoint(_some_rows, begin, *blocks, *ours, use_reentrant=False))
    return torch.cat(parts, 2)


def _some_rows(begin: int, query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
    """Rows from `begin` on, which see `key` and `value` of step 0 causally, less the steps since, and their `own`."""
    steps = len(own) // 2
    row = torch.arange(begin, begin + query.shape[2], device=query.device)
    column = torch.arange(key.shape[2], device=query.device)
    scores = [(query @ key.transpose(2, 3)).masked_fill(column > row[:, None] - steps, -torch.inf)]
    for i in range(1, steps + 1):
        score = (query * own[2 * i - 2]).sum(-1, keepdim=True)
        scores.append(score.masked_fill((row < steps - i)[:, None], -torch.inf))
    weights = torch.softmax(torch.cat(scores, -1), dim=-1).to(query.dtype)
    attended = weights[..., : len(column)] @ value
    for i in range(1, steps + 1):
        attended = attended + weights[..., len(column) + i - 1, None] * own[2 * i - 1]
    return attended


def _shift_right(x: Tensor, by: int) -> Tensor:
    return x if by == 0 else x.roll(by, 2)


AttentionInterface.register(TTT_ATTENTION, ttt_attention)
