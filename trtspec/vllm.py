"""One start of vLLM: options of `trtspec serve` -> `vllm serve`, its options checked by release, and what can be known
before the launch. `trtspec.launch.preflight.launch` starts what `plan_vllm` plans; data/vllm_flags.yaml has the
releases."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from trtspec.checkpoint.heads.dialects import DIALECTS, ENGINES, OPTIONS, vllm_speculation
from trtspec.checkpoint.heads.pairing import pair_problems
from trtspec.checkpoint.hub import Head, Target, known, load_head, load_target
from trtspec.data_files import DATA, Gate, load_yaml
from trtspec.errors import Problem, Severity, UsageError
from trtspec.launch.preflight import (
    EngineProgram,
    ServerPlan,
    check_files,
    check_gpus,
    check_host,
    check_port,
    check_visible,
    limits_of,
    mentioned,
    model_names,
    read_gpus,
    remote_code_problem,
)
from trtspec.launch.server import ServerAddress
from trtspec.specs import ModelSpec

PROGRAM = EngineProgram("vllm", "vLLM", "install vLLM in an environment of its own and put it on PATH")
PATTERNS = DATA / "vllm_log.yaml"
ENGINE = ENGINES["vllm"]
# phases are seen when they begin; nothing is sent to the publisher
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}
# options of `vllm serve`, and what decides them here: readiness asks there, and the head is checked
OWN_OPTIONS = {
    "model": "TARGET", "host": "--host", "port": "--port", "served-model-name": "--served-model-name",
    "speculative-config": "--head", "spec-model": "--head", "spec-method": "--head", "spec-tokens": "--draft-len",
    "trust-remote-code": "--trust-remote-code", "tensor-parallel-size": "--tp-size", "dtype": "--dtype",
    "api-key": "--api-key", "max-model-len": "--max-seq-len", "max-num-seqs": "--max-batch-size",
    "max-num-batched-tokens": "--max-num-tokens",
}  # fmt: skip
# options that are refused, and what to do in their place: the server is asked over HTTP on its port, until it is ready
HTTPS = "let a proxy in front of the server speak HTTPS"
REFUSED_OPTIONS = {
    "config": "write its options here, where they are checked",
    **dict.fromkeys(("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers"), HTTPS),
    "enable-ssl-refresh": HTTPS,
    "uds": "let the server listen on --host and --port",
    "headless": "run `vllm serve --headless` itself: it answers no requests, so there is nothing to wait for",
}
SAMPLING = {"argmax": "greedy", "probabilistic": "probabilistic"}
VERSION = re.compile(r"\b(\d+\.\d+\.\d+(?:(?:rc|\.post|\.dev)\d+)*)")


@dataclass(frozen=True, kw_only=True)
class VllmStart:
    """The options of `trtspec serve` that vLLM uses; None: not given, and vLLM's own default. Times in seconds."""

    target: str
    passed: tuple[str, ...] = ()
    head: str | None = None
    vllm_version: str | None = None
    host: str = "localhost"
    port: int = 8000
    dtype: str = "auto"
    tp_size: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    draft_len: int | None = None
    draft_sampling: Literal["argmax", "probabilistic"] | None = None
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    startup_timeout: float = 7200.0
    generation_timeout: float = 300.0
    stop_grace: float = 30.0
    health_interval: float = 15.0
    health_failures: int = 8

    @property
    def ranks(self) -> int:
        return self.tp_size or ENGINE.tensor_parallel

    def speculation(self) -> dict[str, Any]:
        """What --speculative-config says; {} without a head."""
        if self.head is None:
            return {}
        drawn = {"draft_sample_method": SAMPLING[self.draft_sampling]} if self.draft_sampling else {}
        return vllm_speculation(self.head, self.draft_len) | drawn


@dataclass(frozen=True)
class VllmOption:
    """One option of `vllm serve`. It came between the releases `after` and `by` and went between `last` and `gone`; ""
    where it was there before the first release that was read, or still is in the newest."""

    name: str
    kind: Literal["switch", "whole", "number", "json", "text", "list"]
    also: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    negated: bool = False
    after: str = ""
    by: str = ""
    last: str = ""
    gone: str = ""
    evidence: str = "verified"

    def state(self, version: Version) -> Literal["yes", "no", "unknown"]:
        """Whether the release has it."""
        if (self.after and version <= Version(self.after)) or (self.gone and version >= Version(self.gone)):
            return "no"
        sure = not (self.by and version < Version(self.by)) and not (self.last and version > Version(self.last))
        return "yes" if sure else "unknown"

    @property
    def interval(self) -> str:
        came = f"it came after {self.after}, by {self.by}" if self.after else ""
        went = f"it went after {self.last}, by {self.gone}" if self.last else ""
        return ", and ".join(part for part in (came, went) if part)


@functools.cache
def _flags() -> Any:
    return load_yaml("vllm_flags.yaml")


@functools.cache
def vllm_options() -> dict[str, VllmOption]:
    """All options that are known, by their long spelling without dashes."""
    rows: dict[str, Any] = _flags()["options"]
    return {
        name: VllmOption(name=name, **row | {key: tuple(row.get(key, ())) for key in ("also", "choices")})
        for name, row in rows.items()
    }


def vllm_gate(name: str) -> Gate:
    row = _flags()["gates"][name]
    return Gate(name, row["what"], row["after"], row["by"], f"{row['evidence']}: {row['source']}")


def releases_read() -> tuple[str, str]:
    """Oldest and newest release whose options are known."""
    return _flags()["read"][0], _flags()["read"][-1]


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


def plan_vllm(start: VllmStart, *, launching: bool) -> ServerPlan:
    """Raises for what cannot be answered at all (unknown ids, an unknown version, options that contradict each other);
    everything else is a problem of the plan."""
    if start.draft_len is not None and start.head is None:
        raise UsageError("--draft-len is not used without a draft head", "pass --head, or leave it out")
    if start.draft_sampling is not None and start.head is None:
        raise UsageError("--draft-sampling is not used without a head", "pass --head, or leave it out")
    target = load_target(start.target)
    head = load_head(start.head, values=launching) if start.head else None
    version, reason, problems = _version(start.vllm_version, launching)
    passed, doubts = parse_options(start.passed, version)
    for item in passed:
        if item.option.name in OWN_OPTIONS:
            own = OWN_OPTIONS[item.option.name]
            raise UsageError(f"{item.flag} is not used after --: {own} decides it", f"pass {own} before --")
        if item.option.name in REFUSED_OPTIONS:
            raise UsageError(f"{item.flag} is not used after --", REFUSED_OPTIONS[item.option.name])
    problems += [*doubts, *_request_problems(start, target, head, version, passed)]
    gpus = read_gpus()
    problems += check_gpus(start.ranks, gpus)
    if launching:
        models = [target.resolved, *([head.resolved] if head else [])]
        problems += check_visible(gpus or [], start.ranks, os.environ)
        problems += check_host(models, start.host, target.spec.remote_code, os.environ)
    problems += PROGRAM.check()
    return ServerPlan(
        program=PROGRAM,
        patterns=PATTERNS,
        argv=vllm_command(start, target, passed),
        env={name: value for name, value in ENVIRONMENT.items() if name not in os.environ},
        config={"speculative_config": start.speculation()} if start.head else {},
        problems=problems if launching else [mentioned(problem) for problem in problems],
        version=(str(version), reason),
        endpoint=ServerAddress(
            start.host, start.port, model_names(start.target, start.served_model_name), api_key=start.api_key
        ),
        limits=limits_of(start),
        secrets={"VLLM_API_KEY": start.api_key} if start.api_key else {},
    )


def vllm_command(start: VllmStart, target: Target, passed: Sequence[PassedOption]) -> list[str]:
    """The command that heads are published with, word for word, then what that leaves out: address, sizes, the parsers
    of a Kimi, and the user's own words."""
    argv = [PROGRAM.executable, "serve", start.target, "--tensor-parallel-size", str(start.ranks)]
    argv += ["--speculative-config", json.dumps(start.speculation())] if start.head else []
    argv += ["--trust-remote-code"] if start.trust_remote_code else []
    argv += ["--host", start.host, "--port", str(start.port)]
    sizes = {
        "--max-model-len": start.max_seq_len,
        "--max-num-seqs": start.max_batch_size,
        "--max-num-batched-tokens": start.max_num_tokens,
        "--dtype": start.dtype if start.dtype != "auto" else None,
        "--served-model-name": start.served_model_name,
    }
    argv += [word for flag, value in sizes.items() if value is not None for word in (flag, str(value))]
    chosen = {item.option.name for item in passed}
    if "tool-call-parser" not in chosen:
        argv += ["--tool-call-parser", "kimi_k2", "--enable-auto-tool-choice"]
    if "reasoning-parser" not in chosen and _thinks(target):
        argv += ["--reasoning-parser", "kimi_k2"]
    return argv + [word for item in passed for word in item.words]


def _thinks(target: Target) -> bool:
    """vLLM has one reasoning parser for every Kimi that thinks. K2-Instruct does not, which its config alone does
    not tell."""
    entry = known(target.resolved.name)
    return bool(entry[1].get("reasoning_parser")) if entry is not None else bool(target.spec.name_prefix)


@dataclass(frozen=True)
class PassedOption:
    """One option after `--`: as it was written, and what vLLM takes it for."""

    option: VllmOption
    flag: str
    values: tuple[str, ...] = ()
    words: tuple[str, ...] = field(default=(), repr=False)


def parse_options(words: Sequence[str], version: Version) -> tuple[list[PassedOption], list[Problem]]:
    """Options after `--`, with dashes or underscores: `--flag value`, `--flag=value`, `--json-flag.key value`, switches
    and lists."""
    passed: list[PassedOption] = []
    problems: list[Problem] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, text = word.partition("=")
        option = _option(flag)
        if option is None or option.state(version) == "no":
            problems.append(_unknown(flag, option, version))
            while rest and not rest[0].startswith("-"):
                rest.pop(0)
            continue
        values = [text] if has_value else []
        if option.kind == "list" and not has_value:
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
        elif option.kind != "switch" and not has_value and rest:
            values = [rest.pop(0)]
        written = (word,) if has_value else (word, *values)
        item = PassedOption(option, flag, tuple(values), written)
        problems += _doubts(item, version)
        if any(option.name == other.option.name and "." not in flag for other in passed):
            message = f"{flag} is given more than once"
            problems.append(Problem("TS-SERVE-OPTION-REPEATED", "error", flag, message, "give it once"))
        passed.append(item)
    return passed, problems


def _option(flag: str) -> VllmOption | None:
    name, _, inner = flag.partition(".")
    plain = name.lstrip("-").replace("_", "-").rstrip("+")
    option = vllm_options().get(plain) if flag.startswith("--") else None
    option = option or next((one for one in vllm_options().values() if name in one.also), None)
    if option is None and flag.startswith("--no-"):
        option = vllm_options().get(plain.removeprefix("no-"))
        return option if option is not None and option.negated else None
    return option if not inner or (option is not None and option.kind == "json") else None


def _unknown(flag: str, option: VllmOption | None, version: Version) -> Problem:
    if option is not None:
        remedy = f"use {option.by} or later" if version < Version(option.by or "0") else "leave it out"
        message = f"vLLM {version} does not have {flag}: {option.interval}"
        return Problem("TS-SERVE-UNKNOWN-OPTION", "error", flag, message, remedy)
    near = difflib.get_close_matches(flag.replace("_", "-").lstrip("-"), list(vllm_options()), n=1)
    remedy = f"did you mean --{near[0]}?" if near else "vllm serve --help=all lists its options"
    return Problem("TS-SERVE-UNKNOWN-OPTION", "error", flag, f"vLLM {version} has no option {flag}", remedy)


def _doubts(item: PassedOption, version: Version) -> Iterator[Problem]:
    option, flag, code = item.option, item.flag, "TS-SERVE-OPTION-VALUE"
    if option.kind == "switch":
        if item.values:
            yield Problem(code, "error", flag, f"{flag} takes no value", f"write {flag} alone")
    elif not item.values:
        yield Problem(code, "error", flag, f"{flag} needs a value", f"write {flag} VALUE")
    elif "." not in flag and (wrong := _wrong_value(option, item.values[0])):
        yield Problem(code, "error", flag, f"{flag} takes {wrong}, not {item.values[0]!r}", "correct the value")
    if option.state(version) == "unknown":
        message = f"not known whether vLLM {version} has {flag}: {option.interval}"
        yield Problem("TS-SERVE-OPTION-UNCERTAIN", "warning", flag, message, "try `vllm serve --help=all`")


def _wrong_value(option: VllmOption, text: str) -> str:
    """What the option takes, where the text is not that; "" where it is. vLLM writes 25.6k and 1K for whole numbers."""
    if option.choices and text.lower() not in (choice.lower() for choice in option.choices):
        return "one of " + ", ".join(option.choices)
    if option.kind == "whole" and not re.fullmatch(r"-?\d+|\d+(\.\d+)?[kmgtKMGT]|auto", text):
        return "a whole number"
    if option.kind not in ("number", "json"):
        return ""
    try:
        float(text) if option.kind == "number" else json.loads(text)
    except ValueError:
        return "a number" if option.kind == "number" else "JSON"
    return ""


def _version(asked: str | None, launching: bool) -> tuple[Version, str, list[Problem]]:
    """The version to judge for, why, and what is doubtful about it."""
    installed = installed_vllm()
    oldest, newest = releases_read()
    try:
        version = Version(asked or installed or newest)
    except InvalidVersion:
        raise UsageError(f"{asked!r} is not a vLLM version", f"write it as the package does: {newest}") from None
    if version < Version(oldest):
        message = f"vLLM {version} is older than {oldest}, the first release whose options are known"
        raise UsageError(message, f"use {oldest} or later: Kimi's Eagle3 heads came with 0.18")
    problems = []
    if launching and asked and installed and Version(installed).public != version.public:
        message = f"vLLM {installed} is installed and would run; --vllm-version says {asked}"
        problems.append(Problem("TS-SERVE-OTHER-ENGINE", "error", "--vllm-version", message, "leave the option out"))
    if launching and shutil.which(PROGRAM.executable) and not asked and not installed:
        message = f"the installed engine does not tell its version; judged for {version}"
        problems.append(Problem("TS-SERVE-VERSION-UNKNOWN", "warning", "vllm", message, "pass --vllm-version"))
    if version > Version(newest):
        message = f"vLLM {version} is newer than {newest}, the last release whose options are known"
        problems.append(
            Problem("TS-SERVE-VERSION-UNKNOWN", "warning", "vllm", message, "compare with its release notes")
        )
    known_as = "the newest release whose options are known"
    return version, "asked for" if asked else "installed here" if installed else known_as, problems


def _request_problems(
    start: VllmStart, target: Target, head: Head | None, version: Version, passed: Sequence[PassedOption]
) -> Iterator[Problem]:
    yield from check_port(start.host, start.port)
    for resolved in (target.resolved, *([head.resolved] if head else [])):
        yield from check_files(resolved, os.environ)
    if target.spec.remote_code and not start.trust_remote_code:
        yield remote_code_problem(target.resolved)
    yield from _target_problems(start, target.spec, version, {item.option.name for item in passed})
    if head is not None:
        yield from _head_problems(start, head, target, version)


def _target_problems(start: VllmStart, target: ModelSpec, version: Version, chosen: set[str]) -> Iterator[Problem]:
    if target.name_prefix:
        yield from _gated("kimi_k25", "target", version, "error")
        yield from _gated("kimi_tool_ids", "target", version, "warning")
    if target.quant.format.value not in _flags()["formats"]:
        message = f"it is not known that vLLM loads {target.quant.format} weights of a Kimi"
        yield Problem("TS-VLLM-FORMAT", "error", "target", message, "quantize it to NVFP4, or serve the original")
    heads, ranks = target.num_attention_heads, start.ranks
    if heads % ranks:
        message = f"the {heads} attention heads do not divide by tensor-parallel size {ranks}"
        fitting = max(size for size in range(1, ranks + 1) if heads % size == 0)
        yield Problem("TS-VLLM-PARALLEL", "error", "tp_size", message, f"use --tp-size {fitting}")
    width, group = target.moe_intermediate_size, target.quant.group_size or 1
    if "enable-expert-parallel" not in chosen and (width % ranks or width // ranks % group):
        message = f"an expert of width {width} does not divide into {ranks} equal parts of whole groups of {group}"
        yield Problem("TS-VLLM-PARALLEL", "error", "tp_size", message, "pass -- --enable-expert-parallel")
    limit = target.max_position_embeddings
    if start.max_seq_len is not None and start.max_seq_len > limit:
        message = f"--max-seq-len {start.max_seq_len} is beyond the model's {limit} positions; vLLM refuses to start"
        yield Problem("TS-VLLM-LENGTH", "error", "--max-seq-len", message, f"use {limit} or less")
    if start.max_num_tokens and start.max_batch_size and start.max_num_tokens < start.max_batch_size:
        message = f"{start.max_batch_size} requests do not fit into steps of {start.max_num_tokens} tokens"
        yield Problem("TS-VLLM-LENGTH", "error", "--max-num-tokens", message, "raise it, or lower --max-batch-size")


def _head_problems(start: VllmStart, head: Head, target: Target, version: Version) -> Iterator[Problem]:
    spec, name = head.spec, head.resolved.name
    if target.spec.name_prefix:
        yield from _gated("kimi_eagle3", name, version, "error")
    if spec.eagle == "3.1":
        yield from _gated("eagle31", name, version, "error")
        if spec.dialect in _flags()["gates"]["eagle31_speculators"]["layouts"]:
            yield from _gated("eagle31_speculators", name, version, "error")
    if start.draft_sampling is not None:
        yield from _gated("draft_sampling", "--draft-sampling", version, "error")
    pair = pair_problems(
        spec, target.spec, head_id=head.resolved.hub_id, target_id=target.resolved.hub_id, tp_size=start.ranks
    )
    yield from (problem for problem in pair if problem.severity != "info")
    yield from _layout_problem(head)


def _layout_problem(head: Head) -> Iterator[Problem]:
    """A head whose file is here is judged by it; one known by its hub id alone by what it was published for."""
    spec, resolved = head.spec, head.resolved
    if DIALECTS[spec.dialect].served_by(ENGINE, spec) or ENGINE.name in (resolved.known or {}).get("published_on", ()):
        return
    option = next(name for name, row in OPTIONS.items() if ENGINE.name in row.read_by)
    message = (
        f"{resolved.name} has {DIALECTS[spec.dialect].title}'s layout: vLLM fails to load it, or reads other layers"
    )
    remedy = f"trtspec convert {resolved.name} -o HEAD-vllm --to {option}, then pass --head HEAD-vllm"
    severity: Severity = "error" if resolved.path is not None else "warning"
    yield Problem("TS-VLLM-HEAD-LAYOUT", severity, resolved.name, message, remedy)


def _gated(name: str, where: str, version: Version, severity: Severity) -> Iterator[Problem]:
    gate = vllm_gate(name)
    state = gate.state(version)
    if state == "no":
        message = f"vLLM {version} is too old for this: {gate.what} ({gate.interval})"
        yield Problem("TS-VLLM-TOO-OLD", severity, where, message, f"use {gate.by} or later")
    elif state == "unknown":
        message = f"not known for vLLM {version}: {gate.what} ({gate.interval})"
        yield Problem("TS-VLLM-TOO-OLD", "warning", where, message, f"use {gate.by} or later")
