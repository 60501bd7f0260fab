"""Writes the engine YAML of an intent for exactly one version, every line with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from trtspec.errors import CheckFailed, UsageError
from trtspec.report import problem_lines
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.document import Document, scalar
from trtspec.trtllm.finding import Finding, Subject
from trtspec.trtllm.gates import gate
from trtspec.trtllm.intent import Intent
from trtspec.trtllm.lint import lint
from trtspec.trtllm.lint_model import CAPTURE, expected_layers
from trtspec.trtllm.lint_speculation import SPEC
from trtspec.trtllm.schema import Schema, schema_for

OPTION_ONLY = {
    "tensor_parallel_size": "--tp-size",
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
class Choice:
    """One line of the file: the dotted path, the value and why it is not left at its default."""

    path: str
    value: Any
    reason: str


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
    text = compose(intent, target, head)
    subject = Subject(
        schema_for(intent.version), target, intent.target, head, intent.head or "", argv=settings_in_argv(intent)
    )
    findings = tuple(lint(text, subject))
    errors = [finding.problem("(generated)") for finding in findings if finding.severity == "error"]
    if errors:
        listed = "\n".join(problem_lines(errors))
        raise CheckFailed(f"no configuration for TensorRT-LLM {intent.version} can do this:\n{listed}")
    return EngineConfig(intent, text, findings)


def compose(intent: Intent, target: ModelSpec, head: HeadSpec | None) -> str:
    """The text alone, not yet judged; raises UsageError for a `--set` that is no setting."""
    choices = {choice.path: choice for choice in _choices(intent, schema_for(intent.version), target, head)}
    for item in intent.settings:
        choice = _own(item)
        choices[choice.path] = choice
    return f"{intent.first_line()}\n{_header(intent)}{_emit(choices)}"


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


def _choices(intent: Intent, schema: Schema, target: ModelSpec, head: HeadSpec | None) -> list[Choice]:
    choices = _speculation(intent, schema, target, head) if head is not None and intent.head else []
    if target.quant.format == "nvfp4":
        reason = "AUTO takes CUTLASS for Kimi-K2, about 3x slower per layer at batch 1 on B200"
        choices.append(Choice("moe_config.backend", "TRTLLM", reason))
    choices.append(
        Choice("cuda_graph_config.enable_padding", True, "a batch between two graph sizes still runs as a graph")
    )
    choices.append(
        Choice("cuda_graph_config.max_batch_size", intent.batch, "graphs reach the largest batch, and no further")
    )
    if intent.attention_dp:
        reason = "each rank caches its own requests; tensor parallel copies the latent KV to all"
        choices.append(Choice("enable_attention_dp", True, reason))
        reason = "of what is free after the weights; attention DP and expert exchange need room"
        choices.append(Choice("kv_cache_config.free_gpu_memory_fraction", 0.75, reason))
    mended = gate("fp8_kv_chunked_prefill").state(schema.version) == "yes" or head is None
    if intent.seq_len > intent.tokens and mended:
        reason = "prompts longer than max_num_tokens are refused without it"
        choices.append(Choice("enable_chunked_prefill", True, reason))
    return choices


def _speculation(intent: Intent, schema: Schema, target: ModelSpec, head: HeadSpec | None) -> list[Choice]:
    choices = [
        Choice(f"{SPEC}.decoding_type", "Eagle", "the one spelling of Eagle3 that every version takes"),
        Choice(f"{SPEC}.max_draft_len", intent.draft_len, "tokens drafted per step"),
        Choice(f"{SPEC}.speculative_model_dir", intent.head, "the head; this spelling parses in every version"),
    ]
    layers = expected_layers(target, head) if head is not None else None
    if layers and sorted(layers[0]) != sorted(layers[1]) and CAPTURE in schema.fields:
        default = ", ".join(map(str, layers[1]))
        reason = f"the head was trained on these; the engine would take {default}"
        choices.append(Choice(CAPTURE, list(layers[0]), reason))
    key = f"{SPEC}.allow_advanced_sampling"
    needed = gate("sampled_speculation")
    if key in schema.fields and needed.state(schema.version) != "yes":
        reason = "else temperature is ignored; no effect where that is mended"
        choices.append(Choice(key, True, reason))
    return choices


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
    if intent.trust_remote_code:
        lines.append("# This recipe lets the engine run the code that the target brings (--trust_remote_code).")
    return "\n".join(lines) + "\n"


def _emit(choices: dict[str, Choice]) -> str:
    """YAML in the order of the choices, grouped by top-level key, each value with its reason behind it."""
    tree: dict[str, Any] = {}
    for choice in choices.values():
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
