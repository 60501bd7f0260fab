"""Several processes training one head: `torchrun` or `accelerate launch` around the same command.

Both launchers describe the group in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR); nothing else is
configured. The global batch is what one process would take; each process computes its share of the rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trtspec.errors import UsageError


@dataclass(frozen=True)
class World:
    """This process's place. `World()` is a run of one process, for which every method is free."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """The one process that writes files and talks."""
        return self.rank == 0

    def device(self, device: str) -> str:
        """`cuda` becomes this process's own GPU."""
        return f"cuda:{self.local_rank}" if device == "cuda" and self.size > 1 else device

    def share(self, items: Sequence[int]) -> list[int]:
        """This process's part of a batch; empty when the batch is smaller than the group."""
        return list(items[self.rank :: self.size])

    def sum(self, values: Tensor) -> Tensor:
        """Adds up `values` over the processes, in place. No gradient flows through it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, values: Tensor, source: int) -> None:
        """Overwrites `values` with those of process `source`."""
        if self.size > 1:
            dist.broadcast(values, source)

    def wait(self) -> None:
        """Returns when every process is here."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module whose backward averages gradients over the processes; its parameters stay the model's own."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


def place() -> World:
    """The place that the launcher's environment gives; UsageError when it is no number."""
    try:
        rank, size, local = (int(os.environ.get(name, default)) for name, default in
                             (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))  # fmt: skip
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE or LOCAL_RANK is no number ({error})", "start with torchrun") from None
    return World(rank, size, local)


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Joins the group for the length of a run: gloo on CPUs; on GPUs nccl, and gloo for what lies in host memory."""
    world = place()
    if world.size == 1:
        yield world
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(world.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=world.rank, world_size=world.size)
    try:
        yield world
    finally:
        dist.destroy_process_group()
