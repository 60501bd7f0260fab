"""What can be known before TensorRT-LLM is launched: its version, its driver, and whether this deployment fits."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from packaging.version import Version

from trtspec.data_files import gpu_spec
from trtspec.errors import Problem, UsageError
from trtspec.gpus import InstalledGpu, visible
from trtspec.launch.preflight import EngineProgram, check_visible
from trtspec.planning.layout import Layout
from trtspec.planning.memory import memory
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.deployment import Deployment, installed_version
from trtspec.trtllm.document import Document
from trtspec.trtllm.lint.engine import FORCED_ACCEPTANCE
from trtspec.trtllm.releases import driver_for

PROGRAM = EngineProgram("trtllm-serve", "TensorRT-LLM", "run in NVIDIA's TensorRT-LLM release image")
VERSION = re.compile(r"\b(\d+\.\d+\.\d+(?:(?:rc|\.post|\.dev)\d+)*)\b")
GIB = 2**30


def engine_version() -> str | None:
    """The installed engine's version: its package, else what the executable says; None when there is neither."""
    found = installed_version()
    if found or shutil.which(PROGRAM.executable) is None:
        return found
    try:
        answer = subprocess.run(
            [PROGRAM.executable, "--version"], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = VERSION.search(answer.stdout) if answer.returncode == 0 else None
    return match[1] if match else None


def check_environment(environ: Mapping[str, str]) -> Iterator[Problem]:
    if environ.get(FORCED_ACCEPTANCE):
        message = f"{FORCED_ACCEPTANCE}={environ[FORCED_ACCEPTANCE]} accepts drafts unseen: the text is corrupt"
        yield Problem("TS-SERVE-FORCED-ACCEPTANCE", "error", "environment", message, f"unset {FORCED_ACCEPTANCE}")


def check_hardware(
    gpus: Sequence[InstalledGpu], deployment: Deployment, document: Document, needed: int, environ: Mapping[str, str]
) -> Iterator[Problem]:
    """Driver and fit, on GPUs that could be read."""
    seen = visible(gpus, environ)
    if not seen:
        return
    yield from check_visible(gpus, needed, environ)
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
