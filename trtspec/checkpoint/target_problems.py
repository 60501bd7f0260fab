"""Detects whether a checkpoint is a target or a head, and finds the problems of a target.

No weight is read. `trtspec inspect` prints the problems. Every command that is about to spend time
on a target calls `require_target` first, which refuses a target with an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtspec.checkpoint.headers import INDEX_NAME, Checkpoint
from trtspec.checkpoint.identity import recorded
from trtspec.checkpoint.remote_code import read_code
from trtspec.checkpoint.target_config import config_problems, scheme_problems
from trtspec.checkpoint.target_tensors import coverage_problems, tensor_problems
from trtspec.checkpoint.tokenizer_problems import tokenizer_problems
from trtspec.errors import Problem, Severity, TrtspecError, UsageError, errors_in, has_errors
from trtspec.families.family import Role
from trtspec.families.known import REFUSED_TYPES, model_types
from trtspec.formats import WeightFormat
from trtspec.specs import ModelSpec

# names of the linear that fuses the captured states, which only a head has
HEAD_TENSORS = {"fc.weight", "model.fc.weight"}
MAX_LISTED = 3  # number of further errors that a refusal lists


@dataclass(frozen=True)
class ReadTarget:
    """Target that was read by its headers.

    formats: storage format of each stored linear, by module name.
    roles: purpose of each stored linear, by module name.
    problems: problems of headers, configuration files and tokenizer.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    formats: dict[str, WeightFormat]
    roles: dict[str, Role]
    problems: list[Problem]


def read_target(path: Path | str | Checkpoint) -> ReadTarget:
    """Reads a target by its headers and returns it with every problem.

    Raises TrtspecError, with a code, if the target cannot be read at all. The reasons are damaged
    shards, an index that contradicts them, another model or an unknown scheme. Raises UsageError if
    the checkpoint is a head.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    if not HEAD_TENSORS.isdisjoint(checkpoint.tensors):
        raise UsageError(f"{checkpoint.path} is a draft head, not a target", "name its target here")
    scheme = scheme_problems(checkpoint)
    try:
        spec = target_spec(checkpoint)
    except TrtspecError:
        errors = errors_in(scheme)
        # An error of the scheme is more exact, because it names the wrong key.
        if errors:
            first = refusal(checkpoint.path, errors)
            raise TrtspecError(first.message, errors[0].remedy, first.code) from None
        raise
    tensors, formats, roles = tensor_problems(checkpoint, spec)
    problems = [
        *tensors,
        *scheme,
        *coverage_problems(spec, formats, roles),
        *config_problems(checkpoint.config, spec),
        *_shards(checkpoint),
        *tokenizer_problems(checkpoint.path, checkpoint.config, spec.vocab_size),
        *read_code(checkpoint.path).problems,
        *_noted(checkpoint.path),
    ]
    return ReadTarget(checkpoint, spec, formats, roles, problems)


def require_target(path: Path | str | Checkpoint) -> ReadTarget:
    """Reads a target. Raises TrtspecError if it has an error."""
    return sound(read_target(path))


def sound(target: ReadTarget) -> ReadTarget:
    """Returns the same target.

    Raises TrtspecError, with the code of the first error, if the target has errors.
    """
    if has_errors(target.problems):
        raise refusal(target.checkpoint.path, target.problems)
    return target


def refusal(path: Path, problems: list[Problem]) -> TrtspecError:
    """Returns an error with the first error of `problems` and the places of further ones."""
    errors = errors_in(problems)
    first = errors[0]
    others = errors[1 : 1 + MAX_LISTED]
    message = f"{path}: {first.where}: {first.message} [{first.code}]"
    if others:
        named = ", ".join(f"{problem.code} {problem.where}" for problem in others)
        message += f" (and {len(errors) - 1} more: {named})"
    return TrtspecError(message, f"{first.remedy}; `trtspec inspect {path}` lists all", first.code)


def _noted(path: Path) -> Iterator[Problem]:
    """Yields problems of the source that `trtspec quantize` recorded in provenance.json.

    The source may be gone, so they cannot be found again.
    """
    for entry in recorded(path).get("problems") or ():
        code, where, message, remedy = (
            str(entry.get(key, "")) for key in ("code", "where", "message", "remedy")
        )
        severity: Severity = "error" if entry.get("severity") == "error" else "warning"
        message = f"noted when this checkpoint was quantized: {message}"
        yield Problem(code, severity, where, message, remedy)


def _shards(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Yields problems of weight files that do not belong to the checkpoint, or are incomplete.

    Some engines load every weight file of the directory.
    """
    path = checkpoint.path
    names = sorted(file.name for file in path.glob("*.safetensors"))
    strays = [name for name in names if name not in checkpoint.shards]
    if strays:
        reason = "accompany model.safetensors"
        if (path / INDEX_NAME).is_file():
            reason = f"{INDEX_NAME} does not name"
        files = f"{len(strays)} weight files that {reason}"
        message = f"{files}, first {strays[0]}; some loaders read them too"
        yield Problem("TS-INDEX-STRAY", "warning", strays[0], message)
    # aria2 gives a shard its full size at once and keeps this file until the shard is complete.
    partials = [f"{shard}.aria2" for shard in checkpoint.shards]
    unfinished = [name for name in partials if (path / name).is_file()]
    if unfinished:
        message = f"{unfinished[0]} says that a download has not filled its shard yet"
        remedy = "wait for the download to end, or start it again"
        yield Problem("TS-SHARD-PARTIAL", "error", unfinished[0], message, remedy)


EXPERT = re.compile(r"\.experts\.\d+\.")
Kind = Literal["target", "head"]


def detect(checkpoint: Checkpoint) -> Kind:
    """Returns the type of a checkpoint.

    Tensors decide before config.json. A head has `fc`, and a target has routed experts.
    """
    if not HEAD_TENSORS.isdisjoint(checkpoint.tensors):
        return "head"
    if any(EXPERT.search(name) for name in checkpoint.tensors):
        return "target"
    return config_kind(checkpoint.config, str(checkpoint.path))


def config_kind(config: dict[str, Any], name: str) -> Kind:
    """Returns the type of a checkpoint by its config.json alone.

    Raises TrtspecError if the checkpoint is neither a target nor a head. `name`: name for the
    message.
    """
    architecture = (config.get("architectures") or [""])[0]
    head_keys = (
        "eagle_config",
        "draft_vocab_size",
        "speculators_model_type",
        "transformer_layer_config",
    )
    if "Eagle3" in architecture or any(key in config for key in head_keys):
        return "head"
    if config.get("num_hidden_layers") == 1:
        return "head"  # No target has a single layer.
    if config.get("model_type") in (*model_types(), *REFUSED_TYPES):
        return "target"
    stated = f"model_type {config.get('model_type')!r}, architecture {architecture!r}"
    message = f"{name} is neither a Kimi-K2 target nor an Eagle3 head ({stated})"
    remedy = "pass a K2, K2-Thinking, K2.5, K2.6 or K2.7-Code checkpoint, or an Eagle3 head of one"
    raise TrtspecError(message, remedy)


def target_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Returns the record of a target from its configuration files."""
    code = bool(read_code(checkpoint.path))
    return ModelSpec.from_config(checkpoint.config, checkpoint.hf_quant_config, remote_code=code)
