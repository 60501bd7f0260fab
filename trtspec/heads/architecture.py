"""The shape of a new Eagle3 head for a given target, and the config.json that servers read it by.

The MLA shape is the one of the published Kimi heads: the target's ranks and heads, one dense layer, the target's rope.
The MHA shape is a Llama layer with plain rope, which every server loads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from trtspec.errors import UsageError
from trtspec.specs import Attention, HeadSpec, ModelSpec, RopeSpec

MAX_KV_HEADS = 8  # of a new MHA head: splits over 8 GPUs, an eighth of the KV cache of 64 heads


def new_head_spec(
    target: ModelSpec,
    *,
    attention: Attention,
    eagle: Literal["3", "3.1"],
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    aux_layers: tuple[int, ...] | None = None,
) -> HeadSpec:
    """Returns the record of a one-layer head of the target's width; UsageError when a size does not fit the target."""
    layers = aux_layers or target.default_aux_layers
    bad = [layer for layer in layers if not 0 <= layer < target.num_hidden_layers]
    if bad or list(layers) != sorted(set(layers)):
        raise UsageError(
            f"capture layers {list(layers)} are not ascending layer outputs of a target with "
            f"{target.num_hidden_layers} layers",
            f"use 0-based outputs, for example {list(target.default_aux_layers)}",
        )
    draft = draft_vocab_size or target.vocab_size
    if not 0 < draft <= target.vocab_size:
        raise UsageError(
            f"a draft vocabulary of {draft} does not fit the target's {target.vocab_size}",
            f"pass --draft-vocab-size between 1 and {target.vocab_size}",
        )
    mla = attention == "mla"
    rope = RopeSpec(theta=target.rope.theta)
    if mla:  # TensorRT-LLM computes YaRN for every MLA draft; factor 1 is plain rope
        rope = target.rope if target.rope.rope_type == "yarn" else replace(rope, rope_type="yarn", factor=1.0)
    return HeadSpec(
        eagle=eagle,
        attention=attention,
        dialect="modelopt",
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_attention_heads if mla else min(MAX_KV_HEADS, target.num_attention_heads),
        head_dim=target.qk_head_dim if mla else target.v_head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft,
        rms_norm_eps=target.rms_norm_eps,
        rope=rope,
        num_aux=len(layers),
        aux_layers=tuple(layers),
        q_lora_rank=target.q_lora_rank if mla else 0,
        kv_lora_rank=target.kv_lora_rank if mla else 0,
        qk_nope_head_dim=target.qk_nope_head_dim if mla else 0,
        qk_rope_head_dim=target.qk_rope_head_dim if mla else 0,
        v_head_dim=target.v_head_dim if mla else 0,
        max_position_embeddings=target.max_position_embeddings,
        fc_norm=eagle == "3.1",
        norm_output=eagle == "3.1",
        has_d2t=draft != target.vocab_size,
    )


def rope_scaling(rope: RopeSpec) -> dict[str, Any]:
    """The rope as a config dict with both spellings of the type, because readers differ in which one they look at."""
    if rope.rope_type == "default":
        return {"rope_type": "default", "type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


def architecture_config(spec: HeadSpec) -> dict[str, Any]:
    """The layer's dimensions under the names that ModelOpt, transformers and the servers share."""
    sizes: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    }
    if spec.attention == "mha":
        return sizes | {"head_dim": spec.head_dim}
    return sizes | {
        "q_lora_rank": spec.q_lora_rank,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_nope_head_dim": spec.qk_nope_head_dim,
        "qk_rope_head_dim": spec.qk_rope_head_dim,
        "v_head_dim": spec.v_head_dim,
        "first_k_dense_replace": 1,
    }


def class_config(spec: HeadSpec) -> dict[str, Any]:
    """The names by which every project but SafeAILab and speculators knows a head of this attention."""
    mla = spec.attention == "mla"
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"],
        "model_type": "kimi_k2" if mla else "llama",
    }


def rope_config(rope: RopeSpec) -> dict[str, Any]:
    """Rope in each place that some reader looks at."""
    found = rope_scaling(rope)
    plain = rope.rope_type == "default"
    scaling = None if plain else {key: value for key, value in found.items() if key != "rope_theta"}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": found}


def head_config(spec: HeadSpec, target: ModelSpec) -> dict[str, Any]:
    """config.json in ModelOpt's layout. `target_hidden_size` is absent on purpose: servers test for its presence."""
    config: dict[str, Any] = {
        **class_config(spec),
        **architecture_config(spec),
        **rope_config(spec.rope),
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(target.eos_token_ids)
        if len(target.eos_token_ids) > 1
        else (target.eos_token_ids or (None,))[0],
        "pad_token_id": target.pad_token_id,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "num_aux_hidden_states": spec.num_aux,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(spec.aux_layers or target.default_aux_layers),
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    }
    if spec.fc_norm or spec.norm_output:
        config |= {"fc_norm": spec.fc_norm, "norm_output": spec.norm_output}
    return config
