"""KV cache of the reference models: one tensor for all layers, rolled back by passing a smaller start."""

from __future__ import annotations

import torch
from torch import Tensor


class LatentCache:
    """Cached entries [layers, rows, max_len, width]; for MLA the width is kv_lora_rank + qk_rope_head_dim.

    Nothing is erased on rollback: a row's valid length is what the caller passes as `start`, and entries beyond it are
    overwritten before they can be seen. `dtype=torch.float8_e4m3fn` keeps the entries as the scale-free FP8 cast.
    """

    def __init__(
        self, layers: int, rows: int, max_len: int, width: int, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        self.data = torch.zeros(layers, rows, max_len, width, dtype=dtype, device=device)

    @property
    def max_len(self) -> int:
        return self.data.shape[2]

    @property
    def rows(self) -> int:
        return self.data.shape[1]

    def layer(self, index: int) -> Tensor:
        return self.data[index]

    def move(self, source: int, target: int) -> None:
        """Copies row `source` over row `target`, so that active rows stay together at the front."""
        self.data[:, target].copy_(self.data[:, source])
