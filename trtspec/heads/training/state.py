"""A training run on disk: weights, moments and step in one file that appears whole, a loss curve beside it, and
the head that it ends in, with its provenance and model card."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trtspec.checkpoint.heads.config import head_config
from trtspec.checkpoint.writer import write_shard
from trtspec.errors import UsageError
from trtspec.heads.card import model_card
from trtspec.heads.training.processes import like
from trtspec.report import write_atomic, write_json
from trtspec.specs import HeadSpec, ModelSpec

STATE_NAME = "state.safetensors"
RESTART = "pass --restart to start over, or repeat the command as it was"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class CurvePoint:
    """One step of the curve; `accuracy` is the top-1 agreement with the target per training-time-test step."""

    step: int
    total: int
    loss: float
    accuracy: list[float]
    tokens_per_second: float
    held_out: dict[str, Any] | None = None  # the evaluation after this step, when one is due


@dataclass(frozen=True)
class KeptState:
    """Where a run is kept while it goes on, how often, and what a run that goes on must have been begun with."""

    work: Path
    curve: Path
    fingerprint: dict[str, Any]
    save_every: int = 100


class Curve:
    """training.jsonl: one line per step. `position` is what the saved state counts as written.

    Opening it drops what was written after the state from which the run goes on.
    """

    def __init__(self, path: Path, position: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._file.truncate(position)

    @property
    def position(self) -> int:
        return self._file.seek(0, os.SEEK_END)

    def add(self, point: CurvePoint, tokens: int) -> None:
        """`tokens` are those of this step's batch."""
        self._write({"step": point.step, "loss": point.loss, "accuracy": point.accuracy, "tokens": tokens})
        if point.held_out:
            self._write({"step": point.step, "held_out": point.held_out})

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def state_tensors(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by the names they have on disk; this process's shards of them where they are sharded."""
    tensors = {f"head.{name}": value.detach() for name, value in parameters.items()}
    for name, value in parameters.items():
        tensors |= {f"{moment}.{name}": optimizer.state[value][moment] for moment in MOMENTS if optimizer.state[value]}
    return tensors


def save_state(
    directory: Path, tensors: dict[str, Tensor], step: int, position: int, fingerprint: dict[str, Any]
) -> None:
    """Writes state.safetensors atomically; a kill leaves the previous state. `tensors`: whole `state_tensors`."""
    record = {"step": step, "position": position, "fingerprint": fingerprint}
    directory.mkdir(parents=True, exist_ok=True)
    write_shard(directory / STATE_NAME, tensors, {"run": json.dumps(record)})


def load_state(
    directory: Path,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    fingerprint: dict[str, Any],
) -> tuple[int, int]:
    """Puts a saved run back, whatever number of processes it had; returns (step, curve position), (0, 0) when there
    is none.

    Raises UsageError naming what changed when the run was begun with other options, data or target.
    """
    path = directory / STATE_NAME
    if not path.is_file():
        return 0, 0
    with safe_open(path, "pt") as state:
        record = json.loads((state.metadata() or {})["run"])
        _compare(record["fingerprint"], fingerprint, directory)
        with torch.no_grad():
            for name, value in parameters.items():
                value.copy_(like(state.get_tensor(f"head.{name}"), value))
                optimizer.state[value] = {
                    "step": torch.tensor(float(record["step"]), device=value.device),
                    **{moment: like(state.get_tensor(f"{moment}.{name}"), value) for moment in MOMENTS},
                }
    return record["step"], record["position"]


def _compare(old: dict[str, Any], new: dict[str, Any], directory: Path) -> None:
    new = json.loads(json.dumps(new))
    changed = [
        f"{key} was {old.get(key)}, now {new.get(key)}" for key in sorted(old | new) if old.get(key) != new.get(key)
    ]
    if changed:
        raise UsageError(f"the run in {directory} was begun with something else: {'; '.join(changed)}", RESTART)


def write_head(output: Path, tensors: dict[str, torch.Tensor], spec: HeadSpec, target: ModelSpec) -> None:
    """The checkpoint itself; config.json comes last, so a directory that has one holds a whole head."""
    output.mkdir(parents=True, exist_ok=True)
    write_shard(output / "model.safetensors", tensors, {"format": "pt"})
    write_json(output / "config.json", head_config(spec, target))


def write_record(output: Path, spec: HeadSpec, provenance: dict[str, Any]) -> None:
    """provenance.json and README.md beside the checkpoint; rewritten when a measurement is added."""
    write_json(output / "provenance.json", provenance)
    write_atomic(output / "README.md", model_card(spec, provenance))
