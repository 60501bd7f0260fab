"""Prepares a loaded model for decoding on a CPU: the same function, its weights laid out for products of few rows.

On kimi-nano's sizes a product with one to sixteen rows is up to 1.6 times as fast when a weight with more outputs than
inputs lies in memory as [in, out] (docs/LOG.md). Only strides change there. Small experts get stacked copies.
"""

from __future__ import annotations

import torch
from torch import nn

from trtspec.models.layers import Linear
from trtspec.models.moe import MoE, together


@torch.no_grad()
def prepare_for_decoding(model: nn.Module) -> None:
    """In place; does nothing for weights that are not float32 on a CPU, and nothing the second time.

    Weights must not change afterwards: the experts' stacked copies would not follow.
    """
    for module in list(model.modules()):
        if isinstance(module, Linear) and not module.used_in_parts:
            weight = module.weight
            wide = weight.shape[0] >= weight.shape[1]
            if wide and weight.dtype == torch.float32 and weight.is_cpu and weight.is_contiguous():
                weight.data = weight.data.t().contiguous().t()
        elif isinstance(module, MoE) and module.together is None:
            module.together = together(module)
