"""Reads and writes config.json of a head, in the layout of each project."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtspec.data_files import load_yaml
from trtspec.foreign import without_code
from trtspec.specs import YARN_NUMBERS, HeadSpec, RopeSpec

# All that differs between who writes heads and who serves them.
DIALECT_TABLE = load_yaml("dialects.yaml")
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
LEFT_OUT = {
    "quantization_config",
    "_name_or_path",
    "name_or_path",
}  # the target's
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "draft_vocab_size", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)  # sizes of MLA alone
LAYER = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
SPECULATORS_VERSION = "0.9.0"  # whose config classes the written files are tested with


@dataclass(frozen=True)
class Verifier:
    """The target that a head was made for, as far as it is known."""

    name: str | None = None
    architectures: tuple[str, ...] = ()


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config with its dimensions at the top. speculators nests them."""
    return {**(config.get("transformer_layer_config") or {}), **config}


def stated_ids(config: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layer ids as written in eagle_config and at the top level. () if absent."""
    nested = (config.get("eagle_config") or {}).get(IDS_KEY) or ()
    return tuple(nested), tuple(config.get(IDS_KEY) or ())


def shared_config(source: dict[str, Any], spec: HeadSpec, dtype: str) -> dict[str, Any]:
    """The keys that every layout has: sizes, rope, dtype, and other keys of the source.

    `dtype`: a safetensors code.
    """
    left_out = {*LEFT_OUT, *DIALECT_TABLE["made"]}
    flat = flat_config(without_code(source))
    carried = {key: value for key, value in flat.items() if key not in left_out}
    stored = {"tie_word_embeddings": False, "torch_dtype": DTYPES[dtype]}
    return architecture_config(spec) | rope_config(spec.rope) | stored | carried


def write_config(
    layout: dict[str, Any],
    shared: dict[str, Any],
    spec: HeadSpec,
    ids: list[int] | None,
    verifier: Verifier,
) -> dict[str, Any]:
    """The whole file as a dialect's `config` in data/dialects.yaml says.

    Args:
        shared: see `shared_config`.
        ids: layer ids as the dialect counts them.
        verifier: the target, which only speculators stores.
    """
    stated = {} if ids is None else {IDS_KEY: ids}
    if layout.get("layer"):
        return _speculators_config(shared, spec, verifier) | stated
    norm = {"norm_before_fc": True} if spec.norm_before_fc else {}
    tops = {"num_aux_hidden_states": spec.num_aux} | stated | norm
    top = {key: tops[key] for key in layout.get("top", ()) if key in tops}
    written = class_config(spec) | shared | top
    if spec.target_hidden_size != spec.hidden_size:  # three servers test for the key's presence
        written["target_hidden_size"] = spec.target_hidden_size
    if not spec.has_lm_head:
        # With the key SGLang keeps a random lm_head. Without it all take the target's.
        del written["draft_vocab_size"]
        if layout.get("null_vocabulary"):
            written["draft_vocab_size"] = None
    if spec.fc_norm or spec.norm_output:
        written |= {"fc_norm": spec.fc_norm, "norm_output": spec.norm_output}
    if spec.norm_before_residual:
        written["norm_before_residual"] = True
    if "class" in layout:
        return written | {"architectures": [layout["class"]]}
    return written | {
        "eagle_config": stated | {"use_aux_hidden_state": True} | layout.get("nested", {}) | norm
    }


def _speculators_config(
    shared: dict[str, Any], spec: HeadSpec, verifier: Verifier
) -> dict[str, Any]:
    """The file as speculators reads it, with sizes in transformer_layer_config.

    It has every flag, because defaults differ by reader.
    """
    layer = {
        key: value
        for key, value in shared.items()
        if key not in ("torch_dtype", "tie_word_embeddings")
    }
    del layer["draft_vocab_size"]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier.name,
                "architectures": list(verifier.architectures),
            },
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
    }


def rope_scaling(rope: RopeSpec) -> dict[str, Any]:
    """The rope as a config dict, with both spellings of the type because readers differ."""
    scaling: dict[str, Any] = {"rope_type": rope.rope_type, "type": rope.rope_type}
    scaling["rope_theta"] = rope.theta
    if rope.is_yarn:
        for name in ("factor", "original_max_position_embeddings", *YARN_NUMBERS[1:]):
            scaling[name] = getattr(rope, name)
    return scaling


def architecture_config(spec: HeadSpec) -> dict[str, Any]:
    """The layer's dimensions under the names that ModelOpt, transformers and the servers share."""
    names = LATENT if spec.is_mla else ("head_dim",)
    sizes: dict[str, Any] = {name: getattr(spec, name) for name in (*SIZES, *names)} | LAYER
    if spec.is_mla:
        sizes["first_k_dense_replace"] = 1
    return sizes


def class_config(spec: HeadSpec) -> dict[str, Any]:
    """Class and model type of a head of this attention, except for SafeAILab and speculators."""
    mla = spec.is_mla
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"],
        "model_type": "kimi_k2" if mla else "llama",
    }


def rope_config(rope: RopeSpec) -> dict[str, Any]:
    """Rope under each key that some reader looks at."""
    parameters = rope_scaling(rope)
    scaling: dict[str, Any] | None = None
    if rope.is_yarn:
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": parameters}
