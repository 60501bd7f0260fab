"""The deployment that a file is judged for: the version, the target, the head and the GPU.

Their names come from the user or from the file itself. Nothing is downloaded for it.
speculation.yaml lists the methods of speculation, their needs, and how a file names them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
# words of files, flags and paths, and the half of a disaggregated deployment that each means
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
    """(the version to write or judge for, the reason).

    The version is the one asked for, else in the file's first line, else installed, else the
    default.
    """
    if asked:
        return asked, "asked for"
    if written is not None:
        return written.version, "the file's first line"
    installed = installed_version()
    if installed:
        return installed, "installed here"
    return default_release(), ASSUMED


def assumed_release(reason: str | None, document: Document | None) -> list[Problem]:
    """Notes on a release that nobody asked for: its unread classes in the file and known issues.

    Returns one problem, or [] if somebody asked for the release or there is no file.
    """
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
    """The deployment that a file is judged against.

    Args:
        argv: settings passed as options, by YAML path.
        options: options of trtllm-serve by name. None if the command line is not known.
        gpu: compute capability such as "10.0".
        gpu_name: name of a GPU with known memory, else "".
        environ: variables that the server will see.
        here: the engine runs on this machine, not elsewhere in a pod.
        role: half of a disaggregated deployment, if a carrier or the file's first line has it.
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

    def served_on(
        self, gpu: str | None, environ: Mapping[str, object], role: Role | None
    ) -> Deployment:
        """The deployment on a GPU, with a server's variables. `role` None: its own role.

        Raises UsageError for an unknown GPU.
        """
        return replace(
            self,
            gpu=compute_capability(gpu) if gpu else None,
            gpu_name=(gpu or "").lower(),
            environ=environ,
            role=role or self.role,
        )

    @property
    def version(self) -> str:
        return str(self.schema.version)

    def setting(self, document: Document, path: str, default: Any = None) -> Any:
        """The value that the engine will see: from the option if there is one, else the file."""
        return self.argv.get(path, document.get(path, default))

    def role_of(self, document: Document) -> Role | None:
        """The known role. Else "generation" if there is a transceiver and steps hold few tokens.

        Steps of at most two full decode batches cannot be meant for prompts.
        """
        option = str((self.options or {}).get("server_role") or "").lower()
        known = ROLES.get(option, self.role)
        chunked = self.setting(document, "enable_chunked_prefill")
        if known or chunked or not document.get("cache_transceiver_config.backend"):
            return known
        batch = self.size(document, "max_batch_size", 2048)
        step = batch * step_tokens(document)
        if self.size(document, "max_num_tokens", 8192) <= 2 * step:
            return "generation"
        return None

    def memory(self, document: Document, target: ModelSpec, gpu: GpuSpec) -> Memory:
        """Memory by the model of `trtspec plan`, with the buffers that hand caches over."""
        spread = self.setting(document, "enable_attention_dp") is True
        whole_experts = self.size(document, "moe_expert_parallel_size", 1) > 1
        fraction = self.setting(document, "kv_cache_config.free_gpu_memory_fraction")
        if not isinstance(fraction, float):
            fraction = KV_FRACTION
        layout = Layout(self.size(document, "tensor_parallel_size", 1), whole_experts, spread)
        return memory(
            target, self.head, gpu, layout,
            fraction=fraction,
            max_num_tokens=self.size(document, "max_num_tokens", 8192),
            transfer_tokens=self.size(document, "cache_transceiver_config.max_tokens_in_buffer"),
        )  # fmt: skip

    def held_requests(self, document: Document, target: ModelSpec, gpu: GpuSpec) -> tuple[int, int]:
        """(requests of full length that the cache holds, requests of a full batch).

        The batch is over every rank that has a cache of its own.
        """
        estimate = self.memory(document, target, gpu)
        batch = self.size(document, "max_batch_size") * estimate.layout.caches
        return estimate.sequences(self.size(document, "max_seq_len")), batch

    def size(self, document: Document, path: str, default: int = 0) -> int:
        """The setting if it is a whole number above 0, else `default`."""
        value = self.setting(document, path)
        return value if isinstance(value, int) and value > 0 else default


def deployment_of(
    document: Document, *, version: str | None = None, target: str | None = None,
    head: str | None = None, named: tuple[str, str] = ("", ""), passed: list[str] | None = None,
    here: bool = False,
) -> tuple[Deployment, str, list[Problem]]:  # fmt: skip
    """(the deployment, the reason for its version, problems of `passed` and of names).

    A target or head that only the file or its carrier names is used if it can be found.

    Args:
        named: (target, head) by the carrier.
        passed: options of trtllm-serve. None if they are not known.
    """
    intent = parse_intent(document.text)
    written_target = ""
    sizes: dict[str, Any] = {}
    role: Role | None = None
    if intent is not None:
        written_target = intent.target
        sizes = intent.settings_in_argv()
        role = intent.role
        if intent.like is not None and not Path(intent.target).is_dir():
            written_target = intent.like  # until its directory is there
    chosen, reason = choose_version(version, intent)
    schema = schema_for(chosen)
    options, problems = parse_passed(schema, passed or [])
    names = {"target": target, "head": head}
    in_file = head_in(document)
    carrier_target, carrier_head = named
    further_names = (
        ("target", carrier_target or written_target), ("head", carrier_head), ("head", in_file),
    )  # fmt: skip
    for part, name in further_names:
        if names[part] or not name:
            continue
        problem = name_problem(name, here)
        if problem is None:
            names[part] = name
        elif name != in_file:  # which a rule reports at its key
            problems.append(problem)
    argv = {key: value for key, value in sizes.items() if not document.has(key)}
    target_name = names["target"] or ""
    head_name = names["head"] or ""
    deployment = Deployment(
        schema,
        find_target(target_name).spec if target_name else None, target_name,
        load_head(head_name).spec if head_name else None, head_name,
        argv=argv | schema.set_by(options), options=options if passed is not None else None,
        here=here, role=role,
    )  # fmt: skip
    return deployment, reason, problems


VALUE = "TS-SERVE-OPTION-VALUE"


def parse_passed(schema: Schema, words: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """(values of the options after `--` by name, problems), by the sources of the release.

    Takes `--flag value`, `--flag=value` and flags without a value. An option that only one source
    refuses, or that no source has read, is a warning.
    """
    options: dict[str, Any] = {}
    problems: list[Problem] = []
    unread = list(words)
    flags: list[str] = []
    for option in schema.options.values():
        flags += option.flags

    def refuse(code: str, message: str, remedy: str = "", sure: bool = True) -> None:
        severity: Severity = "error"
        if not sure:
            code = "TS-SERVE-OPTION-UNCERTAIN"
            severity = "warning"
            message = f"not known for TensorRT-LLM {schema.version}: {message} ({known.releases})"
            remedy = "try `trtllm-serve --help`"
        problems.append(Problem(code, severity, flag, message, remedy))

    while unread:
        word = unread.pop(0)
        flag, has_value, text = word.partition("=")
        known = schema.option(flag)
        if not known.takes:
            message = f"trtllm-serve {schema.version} has no option {flag}"
            sure = known.settled and not known.taken
            refuse("TS-SERVE-UNKNOWN-OPTION", message, did_you_mean(flag, flags, ""), sure)
        if not known.taken:
            while unread and not unread[0].startswith("-"):
                unread.pop(0)
            continue
        option = known.taken[0]
        value: Any = not flag.startswith("--no-")
        if option.path in options and not option.multiple:
            refuse("TS-SERVE-OPTION-REPEATED", f"{flag} is given more than once")
        if option.is_flag and has_value:
            message = f"{flag} takes no value; trtllm-serve stops at {word}"
            refuse(VALUE, message, f"write {flag} alone")
        elif not option.is_flag and not has_value and not unread:
            refuse(VALUE, f"{flag} needs a value", f"write {flag} VALUE")
        elif not option.is_flag:
            value = text if has_value else unread.pop(0)
            convert = {"int": int, "float": float}.get(option.type, str)
            try:
                value = convert(value)
            except ValueError:
                message = f"{flag} takes {option.type}, not {value!r}"
                refuse(VALUE, message, f"write {flag} and a number")
            lacking = [each for each in known.taken if each.choices and value not in each.choices]
            if lacking:
                sure = known.settled and len(lacking) == len(known.taken)
                choices = ", ".join(lacking[-1].choices)
                message = f"{flag} takes one of {choices}, not {value!r}"
                refuse(VALUE, message, "choose one of them", sure)
        options[option.path] = value
    return options, problems


PLACEHOLDER = re.compile(
    r"(?i)[<>{}$\s]|\.\.\.|path/to/|://|\\|\.safetensors$|^(~|TODO|FIXME|CHANGEME|YOUR)"
)


def name_problem(name: str, here: bool = False) -> Problem | None:
    """The problem of a checkpoint's name in a file. None if the checkpoint can be found.

    `here`: the engine runs on this machine, so a missing directory is an error.
    """
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
    elif similar := similar_id(name):
        code = "TS-NAME-UNKNOWN"
        message = f"{name} is not a published checkpoint that is known here"
        remedy = f"did you mean {similar}?"
    else:
        code = "TS-NAME-ABSENT"
        if not here or parse_hub_id(name) is not None:
            severity = "info"
        message = f"{name} is not here, so nothing that depends on it was checked"
        remedy = "check the name; pass the checkpoint to have it judged"
    return Problem(code, severity, name, message, remedy)


def compute_capability(gpu: str) -> str:
    """The compute capability of a GPU: "10.0" for b200 and for sm100.

    Raises UsageError if the GPU is not known.
    """
    name = gpu.lower()
    architecture = re.fullmatch(r"sm_?(\d+)(\d)[af]?", name)
    if architecture:
        return f"{architecture[1]}.{architecture[2]}"
    if name not in gpu_names():
        listed = ", ".join(gpu_names())
        remedy = f"choose one of {listed}, or a capability such as sm120"
        raise UsageError(f"the GPU {gpu!r} is not known", remedy)
    return gpu_spec(name).compute_capability


def dynamo_options() -> dict[str, str]:
    """The option of trtllm-serve with the same meaning, by option of Dynamo's worker."""
    options: dict[str, str] = read_beside("dynamo.yaml")["options"]
    return options


def dynamo_releases() -> dict[str, str]:
    """The engine version in the image of each release of Dynamo, newest release first."""
    engines: dict[str, str] = {}
    for engine, listed in read_beside("releases.yaml")["dynamo"]["releases"].items():
        engines |= dict.fromkeys(listed.split(), engine)
    return engines


@dataclass(frozen=True)
class SpeculationMethod:
    """One row of speculation.yaml, which explains each column. Keys: below `speculative_config`."""

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
        if self.tokens_per_step == "1":
            return 1
        if self.tokens_per_step == "2k":
            return 2 * length
        return length + 1


@functools.cache
def methods() -> dict[str, SpeculationMethod]:
    rows = read_beside("speculation.yaml")["methods"]
    return {key: SpeculationMethod(key, **row) for key, row in rows.items()}


def eagle3() -> SpeculationMethod:
    """The row of the heads that this project makes."""
    return methods()["eagle3"]


def decoding_type(document: Document) -> str | None:
    value = document.get(f"{SPEC}.decoding_type")
    return value if isinstance(value, str) else None


def method_of(document: Document) -> SpeculationMethod | None:
    """The file's method of speculation. None if it has none, or one without a row."""
    written = decoding_type(document)
    return next((method for method in methods().values() if written in method.spellings), None)


def draft_length(document: Document) -> int:
    """Draft tokens per step in the file, 0 without speculation."""
    value = document.get(LENGTH)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and decoding_type(document) else 0


def step_tokens(document: Document) -> int:
    """Tokens of one request in one decode step."""
    length = draft_length(document)
    method = method_of(document)
    if method is not None and length:
        return method.step_tokens(length)
    return length + 1


def head_in(document: Document) -> str | None:
    """The draft that a file names, None if it names none."""
    drafts = [str(document.get(key)) for key in MODEL_KEYS if document.get(key)]
    return next(iter(drafts), None)
