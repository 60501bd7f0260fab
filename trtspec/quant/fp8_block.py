"""FP8 E4M3 with one FP32 scale per block of 128x128, as Kimi-K2-Instruct and DeepSeek-V3 publish their weights."""

from __future__ import annotations

import torch

from trtspec.errors import TrtspecError


def dequantize(
    weight: torch.Tensor, weight_scale_inv: torch.Tensor, block: tuple[int, int] = (128, 128)
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
    result = torch.empty(rows, columns, dtype=torch.bfloat16)
    scales = weight_scale_inv.float().repeat_interleave(width, dim=1)[:, :columns]
    for index in range(weight_scale_inv.shape[0]):
        part = slice(index * height, (index + 1) * height)
        result[part] = weight[part].float() * scales[index]
    return result
