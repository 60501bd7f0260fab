"""The heads that a run writes: at its end, on the way, and the best so far, each whole, with its record and card."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtspec.checkpoint.heads.config import head_config
from trtspec.checkpoint.writer import write_shard
from trtspec.files import read_object
from trtspec.heads.card import model_card
from trtspec.heads.data.samples import coverage
from trtspec.heads.training.batches import TrainingData
from trtspec.heads.training.curve import BEST, CHECKPOINT, CurvePoint, checkpoints, summary
from trtspec.heads.training.module import TrainingModule, head_tensors
from trtspec.heads.training.options import TrainingRun, TrainOptions
from trtspec.heads.training.plan import TrainingPlan
from trtspec.heads.training.processes import World
from trtspec.report import fsync_directory, provenance, write_atomic, write_json
from trtspec.specs import HeadSpec, ModelSpec


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
    module: TrainingModule
    world: World
    source: dict[str, Any]  # digests of what the run started from, as provenance.json names them

    def write(self, place: Path, about: dict[str, Any]) -> dict[str, Any]:
        """The head into `place`, its record last; `about`: what the record says of the run so far. Returns the record,
        empty in all processes but the main one."""
        tensors = head_tensors(self.module, whole=self.world.whole)
        if not self.world.main:
            return {}
        plan, options, samples = self.plan, self.options, self.plan.samples
        training = summary(self.run.curve) | {
            "samples": sum(times > 0 for times in self.data.order.passes),
            "held_out": len(self.data.held),
            "peak_lr": options.peak_lr(plan.spec.hidden_size),
            "processes": self.world.size,
            "sharded": self.world.sharded,
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
