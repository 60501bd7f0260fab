"""One training run from data to a written head: what `trtspec train` does, without its command line. It leaves heads at
its end, on the way, and the best so far, each whole, with its record and card."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.dialects import head_config
from trtspec.checkpoint.heads.pairing import target_record
from trtspec.checkpoint.hub import source_name
from trtspec.checkpoint.output import CARD_NAME, CONFIG_NAME, PROVENANCE_NAME, SINGLE_SHARD
from trtspec.checkpoint.writer import write_shard
from trtspec.errors import signals_handled
from trtspec.files import read_object
from trtspec.foreign import PlainName
from trtspec.heads.card import model_card
from trtspec.heads.training import module as train
from trtspec.heads.training.curve import (
    BEST,
    CurvePoint,
    run_directory,
    run_options,
    summary,
)
from trtspec.heads.training.loop import peak_learning_rate, train_head
from trtspec.heads.training.ranks import SINGLE_PROCESS, Stop, Ranks, require_shared
from trtspec.heads.training.samples import coverage, draft_vocabulary, split_data
from trtspec.heads.training.saved import STATE_NAME, run_fingerprint
from trtspec.heads.training.sources import open_states
from trtspec.heads.training.train_options import TrainingRun, TrainOptions
from trtspec.heads.training.training_plan import TrainingPlan, check_initial, initial_tensors
from trtspec.report import (
    fsync,
    provenance,
    remove_file,
    remove_folder,
    write_atomic,
    write_json,
    writing,
)
from trtspec.specs import HeadSpec, ModelSpec

if TYPE_CHECKING:
    from trtspec.models.k2 import KimiModel


def run_training(
    run: TrainingRun,
    model: KimiModel,
    plan: TrainingPlan,
    options: TrainOptions,
    *,
    on_step: Callable[[CurvePoint], None] = lambda _: None,
    ranks: Ranks = SINGLE_PROCESS,
) -> dict[str, Any]:
    """Trains and writes the head to the run's output; returns its provenance record, `held_out` (sample ids) included.

    An interrupted run continues from its last saved state when called again with the same arguments, and a finished one
    with more epochs or steps. A run that was asked to stop, or whose time is up, writes the head as it is then; its
    record says so (`training.finished`). In a group of processes all train and the main one writes. With streamed or
    served states the model may lack its decoder layers.
    """
    options = options.for_device(run.device)
    fingerprint = run_fingerprint(run, plan.samples, options)
    again = run_options(run.output, run.output_options)
    ranks.wait()  # the main process removes nothing before all have checked the output
    directory = run_directory(run.output, plan.output_bytes)
    with directory.claim({}, again) if ranks.main else nullcontext() as journal:
        require_shared(run.work, ranks, "resumes from the state that the main one saved there")
        module = _fresh_module(plan, model, options)
        if run.init is not None:
            module.eagle_module.load_state_dict(initial_tensors(check_initial(run.init, plan.spec)))
        source = {f"{key}_sha256": fingerprint[key] for key in ("data", "init")}
        source["target_config"] = fingerprint["target"]
        source |= fingerprint["target_id"] | target_record(Checkpoint.open(run.target_dir))
        writer = HeadWriter(run, plan, options, model.spec, module, ranks, source)
        stop = Stop(run.deadline)
        # Python has its signals handled in the main thread alone
        in_main_thread = threading.current_thread() is threading.main_thread()
        heard = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
        with (
            closing(open_states(run, model, plan, options, ranks, journal)) as states,
            signals_handled(stop.hear, *heard),
        ):
            result = train_head(
                module,
                states,
                options,
                run,
                fingerprint,
                on_step=on_step,
                export=writer.after,
                stop=stop,
                ranks=ranks,
            )
            record = writer.write(run.output, result.to_dict())
        if ranks.main and result.finished:  # the state stays, so that the run can be extended
            for path in run.work.iterdir():
                if path.name != STATE_NAME:
                    remove_folder(run.work, PlainName(path.name))
    return record


def _fresh_module(
    plan: TrainingPlan, model: KimiModel, options: TrainOptions
) -> train.TrainingModule:
    """ModelOpt's module with the head's initial weights, which depend on the seed alone."""
    torch.manual_seed(options.seed)
    device, ids = model.embed.weight.device, None
    if plan.spec.has_d2t:
        kept = draft_vocabulary(plan.samples, plan.spec.draft_vocab_size, model.spec.vocab_size)
        ids = torch.tensor(kept, device=device)
    return train.build(
        plan.spec,
        model.spec,
        model.embed.weight.to(device, options.dtype),
        model.lm_head.weight.to(device, options.dtype),
        target_ids=ids,
    )


def write_head(
    output: Path, tensors: dict[str, torch.Tensor], spec: HeadSpec, target: ModelSpec
) -> None:
    """The checkpoint itself; config.json comes last, so a directory that has one holds a whole head."""
    output.mkdir(parents=True, exist_ok=True)
    write_shard(output / SINGLE_SHARD, tensors, {"format": "pt"})
    write_json(output / CONFIG_NAME, head_config(spec, target))


def write_record(output: Path, spec: HeadSpec, provenance: dict[str, Any]) -> None:
    """provenance.json and README.md beside the checkpoint; rewritten when a measurement is added."""
    write_json(output / PROVENANCE_NAME, provenance)
    write_atomic(output / CARD_NAME, model_card(spec, provenance))


@dataclass
class HeadWriter:
    """Writes the heads of one run: `best`, the one with the lowest held-out loss, and the last. Every process calls it,
    the main one writes."""

    run: TrainingRun
    plan: TrainingPlan
    options: TrainOptions
    target: ModelSpec
    module: train.TrainingModule
    ranks: Ranks
    source: dict[str, Any]  # digests of what the run started from, as provenance.json names them

    def write(self, place: Path, about: dict[str, Any]) -> dict[str, Any]:
        """The head as it is now into `place`, its record last; `about`: what the record says of the run so far. Returns
        the record, empty in all processes but the main one."""
        if not self.ranks.main:
            return {}
        tensors = train.head_tensors(self.module)
        plan, options, samples = self.plan, self.options, self.plan.samples
        data = split_data(samples, options)
        training = summary(self.run.curve) | {
            "samples": len(data.trained),
            "held_out": len(data.held),
            "peak_lr": peak_learning_rate(options, plan.spec.hidden_size),
            "processes": self.ranks.size,
        }
        if plan.spec.has_d2t:
            ids = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()
            training["draft_vocabulary_coverage"] = coverage(samples, ids)
        named = {
            "target": source_name(self.run.target_dir),
            "data": self.run.data,
            "files": plan.files,
        }
        record = provenance(
            "train", named | self.source, asdict(options), parameters=plan.parameters,
            training=training | about, held_out=[samples[index].id for index in data.held],
        )  # fmt: skip
        for name in (PROVENANCE_NAME, CARD_NAME):  # a kill leaves no head with another's record
            remove_file(place, name)
        write_head(place, tensors, plan.spec, self.target)
        write_record(place, plan.spec, record)
        return record

    def after(self, point: CurvePoint) -> None:
        """Writes the heads that are due after this step."""
        if not self.ranks.main:
            return
        if point.held_out and point.held_out["loss"] < self._best_loss():
            self._put(BEST, point)

    def _best_loss(self) -> float:
        """Held-out loss of `best`, as its record has it."""
        record = self.run.output / BEST / PROVENANCE_NAME
        if not record.is_file():
            return math.inf
        return float(read_object(record)["training"]["held_out_figures"]["loss"])

    def _put(self, name: PlainName, point: CurvePoint) -> None:
        """The head as it is now in a folder that appears whole."""
        output = self.run.output
        unfinished = PlainName(f".{name}.partial")
        remove_folder(output, unfinished)
        about = {
            "steps": point.step,
            "total": point.total,
            "finished": False,
            "held_out_figures": point.held_out,
        }
        self.write(output / unfinished, about)
        remove_folder(output, name)
        with writing(output / name):
            (output / unfinished).rename(output / name)
            fsync(output)
