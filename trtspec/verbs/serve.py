"""Plans the start of a server: TensorRT-LLM, the front of several engines, or vLLM.

`plan_server` returns a plan and starts nothing. `launch` of trtspec.launch.preflight starts the
plan. A plan for TensorRT-LLM is made in four stages: intent, configuration, command, problems. The
reference backend has no plan, because it runs in this process.
"""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import replace
from typing import Any

from trtspec.checkpoint.heads.pairing import learned_problems, pair_problems
from trtspec.checkpoint.hub import Target, find_head, find_target, findable, load_head, resolve
from trtspec.checkpoint.target_problems import sound
from trtspec.errors import Problem, UsageError, errors_in
from trtspec.files import STDIN, read_yaml_text
from trtspec.launch.preflight import (
    ServerPlan,
    as_in_dry_run,
    check_port,
    check_start,
    read_gpus,
)
from trtspec.launch.serve_options import FRONT, VLLM, ServeOptions
from trtspec.launch.server_launch import LogPatterns, ServerAddress
from trtspec.machine import check_device
from trtspec.records import fill
from trtspec.report import announce, problem_lines
from trtspec.trtllm.build import engine_yaml
from trtspec.trtllm.deployment import (
    Deployment,
    assumed_release,
    choose_version,
    compute_capability,
    head_in,
    name_problem,
    parse_passed,
)
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import ENGINE_FILE, Intent, parse_intent
from trtspec.trtllm.lint import engine_problems, lint
from trtspec.trtllm.schema import schema_for
from trtspec.trtllm.serve.command import (
    ENVIRONMENT,
    PATTERNS,
    PROGRAM,
    Cluster,
    build_command,
    check_cluster,
    check_hardware,
    cluster_environment,
    engine_version,
    with_launcher,
)
from trtspec.trtllm.serve.front import plan_front
from trtspec.verbs.engine_files import engine_of
from trtspec.vllm import plan_vllm

# options of trtllm-serve that an option of `trtspec serve` sets, and the name of that option.
# Users may not pass them after `--`, because the checks and the readiness probe would not see them.
OWN_OPTIONS = {
    "host": "host", "port": "port", "extra_llm_api_options": "config",
    "served_model_name": "served_model_name", "server_role": "role",
}  # fmt: skip
# options of serve that replace the settings of the same name in an intent
INTENT_OPTIONS = ("goal", "tp_size", "max_batch_size", "max_num_tokens", "max_seq_len", "draft_len")


def plan_server(options: ServeOptions) -> ServerPlan:
    """Returns the plan for the start of an engine, or of the front of several engines.

    Raises UsageError if the configuration file belongs to another engine.
    """
    launching = not options.dry_run
    if options.mode is FRONT:
        return plan_front(options, launching=launching)
    if options.port == 0:
        raise UsageError(
            "an engine cannot be asked for any free port", "pass `port` with a number above 0"
        )
    if options.config is not None and options.config.is_file():
        engine = engine_of(Document.read(options.config).mapping) or options.mode
        if engine is not options.mode:
            message = f"`config` {options.config} is a file of {engine.name}"
            raise UsageError(message, f"pass {engine.how}, or a file of {options.mode.name}")
    plan = plan_vllm if options.mode is VLLM else plan_engine
    return plan(options, launching=launching)


def plan_engine(options: ServeOptions, *, launching: bool) -> ServerPlan:
    """Returns the plan for the start of TensorRT-LLM.

    Raises UsageError for unknown ids, unreadable files and options that contradict each other.
    Every other fault is a problem of the plan.

    launching: whether a launch follows, and not only a dry run.
    """
    user_file = _user_file(options)
    launcher_args = _launcher_args(options)
    head_name = _head_name(options, user_file)
    file_intent = parse_intent(user_file.text) if user_file is not None else None
    version, problems = _version(options, user_file, file_intent, launching)
    target = find_target(options.target)
    # before a launch, the head's weights are checked too, not only its headers
    head = load_head(head_name, values=launching) if head_name else None
    head_spec = head.spec if head else None
    intent = _intent(options, user_file, file_intent, version[0], target)
    file = user_file or Document.parse(engine_yaml(intent, target.spec, head_spec), ENGINE_FILE)

    role = options.role or intent.role
    # a context or generation server does not answer requests of users
    address = ServerAddress(options.host, options.port, generates=role is None)
    argv = _command(options, intent, target, file, address, role)
    schema = schema_for(version[0])
    gpus = read_gpus()
    passed, refused = parse_passed(schema, argv[2:])
    capability = compute_capability(intent.gpu) if intent.gpu else None
    if launching and gpus:
        # the GPUs of this machine, whatever the file was written for
        capability = gpus[0].capability
    deployment = Deployment(
        schema,
        target.spec,
        intent.target,
        head_spec,
        intent.head or "",
        schema.set_by(passed),
        options=passed,
        gpu=capability,
        environ=os.environ,
        here=True,
        role=role,
    )
    parallel_sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    world = math.prod(deployment.size(file, key, 1) for key in parallel_sizes)  # number of ranks
    nodes = options.nodes or intent.nodes
    ranks_per_node = -(-world // nodes)  # rounded up
    gpus_per_node = options.gpus_per_node or ranks_per_node
    cluster = Cluster(options.launcher, nodes, gpus_per_node, launcher_args)

    # without the finding that code is not trusted: check_start reports it with the code's files
    findings = [item for item in lint(file, deployment) if item.key != "--trust_remote_code"]
    problems += assumed_release(version[1], file)
    problems += [*refused, *findings]
    models = [target.resolved]
    if head:
        problems += learned_problems(head.resolved, target.resolved)
        models += [head.resolved]
    trusted = deployment.setting(file, "trust_remote_code") is True
    problems += check_start(
        PROGRAM, models, address, min(world, cluster.gpus_per_node), gpus,
        trusted=trusted, launching=launching,
    )  # fmt: skip
    if launching:
        problems += check_hardware(gpus or [], deployment, file, os.environ)
        problems += engine_problems(file)
    problems += check_cluster(cluster, argv, world, user_file is None, os.environ, launching)
    env = {**ENVIRONMENT, **cluster_environment(cluster, os.environ)}
    return ServerPlan(
        program=PROGRAM,
        patterns=LogPatterns.load(PATTERNS),
        argv=with_launcher(argv, env, cluster, os.environ),
        env=env,
        config=file.mapping,
        config_text=file.text,
        config_path=file.name,
        writes_config=user_file is None,
        problems=problems if launching else [as_in_dry_run(problem) for problem in problems],
        version=version,
        endpoint=address,
        limits=options.limits,
        own_statuses=cluster.launcher != "direct",
    )


def _user_file(options: ServeOptions) -> Document | None:
    """Returns the configuration file of the option `config`. None without `config`.

    Raises UsageError if the file cannot be read, is the file of a front, or decides the goal while
    the option `goal` is given.
    """
    path = options.config
    if path is None:
        return None
    if str(path) == STDIN:
        raise UsageError(
            "`config` - : the engine reads its configuration from a file", "pass the path of one"
        )
    text = read_yaml_text(path, "pass a file written by `trtspec build-config`")
    file_intent = parse_intent(text)
    if file_intent is not None and file_intent.role == "front":
        raise UsageError(f"{path} is the file of a front", f"pass it as `disaggregated` {path}")
    if file_intent is not None and options.goal is not None:
        raise UsageError(
            f"`goal` is not used with `config`: {path} decides it",
            "change the file, or leave it out",
        )
    return Document.parse(text, str(path))


def _launcher_args(options: ServeOptions) -> tuple[str, ...]:
    """Returns the words of the option `launcher_args`. Raises UsageError for an open quote."""
    try:
        return tuple(shlex.split(options.launcher_args))
    except ValueError as error:
        message = f"`launcher_args` {options.launcher_args!r} does not parse: {error}"
        raise UsageError(message, "quote it as for a shell") from None


def _head_name(options: ServeOptions, file: Document | None) -> str | None:
    """Returns the head of the options, or else the head that the configuration file names.

    None without a head, or if the head of the file cannot be read on this machine. Raises
    UsageError if the option `head` is given and the file does not speculate with a head.
    """
    named = head_in(file) if file is not None else None
    if options.head and file is not None and named is None and not file.error:
        message = (
            f"`head` is not used with `config`: {file.name} has no speculative_config that names "
            "a head"
        )
        raise UsageError(
            message, "write the file again with `trtspec build-config TARGET --head HEAD`"
        )
    if options.head:
        return options.head
    return named if named and name_problem(named) is None else None


def _version(
    options: ServeOptions, file: Document | None, file_intent: Intent | None, launching: bool
) -> tuple[tuple[str, str], list[Problem]]:
    """Returns the version to judge for, with the reason for its choice, and the version's problems.

    file, file_intent: configuration file and its first line. None without them.
    """
    requested = options.trtllm_version
    installed = engine_version() if launching else None
    version, reason = choose_version(requested or installed, file_intent)
    problems = list(PROGRAM.check_version(requested, installed, version)) if launching else []
    if file_intent is not None and file is not None and file_intent.version != version:
        message = (
            f"{file.name} was written for TensorRT-LLM {file_intent.version} and is judged for "
            f"{version}"
        )
        problems.append(Problem("TS-SERVE-OTHER-VERSION", "warning", file.name, message))
    return (version, reason), problems


def _intent(
    options: ServeOptions,
    file: Document | None,
    file_intent: Intent | None,
    version: str,
    target: Target,
) -> Intent:
    """Returns the settings of the start.

    An option replaces the setting in the first line of the file, which replaces the default.

    file, file_intent: configuration file and its first line. None without them.
    """
    base = file_intent or Intent(target=options.target, version=version)
    entries = {key: getattr(options, key) for key in INTENT_OPTIONS}
    chosen: dict[str, Any] = {key: value for key, value in entries.items() if value is not None}
    head = options.head or (head_in(file) if file is not None else None)
    trusted = options.trust_remote_code or base.trust_remote_code
    intent = replace(
        base, target=options.target, version=version, head=head, trust_remote_code=trusted, **chosen
    )
    return intent.fitted(target.spec.max_position_embeddings)


def _command(
    options: ServeOptions,
    intent: Intent,
    target: Target,
    file: Document,
    address: ServerAddress,
    role: str | None,
) -> list[str]:
    """Returns the command line of trtllm-serve.

    Raises UsageError for an option after `--` that an option of `trtspec serve` sets.

    file: configuration file that the engine reads.
    role: role in a disaggregated deployment. None outside of one.
    """
    schema = schema_for(intent.version)
    size_options = {
        "tensor_parallel_size": options.tp_size,
        "max_batch_size": options.max_batch_size,
        "max_num_tokens": options.max_num_tokens,
        "max_seq_len": options.max_seq_len,
    }
    sizes = {key: value for key, value in size_options.items() if value is not None}
    for name in parse_passed(schema, options.passed)[0]:
        own_option = OWN_OPTIONS.get(name)
        if own_option:
            message = f"--{name} is not used after --: `{own_option}` decides it"
            raise UsageError(message, f"pass `{own_option}` before --")
        if name in sizes:
            raise UsageError(f"--{name} is given before -- and after it", "give it once")
    passed = list(options.passed)
    if options.served_model_name:
        passed += ["--served_model_name", options.served_model_name]
    if role:
        passed += ["--server_role", role.upper()]
    return build_command(intent, target.spec, file, address=address, sizes=sizes, passed=passed)


def reference_problems(options: ServeOptions) -> list[Problem]:
    """Returns the problems of the port and of the pair that stop or weaken the reference backend.

    Fetches no weights, so only checkpoints on this machine are checked. Raises TrtspecError for a
    checkpoint that the backend would refuse.
    """
    target = find_target(options.target)
    if target.resolved.path is not None:
        sound(target.resolved.target)
    head = find_head(options.head) if options.head else None
    problems = [*check_port(options.host, options.port)]
    if options.dry_run:
        problems = [as_in_dry_run(problem) for problem in problems]
    if head is not None and findable(head.name):
        problems += errors_in(pair_problems(head.head_spec(), target.spec))
        problems += learned_problems(head, target.resolved)
    return problems


def serve_reference(options: ServeOptions) -> None:
    """Serves the target in this process until a signal ends the server.

    Downloads checkpoints that are not on this machine.
    """
    check_device(options.device)
    from trtspec.engine.server import ServerOptions, run

    target = resolve(options.target)
    head = resolve(options.head) if options.head else None
    announce(f"trtspec: loading {target.name}")
    if head:
        # reference_problems could not compare checkpoints that were downloaded just now
        for line in problem_lines(learned_problems(head, target)):
            announce(line)
    cache: dict[str, Any] = {}
    if options.prefix_cache_mib is not None:
        cache = {"prefix_bytes": options.prefix_cache_mib << 20}
    hub_name = target.hub_id.name if target.hub_id is not None else None
    settings = fill(
        ServerOptions, options, served_model_name=options.served_model_name or hub_name, **cache
    )
    run(target.directory, head.directory if head is not None else None, settings)
