"""Building blocks shared by the Kimi target and the Eagle3 heads: linears, rotary embedding, latent attention, MLP.

Shapes: B batch, T tokens of this call, S cached positions, H hidden, N heads, C kv_lora_rank, R rope dims.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.packed import PackedWeight
from trtspec.specs import HeadSpec, ModelSpec, RopeSpec

# The published DeepSeek-V3 / Kimi definition gives its two latent norms this epsilon, not config.rms_norm_eps.
LATENT_NORM_EPS = 1e-6
PACKED_ROWS = 64  # with more rows a float32 product is bound by arithmetic and the packed weight gains nothing


class Linear(nn.Module):
    """y = x W^T without bias, W stored [out, in]. models/quantized.py holds its NVFP4 form.

    decoding.py may lay the weight out differently in memory or add a packed copy; its values and shape stay.
    """

    used_in_parts = False  # set where code reads parts of the weight and never calls the module
    packed: PackedWeight | None = None  # set by decoding.py

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None or torch.is_grad_enabled():
            return F.linear(x, self.weight)
        if x.numel() > PACKED_ROWS * self.in_features and x.dtype == torch.float32:
            return F.linear(x, self.weight)
        return self.packed.product(x)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    by_hypotenuse: HypotenuseNorm | None = None  # set by decoding.py

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hypotenuse is not None:
            return self.by_hypotenuse(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HypotenuseNorm:
    """RMS norm in four operators where torch's own takes nine: sqrt(|x|^2 + n eps) is a hypotenuse.

    A third of the time for few rows of float32 on a CPU. weight [..., n] float32, any leading dimensions of x's.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight.detach() * size**0.5
        self.root = torch.tensor(size * eps, dtype=torch.float64).sqrt().float()

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(length, self.root)).mul_(self.weight)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1 (YaRN, arXiv 2309.00071, as DeepSeek-V3 applies it)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """Rotary inverse frequencies, float32 [dim/2]; with YaRN low frequencies are stretched by `factor`."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "default":
        return plain

    def correction_dim(rotations: float) -> float:
        return (
            dim
            * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(correction_dim(rope.beta_fast)), 0)
    high = min(math.ceil(correction_dim(rope.beta_slow)), dim - 1)
    span = 0.001 if low == high else high - low
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def rope_tables(rope: RopeSpec, dim: int, max_len: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """cos and sin tables, float32 [max_len, dim], laid out for `apply_rope`: the sine carries the rotation's sign."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(rope, dim))
    gain = 1.0
    if rope.rope_type == "yarn":
        gain = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    cos, sin = angles.cos() * gain, angles.sin() * gain
    if interleaved:
        return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the last dimension; pairs are (0,1),(2,3).. when interleaved (DeepSeek), else (i, i + dim/2) (Llama)."""
    half = x.shape[-1] // 2
    swapped = x.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else x.roll(half, -1)
    return torch.addcmul(x * cos, swapped, sin)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over cached latents.

    What is cached per token is the normed latent and the rotated shared key, [C + R]. Queries are taken into the
    latent space (W_UK absorbed), so that attention is multi-query over the latents and W_UV lifts the result.
    q_a_proj and kv_a_proj_with_mqa share their input and are one matrix here, `qkv_a_proj`.
    """

    def __init__(self, spec: ModelSpec | HeadSpec, input_size: int) -> None:
        """`spec` gives ranks, head sizes and rope; the input may be wider than its hidden_size, which is the output."""
        super().__init__()
        heads, rope = spec.num_attention_heads, spec.rope
        self.num_heads = heads
        self.q_lora_rank, self.kv_lora_rank = spec.q_lora_rank, spec.kv_lora_rank
        self.nope, self.rope_dim, self.v_head_dim = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
        self.qkv_a_proj = Linear(input_size, self.q_lora_rank + self.kv_lora_rank + self.rope_dim)
        self.q_a_layernorm = RMSNorm(self.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = Linear(self.q_lora_rank, heads * (self.nope + self.rope_dim))
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(self.kv_lora_rank, heads * (self.nope + self.v_head_dim))
        self.kv_b_proj.used_in_parts = True
        self.o_proj = Linear(heads * self.v_head_dim, spec.hidden_size)
        self.scale = (self.nope + self.rope_dim) ** -0.5
        if rope.rope_type == "yarn" and rope.mscale_all_dim:
            self.scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """x [B, T, input] -> [B, T, H]. `step` holds positions, mask and the cache rows of this call."""
        batch, tokens, _ = x.shape
        heads, ranks = self.num_heads, (self.q_lora_rank, self.kv_lora_rank, self.rope_dim)
        q_latent, latent, k_rope = self.qkv_a_proj(x).split(ranks, -1)
        q = self.q_b_proj(self.q_a_layernorm(q_latent)).view(batch, tokens, heads, -1)
        q_nope, q_rope = q.split((self.nope, self.rope_dim), -1)
        rotated = step.rotate(
            torch.cat((q_rope, k_rope.unsqueeze(2)), 2)
        )  # query heads and the one shared key together
        keys = step.update(torch.cat((self.kv_a_layernorm(latent), rotated[:, :, heads]), -1))  # [B, S, C + R]

        k_up, v_up = self.kv_b_proj.weight.view(heads, self.nope + self.v_head_dim, -1).split(
            (self.nope, self.v_head_dim), 1
        )
        absorbed = torch.bmm(q_nope.reshape(-1, heads, self.nope).transpose(0, 1), k_up)  # [N, B*T, C]
        absorbed = absorbed.transpose(0, 1).view(batch, tokens, heads, -1)
        queries = torch.cat((absorbed, rotated[:, :, :heads]), -1).view(batch, tokens * heads, -1)
        scores = torch.baddbmm(step.mask(heads), queries, keys.transpose(1, 2), alpha=self.scale)
        mixed = torch.bmm(scores.softmax(-1), keys[..., : self.kv_lora_rank])  # softmax accumulates in float32
        values = torch.bmm(mixed.view(-1, heads, self.kv_lora_rank).transpose(0, 1), v_up.transpose(1, 2))
        return self.o_proj(values.transpose(0, 1).reshape(batch, tokens, -1))


class CacheRows(NamedTuple):
    """Where a call's rows lie in a cache: the first of them, and the positions that each row has room for."""

    first: int
    max_len: int


class AttentionStep:
    """Positions, rotary tables, mask and cache rows of one forward call; built once, shared by all layers.

    Row b holds tokens at absolute positions start[b] .. start[b]+T-1 and sees cached positions up to its own.
    Without a cache the call is a plain causal forward from position 0.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        start: Tensor | None,
        tables: tuple[Tensor, Tensor],
        interleaved: bool,
        dtype: torch.dtype,
        cached: CacheRows | None = None,
    ) -> None:
        device = tables[0].device
        if start is None:
            positions = torch.arange(tokens, device=device).unsqueeze(0)  # [B or 1, T]
        else:
            positions = start.unsqueeze(1)
            if tokens > 1:
                positions = positions + torch.arange(tokens, device=device)
        self.batch, self.tokens, self.interleaved = batch, tokens, interleaved
        self.length = tokens if start is None else int(start.max()) + tokens
        self.cos = tables[0][positions].to(dtype).unsqueeze(2)  # [B, T, 1, R]
        self.sin = tables[1][positions].to(dtype).unsqueeze(2)
        hidden = torch.arange(self.length, device=device) > positions.unsqueeze(-1)  # [B or 1, T, S]
        self.blocked = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        self.masks: dict[int, Tensor] = {}
        self.layer: Tensor | None = None
        if cached is not None:
            row = cached.first
            rows = torch.arange(row, row + batch, device=device).unsqueeze(1) * cached.max_len
            self.slots = (rows + positions).flatten()
            self.rows = slice(row, row + batch)

    def at(self, layer: Tensor | None) -> AttentionStep:
        """Selects the cache tensor [rows, max_len, D] of the layer that runs next."""
        self.layer = layer
        return self

    def rotate(self, x: Tensor) -> Tensor:
        """Applies the rotary embedding of this call's positions to x [B, T, heads, R]."""
        return apply_rope(x, self.cos, self.sin, self.interleaved)

    def update(self, entry: Tensor) -> Tensor:
        """Writes entry [B, T, D] into the cache and returns what the rows may attend to, [B, S, D]."""
        if self.layer is None:
            return entry
        stored, target = entry.flatten(0, 1), self.layer.view(-1, self.layer.shape[-1])
        if self.layer.dtype == torch.float8_e4m3fn:
            # the cast saturates in the engines but gives NaN in torch; index_copy_ knows no FP8 type, only its bytes
            stored, target = stored.clamp(-448, 448).to(self.layer.dtype).view(torch.uint8), target.view(torch.uint8)
        target.index_copy_(0, self.slots, stored)
        return self.layer[self.rows, : self.length].to(entry.dtype)

    def mask(self, heads: int) -> Tensor:
        """Additive mask [B, T*heads, S], token-major, for multi-query scores."""
        if heads not in self.masks:
            mask = self.blocked.unsqueeze(2).expand(self.batch, self.tokens, heads, self.length)
            self.masks[heads] = mask.reshape(self.batch, self.tokens * heads, self.length)
        return self.masks[heads]


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); gate and up are one matrix, `gate_up_proj`, until they are quantized."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)
