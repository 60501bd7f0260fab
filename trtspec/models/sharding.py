"""Tensor parallelism with the engine's sharding: heads, inner widths and vocabulary are split, latents are not.

Each rank holds the attention heads, the inner width of MLPs and experts, and the vocabulary rows that are its part;
latent projections, norms, the router and the KV cache of the latents are whole on every rank. A layer's attention and
its MLP each end in a sum over the ranks, the embedding in a sum, the logits in a concatenation: TensorRT-LLM's
tensor-parallel layout with `moe_tensor_parallel_size` = `tp_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trtspec.errors import UsageError

# Projections of a checkpoint that are split, by the dimension of [out, in] that is; all others are whole on every rank.
SPLIT = {
    "q_b_proj": 0, "kv_b_proj": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1,
    "gate_proj": 0, "up_proj": 0, "down_proj": 1, "embed_tokens": 0, "lm_head": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Sharding:
    """This process's part of a model. `WHOLE` is a model in one process, for which every method is free."""

    rank: int = 0
    size: int = 1

    def part(self, count: int, what: str) -> int:
        """This rank's share of `count` of something. Raises UsageError where they cannot be shared equally."""
        if count % self.size:
            raise UsageError(
                f"{count} {what} cannot be shared by {self.size} ranks", f"use a --tp-size that divides {count}"
            )
        return count // self.size

    def cut(self, value: Tensor, name: str) -> Tensor:
        """This rank's part of checkpoint tensor `name`: all of it where the projection is not split."""
        dimension = SPLIT.get(name.removesuffix(".weight").rsplit(".", 1)[-1])
        if self.size == 1 or dimension is None:
            return value
        count = self.part(value.shape[dimension], f"rows or columns of {name}")
        return value.narrow(dimension, self.rank * count, count)

    def sum(self, x: Tensor) -> Tensor:
        """Adds up x over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' x side by side along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    def follow_first(self, *tensors: Tensor) -> None:
        """Overwrites the tensors with rank 0's: what a rank decides must not hang on its own rounding."""
        if self.size > 1:
            for tensor in tensors:
                whole = tensor.contiguous()
                dist.broadcast(whole, 0)
                if whole is not tensor:
                    tensor.copy_(whole)

    def anywhere(self, flags: list[bool], device: torch.device) -> list[bool]:
        """For each flag, whether it is set in any rank. Waits for all ranks."""
        if self.size == 1 or not flags:
            return flags
        shared = torch.tensor(flags, dtype=torch.int32).to(device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return [bool(flag) for flag in shared.tolist()]


WHOLE = Sharding()


class SplitEmbedding(nn.Module):
    """An embedding of which each rank holds some of the rows, [vocab / size, H]."""

    def __init__(self, vocab_size: int, hidden_size: int, sharding: Sharding) -> None:
        super().__init__()
        self.sharding = sharding
        self.weight = nn.Parameter(torch.empty(sharding.part(vocab_size, "words"), hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> [..., H]."""
        count = len(self.weight)
        local = tokens - self.sharding.rank * count
        mine = (local >= 0) & (local < count)
        found = F.embedding(local.clamp(0, count - 1), self.weight)
        return self.sharding.sum(found.masked_fill(~mine.unsqueeze(-1), 0.0))


def embedding(vocab_size: int, hidden_size: int, sharding: Sharding) -> nn.Embedding | SplitEmbedding:
    """The whole embedding in one process, else this rank's part."""
    if sharding.size == 1 and torch.empty(0).is_meta:
        # torch's random values for a meta tensor would import torch._dynamo: over a second of every start
        return nn.Embedding.from_pretrained(torch.empty(vocab_size, hidden_size), freeze=False)
    if sharding.size == 1:
        return nn.Embedding(vocab_size, hidden_size)
    return SplitEmbedding(vocab_size, hidden_size, sharding)
