"""Weights in torch: decoded to BF16, whatever the checkpoint stores them as, and packed, on a CPU or a GPU.

The packer here defines the bytes; it also packs what the C kernel does not know.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtspec.checkpoint.tensors import DTYPES, LazyTensors
from trtspec.errors import TrtspecError
from trtspec.formats import FP8_BLOCK_SIZE, WeightFormat, stored_weight
from trtspec.quant import nvfp4
from trtspec.quant.native import BLOCK, Array, Rows, Scaling

# the stored parts, in the order of `format.parts` -> bf16 [N, K]; a format that weights are read from has a row here
DECODERS: dict[WeightFormat, Callable[..., torch.Tensor]] = {
    WeightFormat.BF16: lambda weight: weight,  # in its own dtype
    WeightFormat.INT4: lambda *parts: dequantize_int4(*parts),
    WeightFormat.FP8_BLOCK: lambda *parts: dequantize_fp8_block(*parts),
    WeightFormat.NVFP4: lambda *parts: nvfp4.dequantize(nvfp4.NVFP4Tensor(*parts)),
}
CHUNK = 1 << 18  # values whose intermediates stay in the cache
PACK_CHUNK = 1 << 23  # values packed at a time


def decoded(tensors: LazyTensors, name: str) -> torch.Tensor:
    """The tensor `name`: quantized weights as bf16 [N, K], everything else in its own dtype."""
    format, parts = stored_weight(tensors.checkpoint.tensors, name)
    return DECODERS[format](*(tensors[part.name] for part in parts))


def dequantize_int4(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, weight_shape: torch.Tensor
) -> torch.Tensor:
    """INT4 as Kimi-K2-Thinking and later publish it: compressed-tensors `pack-quantized`, symmetric, group 32.

    int32 [N, K/8], bf16 [N, K/group], [N, K] as two integers -> bf16 [N, K] = (code - 8) * scale. Eight values, each
    plus 8, lie in one int32, the first in the lowest bits; a BF16 scale serves 32 values of a row.
    The product is rounded to BF16 once, as compressed-tensors does it.
    """
    rows, columns = (int(size) for size in weight_shape.tolist())
    groups = weight_scale.shape[1]
    if (
        weight_packed.shape != (rows, -(-columns // 8))
        or weight_scale.shape[0] != rows
        or columns % groups
    ):
        raise TrtspecError(
            f"INT4 tensors do not belong together: weight_packed {list(weight_packed.shape)}, "
            f"weight_scale {list(weight_scale.shape)}, weight_shape {[rows, columns]}",
            "download the checkpoint again",
        )
    result = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight_packed.device)
    packed = weight_packed.contiguous().view(torch.uint8)
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values = _nibbles(packed[part])[:, :columns].sub_(8).to(torch.bfloat16)
        scale = weight_scale[part].unsqueeze(-1)
        torch.mul(
            values.view(-1, groups, columns // groups),
            scale,
            out=result[part].view(-1, groups, columns // groups),
        )
    return result


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, b] -> int8 [n, 2b], low nibble first: each byte spreads over the two bytes of an int16."""
    wide = packed.to(torch.int16)
    return wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F).view(torch.int8)


def dequantize_fp8_block(weight: torch.Tensor, weight_scale_inv: torch.Tensor) -> torch.Tensor:
    """FP8 E4M3 with one FP32 scale per block of 128x128, as Kimi-K2-Instruct and DeepSeek-V3 publish their weights.

    float8_e4m3fn [N, K] and float32 [ceil(N/128), ceil(K/128)] -> bf16 [N, K] = weight * scale, in float32.
    Despite its name `weight_scale_inv` multiplies. The last block of a row or column may be narrower.
    """
    (rows, columns), (height, width) = weight.shape, FP8_BLOCK_SIZE
    result = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.device)
    scales = weight_scale_inv.float().repeat_interleave(width, dim=1)[:, :columns]
    codes = weight.contiguous().view(torch.uint8)
    # float32 of each E4M3 byte: looking it up is several times faster than torch's conversion
    table = (
        torch.arange(256, device=weight.device).to(torch.uint8).view(torch.float8_e4m3fn).float()
    )
    step = max(1, CHUNK // columns)
    for index, band in enumerate(zip(codes.split(height), result.split(height), strict=True)):
        for part, target in zip(*(tensor.split(step) for tensor in band), strict=True):
            values = table.index_select(0, part.reshape(-1).to(torch.int32)).view(part.shape)
            target.copy_(values.mul_(scales[index]))
    return result


def _tensor(array: Array, dtype: str) -> torch.Tensor:
    return torch.from_numpy(array.view("u1")).view(DTYPES[dtype])


class TorchPacker:
    """`device` is where it computes."""

    name = "torch"

    def __init__(self, weight_scales: str = "max", device: str = "cpu") -> None:
        self.weight_scales, self.device = weight_scales, torch.device(device)

    def translates(self, rows: Rows) -> bool:
        return False

    def decode(self, rows: Rows, result: Array) -> None:
        _tensor(result, "BF16").copy_(self.decoded(rows))

    def decoded(self, rows: Rows) -> torch.Tensor:
        """bf16 [n, K] on the device; plain rows in their own dtype."""
        values = _tensor(rows.values, rows.dtype).to(self.device)
        if rows.scale is None:
            return values
        scale = _tensor(rows.scale, rows.scale_dtype).to(self.device)
        shape = [torch.tensor(rows.shape)] if "shape" in rows.format.storage.kinds else []
        return DECODERS[rows.format](values, scale, *shape)

    def amax(self, rows: Rows) -> float:
        return float(self.decoded(rows).abs().amax())

    def pack(self, rows: Rows, scaling: Scaling, packed: Array, scale: Array) -> int:
        weight, zeros = self.decoded(rows), 0
        step = max(1, PACK_CHUNK // weight.shape[1])
        for first in range(
            0, len(weight), step
        ):  # float32 intermediates of a few rows, not of the whole
            part = slice(first, first + step)
            result = self.quantized(weight[part], scaling)
            _tensor(packed[part], "U8").copy_(result.packed)
            _tensor(scale[part], "U8").copy_(result.scale.view(torch.uint8))
            zeros += int((weight[part].reshape(-1, BLOCK) == 0).all(-1).sum())
        return zeros

    def quantized(self, weight: torch.Tensor, scaling: Scaling) -> nvfp4.NVFP4Tensor:
        """[n, K] by the definition of the format."""
        amax = torch.tensor(scaling.amax, device=self.device)
        return nvfp4.quantize(weight, amax, self.weight_scales)

    def errors(
        self, rows: Rows, scaling: Scaling, packed: Array, scale: Array
    ) -> tuple[float, float]:
        scales = _tensor(scale, "F8_E4M3")
        tensor = nvfp4.NVFP4Tensor(_tensor(packed, "U8"), scales, torch.tensor(scaling.scale_2))
        original = self.decoded(rows).cpu().float()
        error = nvfp4.dequantize(tensor, torch.float32) - original
        return float(error.square().sum(dtype=torch.float64)), float(
            original.square().sum(dtype=torch.float64)
        )
