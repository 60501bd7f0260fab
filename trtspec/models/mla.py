"""Multi-head latent attention (MLA), absorbed into the latent space.

It is section 2.1 of DeepSeek-V2 (arXiv 2405.04434).

    c_q = RMSNorm(W_DQ x) q_nope, q_rope = W_UQ c_q    q_a_proj, q_a_layernorm, q_b_proj
    c = RMSNorm(W_DKV x)  k_nope = W_UK c, v = W_UV c  kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj
    k_rope = RoPE(W_KR x) one key, shared by all heads kv_a_proj_with_mqa, its last rows
    o = W_O concat over heads of softmax((q_nope . k_nope + RoPE(q_rope) . k_rope) * scale) v

Only c and k_rope are cached. Because q . (W_UK c) = (W_UK^T q) . c, queries meet the latents
themselves, and W_UV lifts the result: multi-query attention with keys [c, k_rope] and values c.

Shapes: B rows, T tokens of this call, S cached positions, N heads, C kv_lora_rank, R rope
dimensions of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trtspec.models.attention import AttentionStep, CausalMask
from trtspec.models.layers import Linear, RMSNorm
from trtspec.models.rope import yarn_mscale
from trtspec.specs import HeadSpec, ModelSpec

# Epsilon of the two latent norms in the published DeepSeek-V3 and Kimi code, which do not use
# config.rms_norm_eps for them.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer, computed in the latent space.

    q_a_proj and kv_a_proj_with_mqa share one weight matrix, `qkv_a_proj`, because they read the
    same input. Shapes: N heads, C kv_lora_rank, R rope dimensions of a head, S cached positions.
    """

    def __init__(
        self, spec: ModelSpec | HeadSpec, input_size: int, norm_eps: float = LATENT_NORM_EPS
    ) -> None:
        """Builds the projections with uninitialized weights.

        input_size: width of the input. A head's is twice the hidden size (embedding and state).
        norm_eps: epsilon of the two latent norms.
        """
        super().__init__()
        heads = spec.num_attention_heads
        self.heads = heads
        self.q_lora_rank = spec.q_lora_rank
        self.kv_lora_rank = spec.kv_lora_rank
        self.nope_dim = spec.qk_nope_head_dim
        self.rope_dim = spec.qk_rope_head_dim
        self.v_dim = spec.v_head_dim
        self.a_sizes = self.q_lora_rank, self.kv_lora_rank, self.rope_dim
        self.qkv_a_proj = Linear(input_size, sum(self.a_sizes))
        self.q_a_layernorm = RMSNorm(self.q_lora_rank, norm_eps)
        self.q_b_proj = Linear(self.q_lora_rank, heads * (self.nope_dim + self.rope_dim))
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, norm_eps)
        self.kv_b_proj = Linear(self.kv_lora_rank, heads * (self.nope_dim + self.v_dim))
        self.o_proj = Linear(heads * self.v_dim, spec.hidden_size)
        self.scale = (self.nope_dim + self.rope_dim) ** -0.5
        # DeepSeek-V3 applies YaRN's attention temperature to queries and keys, so it is squared.
        if spec.rope.is_yarn and spec.rope.mscale_all_dim:
            self.scale *= yarn_mscale(spec.rope.factor, spec.rope.mscale_all_dim) ** 2

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Computes the attention's output [B, T, H] for x [B, T, input]."""
        q_lora, kv_lora, k_rope = self.qkv_a_proj(x).split(self.a_sizes, -1)
        c_q = self.q_a_layernorm(q_lora)
        q = self.q_b_proj(c_q).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), -1)  # [B, T, N, nope or R]
        w_uk, w_uv = self.up_projections()

        q_latent = torch.einsum("btnd,ndc->btnc", q_nope, w_uk)
        queries = torch.cat((q_latent, step.rotate(q_rope)), -1)  # [B, T, N, C + R]
        k_rope = step.rotate(k_rope.unsqueeze(2)).squeeze(2)
        entry = torch.cat((self.kv_a_layernorm(kv_lora), k_rope), -1)  # [B, T, C + R], cached

        attended = step.attend(entry, queries, self.attention)  # [B, T, N, C]
        values = torch.einsum("btnc,nvc->btnv", attended, w_uv)
        output: Tensor = self.o_proj(values.flatten(-2))
        return output

    def attention(self, queries: Tensor, entries: Tensor, mask: CausalMask) -> Tensor:
        """Computes multi-query attention over entries of the cache, [B, T, N, C].

        queries: latent queries and rotated rope queries, [B, T, N, C + R].
        entries: latents and rotated rope keys, [B, S, C + R].
        """
        flat = queries.flatten(1, 2)
        scores = torch.baddbmm(mask.by_head(self.heads), flat, entries.mT, alpha=self.scale)
        weights = scores.softmax(-1)  # accumulates in float32
        attended = torch.bmm(weights, entries[..., : self.kv_lora_rank])
        by_token: Tensor = attended.unflatten(1, (-1, self.heads))
        return by_token

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """Returns W_UK [N, nope, C] and W_UV [N, v, C], which are the rows of kv_b_proj by head."""
        by_head = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        w_uk, w_uv = by_head.split((self.nope_dim, self.v_dim), 1)
        return w_uk, w_uv
