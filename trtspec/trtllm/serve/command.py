"""The command line that starts the engine, and the checks before its launch.

`trtllm-serve` gets our options and the user's checked options, but no option that is in the YAML
too. In the pods of a LeaderWorkerSet mpirun starts it. The checks are the engine's version, the
driver, and whether the deployment fits into the GPUs' memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from trtspec.checkpoint.hub import engine_name, engine_path, engine_revision
from trtspec.checkpoint.published import reasoning_parser
from trtspec.errors import Problem, Severity, UsageError
from trtspec.launch.preflight import EngineProgram, InstalledGpu, visible_gpus
from trtspec.launch.server_launch import ServerAddress
from trtspec.specs import ModelSpec, gpu_spec
from trtspec.trtllm.deployment import Deployment, installed_version, parse_passed
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import Intent
from trtspec.trtllm.rules.model import ENGINE
from trtspec.trtllm.schema import Schema, read_beside, schema_for


def build_command(
    intent: Intent, target: ModelSpec, document: Document, *,
    address: ServerAddress = ServerAddress("0.0.0.0", 8000),
    sizes: Mapping[str, Any] | None = None, passed: Sequence[str] = (), cache: str | None = None,
) -> list[str]:  # fmt: skip
    """Words of trtllm-serve's command, with the intent's sizes that the file does not have.

    The name of `document` is the path that the engine reads.

    Raises UsageError if the revision is given twice.

    Args:
        sizes: sizes by YAML path. Each is an option even if the file has it, and lint reports both.
        passed: words for trtllm-serve itself.
        cache: hub cache of the machine that serves. None for this machine's cache.
    """
    sizes = sizes or {}
    schema = schema_for(intent.version)
    chosen, _ = parse_passed(schema, passed)

    def decided(name: str) -> bool:
        """Whether the user or the file already sets an option."""
        return name in chosen or document.has(name)

    takes_revision = schema.option("--revision").takes
    model = engine_name(intent.target) if takes_revision else engine_path(intent.target, cache)
    argv = ["trtllm-serve", model, "--host", address.host, "--port", str(address.port)]
    revision = engine_revision(intent.target)
    if revision is not None:
        if decided("revision"):
            message = f"{intent.target} names its revision, "
            message += "and `revision` is given to the engine too"
            raise UsageError(message, "give it once")
        if takes_revision:
            argv += ["--revision", revision]
    if not decided("backend"):
        argv += ["--backend", "pytorch"]
    for key, value in {**intent.settings_in_argv(), **sizes}.items():
        if key not in chosen and (key in sizes or not document.has(key)):
            option = schema.options[key]
            argv.append(min(option.flags, key=len))
            if not option.is_flag:
                argv.append(str(value))
    # a Kimi needs more than the model card's command, as far as the version is known to take it
    parser = reasoning_parser(target.family, intent.published_as, ENGINE)
    if parser is not None and not decided("reasoning_parser"):
        exists = all(schema.behaviours.get(f"parser_of_{parser}", [True]))
        if exists and _takes(schema, "reasoning_parser", parser):
            argv += ["--reasoning_parser", parser]
    tool_parser = target.family.tool_parser
    if _takes(schema, "tool_parser", tool_parser) and "tool_parser" not in chosen:
        argv += ["--tool_parser", tool_parser]
    silenced = "telemetry" in chosen or document.has("telemetry_config.disabled")
    if schema.option("--telemetry").takes and not silenced:
        argv.append("--no-telemetry")
    return [*argv, *passed, "--extra_llm_api_options", document.name]


def _takes(schema: Schema, name: str, value: str) -> bool:
    """Whether every source around the release has this option with this choice."""
    option = schema.option(f"--{name}")
    return option.takes and all(value in each.choices for each in option.taken)


RANK_WRAPPER = "trtllm-llmapi-launch"
# Characters at which the shell would split or glob a word, because the wrapper expands its command
# unquoted.
SPLIT_BY_WRAPPER = frozenset(" \t\n*?[")
# Variables of the compilers' caches, with a directory on the rank's own node. In a home directory
# that nodes share, ranks would overwrite each other's files.
NODE_LOCAL = {
    "TRITON_CACHE_DIR": "/tmp/trtspec/triton",
    "FLASHINFER_WORKSPACE_BASE": "/tmp/trtspec/flashinfer",
}


@dataclass(frozen=True)
class Cluster:
    """The nodes and GPUs that a server starts on, with one rank per GPU.

    Args:
        launcher: "direct" for trtllm-serve itself, "lws" for mpirun in a LeaderWorkerSet.
        nodes: number of nodes.
        args: more words for mpirun.
    """

    launcher: Literal["direct", "lws"] = "direct"
    nodes: int = 1
    gpus_per_node: int = 1
    args: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.gpus_per_node


def with_launcher(
    argv: list[str], env: dict[str, str], cluster: Cluster, environ: Mapping[str, str]
) -> list[str]:
    """Words that start the command `argv` on a cluster: mpirun's for launcher "lws", else `argv`.

    mpirun starts `argv` once per GPU of every node.

    Args:
        env: variables that mpirun passes to the ranks.
        environ: environment of the pod, with the addresses of the pods.
    """
    if cluster.launcher == "direct":
        return argv
    gpus = str(cluster.gpus_per_node)
    hosts = ",".join(f"{host}:{gpus}" for host in lws_hosts(environ))
    words = ["mpirun", "-np", str(cluster.ranks), "-N", gpus, "--host", hosts]
    for name in env:
        words += ["-x", name]  # Open MPI passes on only its own variables
    return [*words, *cluster.args, RANK_WRAPPER, *argv]


def cluster_environment(cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with the directories of caches for ranks on several nodes. {} for one node.

    A directory is the user's in `environ`, or a directory on the rank's own node.
    """
    if cluster.nodes == 1:
        return {}
    return {name: environ.get(name, path) for name, path in NODE_LOCAL.items()}


def lws_hosts(environ: Mapping[str, str]) -> list[str]:
    """Addresses of the pods of a LeaderWorkerSet group, leader first.

    They are `<leader>` and `<leader>-<index>` in one service. `environ`: environment of a pod.
    """
    # outside a pod a dry run shows the variable's name, and check_cluster reports the mistake
    address = environ.get("LWS_LEADER_ADDRESS", "LWS_LEADER_ADDRESS")
    leader, dot, domain = address.partition(".")
    size = environ.get("LWS_GROUP_SIZE", "")
    count = int(size) if size.isdecimal() else 1
    return [address, *(f"{leader}-{index}{dot}{domain}" for index in range(1, count))]


def check_cluster(
    cluster: Cluster, argv: list[str], world: int, ours: bool,
    environ: Mapping[str, str], launching: bool,
) -> Iterator[Problem]:  # fmt: skip
    """Checks the ranks, the launcher and the leader pod.

    In a dry run this machine only causes warnings.

    Args:
        argv: words of the engine's command.
        world: number of ranks that the engine's parallel sizes multiply to.
        ours: whether the configuration is written for this start, into a directory of this node.
        environ: environment of the leader pod.
        launching: false for a dry run.
    """
    if cluster.ranks != world:
        message = (
            f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs are {cluster.ranks} "
            f"ranks; the engine's parallel sizes make {world}"
        )
        yield Problem("TS-SERVE-WORLD", "error", "`nodes`", message)
    if cluster.launcher == "direct":
        if cluster.nodes > 1:
            message = f"{cluster.nodes} nodes need a launcher that reaches them"
            yield Problem("TS-SERVE-LAUNCHER", "error", "`launcher`", message)
        return
    for word in argv:
        if SPLIT_BY_WRAPPER & set(word):
            message = f"{RANK_WRAPPER} passes {word!r} on unquoted, so the shell splits or globs it"
            yield Problem("TS-SERVE-SPLIT-WORD", "error", word, message)
    severity: Severity = "error" if launching else "warning"
    for message, remedy in _missing_of_leader(cluster, environ):
        yield Problem("TS-SERVE-LAUNCHER", severity, cluster.launcher, message, remedy)
    if ours:
        message = "a configuration written for this start is only on this node"
        remedy = "write it with `trtspec build-config` where every node sees it, and pass `config`"
        yield Problem("TS-SERVE-LAUNCHER", severity, "`config`", message, remedy)


def _missing_of_leader(cluster: Cluster, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (message, remedy) for each thing that a LeaderWorkerSet's leader pod lacks."""
    if shutil.which("mpirun") is None:
        yield "mpirun is not on PATH", "start in NVIDIA's TensorRT-LLM release image"
    size = environ.get("LWS_GROUP_SIZE")
    if "LWS_LEADER_ADDRESS" not in environ:
        message = "LWS_LEADER_ADDRESS is not set: this is not a pod of a LeaderWorkerSet"
        yield message, "start in its leader pod"
    elif size != str(cluster.nodes):
        message = f"LWS_GROUP_SIZE is {size}, not {cluster.nodes}"
        yield message, "set the size of the LeaderWorkerSet to `nodes`"


IMAGE = "run in NVIDIA's TensorRT-LLM release image"
# so that the engine's log shows a phase when it begins, not when a buffer is full
ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
PATTERNS = Path(__file__).with_name("log_patterns.yaml")
PROGRAM = EngineProgram("trtllm-serve", "tensorrt_llm", "TensorRT-LLM", IMAGE, "trtllm_version")
GIB = 2**30


def engine_version() -> str | None:
    """Version of the engine that this interpreter imports, or of the executable on PATH.

    None if no engine is installed.
    """
    return installed_version() or PROGRAM.version()


def check_hardware(
    gpus: Sequence[InstalledGpu], deployment: Deployment, document: Document,
    environ: Mapping[str, str],
) -> Iterator[Problem]:  # fmt: skip
    """Checks that the visible GPUs have a new enough driver, and enough memory.

    Args:
        gpus: GPUs as nvidia-smi reports them.
        environ: environment of the engine, with CUDA_VISIBLE_DEVICES.
    """
    visible = visible_gpus(gpus, environ)
    if visible:
        yield from check_driver(visible[0].driver, deployment.schema.version)
        yield from check_fit(visible, deployment, document)


def check_driver(driver: str, version: Version) -> Iterator[Problem]:
    """Yields a warning if the driver is older than the engine is built for.

    It is not an error, because NVIDIA's images have libraries that run on some older drivers of
    data-centre GPUs.
    """
    row = read_beside("releases.yaml")["driver"]
    needed = row["oldest"]
    major = driver.partition(".")[0]
    if major.isdigit() and int(major) < needed:
        message = (
            f"driver {driver} is older than {needed}, "
            f"which TensorRT-LLM {version} is built for ({row['source']})"
        )
        yield Problem("TS-SERVE-DRIVER", "warning", "driver", message)


def check_fit(
    gpus: Sequence[InstalledGpu], deployment: Deployment, document: Document
) -> Iterator[Problem]:
    """Checks that weights, working memory and one request fit into the smallest GPU here.

    The memory is by the model of `trtspec plan`.
    """
    smallest = min(gpu.memory_bytes for gpu in gpus)
    if not smallest or deployment.target is None:
        return  # because nvidia-smi does not show the memory, or no target is known
    # only the memory matters, so that the other figures may be of any GPU
    gpu = replace(gpu_spec("b200"), memory_bytes=smallest)
    memory = deployment.memory(document, deployment.target, gpu)
    hardware = f"{memory.layout.gpus} x {gpus[0].name} of {smallest / GIB:.0f} GiB"
    if memory.free <= 0:
        needed_gib = (memory.capacity - memory.free) / GIB
        message = f"weights and working memory need {needed_gib:.0f} GiB on each of {hardware}"
        yield Problem("TS-SERVE-NO-FIT", "error", "memory", message)
        return
    length = deployment.size(document, "max_seq_len")
    if length > memory.kv_tokens:
        message = (
            f"the KV cache of {hardware} holds about {memory.kv_tokens} tokens, "
            f"and max_seq_len is {length}"
        )
        yield Problem("TS-SERVE-SMALL-CACHE", "warning", "memory", message)
