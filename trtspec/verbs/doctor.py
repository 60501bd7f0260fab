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
# needs that are not Python packages of this environment, and the remedy if one is missing
PROGRAMS = {
    "trtllm-serve": "run trtspec in the image of docker/serve.Dockerfile, which has the engine",
    "vllm": "install vLLM in an environment of its own and put its bin directory on PATH",
    CUDA_TORCH: "pip install --force-reinstall torch, from an index with builds for CUDA",
    GPU: "use a machine with an NVIDIA driver, and start its container with access to the GPUs "
    "(--gpus all)",
}
# by command: extras of trtspec, packages and programs that it needs beyond the base installation
NEEDS: dict[str, list[str]] = load_yaml("needs.yaml")
MIN_FP4_CAPABILITY = 10.0  # of Blackwell GPUs, the first with FP4 tensor cores
FORCED = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


class CommandState(TypedDict):
    """State of a command on this machine.

    ready: whether everything that the command needs is present.
    missing: names of the missing packages, programs or hardware.
    install: command or action that provides them. Empty if the command is ready.
    """

    ready: bool
    missing: list[str]
    install: str


class DoctorReport(TypedDict):
    """JSON object of `trtspec doctor`.

    packages: installed version of each requirement. None if missing.
    commands: state of each command.
    trtllm_serve: path of the program trtllm-serve. None if missing.
    vllm: version of the installed vLLM. None if missing.
    trtllm_version: version of the installed TensorRT-LLM. None if missing.
    trtllm_release: release that configurations are written for, and the reason.
    gpus: name, memory, driver and compute capability of each GPU.
    hub: directory of the hub cache, and the settings of the hub client.
    disk: free bytes of each file system that the commands use.
    problems: findings, which the command takes out of the object.
    """

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
    """Returns the report on this machine. The report contains no secret, such as the hub token."""
    from huggingface_hub import constants, get_token

    from trtspec.launch.preflight import read_gpus
    from trtspec.trtllm.deployment import choose_version, installed_version
    from trtspec.vllm import PROGRAM as VLLM

    extras, version_problems = package_state()
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
        "problems": [
            *version_problems,
            *environment_problems(gpus),
            *release_problems(trtllm_version),
        ],
    }


def package_state() -> tuple[dict[str, dict[str, str | None]], list[Problem]]:
    """Returns the state of trtspec's requirements, and an error for each unsupported version.

    The state has an entry for each extra ("" for the base installation): the installed version of
    each of its packages, or None if the package is missing.
    """
    from packaging.requirements import Requirement

    extras: dict[str, dict[str, str | None]] = {}
    problems = []
    for line in metadata.requires("trtspec") or []:
        requirement = Requirement(line)
        marker = line.partition("extra ==")[2]
        extra = marker.strip("'\" ")
        if extra == "dev":  # users do not need the developers' tools
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
    """Returns the state of a command.

    needs: extras, packages and programs that the command needs.
    extras: versions of the packages by extra, as `package_state` returns them.
    has_gpu: whether the machine has an NVIDIA GPU.
    """
    missing_programs = [name for name in needs if name in PROGRAMS and not _present(name, has_gpu)]
    if missing_programs:
        # programs first, because without one the packages are useless
        install = PROGRAMS[missing_programs[0]]
        return {"ready": False, "missing": missing_programs, "install": install}
    present = set(PROGRAMS)
    for packages in extras.values():
        present.update(name for name, version in packages.items() if version)
    required: list[str] = []
    for need in needs:
        required += extras.get(need, [need])
    missing = [name for name in required if name not in present]
    arguments = [f'"trtspec[{need}]"' if need in extras else need for need in needs]
    install = ""
    if missing:
        install = f"pip install {' '.join(arguments)}"
    return {"ready": not missing, "missing": missing, "install": install}


def _present(name: str, has_gpu: bool) -> bool:
    """Whether the program or hardware `name`, a key of PROGRAMS, is on this machine."""
    if name == CUDA_TORCH:
        # without the package, no torch sees a GPU, and the result is False
        with suppress(metadata.PackageNotFoundError):
            return torch_gpus() > 0
    return has_gpu if name == GPU else shutil.which(name) is not None


def require(command: str) -> None:
    """Raises MissingDependency if a package or program of a command is missing.

    Also raises MissingDependency if trtspec does not support the version of an installed package.
    command: key of NEEDS.
    """
    extras, version_problems = package_state()
    # each command checks its device by itself
    state = command_state(NEEDS[command], extras, has_gpu=True)
    if not state["ready"]:
        raise MissingDependency(f"{command} needs {', '.join(state['missing'])}", state["install"])
    for problem in version_problems:
        raise MissingDependency(problem.message, problem.remedy, problem.code)


def environment_problems(gpus: list[dict[str, str]]) -> list[Problem]:
    """Returns the problems of the environment variables and of the GPUs.

    gpus: GPUs as in the report.
    """
    problems = []
    if os.environ.get(FORCED):
        message = f"{FORCED} is set: TensorRT-LLM then fakes acceptance and corrupts the text"
        problems.append(Problem("TS-DOCTOR-FORCED-ACCEPTANCE", "error", FORCED, message))
    names = [gpu["name"] for gpu in gpus if float(gpu["compute_capability"]) < MIN_FP4_CAPABILITY]
    if names:
        message = (
            f"{names[0]} has no FP4 tensor cores; NVFP4 checkpoints need Blackwell "
            "(compute capability 10.0)"
        )
        problems.append(Problem("TS-DOCTOR-NO-FP4", "warning", "gpu", message))
    return problems


def release_problems(release: str | None) -> list[Problem]:
    """Returns the known issues of a release of TensorRT-LLM. [] for None."""
    from trtspec.trtllm.schema import known_issues

    issues = known_issues(release) if release else []
    key = f"TensorRT-LLM {release}"
    return [Problem(issue.code, "info", key, issue.message, issue.remedy) for issue in issues]
