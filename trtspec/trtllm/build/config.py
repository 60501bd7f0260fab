"""Writes the engine YAML of an intent for exactly one version, every line with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from trtspec.errors import CheckFailed, UsageError
from trtspec.report import problem_lines
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.build.settings import Choice, choices
from trtspec.trtllm.document import Document, scalar
from trtspec.trtllm.intent import Intent
from trtspec.trtllm.lint.finding import Deployment, Finding
from trtspec.trtllm.lint.linter import lint
from trtspec.trtllm.schema import schema_for
from trtspec.trtllm.speculation import SPEC

OPTION_ONLY = {
    "tensor_parallel_size": "--tp-size",
    "moe_expert_parallel_size": "--ep-size",
    "max_batch_size": "--max-batch-size",
    "max_num_tokens": "--max-num-tokens",
    "max_seq_len": "--max-seq-len",
    "host": "--host of serve",
    "port": "--port of serve",
    "trust_remote_code": "--trust-remote-code",
    f"{SPEC}.max_draft_len": "--draft-len",
    f"{SPEC}.speculative_model_dir": "--head",
}


@dataclass(frozen=True)
class EngineConfig:
    """A written file and what lint says about it (no errors among them)."""

    intent: Intent
    text: str
    findings: tuple[Finding, ...]

    @property
    def values(self) -> dict[str, Any]:
        return Document.parse(self.text).value


def build(intent: Intent, target: ModelSpec, head: HeadSpec | None) -> EngineConfig:
    """Raises CheckFailed with every problem when what is asked for cannot run on this version."""
    intent.checked()
    if intent.role == "front":
        return EngineConfig(intent, front(intent), ())
    text = compose(intent, target, head)
    findings = tuple(lint(text, judged_as(intent, target, head)))
    errors = [finding.problem("(generated)") for finding in findings if finding.severity == "error"]
    if errors:
        listed = "\n".join(problem_lines(errors))
        raise CheckFailed(f"no configuration for TensorRT-LLM {intent.version} can do this:\n{listed}")
    return EngineConfig(intent, text, findings)


def judged_as(intent: Intent, target: ModelSpec, head: HeadSpec | None) -> Deployment:
    from trtspec.data_files import gpu_spec

    return Deployment(
        schema_for(intent.version), target, intent.target, head, intent.head or "", argv=settings_in_argv(intent),
        gpu=gpu_spec(intent.gpu).compute_capability if intent.gpu else None,
    )  # fmt: skip


def compose(intent: Intent, target: ModelSpec, head: HeadSpec | None) -> str:
    """The text alone, not yet judged; raises UsageError for a `--set` that is no setting."""
    found = {choice.path: choice for choice in choices(intent, schema_for(intent.version), target, head)}
    for item in intent.settings:
        choice = _own(item)
        _replace(found, choice)
    return f"{intent.first_line()}\n{_header(intent)}{_room(intent, target, head, found)}{_emit(found)}"


def _replace(found: dict[str, Choice], choice: Choice) -> None:
    """A user's value takes the place of ours, and of the whole that ours turns off (`cuda_graph_config: null`)."""
    parent = choice.path.rpartition(".")[0]
    if parent in found and found[parent].value is None:
        del found[parent]
    if choice.value is None:
        for path in [path for path in found if path.startswith(f"{choice.path}.")]:
            del found[path]
    found[choice.path] = choice


def front(intent: Intent) -> str:
    """The file of `trtllm-serve disaggregated`, which only sends requests on."""
    contexts = list(intent.context_urls or ("context-host:8001",))
    generations = list(intent.generation_urls or ("generation-host:8002",))
    lines = [
        intent.first_line(),
        f"# The front of a disaggregated {intent.target}: start it with `trtspec serve {intent.target} --disaggregated",
        "# <this file>`, each server with `--config context.yml` or `--config generation.yml`.",
        "hostname: 0.0.0.0",
        "port: 8000",
        "backend: pytorch",
        "context_servers:",
        f"  num_instances: {len(contexts)}",
        f"  urls: {scalar(contexts)}  # each prefills prompts",
        "generation_servers:",
        f"  num_instances: {len(generations)}",
        f"  urls: {scalar(generations)}  # each writes answers",
    ]
    return "\n".join(lines) + "\n"


def settings_in_argv(intent: Intent) -> dict[str, Any]:
    """The settings of the intent that travel as options, by their YAML path."""
    settings: dict[str, Any] = {
        "max_batch_size": intent.batch,
        "max_num_tokens": intent.tokens,
        "max_seq_len": intent.seq_len,
        "tensor_parallel_size": intent.tp_size,
    }
    if intent.ep_size is not None:
        settings["moe_expert_parallel_size"] = intent.ep_size
    if intent.trust_remote_code:
        settings["trust_remote_code"] = True
    return settings


def _own(item: str) -> Choice:
    """A `--set key=value`; raises UsageError for what has an option of its own."""
    path, separator, text = item.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", path):
        raise UsageError(f"--set {item!r} is not key=value", "for example --set kv_cache_config.dtype=fp8")
    if path in OPTION_ONLY:
        raise UsageError(f"{path} has an option of its own, so that it stands in one place", f"use {OPTION_ONLY[path]}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(
            f"the value of --set {item!r} is not YAML", "quote it, for example --set 'key=[1, 2]'"
        ) from None
    return Choice(path, value, "asked for with --set")


def _header(intent: Intent) -> str:
    lines = [
        f"# Serve with `trtspec serve {intent.target} --config <this file>`. Sizes, parallelism, host and port are",
        "# options of trtllm-serve and stand nowhere in this file: which of the two wins changed between versions.",
    ]
    if intent.role is not None:
        lines.append(f"# The {intent.role} server of a disaggregated deployment; the other one needs the same head.")
    if intent.nodes > 1:
        lines.append(f"# One server over {intent.nodes} nodes of {intent.gpus_per_node} GPUs, one rank per GPU.")
    if intent.trust_remote_code:
        lines.append("# This recipe lets the engine run the code that the target brings (--trust_remote_code).")
    return "\n".join(lines) + "\n"


def _room(intent: Intent, target: ModelSpec, head: HeadSpec | None, found: dict[str, Choice]) -> str:
    """What the cache holds, where the GPU is known; raises CheckFailed when it holds no request."""
    if intent.gpu is None:
        return ""
    from trtspec.trtllm.build.capacity import held_requests

    chosen = found.get("kv_cache_config.free_gpu_memory_fraction")
    held = held_requests(intent, target, head, float(chosen.value) if chosen else 0.9)
    batch = intent.batch * (intent.tp_size if intent.attention_dp else 1)
    less = f", fewer than a full batch of {batch:,}: shorter ones fill it" if held < batch else ""
    return f"# The cache holds {held:,} requests of {intent.seq_len:,} tokens (`trtspec plan`){less}.\n"


def _emit(found: dict[str, Choice]) -> str:
    """YAML in the order of the choices, grouped by top-level key, each value with its reason behind it."""
    tree: dict[str, Any] = {}
    for choice in found.values():
        *parents, name = choice.path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
            if isinstance(place, Choice):
                raise UsageError(f"--set gives both {parent} and {choice.path}", "give one of them")
        place[name] = choice
    return "".join(f"{line}\n" for line in _lines(tree, 0))


def _lines(tree: dict[str, Any], depth: int) -> list[str]:
    indent = "  " * depth
    written = []
    for name, item in tree.items():
        if isinstance(item, Choice):
            written.append(f"{indent}{name}: {scalar(item.value)}  # {item.reason}")
        else:
            written += [f"{indent}{name}:", *_lines(item, depth + 1)]
    return written
