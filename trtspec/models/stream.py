"""A target run one decoder layer at a time: hidden states on machines that cannot hold its weights.

Layers come from the checkpoint one after the other, and every batch passes a layer before the next
one. Memory holds one layer, the next one if it fits, and the hidden states, which go to files
beyond a budget. The arithmetic is `KimiModel`'s own: for the same batches all outputs equal the
whole model's bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, NotRequired, TypedDict

import torch
from torch import Tensor

from trtspec import machine
from trtspec.checkpoint.target_problems import require_target
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError
from trtspec.models import fast
from trtspec.models.attention import AttentionStep, batch_step
from trtspec.models.k2 import DecoderLayer, KimiModel
from trtspec.models.rope import RotaryEmbedding
from trtspec.models.weights import Activation, install, layer_layout, layout
from trtspec.report import create, file_sha256, fsync, writing

OUTER_WEIGHTS = ("embed.weight", "norm.weight", "lm_head.weight")
# Free memory, in layers, from which the next layer is decoded ahead: two layers of weights, the
# tensors that are being decoded, and as much again for everything else.
PREFETCH_MEMORY_LAYERS = 4
FORWARD_TOKENS = 2048  # tokens of a forward pass, enough for efficient matrix multiplications


class LayerStream:
    """A target whose decoder layers are loaded one at a time and run over batches.

    The checkpoint may be in any published format. The next layer is decoded while one computes if
    PREFETCH_MEMORY_LAYERS layers fit into the free memory (attribute `load_ahead`). Raises
    TrtspecError if `trtspec inspect` finds an error in the checkpoint.

    Args:
        dtype: compute dtype.
        activation: computation of NVFP4 linears. "decoded" computes them as plain linears.
        threads: number of threads that decode the tensors of a layer.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        activation: Activation = "w4a4",
        threads: int = 1,
    ) -> None:
        target = require_target(path)
        self.checkpoint = target.checkpoint
        self.spec = target.spec
        self.dtype = dtype
        self.device = device
        self.activation = activation
        self.threads = threads
        self._tensors = LazyTensors(self.checkpoint)
        free_bytes = machine.free_memory()
        last_layer_bytes = self.layer_bytes(self.num_layers - 1)
        self.load_ahead = free_bytes > PREFETCH_MEMORY_LAYERS * last_layer_bytes
        self._rope = RotaryEmbedding(self.spec.rope, self.spec.qk_rope_head_dim, interleaved=True)
        # Shape of the last batch, and its attention step.
        self._step: tuple[torch.Size, AttentionStep] | None = None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the target."""
        return self.spec.num_hidden_layers

    def close(self) -> None:
        self._tensors.close()

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def layer_bytes(self, index: int) -> int:
        """Size of decoder layer `index` in the compute dtype, in bytes."""
        with torch.device("meta"):
            layer = DecoderLayer(self.spec, index)
        elements = sum(parameter.numel() for parameter in layer.parameters())
        return elements * self.dtype.itemsize

    def load(self, index: int) -> DecoderLayer:
        """Loads decoder layer `index` with its weights, on the CPU."""
        with torch.device("meta"):
            layer = DecoderLayer(self.spec, index)
        with ThreadPoolExecutor(self.threads) as pool:
            for mapping in layer_layout(self.spec, index):
                install(
                    layer,
                    mapping,
                    self._tensors,
                    dtype=self.dtype,
                    activation=self.activation,
                    pool=pool,
                )
        return layer.eval().requires_grad_(False)

    def model_without_layers(self, *parameters: str) -> KimiModel:
        """Loads the model without decoder layers: embedding, final norm and lm_head on the device.

        Args:
            parameters: names of OUTER_WEIGHTS that are loaded. The others stay on the meta device.
                Empty: all are loaded.
        """
        with torch.device("meta"):
            model = KimiModel(self.spec, layers=0)
        for mapping in layout(self.spec):
            if mapping.parameter in (parameters or OUTER_WEIGHTS):
                install(
                    model,
                    mapping,
                    self._tensors,
                    dtype=self.dtype,
                    device=self.device,
                    activation="decoded",
                )
        return model.eval().requires_grad_(False)

    @torch.inference_mode()
    def embed(self, batches: Sequence[Tensor], states: States) -> None:
        """Writes the embeddings of all batches (token ids, int64 [B, T]) to `states`.

        The embedding table is in memory during this call only.
        """
        embed = self.model_without_layers("embed.weight").embed
        states.begin(0)
        for number, tokens in enumerate(batches):
            states.put(number, embed(tokens.to(self.device)))
        states.seal()

    def run(
        self,
        batches: Sequence[Tensor],
        states: States,
        *,
        first: int = 0,
        on_layer: Callable[[int, DecoderLayer], None] = lambda _, __: None,
        on_output: Callable[[int, int, Tensor], None] = lambda _, __, ___: None,
        after_layer: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Runs layer `first` and all later layers over the batches, one layer after the other.

        `states` holds the inputs of layer `first`. The outputs of each layer replace its inputs.

        Args:
            batches: token ids of each batch, int64 [B, T].
            on_layer: function that gets the index and the module of a layer before the first batch.
            on_output: function that gets the layer's index, the batch's number and the output
                [B, T, H] on the device.
            after_layer: function that gets the layer's index after the last batch.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="next-layer") as ahead:
            pending: Future[DecoderLayer] | None = None
            for index in range(first, self.num_layers):
                layer = self.load(index) if pending is None else pending.result()
                layer = layer.to(self.device)
                fast.after_loading(layer)
                pending = None
                if self.load_ahead and index + 1 < self.num_layers:
                    pending = ahead.submit(self.load, index + 1)
                on_layer(index, layer)
                with torch.inference_mode():
                    states.begin(index + 1)
                    for number, tokens in enumerate(batches):
                        x = states.get(number).to(self.device)
                        output = layer(x, self.attention_step(tokens))
                        states.put(number, output)
                        on_output(index, number, output)
                    states.seal()
                # The memory of the layer must be free before another layer is loaded.
                del layer
                after_layer(index)

    def attention_step(self, tokens: Tensor) -> AttentionStep:
        """Builds positions and mask of a plain causal forward pass over tokens [B, T].

        The step depends on the shape only. The last step is kept, because consecutive batches often
        have equal shapes.
        """
        if self._step is None or self._step[0] != tokens.shape:
            step = batch_step(tokens.to(self.device), self._rope, self.dtype)
            self._step = tokens.shape, step
        return self._step[1]


class StatesRecord(TypedDict):
    """Facts about the newest file of `States`. Empty before a file is finished.

    Args:
        generation: number of layers that have computed the states.
        bytes: size of the file in bytes.
        sha256: digest of the file.
    """

    generation: NotRequired[int]
    bytes: NotRequired[int]
    sha256: NotRequired[str]


class States:
    """Storage for the hidden states [B, T, H] of all batches between two layers.

    A generation is the states of all batches after one layer. One generation is read while the next
    is written.

    Args:
        batches: token ids of each batch, int64 [B, T].
        width: hidden size H.
        budget: maximum number of bytes in memory. Larger states are in a file of `directory`.
        durable: whether every finished generation is also a file, so that a killed run can
            `restore` it.
    """

    def __init__(
        self,
        batches: Sequence[Tensor],
        width: int,
        dtype: torch.dtype,
        *,
        budget: float = math.inf,
        directory: Path | None = None,
        durable: bool = False,
    ) -> None:
        self.shapes = [(*batch.shape, width) for batch in batches]
        self.dtype = dtype
        self.directory = directory
        self.durable = durable
        sizes = [math.prod(shape) * dtype.itemsize for shape in self.shapes]
        # Offset of each batch in a file, in bytes, and the size of the file.
        self.offsets: list[int] = list(accumulate(sizes, initial=0))
        self.in_memory = self.bytes <= budget
        self.on_disk = durable or not self.in_memory
        if self.on_disk and directory is None:
            raise ValueError("states that exceed their budget, or that must last, need a directory")
        self._memory: dict[int, Tensor] = {}
        self._generation = -1
        self._source: BinaryIO | None = None
        self._target: BinaryIO | None = None
        self._sha256 = hashlib.sha256()
        self.record: StatesRecord = {}  # facts about the newest file, for `restore`

    @property
    def bytes(self) -> int:
        """Size of one generation in bytes."""
        return self.offsets[-1]

    def path(self, generation: int) -> Path:
        """Path of the file of a generation."""
        assert self.directory is not None
        return self.directory / f"states-{generation:03d}.bin"

    def begin(self, generation: int) -> None:
        """Starts to write a generation. The generation before it can still be read."""
        if self.on_disk:
            path = self.path(generation).with_suffix(".partial")
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._target = create(path)
            self._sha256 = hashlib.sha256()
        self._generation = generation

    def put(self, number: int, states: Tensor) -> None:
        """Writes the states of batch `number` of the new generation. Batches must come in order."""
        states = states.detach().to("cpu", self.dtype)
        if self.in_memory:
            self._memory[number] = states
        if self._target is not None:
            raw = states.contiguous().view(torch.uint8).numpy().reshape(-1).data
            self._sha256.update(raw)
            with writing(self.path(self._generation)):
                self._target.write(raw)

    def get(self, number: int) -> Tensor:
        """Reads the states of batch `number` of the finished generation, to the CPU."""
        if self.in_memory:
            return self._memory[number]
        assert self._source is not None
        return self._read(self._source, number)

    def seal(self) -> None:
        """Finishes the written generation, so that `get` reads this generation.

        Sets `record` for `restore` if the generation is a file. A durable file is fsynced, and
        older files stay until `drop_older`. Without `durable` older files are removed.
        """
        if self._target is None:
            return
        path = self.path(self._generation)
        with writing(path):
            self._target.flush()
            if self.durable:
                os.fsync(self._target.fileno())
            path.with_suffix(".partial").replace(path)
        if self._source is not None:
            self._source.close()
        self._source = self._target
        self._target = None
        self.record = {
            "generation": self._generation,
            "bytes": self.bytes,
            "sha256": self._sha256.hexdigest(),
        }
        if self.durable:
            fsync(path.parent)
        else:
            self.drop_older()

    def restore(self, record: StatesRecord) -> bool:
        """Continues from a finished generation of an earlier run.

        Returns False if the generation's file is missing or does not match the record.

        Args:
            record: value of `record` after the generation was finished.
        """
        generation = record["generation"]
        path = self.path(generation)
        if not path.is_file():
            return False
        if not path.stat().st_size == record["bytes"] == self.bytes:
            return False
        if file_sha256(path) != record["sha256"]:
            return False
        self._source = path.open("rb")
        self._generation = generation
        if self.in_memory:
            numbers = range(len(self.shapes))
            self._memory = {number: self._read(self._source, number) for number in numbers}
        return True

    def drop_older(self) -> None:
        """Removes the files of all generations except the newest finished generation."""
        if self.directory is not None:
            for path in self.directory.glob("states-*"):
                if path != self.path(self._generation):
                    path.unlink()

    def close(self) -> None:
        """Closes the files without removing them."""
        for file in (self._source, self._target):
            if file is not None:
                # `put` has already raised an error about bytes that could not be written.
                with suppress(OSError):
                    file.close()
        self._source = self._target = None

    def __enter__(self) -> States:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, file: BinaryIO, number: int) -> Tensor:
        """Reads the states of batch `number` from a generation's file."""
        begin = self.offsets[number]
        end = self.offsets[number + 1]
        raw = torch.empty(end - begin, dtype=torch.uint8)
        file.seek(begin)
        if file.readinto(raw.numpy().data) < len(raw):  # type: ignore[attr-defined]
            message = f"{self.directory}: a file of hidden states is too short"
            raise TrtspecError(message, "run again with `restart`")
        return raw.view(self.dtype).view(self.shapes[number])


def similar_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields batches of sequences of similar length, as indices of `lengths`, short ones first.

    A batch has at most FORWARD_TOKENS tokens with its padding, or a single sequence.

    Args:
        lengths: number of tokens of each sequence.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batch and (len(batch) + 1) * lengths[index] > FORWARD_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Returns the sequences as one tensor, int64 [B, longest], padded with zeros on the right."""
    tokens = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    return tokens
