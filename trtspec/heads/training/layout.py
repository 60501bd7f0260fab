"""Where a run keeps what, in its output directory. Torch-free, so that a command can look before it loads anything."""

from __future__ import annotations

import shutil
from pathlib import Path

from trtspec.files import read_object

WORK_NAME = ".trtspec"  # the state of a run, and states of a streamed target
CHECKPOINT, BEST = "checkpoint-", "best"  # folders of exported heads
CURVE_NAME, SPEED_NAME, PLOT_NAME = "training.jsonl", "speed.jsonl", "training.svg"
HEAD_FILES = ("config.json", "model.safetensors", "provenance.json", "README.md")


def checkpoints(output: Path) -> list[Path]:
    """The heads exported on the way, oldest first."""
    found = [path for path in output.glob(f"{CHECKPOINT}*") if path.name.removeprefix(CHECKPOINT).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(CHECKPOINT)))


def is_finished(output: Path) -> bool:
    """Whether a head stands here that had all its steps, or that something else than an unfinished run put here."""
    if not (output / "config.json").is_file():
        return False
    if not (output / "provenance.json").is_file():  # removed before an unfinished run's head is written anew
        return not (output / WORK_NAME).is_dir()
    return bool(read_object(output / "provenance.json").get("training", {}).get("finished", True))


def foreign(output: Path) -> list[Path]:
    """What no run of `trtspec train` left here."""
    ours = {WORK_NAME, BEST, CURVE_NAME, SPEED_NAME, PLOT_NAME, *HEAD_FILES, *(p.name for p in checkpoints(output))}
    return [path for path in output.iterdir() if path.name not in ours] if output.is_dir() else []


def remove_run(output: Path) -> None:
    """Removes what a run left in `output`; what others put there stays."""
    for folder in (output / WORK_NAME, output / BEST, *checkpoints(output), *output.glob(".*.partial")):
        if folder.is_dir():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
    for name in (*HEAD_FILES, CURVE_NAME, SPEED_NAME, PLOT_NAME):
        (output / name).unlink(missing_ok=True)
