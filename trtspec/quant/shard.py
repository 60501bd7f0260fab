"""One output shard: read, decode, quantize, write, in bounded memory.

The work is cut into steps of bounded size; read, compute and write of them overlap, one thread each. Linears that share
a scale need two passes, their common maximum first. What fits is read once and kept for both; larger tensors go by in
tiles of rows, twice. Buffers are anonymous maps kept for the whole job: a fresh allocation of this size would cost a
page fault per 4 KiB, several times the arithmetic.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from trtspec.checkpoint.headers import DTYPE_BITS, ShardReader, TensorInfo
from trtspec.checkpoint.writer import ShardFile
from trtspec.errors import TrtspecError
from trtspec.quant.packing import BLOCK, Array, Packer, Rows, Scaling, as_array, first_not_finite, not_finite
from trtspec.quant.plan import Group, ShardPlan, Weight, weight_class

ERROR_ROWS = 64  # the rows of each tensor on which the rounding error is measured
SLOTS = 4  # one being computed, the others read ahead or written behind
HUGE = 2 << 20
Part = tuple[str, int, memoryview]  # tensor, byte offset in it, bytes
Kind = Literal["measure", "pack", "decode", "copy"]
HOLD_BYTES = 64 << 20  # a group of linears up to this size is read once
TILE_BYTES = 16 << 20  # one piece of a larger tensor
BATCH_BYTES = 6 << 20  # small tensors are gathered into steps of this size
ROW_UNIT = 128  # tiles begin at whole FP8 blocks
ALIGNMENT = 64


class ShardConverter:
    """Converts shards of one checkpoint; holds open files and buffers, no tensors between calls."""

    def __init__(self, reader: ShardReader, packer: Packer) -> None:
        self.packer = packer
        self.pipeline = Pipeline(reader)

    def convert(
        self, plan: ShardPlan, output: Path, report: Callable[[int], None] | None = None
    ) -> tuple[Path, dict[str, Any]]:
        """Writes plan.shard under a temporary name; returns that and the journal's record, without its checksum.

        The caller publishes it. `report` gets source bytes as they are done. Raises TrtspecError naming the tensor
        that cannot be converted; then no file is left behind.
        """
        file, work = ShardFile(output / plan.shard, plan.layout()), _Work(self.packer, report)
        try:
            read = self.pipeline.run(steps(plan), work.compute, file.write_parts)
            file.write_parts(work.scalars)
            file.close()
        except BaseException:
            file.abandon()
            raise
        actions = [weight.action for weight in plan.weights]
        record = {"bytes": file.size, "quantized": actions.count("quantize"), "decoded": actions.count("decode")}
        return file.temporary, record | {"copied": actions.count("copy"), "read": read, **work.statistics.record()}

    def source_digest(self, plan: ShardPlan) -> str:
        """The record's `read` for the source as it is now; reads all that the shard is converted from."""
        return self.pipeline.run(steps(plan), lambda step, data, output: [], lambda parts: None)

    def close(self) -> None:
        self.pipeline.close()


@dataclass(frozen=True)
class Read:
    """`size` bytes of a stored tensor from byte `begin` of its file on, to offset `at` of the step's buffer."""

    info: TensorInfo
    begin: int
    size: int
    at: int


@dataclass(frozen=True)
class Piece:
    """Rows of a weight, or for a copy bytes of a tensor: `first` and `count` count rows or bytes."""

    weight: Weight
    first: int
    count: int
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class Task:
    kind: Kind
    group: Group
    piece: Piece


@dataclass
class Step:
    """`size` bytes to read, `out` bytes that the tasks write, `done` source bytes finished with it."""

    tasks: list[Task] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    size: int = 0
    out: int = 0
    done: int = 0

    def piece(self, weight: Weight, first: int, count: int) -> Piece:
        reads = []
        for info, begin, size in _ranges(weight, first, count):
            reads.append(Read(info, info.begin + begin, size, self.size))
            self.size += -(-size // ALIGNMENT) * ALIGNMENT
        self.reads += reads
        return Piece(weight, first, count, tuple(reads))

    def add(self, kind: Kind, group: Group, piece: Piece) -> None:
        self.tasks.append(Task(kind, group, piece))
        self.out += out_bytes(kind, piece)


def steps(plan: ShardPlan) -> Iterator[Step]:
    """The shard's steps in order; every weight is finished by the last task that names it."""
    step = Step()
    for group in plan.groups:
        size = sum(weight.bytes_in for weight in group.members)
        if group.action == "quantize" and size <= HOLD_BYTES:
            pieces = [step.piece(weight, 0, weight.shape[0]) for weight in group.members]
            for piece in pieces:
                step.add("measure", group, piece)
            for piece in pieces[: len(group.weights)]:
                step.add("pack", group, piece)
            step.done += sum(weight.bytes_in for weight in group.weights)
        else:
            for kind, weight, first, count, done in _passes(group):
                step.add(kind, group, step.piece(weight, first, count))
                step.done += done
                if step.size >= BATCH_BYTES:
                    yield step
                    step = Step()
        if step.size >= BATCH_BYTES:
            yield step
            step = Step()
    if step.tasks:
        yield step


def _passes(group: Group) -> Iterator[tuple[Kind, Weight, int, int, int]]:
    """Kind, weight, first, count and finished source bytes of each piece of a group that goes by in tiles."""
    action = group.action
    if action == "copy":
        weight = group.weights[0]
        for first in range(0, max(weight.bytes_in, 1), TILE_BYTES):
            count = min(TILE_BYTES, weight.bytes_in - first)
            yield "copy", weight, first, count, count
        return
    if action == "quantize":
        for weight in group.members:
            for first, count in _tiles(weight):
                yield "measure", weight, first, count, 0
    kind: Kind = "pack" if action == "quantize" else "decode"
    for weight in group.weights:
        for first, count in _tiles(weight):
            yield kind, weight, first, count, weight.bytes_in if first + count == weight.shape[0] else 0


def _tiles(weight: Weight) -> Iterator[tuple[int, int]]:
    rows = weight.shape[0]
    per_row = max(1, weight.parts[0].nbytes // max(rows, 1))
    unit = math.lcm(ROW_UNIT, weight.block[0])
    height = max(unit, TILE_BYTES // per_row // unit * unit)
    for first in range(0, rows, height):
        yield first, min(height, rows - first)


def _ranges(weight: Weight, first: int, count: int) -> Iterator[tuple[TensorInfo, int, int]]:
    """Tensor, first byte and byte count of each part that these rows need; scales of blocks and shapes come whole."""
    if weight.action == "copy":
        yield weight.parts[0], first, count
        return
    for part, kind in zip(weight.parts, weight.format.storage.kinds, strict=False):
        if kind in ("values", "groups"):
            row = part.nbytes // weight.shape[0]
            yield part, first * row, count * row
        else:
            yield part, 0, part.nbytes


def out_bytes(kind: Kind, piece: Piece) -> int:
    """What a task writes: copied bytes, BF16 values, or packed nibbles with their scales (9/16 of a byte per value)."""
    if kind in ("measure", "copy"):
        return 0 if kind == "measure" else piece.count
    values = piece.count * piece.weight.shape[1]
    return values * 2 if kind == "decode" else values // 2 + values // 16


class Pipeline:
    """`run` reads steps ahead, lets `compute` turn each into parts, and writes these behind."""

    def __init__(self, reader: ShardReader) -> None:
        self.source = reader
        self.slots = [Slot() for _ in range(SLOTS)]
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="write")

    def run(
        self,
        steps: Iterator[Step],
        compute: Callable[[Step, Array, Array], list[Part]],
        write: Callable[[list[Part]], None],
    ) -> str:
        """A digest of all that was read. Raises what reading, computing or writing raised first; then nothing of it
        goes on."""
        free, digest = deque(self.slots), xxhash.xxh3_128()
        reading: deque[tuple[Step, Slot, Future[tuple[Array, bytes]]]] = deque()
        writing: deque[tuple[Slot, Future[None]]] = deque()
        try:
            while True:
                while free and (step := next(steps, None)) is not None:
                    slot = free.popleft()
                    reading.append((step, slot, self.reader.submit(self._read, step, slot)))
                if not reading:
                    break
                step, slot, future = reading.popleft()
                data, read = future.result()
                digest.update(read)
                parts = compute(step, data, slot.output.take(step.out))
                writing.append((slot, self.writer.submit(write, parts)))
                while writing and (not free or writing[0][1].done()):
                    slot, written = writing.popleft()
                    written.result()
                    free.append(slot)
            for _, written in writing:
                written.result()
        finally:
            pending: list[Future[Any]] = [entry[2] for entry in reading]
            pending += [entry[1] for entry in writing]
            for unfinished in pending:
                unfinished.cancel()
            for unfinished in pending:  # the buffers are used again
                if not unfinished.cancelled():
                    unfinished.exception()
        return digest.hexdigest()

    def _read(self, step: Step, slot: Slot) -> tuple[Array, bytes]:
        """The step's bytes and their digest, taken while they are in the cache."""
        buffer, digest = slot.input.take(step.size), xxhash.xxh3_128()
        view = buffer.data
        for read in step.reads:
            part = view[read.at : read.at + read.size]
            self.source.read_bytes(read.info, read.begin, part)
            digest.update(part)
        return buffer, digest.digest()

    def close(self) -> None:
        self.reader.shutdown()
        self.writer.shutdown()
        self.source.close()


class Slot:
    """The buffers of one step on its way: stored bytes in, converted bytes out."""

    def __init__(self) -> None:
        self.input, self.output = Arena(), Arena()


class Arena:
    """A reusable flat uint8 buffer that grows to what is asked for."""

    def __init__(self) -> None:
        self._array: Array = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> Array:
        if self._array.size < size:
            memory = mmap.mmap(-1, -(-size // HUGE) * HUGE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._array = np.frombuffer(memory, dtype=np.uint8)
        return self._array[:size]


class _Work:
    """The state of one shard's conversion between steps."""

    def __init__(self, packer: Packer, report: Callable[[int], None] | None) -> None:
        self.packer, self.report = packer, report
        self.statistics, self.scalars = Statistics(), list[Part]()
        self._amax: dict[str, float] = {}
        self._scaling: tuple[Group, Scaling] | None = None
        self._zeros = 0

    def compute(self, step: Step, data: Array, output: Array) -> list[Part]:
        """Runs the step's tasks on the bytes that it read; returns what to write, as views of `data` and `output`."""
        parts: list[Part] = []
        for task in step.tasks:
            if task.kind == "copy":
                parts.append(self._copy(task.piece, data))
                continue
            rows = _rows(task.piece, data)
            if task.kind == "measure":
                self._measure(task.piece, rows)
                continue
            used, written = (self._decode if task.kind == "decode" else self._pack)(task, rows, output)
            parts += written
            output = output[used:]
        if self.report and step.done:
            self.report(step.done)
        return parts

    def _copy(self, piece: Piece, data: Array) -> Part:
        read = piece.reads[0]
        view = data[read.at : read.at + read.size]
        if not self.packer.is_finite(view, read.info.dtype):
            found, width = first_not_finite(view, read.info.dtype), DTYPE_BITS[read.info.dtype] // 8
            raise not_finite(read.info.name, read.info.shard, read.info.shape, piece.first // width + (found or 0))
        return piece.weight.name, piece.first, view.data

    def _decode(self, task: Task, rows: Rows, output: Array) -> tuple[int, list[Part]]:
        weight, row = task.piece.weight, task.piece.weight.shape[1] * 2
        view = output[: task.piece.count * row]
        self.packer.decode(rows, view.view("u2").reshape(rows.shape))
        if not self.packer.is_finite(view, "BF16"):
            raise _refusal(task.piece, view)
        return view.size, [(weight.name, task.piece.first * row, view.data)]

    def _measure(self, piece: Piece, rows: Rows) -> None:
        amax, module = self.packer.amax(rows), piece.weight.module
        if not math.isfinite(amax):
            values: Array = np.empty(rows.shape, dtype="u2")
            self.packer.decode(rows, values)
            raise _refusal(piece, values.reshape(-1).view("u1"))
        self._amax[module] = max(amax, self._amax.get(module, 0.0))

    def _scaling_of(self, group: Group) -> Scaling:
        """Kept from one piece to the next of a group; the group's scalars are noted when it begins."""
        if self._scaling is None or self._scaling[0] is not group:
            scaling = Scaling.of(max(self._amax.pop(weight.module) for weight in group.members))
            values = {"weight_scale_2": scaling.scale_2, "input_scale": group.input_scale}
            for weight in group.weights:
                for suffix, value in values.items():
                    self.scalars.append((f"{weight.module}.{suffix}", 0, memoryview(struct.pack("<f", value))))
            self._scaling = group, scaling
        return self._scaling[1]

    def _pack(self, task: Task, rows: Rows, output: Array) -> tuple[int, list[Part]]:
        piece, scaling = task.piece, self._scaling_of(task.group)
        (count, columns), stem = rows.shape, piece.weight.module
        middle, end = count * columns // 2, count * columns // 2 + count * columns // BLOCK
        packed, scale = output[:middle].reshape(count, -1), output[middle:end].reshape(count, -1)
        zeros = self.packer.pack(rows, scaling, packed, scale)
        if piece.first == 0:
            head = min(ERROR_ROWS, count)
            self.statistics.add(stem, *self.packer.errors(rows.head(head), scaling, packed[:head], scale[:head]))
            self._zeros = 0
        self._zeros += zeros
        if piece.first + count == piece.weight.shape[0]:
            self.statistics.blocks(stem, piece.weight.shape[0] * columns // BLOCK, self._zeros)
        return end, [
            (f"{stem}.weight", piece.first * columns // 2, output[:middle].data),
            (f"{stem}.weight_scale", piece.first * columns // BLOCK, output[middle:end].data),
        ]


def _rows(piece: Piece, data: Array) -> Rows:
    """The piece's stored tensors as views of the bytes that were read."""
    weight, views = piece.weight, list[Array]()
    for read, info in zip(piece.reads, weight.parts, strict=True):
        view = data[read.at : read.at + read.size]
        views.append(as_array(view, info.dtype, info.shape[-1]))
    values, codes = views[0], [info.dtype for info in weight.parts]
    for view, info, kind in zip(views, weight.parts, weight.format.storage.kinds, strict=False):
        if kind == "shape" and tuple(view.reshape(-1).tolist()) != weight.shape:
            text = f"{info.name} is {view.tolist()}, the packed tensor holds {[*weight.shape]}"
            raise TrtspecError(text, "download the checkpoint again")
    if len(views) == 1:
        return Rows(weight.format, codes[0], values)
    scale = views[1]
    if bool(np.signbit(scale).any() if scale.dtype.kind == "f" else (scale >> 8 * scale.itemsize - 1).any()):
        text = f"{weight.parts[1].name} in {weight.parts[1].shard} holds a negative scale"
        raise TrtspecError(text, "download that file again", "TS-TARGET-BAD-SCALE")
    if weight.format.has_block_scales:
        height = weight.block[0]
        scale = scale[piece.first // height : -(-(piece.first + piece.count) // height)]
    return Rows(weight.format, codes[0], values, scale, codes[1], weight.block)


def _refusal(piece: Piece, values: Array) -> TrtspecError:
    """For NaN or infinity among the BF16 `values` (uint8) that the piece's rows decode to."""
    weight, found = piece.weight, first_not_finite(values, "BF16")
    index = None if found is None else piece.first * weight.shape[1] + found
    return not_finite(weight.name, weight.parts[0].shard, weight.shape, index)


class Statistics:
    """Rounding error and empty blocks, by class of linear."""

    def __init__(self) -> None:
        self.classes: dict[str, dict[str, float]] = {}
        self.zero_tensors: list[str] = []

    def add(self, module: str, error: float, norm: float) -> None:
        """Squared error and squared norm of a tensor's first rows."""
        entry = self._entry(module)
        entry["tensors"] += 1
        entry["error"] += error
        entry["norm"] += norm

    def blocks(self, module: str, count: int, zeros: int) -> None:
        entry = self._entry(module)
        entry["blocks"] += count
        entry["zero_blocks"] += zeros
        if zeros == count:
            self.zero_tensors.append(module)

    def _entry(self, module: str) -> dict[str, float]:
        empty = {"tensors": 0, "error": 0.0, "norm": 0.0, "blocks": 0, "zero_blocks": 0}
        return self.classes.setdefault(weight_class(module), empty)

    def record(self) -> dict[str, Any]:
        return {"classes": self.classes, "zero_tensors": self.zero_tensors}
