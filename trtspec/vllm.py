"""One start of vLLM: options of `trtspec serve` -> `vllm serve`, and what can be known before the launch.
Options after `--` go to `vllm serve` as they are: it judges them itself. data/vllm.yaml has the releases."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from trtspec.checkpoint.heads.dialects import DIALECTS, ENGINES, OPTIONS, vllm_speculation
from trtspec.checkpoint.heads.pairing import pair_problems
from trtspec.checkpoint.hub import Head, Target, engine_name, known, load_head, load_target
from trtspec.data_files import DATA, Gate, load_yaml
from trtspec.errors import Problem, Severity, UsageError
from trtspec.files import load_text, read_yaml_text
from trtspec.launch import preflight
from trtspec.launch.options import ServeOptions
from trtspec.launch.preflight import EngineProgram, ServerPlan
from trtspec.launch.server import LogPatterns, ServerAddress
from trtspec.specs import ModelSpec

PROGRAM = EngineProgram("vllm", "vLLM", "install vLLM in an environment of its own and put it on PATH")
PATTERNS = DATA / "vllm_log.yaml"
ENGINE = ENGINES["vllm"]
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}  # phases show when they begin; no usage reports
SHORT = {"tp": "tensor-parallel-size", "sc": "speculative-config", "ep": "enable-expert-parallel"}
SAMPLING = {"argmax": "greedy", "probabilistic": "probabilistic"}
VERSION = re.compile(r"\b(\d+\.\d+\.\d+(?:(?:rc|\.post|\.dev)\d+)*)")


@functools.cache
def _releases() -> Any:
    return load_yaml("vllm.yaml")


def vllm_gate(name: str) -> Gate:
    row = _releases()["gates"][name]
    return Gate(name, row["what"], row["after"], row["by"], f"{row['evidence']}: {row['source']}")


def passed_options(words: Sequence[str]) -> dict[str, str]:
    """Options among the words after `--`: how each is written, by its long spelling without dashes."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    named = {flag.lstrip("-").partition(".")[0].rstrip("+").replace("_", "-"): flag for flag in flags}
    return {SHORT.get(name, name): flag for name, flag in named.items()}


def _meant(name: str, flag: str, options: dict[str, str]) -> str | None:
    """The entry of an option, also of one that is abbreviated (`--hos`), as vLLM's parser accepts it."""
    short = flag.startswith("--")
    return next((options[key] for key in options if key == name or (short and key.startswith(name))), None)


def installed_vllm() -> str | None:
    """Version of the `vllm` on PATH: by the package beside it, else by asking it, which takes many seconds."""
    found = shutil.which(PROGRAM.executable)
    if found is None:
        return None
    place = Path(found).resolve().parent.parent
    beside = sorted(place.glob("lib/python3*/site-packages/vllm-*.dist-info"))
    if beside:
        return beside[0].name.removeprefix("vllm-").removesuffix(".dist-info").partition("+")[0]
    try:
        answer = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = VERSION.search(answer.stdout) if answer.returncode == 0 else None
    return match[1] if match else None


def _ranks(options: ServeOptions) -> int:
    return options.tp_size or ENGINE.tensor_parallel


def _speculation(options: ServeOptions) -> dict[str, Any]:
    """What --speculative-config says; {} without a head."""
    if options.head is None:
        return {}
    drawn = {"draft_sample_method": SAMPLING[options.draft_sampling]} if options.draft_sampling else {}
    return vllm_speculation(engine_name(options.head), options.draft_len) | drawn


def plan_vllm(options: ServeOptions, *, launching: bool) -> ServerPlan:
    """Raises for what cannot be answered at all (unknown ids, an unknown version, options that contradict each other);
    everything else is a problem of the plan."""
    options = with_file(options)
    target = load_target(options.target)
    head = load_head(options.head, values=launching) if options.head else None
    version, reason, problems = _version(options.vllm_version, launching)
    for name, flag in passed_options(options.passed).items():
        if own := _meant(name, flag, _releases()["own_options"]):
            raise UsageError(f"{flag} is not used after --: {own} decides it", f"pass {own} before --")
        if remedy := _meant(name, flag, _releases()["refused_options"]):
            raise UsageError(f"{flag} is not used after --", remedy)
    problems += _target_problems(options, target.spec, version)
    problems += _head_problems(options, head, target, version) if head is not None else ()
    code = target.spec.remote_code
    problems += preflight.check_start(
        PROGRAM, [target.resolved, *([head.resolved] if head else [])], options.host, options.port, _ranks(options),
        preflight.read_gpus(), untrusted=code and not options.trust_remote_code, remote_code=code, launching=launching,
    )  # fmt: skip
    return ServerPlan(
        program=PROGRAM,
        patterns=LogPatterns.load(PATTERNS),
        argv=vllm_command(options, target),
        env={name: value for name, value in ENVIRONMENT.items() if name not in os.environ},
        config={"speculative_config": _speculation(options)} if options.head else {},
        problems=problems if launching else [preflight.mentioned(problem) for problem in problems],
        version=(str(version), reason),
        endpoint=ServerAddress(options.host, options.port, api_key=options.api_key),
        limits=preflight.limits_of(options),
        secrets={"VLLM_API_KEY": options.api_key} if options.api_key else {},
    )


# keys of vLLM's configuration file that are fields of `trtspec serve`; every other key is an option of vLLM's own
FIELDS = {
    "tensor-parallel-size": "tp_size", "max-model-len": "max_seq_len", "max-num-seqs": "max_batch_size",
    "max-num-batched-tokens": "max_num_tokens", "served-model-name": "served_model_name", "dtype": "dtype",
    "trust-remote-code": "trust_remote_code",
}  # fmt: skip


def with_file(options: ServeOptions) -> ServeOptions:
    """The options with what the file of --config says. Raises UsageError for what both say, and for values that the
    options would not reproduce."""
    if options.config is None:
        return options
    values = load_text(read_yaml_text(options.config, "write it with `trtspec build-config TARGET --format vllm`"))
    if not isinstance(values, dict):
        raise UsageError(f"{options.config} is not a mapping of vLLM's options", "write `option: value` lines")
    found, words = dict[str, Any](), list[str]()
    for written, value in values.items():
        key = str(written).replace("_", "-")
        if key == "model" and value == options.target:
            continue
        if key == "speculative-config":
            found |= _speculation_of(value, options)
        elif key in FIELDS:
            found[FIELDS[key]] = value
        elif isinstance(value, bool):
            words += [f"--{key}" if value else f"--no-{key}"]
        elif isinstance(value, (str, int, float)):
            words += [f"--{key}", str(value)]
        else:
            words += [f"--{key}", json.dumps(value)]
    plain = ServeOptions(target=options.target)
    for name, value in found.items():
        kind = bool if name == "trust_remote_code" else str if name in ("dtype", "served_model_name", "head") else int
        if name != "draft_sampling" and (type(value) is not kind or (type(value) is int and value < 1)):
            raise UsageError(f"{options.config}: {name} is {value!r}", f"write {kind.__name__}")
        if getattr(options, name) not in (getattr(plain, name), value):
            raise UsageError(f"{name} is given, and {options.config} says {value!r}", "say it in one place")
    return replace(options, **found, passed=(*words, *options.passed))


def _speculation_of(value: Any, options: ServeOptions) -> dict[str, Any]:
    """The head and its draft length of a speculative-config, which may be JSON. Raises UsageError for any value that
    trtspec would not write itself."""
    try:
        written = json.loads(value) if isinstance(value, str) else value
        drawn = {theirs: ours for ours, theirs in SAMPLING.items()}.get(written.get("draft_sample_method"))
        found = {"head": written["model"], "draft_len": written["num_speculative_tokens"], "draft_sampling": drawn}
        if _speculation(replace(options, **found)) != written:
            raise ValueError
    except (ValueError, KeyError, AttributeError, TypeError):
        message = f"{options.config}: speculative-config {value!r} is not one that trtspec checks"
        raise UsageError(message, "write it with `trtspec build-config TARGET --head HEAD --format vllm`") from None
    return found


def vllm_file(options: ServeOptions, first_line: str) -> str:
    """vLLM's configuration file for a pair: the options of the command that serves it, without its address."""
    argv = vllm_command(replace(options, host="", port=0), load_target(options.target))
    values: dict[str, Any] = {"model": argv[2]}
    rest = [word for word in argv[3:]]
    while rest:
        flag = rest.pop(0).removeprefix("--")
        values[flag] = rest.pop(0) if rest and not rest[0].startswith("--") else True
    lines = [f"{key}: {scalar(value)}" for key, value in values.items() if key not in ("host", "port")]
    return "\n".join([first_line, *lines]) + "\n"


def scalar(value: Any) -> str:
    """Numbers and switches as YAML has them, text in quotes."""
    text = str(value)
    return text.lower() if value is True or text.isdigit() else f"'{text}'" if '"' in text else json.dumps(text)


def vllm_command(options: ServeOptions, target: Target) -> list[str]:
    """The command that heads are published with, word for word, then what that leaves out: address, sizes, the parsers
    of a Kimi, and the user's own words."""
    argv = [PROGRAM.executable, "serve", engine_name(options.target), "--tensor-parallel-size", str(_ranks(options))]
    argv += ["--speculative-config", json.dumps(_speculation(options))] if options.head else []
    argv += ["--trust-remote-code"] if options.trust_remote_code else []
    argv += ["--host", options.host, "--port", str(options.port)]
    sizes = {
        "--max-model-len": options.max_seq_len, "--max-num-seqs": options.max_batch_size,
        "--max-num-batched-tokens": options.max_num_tokens,
        "--dtype": options.dtype if options.dtype != "auto" else None, "--served-model-name": options.served_model_name,
    }  # fmt: skip
    argv += [word for flag, value in sizes.items() if value is not None for word in (flag, str(value))]
    chosen = passed_options(options.passed)
    if "tool-call-parser" not in chosen:
        argv += ["--tool-call-parser", "kimi_k2", "--enable-auto-tool-choice"]
    # one parser for every Kimi that thinks; the config alone does not tell that K2-Instruct does not
    entry = known(target.resolved.name)
    thinks = entry[1].get("reasoning_parser") if entry is not None else target.spec.name_prefix
    if "reasoning-parser" not in chosen and thinks:
        argv += ["--reasoning-parser", "kimi_k2"]
    return [*argv, *options.passed]


def _version(asked: str | None, launching: bool) -> tuple[Version, str, list[Problem]]:
    """The version to judge for, why, and what is doubtful about it."""
    installed = installed_vllm()
    oldest, newest = _releases()["oldest"], _releases()["newest"]
    try:
        version = Version(asked or installed or newest)
    except InvalidVersion:
        raise UsageError(f"{asked!r} is not a vLLM version", f"write it as the package does: {newest}") from None
    if version < Version(oldest):
        message = f"vLLM {version} is older than {oldest}, the first release that is known"
        raise UsageError(message, f"use {oldest} or later: Kimi's Eagle3 heads came with 0.18")
    problems = []
    if launching and asked and installed and Version(installed).public != version.public:
        message = f"vLLM {installed} is installed and would run; `vllm_version` says {asked}"
        problems.append(Problem("TS-SERVE-OTHER-ENGINE", "error", "`vllm_version`", message, "leave the option out"))
    if launching and shutil.which(PROGRAM.executable) and not asked and not installed:
        message = f"the installed engine does not tell its version; judged for {version}"
        problems.append(Problem("TS-SERVE-VERSION-UNKNOWN", "warning", "vllm", message, "pass `vllm_version`"))
    if version > Version(newest):
        message = f"vLLM {version} is newer than {newest}, the last release that is known"
        remedy = "compare with its release notes"
        problems.append(Problem("TS-SERVE-VERSION-UNKNOWN", "warning", "vllm", message, remedy))
    reason = "asked for" if asked else "installed here" if installed else "the newest release that is known"
    return version, reason, problems


def _target_problems(options: ServeOptions, target: ModelSpec, version: Version) -> Iterator[Problem]:
    if target.name_prefix:
        yield from _gated("kimi_tool_ids", "target", version, "warning")
    heads, ranks = target.num_attention_heads, _ranks(options)
    if heads % ranks:
        message = f"the {heads} attention heads do not divide by tensor-parallel size {ranks}"
        fitting = max(size for size in range(1, ranks + 1) if heads % size == 0)
        yield Problem("TS-VLLM-PARALLEL", "error", "tp_size", message, f"use `tp_size` {fitting}")
    width, group = target.moe_intermediate_size, target.quant.group_size or 1
    if "enable-expert-parallel" not in passed_options(options.passed) and (width % ranks or width // ranks % group):
        message = f"an expert of width {width} does not divide into {ranks} equal parts of whole groups of {group}"
        yield Problem("TS-VLLM-PARALLEL", "error", "tp_size", message, "pass -- --enable-expert-parallel")
    if options.max_seq_len is not None and options.max_seq_len > (limit := target.max_position_embeddings):
        message = f"`max_seq_len` {options.max_seq_len} is beyond the model's {limit} positions; vLLM refuses to start"
        yield Problem("TS-VLLM-LENGTH", "error", "`max_seq_len`", message, f"use {limit} or less")
    if options.max_num_tokens and options.max_batch_size and options.max_num_tokens < options.max_batch_size:
        message = f"{options.max_batch_size} requests do not fit into steps of {options.max_num_tokens} tokens"
        yield Problem("TS-VLLM-LENGTH", "error", "`max_num_tokens`", message, "raise it, or lower `max_batch_size`")


def _head_problems(options: ServeOptions, head: Head, target: Target, version: Version) -> Iterator[Problem]:
    spec, name = head.spec, head.resolved.name
    if spec.eagle == "3.1":
        yield from _gated("eagle31", name, version)
        if spec.dialect in _releases()["gates"]["eagle31_speculators"]["layouts"]:
            yield from _gated("eagle31_speculators", name, version)
    if options.draft_sampling is not None:
        yield from _gated("draft_sampling", "--draft-sampling", version)
    ids = {"head_id": head.resolved.hub_id, "target_id": target.resolved.hub_id}
    pair = pair_problems(spec, target.spec, tp_size=_ranks(options), **ids)
    yield from (problem for problem in pair if problem.severity != "info")
    # a head whose file is here is judged by it; one known by its hub id alone by what it was published for
    published = head.resolved.path is None and ENGINE.name in (head.resolved.known or {}).get("published_on", ())
    if not published and not DIALECTS[spec.dialect].served_by(ENGINE, spec):
        option = next(option for option, row in OPTIONS.items() if ENGINE.name in row.read_by)
        message = f"{name} has {DIALECTS[spec.dialect].title}'s layout: vLLM fails to load it, or reads other layers"
        remedy = f"trtspec convert {name} -o HEAD-vllm --to {option}, then pass `head` HEAD-vllm"
        severity: Severity = "error" if head.resolved.path is not None else "warning"
        yield Problem("TS-VLLM-HEAD-LAYOUT", severity, name, message, remedy)


def _gated(name: str, where: str, version: Version, severity: Severity = "error") -> Iterator[Problem]:
    gate = vllm_gate(name)
    told = {"no": f"vLLM {version} is too old for this", "unknown": f"not known for vLLM {version}"}
    if (state := gate.state(version)) in told:
        message = f"{told[state]}: {gate.what} ({gate.interval})"
        level = severity if state == "no" else "warning"
        yield Problem("TS-VLLM-TOO-OLD", level, where, message, f"use {gate.by} or later")
