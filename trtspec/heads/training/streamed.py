"""States of a target that runs one decoder layer at a time over a chunk of samples.

The states of a chunk go to one file, which appears whole. A chunk is made when a step first asks for one of its
samples. Chunks follow the order in which the first epoch uses the samples, so training alternates: a chunk of states, a
chunk of steps. When no sample is used twice, files that training has passed are removed.
"""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trtspec import machine
from trtspec.checkpoint.writer import Layout, ShardFile
from trtspec.errors import TrtspecError
from trtspec.foreign import PlainName
from trtspec.heads.training.ranks import SINGLE_PROCESS, Ranks, require_shared
from trtspec.heads.training.samples import MAX_HELD_OUT, Sample, TrainingData, split_data
from trtspec.heads.training.states import Features, bytes_per_token
from trtspec.heads.training.train_options import TrainOptions
from trtspec.heads.training.training_plan import TrainingPlan
from trtspec.models.stream import (
    PREFETCH_MEMORY_LAYERS,
    LayerStream,
    States,
    padded,
    similar_length,
)
from trtspec.report import remove_folder, say
from trtspec.specs import ModelSpec

CHUNK_BYTES = 256 * 2**30  # of disk that the states of a chunk may take
POLL = 0.2  # seconds between looks for the parts of other processes
DISK_SHARE = 0.3  # of the free disk that a chunk may take: there are two, and the hidden states while one is made


def open_stream(
    target_dir: Path, dtype: torch.dtype, device: str, ranks: Ranks = SINGLE_PROCESS
) -> LayerStream:
    """The target's layers for this process. Raises TrtspecError where a decoded layer of each process is more than the
    machine's memory."""
    threads = min(8, max(1, torch.get_num_threads() // ranks.local_size))
    stream = LayerStream(target_dir, dtype=dtype, device=device, threads=threads)
    layer = stream.layer_bytes(stream.num_layers - 1)
    share = machine.free_memory() / ranks.local_size
    stream.load_ahead = share > PREFETCH_MEMORY_LAYERS * layer
    if layer > share:
        raise TrtspecError(
            f"TS-FEATURES-MEMORY a decoded layer of the target takes {layer / 1e9:,.1f} GB, and each of "
            f"{ranks.local_size} processes on this machine holds one: {share / 1e9:,.1f} GB of free memory for each",
            "start fewer processes per machine, or take the states from dumps or a server",
        )
    return stream


def stream_features(
    stream: LayerStream,
    plan: TrainingPlan,
    options: TrainOptions,
    work: Path,
    target: str,
    *,
    chunk_bytes: float | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> StreamedFeatures:
    """The features of a streamed run; one process computes nothing yet, several what they all need to the end.

    `target` is the digest of the target's weights. Without a directory of their own the chunks are in `work` and go
    with it.
    """
    named = plan.features.directory
    directory = named or work / "features"
    layers = tuple(sorted(plan.spec.aux_layers or stream.spec.default_aux_layers))
    if chunk_bytes is None:
        chunk_bytes = min(CHUNK_BYTES, DISK_SHARE * machine.free_disk(directory))
        chunk_bytes = ranks.agree(chunk_bytes)  # the disk fills while the others look
    chunks, kept = chunks_in_order(
        plan.samples, split_data(plan.samples, options), stream.spec, len(layers), chunk_bytes
    )
    if ranks.main and kept == math.inf:  # samples come again, so every chunk stays
        free = machine.free_disk(directory) + sum(
            path.stat().st_size for path in directory.glob("chunk-*")
        )
        if plan.feature_bytes > free:
            raise TrtspecError(
                f"TS-FEATURES-DISK the states of {plan.tokens:,} tokens take {plan.feature_bytes:,} bytes, kept for "
                f"later epochs, and the disk of {directory} has {free:,} free",
                "pass `epochs` 1, which removes what it has passed, or `features` stream:DIR on a larger disk",
            )
    require_shared(directory, ranks, "reads the states that the others compute")
    fingerprint = repr((target, layers, str(stream.dtype), stream.activation))
    features = StreamedFeatures(
        plan.samples,
        stream,
        layers,
        chunks,
        directory,
        ranks,
        fingerprint,
        kept=math.inf if named else kept,
    )
    # held-out and later epochs' samples fall to the processes in another order than chunks have
    if ranks.size > 1:
        for number in range(int(min(kept, len(chunks)))):
            features.opened(number)
    return features


def chunks_in_order(
    samples: list[Sample], data: TrainingData, target: ModelSpec, num_aux: int, chunk_bytes: float
) -> tuple[list[list[int]], float]:
    """(sample indices by chunk in the order of first use, how many of the first chunks are needed to the end).

    The held-out samples of the evaluations come first and are needed to the end; infinity: every chunk is, because
    samples come again in later epochs. A batch lies in one chunk, so that processes which share its rows need the same
    chunk. One chunk takes all samples when they fit.
    """
    lengths = [len(sample.tokens) for sample in samples]
    batches = [batch for _, window in data.steps() for batch in window]
    used = [index for batch in batches for index in batch]
    once = len(used) == len(set(used))
    size = bytes_per_token(target, num_aux)
    if sum(lengths) * size <= chunk_bytes:
        return [list(range(len(samples)))], 1 if once else math.inf
    evaluated = data.held[:MAX_HELD_OUT]
    chunks: list[list[int]] = [[]]
    filled = 0
    placed: set[int] = set()
    for batch in [[index] for index in evaluated] + batches:
        fresh = [index for index in batch if index not in placed]
        placed.update(fresh)
        needs = sum(lengths[index] for index in fresh) * size
        if chunks[-1] and filled + needs > chunk_bytes:
            chunks.append([])
            filled = 0
        chunks[-1] += fresh
        filled += needs
    needed = sum(not set(chunk).isdisjoint(evaluated) for chunk in chunks)
    return chunks, needed if once else math.inf


class StreamedFeatures(Features):
    """`Features` whose states are files of chunks, each computed when it is first asked for: `<index>.hidden` and
    `<index>.<layer>` of each sample, bf16 [S, H].

    Several processes ask for a chunk at the same step. Each computes its part of the batches that one process would
    compute, so the bits are the same; writes a file of its part; and waits for the others'.
    """

    def __init__(
        self,
        samples: list[Sample],
        stream: LayerStream,
        aux_layers: tuple[int, ...],
        chunks: list[list[int]],
        directory: Path,
        ranks: Ranks,
        fingerprint: str,
        *,
        kept: float,
    ) -> None:
        """`aux_layers` ascend; `kept`: how many of the first chunks stay on disk when training has passed them."""
        super().__init__(samples, stream.spec.hidden_size, len(aux_layers))
        self.stream = stream
        self.aux_layers = aux_layers
        self.chunks = chunks
        self.directory = directory
        self.ranks = ranks
        self.fingerprint = fingerprint
        self.kept = kept
        self._chunk_of = {index: number for number, chunk in enumerate(chunks) for index in chunk}
        self._open: dict[int, dict[int, Any]] = {}

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """As `Features.states`; computes the sample's chunk when there is no file of it."""
        file = self.opened(self._chunk_of[index])[index]
        aux = [file.get_tensor(f"{index}.{layer}") for layer in self.aux_layers]
        return file.get_tensor(f"{index}.hidden"), torch.cat(aux, -1)

    def path(self, number: int) -> Path:
        """File of a chunk; its name tells target, layers, type and tokens, so that another run's is never taken."""
        tokens = [(index, self.samples[index].tokens) for index in sorted(self.chunks[number])]
        digest = hashlib.sha256(repr((self.fingerprint, tokens)).encode()).hexdigest()[:16]
        return self.directory / f"chunk-{number:04d}-{digest}.safetensors"

    def files(self, number: int) -> list[Path]:
        """The files of a chunk, from however many processes; empty while one is missing."""
        path = self.path(number)
        if path.is_file():
            return [path]
        for first in path.parent.glob(f"{path.stem}.0-of-*.safetensors"):
            count = int(first.suffixes[0].rpartition("-")[2])
            parts = [_part(path, rank, count) for rank in range(count)]
            if all(part.is_file() for part in parts):
                return parts
        return []

    def opened(self, number: int) -> dict[int, Any]:
        """The open file of each sample of a chunk. Raises TrtspecError for a damaged one."""
        if number not in self._open:
            if not self.files(number):
                self._compute(number)
            self._open[number] = {}
            for path in self.files(number):
                try:
                    file = safe_open(path, "pt")
                except (OSError, SafetensorError) as error:
                    raise TrtspecError(
                        f"TS-FEATURES-DUMP {path} is damaged ({error})",
                        "remove it: the run makes it again",
                    ) from None
                self._open[number] |= {int(name.partition(".")[0]): file for name in file.keys()}  # noqa: SIM118
        return self._open[number]

    def _compute(self, number: int) -> None:
        ranks, path = self.ranks, self.path(number)
        # the chunk just before stays, for a run that resumes some steps back
        for passed in range(number - 1):
            if passed >= self.kept:
                self._open.pop(passed, None)
                for file in self.files(passed) if ranks.main else ():
                    file.unlink(missing_ok=True)
        tokens = sum(len(self.samples[index].tokens) for index in self.chunks[number])
        layers = self.stream.num_layers
        say(
            f"Chunk {number + 1} of {len(self.chunks)}: {tokens:,} tokens through the target's {layers} layers"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = _part(path, ranks.rank, ranks.size)
        for unfinished in path.parent.glob(f".{mine.name}.*.partial"):
            unfinished.unlink()
        if not mine.is_file():
            self._write(mine, sorted(self.chunks[number]))
        while not self.files(number):  # the launcher ends every process when one dies
            time.sleep(POLL)

    def _write(self, path: Path, every: list[int]) -> None:
        """One file for this process's part of the samples `every`, complete or absent."""
        lengths = {index: len(self.samples[index].tokens) for index in every}
        groups = [
            [every[position] for position in group]
            for group in similar_length(list(lengths.values()))
        ]
        groups = groups[self.ranks.rank :: self.ranks.size]
        batches = [padded([self.samples[index].tokens for index in group]) for group in groups]
        names = ("hidden", *map(str, self.aux_layers))
        indices = [index for group in groups for index in group]
        kept: Layout = {
            f"{i}.{name}": ("BF16", (lengths[i], self.hidden_size))
            for i in indices
            for name in names
        }

        def keep(name: str, number: int, output: Tensor) -> None:
            for row, index in enumerate(groups[number]):
                file.write(f"{index}.{name}", output[row, : lengths[index]].to(torch.bfloat16))

        def on_output(layer: int, number: int, output: Tensor) -> None:
            if layer in self.aux_layers:
                keep(str(layer), number, output)

        budget = machine.free_memory() / 2 / self.ranks.local_size
        states_name = PlainName(f"states-{self.ranks.rank}")
        where = self.directory / states_name
        try:
            with (
                ShardFile(path, kept) as file,
                States(
                    batches, self.hidden_size, self.stream.dtype, budget=budget, directory=where
                ) as states,
            ):
                self.stream.embed(batches, states)
                self.stream.run(batches, states, on_output=on_output)
                norm = self.stream.model_without_layers("norm.weight").norm
                with torch.inference_mode():
                    for number in range(len(batches)):
                        keep("hidden", number, norm(states.get(number).to(self.stream.device)))
        finally:
            remove_folder(self.directory, states_name)


def _part(path: Path, rank: int, count: int) -> Path:
    """The file that process `rank` of `count` writes of the chunk `path`."""
    return path if count == 1 else path.with_name(f"{path.stem}.{rank}-of-{count}.safetensors")
