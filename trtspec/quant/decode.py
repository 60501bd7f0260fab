"""A weight by its plain name, decoded to BF16, whatever the checkpoint stores it as."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError
from trtspec.formats import FP8_BLOCK_SIZE, SIDE_PARTS, packed_format, stored_format
from trtspec.quant import fp8_block, int4, nvfp4
from trtspec.specs import ModelSpec


def parts_of(names: Container[str], name: str) -> list[str]:
    """The stored tensors that make up the weight `name`; raises TrtspecError naming one that is missing."""
    stem = name.removesuffix(".weight")
    parts = [f"{stem}.{suffix}" for suffix in stored_format(names, stem).parts] if name.endswith(".weight") else [name]
    for part in parts:
        if part not in names:
            raise TrtspecError(f"{part} is missing, so {name} cannot be decoded", "download the checkpoint again")
    return parts


def plain_names(stored: Mapping[str, object]) -> dict[str, str]:
    """Plain name -> the stored tensor that carries its values, in stored order; scales and shapes are not names."""
    found = {}
    for name in stored:
        stem, _, suffix = name.rpartition(".")
        if suffix in SIDE_PARTS and f"{stem}.{stored_format(stored, stem).parts[0]}" in stored:
            continue
        found[f"{stem}.weight" if packed_format(suffix) else name] = name
    return found


def decoded(tensors: LazyTensors, spec: ModelSpec, name: str) -> torch.Tensor:
    """The tensor `name`: quantized weights as bf16 [N, K], everything else in its own dtype."""
    format = stored_format(tensors, name.removesuffix(".weight"))
    stored = [tensors[part] for part in parts_of(tensors, name)]
    if format.is_grouped_integer:
        return int4.dequantize(*stored)
    if format.has_block_scales:
        weight, scale_inv = stored
        return fp8_block.dequantize(weight, scale_inv, spec.quant.block_size or FP8_BLOCK_SIZE)
    if format.is_fp4:
        packed, scale, scale_2 = stored
        return nvfp4.dequantize(nvfp4.NVFP4Tensor(packed, scale, scale_2))
    return stored[0]
