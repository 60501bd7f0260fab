"""Processes that train one head together: how they share its work, and stop at the same step.

The launcher (torchrun, accelerate launch) describes the group in the environment (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR). Each process holds the whole head. The global batch is the batch of a
single process. Each process computes its share of the rows.
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
STOP_REASONS = (TIME, "SIGTERM", "SIGINT")  # before the last step


@dataclass(frozen=True)
class Ranks:
    """The rank of this process in its group. `Ranks()`: a run of one process.

    Args:
        size: processes in the group.
        local_rank: rank among the processes of this machine.
        local_size: processes on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def main(self) -> bool:
        """The one process that writes files and talks."""
        return self.rank == 0

    def device(self, device: str) -> str:
        """The device of this process: `cuda` becomes its own GPU."""
        return f"cuda:{self.local_rank}" if device == "cuda" and self.size > 1 else device

    def share(self, items: Sequence[int]) -> list[int]:
        """The items of a batch that this process computes.

        Empty for some processes if the batch is smaller than the group.
        """
        return list(items[self.rank :: self.size])

    def sum(self, values: Tensor) -> Tensor:
        """Adds up `values` over the processes, in place. No gradient flows through it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def agree(self, value: float) -> float:
        """Returns the main process's value in every process."""
        shared = torch.tensor([value], dtype=torch.float64)
        if self.size > 1:
            dist.broadcast(shared, 0)
        return shared.item()

    def wait(self) -> None:
        """Returns after every process has called it."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module whose backward averages gradients over the processes."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


SINGLE_PROCESS = Ranks()


def require_shared(directory: Path, ranks: Ranks, why: str) -> None:
    """Raises TrtspecError if a process does not see the directory. `why`: its use of the directory.

    Creates the directory.
    """
    if ranks.size == 1:
        return
    mark = directory / f".shared-{int(ranks.agree(float(os.getpid())))}"
    if ranks.main:
        directory.mkdir(parents=True, exist_ok=True)
        mark.touch()
    ranks.wait()
    is_missing = torch.tensor([float(not mark.exists())])
    blind = ranks.sum(is_missing).item()  # processes that do not see it
    if ranks.main:
        mark.unlink(missing_ok=True)
    if blind:
        message = (
            f"TS-FEATURES-SHARED {blind:.0f} of {ranks.size} processes do not see {directory}, "
            f"and each {why}"
        )
        raise TrtspecError(message, "put it on storage that all nodes share")


def ranks_from_env() -> Ranks:
    """Reads the launcher's environment. Raises UsageError if a value is not a number."""
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    try:
        return Ranks(*(int(os.environ.get(name, value)) for name, value in defaults.items()))
    except ValueError as error:
        message = f"RANK, WORLD_SIZE or LOCAL_RANK is not a number ({error})"
        raise UsageError(message, "start with torchrun") from None


@contextmanager
def process_group(device: str) -> Iterator[Ranks]:
    """Joins the group for the length of a run.

    Tensors in host memory go over gloo, tensors on GPUs over nccl.
    """
    ranks = ranks_from_env()
    if ranks.size == 1:
        yield ranks
        return
    backend = "gloo"
    if device.startswith("cuda"):
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(ranks.local_rank)
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.size)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


class Stop:
    """Collects the reasons to stop. A second signal of the same number interrupts at once.

    `deadline`: of time.monotonic().
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.reason: str | None = None  # the reason of the whole group, set by `asked`
        self._own_reasons: set[str] = set()

    def hear(self, number: int, _: object) -> None:
        """Handles a signal."""
        self._own_reasons.add(signal.Signals(number).name)
        signal.signal(number, signal.default_int_handler)

    def asked(self, ranks: Ranks, reserve: float) -> bool:
        """Whether to stop now. `reserve`: seconds that another step with its saving would take."""
        if self.deadline is not None and time.monotonic() + reserve > self.deadline:
            self._own_reasons.add(TIME)
        own_flags = torch.tensor([float(reason in self._own_reasons) for reason in STOP_REASONS])
        flags = ranks.sum(own_flags).tolist()
        reasons = [reason for reason, flag in zip(STOP_REASONS, flags, strict=True) if flag]
        if reasons:
            self.reason = reasons[0]
        return self.reason is not None
