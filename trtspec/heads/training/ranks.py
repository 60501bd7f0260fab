"""Several processes training one head: how they share its work, and how all of them stop at the same step.

The launcher (torchrun, accelerate launch) describes the group in the environment (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR). Each process holds the whole head. The global batch is what one process would take; each process computes
its share of the rows.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trtspec.errors import TrtspecError, UsageError

TIME = "time"
REASONS = (TIME, "SIGTERM", "SIGINT")  # to stop before the last step


@dataclass(frozen=True)
class World:
    """This process's place. `World()` is a run of one process, for which every method is free."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this machine

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

    def agree(self, value: float) -> float:
        """The main process's value."""
        held = torch.tensor([value], dtype=torch.float64)
        if self.size > 1:
            dist.broadcast(held, 0)
        return held.item()

    def wait(self) -> None:
        """Returns when every process is here."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module whose backward averages gradients over the processes."""
        return (
            model
            if self.size == 1
            else DistributedDataParallel(model, gradient_as_bucket_view=True)
        )


ALONE = World()


def require_shared(directory: Path, world: World, why: str) -> None:
    """Raises TrtspecError where not all processes see one directory; `why` is what each of them does with it."""
    if world.size == 1:
        return
    mark = directory / f".shared-{int(world.agree(float(os.getpid())))}"
    if world.main:
        directory.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world.wait()
    unseen = world.sum(torch.tensor([float(not mark.exists())])).item()
    if world.main:
        mark.unlink(missing_ok=True)
    if unseen:
        raise TrtspecError(
            f"TS-FEATURES-SHARED {unseen:.0f} of {world.size} processes do not see {directory}, and each {why}",
            "put it on storage that all nodes share",
        )


def world_from_env() -> World:
    """The process's place by the launcher's environment. UsageError for words in place of numbers."""
    try:
        names = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        rank, size, local, together = (
            int(os.environ.get(name, default)) for name, default in names
        )
    except ValueError as error:
        raise UsageError(
            f"RANK, WORLD_SIZE or LOCAL_RANK is not a number ({error})", "start with torchrun"
        ) from None
    return World(rank, size, local, together)


@contextmanager
def process_group(device: str) -> Iterator[World]:
    """Joins the group for the length of a run: gloo on CPUs; on GPUs nccl, and gloo for what lies in host memory."""
    world = world_from_env()
    if world.size == 1:
        yield world
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(world.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", rank=world.rank, world_size=world.size
    )
    try:
        yield world
    finally:
        dist.destroy_process_group()


class Stop:
    """Collects the reasons to stop. A second signal of a kind interrupts at once."""

    def __init__(self, deadline: float | None = None) -> None:
        """`deadline`: of time.monotonic()."""
        self.deadline = deadline
        self.reason: str | None = None  # of the whole group, once `asked` has said so
        self._heard: set[str] = set()

    def hear(self, number: int, _: object) -> None:
        """A signal handler."""
        self._heard.add(signal.Signals(number).name)
        signal.signal(number, signal.default_int_handler)

    def asked(self, world: World, reserve: float) -> bool:
        """Whether to stop now; `reserve`: seconds that another step with its saving would take."""
        if self.deadline is not None and time.monotonic() + reserve > self.deadline:
            self._heard.add(TIME)
        flags = world.sum(torch.tensor([float(reason in self._heard) for reason in REASONS]))
        self.reason = next(
            (reason for reason, flag in zip(REASONS, flags.tolist(), strict=True) if flag),
            self.reason,
        )
        return self.reason is not None
