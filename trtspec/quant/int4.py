"""INT4 as Kimi-K2-Thinking and later publish it: compressed-tensors `pack-quantized`, symmetric, group 32.

Eight values, each plus 8, lie in one int32, the first in the lowest bits; a BF16 scale serves 32 values of a row.
"""

from __future__ import annotations

import torch

from trtspec.errors import TrtspecError


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
    bytes_ = weight_packed.contiguous().view(torch.uint8)
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).view(rows, -1)[:, :columns]
    values = codes.view(torch.int8).sub(8).to(torch.bfloat16)
    return (values.view(rows, groups, -1) * weight_scale.unsqueeze(-1)).view(rows, columns)
