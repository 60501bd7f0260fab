"""A weight by its plain name, decoded to BF16, whatever the checkpoint stores it as."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trtspec.checkpoint.tensors import LazyTensors
from trtspec.formats import FP8_BLOCK_SIZE, WeightFormat, stored_format
from trtspec.quant import fp8_block, int4, nvfp4
from trtspec.quant.plan import parts_of
from trtspec.specs import ModelSpec

Decoder = Callable[[Sequence[torch.Tensor], tuple[int, int]], torch.Tensor]
# the stored parts and the block size of config.json -> bf16 [N, K]; a format that weights are read from has a row here
DECODERS: dict[WeightFormat, Decoder] = {
    WeightFormat.BF16: lambda parts, _: parts[0],  # in its own dtype
    WeightFormat.INT4: lambda parts, _: int4.dequantize(*parts),
    WeightFormat.FP8_BLOCK: lambda parts, block: fp8_block.dequantize(parts[0], parts[1], block),
    WeightFormat.NVFP4: lambda parts, _: nvfp4.dequantize(nvfp4.NVFP4Tensor(*parts)),
}


def dequantize(
    format: WeightFormat, parts: Sequence[torch.Tensor], block: tuple[int, int] = FP8_BLOCK_SIZE
) -> torch.Tensor:
    """bf16 [N, K] of a weight, or of some of its rows, from its stored parts in the order of `format.parts`."""
    return DECODERS[format](parts, block)


def decoded(tensors: LazyTensors, spec: ModelSpec, name: str) -> torch.Tensor:
    """The tensor `name`: quantized weights as bf16 [N, K], everything else in its own dtype."""
    format = stored_format(tensors, name.removesuffix(".weight"))
    stored = [tensors[part] for part in parts_of(tensors, name)]
    return dequantize(format, stored, spec.quant.block_size or FP8_BLOCK_SIZE)
