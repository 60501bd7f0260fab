"""Is it a target or a head, and which? Answered from config.json and tensor names, without torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from trtspec.checkpoint.headers import Checkpoint
from trtspec.errors import TrtspecError
from trtspec.specs import ModelSpec

EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
Kind = Literal["target", "head"]


def detect(path_or_checkpoint: Path | str | Checkpoint) -> Kind:
    """`target` or `head`, tensors first: a head fuses captured states (`fc`), a target has routed experts."""
    given = path_or_checkpoint
    checkpoint = given if isinstance(given, Checkpoint) else Checkpoint.open(given)
    if "fc.weight" in checkpoint.tensors or "model.fc.weight" in checkpoint.tensors:
        return "head"
    if any(EXPERT.search(name) for name in checkpoint.tensors):
        return "target"
    return config_kind(checkpoint.config, str(checkpoint.path))


def config_kind(config: dict[str, Any], name: str) -> Kind:
    """The same from config.json alone; raises TrtspecError when it is neither."""
    architecture = (config.get("architectures") or [""])[0]
    head_keys = ("eagle_config", "draft_vocab_size", "speculators_model_type", "transformer_layer_config")
    if "Eagle3" in architecture or any(key in config for key in head_keys):
        return "head"
    if config.get("num_hidden_layers") == 1:
        return "head"
    if config.get("model_type") in ("kimi_k2", "kimi_k25", "deepseek_v3", "kimi_k3", "kimi_linear"):
        return "target"
    raise TrtspecError(
        f"{name} is neither a Kimi-K2 target nor an Eagle3 head (model_type {config.get('model_type')!r}, "
        f"architecture {architecture!r})",
        "pass a K2, K2-Thinking, K2.5, K2.6 or K2.7-Code checkpoint, or an Eagle3 head of one",
    )


def target_spec(checkpoint: Checkpoint) -> ModelSpec:
    """ModelSpec of an opened target; its config.json and hf_quant_config.json decide."""
    return ModelSpec.from_config(checkpoint.config, checkpoint.hf_quant_config)
