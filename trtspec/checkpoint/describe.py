"""The report of `trtspec inspect`: what a checkpoint is, how big, how stored, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trtspec.checkpoint.hashes import hash_problems
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.read import head_facts, no_eagle3_head, read_head
from trtspec.checkpoint.heads.shapes import canonical_names
from trtspec.checkpoint.heads.values import value_problems
from trtspec.checkpoint.hub import Resolved, is_online
from trtspec.checkpoint.target_problems import detect, read_target
from trtspec.checkpoint.target_tensors import logical_parameters
from trtspec.errors import Problem, UsageError
from trtspec.specs import ModelSpec

HEAD_KEYS = ("family", "model_type", "architecture", "format", "eagle", "attention", "dialect", "aux_layers",
             "draft_vocab_size")  # fmt: skip


def describe(
    resolved: Resolved, *, all_values: bool = False, sample: int | None = None, hashes: bool = False
) -> dict[str, Any]:
    """The keys of the JSON contract plus `dtypes` and `source`; `problems` are Problem objects.

    A checkpoint on disk is read; a published one that is not here is answered from data/models.yaml, whose
    `unverified` fields are repeated. Small tensors of a target are read, and `sample` large ones (0: all); of a head
    pieces of each, or `all_values`. `hashes` reads every byte and compares it with the recorded SHA-256.
    """
    if resolved.path is not None and any(resolved.path.glob("*.safetensors")):
        checkpoint = Checkpoint.open(resolved.path)
        report = _from_headers(checkpoint, resolved, all_values, sample)
        if hashes:
            verified, problems = hash_problems(checkpoint.path, checkpoint.shards)
            report |= {"hashes_verified": verified, "problems": report["problems"] + problems}
        return report
    if hashes or sample is not None:
        message = f"{resolved.name} is not on this machine, so its bytes cannot be read"
        raise UsageError(message, f"run `hf download {resolved.hub_id}`, or leave --sample and --hashes out")
    if resolved.hub_id is not None and resolved.known is None and is_online():
        from trtspec.checkpoint.remote import open_remote

        checkpoint = open_remote(resolved.hub_id)
        report = _from_headers(checkpoint, resolved)
        assert checkpoint.remote is not None
        unseen = Problem(
            "TS-HUB-HEADERS-ONLY",
            "info",
            resolved.hub_id,
            "read from the hub by its headers: no weight was looked at, so NaN, zeros and wrong scales go unseen",
            f"run `hf download {resolved.hub_id}`, then inspect again",
        )
        return report | {"hub": checkpoint.remote.to_dict(), "problems": [*report["problems"], unseen]}
    return _from_config(resolved)


def _from_headers(
    checkpoint: Checkpoint, resolved: Resolved, all_values: bool = False, sample: int | None = None
) -> dict[str, Any]:
    wrong = no_eagle3_head(checkpoint.config, checkpoint.tensors)
    other_draft = wrong is not None and wrong.code != "TS-HEAD-FULL-MODEL"
    report = {
        "kind": "head" if other_draft else detect(checkpoint),
        "path": str(resolved.path),
        "source": "hub" if checkpoint.remote else "files",
        "parameters": sum(logical_parameters(info) for info in checkpoint.tensors.values()),
        "bytes": checkpoint.bytes,
        "shards": len(checkpoint.shards),
        "dtypes": dtype_bytes(checkpoint),
    }
    if other_draft:
        return report | dict.fromkeys(HEAD_KEYS) | {"problems": [wrong]}
    if report["kind"] == "head":
        head, problems = read_head(checkpoint)
        if checkpoint.remote is None:
            problems += value_problems(checkpoint, canonical_names(checkpoint.tensors), everything=all_values)
        return report | head_facts(head, checkpoint.config) | {"problems": problems}
    target = read_target(checkpoint)
    from trtspec.checkpoint.target_values import value_problems as target_values  # here, because numpy loads slowly

    facts = target_facts(target.spec, checkpoint.config, resolved.known)
    values = target_values(target, sample) if checkpoint.remote is None else []
    return report | facts | {"problems": target.problems + values}


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
