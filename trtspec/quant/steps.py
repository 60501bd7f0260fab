"""A shard's conversion cut into steps of bounded size: what to read into one buffer, and what to do with it.

Linears that share a scale need two passes, their common maximum first. What fits is read once and kept for both; larger
tensors go by in tiles of rows, twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from trtspec.checkpoint.headers import TensorInfo
from trtspec.quant.plan import ShardPlan, Weight
from trtspec.quant.policy import shared_partners

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
class Group:
    """Linears of this shard that share their scales, and their partners in other shards, read for the maximum only."""

    weights: tuple[Weight, ...]
    partners: tuple[Weight, ...] = ()

    @property
    def modules(self) -> list[str]:
        return [weight.module for weight in (*self.weights, *self.partners)]


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


def groups(plan: ShardPlan, elsewhere: dict[str, Weight]) -> Iterator[Group]:
    """Groups in file order; `elsewhere` has the quantized weights of other shards by name."""
    here = {weight.name: weight for weight in plan.weights if weight.action == "quantize"}
    seen = set()
    for weight in plan.weights:
        if weight.name in seen:
            continue
        others = [f"{module}.weight" for module in shared_partners(weight.module)] if weight.name in here else []
        members = (weight, *(here[name] for name in others if name in here))
        seen |= {member.name for member in members}
        yield Group(members, tuple(elsewhere[name] for name in others if name in elsewhere and name not in here))


def steps(plan: ShardPlan, elsewhere: dict[str, Weight]) -> Iterator[Step]:
    """The shard's steps in order; every weight is finished by the last task that names it."""
    step = Step()
    for group in groups(plan, elsewhere):
        action = group.weights[0].action
        size = sum(weight.bytes_in for weight in (*group.weights, *group.partners))
        if action == "quantize" and size <= HOLD_BYTES:
            pieces = [step.piece(weight, 0, weight.shape[0]) for weight in (*group.weights, *group.partners)]
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
    action = group.weights[0].action
    if action == "copy":
        weight = group.weights[0]
        for first in range(0, max(weight.bytes_in, 1), TILE_BYTES):
            count = min(TILE_BYTES, weight.bytes_in - first)
            yield "copy", weight, first, count, count
        return
    if action == "quantize":
        for weight in (*group.weights, *group.partners):
            for first, count in _tiles(weight):
                yield "measure", weight, first, count, 0
    kind: Kind = "pack" if action == "quantize" else "decode"
    for weight in group.weights:
        for first, count in _tiles(weight):
            yield kind, weight, first, count, weight.bytes_in if first + count == weight.shape[0] else 0


def _tiles(weight: Weight) -> Iterator[tuple[int, int]]:
    rows = weight.shape[0]
    per_row = max(1, weight.parts[0].nbytes // max(rows, 1))
    height = max(ROW_UNIT, TILE_BYTES // per_row // ROW_UNIT * ROW_UNIT)
    for first in range(0, rows, height):
        yield first, min(height, rows - first)


def _ranges(weight: Weight, first: int, count: int) -> Iterator[tuple[TensorInfo, int, int]]:
    """Tensor, first byte and byte count of each part that these rows need; scales of FP8 blocks come whole."""
    if weight.action == "copy":
        yield weight.parts[0], first, count
        return
    values, *scales = weight.parts
    row = values.nbytes // weight.shape[0]
    yield values, first * row, count * row
    if weight.format.is_grouped_integer:
        row = scales[0].nbytes // weight.shape[0]
        yield scales[0], first * row, count * row
        yield scales[1], 0, scales[1].nbytes
    elif scales:
        yield scales[0], 0, scales[0].nbytes
