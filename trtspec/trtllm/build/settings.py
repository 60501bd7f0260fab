"""Which settings an intent needs beyond the engine's defaults, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.intent import Intent
from trtspec.trtllm.lint.model import CAPTURE, expected_layers
from trtspec.trtllm.releases import gate
from trtspec.trtllm.schema import Schema
from trtspec.trtllm.speculation import SPEC, eagle3

NVLINK_DOMAIN = ("gb200", "gb300")


@dataclass(frozen=True)
class Choice:
    """One line of the file: the dotted path, the value and why it is not left at its default."""

    path: str
    value: Any
    reason: str


def choices(intent: Intent, schema: Schema, target: ModelSpec, head: HeadSpec | None) -> list[Choice]:
    """In the order in which they are written."""
    found = _speculation(intent, schema, target, head) if head is not None and intent.head else []
    found += [
        *_experts(target),
        *_graphs(intent),
        *_parallel(intent),
        *_cache(intent),
        *_prefixes(intent, schema, head),
    ]
    found += _transfer(intent, schema)
    mended = gate("fp8_kv_chunked_prefill").state(schema.version) == "yes" or head is None
    if intent.seq_len > intent.tokens and mended and intent.role != "generation":
        reason = "prompts longer than max_num_tokens are refused without it"
        found.append(Choice("enable_chunked_prefill", True, reason))
    return found


def _speculation(intent: Intent, schema: Schema, target: ModelSpec, head: HeadSpec) -> list[Choice]:
    found = [
        Choice(f"{SPEC}.decoding_type", eagle3().spellings[0], "the one spelling of Eagle3 that every version takes"),
        Choice(f"{SPEC}.max_draft_len", intent.draft_len, "tokens drafted per step"),
        Choice(f"{SPEC}.speculative_model_dir", intent.head, "the head; this spelling parses in every version"),
    ]
    layers = expected_layers(target, head)
    if layers and sorted(layers[0]) != sorted(layers[1]) and CAPTURE in schema.fields:
        default = ", ".join(map(str, layers[1]))
        reason = f"the head was trained on these; the engine would take {default}"
        found.append(Choice(CAPTURE, list(layers[0]), reason))
    asked = schema.behaviour("sampled_speculation")
    name = asked.values.get("asked_by") or asked.otherwise.get("asked_by")
    if name is not None and f"{SPEC}.{name}" in schema.fields:
        reason = "else temperature is ignored; no effect where that is mended"
        found.append(Choice(f"{SPEC}.{name}", True, reason))
    return found


def _experts(target: ModelSpec) -> list[Choice]:
    if not target.quant.format.is_fp4:
        return []
    reason = "AUTO takes CUTLASS for Kimi-K2, about 3x slower per layer at batch 1 on B200"
    return [Choice("moe_config.backend", "TRTLLM", reason)]


def _graphs(intent: Intent) -> list[Choice]:
    if intent.role == "context":
        return [
            Choice("cuda_graph_config", None, "a prefill server has no step of a fixed size to record"),
            Choice("disable_overlap_scheduler", True, "nothing overlaps with a request that ends at its first token"),
        ]
    return [
        Choice("cuda_graph_config.enable_padding", True, "a batch between two graph sizes still runs as a graph"),
        Choice("cuda_graph_config.max_batch_size", intent.batch, "graphs reach the largest batch, and no further"),
    ]


def _parallel(intent: Intent) -> list[Choice]:
    found = []
    if intent.attention_dp:
        reason = "each rank caches its own requests; tensor parallel copies the latent KV to all"
        found.append(Choice("enable_attention_dp", True, reason))
    if intent.nodes > 1 and intent.gpu in NVLINK_DOMAIN:
        reason = "the ranks of several trays share one NVLink domain; AUTO may take the network between nodes"
        found.append(Choice("allreduce_strategy", "MNNVL", reason))
    return found


def _cache(intent: Intent) -> list[Choice]:
    key = "kv_cache_config.free_gpu_memory_fraction"
    if intent.role == "context":
        reason = "a prompt's activations need room beside the cache, which a prefill server hands on at once"
        return [Choice(key, 0.6, reason)]
    found = []
    if intent.role == "generation":
        reason = "its caches arrive from the prefill servers, where prefixes are shared"
        found.append(Choice("kv_cache_config.enable_block_reuse", False, reason))
    if intent.attention_dp:
        reason = "of what is free after the weights; attention DP and expert exchange need room"
        found.append(Choice(key, 0.75, reason))
    elif intent.role == "generation":
        found.append(Choice(key, 0.85, "of what is free after the weights; arriving caches are staged beside it"))
    return found


def _prefixes(intent: Intent, schema: Schema, head: HeadSpec | None) -> list[Choice]:
    """With attention DP, and between servers, the draft's cache is part of the target's."""
    blind = schema.behaviour("prefix_reuse_blinds_draft")
    if head is None or not intent.head or intent.attention_dp or intent.role or not (blind or blind.otherwise):
        return []
    reason = "a reused prefix is hidden from the draft; turn it on where repeated prompts outweigh drafts"
    return [Choice("kv_cache_config.enable_block_reuse", False, reason)]


def _transfer(intent: Intent, schema: Schema) -> list[Choice]:
    if intent.role not in ("context", "generation"):
        return []
    key = "cache_transceiver_config"
    default = schema.behaviour("kv_transfer_default")
    reason = "hands caches over between the servers; the same on both sides"
    return [
        Choice(f"{key}.backend", default.values["backend"], reason),
        Choice(f"{key}.max_tokens_in_buffer", intent.seq_len, "the longest request, so that its cache goes over whole"),
    ]
