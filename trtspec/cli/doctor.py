"""`trtspec doctor`: what is installed, what each command lacks, and what to expect of this machine."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trtspec.cli.options import JsonOption
from trtspec.errors import CheckFailed, Problem, has_errors

# the extras of the package that a command needs beyond the base installation
NEEDS = {
    "demo": ("reference", "modelopt", "report"),
    "inspect": (),
    "quantize": ("reference",),
    "calibrate": ("reference", "modelopt"),
    "synthesize": (),
    "train": ("reference", "modelopt"),
    "convert": ("reference",),
    "plan": (),
    "build-config": (),
    "lint": (),
    "serve --backend reference": ("reference",),
    "serve --backend trtllm": ("trtllm-serve",),
    "serve --backend vllm": ("vllm",),
    "bench": ("report",),
    "check": (),
    "prove": (),
    "watch": (),
}
# engines are programs in an installation of their own
PROGRAMS = {
    "trtllm-serve": "run inside NVIDIA's TensorRT-LLM container",
    "vllm": "install vLLM in an environment of its own, put its bin directory on PATH",
}
FORCED = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    json_: JsonOption = False


def doctor(options: DoctorOptions) -> None:
    """Report what is installed, what is missing for which command, and what hardware this machine has.

    Changes nothing. Exits with status 3 when something is broken, not when an optional part is absent.
    """
    from trtspec.report import print_json

    report = examine()
    problems: list[Problem] = report["problems"]
    if options.json_:
        print_json(report | {"problems": [problem.to_dict() for problem in problems]})
    else:
        show(report)
    if has_errors(problems):
        raise CheckFailed("this installation or machine has errors", "follow the remedy of each above")


def examine() -> dict[str, Any]:
    """Everything that doctor reports; no key of it holds a secret."""
    from trtspec.vllm import installed_vllm

    extras, wrong = package_state()
    gpus = query_gpus()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: found for extra in extras.values() for name, found in extra.items()},
        "commands": {command: command_state(needs, extras) for command, needs in NEEDS.items()},
        "trtllm_serve": shutil.which("trtllm-serve"),
        "vllm": {"path": shutil.which("vllm"), "version": installed_vllm()},
        "gpus": gpus,
        "hub": hub_state(),
        "disk": disk_state(),
        "problems": wrong + environment_problems(gpus),
    }


def package_state() -> tuple[dict[str, dict[str, str | None]], list[Problem]]:
    """Installed version (or None) of every requirement, by extra ("" is the base), and versions that do not fit."""
    from packaging.requirements import Requirement

    extras: dict[str, dict[str, str | None]] = {}
    problems = []
    for line in metadata.requires("trtspec") or []:
        requirement = Requirement(line)
        extra = _extra(line)
        if requirement.name == "trtspec" or extra == "dev":
            continue
        version = _version(requirement.name)
        extras.setdefault(extra, {})[requirement.name] = version
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            message = f"{requirement.name} {version} is installed, trtspec needs {requirement.specifier}"
            remedy = "install with -c constraints.txt, or in an environment of its own"
            problems.append(Problem("TS-DOCTOR-VERSION", "error", requirement.name, message, remedy))
    return extras, problems


def _extra(requirement: str) -> str:
    marker = requirement.partition("extra ==")[2].strip()
    return marker.strip("'\" ") if marker else ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def command_state(needs: tuple[str, ...], extras: dict[str, dict[str, str | None]]) -> dict[str, Any]:
    """`ready`, the missing packages and the command that installs them."""
    missing = [name for extra in needs for name, version in extras.get(extra, {}).items() if version is None]
    absent = [name for name in needs if name in PROGRAMS and shutil.which(name) is None]
    if absent:
        return {"ready": False, "missing": absent, "install": PROGRAMS[absent[0]]}
    install = f'pip install "trtspec[{",".join(needs)}]"' if missing else ""
    return {"ready": not missing, "missing": missing, "install": install}


def query_gpus() -> list[dict[str, str]]:
    """What nvidia-smi reports; empty where there is no driver."""
    from trtspec.gpus import read_gpus

    return [
        {"name": gpu.name, "memory": f"{gpu.memory_bytes // 2**20} MiB", "driver": gpu.driver,
         "compute_capability": gpu.capability}
        for gpu in read_gpus() or ()
    ]  # fmt: skip


def hub_state() -> dict[str, Any]:
    from huggingface_hub import constants, get_token

    return {
        "cache": constants.HF_HUB_CACHE,
        "cache_exists": Path(constants.HF_HUB_CACHE).is_dir(),
        "offline": bool(constants.HF_HUB_OFFLINE),
        "token": "set" if get_token() else "not set",
    }


def disk_state() -> dict[str, int]:
    """Free bytes where outputs, the hub cache and shared memory lie."""
    from huggingface_hub import constants

    from trtspec.report import existing

    places = {"here": Path.cwd(), "hub_cache": Path(constants.HF_HUB_CACHE), "shared_memory": Path("/dev/shm")}
    free = {}
    for name, place in places.items():
        free[name] = shutil.disk_usage(existing(place)).free
    return free


def environment_problems(gpus: list[dict[str, str]]) -> list[Problem]:
    problems = []
    if os.environ.get(FORCED):
        message = f"{FORCED} is set: TensorRT-LLM then fakes acceptance and corrupts the text"
        problems.append(Problem("TS-DOCTOR-FORCED-ACCEPTANCE", "error", FORCED, message, f"unset {FORCED}"))
    old = [gpu["name"] for gpu in gpus if float(gpu["compute_capability"]) < 10.0]
    if old:
        message = f"{old[0]} has no FP4 tensor cores; NVFP4 checkpoints need Blackwell (compute capability 10.0)"
        remedy = "serve the INT4 or FP8 checkpoint here"
        problems.append(Problem("TS-DOCTOR-NO-FP4", "warning", "gpu", message, remedy))
    return problems


def show(report: dict[str, Any]) -> None:
    """One table of commands, then the machine, then the problems; on stdout."""
    from trtspec.report import Table, print_tables, problem_lines

    rows = [
        [command, "ready" if state["ready"] else "missing", ", ".join(state["missing"]), state["install"]]
        for command, state in report["commands"].items()
    ]
    columns, styles = ("command", "", "missing", "install"), {"ready": "green", "missing": "yellow"}
    table = Table("commands", columns, rows, text_columns=frozenset(range(4)), ruled=False, styles=styles)
    versions = [f"{name} {version}" for name, version in report["packages"].items() if version]
    versions += [f"vLLM {report['vllm']['version']} on PATH"] if report["vllm"]["path"] else []
    no_gpu = {"name": "no NVIDIA GPU", "memory": "-", "driver": "-", "compute_capability": "-"}
    hub = report["hub"]
    free = ", ".join(f"{place.replace('_', ' ')} {size / 1e9:,.0f} GB" for place, size in report["disk"].items())
    lines = [
        f"\npython {report['python']} on {report['platform']}, {report['cpu_count']} CPUs",
        ", ".join(versions),
        *(
            f"gpu: {gpu['name']}, {gpu['memory']}, driver {gpu['driver']}, sm {gpu['compute_capability']}"
            for gpu in report["gpus"] or [no_gpu]
        ),
        f"hub cache: {hub['cache']} (offline: {hub['offline']}, token: {hub['token']})",
        f"free: {free}",
        "",
        *(problem_lines(report["problems"]) or ["no problems found"]),
    ]
    print_tables([table], lines)
