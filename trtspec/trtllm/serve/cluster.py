"""Several nodes: `trtllm-llmapi-launch` once per GPU, under what is there: Slurm, MPI or a LeaderWorkerSet."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trtspec.errors import Problem

LAUNCHERS = ("direct", "slurm", "mpi", "lws")
STARTERS = {"slurm": "srun", "mpi": "mpirun", "lws": "mpirun"}
RANK_WRAPPER = "trtllm-llmapi-launch"
# trtllm-llmapi-launch expands its command unquoted: the shell would split or glob these
SPLIT_BY_WRAPPER = frozenset(" \t\n*?[")
CONTAINER_WORDS = frozenset(
    {"--container-image", "--container-name", "apptainer", "singularity", "enroot", "podman", "docker", "shifter"}
)
# compilers' caches; on a home directory that nodes share, their ranks overwrite each other's files
NODE_LOCAL = {"TRITON_CACHE_DIR": "/tmp/trtspec/triton", "FLASHINFER_WORKSPACE_BASE": "/tmp/trtspec/flashinfer"}


@dataclass(frozen=True)
class Cluster:
    """`args`: more words for srun or mpirun. One rank per GPU."""

    launcher: str = "direct"
    nodes: int = 1
    gpus_per_node: int = 1
    args: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def contained(self) -> bool:
        """Whether the engine runs in a container that srun or mpirun starts, so that it need not be installed here:
        Slurm's pyxis plug-in (`--container-image`, `--container-name`), or a program in front of the command."""
        if self.launcher == "direct":
            return False
        words = {word.partition("=")[0].rpartition("/")[2] for word in self.args}
        return bool(words & CONTAINER_WORDS)


def wrap(argv: list[str], env: dict[str, str], cluster: Cluster, environ: Mapping[str, str]) -> list[str]:
    """The command that starts `argv` on every node; `argv` itself for one node without a launcher."""
    if cluster.launcher == "direct":
        return argv
    ranks, each = str(cluster.ranks), str(cluster.gpus_per_node)
    if cluster.launcher == "slurm":
        words = ["srun", "--mpi=pmix", "--nodes", str(cluster.nodes), "--ntasks", ranks, "--ntasks-per-node", each]
        return [*words, *cluster.args, RANK_WRAPPER, *argv]
    words = ["mpirun", "-np", ranks, "-N", each]
    if cluster.launcher == "lws":
        words += ["--host", ",".join(f"{host}:{each}" for host in lws_hosts(environ))]
    exported = [word for name in env for word in ("-x", name)]  # Open MPI hands on only its own variables
    return [*words, *exported, *cluster.args, RANK_WRAPPER, *argv]


def environment(cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks on several nodes need and the user has not set."""
    return {} if cluster.nodes == 1 else {name: path for name, path in NODE_LOCAL.items() if name not in environ}


def lws_hosts(environ: Mapping[str, str]) -> list[str]:
    """Leader first: the pods of a LeaderWorkerSet group are `<leader>` and `<leader>-<i>` in one headless service."""
    address = environ.get("LWS_LEADER_ADDRESS", "LWS_LEADER_ADDRESS")
    leader, dot, domain = address.partition(".")
    size = environ.get("LWS_GROUP_SIZE", "")
    count = int(size) if size.isdecimal() else 1
    return [address, *(f"{leader}-{index}{dot}{domain}" for index in range(1, count))]


def check_cluster(
    cluster: Cluster, argv: list[str], world: int, environ: Mapping[str, str], launching: bool
) -> Iterator[Problem]:
    """`world`: ranks that the engine's parallel sizes multiply to. A dry run elsewhere only mentions the machine."""
    if cluster.ranks != world:
        message = f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs are {cluster.ranks} ranks; the engine's "
        message += f"parallel sizes make {world}"
        yield Problem("TS-SERVE-WORLD", "error", "--nodes", message, "nodes x GPUs per node = tp x pp x cp")
    if cluster.launcher == "direct":
        if cluster.nodes > 1:
            message = f"{cluster.nodes} nodes need a launcher that reaches them"
            yield Problem("TS-SERVE-LAUNCHER", "error", "--launcher", message, "pass --launcher slurm, mpi or lws")
        return
    for word in argv:
        if SPLIT_BY_WRAPPER & set(word):
            message = f"{RANK_WRAPPER} hands {word!r} on unquoted, in pieces"
            yield Problem("TS-SERVE-SPLIT-WORD", "error", word, message, "put the setting into the YAML")
    severity = "error" if launching else "warning"
    for message, remedy in _missing(cluster, environ):
        yield Problem("TS-SERVE-LAUNCHER", severity, cluster.launcher, message, remedy)  # type: ignore[arg-type]


def check_file(cluster: Cluster, ours: bool, launching: bool) -> Iterator[Problem]:
    """`ours`: the configuration is written for this start, into a directory of this node."""
    if cluster.launcher != "direct" and ours:
        message = "a configuration written for this start lies on this node alone"
        remedy = "write it with `trtspec build-config` where every node sees it, and pass --config"
        yield Problem("TS-SERVE-LAUNCHER", "error" if launching else "warning", "--config", message, remedy)


def _missing(cluster: Cluster, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    starter = STARTERS[cluster.launcher]
    if shutil.which(starter) is None:
        yield f"{starter} is not on PATH", "start on a node that has it"
    if cluster.launcher == "slurm" and "SLURM_JOB_ID" not in environ:
        yield "this is not inside a Slurm allocation", "submit the job script that --dry-run prints, or run in salloc"
    if cluster.launcher == "slurm" and environ.get("SLURM_NNODES", str(cluster.nodes)) != str(cluster.nodes):
        yield f"the allocation has {environ['SLURM_NNODES']} nodes, not {cluster.nodes}", "allocate as many as --nodes"
    if cluster.launcher == "lws":
        if "LWS_LEADER_ADDRESS" not in environ:
            yield "LWS_LEADER_ADDRESS is not set: this is no pod of a LeaderWorkerSet", "start in its leader pod"
        elif environ.get("LWS_GROUP_SIZE") != str(cluster.nodes):
            message = f"LWS_GROUP_SIZE is {environ.get('LWS_GROUP_SIZE')}, not {cluster.nodes}"
            yield message, "size of the LeaderWorkerSet = --nodes"


def job_script(cluster: Cluster, command: list[str]) -> str:
    """A batch script for sbatch that runs `command` (the same `trtspec serve`) inside the allocation."""
    return "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH --job-name=trtspec-serve",
            f"#SBATCH --nodes={cluster.nodes}",
            f"#SBATCH --ntasks-per-node={cluster.gpus_per_node}",
            f"#SBATCH --gpus-per-node={cluster.gpus_per_node}",
            "#SBATCH --exclusive",
            "#SBATCH --no-requeue",
            "#SBATCH --signal=B:TERM@120",
            "# exec: the signal above and scancel reach trtspec, which ends every rank",
            f"exec {shlex.join(command)}",
            "",
        ]
    )
