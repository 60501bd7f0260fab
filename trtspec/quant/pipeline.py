"""A shard's conversion cut into steps of bounded size; read, compute and write of them overlapped, one thread each.

Linears that share a scale need two passes, their common maximum first. What fits is read once and kept for both; larger
tensors go by in tiles of rows, twice. Buffers are anonymous maps kept for the whole job: a fresh allocation of this
size would cost a page fault per 4 KiB, several times the arithmetic.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import xxhash

from trtspec.checkpoint.headers import ShardReader, TensorInfo
from trtspec.quant.packing import Array
from trtspec.quant.plan import Group, ShardPlan, Weight

SLOTS = 4  # one being computed, the others read ahead or written behind
HUGE = 2 << 20

Part = tuple[str, int, memoryview]  # tensor, byte offset in it, bytes


Kind = Literal["measure", "pack", "decode", "copy"]
HOLD_BYTES = 64 << 20  # a group of linears up to this size is read once
TILE_BYTES = 16 << 20  # one piece of a larger tensor
BATCH_BYTES = 6 << 20  # small tensors are gathered into steps of this size
ROW_UNIT = 128  # tiles begin at whole FP8 blocks
ALIGNMENT = 64


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


def out_bytes(kind: Kind, piece: Piece) -> int:
    """What a task writes: copied bytes, BF16 values, or packed nibbles with their scales (9/16 of a byte per value)."""
    if kind in ("measure", "copy"):
        return 0 if kind == "measure" else piece.count
    values = piece.count * piece.weight.shape[1]
    return values * 2 if kind == "decode" else values // 2 + values // 16


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


class Slot:
    """The buffers of one step on its way: stored bytes in, converted bytes out."""

    def __init__(self) -> None:
        self.input, self.output = Arena(), Arena()


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
