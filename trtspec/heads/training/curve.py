"""What a run leaves in its output directory and where, and its course: training.jsonl, which another run of the same
command repeats byte for byte.

Torch-free, so that a command can look before it loads anything.
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
from trtspec.report import OutputOptions, refuse_overwrite

WORK_NAME = PlainName(".trtspec")  # the state of a run, and states of a streamed target
BEST = PlainName("best")
CURVE_NAME = PlainName("training.jsonl")


def is_finished(output: Path) -> bool:
    """Whether `output` holds a finished head, or one that no unfinished run wrote."""
    if not (output / "config.json").is_file():
        return False
    if not (
        output / "provenance.json"
    ).is_file():  # removed before an unfinished run's head is written again
        return not (output / WORK_NAME).is_dir()
    return bool(read_object(output / "provenance.json").get("training", {}).get("finished", True))


def run_directory(output: Path, size: int = 0) -> OutputDirectory:
    """What a run writes into `output`, `size` bytes at the most."""
    names = frozenset((CURVE_NAME, *HEAD_FILES))
    folders = frozenset((WORK_NAME, BEST))
    return OutputDirectory(output, "train", names, size, folders=folders)


def run_options(output: Path, again: OutputOptions) -> OutputOptions:
    """With `restart` set where a finished run is to start over, which `force` asks for: else it can be extended.

    Raises UsageError for `restart` alone.
    """
    if not is_finished(output):
        return again
    if again.restart:
        refuse_overwrite(output, again.force)
    return replace(again, restart=again.force)


@dataclass
class CurvePoint:
    """One step of the curve; `accuracy` is the top-1 agreement with the target per training-time-test step."""

    step: int
    total: int
    loss: float
    accuracy: list[float]
    lr: float
    grad_norm: float  # before clipping
    tokens: int = 0  # of this step's batches
    seconds: float = 0.0
    tokens_per_second: float = 0.0  # of this process's life
    held_out: dict[str, Any] | None = None  # the evaluation after this step, when one is due

    def rows(self) -> list[dict[str, Any]]:
        """As training.jsonl has them: nothing that depends on the machine."""
        names = ("step", "loss", "accuracy", "tokens", "lr", "grad_norm")
        found = [{name: getattr(self, name) for name in names}]
        return found + ([{"step": self.step, "held_out": self.held_out}] if self.held_out else [])


class Curve:
    """The file of the curve. `position` is what the saved state counts as written of it.

    Opening drops what was written after the state from which the run resumes.
    """

    def __init__(self, path: Path, position: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._file.truncate(min(position, self.position))

    @property
    def position(self) -> int:
        return self._file.seek(0, os.SEEK_END)

    def add(self, point: CurvePoint) -> None:
        self._file.write(b"".join(json.dumps(row).encode() + b"\n" for row in point.rows()))
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.is_file()
        else []
    )


def summary(curve: Path) -> dict[str, Any]:
    """Averages over the last twentieth of the curve, the tokens of all of it, and its held-out points."""
    rows = rows_of(curve)
    steps = [row for row in rows if "loss" in row]
    held = [{"step": row["step"], **row["held_out"]} for row in rows if "held_out" in row]
    last = steps[-max(1, len(steps) // 20) :]
    found = {
        "tokens_seen": sum(row["tokens"] for row in steps),
        "loss": sum(row["loss"] for row in last) / len(last),
        "accuracy": [
            sum(values) / len(last)
            for values in zip(*(row["accuracy"] for row in last), strict=True)
        ],
    }
    if held:
        found |= {
            "held_out_loss": held[-1]["loss"],
            "held_out_accuracy": held[-1]["accuracy"],
            "curve": held,
        }
        if "acceptance_length" in held[-1]:
            found["estimated_acceptance_length"] = held[-1]["acceptance_length"]
    return found
