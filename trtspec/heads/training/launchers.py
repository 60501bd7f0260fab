"""How a training command starts on several GPUs and nodes: torchrun, accelerate, or a Slurm script around torchrun.

The texts run as they are printed, from the directory that they name, which all nodes must see. torchrun replicates the
head, accelerate shards it (FSDP).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Launcher = Literal["torchrun", "accelerate", "slurm"]
PORT = 29500  # of the rendezvous; torchrun's own default


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
