"""The text model of Kimi-K2, K2-Thinking, K2.5, K2.6 and K2.7-Code in plain PyTorch.

The architecture is DeepSeek-V3's (arXiv 2412.19437): latent attention (mla.py) and, after a first
dense layer, mixtures of experts (moe.py). attention.py has the positions of a call's tokens,
state.py the memory of the layers. fast.py has faster forms of some of these modules for the engine.

Shapes: B rows, T tokens of the call, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trtspec.models.attention import AttentionStep, batch_step, prompt_step
from trtspec.models.layers import MLP, Linear, RMSNorm, embedding
from trtspec.models.mla import LatentAttention
from trtspec.models.moe import MoE, Router
from trtspec.models.rope import RotaryEmbedding
from trtspec.models.state import LatentCache, State, TextPiece
from trtspec.specs import ModelSpec


@dataclass
class TargetOutput:
    """The result of a forward pass of the target.

    Args:
        logits: float32 [B, T, V], for the requested positions only.
        hidden: states [B, T, H] after the final norm.
        aux: outputs of the captured layers side by side, [B, T, n_aux * H]. None if none is
            captured.
        margins: smallest lead, over all layers, of the chosen experts' scores over the others, for
            each position of the logits. Infinite unless `record_margins` was called.
    """

    logits: Tensor
    hidden: Tensor
    aux: Tensor | None
    margins: Tensor


class KimiModel(nn.Module):
    """The text model of a Kimi target.

    The model computes logits, final hidden states and the outputs of chosen decoder layers, which
    an Eagle3 head reads.
    """

    def __init__(
        self, spec: ModelSpec, kv_dtype: torch.dtype | None = None, *, layers: int | None = None
    ) -> None:
        """Builds the model with uninitialized weights.

        kv_dtype: dtype of the cache. None: the model's dtype.
        layers: number of decoder layers. None: all. stream.py uses 0.
        """
        super().__init__()
        self.spec = spec
        self.kv_dtype = kv_dtype
        self.embed = embedding(spec.vocab_size, spec.hidden_size)
        if layers is None:
            layers = spec.num_hidden_layers
        self.layers = nn.ModuleList(DecoderLayer(spec, index) for index in range(layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size)
        self.rope = RotaryEmbedding(spec.rope, spec.qk_rope_head_dim, interleaved=True)

    def forward(
        self,
        tokens: Tensor,
        start: Tensor | None = None,
        cache: State | None = None,
        row: int = 0,
        aux_layers: tuple[int, ...] = (),
        last_only: bool = False,
        length: int | None = None,
    ) -> TargetOutput:
        """Runs the model over token ids int64 [B, T].

        start, cache, row, length: as in `batch_step`.
        aux_layers: 0-based layers whose outputs are captured, in ascending order.
        last_only: whether only the last position needs logits.
        """
        step = batch_step(tokens, self.rope, self.dtype, start, cache, row, length)
        scored = slice(-1, None) if last_only else slice(None)
        return self._run(tokens, step, aux_layers, scored)

    def prompts(
        self,
        tokens: Tensor,
        pieces: Sequence[TextPiece],
        cache: State,
        aux_layers: tuple[int, ...],
        scored: Sequence[int],
    ) -> TargetOutput:
        """Runs the model over pieces of several texts, one after the other in a single row.

        Each text has its own row of the cache, and a piece attends to this row only.

        tokens: token ids of all pieces, int64 [1, T].
        aux_layers: 0-based layers whose outputs are captured, in ascending order.
        scored: indices in T of the positions that need logits.
        """
        step = prompt_step(pieces, self.rope, self.dtype, cache, tokens.device)
        positions = torch.tensor(scored).to(tokens.device, non_blocking=True)
        return self._run(tokens, step, aux_layers, positions)

    def _run(
        self,
        tokens: Tensor,
        step: AttentionStep,
        aux_layers: tuple[int, ...],
        scored: slice | Tensor,
    ) -> TargetOutput:
        """Runs the model over token ids int64 [B, T].

        scored: slice or indices in T of the positions that need logits.
        """
        x = self.embed(tokens)
        margins = x.new_full(tokens.shape, math.inf)
        captured = []
        for index, layer in enumerate(self.layers):
            x = layer(x, step.at(index))
            if index in aux_layers:
                captured.append(x)
            if isinstance(layer.mlp, MoE) and layer.mlp.gate.recording:
                margins = margins.minimum(layer.mlp.gate.margin.view_as(margins))
        hidden = self.norm(x)
        aux = None
        if captured:
            aux = torch.cat(captured, -1)
        logits = self.lm_head(hidden[:, scored]).float()
        return TargetOutput(logits, hidden, aux, margins[:, scored])

    def new_cache(self, rows: int, max_len: int) -> State:
        """Makes an empty cache for `rows` sequences of up to `max_len` tokens."""
        width = self.spec.kv_lora_rank + self.spec.qk_rope_head_dim
        dtype = self.kv_dtype or self.dtype
        return LatentCache(len(self.layers), rows, max_len, width, dtype, self.embed.weight.device)

    def record_margins(self) -> None:
        """Makes later calls compute the `margins` of `TargetOutput`."""
        for module in self.modules():
            if isinstance(module, Router):
                module.recording = True

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype


class DecoderLayer(nn.Module):
    """A decoder layer: attention, then MLP, each after a norm and added to its input.

    The MLP of a layer from `first_k_dense_replace` on is a mixture of experts.
    """

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = LatentAttention(spec, spec.hidden_size)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        dense = index < spec.first_k_dense_replace
        self.mlp: nn.Module = MLP(spec.hidden_size, spec.intermediate_size) if dense else MoE(spec)

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Computes the layer's output [B, T, H] for x [B, T, H]."""
        x = x + self.self_attn(self.input_layernorm(x), step)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output
