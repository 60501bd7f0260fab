"""Reads and writes the config.json of a head in the layout of each project."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtspec.data_files import load_yaml
from trtspec.foreign import without_code
from trtspec.specs import YARN_NUMBERS, HeadSpec, RopeSpec

# All differences between the projects that write heads and the engines that serve them.
DIALECT_TABLE = load_yaml("dialects.yaml")
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
# keys of a source's config that describe the target, so that no head gets them
LEFT_OUT = {
    "quantization_config",
    "_name_or_path",
    "name_or_path",
}
# values of torch_dtype by safetensors code
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# numbers of HeadSpec that every head's config has, and those that only MLA has
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
)
# keys with the same value in every Eagle3 head
LAYER = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
# version of speculators whose config classes read the written files in tests
SPECULATORS_VERSION = "0.9.0"


@dataclass(frozen=True)
class Verifier:
    """Target that a head was made for.

    name: hub id or path. None if it is not known.
    architectures: class names in the target's config.json. Empty if they are not known.
    """

    name: str | None = None
    architectures: tuple[str, ...] = ()


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with its dimensions at the top level.

    speculators nests them in transformer_layer_config. A key at the top level has priority.
    """
    return {**(config.get("transformer_layer_config") or {}), **config}


def stated_ids(config: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the layer ids in eagle_config and the layer ids at the top level of a config.

    Each is () if the key is absent.
    """
    nested = (config.get("eagle_config") or {}).get(IDS_KEY) or ()
    return tuple(nested), tuple(config.get(IDS_KEY) or ())


def shared_config(source: dict[str, Any], spec: HeadSpec, dtype: str) -> dict[str, Any]:
    """Returns the keys that every layout has: sizes, rope, dtype, and other keys of the source.

    A key that the source states has priority over the record's value.

    Args:
        source: config.json that the head had before.
        dtype: safetensors code of the head's tensors.
    """
    left_out = {*LEFT_OUT, *DIALECT_TABLE["made"]}
    flat = flat_config(without_code(source))
    source_keys = {key: value for key, value in flat.items() if key not in left_out}
    stored = {"tie_word_embeddings": False, "torch_dtype": DTYPES[dtype]}
    return architecture_config(spec) | rope_config(spec.rope) | stored | source_keys


def write_config(
    layout: dict[str, Any],
    shared: dict[str, Any],
    spec: HeadSpec,
    ids: list[int] | None,
    verifier: Verifier,
) -> dict[str, Any]:
    """Returns the contents of a head's config.json in the layout of one dialect.

    Args:
        layout: the dialect's `config` in data/dialects.yaml.
        shared: keys that every layout has, from `shared_config`.
        ids: layer ids as the dialect counts them. None if the file must not state them.
        verifier: target of the head, which only speculators stores.
    """
    stated = {} if ids is None else {IDS_KEY: ids}
    if layout.get("layer"):
        return _speculators_config(shared, spec, verifier) | stated
    norm = {"norm_before_fc": True} if spec.norm_before_fc else {}
    possible = {"num_aux_hidden_states": spec.num_aux} | stated | norm
    top = {key: possible[key] for key in layout.get("top", ()) if key in possible}
    written = class_config(spec) | shared | top
    # Left out for equal widths, because three servers only test whether the key is present.
    if spec.target_hidden_size != spec.hidden_size:
        written["target_hidden_size"] = spec.target_hidden_size
    if not spec.has_lm_head:
        # With the key SGLang keeps a random lm_head. Without it all engines use the target's.
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
    """Returns the contents of config.json as speculators reads it.

    Sizes are in transformer_layer_config. The file states every flag, because readers have
    different defaults.
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
    """Returns the rope settings as one JSON object.

    The type is under both spellings of its key, because readers differ in the key that they use.
    """
    scaling: dict[str, Any] = {"rope_type": rope.rope_type, "type": rope.rope_type}
    scaling["rope_theta"] = rope.theta
    if rope.is_yarn:
        for name in ("factor", "original_max_position_embeddings", *YARN_NUMBERS[1:]):
            scaling[name] = getattr(rope, name)
    return scaling


def architecture_config(spec: HeadSpec) -> dict[str, Any]:
    """Returns the draft layer's sizes, named as ModelOpt, transformers and the servers do."""
    names = LATENT if spec.is_mla else ("head_dim",)
    sizes: dict[str, Any] = {name: getattr(spec, name) for name in (*SIZES, *names)} | LAYER
    if spec.is_mla:
        # Makes the only layer dense. Without the key, engines would build experts.
        sizes["first_k_dense_replace"] = 1
    return sizes


def class_config(spec: HeadSpec) -> dict[str, Any]:
    """Returns class and model type of a head with this attention.

    SafeAILab and speculators have names of their own.
    """
    mla = spec.is_mla
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"],
        "model_type": "kimi_k2" if mla else "llama",
    }


def rope_config(rope: RopeSpec) -> dict[str, Any]:
    """Returns the rope settings under every key from which some engine reads them."""
    parameters = rope_scaling(rope)
    scaling: dict[str, Any] | None = None
    if rope.is_yarn:
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": parameters}
