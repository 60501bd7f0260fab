"""Records of Kimi-K2 and K2-Thinking, and of K2.5, K2.6 and K2.7-Code.

K2.5 and later put the same language model beside a vision tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trtspec.families.family import Family, LatentSizes, Part, Role, Sizes

TEXT_TYPES = ("kimi_k2", "deepseek_v3")
# Distance of the id of <|im_end|> from the end of the vocabulary. This token ends the answers of
# K2.6 and later.
END_OF_TURN = 254
# linears that engines compute together, with the name of the joint linear
FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
         "q_a_proj": "qkv_a_proj", "kv_a_proj_with_mqa": "qkv_a_proj"}  # fmt: skip

# keys of config.json that change the computation and show in no tensor: see `Family`
OPTIONAL_KEYS = ("hidden_act", "scoring_func", "topk_method", "moe_layer_freq", "attention_bias",
                 "num_nextn_predict_layers", "tie_word_embeddings")  # fmt: skip
REQUIRED_KEYS = ("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "rms_norm_eps")


def ends(sizes: Sizes) -> Iterator[Part]:
    """Yields embedding, lm_head and the last norm, which are outside the layers."""
    vocabulary = (sizes.vocab_size, sizes.hidden_size)
    yield Part("model.embed_tokens.weight", vocabulary, "embedding", "embed.weight")
    yield Part("lm_head.weight", vocabulary, "lm_head", "lm_head.weight")
    yield Part("model.norm.weight", (sizes.hidden_size,), "norms", "norm.weight")


def layer(sizes: Sizes, index: int) -> Iterator[Part]:
    """Yields the parts of the decoder layer with this index. The first layers have a dense MLP."""
    hidden = sizes.hidden_size
    experts = sizes.n_routed_experts
    width = sizes.moe_intermediate_size
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        yield Part(norm, (hidden,), "norms", norm)
    for leaf, shape in latent_attention(sizes, hidden).items():
        role: Role = "attention, latent" if leaf in FUSED else "attention, by heads"
        if len(shape) == 1:
            role = "norms"
        parameter = f"self_attn.{FUSED.get(leaf, leaf)}.weight"
        yield Part(f"self_attn.{leaf}.weight", shape, role, parameter)
    if index < sizes.first_k_dense_replace:
        yield from mlp("mlp", hidden, sizes.intermediate_size, "dense layers")
        return
    bias = "mlp.gate.e_score_correction_bias"
    router = "mlp.gate.weight"
    yield Part(bias, (experts,), "router bias", bias)
    yield Part(router, (experts, hidden), "router", router)
    yield from mlp("mlp.experts.{}", hidden, width, "experts", experts)
    yield from mlp("mlp.shared_experts", hidden, width * sizes.n_shared_experts, "shared experts")


def latent_attention(sizes: LatentSizes, width: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of latent attention, by name.

    `width`: number of inputs of the first projections.
    """
    heads = sizes.num_attention_heads
    nope = sizes.qk_nope_head_dim
    rope = sizes.qk_rope_head_dim
    return {
        "q_a_proj": (sizes.q_lora_rank, width),
        "q_a_layernorm": (sizes.q_lora_rank,),
        "q_b_proj": (heads * (nope + rope), sizes.q_lora_rank),
        "kv_a_proj_with_mqa": (sizes.kv_lora_rank + rope, width),
        "kv_a_layernorm": (sizes.kv_lora_rank,),
        "kv_b_proj": (heads * (nope + sizes.v_head_dim), sizes.kv_lora_rank),
        "o_proj": (sizes.hidden_size, heads * sizes.v_head_dim),
    }


def mlp(stem: str, hidden: int, width: int, role: Role, copies: int = 1) -> Iterator[Part]:
    """Yields the three matrices of one MLP, or of all `copies` experts of a layer.

    Args:
        stem: prefix of the matrices' names, with `{}` for the number of an expert.
        hidden: width of the residual stream.
        width: width between the matrices.
    """
    gate_up = f"{stem}.gate_up_proj.weight"
    down = f"{stem}.down_proj.weight"
    if "{}" in stem:
        # The experts of a layer share two stacked parameters in trtspec's model.
        gate_up = "mlp.experts.gate_up"
        down = "mlp.experts.down"
    yield Part(f"{stem}.gate_proj.weight", (width, hidden), role, gate_up, copies)
    yield Part(f"{stem}.up_proj.weight", (width, hidden), role, gate_up, copies)
    yield Part(f"{stem}.down_proj.weight", (hidden, width), role, down, copies)


def flat_version(sizes: Sizes, eos_token_ids: tuple[int, ...], packed: bool) -> str:
    """Returns the release's name. Only K2-Thinking is published with packed weights."""
    return "k2-thinking" if packed else "k2"


def nested_version(sizes: Sizes, eos_token_ids: tuple[int, ...], packed: bool) -> str:
    """Returns the release's name. K2.6 and K2.7-Code have the same config."""
    return "k2.6+" if sizes.vocab_size - END_OF_TURN in eos_token_ids else "k2.5"


# `thinks` is False, because K2-Instruct does not reason and has the same keys as K2-Thinking.
KIMI_K2 = Family(
    name="kimi_k2",
    model_types=TEXT_TYPES,
    classes=("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    optional_keys=OPTIONAL_KEYS,
    required_keys=REQUIRED_KEYS,
    ends=ends,
    layer=layer,
    fused=FUSED,
    tool_parser="kimi_k2",
    reasoning_parsers={"trtllm": "kimi_k2", "vllm": "kimi_k2"},
    thinks=False,
    version=flat_version,
)
# `thinks` is True, because the chat template opens the reasoning of every answer.
# `vision_parameters`: MoonViT-3d with 27 blocks of width 1152 (416,866,032) and its projector
# (54,277,888).
KIMI_K25 = replace(
    KIMI_K2,
    name="kimi_k25",
    model_types=("kimi_k25",),
    text_types=TEXT_TYPES,
    classes=("KimiK25ForConditionalGeneration",),
    prefix="language_model.",
    vision_parameters=471_143_920,
    reasoning_parsers={"trtllm": "kimi_k25", "vllm": "kimi_k2"},
    thinks=True,
    version=nested_version,
)
