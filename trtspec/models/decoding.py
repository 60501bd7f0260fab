"""Prepares a loaded model for decoding: the same function, its weights laid out for products of few rows.

Large float32 weights on a CPU get a packed copy (packed.py). Smaller ones with at least as many outputs as inputs are
laid out in memory as [in, out], which takes up to a third off a product of one to sixteen rows (docs/LOG.md). Their
norms take fewer operators. Small experts of any type are stacked.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trtspec.models.layers import HypotenuseNorm, LatentAttention, Linear, RMSNorm, by_input
from trtspec.models.moe import Experts, MoE, is_small, together
from trtspec.models.packed import pack


@torch.no_grad()
def prepare_for_decoding(model: nn.Module) -> None:
    """In place; does nothing the second time.

    Weights must not change afterwards: packed and stacked copies would not follow.
    """
    for module in list(model.modules()):
        if isinstance(module, Linear) and not module.used_in_parts and module.packed is None:
            module.packed = pack(module.weight)
            wide = module.weight.shape[0] >= module.weight.shape[1]
            if module.packed is None and wide and is_float32_on_cpu(module.weight):
                module.weight.data = by_input(module.weight.data)
        elif isinstance(module, RMSNorm) and is_float32_on_cpu(module.weight):
            module.by_hypotenuse = HypotenuseNorm(module.weight, module.eps)
        elif isinstance(module, LatentAttention) and module.folded is None:
            if is_float32_on_cpu(module.kv_b_proj.weight):
                module.fold()
        elif isinstance(module, MoE) and module.together is None:
            module.together = together(module)
        elif isinstance(module, Experts) and is_float32_on_cpu(module.down) and is_small(module.gate_up, module.down):
            module.gate_up.data, module.down.data = by_input(module.gate_up.data), by_input(module.down.data)


def is_float32_on_cpu(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.is_cpu
