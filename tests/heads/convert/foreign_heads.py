"""One random head as each project writes it, from facts about their exporters and without trtspec.

The base is tests/tiny.py's head in ModelOpt's layout; the embedding is the target's, as in
published heads.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.json_files import read_json, write_json
from tests.tiny import make_head, read_tensors, write_tensors

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
IDS = "eagle_aux_hidden_state_layer_ids"
DIALECTS = ("modelopt", "vllm", "sglang", "speculators", "torchspec", "specforge", "safeailab")
MIDLAYER = ("torchspec", "specforge", "safeailab")
WITH_EMBEDDING = ("torchspec", "specforge", "vllm", "speculators")
WITH_MASK = ("torchspec", "speculators", "safeailab")
NO_MLA = ("speculators", "specforge", "safeailab")


def expressible(dialect: str, attention: str, eagle: str, vocab: int | None = None) -> bool:
    """Whether a project's code computes such a head.

    SpecForge, speculators and SafeAILab have no MLA, SafeAILab no 3.1. With `vocab`, which it loads
    too: ModelOpt exports a pruned MLA head, and TensorRT-LLM does not load it.
    """
    pruned_mla = attention == "mla" and vocab is not None and dialect == "modelopt"
    known = not (attention == "mla" and dialect in NO_MLA) and not (
        eagle == "3.1" and dialect == "safeailab"
    )
    return known and not pruned_mla


def target_embedding(target: Path) -> torch.Tensor:
    tensors = read_tensors(target)
    return next(tensors[name] for name in tensors if name.endswith("embed_tokens.weight"))


def write_head(directory: Path, target: Path, dialect: str, **options: Any) -> Path:
    """The head of make_head(**options) as `dialect` stores it; returns its directory."""
    make_head(directory, target, **options)
    config, tensors = stored(directory)
    config["rope_parameters"] = (config["rope_scaling"] or {"rope_type": "default"}) | {
        "rope_theta": config["rope_theta"]
    }
    config["draft_vocab_size"] = len(tensors["lm_head.weight"])
    write_tensors(directory, _tensors(tensors, config, target, dialect))
    write_json(directory / "config.json", _config(config, dialect))
    return directory


def changed_head(
    directory: Path, target: Path, dialect: str = "", change: Change | None = None, **options: Any
) -> Path:
    """Writes a head and changes it: write_head's, or make_head's without a dialect.

    It has unit gains, so that no double-norm finding stands in the way.
    """
    path = (
        write_head(directory, target, dialect, **options)
        if dialect
        else make_head(directory, target, **options)
    )
    config, tensors = stored(path)
    for name in [name for name in tensors if name.endswith("input_layernorm.weight")]:
        tensors[name] = torch.ones_like(tensors[name])
    if change:
        change(config, tensors)
    store(path, config, tensors)
    return path


def stored(head: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return read_json(head / "config.json"), read_tensors(head)


def store(head: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Without metadata, as several trainers do."""
    write_json(head / "config.json", config)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, head / "model.safetensors")


def set_key(key: str, value: Any) -> Change:
    return lambda config, tensors: config.update({key: value})


def drop(*names: str) -> Change:
    """Takes keys out of config.json, and tensors out of the file."""
    return lambda config, tensors: [
        (config.pop(name, None), tensors.pop(name, None)) for name in names
    ]


def _tensors(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], target: Path, dialect: str
) -> dict[str, torch.Tensor]:
    vocab, pruned = config["vocab_size"], "d2t" in tensors
    if dialect == "specforge" and not pruned:
        tensors["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    if dialect == "specforge" or (pruned and dialect in WITH_MASK):
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
    if dialect in WITH_EMBEDDING:
        tensors["embed_tokens.weight"] = target_embedding(target)
    if dialect in MIDLAYER:
        tensors = {
            name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()
        }
    return tensors


def _config(config: dict[str, Any], dialect: str) -> dict[str, Any]:
    eagle = config.pop("eagle_config")
    outputs = eagle[IDS]
    inputs = [layer + 1 for layer in outputs]
    if dialect == "modelopt":
        return config | {"eagle_config": eagle}
    if dialect == "vllm":
        return config | {IDS: inputs}
    if dialect == "sglang":
        stored = outputs if outputs[0] == 1 else inputs
        return config | {"eagle_config": {IDS: stored, "use_aux_hidden_state": True}}
    if dialect in ("torchspec", "specforge"):
        return config | {"eagle_config": {IDS: outputs, "use_aux_hidden_state": True}}
    if dialect == "safeailab":
        return config | {"architectures": ["LlamaForCausalLM"]}
    flags = {flag: config.pop(flag, False) for flag in ("fc_norm", "norm_output")}
    del config["architectures"]
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": config.pop("draft_vocab_size"),
        "norm_before_residual": False,
        "torch_dtype": config.pop("torch_dtype"),
        IDS: inputs,
        "transformer_layer_config": config,
        **flags,
    }
