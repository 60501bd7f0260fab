"""config.json of a head: which keys hold what, and how each project writes them from the canonical record.

A writer takes the sizes that all layouts share, the record, the layer ids as its dialect counts them, and the target
(which only speculators stores); it returns the whole file. `dialects` says which writer is whose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtspec.specs import HeadSpec, ModelSpec, RopeSpec

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
# keys that the writers below make; the others of the source are carried over
MADE = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "draft_vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act",
    "attention_bias", "attention_dropout", "mlp_bias", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace", "rope_theta", "rope_scaling", "rope_parameters",
    "torch_dtype", "dtype", "tie_word_embeddings", "num_aux_hidden_states", "target_hidden_size", "eagle_config",
    IDS_KEY, "fc_norm", "norm_output", "post_norm", "norm_before_fc", "norm_before_residual", "use_aux_norm",
    "transformer_layer_config", "speculators_config", "speculators_model_type", "speculators_version",
    "embed_requires_grad", "_torchspec_version", "transformers_version",
}  # fmt: skip
LEFT_OUT = {"quantization_config", "auto_map", "_name_or_path", "name_or_path"}  # the target's, or code from a hub
EAGLE_FLAGS = ("use_input_layernorm_in_first_layer", "use_last_layernorm")
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
SPECULATORS_VERSION = "0.9.0"  # whose config classes the written files are tested with


@dataclass(frozen=True)
class Verifier:
    """The target that a head was made for, as far as it is known."""

    name: str | None = None
    architectures: tuple[str, ...] = ()


Writer = Callable[[dict[str, Any], HeadSpec, "list[int] | None", Verifier], dict[str, Any]]


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """speculators keeps the dimensions in transformer_layer_config; everyone else at the top."""
    return {**(config.get("transformer_layer_config") or {}), **config}


def stated_ids(config: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layer ids as written in eagle_config and at the top level; () where there are none."""
    nested = (config.get("eagle_config") or {}).get(IDS_KEY) or ()
    return tuple(nested), tuple(config.get(IDS_KEY) or ())


def shared_config(source: dict[str, Any], spec: HeadSpec, dtype: str) -> dict[str, Any]:
    """What every layout says alike: sizes, rope, dtype (a safetensors code), and the source's keys that are not of a
    head."""
    carried = {key: value for key, value in flat_config(source).items() if key not in MADE | LEFT_OUT}
    stored = {"tie_word_embeddings": False, "torch_dtype": DTYPES[dtype]}
    return architecture_config(spec) | rope_config(spec.rope) | stored | carried


def _flat(shared: dict[str, Any], spec: HeadSpec) -> dict[str, Any]:
    """Class names first; the target's width only where it differs, since three servers test for the key's presence."""
    different = spec.target_hidden_size != spec.hidden_size
    written = class_config(spec) | shared | ({"target_hidden_size": spec.target_hidden_size} if different else {})
    if not spec.has_lm_head:
        del written["draft_vocab_size"]  # with it SGLang keeps a random lm_head; without it all take the target's
    return written


def _norms(spec: HeadSpec) -> dict[str, Any]:
    flags = {"fc_norm": spec.fc_norm, "norm_output": spec.norm_output}
    return flags if spec.fc_norm or spec.norm_output else {}


def _eagle_config(ids: list[int] | None, **more: Any) -> dict[str, Any]:
    return {"eagle_config": ({} if ids is None else {IDS_KEY: ids}) | {"use_aux_hidden_state": True} | more}


def write_modelopt(shared: dict[str, Any], spec: HeadSpec, ids: list[int] | None, _: Verifier) -> dict[str, Any]:
    flags = _modelopt_flags() | ({"norm_before_fc": True} if spec.norm_before_fc else {})
    return _flat(shared, spec) | {"num_aux_hidden_states": spec.num_aux} | _norms(spec) | _eagle_config(ids, **flags)


def _modelopt_flags() -> dict[str, Any]:
    more = {"next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}
    return dict.fromkeys(EAGLE_FLAGS, True) | {"use_mtp_layernorm": False} | more


def write_vllm(shared: dict[str, Any], spec: HeadSpec, ids: list[int] | None, _: Verifier) -> dict[str, Any]:
    """Ids at the top, which every version reads, and nested, which newer ones do."""
    flags = {name: True for name in ("norm_before_fc", "norm_before_residual") if getattr(spec, name)}
    nested = {"norm_before_fc": True} if spec.norm_before_fc else {}
    top = {"num_aux_hidden_states": spec.num_aux} | ({} if ids is None else {IDS_KEY: ids})
    return _flat(shared, spec) | top | _norms(spec) | flags | _eagle_config(ids, **nested)


def write_sglang(shared: dict[str, Any], spec: HeadSpec, ids: list[int] | None, _: Verifier) -> dict[str, Any]:
    nested = {"norm_before_fc": True} if spec.norm_before_fc else {}
    borrows = {} if spec.has_lm_head else {"draft_vocab_size": None}  # null: lm_head comes from the target
    top = {"num_aux_hidden_states": spec.num_aux} | borrows
    return _flat(shared, spec) | top | _norms(spec) | _eagle_config(ids, **nested)


def write_torchspec(shared: dict[str, Any], spec: HeadSpec, ids: list[int] | None, _: Verifier) -> dict[str, Any]:
    flags = dict.fromkeys(EAGLE_FLAGS, True) | {"use_mtp_layernorm": False}
    return _flat(shared, spec) | {"num_aux_hidden_states": spec.num_aux} | _norms(spec) | _eagle_config(ids, **flags)


def write_specforge(shared: dict[str, Any], spec: HeadSpec, ids: list[int] | None, _: Verifier) -> dict[str, Any]:
    """Without fc_norm no norm_output is written: both meanings that SpecForge gave its absence are plain EAGLE-3."""
    return _flat(shared, spec) | _norms(spec) | _eagle_config(ids)


def write_safeailab(shared: dict[str, Any], spec: HeadSpec, ids: list[int] | None, _: Verifier) -> dict[str, Any]:
    return _flat(shared, spec) | {"architectures": ["LlamaForCausalLM"]}


def write_speculators(
    shared: dict[str, Any], spec: HeadSpec, ids: list[int] | None, verifier: Verifier
) -> dict[str, Any]:
    """The layer's sizes are in transformer_layer_config; every flag is written, because defaults differ by reader."""
    layer = {key: value for key, value in shared.items() if key not in ("torch_dtype", "tie_word_embeddings")}
    del layer["draft_vocab_size"]
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": {"model_type": "llama"} | layer,
        "draft_vocab_size": spec.draft_vocab_size,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": shared["tie_word_embeddings"],
        "torch_dtype": shared["torch_dtype"],
    } | ({} if ids is None else {IDS_KEY: ids})


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
    """config.json of a new head in ModelOpt's layout, whose layer ids are layer outputs counted from 0."""
    eos = target.eos_token_ids
    carried = {
        "bos_token_id": target.bos_token_id,
        "eos_token_id": list(eos) if len(eos) > 1 else eos[0] if eos else None,
        "pad_token_id": target.pad_token_id,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    outputs = list(spec.aux_layers or target.default_aux_layers)
    return write_modelopt(shared_config(carried, spec, "BF16"), spec, outputs, Verifier())
