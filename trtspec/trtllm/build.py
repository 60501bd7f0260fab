"""Writes the engine YAML of an intent for exactly one TensorRT-LLM version, and its command.

Every line of the file has its reason.

Throughput settings follow published ones for Kimi-K2.5-NVFP4.
- Without a head: InferenceX's sweep of 8 B200 a server on 1.3.0rc21, July 2026
  (SemiAnalysisAI/InferenceX 843c6254, in benchmarks/multi_node/srt-slurm-recipes/trtllm:
  kimi-k2.5/disagg/trtllm_dynamo/b200-fp4).
- With an Eagle3 head: NVIDIA's GB200 recipes, April 2026 (NVIDIA/srt-slurm 0858f390, in
  recipes/kimi2.5/trtllm_dynamo/disagg: gb200Nvfp4/ISL8K_OSL1K/MTP), and Dynamo's
  (ai-dynamo/dynamo 1e4f6939, recipes/kimi-k2.5/trtllm).
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
# warnings about the user's choices, not about the written file
TOLD = ("TS-LINT-VERSION-NEWER", "TS-PAIR-")
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
    """A written file, the command that serves it, and lint's findings.

    Args:
        argv: words of trtllm-serve. The last one is the file's path.
        findings: findings of the user's `--set` values, and at most "info" about our own settings.
    """

    intent: Intent
    text: str
    argv: list[str]
    findings: tuple[Problem, ...]

    @property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = Document.parse(self.text).value
        return values


def build(
    intent: Intent, target: ModelSpec, head: HeadSpec | None,
    config_path: str = ENGINE_FILE, cache: str | None = None,
) -> EngineConfig:  # fmt: skip
    """The file and its command. `cache`: hub cache of the machine that serves, if not this one.

    Raises CheckFailed with every problem if this GPU, layout or version cannot run it, or is not
    known to run it. Raises UsageError for sizes that contradict each other.
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
    """Builds as `build` does, from the names in the intent, looked up as the commands do."""
    head = load_head(intent.head).spec if intent.head else None
    target = find_target(intent.target, intent.like).spec
    return build(intent, target, head, config_path, cache)


def disaggregated(intent: Intent) -> dict[str, Intent]:
    """The three files of a disaggregated deployment by name: both servers and the front."""
    server = replace(intent, context_urls=(), generation_urls=())
    urls: dict[str, Any] = {
        "context_urls": intent.context_urls,
        "generation_urls": intent.generation_urls,
    }
    return {
        FILES["context"]: replace(server, role="context", max_batch_size=None),
        FILES["generation"]: replace(server, role="generation"),
        FILES["front"]: Intent(target=intent.target, version=intent.version, role="front", **urls),
    }


def _checked_findings(
    intent: Intent, target: ModelSpec, head: HeadSpec | None, text: str, cache: str | None
) -> tuple[Problem, ...]:
    """Lint's findings about the file.

    Raises CheckFailed for an error, for a key that no source shows, and for a warning about our own
    settings, because nobody knows whether this release runs them. Other warnings about the user's
    settings, and TOLD, are returned.
    """
    deployment = judged_as(intent, target, head)
    findings = tuple(lint(Document.parse(text, "(generated)"), deployment))
    without_user = _settings(replace(intent, settings=()), target, head, cache)
    ours = set()
    for finding in lint(without_user, deployment):
        if not finding.code.startswith(TOLD):
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
    """The deployment that the file of an intent is judged for."""
    schema = schema_for(intent.version)
    argv = intent.settings_in_argv()
    gpu = gpu_spec(intent.gpu).compute_capability if intent.gpu else None
    return Deployment(
        schema, target, intent.published_as, head, intent.head or "", argv=argv, gpu=gpu
    )


def engine_yaml(
    intent: Intent, target: ModelSpec, head: HeadSpec | None, cache: str | None = None
) -> str:
    """The text of the engine file, not judged yet. Raises as `_settings` and `_capacity` do."""
    settings = _settings(intent, target, head, cache)
    capacity = _capacity(intent, target, judged_as(intent, target, head), settings)
    return f"{intent.first_line()}\n{_header(intent)}{capacity}{settings}"


def _settings(intent: Intent, target: ModelSpec, head: HeadSpec | None, cache: str | None) -> str:
    """The file below its comments. Raises UsageError for a `--set` that is not key=value."""
    schema = schema_for(intent.version)
    settings: dict[str, EngineSetting] = {}
    for setting in engine_settings(intent, schema, target, head, cache):
        path = schema.current(setting.path)
        settings[path] = replace(setting, path=path)
    for item in intent.settings:
        _override(settings, _asked_setting(item))
    return _render(settings)


def _override(settings: dict[str, EngineSetting], asked: EngineSetting) -> None:
    """Puts a user's setting in place of ours.

    Ours may have turned the whole object off (`cuda_graph_config: null`).
    """
    parent = asked.path.rpartition(".")[0]
    if parent in settings and settings[parent].value is None:
        del settings[parent]
    if asked.value is None:
        below = f"{asked.path}."
        for path in [path for path in settings if path.startswith(below)]:
            del settings[path]
    settings[asked.path] = asked


def front(intent: Intent) -> str:
    """The file of `trtllm-serve disaggregated`, which only forwards requests."""
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


def _asked_setting(item: str) -> EngineSetting:
    """The setting of one `--set key=value`.

    Raises UsageError for a key that has an option of its own, and for text that is not key=value.
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
    """Comments on the use of the file."""
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
    """A comment on the requests that the cache holds, "" if the GPU is not known.

    The figure is by the memory model of `trtspec plan`. Raises CheckFailed if the cache holds no
    request, or less than one block for each request of a batch.
    """
    if intent.gpu is None:
        return ""
    held, batch = deployment.held_requests(Document.parse(settings), target, gpu_spec(intent.gpu))
    block = deployment.schema.behaviour("transfer_in_blocks")["tokens_per_block"]
    length = intent.seq_len
    if held * length < batch * block:
        message = f"{batch:,} requests of up to {length:,} tokens do not fit on "
        message += f"{intent.tp_size} x {intent.gpu.upper()}: beside a step of "
        message += f"{intent.tokens:,} tokens the KV cache holds {held:,}"
        remedy = "use more GPUs or larger ones, fewer requests, or a smaller `max_seq_len`; "
        remedy += "see `trtspec plan`"
        raise CheckFailed(message, remedy)
    line = f"# The cache holds {held:,} requests of {length:,} tokens (`trtspec plan`)"
    if held < batch:
        line += f", fewer than a full batch of {batch:,}: shorter ones fill it"
    return f"{line}.\n"


def _render(settings: dict[str, EngineSetting]) -> str:
    """YAML in the order of `settings`, grouped by top-level key. A reason follows each value."""
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
    indent = "  " * depth
    written = []
    for name, item in tree.items():
        if isinstance(item, EngineSetting):
            written.append(f"{indent}{name}: {scalar(item.value)}  # {item.reason}")
        else:
            written += [f"{indent}{name}:", *_lines(item, depth + 1)]
    return written


BLOCK = "kv_cache_config.tokens_per_block"
WIDE = 8  # ranks


@dataclass(frozen=True)
class EngineSetting:
    """One line of the file. `path`: dotted. `reason`: why the value is not left at its default."""

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
    """The rows of settings.yaml that apply, in their order."""
    known, computed = _facts(intent, schema, target, head, cache)
    settings: dict[str, EngineSetting] = {}
    for row in read_beside("settings.yaml"):
        path = row["path"]
        if path not in settings and _applies(row["when"], known):
            value = computed.get(str(row["value"]).removeprefix("$"), row["value"])
            settings[path] = EngineSetting(path, value, row["reason"].format(**computed))
    return list(settings.values())


def _applies(conditions: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether each fact has the wanted value, or one of a list of values."""
    for name, wanted in conditions.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        if known[name] not in values:
            return False
    return True


def _facts(
    intent: Intent, schema: Schema, target: ModelSpec, head: HeadSpec | None, cache: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(facts that the rows of settings.yaml ask, values that they name with $)."""
    block = schema.behaviour("transfer_in_blocks")["tokens_per_block"]
    for setting in map(_asked_setting, intent.settings):
        if setting.path == BLOCK and isinstance(setting.value, int):
            block = setting.value
    block = max(block, 1)
    buffer = -(-intent.seq_len // block) * block
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
