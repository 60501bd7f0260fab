"""Time of one decode step, of verifying k + 1 tokens per sequence, and of drafting them, from measured kernels.

step = layers x (attention + shared expert + router + routed experts + collectives) + dense layers + lm_head.
Verifying k + 1 tokens runs the same kernels on (k + 1) times the tokens: more distinct experts are read, which is what
makes it dearer than one token; the latent cache is read once for all of them. Not in it: norms and other element-wise
kernels, sampling, the host, and overlap between kernels. Formula and tables: docs/plan-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtspec.formats import KV_ELEMENT_BYTES
from trtspec.planning.kernels import LAUNCH_US, Kernels
from trtspec.planning.layout import Layout
from trtspec.specs import HeadSpec, ModelSpec


def distinct_experts(model: ModelSpec, tokens: int) -> float:
    """Expected experts that `tokens` tokens touch in one layer when routing is uniform: E (1 - (1 - top/E)^T)."""
    experts = model.n_routed_experts
    return experts * (1 - (1 - model.num_experts_per_tok / experts) ** tokens)


@dataclass(frozen=True)
class StepModel:
    """Times in microseconds. `context` is the number of tokens that a sequence holds, on average over its answer."""

    model: ModelSpec
    head: HeadSpec | None
    layout: Layout
    kernels: Kernels
    context: int
    host_us: float = 0.0

    @property
    def cache_bytes(self) -> int:
        """Bytes of one element of the KV cache."""
        return KV_ELEMENT_BYTES[self.model.quant.kv_cache or "bf16"]

    def with_routing(self, routing: str) -> StepModel:
        return replace(self, kernels=replace(self.kernels, routing=routing))

    def parts(self, sequences: int, queries: int) -> dict[str, float]:
        """The target's step by kernel, all layers, for `queries` tokens of each of `sequences` sequences."""
        model, kernels, layout = self.model, self.kernels, self.layout
        tokens = sequences * queries
        here = layout.sequences_per_rank(sequences)
        mine = here * queries if layout.attention_dp else tokens
        ranks, layers = layout.attention_tp, model.num_hidden_layers
        moe = layers - model.first_k_dense_replace
        shared = model.n_shared_experts * model.moe_intermediate_size / ranks
        wide = model.intermediate_size / ranks
        return {
            "attention": layers * kernels.attention(ranks, here, mine, self.context, self.cache_bytes),
            "experts": moe * kernels.moe(layout.moe, tokens),
            "shared": moe * self._mlp(mine, shared) if model.n_shared_experts else 0.0,
            "router": moe * kernels.from_hidden(mine, model.n_routed_experts),
            "collectives": self._collectives(tokens),
            "dense": model.first_k_dense_replace * self._mlp(mine, wide),
            "lm_head": kernels.from_hidden(mine, model.vocab_size / ranks),
            "host": self.host_us,
        }

    def step(self, sequences: int, queries: int = 1) -> float:
        return sum(self.parts(sequences, queries).values())

    def _mlp(self, tokens: int, width: float) -> float:
        return self.kernels.from_hidden(tokens, 2 * width) + self.kernels.to_hidden(tokens, width)

    def _collectives(self, tokens: int) -> float:
        """Two all-reduces per layer; with attention DP one exchange of all tokens before the experts and one after,
        together as dear as one all-reduce of them."""
        each = self.kernels.allreduce(self.layout.gpus, tokens * self.model.hidden_size)
        layers, moe = self.model.num_hidden_layers, self.model.num_hidden_layers - self.model.first_k_dense_replace
        return moe * each if self.layout.attention_dp else 2 * layers * each

    def draft(self, sequences: int, length: int) -> float:
        """Drafting `length` tokens per sequence: one pass over the tokens just verified, then one token at a time."""
        if self.head is None or length == 0:
            return 0.0
        head, layout = self.head, self.layout
        here = layout.sequences_per_rank(sequences)
        first = here * (length + 1)
        fc = head.num_aux * self.kernels.to_hidden(first, head.target_hidden_size / layout.attention_tp)
        return fc + self._draft_pass(head, here, first) + (length - 1) * self._draft_pass(head, here, here)

    def _draft_pass(self, head: HeadSpec, sequences: int, tokens: int) -> float:
        ranks, kernels = self.layout.attention_tp, self.kernels
        mlp = self._mlp(tokens, head.intermediate_size / ranks)
        logits = kernels.from_hidden(sequences, head.draft_vocab_size / ranks)
        collectives = 3 * kernels.allreduce(ranks, tokens * head.hidden_size)  # attention, MLP, best token over ranks
        return self._draft_attention(head, sequences, tokens) + mlp + logits + collectives

    def _draft_attention(self, head: HeadSpec, sequences: int, tokens: int) -> float:
        """MLA: the target's module plus its down-projection once more, as its input is twice as wide. MHA: linear
        layers of the same widths, and the cache at the bandwidth that kernels reach."""
        ranks, kernels = self.layout.attention_tp, self.kernels
        if head.attention == "mla":
            wider = kernels.from_hidden(tokens, head.q_lora_rank + head.kv_lora_rank + head.qk_rope_head_dim)
            return kernels.attention(ranks, sequences, tokens, self.context, self.cache_bytes) + wider
        width = head.num_attention_heads * head.head_dim / ranks
        cached = 2 * head.num_key_value_heads * head.head_dim / ranks
        read = sequences * self.context * cached * self.cache_bytes
        linear = 2 * kernels.from_hidden(tokens, width + cached) + kernels.to_hidden(tokens, width)
        return linear + kernels.stream(read) + LAUNCH_US

    def cost_ratio(self, sequences: int, length: int) -> float:
        """(verify + draft) / plain step: the acceptance length at which speculation neither wins nor loses."""
        return self.whole(sequences, length) / self.step(sequences)

    def whole(self, sequences: int, length: int) -> float:
        """Drafting `length` tokens per sequence and verifying them."""
        return self.step(sequences, length + 1) + self.draft(sequences, length)

    def prefill(self, tokens: int, prompts: int = 1) -> float:
        """`prompts` prompts of `tokens` tokens each, at once and without their answers; the head's own prefill is left
        out. With attention DP every rank computes the attention of its own prompts."""
        model, kernels, layout = self.model, self.kernels, self.layout
        ranks, moe = layout.attention_tp, model.num_hidden_layers - model.first_k_dense_replace
        here, together = layout.sequences_per_rank(prompts), tokens * prompts
        mine = here * tokens if layout.attention_dp else together
        shared = self._mlp(mine, model.n_shared_experts * model.moe_intermediate_size / ranks)
        attention = here * kernels.prefill_attention(ranks, tokens)
        experts = kernels.moe(layout.moe, together) + shared + kernels.from_hidden(mine, model.n_routed_experts)
        dense = model.first_k_dense_replace * self._mlp(mine, model.intermediate_size / ranks)
        return model.num_hidden_layers * attention + moe * experts + dense + self._collectives(together)
