"""Plans one start of vLLM: translates options of `trtspec serve`, and checks for problems.

Options after `--` go to `vllm serve` unchanged, and vLLM judges them itself. data/vllm.yaml has the
known releases.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from trtspec.checkpoint.heads.dialects import DIALECTS, ENGINES, OPTIONS, vllm_speculation
from trtspec.checkpoint.heads.pairing import learned_problems, pair_problems
from trtspec.checkpoint.hub import (
    Head,
    Target,
    engine_name,
    engine_revision,
    find_target,
    load_head,
)
from trtspec.checkpoint.published import PublishedHead, reasoning_parser
from trtspec.data_files import DATA, load_yaml
from trtspec.errors import Problem, Severity, UsageError, errors_in
from trtspec.files import load_file
from trtspec.launch import preflight
from trtspec.launch.preflight import EngineProgram, ServerPlan
from trtspec.launch.serve_options import ServeOptions
from trtspec.launch.server_launch import LogPatterns, ServerAddress
from trtspec.planning.layout import layout_refusals
from trtspec.records import given, made_of_file
from trtspec.specs import ModelSpec

HOME = "install vLLM in an environment of its own and put it on PATH"
PROGRAM = EngineProgram("vllm", "vllm", "vLLM", HOME, "vllm_version")
PATTERNS = DATA / "vllm_log.yaml"
ENGINE = ENGINES["vllm"]
# so that the log shows phases when they begin, and vLLM sends no usage reports
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}
# short spellings of vLLM's options, each with the long one
SHORT = {"tp": "tensor-parallel-size", "sc": "speculative-config", "ep": "enable-expert-parallel"}
# keys of vLLM's configuration file that are options of serve too, with their names in words.yaml
FILE_KEYS = (
    "model",
    "tensor-parallel-size",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "served-model-name",
    "dtype",
    "trust-remote-code",
)
# options in the order of the command on every head's card
PUBLISHED = ("tensor-parallel-size", "speculative-config", "trust-remote-code")
# options that trtspec writes by the target's family, without an option of its own
WRITTEN = ("tool-call-parser", "enable-auto-tool-choice", "reasoning-parser")
NEAR = 0.9  # similarity of two names from which one is a misspelling of the other
# vLLM's method by the value of `draft_sampling`
SAMPLING = {"argmax": "greedy", "probabilistic": "probabilistic"}


def plan_vllm(options: ServeOptions, *, launching: bool) -> ServerPlan:
    """Plans one start of vLLM. `launching`: false for a dry run.

    Raises UsageError for unknown names, an unknown version, and options that contradict each other.
    Everything else is a problem of the plan.
    """
    options = with_file(options)
    target = find_target(options.target)
    models = [target.resolved]
    head = None
    if options.head:
        head = load_head(options.head, values=launching)
        models.append(head.resolved)
    version, reason, problems = _version(options.vllm_version, launching)
    _refuse_passed(options)
    problems += _target_problems(options, target.spec)
    if head is not None:
        problems += _head_problems(options, head, target)
    address = ServerAddress(options.host, options.port, api_key=options.api_key)
    problems += preflight.check_start(
        PROGRAM, models, address, _ranks(options), preflight.read_gpus(),
        trusted=options.trust_remote_code, launching=launching,
    )  # fmt: skip
    if not launching:
        problems = [preflight.as_in_dry_run(problem) for problem in problems]
    return ServerPlan(
        program=PROGRAM,
        patterns=LogPatterns.load(PATTERNS),
        argv=vllm_command(options, target),
        env={name: value for name, value in ENVIRONMENT.items() if name not in os.environ},
        config={"speculative_config": _speculation(options)} if options.head else {},
        problems=problems,
        version=(str(version), reason),
        endpoint=address,
        limits=options.limits,
        secrets={"VLLM_API_KEY": options.api_key} if options.api_key else {},
    )


@functools.cache
def _releases() -> Any:
    """Facts on vLLM's releases in data/vllm.yaml: `oldest`, `newest` and `refused_options`."""
    return load_yaml("vllm.yaml")


def _own_options() -> dict[str, str]:
    """Options of `trtspec serve` by the option of `vllm serve` that they set."""
    table = load_yaml("words.yaml")["vllm"]
    return {name: ours for ours, names in table.items() for name in names.split()}


def passed_options(words: Sequence[str]) -> dict[str, str]:
    """Options among the words after `--` as written, by their long name without dashes."""
    options: dict[str, str] = {}
    for word in words:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            # vLLM also accepts `--option.key` and `--option+` for parts of a JSON value
            option = flag.lstrip("-").partition(".")[0].rstrip("+")
            name = option.replace("_", "-")
            options[SHORT.get(name, name)] = flag
    return options


def _entry_of(name: str, flag: str, options: dict[str, str]) -> str | None:
    """Entry of a passed option in `options`, by name. None if no option matches.

    `name`: name of the passed option. It may be abbreviated, as vLLM accepts it, if `flag` is long
        (`--hos`).
    """
    for option, entry in options.items():
        if option == name or (flag.startswith("--") and option.startswith(name)):
            return entry
    return None


def _ranks(options: ServeOptions) -> int:
    """Tensor-parallel size, by default the one that heads are published with."""
    return options.tp_size or ENGINE.tensor_parallel


def _speculation(options: ServeOptions) -> dict[str, Any]:
    """Value of --speculative-config as a mapping, {} without a head."""
    if options.head is None:
        return {}
    speculation = vllm_speculation(engine_name(options.head), options.draft_len)
    revision = engine_revision(options.head)
    if revision is not None:
        speculation = speculation | {"revision": revision}
    if options.draft_sampling:
        method = SAMPLING[options.draft_sampling]
        speculation = speculation | {"draft_sample_method": method}
    return speculation


def _refuse_passed(options: ServeOptions) -> None:
    """Raises UsageError if an option after `--` is one that serve sets or refuses."""
    for name, flag in passed_options(options.passed).items():
        option = _entry_of(name, flag, _own_options())
        if option:
            message = f"{flag} is not used after --: {option} decides it"
            raise UsageError(message, f"pass {option} before --")
        remedy = _entry_of(name, flag, _releases()["refused_options"])
        if remedy:
            raise UsageError(f"{flag} is not used after --", remedy)


def with_file(options: ServeOptions) -> ServeOptions:
    """Returns the options with the settings of the configuration file.

    Raises UsageError if option and file set a value differently, or if an option does not accept
    the file's value.
    """
    if options.config is None:
        return options
    values = _file_values(options.config, options.target)
    names = _own_options()
    settings: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for written, value in values.items():
        key = str(written).replace("_", "-")
        if value is None:
            message = f"{options.config}: {written} has no value"
            raise UsageError(message, "write one, or leave the key out")
        if key == "speculative-config":
            settings |= _speculation_of(value, options)
        elif key in FILE_KEYS:
            # the field of `--tp-size` is tp_size, and the field of TARGET is target
            field_name = names[key].lower().lstrip("-")
            settings[field_name.replace("-", "_")] = str(value)
        else:
            others[key] = value
    fields = {"target": options.target, "backend": "vllm", **settings}
    read = made_of_file(ServeOptions, options.config, fields)
    settings = {name: getattr(read, name) for name in settings}
    for name in sorted(settings.keys() & given(options)):
        if getattr(options, name) != settings[name]:
            message = f"`{name}` is given, and {options.config} says {settings[name]!r}"
            raise UsageError(message, "say it in one place")
    return replace(options, **settings, passed=(*as_words(others), *options.passed))


def _file_values(path: Path, target: str) -> dict[Any, Any]:
    """Values of the configuration file by key, with a revision after the model's name.

    Raises UsageError if the file is not a mapping, or has a key that is a misspelled option.
    `target`: name of the model if the file has none.
    """
    values = load_file(path, "write it with `trtspec build-config TARGET --format vllm`")
    if not isinstance(values, dict):
        message = f"{path} is not a mapping of vLLM's options"
        raise UsageError(message, "write `option: value` lines")
    for problem in errors_in(unknown_options(values)):  # the first error is enough
        raise UsageError(f"{path}: {problem.message}", problem.remedy)
    if "revision" in values:  # our option has the revision after the model's name
        revision = values.pop("revision")
        values["model"] = f"{values.get('model', target)}@{revision}"
    return values


def unknown_options(values: Iterable[Any]) -> Iterator[Problem]:
    """Yields a problem for each key of the file that is not known.

    It is an error if the key is spelled like a known option, else a note. `values`: keys of the
    file.
    """
    known = known_options()
    for written in map(str, values):
        name = written.replace("_", "-")
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
        if near:
            message = f"vLLM has no option {written}"
            yield Problem("TS-VLLM-KEY", "error", written, message, f"did you mean {near[0]}?")
        else:
            message = f"{written} is not known here, so it was not judged; vLLM judges it itself"
            yield Problem("TS-VLLM-KEY", "info", written, message)


def known_options() -> list[str]:
    """Names of the known options of `vllm serve`, as its command line spells them."""
    refused = _releases()["refused_options"]
    return [*_own_options(), *refused, *SHORT.values(), *WRITTEN]


def as_words(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields options of `vllm serve` as words of its command line. `values`: values by option.

    Mappings and lists are written as JSON.
    """
    for name, value in values.items():
        if isinstance(value, bool):
            flag = f"--no-{name}"
            if value:
                flag = f"--{name}"
            yield flag
        else:
            yield f"--{name}"
            yield value if isinstance(value, str) else json.dumps(value)


def _speculation_of(value: Any, options: ServeOptions) -> dict[str, Any]:
    """Head and draft length, as fields of `ServeOptions`, of a speculative-config in the file.

    `value`: mapping or JSON text. Raises UsageError for any value that trtspec would not write
        itself.
    """
    try:
        written = json.loads(value) if isinstance(value, str) else value
        settings = {"head": written["model"], "draft_len": written["num_speculative_tokens"]}
        if "revision" in written:
            settings["head"] += f"@{written['revision']}"
        if _speculation(replace(options, **settings)) != written:
            raise ValueError
    # a value of any type can miss a key, or not be JSON
    except (ValueError, KeyError, AttributeError, TypeError):
        message = f"{options.config}: speculative-config {value!r} is not one that trtspec checks"
        remedy = "write it with `trtspec build-config TARGET --head HEAD --format vllm`"
        raise UsageError(message, remedy) from None
    return settings


def vllm_file(options: ServeOptions, first_line: str) -> str:
    """Text of vLLM's configuration file for a target and head.

    It has the options of the command that serves the pair, without host and port. `first_line`:
    comment with the command that writes the file.
    """
    settings = _settings(options, find_target(options.target))
    values = {"model": engine_name(options.target), **settings}
    return f"{first_line}\n" + yaml.safe_dump(values, sort_keys=False, width=10**6)


def vllm_command(options: ServeOptions, target: Target) -> list[str]:
    """Words of `vllm serve` for a target and head.

    They are the command that heads are published with, word for word, and more options. These are
    the address, sizes, the parsers of a Kimi, and the user's own words, in this order.
    """
    settings = _settings(options, target)
    address = {"host": options.host, "port": options.port}
    published = {name: settings.pop(name) for name in PUBLISHED if name in settings}
    words = as_words({**published, **address, **settings})
    return [PROGRAM.executable, "serve", engine_name(options.target), *words, *options.passed]


def _settings(options: ServeOptions, target: Target) -> dict[str, Any]:
    """Values of the start by vLLM's options, without host, port and the words after `--`."""
    passed = passed_options(options.passed)
    family = target.spec.family
    parsers: dict[str, Any] = {}
    if "tool-call-parser" not in passed:
        parsers = {"tool-call-parser": family.tool_parser, "enable-auto-tool-choice": True}
    if "reasoning-parser" not in passed:
        parser = reasoning_parser(family, target.resolved.name, ENGINE.name)
        parsers["reasoning-parser"] = parser
    speculation = None
    if options.head:
        speculation = json.dumps(_speculation(options))
    settings = {
        "tensor-parallel-size": _ranks(options),
        "revision": engine_revision(options.target),
        "speculative-config": speculation,
        "trust-remote-code": options.trust_remote_code or None,
        "max-model-len": options.max_seq_len,
        "max-num-seqs": options.max_batch_size,
        "max-num-batched-tokens": options.max_num_tokens,
        "dtype": options.dtype if options.dtype != "auto" else None,
        "served-model-name": options.served_model_name,
        **parsers,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _version(asked: str | None, launching: bool) -> tuple[Version, str, list[Problem]]:
    """Returns the vLLM version to judge for, the reason for it in words, and problems with it.

    `asked`: version that the user asked for. Raises UsageError if it is invalid or too old.
    """
    installed = PROGRAM.version()
    releases = _releases()
    oldest = releases["oldest"]
    newest = releases["newest"]
    try:
        version = Version(asked or installed or newest)
    except InvalidVersion:
        message = f"{asked!r} is not a vLLM version"
        raise UsageError(message, f"write it as the package does: {newest}") from None
    if version < Version(oldest):
        message = f"vLLM {version} is older than {oldest}, the first release that is known"
        raise UsageError(message, f"use {oldest} or later")
    problems: list[Problem] = []
    if launching:
        problems += PROGRAM.check_version(asked, installed, str(version))
    if version > Version(newest):
        message = f"vLLM {version} is newer than {newest}, the last release that is known"
        problems.append(Problem("TS-SERVE-VERSION-UNKNOWN", "warning", "vllm", message))
    reason = "the newest release that is known"
    if installed:
        reason = "installed here"
    if asked:
        reason = "asked for"
    return version, reason, problems


def _target_problems(options: ServeOptions, target: ModelSpec) -> Iterator[Problem]:
    """Yields problems of the target with the parallel sizes and the sequence length."""
    ranks = _ranks(options)
    expert_ranks = 1
    if "enable-expert-parallel" in passed_options(options.passed):
        expert_ranks = ranks
    for problem in layout_refusals(target, ranks, expert_ranks, attention_dp=False):
        yield replace(problem, code="TS-VLLM-PARALLEL", key="tp_size", remedy="")
    limit = target.max_position_embeddings
    if (options.max_seq_len or 0) > limit:
        message = (
            f"`max_seq_len` {options.max_seq_len} is beyond the model's {limit} positions; "
            "vLLM refuses to start"
        )
        yield Problem("TS-VLLM-LENGTH", "error", "`max_seq_len`", message)


def _head_problems(options: ServeOptions, head: Head, target: Target) -> Iterator[Problem]:
    """Yields problems of the head with the target, and of its layout with vLLM."""
    spec = head.spec
    name = head.resolved.name
    ids = {"head_id": name, "target_id": target.resolved.name}
    pair = pair_problems(spec, target.spec, tp_size=_ranks(options), **ids)
    pair += learned_problems(head.resolved, target.resolved)
    yield from (problem for problem in pair if problem.severity != "info")
    # A head that is not on this machine is judged by the engines that it was published for. Any
    # other head is judged by its file.
    here = head.resolved.path is not None
    record = head.resolved.known
    published = isinstance(record, PublishedHead) and ENGINE.name in record.published_on
    if (here or not published) and not DIALECTS[spec.dialect].served_by(ENGINE, spec):
        option = next(option for option, row in OPTIONS.items() if ENGINE.name in row.read_by)
        message = (
            f"{name} has {DIALECTS[spec.dialect].title}'s layout: "
            "vLLM fails to load it, or reads other layers"
        )
        remedy = f"trtspec convert {name} -o HEAD-vllm --to {option}, then pass `head` HEAD-vllm"
        severity: Severity = "warning"
        if here:
            severity = "error"
        yield Problem("TS-VLLM-HEAD-LAYOUT", severity, name, message, remedy)
