"""One start of any engine: what it is, as data, and the launch of what was planned."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trtspec.errors import CheckFailed, Problem, has_errors
from trtspec.launch.log import LogPatterns
from trtspec.launch.preflight import EngineProgram
from trtspec.launch.readiness import ServerAddress
from trtspec.launch.supervisor import Limits, ServerLaunch, run
from trtspec.report import problem_lines, say, write_stderr


class Supervised(Protocol):
    """The options of `trtspec serve` that decide how a server is watched, in seconds but for the count."""

    @property
    def startup_timeout(self) -> float: ...
    @property
    def generation_timeout(self) -> float: ...
    @property
    def stop_grace(self) -> float: ...
    @property
    def health_interval(self) -> float: ...
    @property
    def health_failures(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """Everything about a start. `patterns`: the file that says what the engine's log means. `config` is what the engine
    is configured with beside its options. `config_text`, where it reads that from a file; `config_path` is the user's
    file, or the name that the one written for this launch has in `argv` (`writes_config`). `version` and why that one.
    `job`: a batch script for Slurm, where that launcher is asked for. `own_statuses`: as in ServerLaunch. `secrets`:
    more of the environment, which is never shown.
    """

    program: EngineProgram
    patterns: Path
    argv: list[str]
    env: dict[str, str]
    problems: list[Problem]
    version: tuple[str, str]
    endpoint: ServerAddress
    limits: Limits
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    config_path: str = ""
    writes_config: bool = False
    job: str = ""
    own_statuses: bool = False
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`."""
        return {
            "argv": self.argv,
            "env": self.env | dict.fromkeys(self.secrets, "(not shown)"),
            "config": self.config,
            "config_text": self.config_text,
            "version": self.version[0],
            "version_reason": self.version[1],
            "job": self.job or None,
            "endpoint": {key: value for key, value in asdict(self.endpoint).items() if key != "api_key"},
            "limits": asdict(self.limits),
            "problems": [problem.to_dict() for problem in self.problems],
        }

    def text(self) -> str:
        """The command, the file that it reads and the job script, for a person."""
        file = f"\n# {self.config_path}\n{self.config_text}" if self.config_path else ""
        job = f"\n# job script; submit it with sbatch\n{self.job}" if self.job else ""
        return f"{shlex.join(self.argv)}\n{file}{job}"


def launch(plan: ServerPlan) -> int:
    """Blocks until the server ends; returns its status when it ended as asked. Raises before anything starts when a
    problem of the plan is an error, and ServerFailed when the server fails."""
    listed = "\n".join(problem_lines(plan.problems))
    if any(problem.code == "TS-SERVE-NO-ENGINE" for problem in plan.problems):
        plan.program.require()
    if has_errors(plan.problems):
        raise CheckFailed(f"not launched:\n{listed}")
    if listed:
        write_stderr(f"{listed}\n")
    say(f"{plan.program.title} {plan.version[0]}: {plan.version[1]}")
    patterns = LogPatterns.load(plan.patterns)
    with tempfile.TemporaryDirectory(prefix="trtspec-serve-") as directory:
        argv = list(plan.argv)
        if plan.writes_config:
            written = Path(directory) / plan.config_path
            written.write_text(plan.config_text, encoding="utf-8")
            argv = [str(written) if word == plan.config_path else word for word in argv]
        env = plan.env | plan.secrets
        return run(ServerLaunch(argv, plan.endpoint, patterns, env, plan.limits, plan.own_statuses))


def model_names(target: str, served: str | None) -> tuple[str, ...]:
    """What a server of this target may call it in /v1/models; `served`: the name that it was told to use."""
    return (served,) if served else tuple(dict.fromkeys((target, Path(target).resolve().name)))


def limits_of(start: Supervised) -> Limits:
    return Limits(
        start.startup_timeout, start.generation_timeout, start.stop_grace, start.health_interval, start.health_failures
    )
