"""The state of a run on disk, and the fingerprint that a resumed run must repeat.

The state is one file with weights, moments and step. A kill while the file is written leaves the
previous file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

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
LENGTH_OPTIONS = ("epochs", "steps")  # options that may grow when a run is resumed
MOMENTS = ("exp_avg", "exp_avg_sq")  # names of AdamW's moments in torch


class Fingerprint(TypedDict):
    """Options and digests of data, target and initial head, which a resumed run must repeat."""

    options: dict[str, Any]
    data: str
    target: str
    target_id: dict[str, str]
    init: str | None


@dataclass(frozen=True)
class SavedRun:
    """Facts about a run that its state file holds.

    Args:
        step: number of optimizer steps that are done.
        total: number of optimizer steps of the whole run.
        position: length of training.jsonl at this step, in bytes.
        fingerprint: options and digests of the inputs, which a resumed run must repeat.
    """

    step: int
    total: int
    position: int
    fingerprint: Fingerprint


def saved_run(work: Path) -> SavedRun | None:
    """Reads the facts about a run from its state file in `work`. None if no state was saved yet.

    Raises UsageError if another version of trtspec wrote the file.
    """
    path = work / STATE_NAME
    if not path.is_file():
        return None
    with safe_open(path, "pt") as state:
        metadata = state.metadata() or {}
    record = json.loads(metadata.get("run", "{}"))
    try:
        return SavedRun(record["step"], record["total"], record["position"], record["fingerprint"])
    except KeyError:
        message = f"{path} is the state of another version of trtspec"
        raise UsageError(message, "pass `restart` to start over") from None


def check_saved(saved: SavedRun, fingerprint: Fingerprint, total: int, output: Path) -> None:
    """Raises UsageError if a run of `total` steps cannot resume from `saved`.

    A run cannot resume if options or inputs have changed, which the error names. A finished run
    resumes only with a larger `total`. No run resumes if it has had more than `total` steps.
    """
    finished = is_finished(output)
    option = "`force`" if finished else "`restart`"
    remedy = f"repeat the command as it was, or pass {option} to start over"
    refuse_changed(output, saved.fingerprint, fingerprint, remedy)
    if total == saved.step and finished:
        message = f"the run in {output} is finished: it has had all {total} steps"
        remedy = "extend it with more `epochs` or `steps`, or pass `force` to start over"
        raise UsageError(message, remedy)
    if total < saved.step:
        message = f"the run in {output} has had {saved.step} steps, and {total} were asked for"
        remedy = "ask for more with `steps` or `epochs`, or pass `force` to start over"
        raise UsageError(message, remedy)


def save_state(
    run: TrainingRun,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    saved: SavedRun,
) -> None:
    """Writes the weights, AdamW's moments and the facts about the run into state.safetensors.

    A kill while the file is written leaves the previous state.
    """
    tensors = {f"head.{name}": value.detach() for name, value in parameters.items()}
    for name, value in parameters.items():
        state = optimizer.state[value]
        # AdamW has no moments of a parameter that never had a gradient.
        if state:
            for moment in MOMENTS:
                tensors[f"{moment}.{name}"] = state[moment]
    write_shard(run.work / STATE_NAME, tensors, {"run": json.dumps(asdict(saved))})


def load_state(
    run: TrainingRun,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    fingerprint: Fingerprint,
    total: int,
) -> SavedRun:
    """Loads the saved state into the parameters and the optimizer.

    A group of another number of processes may have saved the state. Returns the facts about the
    saved run, with step 0 if no state was saved. Raises UsageError if this run cannot resume from
    the state (see `check_saved`).
    """
    saved = saved_run(run.work)
    if saved is None:
        return SavedRun(0, total, 0, fingerprint)
    check_saved(saved, fingerprint, total, run.output)
    with safe_open(run.work / STATE_NAME, "pt") as state, torch.no_grad():
        for name, value in parameters.items():
            value.copy_(state.get_tensor(f"head.{name}"))
            loaded = {"step": torch.tensor(float(saved.step), device=value.device)}
            for moment in MOMENTS:
                loaded[moment] = state.get_tensor(f"{moment}.{name}").to(value.device)
            optimizer.state[value] = loaded
    return saved


def run_fingerprint(run: TrainingRun, samples: list[Sample], options: TrainOptions) -> Fingerprint:
    """Collects what a resumed run must repeat: options except LENGTH_OPTIONS, and input digests."""
    options_record = asdict(options)
    for name in LENGTH_OPTIONS:
        del options_record[name]
    texts = [(sample.id, sample.tokens) for sample in samples]
    return {
        "options": options_record,
        "data": hashlib.sha256(repr(texts).encode()).hexdigest(),
        "target": identity_digest(run.target_dir),
        "target_id": commit_record(run.target_dir),
        "init": file_sha256(run.init / "model.safetensors") if run.init else None,
    }
