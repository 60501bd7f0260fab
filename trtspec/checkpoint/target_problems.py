"""What is wrong with a Kimi target, found from its files and headers without reading a weight."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

from trtspec.checkpoint.headers import Checkpoint, read_json
from trtspec.checkpoint.target_shapes import linear_shapes, logical_shape, stored_as
from trtspec.errors import Problem
from trtspec.formats import WeightFormat
from trtspec.specs import ModelSpec, QuantSpec, Values

REMEDY = "fetch the checkpoint again"
FROM_BASE = "copy it from the base model's repository"


def target_problems(checkpoint: Checkpoint, spec: ModelSpec) -> list[Problem]:
    return [
        *_weights(checkpoint, spec),
        *_quant_configs(checkpoint),
        *_excluded(checkpoint, spec),
        *_files(checkpoint.path, checkpoint.config),
        *_end_of_text(checkpoint.path, spec),
    ]


def _weights(checkpoint: Checkpoint, spec: ModelSpec) -> list[Problem]:
    """Every linear that the architecture needs, with its scales and shape; reported once per kind of fault."""
    missing, unscaled, misshaped, mistyped = [], [], [], []
    tensors = checkpoint.tensors
    for module, shape in linear_shapes(spec):
        stored = stored_as(tensors, module)
        if stored is None:
            missing.append(module)
            continue
        if not isinstance(stored, WeightFormat):
            mistyped.append(f"{module} is {stored}")
            continue
        unscaled += [f"{module}.{name}" for name in stored.companions if f"{module}.{name}" not in tensors]
        if logical_shape(tensors, module, stored) != shape:
            misshaped.append(
                f"{module} is {list(logical_shape(tensors, module, stored))}, config.json needs {list(shape)}"
            )
    return [
        *_one("TS-TARGET-WEIGHT-MISSING", missing, "weights are absent", REMEDY),
        *_one("TS-TARGET-SCALE-MISSING", unscaled, "scales are absent", REMEDY),
        *_one("TS-TARGET-DTYPE", mistyped, "weights have a type that no Kimi format uses", REMEDY),
        *_one("TS-TARGET-SHAPE", misshaped, "weights have another shape", "check that config.json is theirs"),
    ]


def _one(code: str, names: list[str], what: str, remedy: str) -> list[Problem]:
    if not names:
        return []
    return [Problem(code, "error", names[0].split(" ")[0], f"{len(names)} {what}, first {names[0]}", remedy)]


def _quant_configs(checkpoint: Checkpoint) -> list[Problem]:
    """config.json and hf_quant_config.json both describe the quantization; engines differ in which they read."""
    block = checkpoint.config.get("quantization_config")
    if not block or checkpoint.hf_quant_config is None:
        return []
    ours = QuantSpec.from_configs(checkpoint.config)
    theirs = QuantSpec.from_configs({}, checkpoint.hf_quant_config)
    differing = [
        field for field in ("format", "group_size", "kv_cache") if getattr(ours, field) != getattr(theirs, field)
    ]
    if set(ours.exclude) != set(theirs.exclude):
        differing.append("exclude list")
    if not differing:
        return []
    message = f"config.json and hf_quant_config.json disagree on {', '.join(differing)}"
    remedy = "make them agree; engines differ in which one they read"
    return [Problem("TS-TARGET-QUANT-CONFIGS", "error", "hf_quant_config.json", message, remedy)]


def _excluded(checkpoint: Checkpoint, spec: ModelSpec) -> list[Problem]:
    """NVFP4: an engine decides by the exclude patterns which weights to unpack, so they must match the tensors."""
    if not spec.quant.format.is_fp4:
        return []
    packed, plain = [], []
    excluded_names = re.compile("|".join(fnmatch.translate(pattern) for pattern in spec.quant.exclude) or r"(?!)")
    for module, _ in linear_shapes(spec):
        stored = stored_as(checkpoint.tensors, module)
        excluded = excluded_names.match(module) is not None
        if not isinstance(stored, WeightFormat):
            continue
        if excluded and stored.is_fp4:
            packed.append(module)
        if not excluded and stored.is_plain and not module.endswith((".mlp.gate", ".embed_tokens")):
            plain.append(module)
    remedy = "quantize again, or correct the exclude list of quantization_config"
    return [
        *_one("TS-TARGET-EXCLUDE", packed, "weights are NVFP4 and listed as excluded", remedy),
        *_one("TS-TARGET-EXCLUDE", plain, "weights are BF16 and not listed as excluded", remedy),
    ]


def _files(path: Path, config: dict[str, Any]) -> list[Problem]:
    problems = []
    if not (path / "tiktoken.model").is_file() and not (path / "tokenizer.json").is_file():
        message = "no tokenizer (tiktoken.model); copying only *.json and *.py loses it"
        problems.append(Problem("TS-TARGET-TOKENIZER", "warning", "tiktoken.model", message, FROM_BASE))
    tokenizer = path / "tokenizer_config.json"
    inline = tokenizer.is_file() and "chat_template" in read_json(tokenizer)
    if not inline and not (path / "chat_template.jinja").is_file():
        message = "no chat template: chat requests fail or use another model's"
        problems.append(Problem("TS-TARGET-TEMPLATE", "warning", "chat_template.jinja", message, FROM_BASE))
    modules = {
        reference.split(".")[0] + ".py"
        for reference in (config.get("auto_map") or {}).values()
        if isinstance(reference, str)
    }
    absent = sorted(name for name in modules if not (path / name).is_file())
    if absent:
        message = f"config.json names remote code that is not here: {', '.join(absent)}"
        problems.append(Problem("TS-TARGET-REMOTE-CODE", "warning", absent[0], message, FROM_BASE))
    return problems


def _end_of_text(path: Path, spec: ModelSpec) -> list[Problem]:
    """The family changed its end-of-text id between K2.5 and K2.6; generation_config.json wins in most engines."""
    generation = path / "generation_config.json"
    if not generation.is_file() or not spec.eos_token_ids:
        return []
    ids = Values(read_json(generation), generation.name).wholes("eos_token_id")
    if not ids or set(spec.eos_token_ids) & set(ids):
        return []
    message = f"generation_config.json ends text at {list(ids)}, config.json at {list(spec.eos_token_ids)}"
    remedy = "answers may run on; take the ids of the model's repository"
    return [Problem("TS-TARGET-EOS", "warning", "generation_config.json", message, remedy)]
