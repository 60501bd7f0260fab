"""Writes the engine YAML of an intent for exactly one TensorRT-LLM release, and its command.

Every line of the file has its reason.

Throughput settings follow published ones for Kimi-K2.5-NVFP4.
- Without a head: InferenceX's sweep of 8 B200 a server on 1.3.0rc21, July 2026
  (SemiAnalysisAI/InferenceX 843c6254, in benchmarks/multi_node/srt-slurm-recipes/trtllm:
  kimi-k2.5/disagg/trtllm_dynamo/b200-fp4).
- With an Eagle3 head: NVIDIA's GB200 recipes, April 2026 (NVIDIA/srt-slurm 0858f390, in
  recipes/kimi2.5/trtllm_dynamo/disagg: gb200Nvfp4/ISL8K_OSL1K/MTP), and Dynamo's (ai-dynamo/dynamo
  1e4f6939, recipes/kimi-k2.5/trtllm).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from trtspec.checkpoint.hub import engine_path, find_target, load_head
from trtspec.errors import CheckFailed, Problem, UsageError
from trtspec.planning.layout import ATTENTION_DP_KV_FRACTION, refusals
from trtspec.report import problem_lines
from trtspec.specs import HeadSpec, ModelSpec, gpu_spec
from trtspec.trtllm.deployment import SPEC, Deployment, eagle3
from trtspec.trtllm.document import Document, scalar
from trtspec.trtllm.intent import ENGINE_FILE, Intent, Role
from trtspec.trtllm.lint import lint
from trtspec.trtllm.nodes import YamlError, load_text
from trtspec.trtllm.rules.speculation import reuse_blinds_draft
from trtspec.trtllm.schema import Schema, read_beside, schema_for
from trtspec.trtllm.serve.command import build_command

FILES: dict[Role, str] = {
    "context": "context.yml",
    "generation": "generation.yml",
    "front": "front.yml",
}
# beginnings of the codes of warnings about the user's choices, not about the written file
USER_WARNINGS = ("TS-LINT-VERSION-NEWER", "TS-PAIR-")
# keys that `set` refuses, each with the option to use in its place
OPTION_ONLY = {
    "tensor_parallel_size": "`tp_size`",
    "moe_expert_parallel_size": "`ep_size`",
    "max_batch_size": "`max_batch_size`",
    "max_num_tokens": "`max_num_tokens`",
    "max_seq_len": "`max_seq_len`",
    "host": "`host` of serve",
    "port": "`port` of serve",
    "trust_remote_code": "`trust_remote_code`",
    f"{SPEC}.max_draft_len": "`draft_len`",
    f"{SPEC}.speculative_model_dir": "`head`",
}


@dataclass(frozen=True)
class EngineConfig:
    """A written engine file, the command that serves it, and lint's findings.

    Args:
        intent: intent that the file was written for.
        text: text of the file.
        argv: words of the command that serves the file. The last word is the file's path.
        findings: findings about the user's choices, and notes on settings of our own.
    """

    intent: Intent
    text: str
    argv: list[str]
    findings: tuple[Problem, ...]

    @property
    def values(self) -> dict[str, Any]:
        """Values of the file, by top-level key."""
        values: dict[str, Any] = Document.parse(self.text).value
        return values


def build(
    intent: Intent, target: ModelSpec, head: HeadSpec | None,
    config_path: str = ENGINE_FILE, cache: str | None = None,
) -> EngineConfig:  # fmt: skip
    """Returns the text of the engine file for an intent, and the command that serves it.

    Raises CheckFailed with every problem if this GPU, layout or release cannot run the file, or is
    not known to run it. Raises UsageError for sizes that contradict each other.

    Args:
        config_path: path of the file for the command.
        cache: hub cache of the machine that serves. None for this machine's cache.
    """
    if intent.role == "front":
        argv = ["trtllm-serve", "disaggregated", "-c", config_path]
        return EngineConfig(intent, front(intent), argv, ())
    intent.checked()
    gpu = gpu_spec(intent.gpu) if intent.gpu else None
    draft_len = intent.draft_len if head else 0
    refused = refusals(
        target, gpu=gpu, tp_size=intent.tp_size, ep_size=intent.ep_size,
        attention_dp=intent.attention_dp, tokens=intent.seq_len, draft_len=draft_len,
    )  # fmt: skip
    if refused:
        listed = "\n".join(problem_lines(refused))
        raise CheckFailed(f"{intent.target} cannot be served like this:\n{listed}")
    text = engine_yaml(intent, target, head, cache)
    findings = _checked_findings(intent, target, head, text, cache)
    argv = build_command(intent, target, Document.parse(text, config_path), cache=cache)
    return EngineConfig(intent, text, argv, findings)


def build_named(
    intent: Intent, config_path: str = ENGINE_FILE, cache: str | None = None
) -> EngineConfig:
    """Writes the engine file of an intent with the target and head that the intent names.

    Args:
        config_path: path of the file for the command.
        cache: hub cache of the machine that serves. None for this machine's cache.
    """
    head = load_head(intent.head).spec if intent.head else None
    target = find_target(intent.target, intent.like).spec
    return build(intent, target, head, config_path, cache)


def disaggregated(intent: Intent) -> dict[str, Intent]:
    """Intents for the three files of a disaggregated deployment, by the file's name.

    The files are for the context server, the generation server, and the front.
    """
    server = replace(intent, context_urls=(), generation_urls=())
    urls: dict[str, Any] = {
        "context_urls": intent.context_urls,
        "generation_urls": intent.generation_urls,
    }
    return {
        # a prefill server batches whole prompts, so that it has a default batch of its own
        FILES["context"]: replace(server, role="context", max_batch_size=None),
        FILES["generation"]: replace(server, role="generation"),
        FILES["front"]: Intent(target=intent.target, version=intent.version, role="front", **urls),
    }


def _checked_findings(
    intent: Intent, target: ModelSpec, head: HeadSpec | None, text: str, cache: str | None
) -> tuple[Problem, ...]:
    """Returns lint's findings about the file `text`.

    Raises CheckFailed if the file must not be written. The reasons are an error, a key that is not
    known for the release, and a warning about a setting of our own. Without them, every finding is
    returned.
    """
    deployment = judged_as(intent, target, head)
    findings = tuple(lint(Document.parse(text, "(generated)"), deployment))
    without_user = _settings(replace(intent, settings=()), target, head, cache)
    ours = set()  # code and key of the findings that no `set` of the user causes
    for finding in lint(without_user, deployment):
        if not finding.code.startswith(USER_WARNINGS):
            ours.add((finding.code, finding.key))
    refused = []
    for finding in findings:
        is_ours = finding.severity == "warning" and (finding.code, finding.key) in ours
        if is_ours or finding.severity == "error" or finding.code == "TS-LINT-KEY-UNCERTAIN":
            refused.append(finding)
    if refused:
        listed = "\n".join(problem_lines(refused))
        message = f"no configuration for TensorRT-LLM {intent.version} is known to do this:"
        raise CheckFailed(f"{message}\n{listed}")
    return findings


def judged_as(intent: Intent, target: ModelSpec, head: HeadSpec | None) -> Deployment:
    """Deployment that the file of an intent is judged for."""
    schema = schema_for(intent.version)
    argv = intent.settings_in_argv()
    gpu = gpu_spec(intent.gpu).compute_capability if intent.gpu else None
    return Deployment(
        schema, target, intent.published_as, head, intent.head or "", argv=argv, gpu=gpu
    )


def engine_yaml(
    intent: Intent, target: ModelSpec, head: HeadSpec | None, cache: str | None = None
) -> str:
    """Text of the engine file, which is not judged yet.

    Raises UsageError for an invalid `--set`. Raises CheckFailed if the KV cache is too small.
    """
    settings = _settings(intent, target, head, cache)
    capacity = _capacity(intent, target, judged_as(intent, target, head), settings)
    return f"{intent.first_line()}\n{_header(intent)}{capacity}{settings}"


def _settings(intent: Intent, target: ModelSpec, head: HeadSpec | None, cache: str | None) -> str:
    """Settings of the engine file as YAML, without the comments above. `cache`: as in `build`.

    Raises UsageError for an invalid `--set`.
    """
    schema = schema_for(intent.version)
    settings: dict[str, EngineSetting] = {}
    for setting in engine_settings(intent, schema, target, head, cache):
        path = schema.current(setting.path)
        settings[path] = replace(setting, path=path)
    for item in intent.settings:
        _override(settings, _user_setting(item))
    return _render(settings)


def _override(settings: dict[str, EngineSetting], user_setting: EngineSetting) -> None:
    """Puts a user's setting among `settings` (by path), in place of ours."""
    parent = user_setting.path.rpartition(".")[0]
    # ours may turn the whole object off (`cuda_graph_config: null`), which excludes keys inside
    if parent in settings and settings[parent].value is None:
        del settings[parent]
    if user_setting.value is None:  # the user turns the object off, so our keys inside it go
        below = f"{user_setting.path}."
        for path in [path for path in settings if path.startswith(below)]:
            del settings[path]
    settings[user_setting.path] = user_setting


def front(intent: Intent) -> str:
    """Text of the file for `trtllm-serve disaggregated`, the front that only forwards requests."""
    # placeholders that the user replaces if the hosts are not known yet
    contexts = list(intent.context_urls or ("context-host:8001",))
    generations = list(intent.generation_urls or ("generation-host:8002",))
    target = intent.target
    return f"""{intent.first_line()}
# The front of a disaggregated {target}: start it with `trtspec serve {target} --disaggregated
# <this file>`, each server with `--config context.yml` or `--config generation.yml`.
hostname: 0.0.0.0
port: 8000
backend: pytorch
context_servers:
  num_instances: {len(contexts)}
  urls: {scalar(contexts)}  # each prefills prompts
generation_servers:
  num_instances: {len(generations)}
  urls: {scalar(generations)}  # each writes answers
"""


def _user_setting(item: str) -> EngineSetting:
    """Setting of one `--set key=value`.

    Raises UsageError if the key has an option of its own, or the text is not key=value.
    """
    path, separator, text = item.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", path):
        message = f"`set` {item!r} is not key=value"
        raise UsageError(message, "for example `set` kv_cache_config.dtype=fp8")
    if path in OPTION_ONLY:
        message = f"{path} has its own option and is not accepted here"
        raise UsageError(message, f"use {OPTION_ONLY[path]}")
    try:
        value = load_text(text)
    except YamlError:
        message = f"the value of `set` {item!r} is not YAML"
        remedy = "quote it, for example `set` 'key=[1, 2]'"
        raise UsageError(message, remedy) from None
    return EngineSetting(path, value, "asked for with `set`")


def _header(intent: Intent) -> str:
    """Comments above the settings that say how the file is used."""
    lines = [
        f"# Serve with `trtspec serve {intent.target} --config <this file>`. "
        "Sizes, parallelism, host and port are",
        "# options of trtllm-serve and are not set here: "
        "which of the two takes precedence changed between versions.",
    ]
    if intent.role is not None:
        other = "needs the same head" if intent.head else "runs without a head, too"
        line = f"# The {intent.role} server of a disaggregated deployment; the other one {other}."
        lines.append(line)
    if intent.trust_remote_code:
        line = "# This recipe lets the engine run the code that the target brings "
        line += "(--trust_remote_code)."
        lines.append(line)
    return "\n".join(lines) + "\n"


def _capacity(intent: Intent, target: ModelSpec, deployment: Deployment, settings: str) -> str:
    """Comment on the number of requests that the KV cache holds, "" if the GPU is not known.

    The number is by the memory model of `trtspec plan`. Raises CheckFailed if the cache holds no
    request, or less than one block for each request of a batch. `settings`: text of the settings.
    """
    if intent.gpu is None:
        return ""
    document = Document.parse(settings)
    held, batch = deployment.held_requests(document, target, gpu_spec(intent.gpu))
    block = deployment.schema.behaviour("transfer_in_blocks")["tokens_per_block"]
    length = intent.seq_len
    if held * length < batch * block:
        message = (
            f"{batch:,} requests of up to {length:,} tokens do not fit on "
            f"{intent.tp_size} x {intent.gpu.upper()}: beside a step of "
            f"{intent.tokens:,} tokens the KV cache holds {held:,}"
        )
        remedy = (
            "use more GPUs or larger ones, fewer requests, or a smaller `max_seq_len`; "
            "see `trtspec plan`"
        )
        raise CheckFailed(message, remedy)
    line = f"# The cache holds {held:,} requests of {length:,} tokens (`trtspec plan`)"
    if held < batch:
        line += f", fewer than a full batch of {batch:,}: shorter ones fill it"
    return f"{line}.\n"


def _render(settings: dict[str, EngineSetting]) -> str:
    """YAML of settings by path, in their order and grouped by top-level key.

    Each value is followed by its reason as a comment. Raises UsageError if a setting is below
    another setting's value.
    """
    tree: dict[str, Any] = {}
    for setting in settings.values():
        *parents, name = setting.path.split(".")
        mapping = tree
        for parent in parents:
            mapping = mapping.setdefault(parent, {})
            if isinstance(mapping, EngineSetting):
                message = f"`set` gives both {parent} and {setting.path}"
                raise UsageError(message, "give one of them")
        mapping[name] = setting
    return "".join(f"{line}\n" for line in _lines(tree, 0))


def _lines(tree: dict[str, Any], depth: int) -> list[str]:
    """Lines of YAML for a tree of settings, indented by `depth` levels.

    `tree`: by key, a setting or the tree of a mapping.
    """
    indent = "  " * depth
    written = []
    for name, item in tree.items():
        if isinstance(item, EngineSetting):
            written.append(f"{indent}{name}: {scalar(item.value)}  # {item.reason}")
        else:
            written += [f"{indent}{name}:", *_lines(item, depth + 1)]
    return written


BLOCK = "kv_cache_config.tokens_per_block"
WIDE = 8  # ranks; a server with more is `wide` in settings.yaml


@dataclass(frozen=True)
class EngineSetting:
    """One setting of the engine file.

    Args:
        path: dotted path of the key.
        reason: reason why the value differs from the engine's default.
    """

    path: str
    value: Any
    reason: str


def engine_settings(
    intent: Intent,
    schema: Schema,
    target: ModelSpec,
    head: HeadSpec | None,
    cache: str | None = None,
) -> list[EngineSetting]:
    """Settings of settings.yaml that apply to an intent, in the order of settings.yaml.

    The first entry of a path that applies counts. `cache`: as in `build`.
    """
    known, computed = _facts(intent, schema, target, head, cache)
    settings: dict[str, EngineSetting] = {}
    for row in read_beside("settings.yaml"):
        path = row["path"]
        if path not in settings and _applies(row["when"], known):
            # `$name` means a computed value
            value = computed.get(str(row["value"]).removeprefix("$"), row["value"])
            settings[path] = EngineSetting(path, value, row["reason"].format(**computed))
    return list(settings.values())


def _applies(conditions: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether each fact in `conditions` has the wanted value, or one of a list of values."""
    for name, wanted in conditions.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        if known[name] not in values:
            return False
    return True


def _facts(
    intent: Intent, schema: Schema, target: ModelSpec, head: HeadSpec | None, cache: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns facts for the conditions of settings.yaml, and computed values for its `$` names."""
    block = schema.behaviour("transfer_in_blocks")["tokens_per_block"]
    for setting in map(_user_setting, intent.settings):
        if setting.path == BLOCK and isinstance(setting.value, int):
            block = setting.value
    block = max(block, 1)  # lint reports a size of 0 or less
    buffer = -(-intent.seq_len // block) * block  # tokens, rounded up to whole blocks
    default = target.default_aux_layers
    layers = default
    if head is not None and head.aux_layers:
        layers = head.aux_layers
    known = {
        "role": intent.role or "whole",
        "goal": intent.goal,
        "attention_dp": intent.attention_dp,
        "head": intent.head is not None,
        "other_layers": intent.head is not None and sorted(layers) != sorted(default),
        "greedy": schema.sampling_key is not None,
        "wide": intent.tp_size > WIDE,
        "trays": intent.nvlink_joins_nodes,
        "fp4": target.quant.format.is_fp4,
        "cutedsl": all(schema.behaviours["cutedsl_experts"]),
        "blind": bool(reuse_blinds_draft(schema)),
        "rounded": buffer > intent.seq_len,
        "long": intent.seq_len > intent.tokens,
    }
    computed = {
        "batch": intent.batch,
        "block": block,
        "buffer": buffer,
        "attention_dp_fraction": ATTENTION_DP_KV_FRACTION,
        "transfer_backend": schema.behaviour("kv_transfer_default")["backend"],
        "spelling": eagle3().spellings[0],
        "draft_len": intent.draft_len,
        "head": engine_path(intent.head or "", cache),
        "layers": list(layers),
        "default_layers": ", ".join(map(str, default)),
    }
    return known, computed
