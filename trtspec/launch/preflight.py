"""The plan of one start of any engine, its checks, and the launch.

Checks this machine's GPUs as nvidia-smi reports them, its port and memory, and the checkpoints'
files.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from trtspec import machine
from trtspec.checkpoint.hub import Resolved
from trtspec.checkpoint.remote import is_online
from trtspec.errors import (
    CheckFailed,
    MissingDependency,
    Problem,
    TrtspecError,
    errors_in,
    has_errors,
)
from trtspec.foreign import user_path
from trtspec.launch.server_launch import ServerAddress, ServerLaunch
from trtspec.report import announce, problem_lines, write_stderr

FIELDS = ("name", "memory.total", "driver_version", "compute_cap")  # fields of nvidia-smi
TIMEOUT = 60.0  # seconds for nvidia-smi; a driver that wakes up eight GPUs takes several
VERSION_TIMEOUT = 120.0  # seconds for `--version` of an engine


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU as nvidia-smi reports it.

    Args:
        memory_bytes: memory in bytes, 0 if unknown, as for memory that the GPU shares with the
            host.
        driver: version of the driver.
        capability: compute capability, such as "10.0".
    """

    name: str
    memory_bytes: int
    driver: str
    capability: str


def read_gpus() -> list[InstalledGpu] | None:
    """Reads the GPUs from nvidia-smi. None if nvidia-smi is missing, fails, or lacks a field."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TIMEOUT
        )
    except (OSError, subprocess.SubprocessError):
        return None
    gpus = []
    for line in filter(str.strip, answer.stdout.splitlines()):
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(FIELDS):
            return None
        name, memory, driver, capability = values
        mib = memory.partition(" ")[0]  # the number in `183359` or `183359 MiB`
        memory_bytes = int(mib) * 2**20 if mib.isdigit() else 0
        gpus.append(InstalledGpu(name, memory_bytes, driver, capability))
    return gpus


def visible_gpus(gpus: Sequence[InstalledGpu], environ: Mapping[str, str]) -> list[InstalledGpu]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves. `environ`: environment of the engine.

    Names other than numbers are counted, not looked up.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(gpus)
    words = [word.strip() for word in wanted.split(",") if word.strip()]
    if all(word.isdigit() for word in words):
        return [gpus[int(word)] for word in words if int(word) < len(gpus)]
    return list(gpus[: len(words)])


# codes of problems of this machine, not of the request: a dry run reports them as warnings
OF_THIS_MACHINE = (
    "TS-SERVE-NO-ENGINE",
    "TS-SERVE-PORT",
    "TS-SERVE-NO-GPU",
    "TS-SERVE-OFFLINE",
    "TS-SERVE-REMOTE-CODE",
    "TS-NAME-ABSENT",
    "TS-LINT-EPLB-FILE",
)
SHARED_MEMORY = Path("/dev/shm")
GIB = 2**30
SHARED_MEMORY_RECIPE = 179 * GIB  # smallest /dev/shm in a published Kimi recipe for an engine
VERSION = re.compile(r"\b(\d+\.\d+\.\d+(?:(?:rc|\.post|\.dev)\d+)*)")


@dataclass(frozen=True)
class EngineProgram:
    """The executable that a launch needs, and its Python package.

    Args:
        executable: name of the executable on PATH.
        package: name of the Python package.
        title: name of the engine for people.
        home: remedy that says how to install the engine.
        version_option: option of serve for the engine's version.
    """

    executable: str
    package: str
    title: str
    home: str
    version_option: str

    def version(self) -> str | None:
        """Installed version. None if the engine is not installed or shows no version.

        The name of the package beside the executable has the version. Without a package,
        `--version` has it, which takes many seconds.
        """
        executable = shutil.which(self.executable)
        if executable is None:
            return None
        prefix = Path(executable).resolve().parent.parent
        packages = prefix.glob(f"lib/python3*/*-packages/{self.package}-*.dist-info")
        text = next((package.name for package in packages), "")
        if not text:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                command = [executable, "--version"]
                text = subprocess.run(
                    command, capture_output=True, text=True, timeout=VERSION_TIMEOUT, check=True
                ).stdout
        match = VERSION.search(text)
        return match[1] if match else None

    def check_version(
        self, asked: str | None, installed: str | None, judged: str
    ) -> Iterator[Problem]:
        """Checks that the installed engine has the version that a launch was judged for.

        Args:
            asked: version that the user asked for. None if the user gave none.
            installed: installed version. None if it is not known.
            judged: version that the launch was judged for.
        """
        option = f"`{self.version_option}`"
        if asked and installed and Version(asked) != Version(installed):
            message = f"{self.title} {installed} is installed and would run; {option} says {asked}"
            yield Problem("TS-SERVE-OTHER-ENGINE", "error", option, message)
        if not asked and not installed and shutil.which(self.executable):
            message = f"the installed engine does not tell its version; judged for {judged}"
            yield Problem("TS-SERVE-VERSION-UNKNOWN", "warning", self.executable, message)

    def check(self) -> Iterator[Problem]:
        """Checks that the executable is on PATH."""
        if shutil.which(self.executable) is None:
            message = f"{self.executable} is not on PATH: {self.title} is not installed here"
            remedy = (
                f"{self.home}, or rehearse with kimi-nano, "
                "`head` kimi-nano-eagle3 and `backend` reference"
            )
            yield Problem("TS-SERVE-NO-ENGINE", "error", self.executable, message, remedy)

    def require(self) -> None:
        """Raises MissingDependency if the executable is not on PATH."""
        for problem in self.check():
            raise MissingDependency(problem.message, problem.remedy)


def check_start(
    program: EngineProgram, models: list[Resolved], address: ServerAddress, needed: int,
    gpus: Sequence[InstalledGpu] | None, *, trusted: bool, launching: bool,
) -> Iterator[Problem]:  # fmt: skip
    """Checks the port, the files, the GPUs, the memory and the program for a start of any engine.

    Args:
        models: target and head.
        needed: number of GPUs that the engine needs on this machine.
        gpus: GPUs of nvidia-smi. None if nvidia-smi failed.
        trusted: whether the engine may run the code of the checkpoints.
        launching: false for a dry run.
    """
    coded = [model for model in models if model.code().references]
    yield from check_port(address.host, address.port)
    for model in models:
        yield from check_files(model)
    if not trusted:
        for model in coded:
            files = model.code().listed()  # with their hashes
            message = f"{model.name} brings code that the engine would run: {files}"
            yield Problem("TS-SERVE-REMOTE-CODE", "error", model.name, message)
    yield from check_gpus(needed, gpus)
    if launching:
        yield from check_shared_memory(SHARED_MEMORY)
        if coded:
            yield from check_modules_cache()
    yield from program.check()


def as_in_dry_run(problem: Problem) -> Problem:
    """Returns a problem as a dry run reports it.

    A problem of this machine becomes a warning, because the launch may be on another machine.
    """
    if problem.code in OF_THIS_MACHINE:
        return replace(problem, severity="warning")
    return problem


def check_port(host: str, port: int) -> Iterator[Problem]:
    """Checks that a server can listen on the port."""
    try:
        machine.listen(host, port).close()
    except TrtspecError as error:
        yield Problem(error.code, "error", f"{host}:{port}", error.message, error.remedy)


def check_gpus(
    needed: int, gpus: Sequence[InstalledGpu] | None, environ: Mapping[str, str] = os.environ
) -> Iterator[Problem]:
    """Checks that enough GPUs can be used.

    Args:
        needed: number of GPUs that the engine needs on this machine.
        gpus: GPUs of nvidia-smi. None if nvidia-smi failed.
        environ: environment with CUDA_VISIBLE_DEVICES.
    """
    if gpus is None:
        message = (
            f"nvidia-smi is missing here or fails: the {needed} GPUs "
            "that this needs could not be counted"
        )
        yield Problem("TS-SERVE-GPUS-UNSEEN", "warning", "GPUs", message)
        return
    seen = visible_gpus(gpus, environ)
    if len(seen) < needed:
        message = f"{needed} GPUs are needed, and {len(seen)} of the {len(gpus)} here can be used"
        yield Problem("TS-SERVE-NO-GPU", "error", "GPUs", message)


def check_files(resolved: Resolved) -> Iterator[Problem]:
    """Checks that a local checkpoint is complete, and that `inspect` finds no error in a target.

    A checkpoint that is not on this machine must be downloaded, so HF_HUB_OFFLINE must be off.
    """
    if resolved.path is not None:
        try:
            if resolved.kind == "target":
                yield from errors_in(resolved.target.problems)
            else:
                _ = resolved.checkpoint  # raises if a file is missing
        except TrtspecError as error:
            path = str(resolved.path)
            yield Problem("TS-SERVE-INCOMPLETE", "error", path, error.message, error.remedy)
    elif not is_online():
        message = f"{resolved.hub_id} is not on this machine and HF_HUB_OFFLINE is set"
        yield Problem("TS-SERVE-OFFLINE", "error", resolved.name, message)


def check_shared_memory(directory: Path) -> Iterator[Problem]:
    """Warns if the shared memory at `directory` is smaller than in published recipes."""
    if directory.is_dir() and (total := machine.disk_size(directory)) < SHARED_MEMORY_RECIPE:
        message = (
            f"{directory} has {total / GIB:.1f} GiB; a load can die with a bus error (published "
            f"recipes give it {SHARED_MEMORY_RECIPE // GIB} GiB, the engine's guide for "
            "Kimi-K2-Thinking about 640 GB)"
        )
        yield Problem("TS-SERVE-SHARED-MEMORY", "warning", str(directory), message)


def check_modules_cache() -> Iterator[Problem]:
    """Checks that the engine can write the folder to which it copies a checkpoint's code."""
    from huggingface_hub.constants import HF_HOME

    cache = user_path(os.environ.get("HF_MODULES_CACHE") or f"{HF_HOME}/modules")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return
    except OSError as error:
        message = (
            f"{cache} cannot be written ({error.strerror}), "
            "and the checkpoint's code is copied there to run"
        )
        yield Problem("TS-SERVE-CACHE", "error", "HF_MODULES_CACHE", message)


@dataclass(frozen=True, kw_only=True)
class ServerPlan(ServerLaunch):
    """A server to start, with the problems of the start.

    Args:
        program: executable of the engine.
        version: release of the engine, and the reason for it in words.
        config: settings of the engine besides its options.
        config_text: text of the file that the engine reads its settings from, "" without a file.
        config_path: path of the user's file. If the launch writes the file, its name in `argv`.
        writes_config: whether the launch writes the file.
        secrets: variables that are added to the environment and never shown.
    """

    program: EngineProgram
    problems: list[Problem]
    version: tuple[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    config_path: str = ""
    writes_config: bool = False
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`, without the problems."""
        return {
            "argv": self.argv,
            "env": self.env | dict.fromkeys(self.secrets, "(not shown)"),
            "config": self.config,
            "config_text": self.config_text,
            "version": self.version[0],
            "version_reason": self.version[1],
            "endpoint": {
                key: value for key, value in asdict(self.endpoint).items() if key != "api_key"
            },
            "limits": asdict(self.limits),
        }

    def text(self) -> str:
        """The command and the file that the engine reads, for a person."""
        text = f"{shlex.join(self.argv)}\n"
        if self.config_path:
            text += f"\n# {self.config_path}\n{self.config_text}"
        return text


def refuse_errors(problems: Sequence[Problem]) -> None:
    """Raises CheckFailed if one of the problems is an error.

    Otherwise prints the problems on stderr.
    """
    listed = "\n".join(problem_lines(problems))
    if has_errors(problems):
        raise CheckFailed(f"not launched:\n{listed}")
    if listed:
        write_stderr(f"{listed}\n")


def launch(plan: ServerPlan) -> int:
    """Runs the server until it ends, and returns its exit status.

    Raises MissingDependency if the executable is not on PATH. Raises CheckFailed before the start
    if a problem of the plan is an error. Raises ServerFailed if the server fails.
    """
    from trtspec.launch.supervisor import run

    plan.program.require()
    refuse_errors(plan.problems)
    announce(f"{plan.program.title} {plan.version[0]}: {plan.version[1]}")
    with tempfile.TemporaryDirectory(prefix="trtspec-serve-") as directory:
        argv = list(plan.argv)
        if plan.writes_config:
            written = Path(directory) / plan.config_path
            written.write_text(plan.config_text, encoding="utf-8")
            argv = [str(written) if word == plan.config_path else word for word in argv]
        return run(replace(plan, argv=argv, env=plan.env | plan.secrets))
