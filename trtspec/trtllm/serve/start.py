"""One `serve` request put together: target, head, configuration, command line and every problem before the launch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trtspec.errors import Problem, UsageError
from trtspec.trtllm.build.config import compose
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import Intent, parse_intent
from trtspec.trtllm.lint.deployment import compute_capability
from trtspec.trtllm.lint.finding import Deployment
from trtspec.trtllm.lint.installed import engine_problems
from trtspec.trtllm.lint.linter import lint
from trtspec.trtllm.lint.machine import check_tool_parser
from trtspec.trtllm.names import Head, Target, choose_version, findable, load_head, load_target
from trtspec.trtllm.schema import schema_for
from trtspec.trtllm.serve.cluster import Cluster, check_cluster, environment, job_script, wrap
from trtspec.trtllm.serve.command import CONFIG_NAME, build_command
from trtspec.trtllm.serve.front import read_front, unreachable
from trtspec.trtllm.serve.machine import check_hardware, check_host, read_gpus
from trtspec.trtllm.serve.preflight import check_engine, check_environment, check_port, engine_version, preflight
from trtspec.trtllm.speculation import head_in

# the engine's log shows a phase when it begins, not when a buffer is full
ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
# seconds that the front of a disaggregated deployment waits for one answer; upstream's 180 cut long thoughts off
REQUEST_TIMEOUT = 3600.0


@dataclass(frozen=True)
class Request:
    """What the user typed; sizes that are None were not typed."""

    target: str
    head: str | None = None
    config: Path | None = None
    version: str | None = None
    goal: str | None = None
    tp_size: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    draft_len: int | None = None
    trust_remote_code: bool = False
    host: str = "localhost"
    port: int = 8000
    passed: list[str] = field(default_factory=list)
    launcher: str = "direct"
    nodes: int | None = None
    gpus_per_node: int | None = None
    launcher_args: tuple[str, ...] = ()
    role: str | None = None
    words: tuple[str, ...] = ()  # the whole command as typed, for a job script

    def typed_sizes(self) -> dict[str, int]:
        """By YAML path."""
        sizes = {
            "tensor_parallel_size": self.tp_size,
            "max_batch_size": self.max_batch_size,
            "max_num_tokens": self.max_num_tokens,
            "max_seq_len": self.max_seq_len,
        }
        return {key: value for key, value in sizes.items() if value is not None}


@dataclass(frozen=True)
class ServePlan:
    """`config_text` is what the engine reads; `config_path` is the user's file, or the name that ours will have.
    `job`: a batch script for Slurm, where that launcher is asked for. `generates`: as in launch.Launch."""

    argv: list[str]
    env: dict[str, str]
    config_text: str
    config_path: str
    problems: list[Problem]
    version: str
    version_reason: str
    host: str
    port: int
    job: str = ""
    generates: bool = True

    @property
    def config(self) -> dict[str, Any]:
        return Document.parse(self.config_text).value or {}


def plan_serve(request: Request, *, launching: bool) -> ServePlan:
    """Raises for what cannot be answered at all (unknown ids, unreadable files); everything else is a problem."""
    text = _read(request.config)
    written = parse_intent(text) if text is not None else None
    target = load_target(request.target)
    head_name = request.head or (head_in(Document.parse(text)) if text is not None else None)
    head = load_head(head_name) if head_name and (request.head or findable(head_name)) else None
    installed = engine_version() if launching and request.version is None else None
    asked = request.version or installed
    if asked is None and written is not None:
        version, reason = written.version, f"the version {request.config} was written for"
    else:
        version, reason = choose_version(asked, target.spec, head.spec if head else None)
    intent = _intent(request, written, version, head_name).fitted(target.spec.max_position_embeddings)
    if intent.role == "front":
        raise UsageError(f"{request.config} is the file of a front", f"pass it as --disaggregated {request.config}")
    problems: list[Problem] = []
    if launching and asked is None:
        message = f"the installed engine does not tell its version; judged for {version}"
        problems.append(
            Problem("TS-SERVE-VERSION-UNKNOWN", "warning", "trtllm-serve", message, "pass --trtllm-version")
        )
    if text is None:
        text = compose(intent, target.spec, head.spec if head else None)
    elif written is not None and written.version != version:
        message = f"{request.config} was written for TensorRT-LLM {written.version} and is judged for {version}"
        problems.append(Problem("TS-SERVE-OTHER-VERSION", "warning", str(request.config), message, "write it again"))
    return _assemble(request, intent, target, head, text, problems, (version, reason), launching)


def _assemble(
    request: Request,
    intent: Intent,
    target: Target,
    head: Head | None,
    text: str,
    problems: list[Problem],
    version: tuple[str, str],
    launching: bool,
) -> ServePlan:
    schema = schema_for(version[0])
    path = str(request.config) if request.config else CONFIG_NAME
    document = Document.parse(text)
    role = request.role or intent.role
    passed = [*request.passed, *(["--server_role", role.upper()] if role else [])]
    command = build_command(
        intent, target.spec, schema, document,
        host=request.host, port=request.port, config_path=path, explicit=request.typed_sizes(), passed=passed,
    )  # fmt: skip
    gpus = read_gpus() if launching else []
    named = compute_capability(intent.gpu) if intent.gpu else None
    deployment = Deployment(
        schema, target.spec, intent.target, head.spec if head else None, intent.head or "", argv=command.settings,
        gpu=gpus[0].capability if gpus else named,
    )  # fmt: skip
    found = [
        finding.problem(path) for finding in [*lint(text, deployment), *check_tool_parser(deployment, command.argv)]
    ]
    trusted = "--trust_remote_code" in command.argv or document.get("trust_remote_code") is True
    resolved = [target.resolved, *([head.resolved] if head else [])]
    world = _gpus(deployment, document)
    cluster = _cluster(request, intent, world)
    ready = preflight(
        resolved, host=request.host, port=request.port, gpus_needed=min(world, cluster.gpus_per_node),
        remote_code=target.spec.remote_code, trusted=trusted, environ=os.environ, launching=launching,
    )  # fmt: skip
    if launching:
        ready += check_hardware(gpus, deployment, document, min(world, cluster.gpus_per_node), os.environ)
        ready += check_host(resolved, request.host, target.spec.remote_code, os.environ)
        ready += engine_problems(text, path)
    reach = list(check_cluster(cluster, command.argv, world, os.environ, launching))
    if cluster.launcher != "direct" and request.config is None:
        message = "a configuration written for this start lies on this node alone"
        remedy = "write it with `trtspec build-config` where every node sees it, and pass --config"
        reach.append(Problem("TS-SERVE-LAUNCHER", "error" if launching else "warning", "--config", message, remedy))
    env = {**ENVIRONMENT, **environment(cluster, os.environ)}
    return ServePlan(
        wrap(command.argv, env, cluster, os.environ), env, text, path,
        [*problems, *command.problems, *found, *ready, *reach], *version, request.host, request.port,
        job_script(cluster, list(request.words)) if cluster.launcher == "slurm" else "", role is None,
    )  # fmt: skip


def _cluster(request: Request, intent: Intent, world: int) -> Cluster:
    """What was typed, over what the file's first line says, over one node with every GPU."""
    nodes = request.nodes or intent.nodes
    each = request.gpus_per_node or -(-world // nodes)
    return Cluster(request.launcher, nodes, each, request.launcher_args)


def plan_front(path: Path, startup_timeout: float, *, launching: bool) -> ServePlan:
    """The front of a disaggregated deployment; the servers that it names are started by themselves."""
    front = read_front(path)
    problems = [*front.problems, *check_environment(os.environ), *unreachable(front)]
    if launching:
        problems += [*check_port(front.host, front.port), *check_engine()]
    version = engine_version() or "" if launching else ""
    return ServePlan(
        front.argv(startup_timeout, REQUEST_TIMEOUT), dict(ENVIRONMENT), path.read_text(encoding="utf-8"), str(path),
        problems, version, "installed here" if version else "not asked", front.host, front.port,
    )  # fmt: skip


def _read(config: Path | None) -> str | None:
    if config is None:
        return None
    try:
        return config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{config} cannot be read ({error})", "write one with `trtspec build-config`") from None


def _intent(request: Request, written: Intent | None, version: str, head: str | None) -> Intent:
    """What was typed, over what the file's first line says, over the goal's defaults."""
    start = written or Intent(target=request.target, version=version)
    typed = {
        key: value
        for key in ("goal", "tp_size", "max_batch_size", "max_num_tokens", "max_seq_len", "draft_len")
        if (value := getattr(request, key)) is not None
    }
    trusted = request.trust_remote_code or start.trust_remote_code
    return replace(start, target=request.target, version=version, head=head, trust_remote_code=trusted, **typed)


def _gpus(deployment: Deployment, document: Document) -> int:
    sizes = [
        deployment.setting(document, key, 1)
        for key in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    ]
    product = 1
    for size in sizes:
        product *= size if isinstance(size, int) and size > 0 else 1
    return product
