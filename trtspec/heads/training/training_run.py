"""One training run from data to written heads: `trtspec train` without its command line.

It writes the best head so far and the last head, each whole, with its record and card.
"""

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
from trtspec.heads.training.loop import Stepper, peak_learning_rate, train_head
from trtspec.heads.training.ranks import SINGLE_PROCESS, Ranks, Stop, require_shared
from trtspec.heads.training.samples import coverage, draft_vocabulary, split_data
from trtspec.heads.training.saved import STATE_NAME, Fingerprint, run_fingerprint
from trtspec.heads.training.sources import open_states
from trtspec.heads.training.train_options import TrainingRun, TrainOptions
from trtspec.heads.training.training_plan import TrainingPlan, check_initial, initial_tensors
from trtspec.heads.training.training_record import TrainingProgress, TrainingRecord
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
) -> TrainingRecord:
    """Trains a head, and writes it to the output of the run.

    A second call with the same arguments resumes an interrupted run from the last saved state. More
    epochs or steps extend a finished run. If a signal or the deadline stops the run, the current
    head is written, and the record has `training.finished` false. In a group of processes all
    train, and the main process writes.

    Returns the provenance record, with sample ids in `held_out`. The record is empty in processes
    other than the main process.

    Args:
        model: target. With streamed or served states it may lack its decoder layers.
        on_step: function that gets the figures of every optimizer step.
    """
    options = options.for_device(run.device)
    fingerprint = run_fingerprint(run, plan.samples, options)
    output_options = run_options(run.output, run.output_options)
    ranks.wait()  # the main process changes the output only after all have checked it
    directory = run_directory(run.output, plan.output_bytes)
    with directory.claim({}, output_options) if ranks.main else nullcontext() as journal:
        require_shared(run.work, ranks, "resumes from the state that the main one saved there")
        module = _fresh_module(plan, model, options)
        if run.init is not None:
            initial = check_initial(run.init, plan.spec)
            module.eagle_module.load_state_dict(initial_tensors(initial))
        source = _source_record(run.target_dir, fingerprint)
        writer = HeadWriter(run, plan, options, model.spec, module, ranks, source)
        stop = Stop(run.deadline)
        # Python lets only the main thread install signal handlers.
        signals: tuple[signal.Signals, ...] = ()
        if threading.current_thread() is threading.main_thread():
            signals = (signal.SIGINT, signal.SIGTERM)
        with (
            closing(open_states(run, model, plan, options, ranks, journal)) as states,
            signals_handled(stop.hear, *signals),
        ):
            data = split_data(states.samples, options)
            stepper = Stepper(module, states, options, data.total, ranks)
            result = train_head(
                stepper, data, run, fingerprint, on_step=on_step, export=writer.after, stop=stop
            )
            record = writer.write(run.output, result.to_dict())
        if ranks.main and result.finished:
            # The state stays, so that the run can be extended.
            for path in run.work.iterdir():
                if path.name != STATE_NAME:
                    remove_folder(run.work, PlainName(path.name))
    return record


def _source_record(target_dir: Path, fingerprint: Fingerprint) -> dict[str, Any]:
    """Returns the facts about target, data and initial head that the provenance record keeps."""
    return {
        "data_sha256": fingerprint["data"],
        "init_sha256": fingerprint["init"],
        "target_config": fingerprint["target"],
        **fingerprint["target_id"],
        **target_record(Checkpoint.open(target_dir)),
    }


def _fresh_module(
    plan: TrainingPlan, model: KimiModel, options: TrainOptions
) -> train.TrainingModule:
    """Builds ModelOpt's training module with random weights that depend on the seed alone."""
    torch.manual_seed(options.seed)
    spec = plan.spec
    device = model.embed.weight.device
    target_ids = None
    if spec.has_d2t:
        kept = draft_vocabulary(plan.samples, spec.draft_vocab_size, model.spec.vocab_size)
        target_ids = torch.tensor(kept, device=device)
    embed = model.embed.weight.to(device, options.dtype)
    lm_head = model.lm_head.weight.to(device, options.dtype)
    return train.build(spec, model.spec, embed, lm_head, target_ids=target_ids)


@dataclass
class HeadWriter:
    """Writes the heads of one run: `best`, with the lowest held-out loss, and the last head.

    Every process calls the methods, and only the main process writes.

    Args:
        target: specification of the target.
        module: training module that holds the head.
        source: digests of the run's inputs for provenance.json.
    """

    run: TrainingRun
    plan: TrainingPlan
    options: TrainOptions
    target: ModelSpec
    module: train.TrainingModule
    ranks: Ranks
    source: dict[str, Any]

    def write(self, output: Path, progress: TrainingProgress) -> TrainingRecord:
        """Writes the current head into `output`, and its provenance record last.

        Returns the record, which is empty in processes other than the main process.

        Args:
            progress: facts about the run's progress, for the field `training` of the record.
        """
        if not self.ranks.main:
            return {}
        tensors = train.head_tensors(self.module)
        plan = self.plan
        spec = plan.spec
        options = self.options
        run = self.run
        samples = plan.samples
        data = split_data(samples, options)
        training = summary(run.curve) | {
            "samples": len(data.trained),
            "held_out": len(data.held),
            "peak_lr": peak_learning_rate(options, spec.hidden_size),
            "processes": self.ranks.size,
        }
        if spec.has_d2t:
            offsets = tensors["d2t"]
            target_ids = offsets + torch.arange(len(offsets))
            training["draft_vocabulary_coverage"] = coverage(samples, target_ids.tolist())
        source = {
            "target": source_name(run.target_dir),
            "data": run.data,
            "files": plan.files,
        }
        record: TrainingRecord = provenance(
            "train",
            source | self.source,
            asdict(options),
            parameters=plan.parameters,
            training=training | progress,
            held_out=[samples[index].id for index in data.held],
        )
        # The old record goes first, so that a kill never leaves it beside another head's weights.
        for name in (PROVENANCE_NAME, CARD_NAME):
            remove_file(output, name)
        write_head(output, tensors, spec, self.target)
        write_record(output, spec, record)
        return record

    def after(self, point: CurvePoint) -> None:
        """Writes the best head after an optimizer step whose held-out loss is the lowest so far."""
        if not self.ranks.main:
            return
        held_out = point.held_out
        if held_out and held_out["loss"] < self._best_loss():
            self._write_whole(BEST, point)

    def _best_loss(self) -> float:
        """Held-out loss in the record of the best head. Infinite if no best head was written."""
        path = self.run.output / BEST / PROVENANCE_NAME
        if not path.is_file():
            return math.inf
        training = read_object(path)["training"]
        return float(training["held_out_figures"]["loss"])

    def _write_whole(self, name: PlainName, point: CurvePoint) -> None:
        """Writes the current head into the folder `name` of the output.

        A kill leaves either the previous folder, or the complete new folder, or no folder.
        """
        output = self.run.output
        unfinished = PlainName(f".{name}.partial")
        unfinished_path = output / unfinished
        remove_folder(output, unfinished)
        progress: TrainingProgress = {
            "steps": point.step,
            "total": point.total,
            "finished": False,
            "held_out_figures": point.held_out,
        }
        self.write(unfinished_path, progress)
        remove_folder(output, name)
        path = output / name
        with writing(path):
            unfinished_path.rename(path)
            fsync(output)


def write_head(
    output: Path, tensors: dict[str, torch.Tensor], spec: HeadSpec, target: ModelSpec
) -> None:
    """Writes the checkpoint of a head.

    config.json is written last, so a directory that has a config.json holds a whole head.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_shard(output / SINGLE_SHARD, tensors, {"format": "pt"})
    write_json(output / CONFIG_NAME, head_config(spec, target))


def write_record(output: Path, spec: HeadSpec, provenance: TrainingRecord) -> None:
    """Writes provenance.json and README.md into the directory of the checkpoint.

    A later measurement calls this function again with its figures in `provenance`.
    """
    write_json(output / PROVENANCE_NAME, provenance)
    write_atomic(output / CARD_NAME, model_card(spec, provenance))
