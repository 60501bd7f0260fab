"""Building blocks shared by the Kimi target and the Eagle3 heads: linears, rotary embedding, latent attention, MLP.

Shapes: B batch, T tokens of this call, S cached positions, H hidden, N heads, C kv_lora_rank, R rope dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.models.precision import PackedWeight
from trtspec.models.state import Span, State, TextPiece
from trtspec.specs import HeadSpec, ModelSpec, RopeSpec

# The published DeepSeek-V3 / Kimi definition gives its two latent norms this epsilon, not config.rms_norm_eps.
LATENT_NORM_EPS = 1e-6
FEWEST_POSITIONS = 2048  # of a rotary table
PACKED_ROWS = 64  # with more rows a float32 product is bound by arithmetic and the packed weight gains nothing


class Linear(nn.Module):
    """y = x W^T without bias, W stored [out, in]. models/weights.py holds its NVFP4 form.

    `prepare_for_decoding` may lay the weight out differently in memory or add a packed copy; its values and shape stay.
    """

    used_in_parts = False  # set where code reads parts of the weight and never calls the module
    packed: PackedWeight | None = None  # set by `prepare_for_decoding`

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        if (
            self.packed is None
            or torch.is_grad_enabled()
            or (x.numel() > PACKED_ROWS * self.in_features and x.dtype == torch.float32)
        ):
            return F.linear(x, self.weight)
        return self.packed.product(x)


def embedding(vocab_size: int, hidden_size: int) -> nn.Embedding:
    if torch.empty(0).is_meta:
        # torch's random values for a meta tensor would import torch._dynamo: over a second of every start
        return nn.Embedding.from_pretrained(torch.empty(vocab_size, hidden_size), freeze=False)
    return nn.Embedding(vocab_size, hidden_size)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension.

    With n the size and rms(x) = |x| / sqrt(n), sqrt(|x|^2 + n eps) is a hypotenuse. So the norm takes four operators
    where torch's own takes nine: a third of the time for few rows of float32 on a CPU.
    """

    folded: tuple[Tensor, Tensor] | None = (
        None  # sqrt(n eps) and weight * sqrt(n), set by `prepare_for_decoding`
    )

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.folded is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        root, weight = self.folded
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(length, root)).mul_(weight)

    def fold(self) -> None:
        size = len(self.weight)
        root = torch.tensor(size * self.eps, dtype=torch.float64).sqrt().float()
        self.folded = root, self.weight.detach() * size**0.5


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1 (YaRN, arXiv 2309.00071, as DeepSeek-V3 applies it)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """Rotary inverse frequencies, float32 [dim/2]; with YaRN low frequencies are stretched by `factor`."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / (rope.theta**exponents)
    if not rope.is_yarn:
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
    if rope.is_yarn:
        gain = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    cos, sin = angles.cos() * gain, angles.sin() * gain
    if interleaved:
        return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class RopeTables:
    """`rope_tables` of a model, for at least as many positions as were ever asked for."""

    def __init__(self, rope: RopeSpec, dim: int, interleaved: bool) -> None:
        self.rope, self.dim, self.interleaved = rope, dim, interleaved
        self.tables: tuple[Tensor, Tensor] | None = None

    def of(self, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        if self.tables is None or len(self.tables[0]) < length:
            cos, sin = rope_tables(
                self.rope, self.dim, max(length, FEWEST_POSITIONS), self.interleaved
            )
            self.tables = cos.to(device, non_blocking=True), sin.to(device, non_blocking=True)
        return self.tables


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

    def __init__(
        self, spec: ModelSpec | HeadSpec, input_size: int, norm_eps: float = LATENT_NORM_EPS
    ) -> None:
        """`spec` gives ranks, head sizes and rope; the input may be wider than its hidden_size, which is the output."""
        super().__init__()
        heads, rope = spec.num_attention_heads, spec.rope
        self.num_heads = heads
        self.q_lora_rank, self.kv_lora_rank = spec.q_lora_rank, spec.kv_lora_rank
        self.nope, self.rope_dim, self.v_head_dim = (
            spec.qk_nope_head_dim,
            spec.qk_rope_head_dim,
            spec.v_head_dim,
        )
        self.qkv_a_proj = Linear(input_size, self.q_lora_rank + self.kv_lora_rank + self.rope_dim)
        self.q_a_layernorm = RMSNorm(self.q_lora_rank, norm_eps)
        self.q_b_proj = Linear(self.q_lora_rank, heads * (self.nope + self.rope_dim))
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, norm_eps)
        self.kv_b_proj = Linear(self.kv_lora_rank, heads * (self.nope + self.v_head_dim))
        self.kv_b_proj.used_in_parts = True
        self.o_proj = Linear(heads * self.v_head_dim, spec.hidden_size)
        self.folded: tuple[Tensor, Tensor] | None = None  # set by `fold`
        self.scale = (self.nope + self.rope_dim) ** -0.5
        if rope.is_yarn and rope.mscale_all_dim:
            self.scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """x [B, T, input] -> [B, T, H]. `step` holds positions, mask and the cache rows of this call."""
        heads, rank = self.num_heads, self.kv_lora_rank
        q_latent, latent, k_rope = self.qkv_a_proj(x).split(
            (self.q_lora_rank, rank, self.rope_dim), -1
        )
        # the query heads and the one shared key are rotated together
        queries = self.latent_queries(self.q_a_layernorm(q_latent))
        vectors = torch.cat((queries, self.kv_a_layernorm(latent), k_rope), -1).unflatten(
            -1, (heads + 1, -1)
        )
        step.rotate_(vectors[..., rank:])
        return self.lift(step.attend(vectors[:, :, heads], vectors[:, :, :heads], self.mix))

    def mix(self, queries: Tensor, keys: Tensor, mask: CausalMask) -> Tensor:
        """Attention of queries [B, T, N, C + R] over cached latents [B, S, C + R] -> [B, T, N * C]."""
        batch, tokens, heads, _ = queries.shape
        flat = queries.reshape(batch, tokens * heads, -1)
        scores = torch.baddbmm(mask.by_head(heads), flat, keys.transpose(1, 2), alpha=self.scale)
        mixed = torch.bmm(
            scores.softmax(-1), keys[..., : self.kv_lora_rank]
        )  # softmax accumulates in float32
        return mixed.view(batch, tokens, -1)

    def latent_queries(self, q_latent: Tensor) -> Tensor:
        """Normed q latents [B, T, q_lora_rank] -> [B, T, N * (C + R)], per head what meets the latents, then rope's."""
        if self.folded is not None and not torch.is_grad_enabled():
            return F.linear(q_latent, self.folded[0])
        q = self.q_b_proj(q_latent).view(-1, self.num_heads, self.nope + self.rope_dim)
        q_nope, q_rope = q.split((self.nope, self.rope_dim), -1)
        absorbed = torch.bmm(q_nope.transpose(0, 1), self.k_up_v_up()[0]).transpose(0, 1)
        return torch.cat((absorbed, q_rope), -1).view(*q_latent.shape[:2], -1)

    def lift(self, mixed: Tensor) -> Tensor:
        """Attended latents of all heads [B, T, N * C] -> [B, T, H]."""
        if self.folded is not None and not torch.is_grad_enabled():
            return F.linear(mixed, self.folded[1])
        by_head = mixed.view(-1, self.num_heads, self.kv_lora_rank).transpose(0, 1)
        values = torch.bmm(by_head, self.k_up_v_up()[1].transpose(1, 2)).transpose(0, 1)
        return self.o_proj(values.reshape(*mixed.shape[:2], -1))

    def k_up_v_up(self) -> tuple[Tensor, Tensor]:
        """W_UK [N, nope, C] and W_UV [N, v, C]."""
        parts = self.kv_b_proj.weight.view(self.num_heads, self.nope + self.v_head_dim, -1)
        return parts[:, : self.nope], parts[:, self.nope :]

    def fold(self) -> None:
        """Multiplies W_UK into q_b_proj and W_UV into o_proj, in float64: two products for four, where that takes no
        more weights."""
        if self.kv_lora_rank > min(self.nope, self.v_head_dim) or not isinstance(
            self.q_b_proj, Linear
        ):
            return
        if not isinstance(self.o_proj, Linear):
            return
        heads, weight = self.num_heads, self.q_b_proj.weight
        k_up, v_up = (part.double() for part in self.k_up_v_up())
        q_b = weight.double().view(heads, self.nope + self.rope_dim, -1)
        absorbed = torch.cat(
            (k_up.transpose(1, 2) @ q_b[:, : self.nope], q_b[:, self.nope :]), 1
        ).flatten(0, 1)
        lifted = (
            self.o_proj.weight.double().view(-1, heads, self.v_head_dim).transpose(0, 1) @ v_up
        )  # [N, H, C]
        lift = lifted.transpose(0, 1).flatten(1)
        self.folded = by_input(absorbed.to(weight.dtype)), by_input(lift.to(weight.dtype))


def by_input(weight: Tensor) -> Tensor:
    """The same weight [..., out, in], in memory as [..., in, out]: for few rows up to a third off a product."""
    return weight.mT.contiguous().mT


class CausalMask:
    """`blocked` [B, T, S]: -inf for the positions that a token must not see, else 0."""

    def __init__(self, blocked: Tensor) -> None:
        self.blocked = blocked
        self.repeated: dict[int, Tensor] = {}

    def by_head(self, heads: int) -> Tensor:
        """[B, T*heads, S], token-major, for multi-query scores."""
        if heads not in self.repeated:
            batch, tokens, length = self.blocked.shape
            mask = self.blocked.unsqueeze(2).expand(batch, tokens, heads, length)
            self.repeated[heads] = mask.reshape(batch, tokens * heads, length)
        return self.repeated[heads]


Mix = Callable[
    [Tensor, Tensor, CausalMask], Tensor
]  # queries [B, T, ...], entries seen [B, S, D], mask


class AttentionStep:
    """Positions, rotary tables, masks and cache rows of one forward call; built once, shared by all layers.

    Row b lies in cache row `first + b`, holds tokens at absolute positions start[b] .. start[b]+T-1 and sees cached
    positions up to its own. `length` is where the longest row ends, max(start) + T; None reads it from the device,
    which waits. Without a cache the call is a plain causal forward from position 0.
    """

    slots: Tensor  # in the cache, of each token: row * max_len + position
    index = 0

    def __init__(
        self,
        batch: int,
        tokens: int,
        start: Tensor | None,
        tables: tuple[Tensor, Tensor],
        interleaved: bool,
        dtype: torch.dtype,
        cache: State | None = None,
        first: int = 0,
        length: int | None = None,
    ) -> None:
        device = tables[0].device
        if cache is None:
            positions = torch.arange(tokens, device=device).unsqueeze(0)  # [B or 1, T]
            length = tokens
        else:
            assert start is not None
            positions = start.unsqueeze(1)
            if tokens > 1:
                positions = positions + torch.arange(tokens, device=device)
            length = length or int(start.max()) + tokens
            rows = torch.arange(first, first + batch, device=device).unsqueeze(1) * cache.max_len
            self.slots = (rows + positions).flatten()
        hidden = torch.arange(length, device=device) > positions.unsqueeze(-1)  # [B or 1, T, S]
        blocked = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(
            hidden, float("-inf")
        )
        self._rotate_at(positions, tables, interleaved, dtype)
        self.masks = [CausalMask(blocked.expand(batch, tokens, length))]
        self.cache = cache
        self.spans = [Span(slice(None), slice(first, first + batch), start, length)]

    def _rotate_at(
        self,
        positions: Tensor,
        tables: tuple[Tensor, Tensor],
        interleaved: bool,
        dtype: torch.dtype,
    ) -> None:
        self.interleaved = interleaved
        self.cos = tables[0][positions].to(dtype).unsqueeze(2)  # [B, T, 1, R]
        self.sin = tables[1][positions].to(dtype).unsqueeze(2)
        self.turn: Tensor | None = (
            None  # [B, T, 1, R / 2], where one complex product is the whole rotation
        )
        if interleaved and dtype == torch.float32:
            self.turn = torch.complex(self.cos[..., ::2], self.sin[..., 1::2])

    def at(self, index: int) -> AttentionStep:
        """Selects the layer of the cache that runs next."""
        self.index = index
        return self

    def rotate(self, x: Tensor) -> Tensor:
        """Applies the rotary embedding of this call's positions to x [B, T, heads, R]."""
        return apply_rope(x, self.cos, self.sin, self.interleaved)

    def rotate_(self, x: Tensor) -> None:
        """The same in place."""
        if (
            self.turn is None or x.stride(2) % 2
        ):  # a pair of floats is a complex number only at an even place
            x.copy_(self.rotate(x))
        else:
            torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(self.turn)

    def attend(self, entry: Tensor, queries: Tensor, mix: Mix) -> Tensor:
        """Writes entry [B, T, D] into the cache and returns what `mix` makes of queries [B, T, ...], [B, T, ...]."""
        if self.cache is None:
            return mix(queries, entry, self.masks[0])
        self.cache.append(self.index, self.slots, entry)
        seen = [self.cache.seen(self.index, span).to(entry.dtype) for span in self.spans]
        if len(seen) == 1:
            return mix(queries, seen[0], self.masks[0])
        parts = zip(self.spans, seen, self.masks, strict=True)
        return torch.cat(
            [mix(queries[:, span.tokens], keys, mask) for span, keys, mask in parts], 1
        )


class PackedStep(AttentionStep):
    """A call over pieces of several texts, one behind the other in a single row; each sees its own text only."""

    def __init__(
        self,
        pieces: Sequence[TextPiece],
        cache: State,
        tables: tuple[Tensor, Tensor],
        interleaved: bool,
        dtype: torch.dtype,
    ) -> None:
        device = tables[0].device
        places = torch.tensor(
            [(p.row * cache.max_len, at) for p in pieces for at in range(p.begin, p.end)]
        )
        first, positions = places.to(device, non_blocking=True).unbind(1)
        self._rotate_at(positions.unsqueeze(0), tables, interleaved, dtype)
        self.slots = first + positions
        self.cache = cache
        self.spans = []
        self.masks = []
        behind = 0
        for p in pieces:
            before, behind = behind, behind + p.end - p.begin
            self.spans.append(Span(slice(before, behind), slice(p.row, p.row + 1), p.begin, p.end))
            blocked = torch.full(
                (1, p.end - p.begin, p.end), float("-inf"), dtype=dtype, device=device
            )
            self.masks.append(CausalMask(blocked.triu_(p.begin + 1)))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); gate and up are one matrix, `gate_up_proj`, until they are quantized."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)
