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

# Folder of the saved state of a run, and of the hidden states of a streamed target.
WORK_NAME = PlainName(".trtspec")
BEST = PlainName("best")  # folder of the head with the lowest held-out loss
CURVE_NAME = PlainName("training.jsonl")


def is_finished(output: Path) -> bool:
    """Whether `output` holds a head, and no unfinished run."""
    if not (output / "config.json").is_file():
        return False
    path = output / "provenance.json"
    if not path.is_file():
        # A resumed run removes provenance.json before it writes its head again. A head without a
        # record and without a work folder comes from elsewhere.
        return not (output / WORK_NAME).is_dir()
    training = read_object(path).get("training", {})
    return bool(training.get("finished", True))


def run_directory(output: Path, size: int = 0) -> OutputDirectory:
    """Describes the files and folders that a training run writes into `output`.

    Args:
        size: maximum number of bytes that the run writes.
    """
    names = frozenset((CURVE_NAME, *HEAD_FILES))
    folders = frozenset((WORK_NAME, BEST))
    return OutputDirectory(output, "train", names, size, folders=folders)


def run_options(output: Path, output_options: OutputOptions) -> OutputOptions:
    """Returns the output options, with `restart` set as a finished run in `output` needs it.

    A finished run starts over with `force`. Without `force` the run can only be extended. Raises
    UsageError if the run is finished and `restart` comes without `force`.
    """
    if not is_finished(output):
        return output_options
    force = output_options.force
    if output_options.restart:
        refuse_overwrite(output, force)
    return replace(output_options, restart=force)


@dataclass
class CurvePoint:
    """Figures of one optimizer step.

    Args:
        total: number of optimizer steps of the whole run.
        accuracy: fraction of positions at which the head's best token is the target's best, for
            each training-time-test step.
        grad_norm: norm of the gradient before clipping.
        tokens: number of tokens in the batches of this optimizer step.
        seconds: duration of this optimizer step.
        tokens_per_second: mean training speed since this process started.
        held_out: evaluation on held-out samples after this step. None if no evaluation was due.
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
        """Returns the lines of training.jsonl for this step: figures, and an evaluation if any.

        Times are left out, because another run of the same command must write the same bytes.
        """
        names = ("step", "loss", "accuracy", "tokens", "lr", "grad_norm")
        rows = [{name: getattr(self, name) for name in names}]
        if self.held_out:
            rows.append({"step": self.step, "held_out": self.held_out})
        return rows


class Curve:
    """The open file of the learning curve, training.jsonl.

    Opening the file drops the lines after the saved state from which the run resumes.

    Args:
        position: length of the file at the saved state, in bytes.
    """

    def __init__(self, path: Path, position: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._file.truncate(min(position, self.position))

    @property
    def position(self) -> int:
        """Length of the file in bytes."""
        return self._file.seek(0, os.SEEK_END)

    def add(self, point: CurvePoint) -> None:
        """Appends the lines of an optimizer step."""
        lines = [json.dumps(row).encode() + b"\n" for row in point.rows()]
        self._file.write(b"".join(lines))
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def rows_of(path: Path) -> list[CurveRow]:
    """Reads the lines of training.jsonl. Returns [] if the file does not exist."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary(curve: Path) -> CurveSummary:
    """Summarizes training.jsonl for the provenance record.

    Returns `tokens_seen`, and the mean `loss` and `accuracy` of the last twentieth of the optimizer
    steps. Adds the last evaluation and all of them (`curve`) if there are held-out samples.
    """
    rows = rows_of(curve)
    steps = [row for row in rows if "loss" in row]
    held_out: list[EvaluationAtStep] = [
        {"step": row["step"], **row["held_out"]} for row in rows if "held_out" in row
    ]
    # The loss of a single step is noisy.
    count = max(1, len(steps) // 20)
    last = steps[-count:]
    averaged = len(last)
    by_step = zip(*(row["accuracy"] for row in last), strict=True)  # by training-time-test step
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
