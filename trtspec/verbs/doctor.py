"""Examines this machine: the installed packages, the needs of each command, and the hardware."""

from __future__ import annotations

import os
import platform
import shutil
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NotRequired, TypedDict

from trtspec import machine
from trtspec.data_files import load_yaml
from trtspec.errors import MissingDependency, Problem
from trtspec.machine import torch_gpus

GPU = "an NVIDIA GPU"
CUDA_TORCH = "torch that sees it"
# engines are programs in an installation of their own
PROGRAMS = {
    "trtllm-serve": "run trtspec in the image of docker/serve.Dockerfile, which has the engine",
    "vllm": "install vLLM in an environment of its own and put its bin directory on PATH",
    CUDA_TORCH: "pip install --force-reinstall torch, from an index with builds for CUDA",
    GPU: "use a machine with an NVIDIA driver, and start its container with access to the GPUs "
    "(--gpus all)",
}
# what a command needs beyond the base installation: extras of trtspec, packages, programs
NEEDS: dict[str, list[str]] = load_yaml("needs.yaml")
FORCED = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


class CommandState(TypedDict):
    """Whether a command is ready, what it lacks, and how to install that."""

    ready: bool
    missing: list[str]
    install: str


class DoctorReport(TypedDict):
    python: str
    platform: str
    cpu_count: int
    packages: dict[str, str | None]
    commands: dict[str, CommandState]
    trtllm_serve: str | None
    trtllm_version: str | None
    trtllm_release: str
    vllm: str | None
    gpus: list[dict[str, str]]
    hub: dict[str, str | bool]
    disk: dict[str, int]
    problems: NotRequired[list[Problem]]


def examine() -> DoctorReport:
    """Returns everything that doctor reports, without secrets."""
    from huggingface_hub import constants, get_token

    from trtspec.launch.preflight import read_gpus
    from trtspec.trtllm.deployment import choose_version, installed_version
    from trtspec.vllm import PROGRAM as VLLM

    extras, wrong = package_state()
    release, reason = choose_version(None)
    trtllm_version = installed_version()
    gpus = [
        {
            "name": gpu.name,
            "memory": f"{gpu.memory_bytes // 2**20} MiB",
            "driver": gpu.driver,
            "compute_capability": gpu.capability,
        }
        for gpu in read_gpus() or ()
    ]
    cache = Path(constants.HF_HUB_CACHE)
    packages: dict[str, str | None] = {}
    for extra in extras.values():
        packages |= extra
    directories = {"here": Path.cwd(), "hub_cache": cache, "shared_memory": Path("/dev/shm")}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": machine.cores(),
        "packages": packages,
        "commands": {
            command: command_state(needs, extras, bool(gpus)) for command, needs in NEEDS.items()
        },
        "trtllm_serve": shutil.which("trtllm-serve"),
        "trtllm_version": trtllm_version,
        "trtllm_release": f"{release}, {reason}",
        "vllm": VLLM.version(),
        "gpus": gpus,
        "hub": {
            "cache": str(cache),
            "offline": constants.HF_HUB_OFFLINE,
            "token": "set" if get_token() else "not set",
        },
        "disk": {name: machine.free_disk(path) for name, path in directories.items()},
        "problems": wrong + environment_problems(gpus) + release_problems(trtllm_version),
    }


def package_state() -> tuple[dict[str, dict[str, str | None]], list[Problem]]:
    """Returns the installed version (or None) of every requirement by extra, and version problems.

    "" is the base installation.
    """
    from packaging.requirements import Requirement

    extras: dict[str, dict[str, str | None]] = {}
    problems = []
    for line in metadata.requires("trtspec") or []:
        requirement = Requirement(line)
        extra = line.partition("extra ==")[2].strip().strip("'\" ")
        if extra == "dev":
            continue
        version = None
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(requirement.name)
        extras.setdefault(extra, {})[requirement.name] = version
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            message = (
                f"{requirement.name} {version} is installed, trtspec needs {requirement.specifier}"
            )
            problems.append(Problem("TS-DOCTOR-VERSION", "error", requirement.name, message))
    return extras, problems


def command_state(
    needs: list[str], extras: dict[str, dict[str, str | None]], has_gpu: bool
) -> CommandState:
    """Returns `ready`, the missing packages, programs or GPU, and how to install them."""
    absent = [name for name in needs if name in PROGRAMS and not _present(name, has_gpu)]
    if absent:
        return {"ready": False, "missing": absent, "install": PROGRAMS[absent[0]]}
    present = set(PROGRAMS)
    for packages in extras.values():
        present.update(name for name, version in packages.items() if version)
    wanted: list[str] = []
    for need in needs:
        wanted += extras.get(need, [need])
    lacking = [name for name in wanted if name not in present]
    words = [f'"trtspec[{need}]"' if need in extras else need for need in needs]
    install = ""
    if lacking:
        install = f"pip install {' '.join(words)}"
    return {"ready": not lacking, "missing": lacking, "install": install}


def _present(name: str, has_gpu: bool) -> bool:
    if name == CUDA_TORCH:
        with suppress(metadata.PackageNotFoundError):
            return torch_gpus() > 0
    return has_gpu if name == GPU else shutil.which(name) is not None


def require(command: str) -> None:
    """Raises MissingDependency for a package that `command`, a key of NEEDS, lacks.

    Also raises it for an installed version that trtspec does not support.
    """
    extras, unfit = package_state()
    state = command_state(NEEDS[command], extras, has_gpu=True)
    if not state["ready"]:
        raise MissingDependency(f"{command} needs {', '.join(state['missing'])}", state["install"])
    for problem in unfit:
        raise MissingDependency(problem.message, problem.remedy, problem.code)


def environment_problems(gpus: list[dict[str, str]]) -> list[Problem]:
    problems = []
    if os.environ.get(FORCED):
        message = f"{FORCED} is set: TensorRT-LLM then fakes acceptance and corrupts the text"
        problems.append(Problem("TS-DOCTOR-FORCED-ACCEPTANCE", "error", FORCED, message))
    old = [gpu["name"] for gpu in gpus if float(gpu["compute_capability"]) < 10.0]
    if old:
        message = (
            f"{old[0]} has no FP4 tensor cores; NVFP4 checkpoints need Blackwell "
            "(compute capability 10.0)"
        )
        problems.append(Problem("TS-DOCTOR-NO-FP4", "warning", "gpu", message))
    return problems


def release_problems(release: str | None) -> list[Problem]:
    """Returns the known issues of the installed engine."""
    from trtspec.trtllm.schema import known_issues

    issues = known_issues(release) if release else []
    where = f"TensorRT-LLM {release}"
    return [Problem(each.code, "info", where, each.message, each.remedy) for each in issues]
