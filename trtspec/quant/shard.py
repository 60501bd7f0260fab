"""One output shard: read, decode, quantize, write; memory holds one group of linears that share a scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trtspec.checkpoint.tensors import LazyTensors
from trtspec.checkpoint.writer import ShardFile
from trtspec.errors import TrtspecError
from trtspec.quant import nvfp4
from trtspec.quant.decode import decoded
from trtspec.quant.input_scales import InputScales
from trtspec.quant.plan import ShardPlan, Weight, weight_class
from trtspec.quant.policy import Policy, shared_partners
from trtspec.report import file_sha256
from trtspec.specs import ModelSpec

ERROR_ROWS = 64  # the rows of each tensor on which the rounding error is measured


class ShardConverter:
    """Converts shards of one checkpoint; holds open files and options, no tensors between calls."""

    def __init__(self, tensors: LazyTensors, spec: ModelSpec, policy: Policy, scales: InputScales) -> None:
        self.tensors, self.spec, self.policy, self.scales = tensors, spec, policy, scales

    def convert(self, plan: ShardPlan, output: Path, report: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Writes output/plan.shard and returns the journal's record of it; `report` gets source bytes as they are done.

        Raises TrtspecError naming the tensor that cannot be converted; then no shard is left behind.
        """
        path = output / plan.shard
        file, statistics = ShardFile(path, plan.layout()), Statistics()
        try:
            for group in _groups(plan):
                if group[0].action == "quantize":
                    self._quantize(group, file, statistics)
                elif group[0].action == "decode":
                    file.write(group[0].name, self._load(group[0].name))
                else:
                    file.write_chunks(group[0].name, self.tensors.chunks(group[0].name))
                if report:
                    report(sum(weight.bytes_in for weight in group))
            file.finish()
        except BaseException:
            file.temporary.unlink(missing_ok=True)
            raise
        actions = [weight.action for weight in plan.weights]
        return {
            "bytes": path.stat().st_size,
            "sha256": file_sha256(path),
            "quantized": actions.count("quantize"),
            "decoded": actions.count("decode"),
            "copied": actions.count("copy"),
            **statistics.record(),
        }

    def _load(self, name: str) -> torch.Tensor:
        try:
            return decoded(self.tensors, self.spec, name)
        except TrtspecError as error:
            raise TrtspecError(f"{name}: {error.message}", error.remedy) from None

    def _quantize(self, group: list[Weight], file: ShardFile, statistics: Statistics) -> None:
        """All of `group` are in this shard and share their scales, with each other and with partners elsewhere."""
        weights = {weight.module: self._load(weight.name) for weight in group}
        maxima = {module: nvfp4.block_amax(weight) for module, weight in weights.items()}
        partners = [name for name in shared_partners(group[0].module) if self._is_quantized(name)]
        amax = torch.stack([value.amax().float() for value in maxima.values()])
        for module in partners:
            if module not in weights:  # in another shard: read for its maximum only
                amax = torch.cat([amax, nvfp4.block_amax(self._load(f"{module}.weight")).amax().float().view(1)])
        input_scale = torch.tensor(self.scales.scale([group[0].module, *partners]))
        for module, weight in weights.items():
            try:
                packed = nvfp4.quantize(weight, amax.amax(), maxima[module])
            except TrtspecError as error:
                raise TrtspecError(f"{module}.weight: {error.message}", error.remedy) from None
            file.write(f"{module}.weight", packed.packed)
            file.write(f"{module}.weight_scale", packed.scale)
            file.write(f"{module}.weight_scale_2", packed.scale_2)
            file.write(f"{module}.input_scale", input_scale)
            statistics.add(module, weight, maxima[module], packed)

    def _is_quantized(self, module: str) -> bool:
        stored = self.tensors.checkpoint.tensors
        return self.policy.quantizes(module) and (f"{module}.weight" in stored or f"{module}.weight_packed" in stored)


def _groups(plan: ShardPlan) -> list[list[Weight]]:
    """Weights in file order; those of this shard that share a scale stand together."""
    here, groups, seen = {weight.name: weight for weight in plan.weights}, [], set()
    for weight in plan.weights:
        if weight.name in seen:
            continue
        others = (
            [f"{module}.weight" for module in shared_partners(weight.module)] if weight.action == "quantize" else []
        )
        group = [weight, *(here[name] for name in others if name in here and here[name].action == "quantize")]
        seen |= {member.name for member in group}
        groups.append(group)
    return groups


class Statistics:
    """Rounding error and empty blocks, by class of linear."""

    def __init__(self) -> None:
        self.classes: dict[str, dict[str, float]] = {}
        self.zero_tensors: list[str] = []

    def add(self, module: str, weight: torch.Tensor, maxima: torch.Tensor, packed: nvfp4.NVFP4Tensor) -> None:
        rows = min(ERROR_ROWS, weight.shape[0])
        part = nvfp4.NVFP4Tensor(packed.packed[:rows], packed.scale[:rows], packed.scale_2)
        original = weight[:rows].float()
        error = nvfp4.dequantize(part, torch.float32) - original
        zeros = int((maxima == 0).sum())
        if zeros == maxima.numel():
            self.zero_tensors.append(module)
        entry = self.classes.setdefault(
            weight_class(module), {"tensors": 0, "error": 0.0, "norm": 0.0, "blocks": 0, "zero_blocks": 0}
        )
        entry["tensors"] += 1
        entry["error"] += float(error.square().sum(dtype=torch.float64))
        entry["norm"] += float(original.square().sum(dtype=torch.float64))
        entry["blocks"] += maxima.numel()
        entry["zero_blocks"] += zeros

    def record(self) -> dict[str, Any]:
        return {"classes": self.classes, "zero_tensors": self.zero_tensors}
