"""What can be known before any engine is launched: this machine, its port and memory, and the checkpoint's files."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.hub import Resolved
from trtspec.checkpoint.target_problems import read_target
from trtspec.errors import MissingDependency, Problem, TrtspecError
from trtspec.gpus import InstalledGpu, visible
from trtspec.report import file_sha256

# what is wrong with this machine rather than with the request: a dry run elsewhere only mentions it
OF_THIS_MACHINE = ("TS-SERVE-NO-ENGINE", "TS-SERVE-PORT", "TS-SERVE-NO-GPU", "TS-SERVE-OFFLINE", "TS-SERVE-REMOTE-CODE")
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_RECIPE = 179 * 2**30  # the smallest that a published Kimi recipe for an engine gives it
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
GIB = 2**30


@dataclass(frozen=True)
class EngineProgram:
    """The executable that a launch needs. `title` is the engine's name for people, `home` where it is found."""

    executable: str
    title: str
    home: str

    def check(self) -> Iterator[Problem]:
        if shutil.which(self.executable) is None:
            message = f"{self.executable} is not installed here"
            yield Problem("TS-SERVE-NO-ENGINE", "error", self.executable, message, self.home)

    def require(self) -> None:
        """Raises MissingDependency where it is not installed."""
        if shutil.which(self.executable) is None:
            message = f"{self.executable} is not on PATH: {self.title} is not installed here"
            remedy = f"{self.home}, or try `trtspec serve --backend reference` on this machine"
            raise MissingDependency(message, remedy)


def mentioned(problem: Problem) -> Problem:
    """As a dry run tells it, which may be made on another machine than the launch."""
    return replace(problem, severity="warning") if problem.code in OF_THIS_MACHINE else problem


def check_port(host: str, port: int) -> Iterator[Problem]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "0.0.0.0" else host, port))
        except OSError as error:
            message = f"port {port} on {host} cannot be taken ({error.strerror})"
            yield Problem("TS-SERVE-PORT", "error", f"{host}:{port}", message, "stop what holds it, or pass --port")


def check_gpus(needed: int, gpus: Sequence[InstalledGpu] | None) -> Iterator[Problem]:
    """`needed`: ranks on this machine. `gpus`: None where nvidia-smi could not be asked."""
    if gpus is None:
        message = f"nvidia-smi is missing here or fails: the {needed} GPUs that this needs could not be counted"
        yield Problem("TS-SERVE-GPUS-UNSEEN", "warning", "GPUs", message, "")
    elif len(gpus) < needed:
        message = f"{needed} GPUs are needed and {len(gpus)} are here"
        yield Problem("TS-SERVE-NO-GPU", "error", "GPUs", message, "lower --tp-size, or use a larger node")


def check_visible(gpus: Sequence[InstalledGpu], needed: int, environ: Mapping[str, str]) -> Iterator[Problem]:
    """What CUDA_VISIBLE_DEVICES leaves of the GPUs that could be read."""
    seen = visible(gpus, environ)
    if seen and len(seen) < min(needed, len(gpus)):
        message = f"CUDA_VISIBLE_DEVICES leaves {len(seen)} of {len(gpus)} GPUs, and {needed} are needed"
        yield Problem("TS-SERVE-NO-GPU", "error", "CUDA_VISIBLE_DEVICES", message, "unset it, or lower --tp-size")
    if len({gpu.name for gpu in seen}) > 1:
        message = f"the GPUs differ: {', '.join(sorted({gpu.name for gpu in seen}))}; the slowest sets the pace"
        yield Problem("TS-SERVE-GPUS-DIFFER", "warning", "GPUs", message, "choose equal ones (CUDA_VISIBLE_DEVICES)")


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
