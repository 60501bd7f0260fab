"""Decoding of stored weights to BF16, and packing to NVFP4, in torch on a CPU or a GPU.

TorchPacker defines the bytes. It also packs formats that the C kernel does not support.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtspec.checkpoint.tensors import DTYPES, LazyTensors
from trtspec.errors import TrtspecError
from trtspec.formats import FP8_BLOCK_SIZE, WeightFormat, stored_weight
from trtspec.quant import nvfp4
from trtspec.quant.native import BLOCK, Array, Rows, Scaling

DECODE_CHUNK = 1 << 18  # values decoded at a time, so that intermediates stay in the CPU's cache
PACK_CHUNK = 1 << 23  # values packed at a time, which limits the size of float32 intermediates


def decoded(tensors: LazyTensors, name: str) -> torch.Tensor:
    """Returns the tensor `name`. Quantized weights become bf16, others keep their dtype."""
    format, parts = stored_weight(tensors.checkpoint.tensors, name)
    stored = [tensors[part.name] for part in parts]
    return DECODERS[format](*stored)


def dequantize_int4(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, weight_shape: torch.Tensor
) -> torch.Tensor:
    """Decodes the INT4 weights of Kimi-K2-Thinking and later releases to bf16 [N, K].

    A weight is (code - 8) * scale, rounded to bf16 once. The format is the symmetric
    `pack-quantized` of compressed-tensors, which rounds in the same way. Raises TrtspecError if the
    shapes contradict each other.

    Args:
        weight_packed: int32 [N, K/8], eight codes per integer, the first code in the lowest bits.
        weight_scale: bf16 [N, K/group], scale of each group of values of a row.
        weight_shape: two integers, N and K.
    """
    rows, columns = (int(size) for size in weight_shape.tolist())
    groups = weight_scale.shape[1]
    packed_shape = (rows, -(-columns // 8))  # rounded up
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
        # The two nibbles of each byte become the two bytes of an int16, the low nibble first.
        wide = packed[chunk].to(torch.int16)
        wide = wide.bitwise_or_(wide << 4)
        codes = wide.bitwise_and_(0x0F0F).view(torch.int8)
        signed = codes[:, :columns].sub_(8)
        values = signed.to(torch.bfloat16).view(grouped_shape)
        scale = weight_scale[chunk].unsqueeze(-1)
        torch.mul(values, scale, out=result[chunk].view(grouped_shape))
    return result


def dequantize_fp8_block(weight: torch.Tensor, weight_scale_inv: torch.Tensor) -> torch.Tensor:
    """Decodes the FP8 weights of Kimi-K2-Instruct and DeepSeek-V3 to bf16 [N, K].

    A weight is value * scale, computed in float32. The last block of a row or column may be
    smaller.

    Args:
        weight: float8_e4m3fn [N, K].
        weight_scale_inv: float32 [ceil(N/128), ceil(K/128)], scale of each block of 128 x 128
            values. Despite its name, it is the multiplier.
    """
    height, width = FP8_BLOCK_SIZE
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.device)
    scales = weight_scale_inv.float().repeat_interleave(width, dim=1)[:, :columns]
    codes = weight.contiguous().view(torch.uint8)
    # Looking up the float32 value of each E4M3 byte is several times faster than torch's
    # conversion.
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


# Function that decodes the stored tensors of a weight, in the order of `format.parts`, to bf16
# [N, K]. Plain weights keep their dtype. Every storage format that can be read has an entry.
DECODERS: dict[WeightFormat, Callable[..., torch.Tensor]] = {
    WeightFormat.BF16: lambda weight: weight,
    WeightFormat.INT4: dequantize_int4,
    WeightFormat.FP8_BLOCK: dequantize_fp8_block,
    WeightFormat.NVFP4: lambda *parts: nvfp4.dequantize(nvfp4.NVFP4Tensor(*parts)),
}


class TorchPacker:
    """Packer in torch, which defines the bytes of the other packers.

    Args:
        weight_scales: rule for the block scales, "max" or "mse".
        device: torch device of the computation.
    """

    name = "torch"

    def __init__(self, weight_scales: str = "max", device: str = "cpu") -> None:
        self.weight_scales = weight_scales
        self.device = torch.device(device)

    def translates(self, rows: Rows) -> bool:
        """Returns False, because this packer decodes all quantized rows to BF16 first."""
        return False

    def decode(self, rows: Rows, result: Array) -> None:
        """Decodes rows into `result` [n, K], which holds BF16 values as uint16."""
        _tensor(result, "BF16").copy_(self.decoded(rows))

    def decoded(self, rows: Rows) -> torch.Tensor:
        """Returns the decoded rows, bf16 [n, K] on the device. Plain rows keep their dtype."""
        values = _tensor(rows.values, rows.dtype).to(self.device)
        if rows.scale is None:
            return values
        parts = [values, _tensor(rows.scale, rows.scale_dtype).to(self.device)]
        if "shape" in rows.format.storage.kinds:
            parts.append(torch.tensor(rows.shape))
        return DECODERS[rows.format](*parts)

    def amax(self, rows: Rows) -> float:
        """Returns max|w|. NaN or infinity if the weight is not finite."""
        return float(self.decoded(rows).abs().amax())

    def pack(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> int:
        """Packs rows into `packed` and `scale`. Returns the number of zero blocks."""
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
        """Quantizes decoded rows of a weight, [n, K], with the scaling of its group."""
        amax = torch.tensor(scaling.amax, device=self.device)
        return nvfp4.quantize(weight, amax, self.weight_scales)

    def errors(
        self, rows: Rows, scaling: Scaling, packed: Array, scale: Array
    ) -> tuple[float, float]:
        """Returns two sums of squares: differences of packed rows and source, and the source."""
        scale_2 = torch.tensor(scaling.scale_2)
        tensor = nvfp4.NVFP4Tensor(_tensor(packed, "U8"), _tensor(scale, "F8_E4M3"), scale_2)
        original = self.decoded(rows).cpu().float()
        difference = nvfp4.dequantize(tensor, torch.float32) - original
        error = difference.square().sum(dtype=torch.float64)
        norm = original.square().sum(dtype=torch.float64)
        return float(error), float(norm)


def _tensor(array: Array, dtype: str) -> torch.Tensor:
    """Returns a tensor that shares the array's memory. `dtype`: safetensors code of its dtype."""
    return torch.from_numpy(array.view("u1")).view(DTYPES[dtype])
