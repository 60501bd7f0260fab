"""What can be known before a launch: about the request, and about this machine, its GPUs, memory, port and files."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.hub import Resolved
from trtspec.checkpoint.target_problems import read_target
from trtspec.data_files import gpu_spec
from trtspec.errors import MissingDependency, Problem, TrtspecError, UsageError
from trtspec.gpus import InstalledGpu, visible
from trtspec.planning.layout import Layout
from trtspec.planning.memory import memory
from trtspec.report import file_sha256
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.deployment import Deployment, installed_version
from trtspec.trtllm.document import Document
from trtspec.trtllm.lint.engine import FORCED_ACCEPTANCE
from trtspec.trtllm.releases import driver_for

EXECUTABLE = "trtllm-serve"
VERSION = re.compile(r"\b(\d+\.\d+\.\d+(?:(?:rc|\.post|\.dev)\d+)*)\b")
# what is wrong with this machine rather than with the request: a dry run elsewhere only mentions it
OF_THIS_MACHINE = ("TS-SERVE-NO-ENGINE", "TS-SERVE-PORT", "TS-SERVE-NO-GPU", "TS-SERVE-OFFLINE", "TS-SERVE-REMOTE-CODE")
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_RECIPE = 179 * 2**30  # the smallest that a published Kimi recipe for this engine gives it
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
GIB = 2**30


def engine_version() -> str | None:
    """The installed engine's version: its package, else what the executable says; None when there is neither."""
    found = installed_version()
    if found or shutil.which(EXECUTABLE) is None:
        return found
    try:
        answer = subprocess.run([EXECUTABLE, "--version"], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = VERSION.search(answer.stdout) if answer.returncode == 0 else None
    return match[1] if match else None


def require_executable() -> None:
    if shutil.which(EXECUTABLE) is None:
        raise MissingDependency(
            f"{EXECUTABLE} is not on PATH: TensorRT-LLM is not installed here",
            "run in NVIDIA's TensorRT-LLM release image, or try `trtspec serve --backend reference` on this machine",
        )


def mentioned(problem: Problem) -> Problem:
    """As a dry run tells it, which may be made on another machine than the launch."""
    return replace(problem, severity="warning") if problem.code in OF_THIS_MACHINE else problem


def check_environment(environ: Mapping[str, str]) -> Iterator[Problem]:
    if environ.get(FORCED_ACCEPTANCE):
        message = f"{FORCED_ACCEPTANCE}={environ[FORCED_ACCEPTANCE]} accepts drafts unseen: the text is corrupt"
        yield Problem("TS-SERVE-FORCED-ACCEPTANCE", "error", "environment", message, f"unset {FORCED_ACCEPTANCE}")


def check_port(host: str, port: int) -> Iterator[Problem]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "0.0.0.0" else host, port))
        except OSError as error:
            message = f"port {port} on {host} cannot be taken ({error.strerror})"
            yield Problem("TS-SERVE-PORT", "error", f"{host}:{port}", message, "stop what holds it, or pass --port")


def check_engine() -> Iterator[Problem]:
    if shutil.which(EXECUTABLE) is None:
        message = f"{EXECUTABLE} is not installed here"
        yield Problem("TS-SERVE-NO-ENGINE", "error", EXECUTABLE, message, "launch in NVIDIA's release image")


def check_gpus(needed: int, gpus: Sequence[InstalledGpu] | None) -> Iterator[Problem]:
    """`needed`: ranks on this machine. `gpus`: None where nvidia-smi could not be asked."""
    if gpus is None:
        message = f"nvidia-smi is missing here or fails: the {needed} GPUs that this needs could not be counted"
        yield Problem("TS-SERVE-GPUS-UNSEEN", "warning", "GPUs", message, "")
    elif len(gpus) < needed:
        message = f"{needed} GPUs are needed and {len(gpus)} are here"
        yield Problem("TS-SERVE-NO-GPU", "error", "GPUs", message, "lower --tp-size, or use a larger node")


def check_files(resolved: Resolved, environ: Mapping[str, str]) -> Iterator[Problem]:
    """A local checkpoint must be whole, a target also without anything that `inspect` calls an error; one that is not
    here must be allowed to come."""
    if resolved.path is not None:
        try:
            if resolved.kind == "target":
                yield from (one for one in read_target(resolved.path).problems if one.severity == "error")
            else:
                Checkpoint.open(resolved.path)
        except TrtspecError as error:
            yield Problem("TS-SERVE-INCOMPLETE", "error", str(resolved.path), error.message, error.remedy)
    elif environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        message = f"{resolved.hub_id} is not on this machine and HF_HUB_OFFLINE is set"
        yield Problem("TS-SERVE-OFFLINE", "error", resolved.name, message, "unset it, or pass a local directory")


def remote_code_problem(target: Resolved) -> Problem:
    """Names every file of code that the engine would run, with its hash."""
    files = code_files(target.path) if target.path is not None else []
    if files:
        listed = "; ".join(f"{name} sha256:{digest}" for name, digest in files)
        message = f"{target.name} brings code that the engine would run: {listed}"
    else:
        modules = sorted({str(value).rpartition(".")[0] for value in target.config().get("auto_map", {}).values()})
        message = f"{target.name} brings code that the engine would run ({', '.join(modules)}); it is not here to hash"
    remedy = "read it, then pass --trust-remote-code"
    return Problem("TS-SERVE-REMOTE-CODE", "error", target.name, message, remedy)


def code_files(directory: Path) -> list[tuple[str, str]]:
    """(relative name, sha256) of every Python file of a checkpoint."""
    found = sorted(path for path in directory.rglob("*.py") if path.is_file())
    return [(os.fspath(path.relative_to(directory)), file_sha256(path)) for path in found]


def check_hardware(
    gpus: Sequence[InstalledGpu], deployment: Deployment, document: Document, needed: int, environ: Mapping[str, str]
) -> Iterator[Problem]:
    """Driver and fit, on GPUs that could be read."""
    seen = visible(gpus, environ)
    if not seen:
        return
    if len(seen) < min(needed, len(gpus)):
        message = f"CUDA_VISIBLE_DEVICES leaves {len(seen)} of {len(gpus)} GPUs, and {needed} are needed"
        yield Problem("TS-SERVE-NO-GPU", "error", "CUDA_VISIBLE_DEVICES", message, "unset it, or lower --tp-size")
    if len({gpu.name for gpu in seen}) > 1:
        message = f"the GPUs differ: {', '.join(sorted({gpu.name for gpu in seen}))}; the slowest sets the pace"
        yield Problem("TS-SERVE-GPUS-DIFFER", "warning", "GPUs", message, "choose equal ones (CUDA_VISIBLE_DEVICES)")
    yield from check_driver(seen[0].driver, deployment.schema.version)
    if deployment.target is not None:
        yield from check_fit(seen, deployment, document, deployment.target, deployment.head)


def check_driver(driver: str, version: Version) -> Iterator[Problem]:
    """A warning only: NVIDIA's images bring libraries that run on some older drivers of data-centre GPUs."""
    needed, source = driver_for(version)
    major = driver.partition(".")[0]
    if major.isdigit() and int(major) < needed:
        message = f"driver {driver} is older than {needed}, which TensorRT-LLM {version} is built for ({source})"
        yield Problem("TS-SERVE-DRIVER", "warning", "driver", message, f"install driver {needed} or later")


def check_fit(
    gpus: Sequence[InstalledGpu], deployment: Deployment, document: Document, target: ModelSpec, head: HeadSpec | None
) -> Iterator[Problem]:
    """By the memory model of `trtspec plan`, on the smallest GPU that is here."""

    def whole(path: str, default: int) -> int:
        value = deployment.setting(document, path, default)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    ranks = whole("tensor_parallel_size", 1)
    smallest = min(gpu.memory_bytes for gpu in gpus)
    if not smallest:
        return  # nvidia-smi does not say it
    experts, spread = whole("moe_expert_parallel_size", 1), deployment.setting(document, "enable_attention_dp") is True
    try:
        layout = Layout(ranks, experts > 1, spread)
    except UsageError:
        return  # lint says what is wrong with these sizes
    fraction = document.get("kv_cache_config.free_gpu_memory_fraction")
    room = memory(
        target, head, replace(gpu_spec("b200"), name=gpus[0].name, memory_bytes=smallest), layout,
        fraction=fraction if isinstance(fraction, float) else 0.9, max_num_tokens=whole("max_num_tokens", 8192),
    )  # fmt: skip
    where = f"{ranks} x {gpus[0].name} of {smallest / GIB:.0f} GiB"
    if room.free <= 0:
        message = f"weights and working memory need {(room.capacity - room.free) / GIB:.0f} GiB on each of {where}"
        remedy = "use more or larger GPUs (`trtspec plan` says how many), or quantize to NVFP4"
        yield Problem("TS-SERVE-NO-FIT", "error", "memory", message, remedy)
        return
    length = whole("max_seq_len", 0)
    if length > room.kv_tokens:
        message = f"the KV cache of {where} holds about {room.kv_tokens} tokens, and max_seq_len is {length}"
        yield Problem("TS-SERVE-SMALL-CACHE", "warning", "memory", message, "lower max_seq_len, or use more GPUs")


def check_host(targets: list[Resolved], host: str, remote_code: bool, environ: Mapping[str, str]) -> Iterator[Problem]:
    """What else of the machine a launch needs. Only asked for a real one."""
    yield from check_shared_memory(SHARED_MEMORY)
    size = sum(file.stat().st_size for target in targets if target.path for file in target.path.glob("*.safetensors"))
    yield from check_memory_limit(CGROUP_LIMIT, size)
    if remote_code:
        yield from check_modules_cache(environ)
    yield from check_reachable(host, environ)


def check_shared_memory(place: Path) -> Iterator[Problem]:
    if not place.is_dir():
        return
    total = shutil.disk_usage(place).total
    if total < SHARED_MEMORY_RECIPE:
        message = f"{place} has {total / GIB:.1f} GiB; a load can die with a bus error (published recipes give it "
        message += f"{SHARED_MEMORY_RECIPE // GIB} GiB, the engine's guide for Kimi-K2-Thinking about 640 GB)"
        remedy = "docker: --ipc=host or --shm-size; Kubernetes: an emptyDir of medium Memory"
        yield Problem("TS-SERVE-SHARED-MEMORY", "warning", str(place), message, remedy)


def check_memory_limit(limit: Path, size: int) -> Iterator[Problem]:
    """A container's limit counts the pages of the files that are read."""
    try:
        text = limit.read_text(encoding="utf-8").strip()
    except OSError:
        return
    if text.isdigit() and int(text) < size:
        message = (
            f"this container may use {int(text) / GIB:.0f} GiB and the checkpoint has {size / GIB:.0f} GiB; pods were"
        )
        message += " killed while they loaded"
        yield Problem("TS-SERVE-HOST-MEMORY", "warning", "memory limit", message, "raise the container's memory limit")


def check_modules_cache(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Code of a checkpoint is copied there before it is run."""
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    place = Path(os.path.expanduser(environ.get("HF_MODULES_CACHE") or os.path.join(home, "modules")))
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return
    except OSError as error:
        message = f"{place} cannot be written ({error.strerror}), and the checkpoint's code is copied there to run"
        yield Problem("TS-SERVE-CACHE", "error", "HF_MODULES_CACHE", message, "set it to a place that can be written")


def check_reachable(host: str, environ: Mapping[str, str]) -> Iterator[Problem]:
    inside = "KUBERNETES_SERVICE_HOST" in environ or Path("/run/.containerenv").exists()
    if inside and host in ("localhost", "127.0.0.1", "::1"):
        message = f"{host} inside a pod is reached by nobody else, probes included"
        yield Problem("TS-SERVE-LOCALHOST", "warning", host, message, "pass --host 0.0.0.0")
