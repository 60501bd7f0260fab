"""States of a target that runs one decoder layer at a time over a chunk of samples.

The states of a chunk go to one file, which is complete or missing. A chunk is computed when a step
first needs one of its samples. Chunks follow the order in which the first epoch uses the samples,
so training alternates: a chunk of states, a chunk of steps. If no sample is used twice, files that
training has passed are removed.
"""

from __future__ import annotations

import hashlib
import math
import time
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trtspec import machine
from trtspec.checkpoint.writer import ShardFile
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

MAX_LOAD_THREADS = 8  # maximum number of threads of a process that decode a layer
CHUNK_BYTES = 256 * 2**30  # maximum size of the states of a chunk on disk
POLL_S = 0.2  # seconds between checks for the files of other processes
# Maximum fraction of the free disk that a chunk takes. The disk holds two chunks, and the states
# between two layers while the next chunk is computed.
DISK_SHARE = 0.3


def open_stream(
    target_dir: Path, dtype: torch.dtype, device: str, ranks: Ranks = SINGLE_PROCESS
) -> LayerStream:
    """Opens the target's layers for this process.

    The processes of a machine share its memory and threads. Raises TrtspecError if one decoded
    layer for each of them does not fit into memory.
    """
    threads_per_process = torch.get_num_threads() // ranks.local_size
    threads = min(MAX_LOAD_THREADS, max(1, threads_per_process))
    stream = LayerStream(target_dir, dtype=dtype, device=device, threads=threads)
    layer = stream.layer_bytes(stream.num_layers - 1)
    share = machine.free_memory() / ranks.local_size
    stream.load_ahead = share > PREFETCH_MEMORY_LAYERS * layer
    if layer > share:
        message = (
            f"TS-FEATURES-MEMORY a decoded layer of the target takes {layer / 1e9:,.1f} GB, "
            f"and each of {ranks.local_size} processes on this machine holds one: "
            f"{share / 1e9:,.1f} GB of free memory for each"
        )
        remedy = "start fewer processes per machine, or take the states from dumps or a server"
        raise TrtspecError(message, remedy)
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
    """Prepares the hidden states of a run whose target runs one layer at a time.

    A single process computes its chunks later, when training needs them. Several processes compute
    the chunks that stay on disk now. Raises TrtspecError if the disk is too small, or if a process
    does not see the directory of the chunks.

    Args:
        work: work folder of the run, which keeps the chunks if the plan names no directory. Its
            chunks are removed at the end of the run.
        target: digest of the target's weights.
        chunk_bytes: maximum size of a chunk. None: as much as CHUNK_BYTES and the free disk allow.
    """
    named = plan.features.directory
    directory = named or work / "features"
    layers = tuple(sorted(plan.spec.aux_layers or stream.spec.default_aux_layers))
    if chunk_bytes is None:
        chunk_bytes = min(CHUNK_BYTES, DISK_SHARE * machine.free_disk(directory))
        # Each process may have seen another free size, because the disk is in use.
        chunk_bytes = ranks.agree(chunk_bytes)
    data = split_data(plan.samples, options)
    chunks, kept = chunks_in_order(plan.samples, data, stream.spec, len(layers), chunk_bytes)
    # Every chunk stays if later epochs use its samples again.
    if ranks.main and kept == math.inf:
        _require_disk(directory, plan)
    require_shared(directory, ranks, "reads the states that the others compute")
    # A file of states is used again only if all of these are equal.
    fingerprint = repr((target, layers, str(stream.dtype), stream.activation))
    # All chunks stay in a directory that the user has named.
    order = ChunkOrder(chunks, math.inf if named else kept)
    features = StreamedFeatures(plan.samples, stream, layers, order, directory, ranks, fingerprint)
    # All processes must compute a chunk together. They would need the chunks of held-out samples
    # and of later epochs at different times, so these chunks are computed first.
    if ranks.size > 1:
        for number in range(int(min(kept, len(chunks)))):
            features.opened(number)
    return features


def _require_disk(directory: Path, plan: TrainingPlan) -> None:
    """Raises TrtspecError if the disk of `directory` cannot hold the states of all samples."""
    # Chunks that are present already need no further room.
    present = sum(path.stat().st_size for path in directory.glob("chunk-*"))
    free = machine.free_disk(directory) + present
    if plan.feature_bytes > free:
        message = (
            f"TS-FEATURES-DISK the states of {plan.tokens:,} tokens take "
            f"{plan.feature_bytes:,} bytes, kept for later epochs, "
            f"and the disk of {directory} has {free:,} free"
        )
        remedy = (
            "pass `epochs` 1, which removes what it has passed, "
            "or `features` stream:DIR on a larger disk"
        )
        raise TrtspecError(message, remedy)


class ChunkOrder(NamedTuple):
    """Chunks of samples in the order of their first use.

    Args:
        chunks: sample indices of each chunk.
        kept: number of first chunks that stay on disk after training has passed them. Infinity:
            every chunk.
    """

    chunks: list[list[int]]
    kept: float


def chunks_in_order(
    samples: list[Sample], data: TrainingData, target: ModelSpec, num_aux: int, chunk_bytes: float
) -> ChunkOrder:
    """Divides the samples into chunks of at most `chunk_bytes`, in the order of their first use.

    All chunks are kept if later epochs use samples again. Held-out samples come first, and their
    chunks are kept, because every evaluation needs them. The new samples of a batch are in one
    chunk, because the processes that share a batch must need the same chunk.

    Args:
        num_aux: number of captured layer outputs per token.
    """
    lengths = [len(sample.tokens) for sample in samples]
    batches: list[list[int]] = []
    for _, window in data.steps():
        batches += window
    used = list(chain.from_iterable(batches))
    uses_samples_again = len(used) > len(set(used))
    size = bytes_per_token(target, num_aux)
    if sum(lengths) * size <= chunk_bytes:
        single_chunk = list(range(len(samples)))
        return ChunkOrder([single_chunk], math.inf if uses_samples_again else 1)
    evaluated = data.held[:MAX_HELD_OUT]
    chunks: list[list[int]] = [[]]
    chunk_size = 0  # bytes of the last chunk
    placed: set[int] = set()
    held_out_groups = [[index] for index in evaluated]
    for batch in held_out_groups + batches:
        new = [index for index in batch if index not in placed]
        placed.update(new)
        new_size = sum(lengths[index] for index in new) * size
        if chunks[-1] and chunk_size + new_size > chunk_bytes:
            chunks.append([])
            chunk_size = 0
        chunks[-1] += new
        chunk_size += new_size
    evaluated_chunks = [chunk for chunk in chunks if not set(chunk).isdisjoint(evaluated)]
    return ChunkOrder(chunks, math.inf if uses_samples_again else len(evaluated_chunks))


class StreamedFeatures(Features):
    """Hidden states in one file per chunk of samples, computed when a chunk is first needed.

    A file has the tensors `<index>.hidden` and `<index>.<layer>` of each sample, bf16 [S, H]. In a
    group, each process computes a share of a chunk's batches, writes a file of this share, and
    waits for the other files. A single process forms the same batches, so the states are equal bit
    for bit.

    Args:
        aux_layers: 0-based layers whose outputs are captured, in ascending order.
        fingerprint: text that identifies the target's weights, the layers and the dtype.
    """

    def __init__(
        self,
        samples: list[Sample],
        stream: LayerStream,
        aux_layers: tuple[int, ...],
        order: ChunkOrder,
        directory: Path,
        ranks: Ranks,
        fingerprint: str,
    ) -> None:
        super().__init__(samples, stream.spec.hidden_size, len(aux_layers))
        self.stream = stream
        self.aux_layers = aux_layers
        self.chunks, self.kept = order
        self.directory = directory
        self.ranks = ranks
        self.fingerprint = fingerprint
        self._chunk_of: dict[int, int] = {}
        for number, chunk in enumerate(self.chunks):
            self._chunk_of |= dict.fromkeys(chunk, number)
        self._open: dict[int, dict[int, Any]] = {}  # chunk number -> sample index -> open file

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """Reads the states of sample `index`. Computes the sample's chunk if it has no file yet."""
        file = self.opened(self._chunk_of[index])[index]
        aux = [file.get_tensor(f"{index}.{layer}") for layer in self.aux_layers]
        return file.get_tensor(f"{index}.hidden"), torch.cat(aux, -1)

    def path(self, number: int) -> Path:
        """Path of a chunk's file, if a single process writes it.

        The name depends on target, layers, dtype and tokens, so that files of other runs are not
        used by mistake.
        """
        tokens = [(index, self.samples[index].tokens) for index in sorted(self.chunks[number])]
        content = repr((self.fingerprint, tokens))
        digest = hashlib.sha256(content.encode()).hexdigest()
        return self.directory / f"chunk-{number:04d}-{digest[:16]}.safetensors"

    def files(self, number: int) -> list[Path]:
        """Lists the files of a chunk, whatever number of processes wrote them.

        The list is empty while a file is missing.
        """
        path = self.path(number)
        if path.is_file():
            return [path]
        for first in path.parent.glob(f"{path.stem}.0-of-*.safetensors"):
            # The number of processes is in the name: chunk-0001-<digest>.0-of-<count>.safetensors.
            count = int(first.suffixes[0].rpartition("-")[2])
            files = [_file_of(path, rank, count) for rank in range(count)]
            if all(file.is_file() for file in files):
                return files
        return []

    def opened(self, number: int) -> dict[int, Any]:
        """Opens the files of a chunk, and computes the chunk if it has no files.

        Returns the open file of each sample, by sample index. Raises TrtspecError if a file is
        damaged.
        """
        if number not in self._open:
            if not self.files(number):
                self._compute(number)
            self._open[number] = {}
            for path in self.files(number):
                try:
                    file = safe_open(path, "pt")
                except (OSError, SafetensorError) as error:
                    message = f"TS-FEATURES-DUMP {path} is damaged ({error})"
                    raise TrtspecError(message, "remove it, and run the command again") from None
                for name in file.keys():  # noqa: SIM118
                    self._open[number][int(name.partition(".")[0])] = file
        return self._open[number]

    def _compute(self, number: int) -> None:
        """Writes this process's file of a chunk, and waits for the files of the other processes.

        Removes the chunks that training has passed.
        """
        ranks = self.ranks
        path = self.path(number)
        # The chunk just before stays, because a resumed run may begin some steps earlier.
        for passed in range(number - 1):
            if passed >= self.kept:
                self._open.pop(passed, None)
                if ranks.main:
                    for file in self.files(passed):
                        file.unlink(missing_ok=True)
        tokens = sum(len(self.samples[index].tokens) for index in self.chunks[number])
        layers = self.stream.num_layers
        say(
            f"Chunk {number + 1} of {len(self.chunks)}: "
            f"{tokens:,} tokens through the target's {layers} layers"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        own_path = _file_of(path, ranks.rank, ranks.size)
        for unfinished in path.parent.glob(f".{own_path.name}.*.partial"):
            unfinished.unlink()
        if not own_path.is_file():
            self._write(own_path, sorted(self.chunks[number]))
        # The wait needs no limit, because the launcher ends every process if one dies.
        while not self.files(number):
            time.sleep(POLL_S)

    def _write(self, path: Path, indices: list[int]) -> None:
        """Computes the states of this process's share of the samples, and writes them to `path`.

        A kill leaves no file at `path`.
        """
        stream = self.stream
        ranks = self.ranks
        lengths = {index: len(self.samples[index].tokens) for index in indices}
        # Every process forms the same batches. Process r computes batch r, r + size, and so on.
        every_group = list(similar_length(list(lengths.values())))
        groups = []
        for positions in every_group[ranks.rank :: ranks.size]:
            groups.append([indices[position] for position in positions])
        batches = [padded([self.samples[index].tokens for index in group]) for group in groups]
        layout: dict[str, tuple[str, tuple[int, ...]]] = {}
        for index in chain.from_iterable(groups):
            for name in ("hidden", *self.aux_layers):
                layout[f"{index}.{name}"] = ("BF16", (lengths[index], self.hidden_size))

        def keep(name: str, number: int, output: Tensor) -> None:
            """Writes the rows of batch `number` without their padding."""
            for row, index in enumerate(groups[number]):
                file.write(f"{index}.{name}", output[row, : lengths[index]].to(torch.bfloat16))

        def on_output(layer: int, number: int, output: Tensor) -> None:
            """Keeps the outputs of captured layers."""
            if layer in self.aux_layers:
                keep(str(layer), number, output)

        # Half of this process's share of the free memory. The layers need the rest.
        budget = machine.free_memory() / 2 / ranks.local_size
        states_name = PlainName(f"states-{ranks.rank}")
        states_path = self.directory / states_name
        size = (self.hidden_size, stream.dtype)
        try:
            with (
                ShardFile(path, layout) as file,
                States(batches, *size, budget=budget, directory=states_path) as states,
            ):
                stream.embed(batches, states)
                stream.run(batches, states, on_output=on_output)
                norm = stream.model_without_layers("norm.weight").norm
                with torch.inference_mode():
                    for number in range(len(batches)):
                        last = states.get(number).to(stream.device)
                        keep("hidden", number, norm(last))
        finally:
            remove_folder(self.directory, states_name)


def _file_of(path: Path, rank: int, count: int) -> Path:
    """Path of the file that process `rank` of `count` writes for the chunk `path`."""
    return path if count == 1 else path.with_name(f"{path.stem}.{rank}-of-{count}.safetensors")
