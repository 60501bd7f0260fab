"""Weights in torch, on a CPU or a GPU: decoded to BF16 from any checkpoint format, and packed.

The packer here defines the bytes. It also packs the formats that the C kernel does not know.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtspec.checkpoint.tensors import DTYPES, LazyTensors
from trtspec.errors import TrtspecError
from trtspec.formats import FP8_BLOCK_SIZE, WeightFormat, stored_weight
from trtspec.quant import nvfp4
from trtspec.quant.native import BLOCK, Array, Rows, Scaling

DECODE_CHUNK = 1 << 18  # values decoded at a time, so that intermediates stay in the cache
PACK_CHUNK = 1 << 23  # values packed at a time, so that float32 intermediates are those of few rows


def decoded(tensors: LazyTensors, name: str) -> torch.Tensor:
    """The tensor `name`: quantized weights as bf16 [N, K], all others in their stored dtype."""
    format, parts = stored_weight(tensors.checkpoint.tensors, name)
    stored = [tensors[part.name] for part in parts]
    return DECODERS[format](*stored)


def dequantize_int4(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, weight_shape: torch.Tensor
) -> torch.Tensor:
    """Decodes the INT4 of Kimi-K2-Thinking and later to bf16 [N, K] = (code - 8) * scale.

    The format is compressed-tensors' `pack-quantized`, symmetric. The product is rounded to BF16
    once, as compressed-tensors does it. Raises TrtspecError if the shapes contradict each other.

    Args:
        weight_packed: int32 [N, K/8], eight codes each, the first in the lowest bits.
        weight_scale: bf16 [N, K/group], one scale for each group of 32 values of a row.
        weight_shape: two integers, N and K.
    """
    rows, columns = (int(size) for size in weight_shape.tolist())
    groups = weight_scale.shape[1]
    packed_shape = (rows, -(-columns // 8))
    if weight_packed.shape != packed_shape or weight_scale.shape[0] != rows or columns % groups:
        message = (
            f"INT4 tensors do not belong together: weight_packed {list(weight_packed.shape)}, "
            f"weight_scale {list(weight_scale.shape)}, weight_shape {[rows, columns]}"
        )
        raise TrtspecError(message, "download the checkpoint again")
    result = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight_packed.device)
    packed = weight_packed.contiguous().view(torch.uint8)
    grouped_shape = (-1, groups, columns // groups)
    step = max(1, DECODE_CHUNK // columns)
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        # Each byte spreads over the two bytes of an int16, the low nibble first.
        wide = packed[chunk].to(torch.int16)
        codes = wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F).view(torch.int8)
        values = codes[:, :columns].sub_(8).to(torch.bfloat16).view(grouped_shape)
        scale = weight_scale[chunk].unsqueeze(-1)
        torch.mul(values, scale, out=result[chunk].view(grouped_shape))
    return result


def dequantize_fp8_block(weight: torch.Tensor, weight_scale_inv: torch.Tensor) -> torch.Tensor:
    """Decodes the FP8 of Kimi-K2-Instruct and DeepSeek-V3 to bf16 [N, K] = weight * scale.

    The product is computed in float32. The last block of a row or column may be narrower.

    Args:
        weight: float8_e4m3fn [N, K].
        weight_scale_inv: float32 [ceil(N/128), ceil(K/128)], one scale for each block of 128x128.
            It multiplies, despite its name.
    """
    height, width = FP8_BLOCK_SIZE
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.device)
    scales = weight_scale_inv.float().repeat_interleave(width, dim=1)[:, :columns]
    codes = weight.contiguous().view(torch.uint8)
    # float32 of each E4M3 byte: looking it up is several times faster than torch's conversion
    all_codes = torch.arange(256, device=weight.device).to(torch.uint8)
    table = all_codes.view(torch.float8_e4m3fn).float()
    step = max(1, DECODE_CHUNK // columns)
    bands = zip(codes.split(height), result.split(height), scales, strict=True)
    for band_codes, band_result, scale in bands:
        chunks = zip(band_codes.split(step), band_result.split(step), strict=True)
        for chunk, target in chunks:
            indices = chunk.reshape(-1).to(torch.int32)
            values = table.index_select(0, indices).view(chunk.shape)
            target.copy_(values.mul_(scale))
    return result


# From the stored parts, in the order of `format.parts`, to bf16 [N, K]. Plain weights keep their
# dtype. A format that weights are read from has a row here.
DECODERS: dict[WeightFormat, Callable[..., torch.Tensor]] = {
    WeightFormat.BF16: lambda weight: weight,
    WeightFormat.INT4: dequantize_int4,
    WeightFormat.FP8_BLOCK: dequantize_fp8_block,
    WeightFormat.NVFP4: lambda *parts: nvfp4.dequantize(nvfp4.NVFP4Tensor(*parts)),
}


class TorchPacker:
    """Packs and decodes on the torch device `device`, by the definition of each format."""

    name = "torch"

    def __init__(self, weight_scales: str = "max", device: str = "cpu") -> None:
        self.weight_scales = weight_scales
        self.device = torch.device(device)

    def translates(self, rows: Rows) -> bool:
        return False

    def decode(self, rows: Rows, result: Array) -> None:
        _tensor(result, "BF16").copy_(self.decoded(rows))

    def decoded(self, rows: Rows) -> torch.Tensor:
        """bf16 [n, K] on the device. Plain rows keep their dtype."""
        values = _tensor(rows.values, rows.dtype).to(self.device)
        if rows.scale is None:
            return values
        parts = [values, _tensor(rows.scale, rows.scale_dtype).to(self.device)]
        if "shape" in rows.format.storage.kinds:
            parts.append(torch.tensor(rows.shape))
        return DECODERS[rows.format](*parts)

    def amax(self, rows: Rows) -> float:
        return float(self.decoded(rows).abs().amax())

    def pack(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> int:
        weight = self.decoded(rows)
        zero_blocks = 0
        step = max(1, PACK_CHUNK // weight.shape[1])
        for start in range(0, len(weight), step):
            chunk = slice(start, start + step)
            result = self.quantized(weight[chunk], scaling)
            _tensor(packed[chunk], "U8").copy_(result.packed)
            _tensor(scale[chunk], "U8").copy_(result.scale.view(torch.uint8))
            blocks = weight[chunk].reshape(-1, BLOCK)
            zero_blocks += int((blocks == 0).all(-1).sum())
        return zero_blocks

    def quantized(self, weight: torch.Tensor, scaling: Scaling) -> nvfp4.NVFP4Tensor:
        """Quantizes [n, K] rows of a weight."""
        amax = torch.tensor(scaling.amax, device=self.device)
        return nvfp4.quantize(weight, amax, self.weight_scales)

    def errors(
        self, rows: Rows, scaling: Scaling, packed: Array, scale: Array
    ) -> tuple[float, float]:
        scale_2 = torch.tensor(scaling.scale_2)
        tensor = nvfp4.NVFP4Tensor(_tensor(packed, "U8"), _tensor(scale, "F8_E4M3"), scale_2)
        original = self.decoded(rows).cpu().float()
        difference = nvfp4.dequantize(tensor, torch.float32) - original
        error = difference.square().sum(dtype=torch.float64)
        norm = original.square().sum(dtype=torch.float64)
        return float(error), float(norm)


def _tensor(array: Array, dtype: str) -> torch.Tensor:
    """The array's bytes as a tensor of a safetensors dtype, without a copy."""
    return torch.from_numpy(array.view("u1")).view(DTYPES[dtype])
