"""The files that a run leaves in its output directory, and its curve, training.jsonl.

Another run of the same command repeats the curve byte for byte. This file does not import torch, so
that a command can check the output before it loads anything.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtspec.checkpoint.output import HEAD_FILES, OutputDirectory
from trtspec.files import read_object
from trtspec.foreign import PlainName
from trtspec.heads.training.training_record import (
    CurveRow,
    CurveSummary,
    Evaluation,
    EvaluationAtStep,
)
from trtspec.report import OutputOptions, refuse_overwrite

WORK_NAME = PlainName(".trtspec")  # the state of a run, and states of a streamed target
BEST = PlainName("best")  # the head with the lowest held-out loss
CURVE_NAME = PlainName("training.jsonl")


def is_finished(output: Path) -> bool:
    """Whether `output` holds a finished head, or one that no unfinished run wrote."""
    if not (output / "config.json").is_file():
        return False
    path = output / "provenance.json"
    if not path.is_file():
        # A resumed run removes it before it writes its head again.
        return not (output / WORK_NAME).is_dir()
    training = read_object(path).get("training", {})
    return bool(training.get("finished", True))


def run_directory(output: Path, size: int = 0) -> OutputDirectory:
    """The files and folders that a run writes into `output`, at most `size` bytes."""
    names = frozenset((CURVE_NAME, *HEAD_FILES))
    folders = frozenset((WORK_NAME, BEST))
    return OutputDirectory(output, "train", names, size, folders=folders)


def run_options(output: Path, output_options: OutputOptions) -> OutputOptions:
    """The options for a run into `output`: a finished run restarts only with `force`.

    Without `force` it can be extended. Raises UsageError for `restart` alone.
    """
    if not is_finished(output):
        return output_options
    force = output_options.force
    if output_options.restart:
        refuse_overwrite(output, force)
    return replace(output_options, restart=force)


@dataclass
class CurvePoint:
    """One step of the curve.

    Args:
        accuracy: top-1 agreement with the target, by training-time-test step.
        grad_norm: norm of the gradient before clipping.
        tokens: tokens of this step's batches.
        tokens_per_second: mean since this process started.
        held_out: the evaluation after this step. None if none was due.
    """

    step: int
    total: int
    loss: float
    accuracy: list[float]
    lr: float
    grad_norm: float
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    held_out: Evaluation | None = None

    def rows(self) -> list[dict[str, Any]]:
        """The rows of training.jsonl. They hold nothing that depends on the machine."""
        names = ("step", "loss", "accuracy", "tokens", "lr", "grad_norm")
        rows = [{name: getattr(self, name) for name in names}]
        if self.held_out:
            rows.append({"step": self.step, "held_out": self.held_out})
        return rows


class Curve:
    """The file of the curve. `position`: its length in the saved state, in bytes.

    Opening drops the rows after the saved state from which the run resumes.
    """

    def __init__(self, path: Path, position: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._file.truncate(min(position, self.position))

    @property
    def position(self) -> int:
        return self._file.seek(0, os.SEEK_END)

    def add(self, point: CurvePoint) -> None:
        lines = [json.dumps(row).encode() + b"\n" for row in point.rows()]
        self._file.write(b"".join(lines))
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def rows_of(path: Path) -> list[CurveRow]:
    """The rows of training.jsonl. [] if there is no such file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary(curve: Path) -> CurveSummary:
    """Means over the last twentieth of the curve, the tokens of all steps, and held-out points."""
    rows = rows_of(curve)
    steps = [row for row in rows if "loss" in row]
    held_out: list[EvaluationAtStep] = [
        {"step": row["step"], **row["held_out"]} for row in rows if "held_out" in row
    ]
    count = max(1, len(steps) // 20)
    last = steps[-count:]
    averaged = len(last)
    by_step = zip(*(row["accuracy"] for row in last), strict=True)
    result: CurveSummary = {
        "tokens_seen": sum(row["tokens"] for row in steps),
        "loss": sum(row["loss"] for row in last) / averaged,
        "accuracy": [sum(values) / averaged for values in by_step],
    }
    if held_out:
        latest = held_out[-1]
        result |= {
            "held_out_loss": latest["loss"],
            "held_out_accuracy": latest["accuracy"],
            "curve": held_out,
        }
        if "acceptance_length" in latest:
            result["estimated_acceptance_length"] = latest["acceptance_length"]
    return result
