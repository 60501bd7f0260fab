"""Writes the engine YAML of an intent for exactly one TensorRT-LLM version, every line with its reason, and the command
for it.

Throughput settings follow what was published for Kimi-K2.5-NVFP4:
- without a head: InferenceX's sweep of 8 B200 a server on 1.3.0rc21 (SemiAnalysisAI/InferenceX 843c6254,
  benchmarks/multi_node/srt-slurm-recipes/trtllm/kimi-k2.5/disagg/trtllm_dynamo/b200-fp4, July 2026);
- with an Eagle3 head: NVIDIA's GB200 recipes (NVIDIA/srt-slurm 0858f390, recipes/kimi2.5/trtllm_dynamo/disagg/
  gb200Nvfp4/ISL8K_OSL1K/MTP, April 2026) and Dynamo's (ai-dynamo/dynamo 1e4f6939, recipes/kimi-k2.5/trtllm).
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
TOLD = (
    "TS-LINT-VERSION-NEWER",
    "TS-PAIR-",
)  # warnings about what was chosen, not about what is written
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
    """A written file, the command that serves it (`argv`: trtllm-serve, ending with the file's path), and what lint
    says about the file: nothing of ours above "info", and what the user's own `--set` values bring."""

    intent: Intent
    text: str
    argv: list[str]
    findings: tuple[Problem, ...]

    @property
    def values(self) -> dict[str, Any]:
        return Document.parse(self.text).value


def build(
    intent: Intent,
    target: ModelSpec,
    head: HeadSpec | None,
    config_path: str = ENGINE_FILE,
    cache: str | None = None,
) -> EngineConfig:
    """The file and its command. `cache` is the hub cache of the machine that serves, if it is not this one.

    Raises CheckFailed with every problem when what is asked for cannot run, or is not known to run, on this GPU, in
    this layout or on this version; UsageError for sizes that contradict each other.
    """
    if intent.role == "front":
        return EngineConfig(
            intent, front(intent), ["trtllm-serve", "disaggregated", "-c", config_path], ()
        )
    intent.checked()
    refused = refusals(
        target, gpu=gpu_spec(intent.gpu) if intent.gpu else None, tp_size=intent.tp_size, ep_size=intent.ep_size,
        attention_dp=intent.attention_dp, tokens=intent.seq_len, draft_len=intent.draft_len if head else 0,
    )  # fmt: skip
    if refused:
        raise CheckFailed(
            f"{intent.target} cannot be served like this:\n" + "\n".join(problem_lines(refused))
        )
    text = engine_yaml(intent, target, head, cache)
    findings = _judged(intent, target, head, text, cache)
    argv = build_command(intent, target, Document.parse(text), config_path, cache=cache)
    return EngineConfig(intent, text, argv, findings)


def build_named(
    intent: Intent, config_path: str = ENGINE_FILE, cache: str | None = None
) -> EngineConfig:
    """As `build`, of the names in the intent, looked up as the commands do."""
    head = load_head(intent.head).spec if intent.head else None
    target = find_target(intent.target, intent.like).spec
    return build(intent, target, head, config_path, cache)


def disaggregated(intent: Intent) -> dict[str, Intent]:
    """The three files of a disaggregated deployment by name: both kinds of server, and the front."""
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


def _judged(
    intent: Intent, target: ModelSpec, head: HeadSpec | None, text: str, cache: str | None
) -> tuple[Problem, ...]:
    """What lint says of the file. Raises CheckFailed for an error, for a key that no source shows, and for a warning
    about what we wrote ourselves (nobody knows whether this release runs it). Other warnings that the user's settings
    bring, and TOLD, are reported."""
    deployment = judged_as(intent, target, head)
    findings = tuple(lint(Document.parse(text, "(generated)"), deployment))
    plain = lint(_settings(replace(intent, settings=()), target, head, cache), deployment)
    ours = {(finding.code, finding.key) for finding in plain if not finding.code.startswith(TOLD)}
    refused = [
        finding
        for finding in findings
        if finding.severity == "error"
        or finding.code == "TS-LINT-KEY-UNCERTAIN"
        or (finding.severity == "warning" and (finding.code, finding.key) in ours)
    ]
    if refused:
        listed = "\n".join(problem_lines(refused))
        raise CheckFailed(
            f"no configuration for TensorRT-LLM {intent.version} is known to do this:\n{listed}"
        )
    return findings


def judged_as(intent: Intent, target: ModelSpec, head: HeadSpec | None) -> Deployment:
    return Deployment(
        schema_for(intent.version), target, intent.published_as, head, intent.head or "",
        argv=intent.settings_in_argv(), gpu=gpu_spec(intent.gpu).compute_capability if intent.gpu else None,
    )  # fmt: skip


def engine_yaml(
    intent: Intent, target: ModelSpec, head: HeadSpec | None, cache: str | None = None
) -> str:
    """The text of the engine file, not judged yet. Raises what `_settings` and `_capacity` raise."""
    settings = _settings(intent, target, head, cache)
    capacity = _capacity(intent, target, judged_as(intent, target, head), settings)
    return f"{intent.first_line()}\n{_header(intent)}{capacity}{settings}"


def _settings(intent: Intent, target: ModelSpec, head: HeadSpec | None, cache: str | None) -> str:
    """The file below its comments. Raises UsageError for a `--set` that is not key=value."""
    schema = schema_for(intent.version)
    named = [
        replace(item, path=schema.current(item.path))
        for item in engine_settings(intent, schema, target, head, cache)
    ]
    found = {item.path: item for item in named}
    for item in intent.settings:
        _override(found, _asked_setting(item))
    return _render(found)


def _override(found: dict[str, EngineSetting], own: EngineSetting) -> None:
    """Puts a user's value in place of ours, also where ours turns the whole object off (`cuda_graph_config: null`)."""
    parent = own.path.rpartition(".")[0]
    if parent in found and found[parent].value is None:
        del found[parent]
    if own.value is None:
        for path in [path for path in found if path.startswith(f"{own.path}.")]:
            del found[path]
    found[own.path] = own


def front(intent: Intent) -> str:
    """The file of `trtllm-serve disaggregated`, which only sends requests on."""
    contexts = list(intent.context_urls or ("context-host:8001",))
    generations = list(intent.generation_urls or ("generation-host:8002",))
    return f"""{intent.first_line()}
# The front of a disaggregated {intent.target}: start it with `trtspec serve {intent.target} --disaggregated
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
    """The setting of one `--set key=value`. Raises UsageError for a key that has an option of its own."""
    path, separator, text = item.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", path):
        raise UsageError(
            f"`set` {item!r} is not key=value", "for example `set` kv_cache_config.dtype=fp8"
        )
    if path in OPTION_ONLY:
        raise UsageError(
            f"{path} has its own option and is not accepted here", f"use {OPTION_ONLY[path]}"
        )
    try:
        value = load_text(text)
    except YamlError:
        raise UsageError(
            f"the value of `set` {item!r} is not YAML", "quote it, for example `set` 'key=[1, 2]'"
        ) from None
    return EngineSetting(path, value, "asked for with `set`")


def _header(intent: Intent) -> str:
    lines = [
        f"# Serve with `trtspec serve {intent.target} --config <this file>`. Sizes, parallelism, host and port are",
        "# options of trtllm-serve and are not set here: which of the two takes precedence changed between versions.",
    ]
    if intent.role is not None:
        same = "needs the same head" if intent.head else "runs without a head, too"
        lines.append(
            f"# The {intent.role} server of a disaggregated deployment; the other one {same}."
        )
    if intent.trust_remote_code:
        lines.append(
            "# This recipe lets the engine run the code that the target brings (--trust_remote_code)."
        )
    return "\n".join(lines) + "\n"


def _capacity(intent: Intent, target: ModelSpec, deployment: Deployment, settings: str) -> str:
    """How many requests the cache holds, by the memory model of `trtspec plan`, where the GPU is known. Raises
    CheckFailed when the cache holds none, or not one block for each request of a batch."""
    if intent.gpu is None:
        return ""
    held, batch = deployment.held_requests(Document.parse(settings), target, gpu_spec(intent.gpu))
    block = deployment.schema.behaviour("transfer_in_blocks")["tokens_per_block"]
    if held * intent.seq_len < batch * block:
        message = f"{batch:,} requests of up to {intent.seq_len:,} tokens do not fit on {intent.tp_size} x "
        message += f"{intent.gpu.upper()}: beside a step of {intent.tokens:,} tokens the KV cache holds {held:,}"
        remedy = "use more GPUs or larger ones, fewer requests, or a smaller `max_seq_len`; see `trtspec plan`"
        raise CheckFailed(message, remedy)
    less = f", fewer than a full batch of {batch:,}: shorter ones fill it" if held < batch else ""
    return f"# The cache holds {held:,} requests of {intent.seq_len:,} tokens (`trtspec plan`){less}.\n"


def _render(found: dict[str, EngineSetting]) -> str:
    """YAML in the order of `found`, grouped by top-level key, each value with its reason behind it."""
    tree: dict[str, Any] = {}
    for setting in found.values():
        *parents, name = setting.path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
            if isinstance(place, EngineSetting):
                raise UsageError(
                    f"`set` gives both {parent} and {setting.path}", "give one of them"
                )
        place[name] = setting
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
    """One line of the file: the dotted path, the value and why it is not left at its default."""

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
    """The rows of settings.yaml that hold, in the order in which they are written."""
    known, computed = _facts(intent, schema, target, head, cache)
    found: dict[str, EngineSetting] = {}
    for row in read_beside("settings.yaml"):
        wanted = {
            name: value if isinstance(value, list) else [value]
            for name, value in row["when"].items()
        }
        if row["path"] not in found and all(
            known[name] in values for name, values in wanted.items()
        ):
            value = computed.get(str(row["value"]).removeprefix("$"), row["value"])
            found[row["path"]] = EngineSetting(row["path"], value, row["reason"].format(**computed))
    return list(found.values())


def _facts(
    intent: Intent, schema: Schema, target: ModelSpec, head: HeadSpec | None, cache: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the rows of settings.yaml ask, and the values that they name with $."""
    own = [item.value for item in map(_asked_setting, intent.settings) if item.path == BLOCK]
    asked = [value for value in own if isinstance(value, int)]
    block = max(
        asked[-1] if asked else schema.behaviour("transfer_in_blocks")["tokens_per_block"], 1
    )
    buffer, default = -(-intent.seq_len // block) * block, target.default_aux_layers
    layers = (head.aux_layers if head is not None else None) or default
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
        "batch": intent.batch, "block": block, "buffer": buffer, "attention_dp_fraction": ATTENTION_DP_KV_FRACTION,
        "transfer_backend": schema.behaviour("kv_transfer_default")["backend"], "spelling": eagle3().spellings[0],
        "draft_len": intent.draft_len, "head": engine_path(intent.head or "", cache), "layers": list(layers),
        "default_layers": ", ".join(map(str, default)),
    }  # fmt: skip
    return known, computed
