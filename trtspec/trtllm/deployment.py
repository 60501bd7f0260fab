"""The deployment that an engine file is judged for: the release, the target, the head and the GPU.

Names of checkpoints come from the user or from the file itself, and nothing is downloaded for them.
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
    KeySupport,
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
DEFAULT_TOKENS = 8192  # max_num_tokens, the engine's default and its value for null
# words in files, flags and paths, each with the role in a disaggregated deployment that it names
ROLES: dict[str, Role] = {
    **dict.fromkeys(("prefill", "context", "ctx"), "context"),
    **dict.fromkeys(("decode", "generation", "gen"), "generation"),
}


def installed_version() -> str | None:
    """Version of the tensorrt_llm package in this environment, read without importing the package.

    None if the package is not installed.
    """
    from importlib import metadata

    try:
        return metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:
        return None


def choose_version(asked: str | None, written: Intent | None = None) -> tuple[str, str]:
    """Chooses the version to write or judge for.

    Returns the version, and the reason for it in words.

    The user's version comes first. Next come the version in the file's first line, the installed
    version, and the default release.

    Args:
        asked: version that the user asked for, None if the user gave none.
        written: intent on the file's first line.
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
    """Notes on a release that nobody chose: what was not read of it, and its known issues.

    Returns one problem, or [] if the release was chosen or there is no file.

    Args:
        reason: reason for the release, as `choose_version` returns it.
        document: engine file.
    """
    if reason != ASSUMED or document is None:
        return []
    release = default_release()
    parents = dict.fromkeys(owner.partition(":")[0] for owner in schema_for(release).unread)
    # a class matters only if the file has its mapping
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
    """The deployment that an engine file is judged for.

    Args:
        schema: keys, behaviours and rules of the release.
        target: shapes and formats of the target model. None if the target is not known.
        target_name: name of the target as the user or a file gives it, "" if unknown.
        head: shapes of the Eagle3 head. None without a known head.
        argv: settings passed as options of the command, by YAML path.
        options: values of trtllm-serve's options by name. None if the command line is not known.
        gpu: compute capability such as "10.0". None if the GPU is not known.
        gpu_name: name of the GPU in lower case, such as "b200" or "sm100". "" if unknown.
        environ: variables that the server will see, by name.
        here: whether the engine runs on this machine, not elsewhere in a pod.
        role: role in a disaggregated deployment. None if no carrier and no first line names it.
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
        """Returns the deployment on a GPU, with a server's variables. `role` None: its own role.

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
        """Release that the file is judged for, as text."""
        return str(self.schema.version)

    def setting(self, document: Document, path: str, default: Any = None) -> Any:
        """Value of a key that the engine will see: the option's value, else the file's."""
        return self.argv.get(path, document.get(path, default))

    def role_of(self, document: Document) -> Role | None:
        """Role of the server in a disaggregated deployment. None if it is not known.

        The command or the carrier names the role. Otherwise it is "generation" if the file has a
        transceiver and a step holds too few tokens for prompts: at most two full decode batches.
        """
        option = str((self.options or {}).get("server_role") or "").lower()
        known = ROLES.get(option, self.role)
        chunked = self.setting(document, "enable_chunked_prefill")
        # chunked prefill splits prompts over steps, so that a step's size tells nothing
        if known or chunked or not document.get("cache_transceiver_config.backend"):
            return known
        batch = self.size(document, "max_batch_size", 2048)  # the engine's default
        tokens_per_step = batch * step_tokens(document)
        if self.size(document, "max_num_tokens", DEFAULT_TOKENS) <= 2 * tokens_per_step:
            return "generation"
        return None

    def memory(self, document: Document, target: ModelSpec, gpu: GpuSpec) -> Memory:
        """Memory of one GPU by the model of `trtspec plan`, with a transceiver's buffers."""
        attention_dp = self.setting(document, "enable_attention_dp") is True
        whole_experts = self.size(document, "moe_expert_parallel_size", 1) > 1
        fraction = self.setting(document, "kv_cache_config.free_gpu_memory_fraction")
        if not isinstance(fraction, float):  # absent, or a value that the engine refuses
            fraction = KV_FRACTION
        layout = Layout(self.size(document, "tensor_parallel_size", 1), whole_experts, attention_dp)
        return memory(
            target, self.head, gpu, layout,
            fraction=fraction,
            max_num_tokens=self.size(document, "max_num_tokens", DEFAULT_TOKENS),
            transfer_tokens=self.size(document, "cache_transceiver_config.max_tokens_in_buffer"),
        )  # fmt: skip

    def held_requests(self, document: Document, target: ModelSpec, gpu: GpuSpec) -> tuple[int, int]:
        """Returns two numbers of requests: how many the KV cache holds, and a full batch has.

        Requests have the full length `max_seq_len`. Both numbers count all ranks that have a cache
        of their own.
        """
        estimate = self.memory(document, target, gpu)
        batch = self.size(document, "max_batch_size") * estimate.layout.caches
        return estimate.sequences(self.size(document, "max_seq_len")), batch

    def size(self, document: Document, path: str, default: int = 0) -> int:
        """Value of the setting at `path` if it is a whole number above 0, else `default`."""
        value = self.setting(document, path)
        return value if isinstance(value, int) and value > 0 else default


def deployment_of(
    document: Document, *, version: str | None = None, target: str | None = None,
    head: str | None = None, named: tuple[str, str] = ("", ""), passed: list[str] | None = None,
    here: bool = False,
) -> tuple[Deployment, str, list[Problem]]:  # fmt: skip
    """Returns the deployment, the reason for its version, and problems of options and names.

    A target or head that only the file or its carrier names is used if it can be found.

    Args:
        named: names of the target and the head in the carrier, "" for no name.
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
        elif name != in_file:  # a rule reports the name in the file at its key
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
    """Reads the words after `--` as options of trtllm-serve.

    Returns their values by name, and problems.

    Takes `--flag value`, `--flag=value` and flags without a value. An option that only one source
    around the release refuses, or that no source shows, is a warning.
    """
    options: dict[str, Any] = {}
    problems: list[Problem] = []
    unread = list(words)
    while unread:
        word = unread.pop(0)
        flag, has_value, text = word.partition("=")
        support = schema.option(flag)
        if not support.takes:
            problems.append(_unknown_option(schema, flag, support))
        if not support.taken:
            # words up to the next option are values of this unknown one
            while unread and not unread[0].startswith("-"):
                unread.pop(0)
            continue
        option = support.taken[0]
        value: Any = not flag.startswith("--no-")
        if option.path in options and not option.multiple:
            message = f"{flag} is given more than once"
            problems.append(Problem("TS-SERVE-OPTION-REPEATED", "error", flag, message))
        if option.is_flag and has_value:
            message = f"{flag} takes no value; trtllm-serve stops at {word}"
            problems.append(Problem(VALUE, "error", flag, message, f"write {flag} alone"))
        elif not option.is_flag and not has_value and not unread:
            message = f"{flag} needs a value"
            problems.append(Problem(VALUE, "error", flag, message, f"write {flag} VALUE"))
        elif not option.is_flag:
            value = text if has_value else unread.pop(0)
            value, value_problems = _option_value(schema, flag, support, value)
            problems += value_problems
        options[option.path] = value
    return options, problems


def _unknown_option(schema: Schema, flag: str, support: KeySupport) -> Problem:
    """Problem of an option that a source around the release refuses, or that no source shows."""
    flags: list[str] = []
    for option in schema.options.values():
        flags += option.flags
    message = f"trtllm-serve {schema.version} has no option {flag}"
    remedy = did_you_mean(flag, flags, "")
    problem = Problem("TS-SERVE-UNKNOWN-OPTION", "error", flag, message, remedy)
    if support.is_certain and not support.taken:
        return problem
    return _uncertain(schema, support, problem)


def _option_value(
    schema: Schema, flag: str, support: KeySupport, text: str
) -> tuple[Any, list[Problem]]:
    """Returns the value of an option, converted to its type if possible, and its problems."""
    problems: list[Problem] = []
    value: Any = text
    value_type = support.taken[0].type
    convert = {"int": int, "float": float}.get(value_type, str)
    try:
        value = convert(text)
    except ValueError:
        message = f"{flag} takes {value_type}, not {text!r}"
        problems.append(Problem(VALUE, "error", flag, message, f"write {flag} and a number"))
    refusing = [
        option for option in support.taken if option.choices and value not in option.choices
    ]
    if refusing:
        choices = ", ".join(refusing[-1].choices)
        message = f"{flag} takes one of {choices}, not {value!r}"
        problem = Problem(VALUE, "error", flag, message, "choose one of them")
        if not support.is_certain or len(refusing) < len(support.taken):
            problem = _uncertain(schema, support, problem)
        problems.append(problem)
    return value, problems


def _uncertain(schema: Schema, support: KeySupport, problem: Problem) -> Problem:
    """Returns the problem as a warning, because the sources around the release do not decide it."""
    message = f"not known for TensorRT-LLM {schema.version}: {problem.message}"
    return replace(
        problem, code="TS-SERVE-OPTION-UNCERTAIN", severity="warning",
        message=f"{message} ({support.releases})", remedy="try `trtllm-serve --help`",
    )  # fmt: skip


# a name that the author of a file left for its user to fill in, or no name of a checkpoint at all
PLACEHOLDER = re.compile(
    r"(?i)[<>{}$\s]|\.\.\.|path/to/|://|\\|\.safetensors$|^(~|TODO|FIXME|CHANGEME|YOUR)"
)


def name_problem(name: str, here: bool = False) -> Problem | None:
    """Judges the name of a checkpoint in a file. None if the checkpoint can be found.

    `here`: whether the engine runs on this machine, so that a missing directory is an error.
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
    """Compute capability of a GPU, as "10.0" for b200 and for sm100.

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
    """Maps each option of Dynamo's worker to the equivalent option of trtllm-serve."""
    options: dict[str, str] = read_beside("dynamo.yaml")["options"]
    return options


def dynamo_releases() -> dict[str, str]:
    """Engine version in the image of each Dynamo release, by Dynamo's release, newest first."""
    engines: dict[str, str] = {}
    for engine, listed in read_beside("releases.yaml")["dynamo"]["releases"].items():
        engines |= dict.fromkeys(listed.split(), engine)
    return engines


@dataclass(frozen=True)
class SpeculationMethod:
    """A method of speculation, as speculation.yaml describes it.

    Args:
        key: name in speculation.yaml.
        spellings: values of `decoding_type`. build-config writes the first.
        name: name in messages.
        draft: what drafts: a head on the target's hidden states, another model, layers of the
            target's checkpoint, or nothing.
        tokens_per_step: tokens of one request in one step: "1", "2k" or "k + 1" for k drafts.
        kimi: `runs` (yes, no or unknown with a Kimi target), and the reason `why`.
        draft_required: whether the engine refuses a file without a draft.
        length_required: whether the engine refuses a file without a draft length.
        capture: key below `speculative_config` with the captured layers. None without such a key.
        capture_from_draft: whether the engine reads the captured layers from the draft's config.
        pytorch: whether the PyTorch backend has the method.
        own_cache: whether the draft has a KV cache.
        one_model: whether one engine has draft and target, and samples for both.
    """

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
        """Whether the draft was trained on layers of the target that the engine file must name."""
        return self.draft == "head" and self.capture is not None and not self.capture_from_draft

    def step_tokens(self, length: int) -> int:
        """Number of tokens of one request in one decode step with draft length `length`."""
        if self.tokens_per_step == "1":
            return 1
        if self.tokens_per_step == "2k":
            return 2 * length
        return length + 1


@functools.cache
def methods() -> dict[str, SpeculationMethod]:
    """Methods of speculation by their name in speculation.yaml."""
    rows = read_beside("speculation.yaml")["methods"]
    return {key: SpeculationMethod(key, **row) for key, row in rows.items()}


def eagle3() -> SpeculationMethod:
    """Method of speculation for the heads that this project trains and converts."""
    return methods()["eagle3"]


def decoding_type(document: Document) -> str | None:
    """Text of the file's `decoding_type`. None if the key is absent or not text."""
    value = document.get(f"{SPEC}.decoding_type")
    return value if isinstance(value, str) else None


def method_of(document: Document) -> SpeculationMethod | None:
    """Method of speculation in a file.

    None if the file has none, or a method that is not known here.
    """
    written = decoding_type(document)
    return next((method for method in methods().values() if written in method.spellings), None)


def draft_length(document: Document) -> int:
    """Number of draft tokens per decode step in the file, 0 without speculation."""
    value = document.get(LENGTH)
    is_integer = isinstance(value, int) and not isinstance(value, bool)  # true is an int too
    return value if is_integer and decoding_type(document) else 0


def step_tokens(document: Document) -> int:
    """Number of tokens of one request in one decode step, drafts included."""
    length = draft_length(document)
    method = method_of(document)
    if method is not None and length:
        return method.step_tokens(length)
    return length + 1


def head_in(document: Document) -> str | None:
    """Name of the draft checkpoint in a file, None if the file names none."""
    drafts = [str(document.get(key)) for key in MODEL_KEYS if document.get(key)]
    return next(iter(drafts), None)
