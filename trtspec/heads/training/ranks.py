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
STOP_REASONS = (TIME, "SIGTERM", "SIGINT")  # in the order in which they are reported


@dataclass(frozen=True)
class Ranks:
    """The position of this process in a group of training processes.

    `Ranks()` is a run of a single process.

    Args:
        rank: number of this process in the group, counted from 0.
        size: number of processes in the group.
        local_rank: number of this process on its machine, counted from 0.
        local_size: number of the group's processes on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes the files and messages of the group."""
        return self.rank == 0

    def device(self, device: str) -> str:
        """Returns the device of this process: for `cuda` in a group, the process's own GPU."""
        return f"cuda:{self.local_rank}" if device == "cuda" and self.size > 1 else device

    def share(self, items: Sequence[int]) -> list[int]:
        """Returns the items of a batch that this process computes.

        Some processes get an empty list if the batch has fewer items than there are processes.
        """
        return list(items[self.rank :: self.size])

    def sum(self, values: Tensor) -> Tensor:
        """Adds up `values` over all processes, in place and without gradients."""
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
        """Wraps `model` so that its backward pass averages the gradients over all processes."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


SINGLE_PROCESS = Ranks()


def require_shared(directory: Path, ranks: Ranks, why: str) -> None:
    """Creates the directory in the main process, and checks that all processes see it.

    Raises TrtspecError if a process does not see a file that the main process makes.

    Args:
        why: use that each process makes of the directory, for the message.
    """
    if ranks.size == 1:
        return
    main_pid = ranks.agree(float(os.getpid()))
    mark = directory / f".shared-{int(main_pid)}"
    if ranks.main:
        directory.mkdir(parents=True, exist_ok=True)
        mark.touch()
    ranks.wait()
    is_missing = torch.tensor([float(not mark.exists())])
    missing = ranks.sum(is_missing).item()  # number of processes without the file
    if ranks.main:
        mark.unlink(missing_ok=True)
    if missing:
        message = (
            f"TS-FEATURES-SHARED {missing:.0f} of {ranks.size} processes do not see {directory}, "
            f"and each {why}"
        )
        raise TrtspecError(message, "put it on storage that all nodes share")


def ranks_from_env() -> Ranks:
    """Reads the ranks that the launcher (torchrun, accelerate) has put into the environment.

    Missing variables mean a single process. Raises UsageError if a value is not a number.
    """
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    try:
        numbers = [int(os.environ.get(name, value)) for name, value in defaults.items()]
        return Ranks(*numbers)
    except ValueError as error:
        message = f"one of {', '.join(defaults)} is not a number ({error})"
        raise UsageError(message, "start with torchrun") from None


@contextmanager
def process_group(device: str) -> Iterator[Ranks]:
    """Joins the launcher's process group for the length of a run. Yields this process's ranks.

    Gloo sends tensors in host memory, and NCCL sends tensors on GPUs.
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
    """Collector of the reasons to stop a run: signals, and the deadline.

    A second signal of the same number interrupts the process at once.

    Args:
        deadline: value of time.monotonic() at which the run must end. None: no time limit.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.reason: str | None = None  # reason of the whole group, set by `should_stop`
        self._own_reasons: set[str] = set()

    def hear(self, number: int, _: object) -> None:
        """Records a signal as a reason to stop. A second signal of this number will interrupt."""
        self._own_reasons.add(signal.Signals(number).name)
        signal.signal(number, signal.default_int_handler)

    def should_stop(self, ranks: Ranks, reserve: float) -> bool:
        """Whether all processes of the group should stop now, because one of them has a reason.

        Args:
            reserve: seconds that another optimizer step and its saving would take.
        """
        if self.deadline is not None and time.monotonic() + reserve > self.deadline:
            self._own_reasons.add(TIME)
        own_flags = torch.tensor([float(reason in self._own_reasons) for reason in STOP_REASONS])
        flags = ranks.sum(own_flags).tolist()
        reasons = [reason for reason, flag in zip(STOP_REASONS, flags, strict=True) if flag]
        # A process may have several reasons. The first of STOP_REASONS is reported.
        if reasons:
            self.reason = reasons[0]
        return self.reason is not None
