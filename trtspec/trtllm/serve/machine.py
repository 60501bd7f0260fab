"""What a machine must have for a launch: GPUs, driver, memory that fits, shared and host memory, caches, an address."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from trtspec.checkpoint.hub import Resolved
from trtspec.data_files import gpu_spec
from trtspec.errors import Problem, UsageError
from trtspec.planning.layout import Layout
from trtspec.planning.memory import memory
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.document import Document
from trtspec.trtllm.lint.finding import Deployment
from trtspec.trtllm.releases import driver_for

QUERY = "name,memory.total,driver_version,compute_cap"
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_RECIPE = 179 * 2**30  # the smallest that a published Kimi recipe for this engine gives it
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    driver: str
    capability: str


def read_gpus() -> list[Gpu]:
    """The GPUs as nvidia-smi tells them; none where it is missing, fails, or is too old for the question."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in answer.stdout.splitlines()]
    return [
        Gpu(name, int(mib) * 2**20, driver, capability)
        for name, mib, driver, capability in (row for row in rows if len(row) == 4 and row[1].isdigit())
    ]


def visible(gpus: list[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves; names other than numbers are counted, not looked up."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    if all(word.isdigit() for word in words):
        return [gpus[int(word)] for word in words if int(word) < len(gpus)]
    return gpus[: len(words)]


def check_hardware(
    gpus: list[Gpu], deployment: Deployment, document: Document, needed: int, environ: Mapping[str, str]
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
    gpus: list[Gpu], deployment: Deployment, document: Document, target: ModelSpec, head: HeadSpec | None
) -> Iterator[Problem]:
    """By the memory model of `trtspec plan`, on the smallest GPU that is here."""

    def whole(path: str, default: int) -> int:
        value = deployment.setting(document, path, default)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    ranks = whole("tensor_parallel_size", 1)
    smallest = min(gpu.memory_bytes for gpu in gpus)
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
