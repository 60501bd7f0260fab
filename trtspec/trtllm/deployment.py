"""What a file is judged for. A `Deployment` is the version, the target, the head and the GPU, from the names that a
user typed or that the file itself gives (nothing is downloaded for it).

speculation.yaml lists the ways to speculate, what each needs, and what a file says about its own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtspec.checkpoint.hub import find_target, findable, load_head
from trtspec.checkpoint.published import similar_id
from trtspec.data_files import gpu_names
from trtspec.errors import Problem, Severity, TrtspecError, UsageError, did_you_mean
from trtspec.foreign import parse_hub_id
from trtspec.planning.layout import KV_FRACTION, Layout
from trtspec.planning.memory import Memory, memory
from trtspec.specs import GpuSpec, HeadSpec, ModelSpec, gpu_spec
from trtspec.trtllm.document import Document, Edit
from trtspec.trtllm.intent import Intent, Role, parse_intent
from trtspec.trtllm.schema import (
    Option,
    Schema,
    default_release,
    known_issues,
    read_beside,
    schema_for,
)

Fix = Callable[[Document], Edit]
SPEC = "speculative_config"
ASSUMED = "assumed: the newest release on the package index"
MODEL_KEYS = (f"{SPEC}.speculative_model_dir", f"{SPEC}.speculative_model")
LENGTH = f"{SPEC}.max_draft_len"
# words of files, flags and paths -> the half of a disaggregated deployment that they mean
ROLES: dict[str, Role] = {
    **dict.fromkeys(("prefill", "context", "ctx"), "context"),
    **dict.fromkeys(("decode", "generation", "gen"), "generation"),
}


def installed_version() -> str | None:
    """Version of the tensorrt_llm package of this environment, without importing it."""
    from importlib import metadata

    try:
        return metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:
        return None


def choose_version(asked: str | None, written: Intent | None = None) -> tuple[str, str]:
    """The version to write or judge for, and why: asked for, of the file's first line, installed, or the default."""
    if asked:
        return asked, "asked for"
    if written is not None:
        return written.version, "the file's first line"
    installed = installed_version()
    if installed:
        return installed, "installed here"
    return default_release(), ASSUMED


def assumed_release(reason: str | None, document: Document | None) -> list[Problem]:
    """What to know of a release that nobody asked for: classes of the file that were not read whole, known issues."""
    if reason != ASSUMED or document is None:
        return []
    release = default_release()
    parents = dict.fromkeys(owner.partition(":")[0] for owner in schema_for(release).unread)
    unread = [name or "the top level" for name in parents if not name or document.has(name)]
    parts = [
        f"TensorRT-LLM {release} is {ASSUMED}",
        f"not read whole at this release: {', '.join(unread)}",
        *(issue.message for issue in known_issues(release)),
    ]
    message = "; ".join(parts)
    return [Problem("TS-LINT-RELEASE-ASSUMED", "info", "trtllm_version", message)]


@dataclass(frozen=True)
class Deployment:
    """What a file is judged against. `argv` holds settings passed as options, by their YAML path; `options` those of
    trtllm-serve by name, where the command line is known (else None). `gpu` is a compute capability such as "10.0", and
    `gpu_name` the GPU's name where its memory is known. `environ`: the variables that the server will see. `here`: the
    engine runs on this machine, not elsewhere in a pod. `role`: the half of a disaggregated deployment, where a
    carrier or the file's first line tells it.
    """

    schema: Schema
    target: ModelSpec | None = None
    target_name: str = ""
    head: HeadSpec | None = None
    head_name: str = ""
    argv: dict[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None
    gpu: str | None = None
    gpu_name: str = ""
    environ: Mapping[str, object] = field(default_factory=dict)
    here: bool = False
    role: Role | None = None

    @property
    def version(self) -> str:
        return str(self.schema.version)

    def setting(self, document: Document, path: str, default: Any = None) -> Any:
        """The value that the engine will see: the option's if there is one, else the file's."""
        return self.argv.get(path, document.get(path, default))

    def role_of(self, document: Document) -> Role | None:
        """The known role; else that of a server with a transceiver whose steps hold decode tokens alone."""
        option = str((self.options or {}).get("server_role") or "").lower()
        known = ROLES.get(option, self.role)
        chunked = self.setting(document, "enable_chunked_prefill")
        if known or chunked or not document.get("cache_transceiver_config.backend"):
            return known
        batch = self.size(document, "max_batch_size", 2048)
        steps = batch * step_tokens(document)
        return "generation" if self.size(document, "max_num_tokens", 8192) <= 2 * steps else None

    def memory(self, document: Document, target: ModelSpec, gpu: GpuSpec) -> Memory:
        """By the memory model of `trtspec plan`, with the buffers that hand caches over."""
        spread = self.setting(document, "enable_attention_dp") is True
        whole_experts = self.size(document, "moe_expert_parallel_size", 1) > 1
        fraction = self.setting(document, "kv_cache_config.free_gpu_memory_fraction")
        layout = Layout(self.size(document, "tensor_parallel_size", 1), whole_experts, spread)
        return memory(
            target, self.head, gpu, layout,
            fraction=fraction if isinstance(fraction, float) else KV_FRACTION,
            max_num_tokens=self.size(document, "max_num_tokens", 8192),
            transfer_tokens=self.size(document, "cache_transceiver_config.max_tokens_in_buffer"),
        )  # fmt: skip

    def held_requests(self, document: Document, target: ModelSpec, gpu: GpuSpec) -> tuple[int, int]:
        """Requests of full length that the cache holds, and those of a full batch of every rank that has its own."""
        room = self.memory(document, target, gpu)
        batch = self.size(document, "max_batch_size") * room.layout.caches
        return room.sequences(self.size(document, "max_seq_len")), batch

    def size(self, document: Document, path: str, default: int = 0) -> int:
        """The same for a whole number above 0; `default` for anything else."""
        value = self.setting(document, path)
        return value if isinstance(value, int) and value > 0 else default


def deployment_of(
    document: Document,
    *,
    version: str | None,
    target: str | None,
    head: str | None,
    named: tuple[str, str] = ("", ""),
    gpu: str | None = None,
    passed: list[str] | None = None,
    environ: Mapping[str, object] | None = None,
    here: bool = False,
    role: Role | None = None,
) -> tuple[Deployment, str, list[Problem]]:
    """The deployment, why this version, and what is wrong with `passed`, the options of trtllm-serve (None: not known).

    A target or head that only the file, or what carries it (`named`), names is used where it can be found; lint says
    where it cannot. Raises UsageError for an unknown GPU.
    """
    written = parse_intent(document.text)
    named_target, sizes = "", {}
    if written is not None:
        named_target, sizes = written.target, written.settings_in_argv()
        role = role or written.role
        if written.like is not None and not Path(written.target).is_dir():
            named_target = written.like  # until its directory is there
    chosen, reason = choose_version(version, written)
    schema = schema_for(chosen)
    options, problems = parse_passed(schema, passed or [])
    names, in_file = {"target": target, "head": head}, head_in(document)
    for part, name in (("target", named[0] or named_target), ("head", named[1]), ("head", in_file)):
        problem = name_problem(name, here) if name and not names[part] else None
        if problem is None:
            names[part] = names[part] or name
        elif name != in_file:  # which a rule reports at its key
            problems.append(problem)
    argv = {key: value for key, value in sizes.items() if not document.has(key)}
    deployment = Deployment(
        schema, find_target(names["target"]).spec if names["target"] else None, names["target"] or "",
        load_head(names["head"]).spec if names["head"] else None, names["head"] or "",
        argv=argv | schema.set_by(options), options=options if passed is not None else None,
        gpu=compute_capability(gpu) if gpu else None,
        gpu_name=(gpu or "").lower(),
        environ=environ or {}, here=here, role=role,
    )  # fmt: skip
    return deployment, reason, problems


VALUE = "TS-SERVE-OPTION-VALUE"


def parse_passed(schema: Schema, words: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Options after `--` by the sources of the release, name and value: `--flag value`, `--flag=value` and flags
    without a value. What only one source refuses, or none has read, is a warning."""
    options: dict[str, Any] = {}
    problems: list[Problem] = []
    rest = list(words)
    flags = [flag for option in schema.options.values() for flag in option.flags]

    def refuse(code: str, message: str, remedy: str = "", sure: bool = True) -> None:
        severity: Severity = "error"
        if not sure:
            code, severity = "TS-SERVE-OPTION-UNCERTAIN", "warning"
            message = f"not known for TensorRT-LLM {schema.version}: {message} ({known.releases})"
            remedy = "try `trtllm-serve --help`"
        problems.append(Problem(code, severity, flag, message, remedy))

    while rest:
        word = rest.pop(0)
        flag, has_value, text = word.partition("=")
        known = schema.option(flag)
        if not known.takes:
            message = f"trtllm-serve {schema.version} has no option {flag}"
            sure = known.settled and not known.taken
            refuse("TS-SERVE-UNKNOWN-OPTION", message, did_you_mean(flag, flags, ""), sure)
        if not known.taken:
            while rest and not rest[0].startswith("-"):
                rest.pop(0)
            continue
        option: Option = known.taken[0]
        value: Any = not flag.startswith("--no-")
        if option.path in options and not option.multiple:
            refuse("TS-SERVE-OPTION-REPEATED", f"{flag} is given more than once")
        if option.is_flag and has_value:
            refuse(
                VALUE, f"{flag} takes no value; trtllm-serve stops at {word}", f"write {flag} alone"
            )
        elif not option.is_flag and not has_value and not rest:
            refuse(VALUE, f"{flag} needs a value", f"write {flag} VALUE")
        elif not option.is_flag:
            value = text if has_value else rest.pop(0)
            try:
                value = {"int": int, "float": float}.get(option.type, str)(value)
            except ValueError:
                message = f"{flag} takes {option.type}, not {value!r}"
                refuse(VALUE, message, f"write {flag} and a number")
            lacking = [each for each in known.taken if each.choices and value not in each.choices]
            if lacking:
                sure = known.settled and len(lacking) == len(known.taken)
                message = f"{flag} takes one of {', '.join(lacking[-1].choices)}, not {value!r}"
                refuse(VALUE, message, "choose one of them", sure)
        options[option.path] = value
    return options, problems


PLACEHOLDER = re.compile(
    r"(?i)[<>{}$\s]|\.\.\.|path/to/|://|\\|\.safetensors$|^(~|TODO|FIXME|CHANGEME|YOUR)"
)


def name_problem(name: str, here: bool = False) -> Problem | None:
    """What is wrong with a checkpoint's name that only a file gives; None for one that can be looked at. `here`: the
    engine runs on this machine, so that a directory which is not here is an error."""
    try:
        if findable(name):
            return None
    except TrtspecError as error:
        return Problem("TS-NAME-UNKNOWN", "error", name, error.message, error.remedy)
    severity: Severity = "error"
    if PLACEHOLDER.search(name):
        code = "TS-NAME-PLACEHOLDER"
        message = f"{name!r} names no checkpoint"
        remedy = "write its id or path"
    elif close := similar_id(name):
        code = "TS-NAME-UNKNOWN"
        message = f"{name} is not a published checkpoint that is known here"
        remedy = f"did you mean {close}?"
    else:
        code = "TS-NAME-ABSENT"
        severity = "error" if here and parse_hub_id(name) is None else "info"
        message = f"{name} is not here, so nothing that depends on it was checked"
        remedy = "check the name; pass the checkpoint to have it judged"
    return Problem(code, severity, name, message, remedy)


def compute_capability(gpu: str) -> str:
    """ "10.0" of b200 or sm100; raises UsageError for a GPU that is not known."""
    name = gpu.lower()
    plain = re.fullmatch(r"sm_?(\d+)(\d)[af]?", name)
    if plain:
        return f"{plain[1]}.{plain[2]}"
    if name not in gpu_names():
        listed = ", ".join(gpu_names())
        raise UsageError(
            f"the GPU {gpu!r} is not known",
            f"choose one of {listed}, or a capability such as sm120",
        )
    return gpu_spec(name).compute_capability


def dynamo_options() -> dict[str, str]:
    """Options of Dynamo's worker, and those of trtllm-serve that mean the same."""
    options: dict[str, str] = read_beside("dynamo.yaml")["options"]
    return options


def dynamo_flags() -> set[str]:
    """Every option that Dynamo's worker is known to have."""
    return {*dynamo_options(), *read_beside("dynamo.yaml")["others"]}


def dynamo_releases() -> dict[str, str]:
    """Releases of Dynamo, newest first, with the engine version that the image of each carries."""
    carried = read_beside("releases.yaml")["dynamo"]["releases"]
    return {release: engine for engine, listed in carried.items() for release in listed.split()}


@dataclass(frozen=True)
class SpeculationMethod:
    """One row. Keys are below `speculative_config`; the meaning of each column is at the top of speculation.yaml."""

    key: str
    spellings: Sequence[str]
    name: str
    draft: Literal["head", "model", "layers", "none"]
    tokens_per_step: str
    kimi: Mapping[str, str]
    source: str
    draft_required: bool = False
    length_required: bool = False
    capture: str | None = None
    capture_from_draft: bool = False
    pytorch: bool = True
    own_cache: bool = False
    one_model: bool = False

    @property
    def reads_target(self) -> bool:
        """Whether the draft was trained on certain layers of the target that the file must name."""
        return self.draft == "head" and self.capture is not None and not self.capture_from_draft

    def step_tokens(self, length: int) -> int:
        """Tokens of one request in one step with this draft length."""
        return (
            1
            if self.tokens_per_step == "1"
            else 2 * length
            if self.tokens_per_step == "2k"
            else length + 1
        )


@functools.cache
def methods() -> dict[str, SpeculationMethod]:
    found: dict[str, SpeculationMethod] = {}
    for key, row in read_beside("speculation.yaml")["methods"].items():
        found[key] = SpeculationMethod(key, **row)
    return found


def eagle3() -> SpeculationMethod:
    """The row of the heads that this project makes."""
    return methods()["eagle3"]


def decoding_type(document: Document) -> str | None:
    value = document.get(f"{SPEC}.decoding_type")
    return value if isinstance(value, str) else None


def method_of(document: Document) -> SpeculationMethod | None:
    """How a file speculates; None where it does not, or in a way that has no row."""
    written = decoding_type(document)
    return next((method for method in methods().values() if written in method.spellings), None)


def draft_length(document: Document) -> int:
    """Draft tokens per step that the file asks for; 0 without speculation."""
    value = document.get(LENGTH)
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and decoding_type(document)
        else 0
    )


def step_tokens(document: Document) -> int:
    """Tokens of one request in one decode step."""
    length, method = draft_length(document), method_of(document)
    return method.step_tokens(length) if method is not None and length else length + 1


def head_in(document: Document) -> str | None:
    """The draft that a file names."""
    return next((str(document.get(key)) for key in MODEL_KEYS if document.get(key)), None)
