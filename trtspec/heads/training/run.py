"""One training run from data to a written head: what `trtspec train` does, without its command line. It leaves heads at
its end, on the way, and the best so far, each whole, with its record and card."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.config import head_config
from trtspec.checkpoint.heads.read import head_spec
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.checkpoint.writer import write_shard
from trtspec.files import read_object
from trtspec.heads.card import model_card
from trtspec.heads.training import module as train
from trtspec.heads.training.curve import BEST, CHECKPOINT, CurvePoint, checkpoints, summary
from trtspec.heads.training.loop import RunControls, train_head
from trtspec.heads.training.options import TrainingRun, TrainOptions, check_trackers
from trtspec.heads.training.plan import (
    STATE_NAME,
    KeptState,
    TrainingPlan,
    best_by,
    check_saved,
    run_fingerprint,
    saved_run,
)
from trtspec.heads.training.processes import ALONE, Stop, World, require_shared
from trtspec.heads.training.samples import TrainingData, coverage, draft_vocabulary
from trtspec.heads.training.sources import open_states
from trtspec.report import fsync_directory, provenance, write_atomic, write_json
from trtspec.specs import HeadSpec, ModelSpec

if TYPE_CHECKING:
    from trtspec.models.kimi import KimiModel

PROJECT = "trtspec-train"


def run_training(
    run: TrainingRun,
    model: KimiModel,
    plan: TrainingPlan,
    options: TrainOptions,
    *,
    on_step: Callable[[CurvePoint], None] = lambda _: None,
    world: World = ALONE,
) -> dict[str, Any]:
    """Trains and writes the head to the run's output; returns its provenance record, `held_out` (sample ids) included.

    An interrupted run continues from its last saved state when called again with the same arguments, and a finished one
    with more epochs or steps. A run that was asked to stop, or whose time is up, writes the head as it is then; its
    record says so (`training.finished`). In a group of processes all train and the main one writes. With streamed or
    served states the model may lack its decoder layers.
    """
    require_shared(run.work, world, "resumes from the state that the main one saved there")
    options = options.for_device(run.device)
    data = plan.ordered(options)
    fingerprint = run_fingerprint(run, plan.samples, data, options)
    if saved := saved_run(run.work):
        check_saved(saved, fingerprint, data.order.total, run.output)
    module = _fresh_module(plan, model, options)
    if run.init is not None:
        train.load_head_tensors(module, initial_tensors(run.init))
    writer = HeadWriter(run, plan, data, options, model.spec, module, world, _renamed(fingerprint))
    exports = Exports(run.output, run.exports, run.keep, best_by(run.best_by, plan.samples, data.held), writer)
    kept = KeptState(run.work, run.curve, fingerprint, run.save_every)
    with (
        closing(open_states(run, model, plan, options, world)) as features,
        tracked(run, options, world) as log,
        Stop(run.deadline) as stop,
    ):

        def shown(point: CurvePoint) -> None:
            log(point)
            on_step(point)

        controls = RunControls(shown, stop, exports.after, run.activation_checkpointing)
        result = train_head(module, features, options, kept, data=data, controls=controls, world=world)
        record = writer.write(run.output, result.to_dict())
    if world.main and result.finished:
        _tidy(run)
    return record


def _fresh_module(plan: TrainingPlan, model: KimiModel, options: TrainOptions) -> train.TrainingModule:
    """ModelOpt's module with the head's initial weights, which depend on the seed alone."""
    torch.manual_seed(options.seed)
    device, ids = model.embed.weight.device, _draft_ids(plan, options, model.spec)
    return train.build(
        plan.spec,
        model.spec,
        model.embed.weight.to(device, options.dtype),
        model.lm_head.weight.to(device, options.dtype),
        target_ids=None if ids is None else torch.tensor(ids, device=device),
    )


def _draft_ids(plan: TrainingPlan, options: TrainOptions, target: ModelSpec) -> list[int] | None:
    if not plan.spec.has_d2t:
        return None
    return draft_vocabulary(plan.samples, plan.spec.draft_vocab_size, target.vocab_size)


def initial_tensors(head: Path) -> dict[str, torch.Tensor]:
    """Tensors of an existing head in ModelOpt's names, whichever of the two namings it has.

    Raises TrtspecError for a head in which `trtspec inspect` finds an error.
    """
    checkpoint = Checkpoint.open(head)
    head_spec(checkpoint, values=True)
    stored = LazyTensors(checkpoint)
    drop = ("embed_tokens.weight", "t2d")
    named = {name.replace("midlayer.", "layers.0."): stored[name] for name in stored.names() if name not in drop}
    return {name: value.float() if value.is_floating_point() else value for name, value in named.items()}


def _tidy(run: TrainingRun) -> None:
    """What only an unfinished run needs; the state stays, so that the run can be extended."""
    for path in run.work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != STATE_NAME:
            path.unlink()
    if not run.keep_state:
        shutil.rmtree(run.work)


def _renamed(source: dict[str, Any]) -> dict[str, Any]:
    """The digests under their names in provenance.json."""
    return {"target_config": source["target"], "data_sha256": source["data"], "init_sha256": source["init"]}


@contextmanager
def tracked(run: TrainingRun, options: TrainOptions, world: World) -> Iterator[Callable[[CurvePoint], None]]:
    """While the block runs, a function that logs a step to the run's trackers, which are accelerate's own; it does
    nothing where there are none, and in all processes but the main one. A tracker reads its account from its own
    environment variables or login file (WANDB_API_KEY, MLFLOW_TRACKING_URI, ...)."""
    if not (run.log_with and world.main):
        yield lambda _: None
        return
    check_trackers(run.log_with)
    from accelerate import Accelerator

    accelerator = Accelerator(
        log_with=list(run.log_with), project_dir=run.output, cpu=not run.device.startswith("cuda")
    )
    told = {key: value for key, value in options.to_dict().items() if isinstance(value, (str, int, float, bool))}
    accelerator.init_trackers(PROJECT, config=told | {"target": run.target_dir.name, "data": run.data})
    try:
        yield lambda point: accelerator.log(point.figures(), step=point.step)
    finally:
        accelerator.end_training()


def write_head(output: Path, tensors: dict[str, torch.Tensor], spec: HeadSpec, target: ModelSpec) -> None:
    """The checkpoint itself; config.json comes last, so a directory that has one holds a whole head."""
    output.mkdir(parents=True, exist_ok=True)
    write_shard(output / "model.safetensors", tensors, {"format": "pt"})
    write_json(output / "config.json", head_config(spec, target))


def write_record(output: Path, spec: HeadSpec, provenance: dict[str, Any]) -> None:
    """provenance.json and README.md beside the checkpoint; rewritten when a measurement is added."""
    write_json(output / "provenance.json", provenance)
    write_atomic(output / "README.md", model_card(spec, provenance))


@dataclass
class HeadWriter:
    """Writes the head of one run as it is now. Every process calls it, the main one writes."""

    run: TrainingRun
    plan: TrainingPlan
    data: TrainingData
    options: TrainOptions
    target: ModelSpec
    module: train.TrainingModule
    world: World
    source: dict[str, Any]  # digests of what the run started from, as provenance.json names them

    def write(self, place: Path, about: dict[str, Any]) -> dict[str, Any]:
        """The head into `place`, its record last; `about`: what the record says of the run so far. Returns the record,
        empty in all processes but the main one."""
        if not self.world.main:
            return {}
        tensors = train.head_tensors(self.module)
        plan, options, samples = self.plan, self.options, self.plan.samples
        training = summary(self.run.curve) | {
            "samples": sum(times > 0 for times in self.data.order.passes),
            "held_out": len(self.data.held),
            "peak_lr": options.peak_lr(plan.spec.hidden_size),
            "processes": self.world.size,
        }
        if plan.spec.has_d2t:
            ids = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()
            training["draft_vocabulary_coverage"] = coverage(samples, ids)
        named = {"target": self.run.target_dir.name, "data": self.run.data, "files": plan.files}
        record = provenance(
            "train", named | self.source, options.to_dict(), parameters=plan.parameters,
            training=training | about, held_out=[samples[index].id for index in self.data.held],
        )  # fmt: skip
        for name in ("provenance.json", "README.md"):  # so that a kill leaves no head with another's record
            (place / name).unlink(missing_ok=True)
        write_head(place, tensors, plan.spec, self.target)
        write_record(place, plan.spec, record)
        return record


@dataclass
class Exports:
    """The heads that a run leaves on its way: `checkpoint-<step>`, of which the newest stay, and `best`.

    A folder appears whole. `best` is the one whose held-out figure is the best so far, by `best_by`: `loss`, or
    `acceptance`, the estimated acceptance length.
    """

    output: Path
    every: int  # steps; 0: none on the way
    keep: int
    best_by: str | None
    writer: HeadWriter
    _best: dict[str, Any] | None = field(default=None, init=False)  # figures of `best`

    def due(self, point: CurvePoint, total: int) -> bool:
        return self.every > 0 and point.step % self.every == 0 and point.step < total

    def after(self, point: CurvePoint, total: int) -> None:
        """Writes what this step calls for; all processes come to the same answer."""
        if self.due(point, total):
            self._put(self.output / f"{CHECKPOINT}{point.step}", point)
            for old in checkpoints(self.output)[: -self.keep] if self.writer.world.main else ():
                shutil.rmtree(old)
        if self.best_by and point.held_out and self._improves(point):
            self._put(self.output / BEST, point)

    def _improves(self, point: CurvePoint) -> bool:
        figure, sign = ("loss", 1) if self.best_by == "loss" else ("acceptance_length", -1)
        if self._best is None and (self.output / BEST / "provenance.json").is_file():
            self._best = read_object(self.output / BEST / "provenance.json")["training"]["held_out_figures"]
        assert point.held_out is not None
        better = self._best is None or sign * point.held_out[figure] < sign * self._best.get(figure, sign * math.inf)
        self._best = point.held_out if better else self._best
        return better

    def _put(self, place: Path, point: CurvePoint) -> None:
        partial = place.with_name(f".{place.name}.partial")
        if self.writer.world.main:
            shutil.rmtree(partial, ignore_errors=True)
        about = {"steps": point.step, "total": point.total, "finished": False, "held_out_figures": point.held_out}
        self.writer.write(partial, about)
        if self.writer.world.main:
            shutil.rmtree(place, ignore_errors=True)
            partial.rename(place)
            fsync_directory(place.parent)
