"""A weight by its plain name, decoded to BF16, whatever the checkpoint stores it as."""

from __future__ import annotations

import torch

from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError
from trtspec.quant import fp8_block, int4, nvfp4
from trtspec.specs import ModelSpec, WeightFormat

PARTS: dict[WeightFormat, tuple[str, ...]] = {
    "nvfp4": ("weight", "weight_scale", "weight_scale_2"),
    "int4": ("weight_packed", "weight_scale", "weight_shape"),
    "fp8-block": ("weight", "weight_scale_inv"),
    "bf16": ("weight",),
}


def stored_format(tensors: LazyTensors, name: str) -> WeightFormat:
    """How `name` (ending in .weight) is stored, told by the tensors that are there, not by the config."""
    stem = name.removesuffix(".weight")
    if f"{stem}.weight_packed" in tensors:
        return "int4"
    if f"{stem}.weight_scale_inv" in tensors:
        return "fp8-block"
    if f"{stem}.weight_scale_2" in tensors:
        return "nvfp4"
    return "bf16"


def parts_of(tensors: LazyTensors, name: str) -> list[str]:
    """The stored tensors that make up the weight `name`; raises TrtspecError naming one that is missing."""
    stem, format = name.removesuffix(".weight"), stored_format(tensors, name)
    names = [f"{stem}.{suffix}" for suffix in PARTS[format]] if name.endswith(".weight") else [name]
    for part in names:
        if part not in tensors:
            raise TrtspecError(
                f"{tensors.checkpoint.path}: {part} is missing, so {name} cannot be decoded",
                "download the checkpoint again",
            )
    return names


def decoded(tensors: LazyTensors, spec: ModelSpec, name: str) -> torch.Tensor:
    """The tensor `name`: quantized weights as bf16 [N, K], everything else in its own dtype."""
    format = stored_format(tensors, name)
    stored = [tensors[part] for part in parts_of(tensors, name)]
    if format == "int4":
        return int4.dequantize(*stored)
    if format == "fp8-block":
        weight, scale_inv = stored
        return fp8_block.dequantize(weight, scale_inv, spec.quant.block_size or (128, 128))
    if format == "nvfp4":
        packed, scale, scale_2 = stored
        return nvfp4.dequantize(nvfp4.NVFP4Tensor(packed, scale, scale_2))
    return stored[0]
