"""The state of a run on disk: weights, moments and step in one file that appears whole; and what a resumed run must
repeat."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from trtspec.checkpoint.hub import commit_record
from trtspec.checkpoint.identity import identity_digest
from trtspec.checkpoint.writer import refuse_changed, write_shard
from trtspec.errors import UsageError
from trtspec.foreign import PlainName
from trtspec.heads.training.curve import is_finished
from trtspec.heads.training.samples import Sample
from trtspec.heads.training.train_options import TrainingRun, TrainOptions
from trtspec.report import file_sha256

STATE_NAME = PlainName("state.safetensors")
LENGTH = ("epochs", "steps")  # options that may grow when a run is resumed
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class SavedRun:
    """What a state file says of its run. `position`: see `Curve`."""

    step: int
    total: int
    position: int
    fingerprint: dict[str, Any]


def saved_run(work: Path) -> SavedRun | None:
    """None where no state was saved yet, or none that this version reads."""
    path = work / STATE_NAME
    if not path.is_file():
        return None
    with safe_open(path, "pt") as state:
        record = json.loads((state.metadata() or {}).get("run", "{}"))
    try:
        return SavedRun(record["step"], record["total"], record["position"], record["fingerprint"])
    except KeyError:
        raise UsageError(
            f"{path} is the state of another version of trtspec", "pass `restart` to start over"
        ) from None


def check_saved(saved: SavedRun, fingerprint: dict[str, Any], total: int, output: Path) -> None:
    """Raises UsageError where a run of `total` steps cannot resume from `saved`: what changed, by name, or that it has
    had its steps."""
    finished = is_finished(output)
    remedy = f"repeat the command as it was, or pass {'`force`' if finished else '`restart`'} to start over"
    refuse_changed(output, saved.fingerprint, fingerprint, remedy)
    if total == saved.step and finished:
        raise UsageError(
            f"the run in {output} is finished: it has had all {total} steps",
            "extend it with more `epochs` or `steps`, or pass `force` to start over",
        )
    if total < saved.step:
        raise UsageError(
            f"the run in {output} has had {saved.step} steps, and {total} were asked for",
            "ask for more with `steps` or `epochs`, or pass `force` to start over",
        )


def save_state(
    run: TrainingRun,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    saved: SavedRun,
) -> None:
    """Writes weights and moments into state.safetensors, atomically: a kill leaves the previous state."""
    tensors = {f"head.{name}": value.detach() for name, value in parameters.items()}
    for name, value in parameters.items():
        tensors |= {
            f"{moment}.{name}": optimizer.state[value][moment]
            for moment in MOMENTS
            if optimizer.state[value]
        }
    write_shard(run.work / STATE_NAME, tensors, {"run": json.dumps(asdict(saved))})


def load_state(
    run: TrainingRun,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    fingerprint: dict[str, Any],
    total: int,
) -> SavedRun:
    """Puts a saved run back, whatever number of processes it had; one at step 0 when there is none.

    Raises UsageError as `check_saved`.
    """
    saved = saved_run(run.work)
    if saved is None:
        return SavedRun(0, total, 0, fingerprint)
    check_saved(saved, fingerprint, total, run.output)
    with safe_open(run.work / STATE_NAME, "pt") as state, torch.no_grad():
        for name, value in parameters.items():
            value.copy_(state.get_tensor(f"head.{name}"))
            optimizer.state[value] = {
                "step": torch.tensor(float(saved.step), device=value.device),
                **{
                    moment: state.get_tensor(f"{moment}.{name}").to(value.device)
                    for moment in MOMENTS
                },
            }
    return saved


def run_fingerprint(
    run: TrainingRun, samples: list[Sample], options: TrainOptions
) -> dict[str, Any]:
    """What a resumed run must repeat: the options that decide the curve, but not its length; digests of what it
    starts from."""
    return {
        "options": {key: value for key, value in asdict(options).items() if key not in LENGTH},
        "data": hashlib.sha256(
            repr([(sample.id, sample.tokens) for sample in samples]).encode()
        ).hexdigest(),
        "target": identity_digest(run.target_dir),
        "target_id": commit_record(run.target_dir),
        "init": file_sha256(run.init / "model.safetensors") if run.init else None,
    }
