"""The GPUs of this machine as nvidia-smi reports them: the only place that runs it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIELDS = ("name", "memory.total", "driver_version", "compute_cap")
TIMEOUT = 60.0  # seconds; a driver that wakes up eight GPUs takes several


@dataclass(frozen=True)
class InstalledGpu:
    """`memory_bytes` is 0 where nvidia-smi does not say it, as for memory that the GPU shares with the host.
    `capability` is the compute capability, such as "10.0"."""

    name: str
    memory_bytes: int
    driver: str
    capability: str


def read_gpus() -> list[InstalledGpu] | None:
    """None where nvidia-smi is missing, fails, or is too old for the question."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[part.strip() for part in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    if any(len(row) != len(FIELDS) for row in rows):
        return None
    return [InstalledGpu(name, _bytes(memory), driver, capability) for name, memory, driver, capability in rows]


def _bytes(memory: str) -> int:
    """Of `183359` or `183359 MiB`."""
    mib = memory.partition(" ")[0]
    return int(mib) * 2**20 if mib.isdigit() else 0


def visible(gpus: Sequence[InstalledGpu], environ: Mapping[str, str]) -> list[InstalledGpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves; names other than numbers are counted, not looked up."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus)
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    if all(word.isdigit() for word in words):
        return [gpus[int(word)] for word in words if int(word) < len(gpus)]
    return list(gpus[: len(words)])


def used_memory() -> list[int] | None:
    """Bytes in use on each GPU, by all processes; None where nvidia-smi does not tell."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT)
    except (OSError, subprocess.SubprocessError):
        return None
    return [_bytes(line.strip()) for line in answer.stdout.splitlines() if line.strip()] or None
