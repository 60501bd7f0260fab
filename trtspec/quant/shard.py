"""One output shard: read, decode, quantize, write, in bounded memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trtspec.checkpoint.headers import DTYPE_BITS, ShardReader
from trtspec.checkpoint.writer import ShardFile
from trtspec.errors import TrtspecError
from trtspec.quant.finite import first_not_finite, not_finite
from trtspec.quant.packing import BLOCK, Array, Packer, Rows, Scaling, as_array
from trtspec.quant.pipeline import Part, Piece, Pipeline, Step, Task, steps
from trtspec.quant.plan import Group, ShardPlan, weight_class

ERROR_ROWS = 64  # the rows of each tensor on which the rounding error is measured


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
