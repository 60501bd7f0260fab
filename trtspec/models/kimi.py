"""The Kimi-K2 text model in plain PyTorch: latent attention, a dense first layer, then mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trtspec.models.layers import (
    MLP,
    AttentionStep,
    LatentAttention,
    Linear,
    PackedStep,
    RMSNorm,
    RopeTables,
    embedding,
)
from trtspec.models.moe import MoE, Router
from trtspec.models.state import LatentCache, State, TextPiece
from trtspec.specs import ModelSpec


@dataclass
class TargetOutput:
    """logits float32 [B, T, V] (or [B, 1, V]); hidden [B, T, H] after the final norm; aux [B, T, n_aux*H] or None.
    margins [B, T], infinite unless recorded: the least lead of a token's chosen experts over others, in all layers."""

    logits: Tensor
    hidden: Tensor
    aux: Tensor | None
    margins: Tensor


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = LatentAttention(spec, spec.hidden_size)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        dense = index < spec.first_k_dense_replace
        self.mlp: nn.Module = MLP(spec.hidden_size, spec.intermediate_size) if dense else MoE(spec)

    def forward(self, x: Tensor, step: AttentionStep, kept: Tensor | None = None) -> Tensor:
        """x [B, T, H]; what comes behind attention is computed for the positions `kept` int64 [K] alone, if given."""
        x = x + self.self_attn(self.input_layernorm(x), step)
        if kept is not None:
            x = x[:, kept]
        return x + self.mlp(self.post_attention_layernorm(x))


class KimiModel(nn.Module):
    """Logits, final hidden states and, on request, the outputs of given decoder layers (an Eagle3 head's input)."""

    recording = False  # of margins

    def __init__(
        self, spec: ModelSpec, kv_dtype: torch.dtype | None = None, *, layers: int | None = None
    ) -> None:
        """`layers=0` leaves the decoder layers out: embeddings, final norm and lm_head alone (see stream.py)."""
        super().__init__()
        self.spec = spec
        self.kv_dtype = kv_dtype
        self.embed = embedding(spec.vocab_size, spec.hidden_size)
        count = spec.num_hidden_layers if layers is None else layers
        self.layers = nn.ModuleList(DecoderLayer(spec, index) for index in range(count))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size)
        self.rope = RopeTables(spec.rope, spec.qk_rope_head_dim, interleaved=True)

    def record_margins(self) -> None:
        """From now on outputs have margins."""
        for module in self.modules():
            if isinstance(module, KimiModel | Router):
                module.recording = True

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def new_cache(self, rows: int, max_len: int) -> State:
        """A cache for `rows` sequences of up to `max_len` tokens, in the model's dtype or FP8 (`kv_dtype`)."""
        width = self.spec.kv_lora_rank + self.spec.qk_rope_head_dim
        dtype = self.kv_dtype or self.dtype
        return LatentCache(len(self.layers), rows, max_len, width, dtype, self.embed.weight.device)

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
        """Runs tokens int64 [B, T]; `start`, `cache`, `row` and `length` as in `AttentionStep`.

        `aux_layers` are 0-based layer outputs, concatenated in ascending order; `last_only` keeps one row of logits.
        """
        batch, count = tokens.shape
        tables = self.rope.of(cache.max_len if cache else count, tokens.device)
        step = AttentionStep(batch, count, start, tables, True, self.dtype, cache, row, length)
        return self._run(
            tokens, step, aux_layers, scored=slice(-1, None) if last_only else slice(None)
        )

    def prompts(
        self,
        tokens: Tensor,
        pieces: Sequence[TextPiece],
        cache: State,
        aux_layers: tuple[int, ...],
        kept: Sequence[int],
    ) -> TargetOutput:
        """Runs tokens int64 [1, N]: pieces of texts, one behind the other, each in its cache row and seeing its own
        text only. `logits` and `hidden` are those of the positions `kept` alone, `aux` that of all."""
        step = PackedStep(
            pieces, cache, self.rope.of(cache.max_len, tokens.device), True, self.dtype
        )
        wanted = torch.tensor(kept).to(tokens.device, non_blocking=True)
        return self._run(tokens, step, aux_layers, wanted)

    def _run(
        self,
        tokens: Tensor,
        step: AttentionStep,
        aux_layers: tuple[int, ...],
        kept: Tensor | None = None,
        scored: slice = slice(None),
    ) -> TargetOutput:
        """Of all positions, or of those `kept` int64 [K] alone; all are captured. `scored`: those that need logits."""
        x, last = self.embed(tokens), len(self.layers) - 1
        captured, recorded = [], []
        for index, layer in enumerate(self.layers):
            narrow = index == last and last not in aux_layers
            x = layer(x, step.at(index), kept if narrow else None)
            if index in aux_layers:
                captured.append(x)
            if self.recording and isinstance(layer.mlp, MoE):
                margin = layer.mlp.gate.margin
                recorded.append(margin if kept is None or narrow else margin[kept])
        if kept is not None and last in aux_layers:
            x = x[:, kept]
        hidden = self.norm(x)
        margins = hidden.new_full(hidden.shape[:2], math.inf)
        for margin in recorded:
            margins = margins.minimum(margin.view(margins.shape))
        logits = self.lm_head(hidden[:, scored]).float()
        return TargetOutput(logits, hidden, torch.cat(captured, -1) if captured else None, margins)
