"""A weight by its plain name, decoded to BF16, whatever the checkpoint stores it as."""

from __future__ import annotations

from collections.abc import Container, Mapping

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
SIDE_PARTS = ("weight_scale", "weight_shape", "weight_scale_inv", "weight_scale_2", "input_scale")


def stored_format(names: Container[str], name: str) -> WeightFormat:
    """How `name` (ending in .weight) is stored, told by the tensors that are there, not by the config."""
    stem = name.removesuffix(".weight")
    if f"{stem}.weight_packed" in names:
        return "int4"
    if f"{stem}.weight_scale_inv" in names:
        return "fp8-block"
    if f"{stem}.weight_scale_2" in names:
        return "nvfp4"
    return "bf16"


def parts_of(names: Container[str], name: str) -> list[str]:
    """The stored tensors that make up the weight `name`; raises TrtspecError naming one that is missing."""
    stem, format = name.removesuffix(".weight"), stored_format(names, name)
    parts = [f"{stem}.{suffix}" for suffix in PARTS[format]] if name.endswith(".weight") else [name]
    for part in parts:
        if part not in names:
            raise TrtspecError(f"{part} is missing, so {name} cannot be decoded", "download the checkpoint again")
    return parts


def plain_names(stored: Mapping[str, object]) -> dict[str, str]:
    """Plain name -> the stored tensor that carries its values, in stored order; scales and shapes are not names."""
    found = {}
    for name in stored:
        stem, _, suffix = name.rpartition(".")
        if suffix in SIDE_PARTS and (f"{stem}.weight" in stored or f"{stem}.weight_packed" in stored):
            continue
        found[f"{stem}.weight" if suffix == "weight_packed" else name] = name
    return found


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
