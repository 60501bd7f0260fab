"""What can be known before a launch: the engine's version, remote code, port, environment, files, GPUs."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.hub import Resolved
from trtspec.errors import MissingDependency, Problem, TrtspecError
from trtspec.report import file_sha256
from trtspec.trtllm.lint.engine import FORCED_ACCEPTANCE
from trtspec.trtllm.names import installed_version

EXECUTABLE = "trtllm-serve"
VERSION = re.compile(r"\b(\d+\.\d+\.\d+(?:(?:rc|\.post|\.dev)\d+)*)\b")
# what is wrong with this machine rather than with the request: a dry run elsewhere only mentions it
OF_THIS_MACHINE = ("TS-SERVE-NO-ENGINE", "TS-SERVE-PORT", "TS-SERVE-NO-GPU", "TS-SERVE-OFFLINE", "TS-SERVE-REMOTE-CODE")


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


def preflight(
    targets: list[Resolved],
    *,
    host: str,
    port: int,
    gpus_needed: int,
    remote_code: bool,
    trusted: bool,
    environ: Mapping[str, str],
    launching: bool,
) -> list[Problem]:
    """Every problem at once. `targets` are the target and, where there is one, the head."""
    problems = [
        *check_environment(environ),
        *check_port(host, port),
        *check_gpus(gpus_needed),
        *check_engine(),
        *(problem for resolved in targets for problem in check_files(resolved, environ)),
    ]
    if remote_code and not trusted:
        problems.append(remote_code_problem(targets[0]))
    return problems if launching else [_mentioned(problem) for problem in problems]


def _mentioned(problem: Problem) -> Problem:
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


def check_gpus(needed: int) -> Iterator[Problem]:
    if shutil.which("nvidia-smi") is None:
        message = f"no nvidia-smi here: the {needed} GPUs that this needs could not be counted"
        yield Problem("TS-SERVE-GPUS-UNSEEN", "warning", "GPUs", message, "")
        return
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    found = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    if found < needed:
        message = f"{needed} GPUs are needed and {found} are here"
        yield Problem("TS-SERVE-NO-GPU", "error", "GPUs", message, "lower --tp-size, or use a larger node")


def check_files(resolved: Resolved, environ: Mapping[str, str]) -> Iterator[Problem]:
    """A local checkpoint must be whole; one that is not here must be allowed to come."""
    if resolved.path is not None:
        try:
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
