"""Targets and heads by the name that a user gives: a directory or a hub id. What is known of them, or why not."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.hub import Resolved, known, resolve
from trtspec.errors import Problem, UsageError
from trtspec.specs import HeadSpec, ModelSpec


@dataclass(frozen=True)
class Target:
    resolved: Resolved
    spec: ModelSpec


@dataclass(frozen=True)
class Head:
    resolved: Resolved
    spec: HeadSpec


def load_target(name: str, like: str | None = None) -> Target:
    """The target called `name`. With `like`, a directory that is not there yet stands for that published checkpoint,
    and one that is there must equal it. Raises UsageError when the name is a head's, or nothing that is known."""
    if like is None or Path(name).expanduser().exists():
        resolved = _target(name)
    else:
        resolved = replace(_target(like), name=name, path=None)
    found = Target(resolved, resolved.target_spec())
    if like is not None and resolved.path is not None:
        _must_equal(name, found.spec, like)
    return found


def _target(name: str) -> Resolved:
    resolved = resolve(name, allow_download=False)
    require_target(resolved)
    return resolved


def require_target(resolved: Resolved) -> None:
    """As `load_target`, of what was found already."""
    if resolved.kind != "target":
        message = f"{resolved.name} is a draft head, not a target"
        raise UsageError(message, "pass the target first and the head with --head")


def _must_equal(name: str, here: ModelSpec, like: str) -> None:
    """Raises UsageError where a checkpoint that is here differs from the one that it is said to be like."""
    there = _target(like).target_spec()
    names = [item.name for item in fields(there) if item.name != "quant"]
    differing = [name for name in names if getattr(here, name) != getattr(there, name)]
    if (here.quant.format, here.quant.kv_cache) != (there.quant.format, there.quant.kv_cache):
        differing.append("quantization")
    if differing:
        remedy = f"leave --like out: {name} is here and is read itself"
        raise UsageError(f"{name} is not like {like}: {', '.join(differing)}", remedy)


def load_head(name: str, *, values: bool = False) -> Head:
    """Raises UsageError with its code for what is no Eagle3 head: a whole model, Medusa heads and others; TrtspecError
    for a head in which an error is found, with `values` in a sample of its weights too."""
    resolved = resolve(name, allow_download=False)
    require_head(resolved)
    return Head(resolved, resolved.head_spec(values=values))


def require_head(resolved: Resolved) -> None:
    """As `load_head`, of what was found already."""
    if resolved.kind != "head":
        wrong = _no_head(resolved)
        raise UsageError(f"{resolved.name}: {wrong.message} [{wrong.code}]", wrong.remedy)


def _no_head(resolved: Resolved) -> Problem:
    """What it is instead: by its tensors where they are here, else a whole model, as its config says."""
    from trtspec.checkpoint.heads.read import no_eagle3_head

    whole = Problem(
        "TS-HEAD-FULL-MODEL", "error", "config.json", "this is a whole model, not a draft head",
        "pass the target first and an Eagle3 head with --head",
    )  # fmt: skip
    if resolved.path is None or not any(resolved.path.glob("*.safetensors")):
        return whole
    checkpoint = Checkpoint.open(resolved.path)
    return no_eagle3_head(checkpoint.config, checkpoint.tensors) or whole


def findable(name: str) -> bool:
    """Whether a name that only a file gives can be looked at here; it may lie on another machine."""
    try:
        return Path(name).is_dir() or known(name) is not None
    except OSError:  # longer than any path
        return False
