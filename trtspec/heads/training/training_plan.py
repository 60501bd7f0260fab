"""What a training run will do and need, known before a state is computed or ModelOpt imported.

`trtspec train` checks that, and the head to start from, before it spends an hour, also with --dry-run.
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

MEMORY_SHARE = 0.5  # of the free memory that --features auto may fill with states
LEFT_OUT = {"embed_tokens.weight", "t2d"}  # of a head to start from: the target's, and made of d2t


@dataclass
class TrainingPlan:
    """What a run will do, known before any state is computed."""

    spec: HeadSpec
    samples: list[Sample]
    tokens: int
    steps: int
    parameters: int
    feature_bytes: int
    features: FeatureSource
    files: list[dict[str, Any]] = field(default_factory=list)  # what became of each data file
    held_out: int | None = None  # samples; None in a plan made without the data
    counted: int | None = None  # samples of a plan made without the data
    dumped: DumpedFeatures | None = None  # the states, where a directory holds them

    @property
    def warnings(self) -> list[str]:
        """What engines cannot do with the head that is to be trained."""
        return [text for engine in ENGINES.values() if (text := engine.cannot_load(self.spec))]

    @property
    def output_bytes(self) -> int:
        """Most that a run has on its disk: two saved states, while one replaces the other, in float32; in bf16 the
        best head, the one that replaces it, and the last."""
        state, head = 4 * (1 + len(MOMENTS)) * self.parameters, 2 * self.parameters
        return 2 * state + 3 * head

    def lines(self) -> list[str]:
        """What is trained on what, line by line, for whoever waits."""
        found = []
        for file in self.files:
            if file["duplicates"] or file["refused"]:
                first = f", first: {file['refusals'][0]}" if file["refused"] else ""
                left_out = f"{file['duplicates']} duplicates left out, {file['refused']} rows refused{first}"
                found.append(f"{file['file']}: {file['conversations']} conversations, {left_out}")
        found += [f"warning: {warning}" for warning in self.warnings]
        head = f"EAGLE-{self.spec.eagle} {self.spec.attention.upper()} head of {self.parameters / 1e6:.1f} M parameters"
        return [*found, f"Training an {head} on {self.tokens:,} tokens, {self.steps} steps"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "attention": self.spec.attention,
            "eagle": self.spec.eagle,
            "aux_layers": list(self.spec.aux_layers or ()),
            "draft_vocab_size": self.spec.draft_vocab_size,
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
    """Reads and tokenizes the data and sizes everything."""
    spec = new_head_spec(target, options)
    dumped = None
    samples, counted = read_files(data, KimiTokenizer(target_dir), options)
    if features.way == "dumps" and features.directory:
        dumped = dumps_of(samples, features.directory, target, spec.num_aux)
        samples = dumped.samples
    tokens = sum(len(sample.tokens) for sample in samples)
    size = tokens * bytes_per_token(target, spec.num_aux)
    if features.text == "auto" and size > MEMORY_SHARE * machine.free_memory():
        raise UsageError(
            f"the states of {tokens:,} tokens take {size / 2**30:.1f} GiB, more than half of the free memory",
            "pass `features` stream to keep them on disk, or less data",
        )
    order = split_data(samples, options)
    held = len(order.held)
    trained = [samples[index] for index in order.trained]
    if not sum(counted_positions(trained, options.ttt_steps, options.answer_only)):
        message = f"TS-DATA-EMPTY no position of {', '.join(data)} counts in the loss"
        raise TrtspecError(message, "give conversations with longer answers")
    return TrainingPlan(
        spec,
        samples,
        tokens,
        order.total,
        parameter_count(spec),
        size,
        features,
        counted,
        held,
        dumped=dumped,
    )


def plan_without_data(
    target: ModelSpec,
    options: TrainOptions,
    recipe: TrainingRecipe,
    data: str,
    features: FeatureSource,
) -> TrainingPlan:
    """The sizes of a run whose target or data are not on this machine, from the recipe's counts; `samples` stays
    empty. UsageError when the recipe does not tell them."""
    if recipe.samples is None or recipe.mean_tokens is None:
        message = f"the target or {data} is not on this machine, so its tokens cannot be counted"
        counts = "put `samples:` and `mean_tokens:` into the `config` file, or fetch both first"
        near = beside(data)
        raise UsageError(message, f"did you mean {near}?" if near else counts)
    spec = new_head_spec(target, options)
    tokens = recipe.samples * min(recipe.mean_tokens, options.seq_len)
    training = round(recipe.samples * (1 - options.held_out))
    size = tokens * bytes_per_token(target, spec.num_aux)
    return TrainingPlan(
        spec,
        [],
        tokens,
        steps_of(training, options),
        parameter_count(spec),
        size,
        features,
        counted=recipe.samples,
    )


def check_run(run: TrainingRun, plan: TrainingPlan, options: TrainOptions) -> dict[str, Any]:
    """Whether the head to start from fits, the disk has room, and the run that the output holds would resume with these
    options; raises otherwise. Returns what a dry run says about it."""
    if run.init is not None:
        check_initial(run.init, plan.spec)
    resumes = run_directory(run.output, plan.output_bytes).check(run_options(run.output, run.output_options))
    saved = saved_run(run.work) if resumes else None
    if saved is not None:
        check_saved(saved, run_fingerprint(run, plan.samples, options), plan.steps, run.output)
    return {"steps_done": saved.step if saved else 0, "free_memory_bytes": machine.free_memory()}


def check_initial(head: Path, spec: HeadSpec) -> Checkpoint:
    """The head to start from, which has the tensors of one like `spec` by its header. Raises TrtspecError for one in
    which `trtspec inspect` finds an error, or which does not fit, naming every tensor."""
    checkpoint = Checkpoint.open(head)
    head_spec(checkpoint, values=True)
    for problem in uncomputed(checkpoint.config):
        raise TrtspecError(f"{head}: {problem.message}", problem.remedy, problem.code)
    shapes, maps = expected_shapes(spec), ["d2t"] if spec.has_d2t else []
    wanted = {name: shapes[name] for name in (*tensor_names(spec), "lm_head.weight", *maps)}
    stored = {name: tuple(info.shape) for name, info in canonical_names(checkpoint.tensors).items()}
    wrong = [
        f"{name} is {stored.get(name, 'missing')}, the head wants {wanted.get(name, 'no such tensor')}"
        for name in sorted((wanted.keys() | stored.keys()) - LEFT_OUT)
        if stored.get(name) != wanted.get(name)
    ]
    if wrong:
        raise TrtspecError(
            f"{head} does not fit the head to train: {'; '.join(wrong)}",
            "train with the same `attention`, `eagle` and `draft_vocab_size` as the initial head",
        )
    return checkpoint


def initial_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Tensors of a head to start from in ModelOpt's names, whichever of the two namings it has; floats in float32."""
    stored = LazyTensors(checkpoint)
    named = {
        name.replace("midlayer.", "layers.0."): stored[name]
        for name in stored.names()
        if name not in LEFT_OUT
    }
    return {
        name: value.float() if value.is_floating_point() else value for name, value in named.items()
    }
