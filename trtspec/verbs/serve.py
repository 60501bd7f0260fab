"""Plans one start of a server: TensorRT-LLM, the front of several, vLLM, or the reference backend.

`plan_server` describes a start and starts nothing. `launch` of trtspec.launch.preflight starts the
plan. A plan for TensorRT-LLM goes from options to intent, configuration, command and problems.
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

# options of trtllm-serve, and the option of serve that decides each: the checks and the readiness
# probe read the option of serve
OWN_OPTIONS = {
    "host": "host", "port": "port", "extra_llm_api_options": "config",
    "served_model_name": "served_model_name", "server_role": "role",
}  # fmt: skip
# settings of the intent that have an option of the same name
INTENT_OPTIONS = ("goal", "tp_size", "max_batch_size", "max_num_tokens", "max_seq_len", "draft_len")


def plan_server(options: ServeOptions) -> ServerPlan:
    """Returns the plan for the start of an engine, or of the front of several."""
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
    Everything else is a problem of the plan.
    """
    given = _user_file(options)
    launcher_args = _launcher_args(options)
    head_name = _head_name(options, given)
    written = parse_intent(given.text) if given is not None else None
    version, problems = _version(options, given, written, launching)
    target = find_target(options.target)
    # before a launch, the head's weights are checked too, not only its headers
    head = load_head(head_name, values=launching) if head_name else None
    head_spec = head.spec if head else None
    intent = _intent(options, given, written, version[0], target)
    file = given or Document.parse(engine_yaml(intent, target.spec, head_spec), ENGINE_FILE)

    role = options.role or intent.role
    address = ServerAddress(options.host, options.port, generates=role is None)
    argv = _command(options, intent, target, file, address, role)
    schema = schema_for(version[0])
    gpus = read_gpus()
    passed, refused = parse_passed(schema, argv[2:])
    capability = compute_capability(intent.gpu) if intent.gpu else None
    if launching and gpus:
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
    parallel = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    world = math.prod(deployment.size(file, key, 1) for key in parallel)
    nodes = options.nodes or intent.nodes
    cluster = Cluster(
        options.launcher,
        nodes,
        options.gpus_per_node or -(-world // nodes),
        launcher_args,
    )

    # check_start names the files of code that nobody trusts
    findings = [each for each in lint(file, deployment) if each.key != "--trust_remote_code"]
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
    problems += check_cluster(cluster, argv, world, given is None, os.environ, launching)
    env = {**ENVIRONMENT, **cluster_environment(cluster, os.environ)}
    return ServerPlan(
        program=PROGRAM,
        patterns=LogPatterns.load(PATTERNS),
        argv=with_launcher(argv, env, cluster, os.environ),
        env=env,
        config=file.mapping,
        config_text=file.text,
        config_path=file.name,
        writes_config=given is None,
        problems=problems if launching else [as_in_dry_run(problem) for problem in problems],
        version=version,
        endpoint=address,
        limits=options.limits,
        own_statuses=cluster.launcher != "direct",
    )


def _user_file(options: ServeOptions) -> Document | None:
    """Returns the file of `config`. None without `config`.

    Raises UsageError if the file cannot be read, is the file of a front, or contradicts `goal`.
    """
    path = options.config
    if path is None:
        return None
    if str(path) == STDIN:
        raise UsageError(
            "`config` - : the engine reads its configuration from a file", "pass the path of one"
        )
    text = read_yaml_text(path, "pass a file written by `trtspec build-config`")
    written = parse_intent(text)
    if written is not None and written.role == "front":
        raise UsageError(f"{path} is the file of a front", f"pass it as `disaggregated` {path}")
    if written is not None and options.goal is not None:
        raise UsageError(
            f"`goal` is not used with `config`: {path} decides it",
            "change the file, or leave it out",
        )
    return Document.parse(text, str(path))


def _launcher_args(options: ServeOptions) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(options.launcher_args))
    except ValueError as error:
        message = f"`launcher_args` {options.launcher_args!r} does not parse: {error}"
        raise UsageError(message, "quote it as for a shell") from None


def _head_name(options: ServeOptions, file: Document | None) -> str | None:
    """Returns the head of the options, else the head that the file names if it can be read here."""
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
    options: ServeOptions, file: Document | None, written: Intent | None, launching: bool
) -> tuple[tuple[str, str], list[Problem]]:
    """Returns the version to judge for with its reason, and the problems of the version."""
    asked = options.trtllm_version
    installed = engine_version() if launching else None
    version, reason = choose_version(asked or installed, written)
    problems = list(PROGRAM.check_version(asked, installed, version)) if launching else []
    if written is not None and file is not None and written.version != version:
        message = (
            f"{file.name} was written for TensorRT-LLM {written.version} and is judged for "
            f"{version}"
        )
        problems.append(Problem("TS-SERVE-OTHER-VERSION", "warning", file.name, message))
    return (version, reason), problems


def _intent(
    options: ServeOptions,
    file: Document | None,
    written: Intent | None,
    version: str,
    target: Target,
) -> Intent:
    """Takes the options first, then the first line of the file, then the defaults of the goal."""
    base = written or Intent(target=options.target, version=version)
    entries = {key: getattr(options, key) for key in INTENT_OPTIONS}
    given: dict[str, Any] = {key: value for key, value in entries.items() if value is not None}
    named = options.head or (head_in(file) if file is not None else None)
    trusted = options.trust_remote_code or base.trust_remote_code
    intent = replace(
        base, target=options.target, version=version, head=named, trust_remote_code=trusted, **given
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
    """Returns the command. Raises UsageError for an option after `--` that serve has itself."""
    schema = schema_for(intent.version)
    given = {
        "tensor_parallel_size": options.tp_size,
        "max_batch_size": options.max_batch_size,
        "max_num_tokens": options.max_num_tokens,
        "max_seq_len": options.max_seq_len,
    }
    sizes = {key: value for key, value in given.items() if value is not None}
    for name in parse_passed(schema, options.passed)[0]:
        decider = OWN_OPTIONS.get(name)
        if decider:
            message = f"--{name} is not used after --: `{decider}` decides it"
            raise UsageError(message, f"pass `{decider}` before --")
        if name in sizes:
            raise UsageError(f"--{name} is given before -- and after it", "give it once")
    passed = list(options.passed)
    if options.served_model_name:
        passed += ["--served_model_name", options.served_model_name]
    if role:
        passed += ["--server_role", role.upper()]
    return build_command(intent, target.spec, file, address=address, sizes=sizes, passed=passed)


def reference_problems(options: ServeOptions) -> list[Problem]:
    """Returns the problems of the reference backend with the parts of the pair that are here.

    Fetches no weights. Raises TrtspecError for a checkpoint that it would refuse.
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
    """Fetches what is not here, then serves in this process until a signal ends it."""
    check_device(options.device)
    from trtspec.engine.server import ServerOptions, run

    target = resolve(options.target)
    head = resolve(options.head) if options.head else None
    announce(f"trtspec: loading {target.name}")
    if head:
        # again, because a pair that was fetched just now could not be compared before
        for line in problem_lines(learned_problems(head, target)):
            announce(line)
    more: dict[str, Any] = {}
    if options.prefix_cache_mib is not None:
        more = {"prefix_bytes": options.prefix_cache_mib << 20}
    published = target.hub_id.name if target.hub_id is not None else None
    settings = fill(
        ServerOptions, options, served_model_name=options.served_model_name or published, **more
    )
    run(target.directory, head.directory if head is not None else None, settings)
