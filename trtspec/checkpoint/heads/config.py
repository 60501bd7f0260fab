"""config.json of a head: which keys hold what, and how each project writes them from the canonical record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtspec.data_files import load_yaml
from trtspec.foreign import without_code
from trtspec.specs import YARN_NUMBERS, HeadSpec, RopeSpec

DIALECT_TABLE = load_yaml(
    "dialects.yaml"
)  # all that differs between who writes heads and who serves them
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
LEFT_OUT = {
    "quantization_config",
    "_name_or_path",
    "name_or_path",
}  # the target's
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
         "draft_vocab_size", "rms_norm_eps", "max_position_embeddings")  # fmt: skip
LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)  # sizes of MLA alone
LAYER = {"num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
         "mlp_bias": False}  # fmt: skip
SPECULATORS_VERSION = "0.9.0"  # whose config classes the written files are tested with


@dataclass(frozen=True)
class Verifier:
    """The target that a head was made for, as far as it is known."""

    name: str | None = None
    architectures: tuple[str, ...] = ()


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
    made = {*LEFT_OUT, *DIALECT_TABLE["made"]}
    carried = {
        key: value for key, value in flat_config(without_code(source)).items() if key not in made
    }
    stored = {"tie_word_embeddings": False, "torch_dtype": DTYPES[dtype]}
    return architecture_config(spec) | rope_config(spec.rope) | stored | carried


def write_config(
    layout: dict[str, Any],
    shared: dict[str, Any],
    spec: HeadSpec,
    ids: list[int] | None,
    verifier: Verifier,
) -> dict[str, Any]:
    """The whole file as a dialect's `config` in data/dialects.yaml says. `shared`: see `shared_config`; `ids`: layer
    ids as the dialect counts them; only speculators stores the target."""
    stated = {} if ids is None else {IDS_KEY: ids}
    if layout.get("layer"):
        return _speculators_config(shared, spec, verifier) | stated
    norm = {"norm_before_fc": True} if spec.norm_before_fc else {}
    tops = {"num_aux_hidden_states": spec.num_aux} | stated | norm
    written = (
        class_config(spec)
        | shared
        | {key: tops[key] for key in layout.get("top", ()) if key in tops}
    )
    if spec.target_hidden_size != spec.hidden_size:  # three servers test for the key's presence
        written["target_hidden_size"] = spec.target_hidden_size
    if not spec.has_lm_head:
        del written[
            "draft_vocab_size"
        ]  # with it SGLang keeps a random lm_head; without it all take the target's
        written |= {"draft_vocab_size": None} if layout.get("null_vocabulary") else {}
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
    """The layer's sizes are in transformer_layer_config; every flag is written, because defaults differ by reader."""
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
    """The rope as a config dict with both spellings of the type, because readers differ in which one they look at."""
    names = (
        ("factor", "original_max_position_embeddings", *YARN_NUMBERS[1:]) if rope.is_yarn else ()
    )
    found = {"rope_type": rope.rope_type, "type": rope.rope_type, "rope_theta": rope.theta}
    return found | {name: getattr(rope, name) for name in names}


def architecture_config(spec: HeadSpec) -> dict[str, Any]:
    """The layer's dimensions under the names that ModelOpt, transformers and the servers share."""
    latent = spec.is_mla
    sizes = {name: getattr(spec, name) for name in (*SIZES, *(LATENT if latent else ("head_dim",)))}
    return sizes | LAYER | ({"first_k_dense_replace": 1} if latent else {})


def class_config(spec: HeadSpec) -> dict[str, Any]:
    """The names by which every project but SafeAILab and speculators knows a head of this attention."""
    mla = spec.is_mla
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"],
        "model_type": "kimi_k2" if mla else "llama",
    }


def rope_config(rope: RopeSpec) -> dict[str, Any]:
    """Rope in each place that some reader looks at."""
    found = rope_scaling(rope)
    scaling: dict[str, Any] | None = None
    if rope.is_yarn:
        scaling = {key: value for key, value in found.items() if key != "rope_theta"}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": found}
