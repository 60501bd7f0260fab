"""What `trtspec train` checks before it spends an hour, also with --dry-run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import TrtspecError

if TYPE_CHECKING:
    from trtspec.heads.training.options import TrainingRun, TrainOptions
    from trtspec.heads.training.plan import TrainingPlan
    from trtspec.specs import HeadSpec


def check_run(run: TrainingRun, plan: TrainingPlan, options: TrainOptions) -> dict[str, Any]:
    """Whether the head to start from fits, the figure of the best head can be had, and the run that the output holds
    goes on with these options; raises otherwise. Returns what --dry-run says about it."""
    import psutil

    from trtspec.heads.training.batches import split_data
    from trtspec.heads.training.estimate import best_by
    from trtspec.heads.training.state import check_saved, run_fingerprint, saved_run

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
