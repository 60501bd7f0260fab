"""One start of TensorRT-LLM: options -> intent -> configuration -> command -> problems -> launch.

`plan_engine` and `plan_front` say everything about a start and start nothing; `trtspec.launch.preflight.launch` starts
what they planned.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trtspec.checkpoint.hub import Head, Target, load_head, load_target
from trtspec.errors import Problem, UsageError
from trtspec.files import STDIN, read_yaml_text
from trtspec.launch.options import ServeOptions
from trtspec.launch.preflight import (
    ServerPlan,
    as_in_dry_run,
    check_port,
    check_start,
    read_gpus,
)
from trtspec.launch.server import LogPatterns, ServerAddress
from trtspec.trtllm.build import engine_yaml
from trtspec.trtllm.deployment import (
    Deployment,
    choose_version,
    compute_capability,
    head_in,
    name_problem,
    parse_passed,
)
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import Intent, parse_intent
from trtspec.trtllm.lint import engine_problems, lint
from trtspec.trtllm.schema import parse_version, schema_for
from trtspec.trtllm.serve.command import (
    CONFIG_NAME,
    PROGRAM,
    Cluster,
    build_command,
    check_cluster,
    check_hardware,
    cluster_environment,
    engine_version,
    with_launcher,
)

# the engine's log shows a phase when it begins, not when a buffer is full
PATTERNS = Path(__file__).with_name("log_patterns.yaml")
ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
# seconds that the front of a disaggregated deployment waits for one answer; upstream's 180 cut long thoughts off
REQUEST_TIMEOUT = 3600.0
# options of trtllm-serve by name, and what decides them here: readiness asks there, and the file is judged
OWN_OPTIONS = {
    "host": "--host", "port": "--port", "extra_llm_api_options": "--config",
    "served_model_name": "--served-model-name", "server_role": "--role",
}  # fmt: skip
# settings of the intent that have an option of the same name
INTENT_OPTIONS = ("goal", "tp_size", "max_batch_size", "max_num_tokens", "max_seq_len", "draft_len")
BUILD_FRONT = "write it with `trtspec build-config`"
ROLES = {"context_servers": "context", "generation_servers": "generation"}
ADDRESS = re.compile(r"[A-Za-z0-9_.-]+:(\d{1,5})|\[[0-9A-Fa-f:]+\]:(\d{1,5})")


def plan_engine(options: ServeOptions, *, launching: bool) -> ServerPlan:
    """Raises for what cannot be answered at all (unknown ids, unreadable files, options that contradict each other);
    everything else is a problem of the plan."""
    target = load_target(options.target)
    given = _user_file(options)
    written = parse_intent(given.text) if given is not None else None
    head = _head(options, given, launching)
    version, problems = _version(options, given, written, launching)
    intent = _intent(options, given, written, version[0], target)
    file = given or Document.parse(engine_yaml(intent, target.spec, head.spec if head else None), CONFIG_NAME)

    role = options.role or intent.role
    argv = _command(options, intent, target, file, role)
    schema, gpus = schema_for(version[0]), read_gpus()
    passed, refused = parse_passed(schema, argv[2:])
    named = compute_capability(intent.gpu) if intent.gpu else None
    deployment = Deployment(
        schema, target.spec, intent.target, head.spec if head else None, intent.head or "", schema.set_by(passed),
        options=passed, gpu=gpus[0].capability if launching and gpus else named, environ=os.environ, here=True,
    )  # fmt: skip
    world = _ranks(deployment, file)
    nodes = options.nodes or intent.nodes
    cluster = Cluster(options.launcher, nodes, options.gpus_per_node or -(-world // nodes), _launcher_args(options))

    # check_start names the files of code that nobody trusts
    found = [one for one in lint(file, deployment) if one.key != "--trust_remote_code"]
    problems += [*refused, *(one.problem(file.name) for one in found)]
    models, code = [target.resolved, *([head.resolved] if head else [])], target.spec.remote_code
    trusted = deployment.setting(file, "trust_remote_code") is True
    problems += check_start(
        PROGRAM, models, options.host, options.port, min(world, cluster.gpus_per_node), gpus,
        untrusted=code and not trusted, remote_code=code, launching=launching,
    )  # fmt: skip
    if launching:
        problems += check_hardware(gpus or [], deployment, file, os.environ)
        problems += engine_problems(file.text, file.name)
    problems += check_cluster(cluster, argv, world, given is None, os.environ, launching)
    env = {**ENVIRONMENT, **cluster_environment(cluster, os.environ)}
    return ServerPlan(
        program=PROGRAM,
        patterns=LogPatterns.load(PATTERNS),
        argv=with_launcher(argv, env, cluster, os.environ),
        env=env,
        config=file.value or {},
        config_text=file.text,
        config_path=file.name,
        writes_config=given is None,
        problems=problems if launching else [as_in_dry_run(problem) for problem in problems],
        version=version,
        endpoint=ServerAddress(options.host, options.port, generates=role is None),
        limits=options.limits,
        own_statuses=cluster.launcher != "direct",
    )


def plan_front(options: ServeOptions, *, launching: bool) -> ServerPlan:
    """The front of a disaggregated deployment; the servers that it names are started by themselves. Raises UsageError
    for a file that cannot be read and a target that is none."""
    load_target(options.target)
    path = options.disaggregated
    assert path is not None  # it is what asks for a front
    read = read_front(path)
    names = {options.target, Path(options.target).resolve().name}
    problems = [*read.problems, *check_servers(read, names)]
    if launching:
        problems += [*check_port(read.host, read.port), *PROGRAM.check()]
    version = engine_version() or "" if launching else ""
    return ServerPlan(
        program=PROGRAM,
        patterns=LogPatterns.load(PATTERNS),
        argv=read.argv(options.startup_timeout, REQUEST_TIMEOUT),
        env=dict(ENVIRONMENT),
        config=Document.parse(read.text).value or {},
        config_text=read.text,
        config_path=str(path),
        problems=problems,
        version=(version, "installed here" if version else "not asked"),
        endpoint=ServerAddress(read.host, read.port),
        limits=options.limits,
    )


def _user_file(options: ServeOptions) -> Document | None:
    """The file of --config. Raises UsageError where it cannot be read, is a front's, or already says what an option
    would decide."""
    path = options.config
    if path is None:
        return None
    if str(path) == STDIN:
        raise UsageError("`config` - : the engine reads its configuration from a file", "pass the path of one")
    text = read_yaml_text(path, "pass a file written by `trtspec build-config`")
    written = parse_intent(text)
    if written is not None and written.role == "front":
        raise UsageError(f"{path} is the file of a front", f"pass it as `disaggregated` {path}")
    if written is not None and options.goal is not None:
        raise UsageError(f"`goal` is not used with `config`: {path} decides it", "change the file, or leave it out")
    return Document.parse(text, str(path))


def _launcher_args(options: ServeOptions) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(options.launcher_args))
    except ValueError as error:
        message = f"`launcher_args` {options.launcher_args!r} does not parse: {error}"
        raise UsageError(message, "quote it as for a shell") from None


def _head(options: ServeOptions, file: Document | None, launching: bool) -> Head | None:
    """The head that was given, else the one that the file names, where that can be looked at here. Before a launch its
    weights are looked at too, not only its headers."""
    named = head_in(file) if file is not None else None
    if options.head and file is not None and named is None and not file.error:
        message = f"`head` is not used with `config`: {file.name} has no speculative_config that names a head"
        raise UsageError(message, "write the file again with `trtspec build-config TARGET --head HEAD`")
    if options.head:
        return load_head(options.head, values=launching)
    return load_head(named, values=launching) if named and name_problem(named) is None else None


def _version(
    options: ServeOptions, file: Document | None, written: Intent | None, launching: bool
) -> tuple[tuple[str, str], list[Problem]]:
    """The version to judge for and why, and what is doubtful about it."""
    asked, installed = options.trtllm_version, engine_version() if launching else None
    if asked is None and installed is None and written is not None:
        version, reason = written.version, f"the version {file.name if file else ''} was written for"
    else:
        version, reason = choose_version(asked or installed)
    parse_version(version)
    problems = list(PROGRAM.check_version(asked, installed, version)) if launching else []
    if written is not None and file is not None and written.version != version:
        message = f"{file.name} was written for TensorRT-LLM {written.version} and is judged for {version}"
        problems.append(Problem("TS-SERVE-OTHER-VERSION", "warning", file.name, message, "write it again"))
    return (version, reason), problems


def _intent(
    options: ServeOptions, file: Document | None, written: Intent | None, version: str, target: Target
) -> Intent:
    """What was given, over what the file's first line says, over the goal's defaults."""
    base = written or Intent(target=options.target, version=version)
    given: dict[str, Any] = {key: value for key in INTENT_OPTIONS if (value := getattr(options, key)) is not None}
    named = options.head or (head_in(file) if file is not None else None)
    trusted = options.trust_remote_code or base.trust_remote_code
    intent = replace(base, target=options.target, version=version, head=named, trust_remote_code=trusted, **given)
    return intent.fitted(target.spec.max_position_embeddings)


def _given_sizes(options: ServeOptions) -> dict[str, int]:
    """Sizes among the options, by YAML path."""
    sizes = {
        "tensor_parallel_size": options.tp_size,
        "max_batch_size": options.max_batch_size,
        "max_num_tokens": options.max_num_tokens,
        "max_seq_len": options.max_seq_len,
    }
    return {key: value for key, value in sizes.items() if value is not None}


def _command(options: ServeOptions, intent: Intent, target: Target, file: Document, role: str | None) -> list[str]:
    """Raises UsageError for an option after `--` that this command has itself."""
    schema, sizes = schema_for(intent.version), _given_sizes(options)
    for name in parse_passed(schema, options.passed)[0]:
        if own := OWN_OPTIONS.get(name):
            raise UsageError(f"--{name} is not used after --: {own} decides it", f"pass {own} before --")
        if name in sizes:
            raise UsageError(f"--{name} is given before -- and after it", "give it once")
    passed = list(options.passed)
    passed += ["--served_model_name", options.served_model_name] if options.served_model_name else []
    passed += ["--server_role", role.upper()] if role else []
    return build_command(
        intent, target.spec, file, file.name, host=options.host, port=options.port, sizes=sizes, passed=passed
    )


def _ranks(deployment: Deployment, document: Document) -> int:
    """Number of ranks: the product of the parallel sizes."""
    keys = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    return math.prod(deployment.size(document, key, 1) for key in keys)


@dataclass(frozen=True)
class Front:
    """`text` is what the file says; `servers`: `host:port` of every server, by role."""

    path: Path
    text: str
    host: str
    port: int
    servers: dict[str, list[str]]
    problems: list[Problem] = field(default_factory=list)

    def argv(self, startup_timeout: float, request_timeout: float) -> list[str]:
        """Both of upstream's own timeouts are 180 s, less than a trillion parameters take to load."""
        words = ["trtllm-serve", "disaggregated", "-c", str(self.path)]
        return [*words, "-t", str(round(startup_timeout)), "-r", str(round(request_timeout))]


def read_front(path: Path) -> Front:
    """Raises UsageError for a file that cannot be read; what is wrong inside is a problem of the result."""
    if str(path) == STDIN:
        raise UsageError("`disaggregated` - : the front reads its file itself", "pass the path of one")
    document = Document.parse(read_yaml_text(path, BUILD_FRONT))
    if document.error:
        raise UsageError(f"{path}:{document.error_line} cannot be used: {document.error}", BUILD_FRONT)
    if not isinstance(document.value, dict):
        raise UsageError(f"{path} is not a YAML mapping", BUILD_FRONT)
    host, port = document.get("hostname", "localhost"), document.get("port", 8000)
    problems: list[Problem] = []
    if not isinstance(host, str):
        problems.append(_front_problem(f"{path} hostname", f"hostname is {host!r}", "write a name or an address"))
        host = "localhost"
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        problems.append(_front_problem(f"{path} port", f"port is {port!r}", "write a number from 1 to 65535"))
        port = 8000
    servers = {}
    for key, role in ROLES.items():
        found = list(_servers(path, key, role, document.get(key), problems))
        servers[role] = found
    everyone = [f"{host}:{port}", *(address for addresses in servers.values() for address in addresses)]
    for address in sorted({address for address in everyone if everyone.count(address) > 1}):
        message = f"{address} is listed twice"
        problems.append(_front_problem(str(path), message, "every server and the front need an address of their own"))
    return Front(path, document.text, host, port, servers, problems)


def _servers(path: Path, key: str, role: str, entry: Any, problems: list[Problem]) -> Iterator[str]:
    urls = entry.get("urls") if isinstance(entry, dict) else None
    if not isinstance(urls, list) or not urls:
        remedy = f"write {key}: {{num_instances: 1, urls: ['host:8001']}}"
        problems.append(_front_problem(f"{path} {key}", f"no {role} server is named", remedy))
        return
    count = entry.get("num_instances", 1)
    if count != len(urls):
        message = f"num_instances is {count} and there are {len(urls)} urls"
        problems.append(_front_problem(f"{path} {key}", message, f"write num_instances: {len(urls)}"))
    for url in urls:
        match = ADDRESS.fullmatch(str(url))
        if match is None or not 0 < int(match[1] or match[2]) < 65536:
            problems.append(_front_problem(f"{path} {key}", f"{url!r} is not host:port", "write it without http://"))
        else:
            yield str(url)


def _front_problem(where: str, message: str, remedy: str) -> Problem:
    return Problem("TS-SERVE-FRONT", "error", where, message, remedy)


def check_servers(front: Front, names: set[str]) -> Iterator[Problem]:
    """Servers that do not answer yet, for which the front waits, and those of another model. `names`: what /v1/models
    may call the target."""
    import httpx

    from trtspec.client.client import RequestFailed, ask_once, first_model, health

    async def named(client: httpx.AsyncClient) -> str:
        await health(client)
        return str((await first_model(client, 2.0))["id"])

    for role, addresses in front.servers.items():
        for address in addresses:
            try:
                served = ask_once(f"http://{address}", named, headers={})
            except RequestFailed as failure:
                message = f"the {role} server {address} does not answer yet ({failure.message})"
                remedy = f"start it with `trtspec serve TARGET --config FILE --role {role}`"
                yield Problem("TS-SERVE-FRONT-WAITS", "warning", address, message, remedy)
                continue
            if served not in names:
                message = f"the {role} server {address} calls its model {served!r}, not {' or '.join(sorted(names))}"
                remedy = "pass the target that the servers serve; one with `served_model_name` may keep its name"
                yield Problem("TS-SERVE-FRONT-MODEL", "warning", address, message, remedy)
