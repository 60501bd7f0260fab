"""The one decoder layer of a draft head while it is trained, and attention under the training-time test.

transformers' own Llama and DeepSeek-V3 attention modules, in a layer whose input norm is *not* applied to the hidden
state: an Eagle3 head norms the token embedding with `input_layernorm` and the hidden state with `hidden_norm`, each
once, inside the attention's input. A stock decoder layer would norm the hidden state a second time in training, with
a gain that no server applies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3MLP,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

TTT_ATTENTION = "trtspec_ttt"


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
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: object | None = None,
        **_: object,
    ) -> torch.Tensor:
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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of training-time-test step k over the keys of steps 0..k, all of S rows.

    query [B, h, S, d], key and value [B, kv, (k+1)*S, d]. ModelOpt rolls the states right: at step k row q drafts for
    the context that ends at row q-k, so it sees step-0 keys up to q-k and, of step i >= 1, only row q-(k-i). Only the
    first block needs a full score matrix; each later one is a diagonal. Padding stands on the right, where no real row
    looks, so `attention_mask` is not needed. Returns [B, S, h, d] as transformers' interface wants it.
    """
    rows = query.shape[2]
    step = key.shape[2] // rows - 1
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if step == 0:
        attended = _causal(query, key, value, scaling)
    else:
        attended = _later_step(query, key.split(rows, 2), value.split(rows, 2), step, scaling)
    return attended.transpose(1, 2), None


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0:  # the fused kernel wants equal widths; MLA's values are narrower than its keys
        value = F.pad(value, (0, missing))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return attended[..., :-missing] if missing > 0 else attended


def _later_step(
    query: torch.Tensor, keys: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...], step: int, scaling: float
) -> torch.Tensor:
    rows = query.shape[2]
    query = query * scaling
    index = torch.arange(rows, device=query.device)
    scores = [(query @ keys[0].transpose(2, 3)).masked_fill(index[None, :] > index[:, None] - step, -torch.inf)]
    for i in range(1, step + 1):
        own = (query * _shift_right(keys[i], step - i)).sum(-1, keepdim=True)
        scores.append(own.masked_fill((index < step - i)[:, None], -torch.inf))
    weights = torch.softmax(torch.cat(scores, -1), dim=-1).to(query.dtype)
    attended = weights[..., :rows] @ values[0]
    for i in range(1, step + 1):
        attended = attended + weights[..., rows + i - 1, None] * _shift_right(values[i], step - i)
    return attended


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    return x if by == 0 else x.roll(by, 2)


AttentionInterface.register(TTT_ATTENTION, ttt_attention)
