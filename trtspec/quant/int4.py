"""INT4 as Kimi-K2-Thinking and later publish it: compressed-tensors `pack-quantized`, symmetric, group 32.

Eight values, each plus 8, lie in one int32, the first in the lowest bits; a BF16 scale serves 32 values of a row.
"""

from __future__ import annotations

import torch

from trtspec.errors import TrtspecError

CHUNK = 1 << 18  # values whose intermediates stay in the cache


def dequantize(weight_packed: torch.Tensor, weight_scale: torch.Tensor, weight_shape: torch.Tensor) -> torch.Tensor:
    """int32 [N, K/8], bf16 [N, K/group], [N, K] as two integers -> bf16 [N, K] = (code - 8) * scale.

    The product is rounded to BF16 once, as compressed-tensors does it.
    """
    rows, columns = (int(size) for size in weight_shape.tolist())
    groups = weight_scale.shape[1]
    if weight_packed.shape != (rows, -(-columns // 8)) or weight_scale.shape[0] != rows or columns % groups:
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
            values.view(-1, groups, columns // groups), scale, out=result[part].view(-1, groups, columns // groups)
        )
    return result


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, b] -> int8 [n, 2b], low nibble first: each byte spreads over the two bytes of an int16."""
    wide = packed.to(torch.int16)
    return wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F).view(torch.int8)
