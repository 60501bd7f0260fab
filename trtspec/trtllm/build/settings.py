"""Which settings an intent needs beyond the engine's defaults, each with its reason.

Throughput follows what was published for Kimi-K2.5-NVFP4:
- without a head: InferenceX's sweep of 8 B200 a server on 1.3.0rc21 (SemiAnalysisAI/InferenceX 843c6254,
  benchmarks/multi_node/srt-slurm-recipes/trtllm/kimi-k2.5/disagg/trtllm_dynamo/b200-fp4, July 2026);
- with an Eagle3 head: NVIDIA's GB200 recipes (NVIDIA/srt-slurm 0858f390, recipes/kimi2.5/trtllm_dynamo/disagg/
  gb200Nvfp4/ISL8K_OSL1K/MTP, April 2026) and Dynamo's (ai-dynamo/dynamo 1e4f6939, recipes/kimi-k2.5/trtllm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtspec.data_files import gpu_spec
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.intent import Intent
from trtspec.trtllm.lint.model import CAPTURE, expected_layers
from trtspec.trtllm.releases import gate
from trtspec.trtllm.schema import Schema
from trtspec.trtllm.speculation import SPEC, eagle3

REUSE = "kv_cache_config.enable_block_reuse"
FRACTION = "kv_cache_config.free_gpu_memory_fraction"
SPELLING = "the one spelling of Eagle3 that every version takes"
WIDE = 8  # ranks: wider published recipes leave the cache less


@dataclass(frozen=True)
class EngineSetting:
    """One line of the file: the dotted path, the value and why it is not left at its default."""

    path: str
    value: Any
    reason: str


def engine_settings(intent: Intent, schema: Schema, target: ModelSpec, head: HeadSpec | None) -> list[EngineSetting]:
    """In the order in which they are written."""
    found = _speculation(intent, schema, target, head) if head is not None and intent.head else []
    found += [*_experts(intent, schema, target), *_graphs(intent), *_parallel(intent), *_cache(intent, schema)]
    found += [*_transfer(intent, schema), *_streaming(intent)]
    mended = gate("fp8_kv_chunked_prefill").state(schema.version) == "yes" or head is None
    if intent.seq_len > intent.tokens and mended and intent.role != "generation":
        reason = "prompts longer than max_num_tokens are refused without it"
        found.append(EngineSetting("enable_chunked_prefill", True, reason))
    return found


def _speculation(intent: Intent, schema: Schema, target: ModelSpec, head: HeadSpec) -> list[EngineSetting]:
    found = [
        EngineSetting(
            f"{SPEC}.decoding_type", eagle3().spellings[0], "the one spelling of Eagle3 that every version takes"
        ),
        EngineSetting(f"{SPEC}.max_draft_len", intent.draft_len, "tokens drafted per step"),
        EngineSetting(f"{SPEC}.speculative_model_dir", intent.head, "the head; this spelling parses in every version"),
    ]
    layers = expected_layers(target, head)
    if layers and sorted(layers[0]) != sorted(layers[1]) and CAPTURE in schema.fields:
        default = ", ".join(map(str, layers[1]))
        reason = f"the head was trained on these; the engine would take {default}"
        found.append(EngineSetting(CAPTURE, list(layers[0]), reason))
    asked = schema.behaviour("sampled_speculation")
    name = asked.values.get("asked_by") or asked.otherwise.get("asked_by")
    if name is not None and f"{SPEC}.{name}" in schema.fields:
        reason = "else temperature is ignored; no effect where that is mended"
        found.append(EngineSetting(f"{SPEC}.{name}", True, reason))
    return found


def _experts(intent: Intent, schema: Schema, target: ModelSpec) -> list[EngineSetting]:
    """Named, because AUTO takes CUTLASS. CUTEDSL with attention DP was published without a head only."""
    if not target.quant.format.is_fp4:
        return []
    key = "moe_config.backend"
    tried = gate("cutedsl_experts").state(schema.version) == "yes"
    if intent.attention_dp and intent.head is None and tried:
        reason = "with attention DP the kernels of InferenceX's B200 sweep (without speculation); AUTO takes CUTLASS"
        return [EngineSetting(key, "CUTEDSL", reason)]
    reason = "AUTO takes CUTLASS for Kimi-K2, about 3x slower per layer at batch 1 on B200"
    return [EngineSetting(key, "TRTLLM", reason)]


def _graphs(intent: Intent) -> list[EngineSetting]:
    if intent.role == "context":
        return [
            EngineSetting("cuda_graph_config", None, "a prefill server has no step of a fixed size to record"),
            EngineSetting(
                "disable_overlap_scheduler", True, "nothing overlaps with a request that ends at its first token"
            ),
        ]
    return [
        EngineSetting(
            "cuda_graph_config.enable_padding", True, "a batch between two graph sizes still runs as a graph"
        ),
        EngineSetting(
            "cuda_graph_config.max_batch_size", intent.batch, "graphs reach the largest batch, and no further"
        ),
    ]


def _parallel(intent: Intent) -> list[EngineSetting]:
    found = []
    if intent.attention_dp:
        reason = "each rank caches its own requests; tensor parallel copies the latent KV to all"
        found.append(EngineSetting("enable_attention_dp", True, reason))
    if intent.nodes > 1 and intent.gpu and gpu_spec(intent.gpu).nvlink_joins_nodes:
        reason = "the ranks of several trays share one NVLink domain; AUTO may take the network between nodes"
        found.append(EngineSetting("allreduce_strategy", "MNNVL", reason))
    return found


def _cache(intent: Intent, schema: Schema) -> list[EngineSetting]:
    found = []
    blind = schema.behaviour("prefix_reuse_blinds_draft")
    if intent.role == "generation":
        reason = "its caches arrive from the prefill servers, where prefixes are shared"
        found.append(EngineSetting(REUSE, False, reason))
    elif intent.head and not intent.attention_dp and intent.role is None and (blind or blind.otherwise):
        reason = (
            "a reused prefix is hidden from the draft, and acceptance collapses (TensorRT-LLM#17548, #18280); costs "
        )
        reason += "the prefill of repeated prefixes, so turn it on where those outweigh drafts"
        found.append(EngineSetting(REUSE, False, reason))
    fraction = _fraction(intent)
    return [*found, *([EngineSetting(FRACTION, *fraction)] if fraction else [])]


def _fraction(intent: Intent) -> tuple[float, str] | None:
    """Share of the memory left after the weights that the cache gets, and why; None keeps the engine's 0.9."""
    sweep = "as InferenceX's B200 sweep, measured without speculation"
    if intent.role == "context":
        if intent.attention_dp and intent.head is None:
            return 0.9, sweep
        return 0.6, "a prompt's activations need room beside the cache, which a prefill server hands on at once"
    if intent.role == "generation" and intent.tp_size <= WIDE:
        if intent.head is None:
            return (0.92 if intent.attention_dp else 0.9), sweep
        if intent.attention_dp:
            return 0.9, "as NVIDIA's GB200 recipe of Kimi-K2.5 with Eagle3 on 8 ranks"
    if intent.role == "generation" and not intent.attention_dp:
        return 0.85, "of what is free after the weights; arriving caches are staged beside it"
    if intent.attention_dp:
        return 0.75, "of what is free after the weights; attention DP and expert exchange need room"
    return None


def _transfer(intent: Intent, schema: Schema) -> list[EngineSetting]:
    if intent.role not in ("context", "generation"):
        return []
    key = "cache_transceiver_config"
    default = schema.behaviour("kv_transfer_default")
    reason = "hands caches over between the servers; the same on both sides"
    return [
        EngineSetting(f"{key}.backend", default.values["backend"], reason),
        EngineSetting(
            f"{key}.max_tokens_in_buffer", intent.seq_len, "the longest request, so that its cache goes over whole"
        ),
    ]


def _streaming(intent: Intent) -> list[EngineSetting]:
    """Published for generation servers only, at every concurrency from 4 to 2151."""
    if intent.role != "generation" or intent.goal != "throughput":
        return []
    return [
        EngineSetting("stream_interval", 100, "fewer, larger pieces: a stream gets 100 tokens at a time"),
        EngineSetting("num_postprocess_workers", 4, "detokenization keeps up with full batches"),
    ]
