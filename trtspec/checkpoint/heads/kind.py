"""What is passed as an Eagle3 head and is none: Medusa, EAGLE-1 and 2, multi-token prediction, a whole model."""

from __future__ import annotations

import re
from typing import Any

from trtspec.checkpoint.headers import TensorInfo
from trtspec.errors import Problem

MEDUSA = re.compile(r"^(medusa_heads?\.)?\d+\.\d+\.linear\.weight$|^medusa_heads?\.")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
TRAIN = "pass an Eagle3 head of this target, or make one with `trtspec train`"


def no_eagle3_head(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> Problem | None:
    """Why these tensors are no Eagle3 head, by names and shapes that only other things have; None if they may be."""
    names = set(tensors)
    kind = config.get("speculators_model_type") or config.get("model_type")
    if "medusa_num_heads" in config or kind == "medusa" or any(MEDUSA.search(name) for name in names):
        message = "these are Medusa heads: they guess from the last state alone, and no Eagle3 engine path runs them"
        return Problem("TS-HEAD-MEDUSA", "error", "tensor names", message, TRAIN)
    if config.get("speculators_model_type", "eagle3") != "eagle3":
        message = f"a speculators model of type {kind!r}; only eagle3 is an Eagle3 head"
        return Problem("TS-HEAD-OTHER-DRAFT", "error", "speculators_model_type", message, TRAIN)
    fc = next((info for name, info in tensors.items() if name.removeprefix("model.") == "fc.weight"), None)
    if fc is not None:
        return _first_generation(fc, names)
    layers = {int(found[1]) for found in map(LAYER.search, names) if found}
    if len(layers) < 2 and any(name.endswith(("eh_proj.weight", "enorm.weight")) for name in names):
        message = "a multi-token-prediction module (eh_proj, enorm), which fuses one state and not the captured ones"
        return Problem("TS-HEAD-OTHER-DRAFT", "error", "tensor names", message, TRAIN)
    if len(layers) > 1 or any(".mlp.experts." in name for name in names):
        message = f"this is a whole model ({max(layers, default=0) + 1} layers, no fc), not a draft head"
        return Problem("TS-HEAD-FULL-MODEL", "error", "fc.weight", message, "pass the target first and a head second")
    return None


def _first_generation(fc: TensorInfo, names: set[str]) -> Problem | None:
    """EAGLE-1 and EAGLE-2 fuse the embedding with one state in fc [H, 2H] and have no hidden_norm."""
    if any(name.endswith("hidden_norm.weight") for name in names) or len(fc.shape) != 2:
        return None
    if fc.shape[1] != 2 * fc.shape[0]:
        return None
    message = f"an EAGLE-1 or EAGLE-2 head: fc {list(fc.shape)} fuses an embedding with one state, without hidden_norm"
    return Problem("TS-HEAD-EAGLE1", "error", "fc.weight", message, TRAIN)
