"""One output shard: read, decode, quantize, write, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trtspec.checkpoint.tensors import LazyTensors
from trtspec.checkpoint.writer import ShardFile
from trtspec.errors import TrtspecError
from trtspec.formats import FP8_BLOCK_SIZE
from trtspec.quant.input_scales import InputScales
from trtspec.quant.packing import Rows, Scaling, TorchPacker
from trtspec.quant.pipeline import Part, Pipeline
from trtspec.quant.plan import ShardPlan, Weight, quantized_weight, weight_class
from trtspec.quant.policy import Policy, shared_partners
from trtspec.quant.steps import Group, Piece, Step, Task, steps
from trtspec.specs import ModelSpec

ERROR_ROWS = 64  # the rows of each tensor on which the rounding error is measured


class ShardConverter:
    """Converts shards of one checkpoint; holds open files, options and buffers, no tensors between calls."""

    def __init__(
        self, tensors: LazyTensors, spec: ModelSpec, policy: Policy, scales: InputScales, packer: TorchPacker
    ) -> None:
        self.tensors, self.policy, self.scales, self.packer = tensors, policy, scales, packer
        self.block = spec.quant.block_size or FP8_BLOCK_SIZE
        self.pipeline = Pipeline(tensors)

    def convert(
        self, plan: ShardPlan, output: Path, report: Callable[[int], None] | None = None
    ) -> tuple[Path, dict[str, Any]]:
        """Writes plan.shard under a temporary name; returns that and the journal's record, without its checksum.

        The caller publishes it. `report` gets source bytes as they are done. Raises TrtspecError naming the tensor
        that cannot be converted; then no file is left behind.
        """
        file, work = ShardFile(output / plan.shard, plan.layout()), _Work(self, report)
        try:
            self.pipeline.run(steps(plan, self._partners(plan)), work.compute, file.write_parts)
            for name, value in work.scalars.items():
                file.write(name, value)
            file.close()
        except BaseException:
            file.abandon()
            raise
        actions = [weight.action for weight in plan.weights]
        record = {"bytes": file.size, "quantized": actions.count("quantize"), "decoded": actions.count("decode")}
        return file.temporary, record | {"copied": actions.count("copy"), **work.statistics.record()}

    def _partners(self, plan: ShardPlan) -> dict[str, Weight]:
        """Quantized weights of other shards that share a scale with one of this shard."""
        here, found = {weight.name for weight in plan.weights}, {}
        for weight in plan.weights:
            if weight.action != "quantize":
                continue
            for name in (f"{module}.weight" for module in shared_partners(weight.module)):
                if name not in here and (partner := quantized_weight(self.tensors.checkpoint, name, self.policy)):
                    found[name] = partner
        return found

    def close(self) -> None:
        self.pipeline.close()


class _Work:
    """The state of one shard's conversion between steps."""

    def __init__(self, converter: ShardConverter, report: Callable[[int], None] | None) -> None:
        self.converter, self.packer, self.report = converter, converter.packer, report
        self.statistics, self.scalars = Statistics(), dict[str, torch.Tensor]()
        self._amax: dict[str, float] = {}
        self._scaling: tuple[Group, Scaling] | None = None
        self._zeros = 0

    def compute(self, step: Step, buffer: torch.Tensor, output: torch.Tensor) -> list[Part]:
        """Runs the step's tasks on its buffer; returns what to write, as views of `buffer` and `output`."""
        parts: list[Part] = []
        for task in step.tasks:
            piece = task.piece
            if task.kind == "copy":
                read = piece.reads[0]
                parts.append((piece.weight.name, piece.first, buffer[read.at : read.at + read.size].numpy().data))
                continue
            rows = self._rows(piece, buffer)
            if task.kind == "measure":
                self._measure(piece.weight, rows)
                continue
            if task.kind == "decode":
                view = output[: piece.count * piece.weight.shape[1] * 2]
                view.view(torch.bfloat16).view(rows.shape).copy_(self.packer.decode(rows))
                row = piece.weight.shape[1] * 2
                parts.append((piece.weight.name, piece.first * row, view.numpy().data))
                output = output[view.numel() :]
                continue
            used, packed = self._pack(task, rows, output)
            parts += packed
            output = output[used:]
        if self.report and step.done:
            self.report(step.done)
        return parts

    def _rows(self, piece: Piece, buffer: torch.Tensor) -> Rows:
        """The piece's stored tensors as views of the buffer."""
        weight, views = piece.weight, []
        for read, info in zip(piece.reads, weight.parts, strict=True):
            view = buffer[read.at : read.at + read.size].view(self.converter.tensors.dtype(info))
            views.append(view.view(-1, *info.shape[1:]) if info.shape else view)
        if weight.format.is_grouped_integer:
            if tuple(views[2].view(-1).tolist()) != weight.shape:
                text = f"{weight.module}.weight_shape is {views[2].tolist()}, the packed tensor holds {[*weight.shape]}"
                raise TrtspecError(text, "download the checkpoint again")
            return Rows(weight.format, views[0], views[1])
        if weight.format.has_block_scales:
            height, width = block = self.converter.block
            rows, columns = weight.shape
            if views[1].shape != (-(-rows // height), -(-columns // width)) or piece.first % height:
                text = f"{weight.module}.weight_scale_inv {list(views[1].shape)} does not fit {list(weight.shape)}"
                raise TrtspecError(f"{text} in blocks of {height}x{width}", "check weight_block_size in config.json")
            bands = slice(piece.first // height, -(-(piece.first + piece.count) // height))
            return Rows(weight.format, views[0], views[1][bands], block)
        return Rows(weight.format, views[0])

    def _measure(self, weight: Weight, rows: Rows) -> None:
        amax = self.packer.amax(rows)
        if not math.isfinite(amax):
            text = f"{weight.name}: the weight holds NaN or infinity"
            raise TrtspecError(text, "find the tensor with `trtspec inspect --json`")
        self._amax[weight.module] = max(amax, self._amax.get(weight.module, 0.0))

    def _scaling_of(self, group: Group) -> Scaling:
        """Kept from one piece to the next of a group; the group's scalars are noted when it begins."""
        if self._scaling is None or self._scaling[0] is not group:
            scaling = Scaling.of(max(self._amax.pop(module) for module in group.modules))
            input_scale = torch.tensor(self.converter.scales.scale(group.modules))
            for weight in group.weights:
                self.scalars[f"{weight.module}.weight_scale_2"] = scaling.scale_2
                self.scalars[f"{weight.module}.input_scale"] = input_scale
            self._scaling = group, scaling
        return self._scaling[1]

    def _pack(self, task: Task, rows: Rows, output: torch.Tensor) -> tuple[int, list[Part]]:
        piece, scaling = task.piece, self._scaling_of(task.group)
        count, columns = rows.shape
        middle, end = count * columns // 2, count * columns // 2 + count * columns // 16
        packed, scale = output[:middle].view(count, -1), output[middle:end].view(count, -1)
        zeros = self.packer.pack(rows, scaling, packed, scale)
        if piece.first == 0:
            head = min(ERROR_ROWS, count)
            sums = self.packer.errors(rows.head(head), scaling, packed[:head], scale[:head])
            self.statistics.add(piece.weight.module, *sums)
            self._zeros = 0
        self._zeros += zeros
        if piece.first + count == piece.weight.shape[0]:
            self.statistics.blocks(piece.weight.module, piece.weight.shape[0] * columns // 16, self._zeros)
        stem, view = piece.weight.module, output.numpy().data
        return end, [
            (f"{stem}.weight", piece.first * columns // 2, view[:middle]),
            (f"{stem}.weight_scale", piece.first * columns // 16, view[middle:end]),
        ]


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
