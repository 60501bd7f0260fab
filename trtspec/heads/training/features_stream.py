"""`--features stream`: states of a target that fits no machine, a chunk of samples at a time, made while training.

The target runs one decoder layer at a time over a chunk; its states go to one file per chunk, which appears whole. A
chunk is made when a step first asks for one of its samples, and samples are cut into chunks in the order in which the
first epoch uses them, so training alternates: a chunk of states, a chunk of steps. What a step computes does not depend
on it. When no sample is used twice, files that training has passed are removed.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from torch import Tensor

from trtspec.checkpoint.writer import ShardFile
from trtspec.errors import TrtspecError, UsageError
from trtspec.heads.data.samples import Sample
from trtspec.heads.training.batches import batches_of_epoch, split_held_out
from trtspec.heads.training.features import Features, bytes_per_token, padded, similar_length
from trtspec.heads.training.loop import MAX_HELD_OUT
from trtspec.heads.training.options import Streamed, TrainOptions
from trtspec.heads.training.plan import TrainingPlan, steps_of
from trtspec.models.stream import LayerStream, States
from trtspec.report import say
from trtspec.specs import ModelSpec

CHUNK_BYTES = 256 * 2**30
DISK_SHARE = 0.3  # of the free disk that a chunk may take: there are two, and the hidden states while one is made


@dataclass
class ChunkWriter:
    """Computes the states of samples and writes them: `<index>.hidden` and `<index>.<layer>`, bf16 [S, H] each."""

    stream: LayerStream
    aux_layers: tuple[int, ...]
    directory: Path

    def write(self, path: Path, samples: dict[int, Sample]) -> None:
        """One file for `samples` (by index), complete or absent."""
        indices, spec = sorted(samples), self.stream.spec
        groups = [[indices[place] for place in group] for group in similar_length([samples[i] for i in indices])]
        batches = [padded([samples[index] for index in group]) for group in groups]
        names = ("hidden", *map(str, self.aux_layers))
        shapes = {index: (len(sample.tokens), spec.hidden_size) for index, sample in samples.items()}
        file = ShardFile(path, {f"{index}.{name}": ("BF16", shapes[index]) for index in indices for name in names})

        def keep(name: str, number: int, output: Tensor) -> None:
            for row, index in enumerate(groups[number]):
                file.write(f"{index}.{name}", output[row, : shapes[index][0]].to(torch.bfloat16))

        def on_output(layer: int, number: int, output: Tensor) -> None:
            if layer in self.aux_layers:
                keep(str(layer), number, output)

        budget = psutil.virtual_memory().available / 2
        where = self.directory / "states"
        try:
            with States(batches, spec.hidden_size, self.stream.dtype, budget=budget, directory=where) as states:
                self.stream.embed(batches, states)
                self.stream.run(batches, states, on_output=on_output)
                norm = self.stream.norm()
                with torch.inference_mode():
                    for number in range(len(batches)):
                        keep("hidden", number, norm(states.get(number).to(self.stream.device)))
            file.finish()
        except BaseException:
            file.abandon()
            raise
        finally:
            shutil.rmtree(where, ignore_errors=True)


class StreamedFeatures(Features):
    """`Features` whose states are files of chunks, each computed when it is first asked for."""

    def __init__(
        self, samples: list[Sample], chunks: list[list[int]], writer: ChunkWriter, fingerprint: str, *, kept: float
    ) -> None:
        """`kept`: how many of the first chunks stay on disk when training has passed them."""
        width = writer.stream.spec.hidden_size
        empty = torch.empty(0, width, dtype=torch.bfloat16)
        super().__init__(samples, [], empty, empty.new_empty(0, width * len(writer.aux_layers)))
        self.chunks, self.writer, self.fingerprint, self.kept = chunks, writer, fingerprint, kept
        self._chunk_of = {index: number for number, chunk in enumerate(chunks) for index in chunk}
        self._open: dict[int, Any] = {}

    def rows(self, index: int) -> slice:
        raise NotImplementedError("the states of a streamed run are not in one tensor; ask for `states`")

    @property
    def bytes(self) -> int:
        tokens = sum(len(self.samples[index].tokens) for index in self._chunk_of)
        return tokens * bytes_per_token(self.writer.stream.spec, len(self.writer.aux_layers))

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """As `Features.states`; computes the sample's chunk when there is no file of it."""
        if index not in self._chunk_of:  # one that the schedule does not use: a chunk of its own
            self._chunk_of[index] = len(self.chunks)
            self.chunks.append([index])
        file = self._file(self._chunk_of[index])
        aux = [file.get_tensor(f"{index}.{layer}") for layer in sorted(self.writer.aux_layers)]
        return file.get_tensor(f"{index}.hidden"), torch.cat(aux, -1)

    def path(self, number: int) -> Path:
        """File of a chunk; its name tells target, layers, type and tokens, so that another run's is never taken."""
        tokens = [(index, self.samples[index].tokens) for index in sorted(self.chunks[number])]
        digest = hashlib.sha256(repr((self.fingerprint, tokens)).encode()).hexdigest()[:16]
        return self.writer.directory / f"chunk-{number:04d}-{digest}.safetensors"

    def _file(self, number: int) -> Any:
        if number not in self._open:
            path = self.path(number)
            if not path.is_file():
                self._compute(number, path)
            self._open[number] = safe_open(path, "pt")
        return self._open[number]

    def _compute(self, number: int, path: Path) -> None:
        for passed in range(number - 1):  # the chunk just before stays, for a run that resumes some steps back
            if passed >= self.kept:
                self._open.pop(passed, None)
                self.path(passed).unlink(missing_ok=True)
        chunk = {index: self.samples[index] for index in self.chunks[number]}
        tokens = sum(len(sample.tokens) for sample in chunk.values())
        layers = self.writer.stream.num_layers
        say(f"Chunk {number + 1} of {len(self.chunks)}: {tokens:,} tokens through the target's {layers} layers")
        path.parent.mkdir(parents=True, exist_ok=True)
        for partial in path.parent.glob(".chunk-*.partial"):
            partial.unlink()
        self.writer.write(path, chunk)


def stream_features(
    stream: LayerStream,
    plan: TrainingPlan,
    options: TrainOptions,
    work: Path,
    target: str,
    *,
    chunk_bytes: float | None = None,
) -> StreamedFeatures:
    """The features of a streamed run; computes nothing yet.

    `target` is the digest of the target's weights. Without a directory of their own the chunks are in `work` and go
    with it.
    """
    place = plan.features.directory if isinstance(plan.features, Streamed) else None
    directory = place or work / "features"
    layers = tuple(sorted(plan.spec.aux_layers or stream.spec.default_aux_layers))
    if chunk_bytes is None:
        existing = next(path for path in (directory.resolve(), *directory.resolve().parents) if path.exists())
        chunk_bytes = min(CHUNK_BYTES, DISK_SHARE * shutil.disk_usage(existing).free)
    chunks, kept = chunks_in_order(plan.samples, options, stream.spec, len(layers), chunk_bytes)
    _check_disk(plan, directory, once=kept < math.inf)
    fingerprint = repr((target, layers, str(stream.dtype), stream.activation))
    writer = ChunkWriter(stream, layers, directory)
    return StreamedFeatures(plan.samples, chunks, writer, fingerprint, kept=math.inf if place else kept)


def chunks_in_order(
    samples: list[Sample], options: TrainOptions, target: ModelSpec, num_aux: int, chunk_bytes: float
) -> tuple[list[list[int]], float]:
    """(sample indices by chunk in the order of first use, how many of the first chunks are needed to the end).

    The held-out samples of the evaluations come first and are needed to the end; infinity: every chunk is, because
    samples come again in later epochs. One chunk takes all samples when they fit.
    """
    train, held = split_held_out([sample.id for sample in samples], options.held_out, options.seed)
    lengths = [len(sample.tokens) for sample in samples]
    total = steps_of(len(train), options)
    first = batches_of_epoch(lengths, train, options.batch_size, options.seed, 0)
    once = total <= math.ceil(len(train) / options.batch_size)
    size = bytes_per_token(target, num_aux)
    if sum(lengths) * size <= chunk_bytes:
        return [list(range(len(samples)))], 1 if once else math.inf
    evaluated = held[:MAX_HELD_OUT]
    chunks: list[list[int]] = [[]]
    filled = 0
    for index in evaluated + [index for batch in first[:total] for index in batch]:
        if chunks[-1] and filled + lengths[index] * size > chunk_bytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(index)
        filled += lengths[index] * size
    needed = sum(not set(chunk).isdisjoint(evaluated) for chunk in chunks)
    return chunks, needed if once else math.inf


def _check_disk(plan: TrainingPlan, directory: Path, *, once: bool) -> None:
    """Every chunk stays when samples come again; then all of them must fit."""
    existing = next(path for path in (directory.resolve(), *directory.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free + sum(path.stat().st_size for path in directory.glob("chunk-*"))
    if not once and plan.feature_bytes > free:
        raise TrtspecError(
            f"the states of {plan.tokens:,} tokens take {plan.feature_bytes:,} bytes, kept for later epochs, and the "
            f"disk of {existing} has {free:,} free",
            "pass --epochs 1, which removes what it has passed, or --features stream:DIR on a larger disk",
        )


def refuse_several(processes: int) -> None:
    """Chunks are made by one process: several would each run the whole target."""
    if processes > 1:
        raise UsageError(
            f"--features stream with {processes} processes", "fill stream:DIR with one process, or train with one"
        )
