"""The command line that starts the engine: that of `trtllm-serve` (ours, checked options of the user's, and nothing
that is in the YAML too), and around it, over the pods of a LeaderWorkerSet, mpirun; and what is checked before it is
launched: the engine's version, the driver, and whether this deployment fits."""

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
from trtspec.specs import ModelSpec, gpu_spec
from trtspec.trtllm.deployment import Deployment, installed_version, parse_passed
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import Intent
from trtspec.trtllm.rules.model import ENGINE
from trtspec.trtllm.schema import Schema, read_beside, schema_for


def build_command(
    intent: Intent, target: ModelSpec, document: Document, config_path: str, *, host: str = "0.0.0.0", port: int = 8000,
    sizes: Mapping[str, Any] | None = None, passed: Sequence[str] = (), cache: str | None = None,
) -> list[str]:  # fmt: skip
    """The intent's sizes go to argv where the file does not have them. `sizes`, by YAML path, go there in any case, and
    lint then reports both; `passed` are words for trtllm-serve itself."""
    sizes = sizes or {}
    schema = schema_for(intent.version)
    chosen, _ = parse_passed(schema, passed)

    def decided(name: str) -> bool:
        return name in chosen or document.has(name)

    takes_revision = schema.option("--revision").takes
    model = engine_name(intent.target) if takes_revision else engine_path(intent.target, cache)
    argv = ["trtllm-serve", model, "--host", host, "--port", str(port)]
    revision = engine_revision(intent.target)
    if revision is not None and decided("revision"):
        message = f"{intent.target} names its revision, and `revision` is given to the engine too"
        raise UsageError(message, "give it once")
    if revision is not None and takes_revision:
        argv += ["--revision", revision]
    argv += [] if decided("backend") else ["--backend", "pytorch"]
    for key, value in {**intent.settings_in_argv(), **sizes}.items():
        if key not in chosen and (key in sizes or not document.has(key)):
            flag = min(schema.options[key].flags, key=len)
            argv += [flag] if schema.options[key].is_flag else [flag, str(value)]
    # what a Kimi needs beyond the model card's command, as far as the version is known to take it
    parser = reasoning_parser(target.family, intent.published_as, ENGINE)
    exists = all(schema.behaviours.get(f"parser_of_{parser}", [True]))
    if (
        parser is not None
        and _takes(schema, "reasoning_parser", parser)
        and exists
        and not decided("reasoning_parser")
    ):
        argv += ["--reasoning_parser", parser]
    tool_parser = target.family.tool_parser
    if _takes(schema, "tool_parser", tool_parser) and "tool_parser" not in chosen:
        argv += ["--tool_parser", tool_parser]
    silenced = "telemetry" in chosen or document.has("telemetry_config.disabled")
    if schema.option("--telemetry").takes and not silenced:
        argv.append("--no-telemetry")
    return [*argv, *passed, "--extra_llm_api_options", config_path]


def _takes(schema: Schema, name: str, value: str) -> bool:
    """Whether every source around the release has this option with this choice."""
    option = schema.option(f"--{name}")
    return option.takes and all(value in each.choices for each in option.taken)


RANK_WRAPPER = "trtllm-llmapi-launch"
# trtllm-llmapi-launch expands its command unquoted: the shell would split or glob these
SPLIT_BY_WRAPPER = frozenset(" \t\n*?[")
# compilers' caches; on a home directory that nodes share, their ranks overwrite each other's files
NODE_LOCAL = {
    "TRITON_CACHE_DIR": "/tmp/trtspec/triton",
    "FLASHINFER_WORKSPACE_BASE": "/tmp/trtspec/flashinfer",
}


@dataclass(frozen=True)
class Cluster:
    """`args`: more words for mpirun. One rank per GPU."""

    launcher: Literal["direct", "lws"] = "direct"
    nodes: int = 1
    gpus_per_node: int = 1
    args: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


def with_launcher(
    argv: list[str], env: dict[str, str], cluster: Cluster, environ: Mapping[str, str]
) -> list[str]:
    """With launcher lws, mpirun starting `argv` once per GPU of every node with the variables `env`; else `argv`
    itself. `environ` has the addresses of the pods."""
    if cluster.launcher == "direct":
        return argv
    each = str(cluster.gpus_per_node)
    hosts = ",".join(f"{host}:{each}" for host in lws_hosts(environ))
    exported = [
        word for name in env for word in ("-x", name)
    ]  # Open MPI hands on only its own variables
    words = [
        "mpirun",
        "-np",
        str(cluster.ranks),
        "-N",
        each,
        "--host",
        hosts,
        *exported,
        *cluster.args,
    ]
    return [*words, RANK_WRAPPER, *argv]


def cluster_environment(cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """Where ranks on several nodes keep their caches: as the user has set it, else on their own node."""
    return (
        {}
        if cluster.nodes == 1
        else {name: environ.get(name, path) for name, path in NODE_LOCAL.items()}
    )


def lws_hosts(environ: Mapping[str, str]) -> list[str]:
    """Addresses of the pods of a LeaderWorkerSet group, leader first: `<leader>` and `<leader>-<i>` in one service."""
    address = environ.get("LWS_LEADER_ADDRESS", "LWS_LEADER_ADDRESS")
    leader, dot, domain = address.partition(".")
    size = environ.get("LWS_GROUP_SIZE", "")
    count = int(size) if size.isdecimal() else 1
    return [address, *(f"{leader}-{index}{dot}{domain}" for index in range(1, count))]


def check_cluster(
    cluster: Cluster,
    argv: list[str],
    world: int,
    ours: bool,
    environ: Mapping[str, str],
    launching: bool,
) -> Iterator[Problem]:
    """`world`: ranks that the engine's parallel sizes multiply to. `ours`: the configuration is written for this start,
    into a directory of this node. A dry run elsewhere only mentions the machine."""
    if cluster.ranks != world:
        message = f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs are {cluster.ranks} ranks; the engine's "
        message += f"parallel sizes make {world}"
        yield Problem("TS-SERVE-WORLD", "error", "`nodes`", message)
    if cluster.launcher == "direct":
        if cluster.nodes > 1:
            message = f"{cluster.nodes} nodes need a launcher that reaches them"
            yield Problem("TS-SERVE-LAUNCHER", "error", "`launcher`", message)
        return
    for word in argv:
        if SPLIT_BY_WRAPPER & set(word):
            message = f"{RANK_WRAPPER} hands {word!r} on unquoted, in pieces"
            yield Problem("TS-SERVE-SPLIT-WORD", "error", word, message)
    severity: Severity = "error" if launching else "warning"
    for message, remedy in _missing_of_leader(cluster, environ):
        yield Problem("TS-SERVE-LAUNCHER", severity, cluster.launcher, message, remedy)
    if ours:
        message = "a configuration written for this start lies on this node alone"
        remedy = "write it with `trtspec build-config` where every node sees it, and pass `config`"
        yield Problem("TS-SERVE-LAUNCHER", severity, "`config`", message, remedy)


def _missing_of_leader(cluster: Cluster, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What the leader pod of a LeaderWorkerSet has and this machine lacks, each with its remedy."""
    if shutil.which("mpirun") is None:
        yield "mpirun is not on PATH", "start in NVIDIA's TensorRT-LLM release image"
    if "LWS_LEADER_ADDRESS" not in environ:
        yield (
            "LWS_LEADER_ADDRESS is not set: this is no pod of a LeaderWorkerSet",
            "start in its leader pod",
        )
    elif environ.get("LWS_GROUP_SIZE") != str(cluster.nodes):
        message = f"LWS_GROUP_SIZE is {environ.get('LWS_GROUP_SIZE')}, not {cluster.nodes}"
        yield message, "size of the LeaderWorkerSet = `nodes`"


IMAGE = "run in NVIDIA's TensorRT-LLM release image"
# the engine's log shows a phase when it begins, not when a buffer is full
ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
PATTERNS = Path(__file__).with_name("log_patterns.yaml")
PROGRAM = EngineProgram("trtllm-serve", "tensorrt_llm", "TensorRT-LLM", IMAGE, "trtllm_version")
GIB = 2**30


def engine_version() -> str | None:
    """The installed engine's version: of the package that this interpreter imports, else of the executable on PATH."""
    return installed_version() or PROGRAM.version()


def check_hardware(
    gpus: Sequence[InstalledGpu],
    deployment: Deployment,
    document: Document,
    environ: Mapping[str, str],
) -> Iterator[Problem]:
    """Whether the driver is new enough and the deployment fits, on the GPUs of nvidia-smi."""
    if seen := visible_gpus(gpus, environ):
        yield from check_driver(seen[0].driver, deployment.schema.version)
        yield from check_fit(seen, deployment, document)


def check_driver(driver: str, version: Version) -> Iterator[Problem]:
    """A warning only: NVIDIA's images bring libraries that run on some older drivers of data-centre GPUs."""
    row = read_beside("releases.yaml")["driver"]
    needed, source = row["oldest"], row["source"]
    major = driver.partition(".")[0]
    if major.isdigit() and int(major) < needed:
        message = f"driver {driver} is older than {needed}, which TensorRT-LLM {version} is built for ({source})"
        yield Problem("TS-SERVE-DRIVER", "warning", "driver", message)


def check_fit(
    gpus: Sequence[InstalledGpu], deployment: Deployment, document: Document
) -> Iterator[Problem]:
    """By the memory model of `trtspec plan`, on the smallest GPU that is here."""
    smallest = min(gpu.memory_bytes for gpu in gpus)
    if not smallest or deployment.target is None:
        return  # nvidia-smi does not say it
    here = replace(gpu_spec("b200"), memory_bytes=smallest)
    room = deployment.memory(document, deployment.target, here)
    where = f"{room.layout.gpus} x {gpus[0].name} of {smallest / GIB:.0f} GiB"
    if room.free <= 0:
        message = f"weights and working memory need {(room.capacity - room.free) / GIB:.0f} GiB on each of {where}"
        yield Problem("TS-SERVE-NO-FIT", "error", "memory", message)
        return
    length = deployment.size(document, "max_seq_len")
    if length > room.kv_tokens:
        message = f"the KV cache of {where} holds about {room.kv_tokens} tokens, and max_seq_len is {length}"
        yield Problem("TS-SERVE-SMALL-CACHE", "warning", "memory", message)
