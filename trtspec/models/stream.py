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
# Decoding one layer ahead takes the memory of two layers of weights, of the tensors in work, and as
# much again for everything else.
PREFETCH_MEMORY_LAYERS = 4
FORWARD_TOKENS = 2048  # per forward of the target: large enough for full matrix multiplications


class LayerStream:
    """The layers of a checkpoint in any published format, loaded on demand, run over batches.

    With `load_ahead` the next layer is decoded while one computes. It is on if
    PREFETCH_MEMORY_LAYERS fit into the free memory. Raises TrtspecError for a checkpoint in which
    `trtspec inspect` finds an error.

    Args:
        dtype: the compute type.
        activation: how NVFP4 linears compute. "decoded": as plain weights.
        threads: how many decode the parts of a layer side by side.
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
        self._step: tuple[torch.Size, AttentionStep] | None = None

    @property
    def num_layers(self) -> int:
        return self.spec.num_hidden_layers

    def close(self) -> None:
        self._tensors.close()

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def layer_bytes(self, index: int) -> int:
        """Bytes of decoder layer `index` in the compute type."""
        with torch.device("meta"):
            layer = DecoderLayer(self.spec, index)
        elements = sum(parameter.numel() for parameter in layer.parameters())
        return elements * self.dtype.itemsize

    def load(self, index: int) -> DecoderLayer:
        """Decoder layer `index` with its weights, on the CPU."""
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
        """Embeddings, final norm and lm_head on the device. `spec` is the whole model's.

        With `parameters`: these alone on the device, the others on the meta device.
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
        """Puts the embeddings of all batches (int64 [B, T]) into `states`.

        The table is held for this call only.
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
        """Takes `states` (inputs of layer `first`) through all further layers, one at a time.

        Args:
            on_layer: called with (index, layer) before the first batch.
            on_output: called with (index, batch, x), each layer output [B, T, H] on the device.
            after_layer: called with (index) after the last batch.
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
                # The layer is freed before another one is loaded.
                del layer
                after_layer(index)

    def attention_step(self, tokens: Tensor) -> AttentionStep:
        """Positions and mask of a plain causal forward over tokens [B, T].

        The step of the last shape is kept, for runs of equal batches.
        """
        if self._step is None or self._step[0] != tokens.shape:
            step = batch_step(tokens.to(self.device), self._rope, self.dtype)
            self._step = tokens.shape, step
        return self._step[1]


class StatesRecord(TypedDict):
    """A sealed generation of `States`. Empty before the first."""

    generation: NotRequired[int]
    bytes: NotRequired[int]
    sha256: NotRequired[str]


class States:
    """The hidden states [B, T, H] of all batches between two layers.

    One generation is read while the next one is written. The states stay in memory if all of them
    fit `budget` bytes, else in a file of `directory`. `durable` keeps every finished generation as
    a file too, so that a killed run can `restore` it.
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
        self.offsets: list[int] = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        self.in_memory = self.bytes <= budget
        self.on_disk = durable or not self.in_memory
        if self.on_disk and directory is None:
            raise ValueError("states that exceed their budget, or that must last, need a directory")
        self._memory: dict[int, Tensor] = {}
        self._generation = -1
        self._source: BinaryIO | None = None
        self._target: BinaryIO | None = None
        self._sha256 = hashlib.sha256()
        self.record: StatesRecord = {}

    @property
    def bytes(self) -> int:
        return self.offsets[-1]

    def path(self, generation: int) -> Path:
        assert self.directory is not None
        return self.directory / f"states-{generation:03d}.bin"

    def begin(self, generation: int) -> None:
        """Starts to write a generation, while the one before it is read."""
        if self.on_disk:
            path = self.path(generation).with_suffix(".partial")
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._target = create(path)
            self._sha256 = hashlib.sha256()
        self._generation = generation

    def put(self, number: int, states: Tensor) -> None:
        """Writes batch `number` of the new generation. Batches come in order."""
        states = states.detach().to("cpu", self.dtype)
        if self.in_memory:
            self._memory[number] = states
        if self._target is not None:
            raw = states.contiguous().view(torch.uint8).numpy().reshape(-1).data
            self._sha256.update(raw)
            with writing(self.path(self._generation)):
                self._target.write(raw)

    def get(self, number: int) -> Tensor:
        """Batch `number` of the finished generation, on the CPU."""
        if self.in_memory:
            return self._memory[number]
        assert self._source is not None
        return self._read(self._source, number)

    def seal(self) -> None:
        """Makes the written generation the one that is read. `restore` takes its `record`.

        A durable file is fsynced and stays until `drop_older`. Without `durable` the older file is
        removed at once.
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
        """Reads from a sealed generation. False if its file does not match the record."""
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
        """Removes the files of all generations but the newest sealed one."""
        if self.directory is not None:
            for path in self.directory.glob("states-*"):
                if path != self.path(self._generation):
                    path.unlink()

    def close(self) -> None:
        """Closes the files and leaves them in place."""
        for file in (self._source, self._target):
            if file is not None:
                # `put` has reported bytes that could not be written.
                with suppress(OSError):
                    file.close()
        self._source = self._target = None

    def __enter__(self) -> States:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, file: BinaryIO, number: int) -> Tensor:
        begin = self.offsets[number]
        end = self.offsets[number + 1]
        raw = torch.empty(end - begin, dtype=torch.uint8)
        file.seek(begin)
        if file.readinto(raw.numpy().data) < len(raw):  # type: ignore[attr-defined]
            message = f"{self.directory}: the states end early"
            raise TrtspecError(message, "run again with `restart`")
        return raw.view(self.dtype).view(self.shapes[number])


def similar_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields batches of indices of `lengths`, short ones first.

    A batch has at most FORWARD_TOKENS padded tokens.
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
    """The sequences as int64 [B, longest], zeros on the right."""
    tokens = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    return tokens
