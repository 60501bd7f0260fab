"""The plan of a training run, made before a state is computed or ModelOpt is imported.

`trtspec train` checks the plan and the initial head before it trains, also with --dry-run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trtspec import machine
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.dialects import ENGINES
from trtspec.checkpoint.heads.problems import uncomputed
from trtspec.checkpoint.heads.read import head_spec
from trtspec.checkpoint.heads.shapes import canonical_names, expected_shapes, tensor_names
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError
from trtspec.files import beside
from trtspec.heads.training.curve import run_directory, run_options
from trtspec.heads.training.samples import (
    FileCounts,
    Sample,
    counted_positions,
    read_files,
    split_data,
    steps_of,
)
from trtspec.heads.training.saved import MOMENTS, check_saved, run_fingerprint, saved_run
from trtspec.heads.training.states import DumpedFeatures, bytes_per_token, dumps_of
from trtspec.heads.training.train_options import (
    FeatureSource,
    TrainingRecipe,
    TrainingRun,
    TrainOptions,
    new_head_spec,
)
from trtspec.models.eagle3 import parameter_count
from trtspec.specs import HeadSpec, ModelSpec

MEMORY_SHARE = 0.5  # fraction of the free memory that --features auto may fill with states
# Tensors of an initial head that are not loaded. The target has its own embedding, and t2d follows
# from d2t.
UNUSED_TENSORS = {"embed_tokens.weight", "t2d"}


@dataclass
class TrainingPlan:
    """The head, the data and the sizes of a training run.

    Args:
        spec: specification of the head.
        samples: samples of the data. Empty in a plan made without the data.
        tokens: number of tokens in all samples.
        steps: number of optimizer steps of the whole run.
        parameters: number of trainable parameters.
        feature_bytes: size of the hidden states of all samples, in bytes.
        features: source of the hidden states.
        files: counts of each data file (see `read_files`).
        held_out: number of held-out samples. None in a plan made without the data.
        counted: number of samples in a plan made without the data. None in other plans.
        dumped: states from a directory of dumps. None for other sources.
    """

    spec: HeadSpec
    samples: list[Sample]
    tokens: int
    steps: int
    parameters: int
    feature_bytes: int
    features: FeatureSource
    files: list[FileCounts] = field(default_factory=list)
    held_out: int | None = None
    counted: int | None = None
    dumped: DumpedFeatures | None = None

    @property
    def warnings(self) -> list[str]:
        """Reasons why engines cannot load the head that is to be trained, one for each engine."""
        reasons = [engine.cannot_load(self.spec) for engine in ENGINES.values()]
        return [reason for reason in reasons if reason]

    @property
    def output_bytes(self) -> int:
        """Maximum number of bytes that a run keeps in its output.

        Two saved states (float32) exist while one replaces the other. Up to three heads (bf16)
        exist: the last head, the best head, and a new best head while it is written.
        """
        state = 4 * (1 + len(MOMENTS)) * self.parameters
        head = 2 * self.parameters
        return 2 * state + 3 * head

    def lines(self) -> list[str]:
        """Lines of the summary that `trtspec train` shows at its start."""
        lines = []
        for file in self.files:
            duplicates = file["duplicates"]
            refused = file["refused"]
            if duplicates or refused:
                line = (
                    f"{file['file']}: {file['conversations']} conversations, "
                    f"{duplicates} duplicates left out, {refused} rows refused"
                )
                if refused:
                    line += f", first: {file['refusals'][0]}"
                lines.append(line)
        lines += [f"warning: {warning}" for warning in self.warnings]
        spec = self.spec
        millions = self.parameters / 1e6
        lines.append(
            f"Training an EAGLE-{spec.eagle} {spec.attention.upper()} head "
            f"of {millions:.1f} M parameters on {self.tokens:,} tokens, {self.steps} steps"
        )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of the plan in the output of `--json`."""
        spec = self.spec
        return {
            "attention": spec.attention,
            "eagle": spec.eagle,
            "aux_layers": list(spec.aux_layers or ()),
            "draft_vocab_size": spec.draft_vocab_size,
            "samples": len(self.samples) if self.counted is None else self.counted,
            "tokens": self.tokens,
            "steps": self.steps,
            "parameters": self.parameters,
            "feature_bytes": self.feature_bytes,
            "features": self.features.text,
            "held_out": self.held_out,
            "files": self.files,
        }


def make_plan(
    target_dir: Path,
    target: ModelSpec,
    data: tuple[str, ...],
    options: TrainOptions,
    features: FeatureSource,
) -> TrainingPlan:
    """Reads and tokenizes the data, and computes the sizes of the run.

    Raises UsageError if the states of `features` auto do not fit into memory. Raises TrtspecError
    if no position of the data counts in the loss, or if dumps are missing.
    """
    spec = new_head_spec(target, options)
    samples, files = read_files(data, KimiTokenizer(target_dir), options)
    dumped = None
    if features.way == "dumps" and features.directory:
        dumped = dumps_of(samples, features.directory, target, spec.num_aux)
        samples = dumped.samples
    tokens = sum(len(sample.tokens) for sample in samples)
    size = tokens * bytes_per_token(target, spec.num_aux)
    if features.text == "auto" and size > MEMORY_SHARE * machine.free_memory():
        gib = size / 2**30
        message = (
            f"the states of {tokens:,} tokens take {gib:.1f} GiB, more than half of the free memory"
        )
        raise UsageError(message, "pass `features` stream to keep them on disk, or less data")
    split = split_data(samples, options)
    trained = [samples[index] for index in split.trained]
    counted = counted_positions(trained, options.ttt_steps, options.answer_only)
    if not sum(counted):
        message = f"TS-DATA-EMPTY no position of {', '.join(data)} counts in the loss"
        raise TrtspecError(message, "give conversations with longer answers")
    return TrainingPlan(
        spec,
        samples,
        tokens,
        split.total,
        parameter_count(spec),
        size,
        features,
        files,
        len(split.held),
        dumped=dumped,
    )


def plan_without_data(
    target: ModelSpec,
    options: TrainOptions,
    recipe: TrainingRecipe,
    data: str,
    features: FeatureSource,
) -> TrainingPlan:
    """Plans a run whose target or data are not on this machine, from the counts in `recipe`.

    The plan has no samples. Raises UsageError if the recipe lacks the counts.
    """
    if recipe.samples is None or recipe.mean_tokens is None:
        message = f"the target or {data} is not on this machine, so its tokens cannot be counted"
        remedy = "put `samples:` and `mean_tokens:` into the `config` file, or fetch both first"
        near = beside(data)
        if near:
            remedy = f"did you mean {near}?"
        raise UsageError(message, remedy)
    spec = new_head_spec(target, options)
    tokens = recipe.samples * min(recipe.mean_tokens, options.seq_len)
    trained = round(recipe.samples * (1 - options.held_out))
    size = tokens * bytes_per_token(target, spec.num_aux)
    return TrainingPlan(
        spec,
        [],
        tokens,
        steps_of(trained, options),
        parameter_count(spec),
        size,
        features,
        counted=recipe.samples,
    )


def check_run(run: TrainingRun, plan: TrainingPlan, options: TrainOptions) -> dict[str, Any]:
    """Checks the initial head, the free disk, and whether the output can be used.

    Raises TrtspecError if the initial head does not fit or the disk is too small. Raises UsageError
    if the output holds something else, or a run that cannot resume with these options. Returns
    `steps_done` (optimizer steps of the saved run) and `free_memory_bytes`.
    """
    if run.init is not None:
        check_initial(run.init, plan.spec)
    directory = run_directory(run.output, plan.output_bytes)
    resumes = directory.check(run_options(run.output, run.output_options))
    saved = saved_run(run.work) if resumes else None
    steps_done = 0
    if saved is not None:
        check_saved(saved, run_fingerprint(run, plan.samples, options), plan.steps, run.output)
        steps_done = saved.step
    return {"steps_done": steps_done, "free_memory_bytes": machine.free_memory()}


def check_initial(head: Path, spec: HeadSpec) -> Checkpoint:
    """Opens the initial head, and checks that it has the tensors of a head like `spec`.

    Raises TrtspecError if `trtspec inspect` finds an error in the head. Raises TrtspecError naming
    every wrong tensor if names or shapes differ.
    """
    checkpoint = Checkpoint.open(head)
    head_spec(checkpoint, values=True)
    for problem in uncomputed(checkpoint.config):
        raise TrtspecError(f"{head}: {problem.message}", problem.remedy, problem.code)
    shapes = expected_shapes(spec)
    names = [*tensor_names(spec), "lm_head.weight"]
    if spec.has_d2t:
        names.append("d2t")
    needed = {name: shapes[name] for name in names}
    stored = {name: tuple(info.shape) for name, info in canonical_names(checkpoint.tensors).items()}
    faults = []
    for name in sorted((needed.keys() | stored.keys()) - UNUSED_TENSORS):
        # The defaults are words of the message, for a tensor that only one side has.
        shape = stored.get(name, "missing")
        wanted = needed.get(name, "no such tensor")
        if stored.get(name) != needed.get(name):
            faults.append(f"{name} is {shape}, the head wants {wanted}")
    if faults:
        message = f"{head} does not fit the head to train: {'; '.join(faults)}"
        remedy = (
            "train with the same `attention`, `eagle` and `draft_vocab_size` as the initial head"
        )
        raise TrtspecError(message, remedy)
    return checkpoint


def initial_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Reads the tensors of an initial head under ModelOpt's names, floats in float32."""
    stored = LazyTensors(checkpoint)
    tensors = {}
    for name in stored.names():
        if name not in UNUSED_TENSORS:
            value = stored[name]
            if value.is_floating_point():
                value = value.float()
            # Heads call their layer `midlayer` or `layers.0`. ModelOpt's module has `layers.0`.
            tensors[name.replace("midlayer.", "layers.0.")] = value
    return tensors
