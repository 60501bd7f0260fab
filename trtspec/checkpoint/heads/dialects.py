"""The dialects Eagle3 heads are stored in, and the one canonical record (HeadSpec) that all of them become.

Tensors are believed first: widths, ranks, the draft vocabulary and the presence of norms follow from shapes. The config
supplies what no tensor shows (layer ids, rope, feedback). Where the two disagree, `read_head` reports a problem.

Layer ids have two conventions. A counts layer outputs from 0 (ModelOpt, TensorRT-LLM, SpecForge, TorchSpec); B counts
the layers that already ran, so B = A + 1 (SafeAILab, vLLM, speculators). HeadSpec.aux_layers is always A.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.kind import no_eagle3_head
from trtspec.checkpoint.heads.shapes import canonical_names, layer_prefix, measure
from trtspec.errors import Problem, TrtspecError
from trtspec.specs import HeadSpec, RopeSpec

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
MODELOPT_KEYS = ("next_layer_regular", "parallel_draft_step")  # in every export since 0.40; TorchSpec writes neither


@dataclass(frozen=True)
class Dialect:
    """How one project writes a head. `ids` is where the layer ids stand and how they count."""

    name: str
    prefix: str
    ids: Literal["nested-A", "nested-first-id", "top-B", "none"]
    embed_tokens: bool
    t2d: Literal["always", "pruned", "never"]


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("modelopt", "layers.0.", "nested-A", embed_tokens=False, t2d="never"),
        Dialect("torchspec", "midlayer.", "nested-A", embed_tokens=True, t2d="pruned"),
        Dialect("specforge", "midlayer.", "nested-A", embed_tokens=True, t2d="always"),
        Dialect("safeailab", "midlayer.", "none", embed_tokens=False, t2d="pruned"),
        Dialect("vllm", "layers.0.", "top-B", embed_tokens=True, t2d="never"),
        Dialect("speculators", "layers.0.", "top-B", embed_tokens=True, t2d="pruned"),
        Dialect("sglang", "layers.0.", "nested-first-id", embed_tokens=False, t2d="never"),
    )
}


def detect_dialect(config: dict[str, Any], names: set[str]) -> str:
    """The dialect by the tensor names (unprefixed by `model.`) and the keys that only one writer leaves behind."""
    architecture = (config.get("architectures") or [""])[0]
    eagle = config.get("eagle_config") or {}
    midlayer = any(name.startswith("midlayer.") for name in names)
    if "transformer_layer_config" in config or "speculators_model_type" in config:
        return "speculators"
    if midlayer and architecture == "LlamaForCausalLM":
        return "safeailab"
    modelopt = any(key in eagle for key in MODELOPT_KEYS)
    torchspec = "_torchspec_version" in config or config.get("model_type") == "kimi_k2"
    if midlayer and "t2d" in names and not torchspec:
        return "specforge"
    if midlayer:
        return "modelopt" if modelopt and "embed_tokens.weight" not in names else "torchspec"
    if IDS_KEY in config:
        return "vllm"
    if modelopt:
        return "modelopt"
    if "embed_tokens.weight" in names:  # TorchSpec's export for vLLM; for kimi_k2 it adds one to the ids
        counts_inputs = config.get("model_type") == "kimi_k2" and min(stored_ids(config), default=1) != 1
        return "vllm" if counts_inputs else "torchspec"
    return "sglang" if eagle.get(IDS_KEY) else "modelopt"


def recorded(path: Path) -> dict[str, Any]:
    """provenance.json beside a checkpoint; {} when there is none or it cannot be read."""
    try:
        record = json.loads((path / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def dialect_of(checkpoint: Checkpoint) -> str:
    """The dialect that `trtspec convert` noted, as long as the tensor names fit it; else the detected one.

    Some dialects cannot be told apart by names and keys alone, and then count layers differently.
    """
    noted = DIALECTS.get(str(recorded(checkpoint.path).get("dialect")))
    if noted is not None and noted.prefix == layer_prefix(checkpoint.tensors):
        return noted.name
    return detect_dialect(checkpoint.config, {name.removeprefix("model.") for name in checkpoint.tensors})


def head_spec(checkpoint: Checkpoint) -> HeadSpec:
    """The canonical record of a head; raises TrtspecError at the first error that `read_head` finds."""
    spec, problems = read_head(checkpoint)
    for problem in problems:
        if problem.severity == "error":
            raise TrtspecError(f"{checkpoint.path}: {problem.message} [{problem.code}]", problem.remedy)
    return spec


def read_head(checkpoint: Checkpoint, dialect: str | None = None) -> tuple[HeadSpec, list[Problem]]:
    """The canonical record with every problem found in the checkpoint on its own (not against a target).

    `dialect` overrides detection. Raises TrtspecError for what is no Eagle3 head at all.
    """
    from trtspec.checkpoint.heads.problems import head_problems

    wrong = no_eagle3_head(checkpoint.config, checkpoint.tensors)
    if wrong is not None:
        raise TrtspecError(f"{checkpoint.path}: {wrong.message} [{wrong.code}]", wrong.remedy)
    tensors = canonical_names(checkpoint.tensors)
    declared = head_spec_from_config(checkpoint.config, dialect=dialect or dialect_of(checkpoint))
    measured, problems = measure(tensors, declared, flat_config(checkpoint.config))
    spec = replace(declared, **measured, layer_prefix=layer_prefix(checkpoint.tensors))
    spec = replace(spec, eagle="3.1" if spec.fc_norm or spec.norm_output else "3")
    return spec, problems + head_problems(checkpoint, tensors, spec)


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """speculators keeps the dimensions in transformer_layer_config; everyone else at the top."""
    return {**(config.get("transformer_layer_config") or {}), **config}


def head_spec_from_config(
    config: dict[str, Any], *, dialect: str | None = None, owns: dict[str, bool] | None = None
) -> HeadSpec:
    """HeadSpec from config.json alone, for heads known only by id. `owns` tells which tensors the file holds."""
    flat = flat_config(config)
    owns = owns or {}
    try:
        hidden, heads = int(flat["hidden_size"]), int(flat["num_attention_heads"])
        vocab = int(flat["vocab_size"])
        inner = int(flat["intermediate_size"])
    except KeyError as missing:
        raise TrtspecError(
            f"the head's config.json has no key {missing}", "fetch the head's config.json again"
        ) from None
    dialect = dialect or detect_dialect(config, set())
    mla = bool(flat.get("kv_lora_rank"))
    aux = aux_layers(config, dialect)
    spec = HeadSpec(
        eagle="3",
        attention="mla" if mla else "mha",
        dialect=dialect,
        hidden_size=hidden,
        target_hidden_size=int(flat.get("target_hidden_size") or hidden),
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=int(flat.get("num_key_value_heads") or heads),
        head_dim=int(flat.get("head_dim") or hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=int(flat.get("draft_vocab_size") or vocab),
        rms_norm_eps=float(flat.get("rms_norm_eps", 1e-6)),
        rope=RopeSpec.from_config(flat),
        num_aux=len(aux) if aux else int(flat.get("num_aux_hidden_states") or 3),
        aux_layers=aux,
        max_position_embeddings=int(flat.get("max_position_embeddings") or 4096),
        has_lm_head=owns.get("lm_head", True),
        has_embed_tokens=owns.get("embed_tokens", False),
        has_d2t=owns.get("d2t", False),
        layer_prefix=DIALECTS[dialect].prefix,
        **_flags(config, dialect),
    )
    if mla:
        ranks = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        values: dict[str, Any] = {rank: int(flat.get(rank) or 0) for rank in ranks}
        spec = replace(spec, **values, head_dim=values["qk_nope_head_dim"] + values["qk_rope_head_dim"])
    return replace(spec, eagle="3.1" if spec.fc_norm or spec.norm_output else "3")


def _flags(config: dict[str, Any], dialect: str) -> dict[str, bool]:
    """Flags that change the function. The same key has another meaning or default in two dialects, see the comments."""
    eagle = config.get("eagle_config") or {}
    fc_norm = bool(config.get("fc_norm"))
    norm_output = bool(config.get("norm_output") or config.get("post_norm") or eagle.get("return_hidden_post_norm"))
    if dialect == "specforge" and not fc_norm:
        norm_output = False  # before SpecForge PR 879 `norm_output: true` named plain EAGLE-3
    residual_default = dialect == "speculators"  # vLLM's translation of a speculators head that lacks the key
    return {
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "norm_before_fc": bool(eagle.get("norm_before_fc") or config.get("norm_before_fc")),
        "norm_before_residual": bool(config.get("norm_before_residual", residual_default)),
    }


def stored_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """Layer ids as written, wherever they stand; () when the checkpoint does not say."""
    ids = config.get(IDS_KEY) or (config.get("eagle_config") or {}).get(IDS_KEY) or ()
    return tuple(int(number) for number in ids)


def aux_layers(config: dict[str, Any], dialect: str) -> tuple[int, ...] | None:
    """Layer outputs (0-based) that the head was trained on, or None when the checkpoint does not say."""
    ids = stored_ids(config)
    if not ids:
        return None
    convention = DIALECTS[dialect].ids
    counts_inputs = convention == "top-B" or (convention == "nested-first-id" and min(ids) != 1)
    return tuple(number - 1 for number in ids) if counts_inputs else ids
