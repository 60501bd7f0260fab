"""Options of several commands whose choices come from data, and what several commands make of an option's text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec.data_files import gpu_names, policy_names
from trtspec.errors import UsageError

if TYPE_CHECKING:
    from trtspec.bench.adapters import DetectedServer
    from trtspec.bench.findings import RequestLimits
    from trtspec.quant.policy import Policy

    Gpu = str
else:
    Gpu = Literal[tuple(gpu_names())]  # a row in gpus.yaml is a choice here

CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")  # Slurm's [days-]hours:minutes:seconds
PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
SECONDS = (86400, 3600, 60, 1)
SourceArgument = Annotated[str, typer.Argument(metavar="SRC", help="Kimi checkpoint: a directory or a hub id.")]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        help=f"What to quantize and how: {', '.join(policy_names())} or a YAML file.",
        show_default="the published policy of the model family",
    ),
]
ThinkingOption = Annotated[
    str | None,
    typer.Option(
        metavar="on|off|MODE",
        help="Thinking of the chat template, or a reasoning_effort such as medium.",
        show_default="the server's",
    ),
]


def numbers(text: str, option: str) -> list[int]:
    """`1,4,16` as typed, each number once. Raises UsageError for what is no number or below 1."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"{option} {text} is not a list of whole numbers above 0", f"write {option} 1,4,16")
    return list(dict.fromkeys(found))


def json_object(text: str, option: str) -> dict[str, Any]:
    """Raises UsageError for what is not JSON, or not an object."""
    remedy = f"""write {option} '{{"top_k": 20}}'"""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is not JSON: {error}", remedy) from None
    if not isinstance(found, dict):
        raise UsageError(f"{option} is not a JSON object", remedy)
    return found


def source_directory(source: str) -> Path:
    """Of a checkpoint whose tensors are to be read. Raises UsageError where only its name is known."""
    from trtspec.checkpoint.hub import resolve

    path = resolve(source).path
    if path is None:
        raise UsageError(f"{source} is not on this machine", f"run `hf download {source}` and pass its directory")
    return path


def policy_of(name: str | None, source: str, path: Path) -> Policy:
    """The policy that was asked for, else the published one of the source's family."""
    from trtspec.quant.policy import default_policy, load_policy

    return load_policy(name) if name else default_policy(source, str(path.resolve()))


def request_limits_of(server: DetectedServer) -> RequestLimits:
    """What the release of a server does with request parameters under speculation; nothing where it is not known."""
    from trtspec.trtllm.deployment import Deployment
    from trtspec.trtllm.lint.speculation import request_limits
    from trtspec.trtllm.schema import schema_for

    if not server.row.dated or server.version is None:
        return {}
    try:
        return request_limits(Deployment(schema_for(server.version)))
    except UsageError:  # a version that is none
        return {}


def seconds_of(text: str) -> float:
    """Of `90m`, `1h30m`, `3600`, `2d` or Slurm's `1-12:00:00`; UsageError for anything else."""
    found = CLOCK.fullmatch(text.strip()) or PARTS.fullmatch(text.strip().lower())
    total = sum(float(part or 0) * unit for part, unit in zip(found.groups(), SECONDS, strict=True)) if found else 0.0
    if total <= 0:
        raise UsageError(f"--max-time {text!r} is no time", "for example 90m, 3h30m, 7200 or 1-12:00:00")
    return total
