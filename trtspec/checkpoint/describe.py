"""The report of `trtspec inspect`: what a checkpoint is, how big, how stored, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trtspec.checkpoint.detect import detect, target_spec
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.read import no_eagle3_head, read_head
from trtspec.checkpoint.heads.shapes import canonical_names
from trtspec.checkpoint.heads.values import value_problems
from trtspec.checkpoint.hub import Resolved
from trtspec.checkpoint.target_problems import target_problems
from trtspec.checkpoint.target_shapes import logical_parameters
from trtspec.errors import Problem
from trtspec.specs import HeadSpec, ModelSpec

HEAD_KEYS = ("family", "model_type", "architecture", "format", "eagle", "attention", "dialect", "aux_layers",
             "draft_vocab_size")  # fmt: skip


def describe(resolved: Resolved, *, all_values: bool = False) -> dict[str, Any]:
    """The keys of the JSON contract plus `dtypes` and `source`; `problems` are Problem objects.

    A checkpoint on disk is read; a published one that is not here is answered from data/models.yaml, whose
    `unverified` fields are repeated. A head's values are sampled, or all read with `all_values`.
    """
    here = resolved.path is not None and any(resolved.path.glob("*.safetensors"))
    return _from_disk(resolved, all_values) if here else _from_config(resolved)


def _from_disk(resolved: Resolved, all_values: bool) -> dict[str, Any]:
    assert resolved.path is not None
    checkpoint = Checkpoint.open(resolved.path)
    wrong = no_eagle3_head(checkpoint.config, checkpoint.tensors)
    other_draft = wrong is not None and wrong.code != "TS-HEAD-FULL-MODEL"
    report = {
        "kind": "head" if other_draft else detect(checkpoint),
        "path": str(resolved.path),
        "source": "files",
        "parameters": sum(logical_parameters(info) for info in checkpoint.tensors.values()),
        "bytes": checkpoint.bytes,
        "shards": len(checkpoint.shards),
        "dtypes": dtype_bytes(checkpoint),
    }
    if other_draft:
        return report | dict.fromkeys(HEAD_KEYS) | {"problems": [wrong]}
    if report["kind"] == "head":
        head, problems = read_head(checkpoint)
        problems += value_problems(checkpoint, canonical_names(checkpoint.tensors), everything=all_values)
        return report | head_facts(head, checkpoint.config) | {"problems": problems}
    spec = target_spec(checkpoint)
    facts = target_facts(spec, checkpoint.config, resolved.known)
    return report | facts | {"problems": target_problems(checkpoint, spec)}


def _from_config(resolved: Resolved) -> dict[str, Any]:
    entry = resolved.known or {}
    config = resolved.config()
    report = {
        "kind": resolved.kind,
        "path": str(resolved.path) if resolved.path else None,
        "source": "catalogue" if resolved.known else "config.json",
        **{key: entry.get(key) for key in ("parameters", "bytes", "shards")},
        "dtypes": None,
        "unverified": entry.get("unverified", []),
        "licence": entry.get("licence"),
    }
    problems: list[Problem] = []
    if report["kind"] == "head":
        facts = head_facts(resolved.head_spec(), config)
        return report | facts | {"published_for": entry.get("targets"), "problems": problems}
    return report | target_facts(resolved.target_spec(), config, resolved.known) | {"problems": problems}


def dtype_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes by safetensors dtype, largest first."""
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        sizes[info.dtype] += info.nbytes
    return dict(sizes.most_common())


def target_facts(spec: ModelSpec, config: dict[str, Any], known: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "family": known["family"] if known else family(spec),
        "model_type": spec.model_type,
        "architecture": spec.architecture,
        "format": spec.quant.format,
        "kv_cache": spec.quant.kv_cache,
        "layers": spec.num_hidden_layers,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "eos_token_ids": list(spec.eos_token_ids),
        "vision": spec.has_vision,
        "remote_code": spec.remote_code,
        "kv_elements_per_token": spec.kv_elements_per_token,
        "default_aux_layers": list(spec.default_aux_layers),
        "excluded_patterns": len(spec.quant.exclude),
        "producer": (config.get("quantization_config") or {}).get("producer"),
    }


def family(spec: ModelSpec) -> str:
    """k2, k2-thinking, k2.5 or k2.6+ (K2.6 and K2.7-Code have the same config), as far as a config tells."""
    if spec.model_type == "kimi_k25":
        return "k2.6+" if 163586 in spec.eos_token_ids else "k2.5"
    return "k2-thinking" if spec.quant.format.bits_per_value == 4 else "k2"


def head_facts(spec: HeadSpec, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "family": "eagle3",
        "model_type": config.get("model_type"),
        "architecture": (config.get("architectures") or [None])[0],
        "format": spec.dialect,
        "eagle": spec.eagle,
        "attention": spec.attention,
        "dialect": spec.dialect,
        "aux_layers": list(spec.aux_layers) if spec.aux_layers is not None else None,
        "draft_vocab_size": spec.draft_vocab_size,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "own_lm_head": spec.has_lm_head,
        "own_embed_tokens": spec.has_embed_tokens,
        "kv_elements_per_token": spec.kv_elements_per_token,
    }
