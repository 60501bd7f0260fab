"""FP8 E4M3 with one FP32 scale per block of 128x128, as Kimi-K2-Instruct and DeepSeek-V3 publish their weights."""

from __future__ import annotations

import torch

from trtspec.errors import TrtspecError
from trtspec.formats import FP8_BLOCK_SIZE

CHUNK = 1 << 18  # values whose intermediates stay in the cache


def dequantize(
    weight: torch.Tensor, weight_scale_inv: torch.Tensor, block: tuple[int, int] = FP8_BLOCK_SIZE
) -> torch.Tensor:
    """float8_e4m3fn [N, K] and float32 [ceil(N/128), ceil(K/128)] -> bf16 [N, K] = weight * scale, in float32.

    Despite its name `weight_scale_inv` multiplies. The last block of a row or column may be narrower.
    """
    (rows, columns), (height, width) = weight.shape, block
    if weight_scale_inv.shape != (-(-rows // height), -(-columns // width)):
        raise TrtspecError(
            f"weight_scale_inv {list(weight_scale_inv.shape)} does not fit a weight {list(weight.shape)} "
            f"in blocks of {height}x{width}",
            "check weight_block_size in config.json",
        )
    result = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.device)
    scales = weight_scale_inv.float().repeat_interleave(width, dim=1)[:, :columns]
    codes, table = weight.contiguous().view(torch.uint8), _values().to(weight.device)
    step = max(1, CHUNK // columns)
    for index, band in enumerate(zip(codes.split(height), result.split(height), strict=True)):
        for part, target in zip(*(tensor.split(step) for tensor in band), strict=True):
            values = table.index_select(0, part.reshape(-1).to(torch.int32)).view(part.shape)
            target.copy_(values.mul_(scales[index]))
    return result


def _values() -> torch.Tensor:
    """float32 of each E4M3 byte; looking it up is several times faster than torch's conversion."""
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
