"""The state of a run on disk: weights, moments and step in one file that appears whole, and what a resumed run must
repeat. `trtspec train` checks it, and the head to start from, before it spends an hour, also with --dry-run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trtspec.checkpoint.writer import write_shard
from trtspec.errors import TrtspecError, UsageError
from trtspec.heads.data.samples import Sample
from trtspec.heads.training.batches import TrainingData, split_data
from trtspec.heads.training.curve import is_finished
from trtspec.heads.training.features import target_digest
from trtspec.heads.training.options import TrainingRun, TrainOptions
from trtspec.heads.training.processes import like
from trtspec.report import file_sha256

if TYPE_CHECKING:
    from trtspec.heads.training.options import TrainingRun, TrainOptions
    from trtspec.heads.training.plan import TrainingPlan
    from trtspec.specs import HeadSpec

STATE_NAME = "state.safetensors"
LENGTH = ("epochs", "steps")  # options that may grow when a run goes on
IN_DATA = ("skip_bad_rows",)  # its effect is in the digest of the data
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class KeptState:
    """Where a run is kept while it goes on, how often, and what a run that goes on must have been begun with."""

    work: Path
    curve: Path
    fingerprint: dict[str, Any]
    save_every: int = 100


@dataclass(frozen=True)
class SavedRun:
    """What a state file says of its run. `position`: see `Curve`."""

    step: int
    total: int
    position: list[int]
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
        raise UsageError(f"{path} is the state of another version of trtspec", "pass --restart to start over") from None


def check_saved(saved: SavedRun, fingerprint: dict[str, Any], total: int, output: Path) -> None:
    """Raises UsageError where a run of `total` steps cannot go on from `saved`: what changed, by name, or that it has
    had its steps."""
    _compare(saved.fingerprint, fingerprint, output)
    if total == saved.step and is_finished(output):
        raise UsageError(
            f"the run in {output} is finished: it has had all {total} steps",
            "extend it with more --epochs or --steps, or pass --force to start over",
        )
    if total < saved.step:
        raise UsageError(
            f"the run in {output} has had {saved.step} steps, and {total} were asked for",
            "ask for more with --steps or --epochs, or pass --force to start over",
        )


def state_tensors(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by the names they have on disk; this process's shards of them where they are sharded."""
    tensors = {f"head.{name}": value.detach() for name, value in parameters.items()}
    for name, value in parameters.items():
        tensors |= {f"{moment}.{name}": optimizer.state[value][moment] for moment in MOMENTS if optimizer.state[value]}
    return tensors


def save_state(directory: Path, tensors: dict[str, Tensor], run: SavedRun) -> None:
    """Writes state.safetensors atomically; a kill leaves the previous state. `tensors`: whole `state_tensors`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_shard(directory / STATE_NAME, tensors, {"run": json.dumps(asdict(run))})


def load_state(
    directory: Path,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    fingerprint: dict[str, Any],
    total: int,
) -> SavedRun:
    """Puts a saved run back, whatever number of processes it had; one at step 0 when there is none.

    Raises UsageError as `check_saved`.
    """
    saved = saved_run(directory)
    if saved is None:
        return SavedRun(0, total, [0, 0], fingerprint)
    check_saved(saved, fingerprint, total, directory.parent)
    with safe_open(directory / STATE_NAME, "pt") as state, torch.no_grad():
        for name, value in parameters.items():
            value.copy_(like(state.get_tensor(f"head.{name}"), value))
            optimizer.state[value] = {
                "step": torch.tensor(float(saved.step), device=value.device),
                **{moment: like(state.get_tensor(f"{moment}.{name}"), value) for moment in MOMENTS},
            }
    return saved


def _compare(old: dict[str, Any], new: dict[str, Any], output: Path) -> None:
    """Names every option and every source that is not what it was."""
    before, now = _flat(old), _flat(json.loads(json.dumps(new)))
    changed = [
        f"{key} was {before.get(key)}, now {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        remedy = (
            f"repeat the command as it was, or pass {'--force' if is_finished(output) else '--restart'} to start over"
        )
        raise UsageError(f"the run in {output} was begun with something else: {'; '.join(changed)}", remedy)


def _flat(fingerprint: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in fingerprint.items() if key != "options"}
    return {key.replace("_", "-"): value for key, value in (rest | fingerprint.get("options", {})).items()}


def run_fingerprint(
    run: TrainingRun, samples: list[Sample], data: TrainingData, options: TrainOptions
) -> dict[str, Any]:
    """What a run that goes on must repeat: the options that decide the curve, but not its length; digests of what it
    starts from."""
    return {
        "options": {key: value for key, value in options.to_dict().items() if key not in (*LENGTH, *IN_DATA)},
        "data": _data_digest(samples, data),
        "target": target_digest(run.target_dir),
        "init": file_sha256(run.init / "model.safetensors") if run.init else None,
    }


def _data_digest(samples: list[Sample], data: TrainingData) -> str:
    digest = hashlib.sha256()
    for sample, passes in zip(samples, data.order.passes, strict=True):
        digest.update(repr((sample.id, sample.tokens, passes)).encode())
    return digest.hexdigest()


def check_run(run: TrainingRun, plan: TrainingPlan, options: TrainOptions) -> dict[str, Any]:
    """Whether the head to start from fits, the figure of the best head can be had, and the run that the output holds
    goes on with these options; raises otherwise. Returns what --dry-run says about it."""
    import psutil

    data = (plan.data or split_data(plan.samples, options)).of(options)
    if run.init is not None:
        check_initial(run.init, plan.spec)
    best = best_by(run.best_by, plan.samples, data.held)
    saved = saved_run(run.work)
    if saved is not None:
        check_saved(saved, run_fingerprint(run, plan.samples, data, options), data.order.total, run.output)
    free = psutil.virtual_memory().available
    return {"best_head_by": best, "steps_done": saved.step if saved else 0, "free_memory_bytes": free}


def check_initial(head: Path, spec: HeadSpec) -> None:
    """Whether a head to start from has the tensors of one like `spec`, by its header. Raises TrtspecError for one in
    which `trtspec inspect` finds an error, or which does not fit, naming every tensor."""
    from trtspec.checkpoint.headers import Checkpoint
    from trtspec.checkpoint.heads.read import head_spec
    from trtspec.checkpoint.heads.shapes import canonical_names, expected_shapes

    checkpoint = Checkpoint.open(head)
    head_spec(checkpoint, values=True)
    unused = {"embed_tokens.weight", "t2d", "input_norm.weight"} | (set() if spec.has_d2t else {"d2t"})
    wanted = {
        name: shape for name, shape in expected_shapes(spec).items()
        if name not in unused and (spec.fc_norm or not name.startswith("fc_norm."))
    }  # fmt: skip
    stored = {name: tuple(info.shape) for name, info in canonical_names(checkpoint.tensors).items()}
    stored = {name: shape for name, shape in stored.items() if name not in ("embed_tokens.weight", "t2d")}
    wrong = [f"{name} missing" for name in wanted.keys() - stored.keys()]
    wrong += [f"{name} has no place in it" for name in stored.keys() - wanted.keys()]
    wrong += [
        f"{name} is {stored[name]}, the head wants {wanted[name]}"
        for name in wanted.keys() & stored.keys()
        if stored[name] != wanted[name]
    ]
    if wrong:
        raise TrtspecError(
            f"{head} does not fit the head to train: {'; '.join(sorted(wrong))}",
            "train with the same --attention, --eagle and --draft-vocab-size as the initial head",
        )


def best_by(asked: str, samples: Sequence[Sample], held: Sequence[int]) -> str | None:
    """By which figure the best head is kept, None for no such head or where nothing is held out. UsageError where the
    figure that was asked for cannot be had."""
    if asked == "acceptance" and not any(any(samples[index].answer) for index in held):
        raise UsageError(
            "--best-by acceptance needs held-out conversations with answers of the target, and there are none",
            "pass --eval-data or --held-out, or --best-by loss",
        )
    return asked if held and asked != "none" else None
