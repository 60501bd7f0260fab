"""Several processes training one head: `torchrun`, `accelerate launch` or a Slurm script around the same command, how
they share its work, and how all of them stop at the same step.

Both launchers describe the group in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR), where accelerate also
says whether the head is to be sharded (ACCELERATE_USE_FSDP). The global batch is what one process would take; each
process computes its share of the rows. torch's sharding takes over a second to import, so the functions that shard do.

The launch texts run as they are printed, from the directory that they name, which all nodes must see. torchrun
replicates the head, accelerate shards it (FSDP).
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trtspec.errors import TrtspecError, UsageError
from trtspec.heads.training.options import Launcher

NOT_HONOURED = ("FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING")  # settings of accelerate that would be lost
PORT = 29500  # of the rendezvous; torchrun's own default
TIME = "time"
REASONS = (TIME, "SIGTERM", "SIGINT")  # to stop before the last step


@dataclass(frozen=True)
class World:
    """This process's place. `World()` is a run of one process, for which every method is free."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    sharded: bool = False  # weights, gradients and moments spread over the processes (FSDP) instead of replicated
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

    def broadcast(self, values: Tensor, source: int) -> None:
        """Overwrites `values` with those of process `source`."""
        if self.size > 1:
            dist.broadcast(values, source)

    def agree(self, value: float) -> float:
        """The main process's value."""
        held = torch.tensor([value], dtype=torch.float64)
        self.broadcast(held, 0)
        return held.item()

    def wait(self) -> None:
        """Returns when every process is here."""
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module whose backward averages gradients over the processes.

        Sharding replaces the trainable parameters in place, so they are to be asked for afterwards. The frozen ones
        stay whole in each process: they have neither gradients nor moments.
        """
        if self.sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            frozen = {value for value in model.parameters() if not value.requires_grad}
            device = next(model.parameters()).device.type
            # One unit: the training-time test runs the layer several times a step, and one gathering serves them all.
            mesh = init_device_mesh(device, (self.size,))
            fully_shard(model, mesh=mesh, ignored_params=frozen, reshard_after_forward=True)
            return model
        if self.size == 1:
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors put together for the main process, the sharded ones on the CPU; the others get nothing. Every
        process must call it, because sharded ones are gathered, one at a time."""
        from torch.distributed.tensor import DTensor

        found = {}
        for name, value in tensors.items():
            joined_value = value.full_tensor().cpu() if isinstance(value, DTensor) else value
            if self.main:
                found[name] = joined_value
        return found


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


def like(whole: Tensor, example: Tensor) -> Tensor:
    """`whole` where `example` is: on its device, and this process's shard of it where `example` is sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    whole = whole.to(example.device)
    if not isinstance(example, DTensor):
        return whole
    return distribute_tensor(whole, example.device_mesh, example.placements, src_data_rank=None)


def place() -> World:
    """The place that the launcher's environment gives; UsageError when it is no number, or asks for what is lost."""
    try:
        names = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        rank, size, local, together = (int(os.environ.get(name, default)) for name, default in names)
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE or LOCAL_RANK is not a number ({error})", "start with torchrun") from None
    sharded = size > 1 and _is_on("ACCELERATE_USE_FSDP")
    lost = [name.lower() for name in NOT_HONOURED if sharded and _is_on(name)]
    if lost:
        raise UsageError(f"{' and '.join(lost)}: not for heads", "set it to false in accelerate's configuration")
    return World(rank, size, local, sharded, together)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


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


class Stop:
    """Collects the reasons to stop while it is entered. A second signal of a kind acts at once, as without it."""

    def __init__(self, deadline: float | None = None) -> None:
        """`deadline`: of time.monotonic()."""
        self.deadline = deadline
        self.reason: str | None = None  # of the whole group, once `asked` has said so
        self._heard: set[str] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._heard.add(signal.Signals(number).name)
        signal.signal(number, self._before[number])

    def asked(self, world: World, reserve: float) -> bool:
        """Whether to stop now; `reserve`: seconds that another step with its saving would take."""
        if self.deadline is not None and time.monotonic() + reserve > self.deadline:
            self._heard.add(TIME)
        flags = world.sum(torch.tensor([float(reason in self._heard) for reason in REASONS]))
        self.reason = next((reason for reason, flag in zip(REASONS, flags.tolist(), strict=True) if flag), self.reason)
        return self.reason is not None


@dataclass(frozen=True)
class TrainingNodes:
    """GPUs to train on; one process each."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def holding(self, processes: int) -> TrainingNodes:
        """As much of it as this many processes need, on as few nodes as possible."""
        processes = min(processes, self.gpus)
        nodes = -(-processes // self.gpus_per_node)
        return TrainingNodes(nodes, -(-processes // nodes))


def launch_text(launcher: Launcher, words: Sequence[str], cluster: TrainingNodes, directory: Path) -> str:
    """What to run for `trtspec train WORDS`: a line to be given on each node, or the script for sbatch."""
    if launcher == "slurm":
        return slurm_script(words, cluster, directory)
    lines = [f"cd {shlex.quote(str(directory))}"]
    if cluster.nodes > 1:
        lines.append(f"# on each node, with NODE_RANK=0 to {cluster.nodes - 1} and MASTER_ADDR=the name of node 0:")
    start = _torchrun(cluster) if launcher == "torchrun" else _accelerate(cluster)
    return "\n".join([*lines, command_line(start, words)]) + "\n"


def command_line(start: Sequence[str], words: Sequence[str]) -> str:
    """One line: the launcher's part, which may hold shell variables, and the quoted command."""
    return " ".join([*start, "-m", "trtspec", "train", shlex.join(words)])


def _torchrun(cluster: TrainingNodes) -> list[str]:
    each = ["--nproc-per-node", str(cluster.gpus_per_node)]
    if cluster.nodes == 1:
        return ["torchrun", "--standalone", *each]
    return ["torchrun", "--nnodes", str(cluster.nodes), *each, "--node-rank", '"$NODE_RANK"', *_meeting("--master-")]


def _accelerate(cluster: TrainingNodes) -> list[str]:
    line = [
        "accelerate", "launch", "--use_fsdp", "--fsdp_version", "2", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--num_machines", str(cluster.nodes), "--num_processes", str(cluster.gpus),
    ]  # fmt: skip
    if cluster.nodes == 1:
        return [*line, "--main_process_port", "0"]
    address, place, port, number = _meeting("--main_process_")
    return [*line, "--machine_rank", '"$NODE_RANK"', address.replace("addr", "ip"), place, port, number]


def _meeting(prefix: str) -> list[str]:
    return [f"{prefix}addr", '"$MASTER_ADDR"', f"{prefix}port", f'"${{MASTER_PORT:-{PORT}}}"']


def slurm_script(words: Sequence[str], cluster: TrainingNodes, directory: Path) -> str:
    """For sbatch. Given again after a time limit, the job resumes with its last saved state."""
    on_gpus = "cpu" not in words
    gpus = f"#SBATCH --gpus-per-node={cluster.gpus_per_node}\n" if on_gpus else ""
    start = [
        "srun", "--kill-on-bad-exit=1", "torchrun", "--nnodes", '"$SLURM_JOB_NUM_NODES"',
        "--nproc-per-node", str(cluster.gpus_per_node), "--rdzv-backend", "c10d", "--rdzv-id", '"$SLURM_JOB_ID"',
        "--rdzv-endpoint", f'"$head:${{MASTER_PORT:-{PORT}}}"',
    ]  # fmt: skip
    return f"""#!/bin/bash
#SBATCH --job-name=trtspec-train
#SBATCH --nodes={cluster.nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --chdir={directory}
#SBATCH --output=trtspec-train-%j.log
# Add --partition, --account and --time. When the time is up, submit the script again: the run resumes.
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{command_line(start, words)}
"""
