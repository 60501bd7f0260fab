"""The traps of TensorRT-LLM with Kimi and Eagle3: what lint says of one file for one release, and for a pair."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtspec.checkpoint.hub import load_head, load_target
from trtspec.errors import UsageError
from trtspec.specs import QuantSpec
from trtspec.trtllm.deployment import Deployment, Finding, compute_capability, deployment_of
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import schema_for

NEW, MID, OLD = "1.4.0rc1", "1.3.0rc20", "1.2.1"
CLEAN = """\
speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: nvidia/Kimi-K2.6-Eagle3}
moe_config: {backend: TRTLLM}
"""
# who names where it is known from
SOURCES = ("TensorRT-LLM", "DecodingBaseConfig", "TorchLlmArgs", "Medusa")
Context = Mapping[str, Any]  # target, head, and what else a Deployment has; `changed` in the target, `head` in the head
TARGET: Context = {"target": "nvidia/Kimi-K2.6-NVFP4"}
K26, K2, INT4 = (
    {"target": name, "head": {}} for name in (TARGET["target"], "nvidia/Kimi-K2-Thinking-NVFP4", "moonshotai/Kimi-K2.6")
)
MHA = {"attention": "mha", "layer_prefix": "midlayer.", "num_attention_heads": 64, "num_key_value_heads": 8}
ATTENTION_TOO = QuantSpec("nvfp4", 16, ("lm_head",), "fp8")
FORCED = {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "2"}
OPTIONS, SERVED = {"tool_parser": "kimi_k2"}, {"trust_remote_code": True, "reasoning_parser": "kimi_k25"}


def found(text: str, version: str, context: Context) -> dict[str, Finding]:
    """Findings by code. A text that begins with + is laid over the clean file."""
    more = dict(context)
    target, changed, head = more.pop("target", ""), more.pop("changed", {}), more.pop("head", None)
    if target:
        more |= {"target": replace(load_target(target).spec, **changed), "target_name": "" if changed else target}
    if head is not None:
        more["head"] = replace(load_head("nvidia/Kimi-K2.6-Eagle3").spec, **head)
    if text.startswith("+"):
        values, own = yaml.safe_load(CLEAN), yaml.safe_load(f"{{{text[1:]}}}") or {}
        values["speculative_config"] |= own.pop("speculative_config", {})
        text = yaml.safe_dump(values | own)
    return {
        finding.code.removeprefix("TS-LINT-"): finding
        for finding in lint(text, Deployment(schema_for(version), **more))
    }


# What is found (CODE, CODE~severity, CODE=severity with its source), what is not (-CODE), `error` (some error) or `ok`
# (none); codes lack TS-LINT-.
# Then the release, the file and the context.
TRAPS: list[tuple[str, str, str, Context]] = [
    ("MODEL-TOO-NEW", OLD, "moe_config: {backend: TRTLLM}", TARGET),
    ("-MODEL-TOO-NEW ok", MID, "moe_config: {backend: TRTLLM}", TARGET),
    ("MODEL-TOO-NEW", "1.3.0rc5", "moe_config: {backend: TRTLLM}", TARGET),
    ("-MODEL-TOO-NEW ok", "1.3.0rc16", "moe_config: {backend: TRTLLM}", TARGET),
    ("GUIDED-KIMI", "1.3.0rc17", "+ guided_decoding_backend: xgrammar", K26),
    ("-GUIDED-KIMI ok", NEW, "+ guided_decoding_backend: xgrammar", K26),
    ("REPORTED -GREEDY-ONLY ok", "1.3.0rc16", "+ speculative_config: {allow_advanced_sampling: true}", K26),
    ("-REPORTED -RENAMED-KEY ok", MID, "+", K26),
    ("GREEDY-ONLY", "1.3.0rc16", "+", K26),
    ("-RENAMED-KEY ok", OLD,
     "{moe_config: {backend: TRTLLM}, speculative_config: {decoding_type: Eagle, max_draft_len: 3, "
     "speculative_model: /h, allow_advanced_sampling: true}}", {**K2, "head": MHA}),
    ("-UNKNOWN-KEY ok", OLD, "+ speculative_config: {allow_advanced_sampling: true}", {**K2, "head": MHA}),
    ("-BAD-VALUE ok", MID, "+ moe_config: {backend: WIDEEP}, enable_attention_dp: true", K26),
    ("REMOVED-KEY", NEW, "+ sampler_type: TRTLLMSampler", K26),
    ("-REMOVED-KEY ok", MID, "+ sampler_type: TorchSampler", K26),
    ("REMOVED-KEY", NEW, "+ pytorch_backend_config: {kv: 1}", K26),
    ("-REMOVED-KEY -MTP-KIMI -ATTENTION-QUANTIZED -SCHEDULE-ENDS-AT-ZERO -SWITCHES-OFF -MOE-AUTO -TS-ROUTE-INT4 "
     "-HEAD-FUNCTION ok", NEW,
     "+", K26),
    ("WRONG-PARSER", NEW, "+ reasoning_parser: kimi_k2", K26),
    ("-WRONG-PARSER ok", NEW, "+ reasoning_parser: kimi_k25", K26),
    ("WRONG-PARSER", NEW, "+ reasoning_parser: kimi_k25", K2),
    ("-WRONG-PARSER ok", NEW, "+ reasoning_parser: kimi_k2", K2),
    ("CAPTURE-LAYERS-MISSING", NEW, "+", {**K26, "head": {"aux_layers": (2, 30, 58)}}),
    ("-CAPTURE-LAYERS-MISSING ok", NEW,
     "+ speculative_config: {eagle3_layers_to_capture: [2, 30, 58]}", {**K26, "head": {"aux_layers": (2, 30, 58)}}),
    ("CAPTURE-LAYERS-WRONG", NEW, "+ speculative_config: {eagle3_layers_to_capture: [2, 30, 58]}", K26),
    ("-CAPTURE-LAYERS-WRONG ok", NEW, "+ speculative_config: {eagle3_layers_to_capture: [1, 29, 57]}", K26),
    ("EAGLE31-OLD-ENGINE", "1.3.0rc16", "+", {**K26, "head": {"eagle": "3.1"}}),
    ("-EAGLE31-OLD-ENGINE ok", NEW, "+", {**K26, "head": {"eagle": "3.1"}}),
    ("MLA-TWO-MODEL", MID, "+ speculative_config: {eagle3_one_model: false}", K26),
    ("-MLA-TWO-MODEL ok", MID, "+ speculative_config: {eagle3_one_model: true}", K26),
    ("BACKEND", MID, "+ backend: trt", K26),
    ("-BACKEND ok", MID, "+ backend: pytorch", K26),
    ("TWO-MODEL", MID, "+ speculative_config: {eagle3_one_model: false}", {**K26, "head": MHA}),
    ("-TWO-MODEL ok", MID, "+", {**K26, "head": MHA}),
    ("GPU-EAGLE", NEW, "+", {**K26, "gpu": "12.0"}),
    ("-GPU-EAGLE ok", NEW, "+", {**K26, "gpu": "10.3"}),
    ("ATTENTION-QUANTIZED", NEW, "+", {**K26, "changed": {"quant": ATTENTION_TOO}}),
    ("DISAGGREGATED-NO-HEAD", NEW, "{moe_config: {backend: TRTLLM}, cache_transceiver_config: {backend: NIXL}}", K26),
    ("-DISAGGREGATED-NO-HEAD ok", NEW, "+ cache_transceiver_config: {backend: NIXL}", K26),
    ("-FORCED-ACCEPTANCE ok", NEW, "+ env_overrides: {NCCL_MNNVL_ENABLE: '1'}", K26),
    ("FORCED-ACCEPTANCE", NEW, "+", {**K26, "environ": FORCED}),
    ("-FORCED-ACCEPTANCE ok", NEW, "+", {**K26, "environ": {"NCCL_MNNVL_ENABLE": "1"}}),
    ("-TRANSCEIVER ok", NEW, "+ cache_transceiver_config: {backend: NIXL, transceiver_runtime: PYTHON}", K26),
    ("REMOTE-CODE-OFF", NEW, "+", {**K26, "options": OPTIONS, "argv": {"reasoning_parser": "kimi_k25"}}),
    ("-REMOTE-CODE-OFF -WRONG-TOOL-PARSER -NO-PARSER ok", NEW, "+", {**K26, "options": OPTIONS, "argv": SERVED}),
    ("-KV-CONNECTOR ok", NEW, "+ kv_connector_config: {connector: kvbm}", K26),
    ("KV-CONNECTOR", NEW,
     "+ kv_connector_config: {connector: kvbm}, scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}", K26),
    ("-KV-CONNECTOR ok", NEW,
     "+ kv_connector_config: {connector: kvbm}, scheduler_config: {capacity_scheduler_policy: GUARANTEED_NO_EVICT}",
     K26),
    ("WRONG-TOOL-PARSER", NEW, "+", {**K26, "options": {"tool_parser": "kimi_k25"}, "argv": SERVED}),
    ("NO-PARSER", NEW, "+", {**K26, "options": OPTIONS, "argv": {"trust_remote_code": True}}),
    ("SCHEDULE-ENDS-AT-ZERO", NEW, "+ speculative_config: {draft_len_schedule: {4: 3, 64: 1}}", K26),
    ("SCHEDULE-ENDS-AT-ZERO", NEW, "+ speculative_config: {max_concurrency: 8}", K26),
    ("RENAMED-KEY", NEW, "+ speculative_config: {acceptance_window: 100}", K26),
    ("-RENAMED-KEY ok", NEW, "+ speculative_config: {acceptance_rate_window_size: 100}", K26),
    ("SWITCHES-OFF", NEW,
     "+ speculative_config: {acceptance_rate_window_size: 100, acceptance_rate_threshold: 0.4}", K26),
    ("TOKEN-BUDGET", NEW, "+ max_batch_size: 128, max_num_tokens: 128", K26),
    ("-TOKEN-BUDGET ok", NEW, "+ max_batch_size: 128, max_num_tokens: 640", K26),
    ("MOE-AUTO", NEW, "+ moe_config: {backend: AUTO}", K26),
    ("TS-ROUTE-GPU", NEW, "+", {**K26, "gpu": "9.0"}),
    ("-TS-ROUTE-GPU ok", NEW, "+", {**K26, "gpu": "10.0"}),
    ("TS-ROUTE-INT4", NEW, "+", INT4),
    ("NO-EFFECT", MID, "+ build_config: {max_batch_size: 8}", K26),
    ("-NO-EFFECT ok", MID, "+ max_batch_size: 8", K26),
    ("SET-TWICE", NEW, "+ max_batch_size: 8", {**K26, "argv": {"max_batch_size": 32}}),
    ("-SET-TWICE ok", NEW, "+", {**K26, "argv": {"max_batch_size": 32}}),
    ("HEAD-FUNCTION", NEW, "+", {**K26, "head": {"norm_before_residual": True}}),
    ("HEAD-NAMES-OLD-ENGINE", OLD, "+", {**K2, "head": {**MHA, "layer_prefix": "layers.0."}}),
    ("-HEAD-NAMES-OLD-ENGINE ok", MID, "+", {**K2, "head": {**MHA, "layer_prefix": "layers.0."}}),
    ("MLA-HEAD-OLD-ENGINE", OLD, "+", K2),
    ("-MLA-HEAD-OLD-ENGINE ok", MID, "+", K2),
    ("WRONG-VARIANT", NEW, "+ speculative_config: {sa_config: {}}", K26),
    ("-WRONG-VARIANT ok", NEW, "+ speculative_config: {decoding_type: Eagle3, sa_config: {}}", K26),
    ("-EPLB-SLOTS ok", NEW,
     "+ moe_config: {backend: CUTEDSL, load_balancer: {num_slots: 416}}, moe_expert_parallel_size: 32", K26),
    ("TRANSFER-BUFFER", NEW,
     "+ max_seq_len: 8212, max_num_tokens: 8448, cache_transceiver_config: {backend: UCX, max_tokens_in_buffer: 4096}",
     K26),
    ("-TRANSFER-BUFFER ok", NEW,
     "+ max_seq_len: 8212, max_num_tokens: 8448, cache_transceiver_config: {backend: UCX, max_tokens_in_buffer: 8448}",
     K26),
    ("GRAPHS-TOO-SMALL", NEW, "+ max_batch_size: 256, cuda_graph_config: {max_batch_size: 64}", K26),
    ("-GRAPHS-TOO-SMALL ok", NEW, "+ max_batch_size: 256, cuda_graph_config: {max_batch_size: 256}", K26),
    ("COMBINATION", NEW, "+ kv_cache_config: {disk_cache_size: 1024}", K26),
    ("-COMBINATION ok", NEW, "+ kv_cache_config: {disk_cache_size: 1024, disk_cache_path: /cache}", K26),
    ("BAD-SCHEDULE", OLD,
     "+ speculative_config: {draft_len_schedule: {1: 3, 8: 5}, allow_advanced_sampling: true}", {**K2, "head": MHA}),
    ("-BAD-SCHEDULE ok", OLD,
     "+ speculative_config: {draft_len_schedule: {1: 3, 8: 1}, allow_advanced_sampling: true}", {**K2, "head": MHA}),
    ("PREFIX-REUSE=warning", MID, "+", {}),
    ("-PREFIX-REUSE -DRAFT-CACHE-LOST -SAMPLED-ACCEPTANCE", NEW, "+", {}),
    ("PREFIX-REUSE=warning -DRAFT-CACHE-LOST", NEW, "+ kv_cache_config: {use_kv_cache_manager_v2: false}", {}),
    ("PREFIX-REUSE=warning", "1.3.0rc24", "+", {}),
    ("PREFIX-REUSE=warning", "1.3.0rc25", "+", {}),  # nobody knows whether the mended reuse is in it
    ("-PREFIX-REUSE", "1.3.0rc26", "+ kv_cache_config: {use_kv_cache_manager_v2: auto}", {}),
    ("PREFIX-REUSE=warning", "1.3.0rc24", "+ kv_cache_config: {use_kv_cache_manager_v2: true}", {}),
    ("-PREFIX-REUSE", "1.3.0rc26", "+ kv_cache_config: {use_kv_cache_manager_v2: true}", {}),
    ("PREFIX-REUSE=warning", NEW, "+ kv_cache_config: {use_kv_cache_manager_v2: true}, pipeline_parallel_size: 2", {}),
    ("-PREFIX-REUSE", NEW, "+ enable_attention_dp: true", {}),
    ("-PREFIX-REUSE", NEW, "+ kv_cache_config: {enable_block_reuse: false}", {}),
    ("PREFIX-REUSE=info", MID, "+ kv_cache_config: {enable_block_reuse: true}", {}),
    ("-PREFIX-REUSE", NEW, "+ kv_cache_config: {enable_block_reuse: true}", {}),
    # values that the engine's classes take, and its loader refuses or answers with noise
    ("NO-WEIGHTS error", NEW, "+ load_format: dummy", K26),
    ("NO-WEIGHTS error", MID, "+ load_format: vision_only", K26),
    ("NO-WEIGHTS error", OLD, "+ speculative_config: {load_format: dummy}", {}),
    ("-NO-WEIGHTS ok", NEW, "+ load_format: auto", K26),
    *(("STOPS-AT-START error", version, f"+ kv_cache_config: {{dtype: {dtype}}}", {})
      for version in (OLD, MID, NEW) for dtype in ("bfloat16", "float16", "float32")),
    ("-STOPS-AT-START ok", MID, "+ kv_cache_config: {dtype: fp8}", {}),
    ("STOPS-AT-START error", NEW, "+ kv_cache_config: {tokens_per_block: 33}", {}),
    ("-STOPS-AT-START ok", NEW, "+ kv_cache_config: {tokens_per_block: 64}", {}),
    ("STOPS-AT-START error", NEW, "+ dtype: float32", {}),
    ("STOPS-AT-START error", NEW, "+ num_postprocess_workers: -1", {}),
    ("OTHER-NUMBER error", NEW, "max_batch_size: 032", {}),
    ("OTHER-NUMBER error", NEW, "max_num_tokens: 2:16", {}),
    ("-OTHER-NUMBER ok", NEW, "max_num_tokens: 8_192", {}),
    ("POOL error", NEW, "+ kv_cache_config: {max_tokens: 16}", {}),
    ("POOL error", NEW, "+ kv_cache_config: {max_tokens: 4096}, max_seq_len: 8192", {}),
    ("-POOL ok", NEW, "+ kv_cache_config: {max_tokens: 8192}, max_seq_len: 8192", {}),
    ("POOL error", NEW, "+ kv_cache_config: {free_gpu_memory_fraction: 0}", {}),
    ("POOL error", NEW, "+ kv_cache_config: {max_gpu_total_bytes: 1000000}, max_seq_len: 8192", K26),
    ("-POOL ok", NEW, "+ kv_cache_config: {max_gpu_total_bytes: 0}, max_seq_len: 8192", K26),
    *(("MOE-KERNEL error", MID, f"+ moe_config: {{backend: {kernel}}}", K26)
      for kernel in ("DEEPGEMM", "TRITON", "MEGAMOE_DEEPGEMM")),
    *(("-MOE-KERNEL ok", NEW, f"+ moe_config: {{backend: {kernel}}}", K26)
      for kernel in ("TRTLLM", "CUTEDSL", "CUTLASS")),
    ("MOE-KERNEL", NEW, "+ moe_config: {backend: MARLIN}", {**K26, "gpu": "10.0"}),
    ("MOE-KERNEL", NEW, "moe_config: {backend: TRTLLM}", {"gpu": "9.0"}),
    # a checkpoint that only the file names
    ("TS-NAME-PLACEHOLDER error", NEW, "+ speculative_config: {speculative_model_dir: <eagle3 checkpoint>}", {}),
    ("TS-NAME-PLACEHOLDER error", NEW, "+ speculative_config: {speculative_model_dir: '{{ draft }}'}", {}),
    ("TS-NAME-UNKNOWN error", NEW, "+ speculative_config: {speculative_model_dir: nvidia/Kimi-K2.6-Eagel3}", {}),
    ("TS-NAME-UNKNOWN error", NEW, "+ speculative_config: {speculative_model_dir: moonshotai/Kimi-K3}", {}),
    ("TS-NAME-ABSENT~info ok", NEW, "+ speculative_config: {speculative_model_dir: /nowhere/head}", {}),
    ("TS-NAME-ABSENT~error", NEW, "+ speculative_config: {speculative_model_dir: /nowhere/head}", {"here": True}),
    ("-TS-NAME-ABSENT -TS-NAME-UNKNOWN ok", NEW, "+ speculative_config: {speculative_model_dir: kimi-nano-eagle3}", {}),
    # false findings of before
    ("-TS-PAIR-TP ok", NEW, "+ tensor_parallel_size: 32, moe_expert_parallel_size: 32", K26),
    ("SET-TWICE~info ok", NEW, "+ max_batch_size: 8", {**K26, "argv": {"max_batch_size": 8}}),
    ("AUTODEPLOY~info -UNKNOWN-KEY ok", NEW, "backend: _autodeploy\ntransforms: {a: 1}\ncompile_backend: torch", {}),
    ("-UNTESTED", NEW, "speculative_config: {decoding_type: MTP, max_draft_len: 1}\npipeline_parallel_size: 2", {}),
    ("-GREEDY-ONLY", OLD, "speculative_config: {decoding_type: MTP, max_draft_len: 1}", {}),
    ("LONG-PROMPTS~warning", NEW, "+ max_seq_len: 262144", {}),
    ("LONG-PROMPTS~info", NEW, "max_seq_len: 262144\ncache_transceiver_config: {backend: NIXL}", {}),
    ("-LONG-PROMPTS", NEW, "max_seq_len: 262144", {"options": {"server_role": "GENERATION"}}),
    ("LONG-PROMPTS~warning", NEW, "max_seq_len: 262144", {"options": {"server_role": "CONTEXT"}}),
    ("REJECTION-CRASH=error", "1.3.0rc17", "+ speculative_config: {use_rejection_sampling: true}", {}),
    ("REJECTION-CRASH=warning", MID, "+ speculative_config: {use_rejection_sampling: true}", {}),
    ("-REJECTION-CRASH", NEW, "+ speculative_config: {use_rejection_sampling: true}", {}),
    ("-REJECTION-CRASH", "1.3.0rc17", "+", {}),
    ("GUIDED-SCHEDULE=warning", NEW,
     "+ speculative_config: {draft_len_schedule: {'4': 3, '64': 0}}, guided_decoding_backend: xgrammar, "
     "max_batch_size: 64", {}),
    ("GUIDED-SCHEDULE=warning", NEW,
     "+ speculative_config: {draft_len_schedule: {4: 3, 32: 1}}, guided_decoding_backend: xgrammar, max_batch_size: 64",
     {}),
    ("-GUIDED-SCHEDULE", NEW,
     "+ speculative_config: {draft_len_schedule: {4: 3, 64: 1}}, guided_decoding_backend: xgrammar, max_batch_size: 64",
     {}),
    ("-GUIDED-SCHEDULE", NEW, "+ speculative_config: {draft_len_schedule: {4: 3, 64: 0}}, max_batch_size: 64", {}),
    ("CACHE-BUDGET-TWICE=warning", "1.3.0rc7", "+ kv_cache_config: {use_kv_cache_manager_v2: true}", {}),
    ("-CACHE-BUDGET-TWICE", MID, "+ kv_cache_config: {use_kv_cache_manager_v2: true}", {}),
    ("HOST-CACHE-TWICE=warning", "1.3.0rc13", "+ kv_cache_config: {host_cache_size: 1073741824}", {}),
    ("-HOST-CACHE-TWICE", "1.3.0rc13",
     "+ kv_cache_config: {host_cache_size: 1073741824}, enable_attention_dp: true", {}),
    ("-HOST-CACHE-TWICE", NEW, "+ kv_cache_config: {host_cache_size: 1073741824}", {}),
    ("PIECEWISE-STREAMS=warning", MID,
     "+ torch_compile_config: {enable_piecewise_cuda_graph: true, max_num_streams: 3}", {}),
    ("-PIECEWISE-STREAMS", MID, "+ torch_compile_config: {enable_piecewise_cuda_graph: true, max_num_streams: 1}", {}),
    ("PIECEWISE-STREAMS=warning", NEW, "+ prefill_cuda_graph_backend: piecewise, torch_compile_config: {}", {}),
    ("DRAFT-CACHE-LOST=info", NEW, "+ cache_transceiver_config: {backend: NIXL}", {}),
    ("SAMPLED-ACCEPTANCE=info", NEW, "+ speculative_config: {use_rejection_sampling: false}", {}),
    ("REQUEST-ENDS-ENGINE=info GREEDY-ONLY", OLD, "+", {}),
    ("-REQUEST-ENDS-ENGINE", "1.3.0rc13", "+", {}),
    ("EXCLUSIVE-KEYS=error", MID, "+ speculative_config: {max_concurrency: 8}", {}),
    ("-EXCLUSIVE-KEYS", NEW, "+ speculative_config: {max_concurrency: 8, decoding_type: Eagle3}", {}),
    ("EXCLUSIVE-KEYS=error", NEW, "+ speculative_config: {draft_len_schedule: {8: 3}, max_concurrency: 8}", {}),
    ("PENALTIES-OFF=info", NEW, "+ speculative_config: {enable_penalty: false}", {}),
    ("SYNTAX", NEW, "a: [1, 2", {}),
    ("SYNTAX", NEW, "- 1\n- 2", {}),
    ("DUPLICATE-KEY", NEW, "max_batch_size: 1\nmax_batch_size: 2", {}),
    ("UNKNOWN-KEY", NEW, "max_batch_sise: 8", {}),
    ("UNKNOWN-KEY", NEW, "+ speculative_config: {use_sa_specs: true}", {}),
    ("RENAMED-KEY", NEW, "+ speculative_config: {use_sa_spec: true}", {}),
    ("RENAMED-KEY", MID, "kv_cache_dtype: fp8", {}),
    ("REMOVED-KEY", NEW, "sampler_type: auto", {}),
    ("REMOVED-KEY", MID, "pytorch_backend_config: {use_cuda_graph: true}", {}),
    ("VERSION-UNCERTAIN", OLD, "env_overrides: {A: b}", {}),
    ("KEY-UNCERTAIN", OLD, "sparse_attention_config: {somewhere: 1}", {}),
    ("VERSION-UNCERTAIN", "1.3.0rc9", "telemetry_config: {disabled: true}", {}),
    ("VERSION-NEWER", "2.0.0", "+", {}),
    ("BAD-VALUE", NEW, "moe_config: {backend: WIDEEP}", {}),
    ("WRONG-TYPE", NEW, "enable_attention_dp: maybe", {}),
    ("WRONG-TYPE", NEW, "kv_cache_config:", {}),
    ("OUT-OF-RANGE", NEW, "kv_cache_config: {free_gpu_memory_fraction: 1.5}", {}),
    ("CONVERTED-VALUE", NEW, "max_batch_size: '8'", {}),
    ("DEPRECATED", NEW, "+ speculative_config: {allow_advanced_sampling: true}", {}),
    ("WRONG-VARIANT", NEW, "+ speculative_config: {is_keep_all: true}", {}),
    ("MISSING-KEY", NEW, "speculative_config: {max_draft_len: 3}", {}),
    ("NO-DRAFT-MODEL", NEW, "speculative_config: {decoding_type: Eagle, max_draft_len: 3}", {}),
    ("NO-DRAFT-LENGTH", NEW, "+ speculative_config: {max_draft_len: 0}", {}),
    ("NO-EFFECT", NEW, "+ speculative_config: {num_eagle_layers: 3}", {}),
    ("NO-EFFECT", OLD, "build_config: {max_batch_size: 8}", {}),
    ("TWO-MODEL", NEW, "+ speculative_config: {eagle3_one_model: false}", {}),
    ("DYNAMIC-TREE", NEW, "+ speculative_config: {dynamic_tree_max_topK: 2, use_dynamic_tree: true}", {}),
    ("HEAD-ARCH", NEW, "+ speculative_config: {eagle3_model_arch: mistral_large3}", {}),
    ("SCHEDULE-MEANING", "1.3.0rc9", "+ speculative_config: {draft_len_schedule: {1: 3}}", {}),
    ("BAD-SCHEDULE -WRONG-TYPE", NEW, "+ speculative_config: {draft_len_schedule: {4: 2, 2048: 1}}", {}),
    ("BAD-SCHEDULE -WRONG-TYPE", NEW, "+ speculative_config: {draft_len_schedule: {'4': 2, '2048': 1}}", {}),
    ("BAD-SCHEDULE", OLD, "+ speculative_config: {draft_len_schedule: {2: 3}}", {}),
    ("UNTESTED", NEW, "+ pipeline_parallel_size: 2", {}),
    ("UNTESTED", NEW, "+ max_beam_width: 2", {}),
    ("GRAPH-SIZES", NEW, "cuda_graph_config: {batch_sizes: [1, 2, 4], max_batch_size: 8}", {}),
    ("GRAPHS-OFF", NEW, "+ cuda_graph_config: null, max_batch_size: 8", {}),
    ("EPLB-SLOTS", NEW, "moe_expert_parallel_size: 32\nmoe_config: {load_balancer: {num_slots: 400}}", {}),
    ("EPLB-FILE", NEW, "moe_config: {load_balancer: /nowhere/eplb.yaml}", {}),
    ("TRANSCEIVER", NEW, "cache_transceiver_config: {backend: UCX, transceiver_runtime: PYTHON}", {}),
    ("KV-CONNECTOR", NEW, "kv_connector_config: {connector: kvbm}\nenable_attention_dp: true", {}),
    ("COMBINATION", NEW, "load_format: gms\nmoe_config: {load_balancer: {num_slots: 384}}", {}),
    ("COMBINATION", NEW, "enable_iter_req_stats: true", {}),
    ("TRANSFER-BLOCKS", NEW, "cache_transceiver_config: {backend: NIXL, max_tokens_in_buffer: 8212}", {}),
    ("STATIC-TREE", NEW, "+ speculative_config: {eagle_choices: [[0], [1]]}", {}),
    ("DRAFT-PIPELINE", NEW,
     "pipeline_parallel_size: 2\nspeculative_config: {decoding_type: NGram, max_draft_len: 4}", {}),
    ("PARSER-TOO-NEW", OLD, "reasoning_parser: kimi_k25", {}),
    ("NO-SIZE", NEW, "tensor_parallel_size: 0", {}),
    ("FORCED-ACCEPTANCE", NEW, "env_overrides: {TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS: '2'}", {}),
    ("MLA-TWO-MODEL", NEW, "+ speculative_config: {eagle3_one_model: false}", K26),
    ("REMOTE-CODE-OFF", NEW, "+ trust_remote_code: false", K26),
    ("MOE-AUTO HEAD-UNUSED", NEW, "max_batch_size: 8", K26),
    ("SEQUENCE-TOO-LONG", NEW, "+ max_num_tokens: 300000, max_seq_len: 300000", K26),
    ("TS-PAIR-WIDTH", NEW, "+", {**K26, "head": {"target_hidden_size": 4096}}),
    ("TS-PAIR-TP", NEW, "+ tensor_parallel_size: 3", K26),
    ("TS-ROUTE-HEADS", NEW, "tensor_parallel_size: 6", TARGET),
    ("ok", NEW, "tensor_parallel_size: 6\nenable_attention_dp: true\nmoe_expert_parallel_size: 6", TARGET),
    ("TS-ROUTE-EXPERTS", NEW, "tensor_parallel_size: 8\nmoe_expert_parallel_size: 5", TARGET),
    ("ok", NEW, "tensor_parallel_size: 8\nmoe_expert_parallel_size: 8", TARGET),
    ("ok", NEW, "max_batch_size: 8", TARGET),
    ("NO-DRAFT-MODEL", NEW, "speculative_config: {decoding_type: Draft_Target, max_draft_len: 3}", TARGET),
    ("NO-DRAFT-LENGTH", NEW, "speculative_config: {decoding_type: NGram}", TARGET),
    ("NO-DRAFT-LENGTH", NEW, "speculative_config: {decoding_type: SA, max_draft_len: 0}", TARGET),
    ("NO-DRAFT-MODEL", NEW, "speculative_config: {decoding_type: User_Provided, max_draft_len: 3}", TARGET),
    ("NO-DRAFT-MODEL", NEW, "speculative_config: {decoding_type: Eagle3, max_draft_len: 3}", TARGET),
    ("MTP-KIMI", NEW, "speculative_config: {decoding_type: MTP, max_draft_len: 1}", TARGET),
    ("UNTESTED", NEW,
     "speculative_config: {decoding_type: DFlash, max_draft_len: 7, speculative_model_dir: /d}", TARGET),
    ("COMBINATION", NEW, "speculative_config: {decoding_type: SA, max_draft_len: 3, global_pool_size: 64}", TARGET),
    ("METHOD-KIMI=error", MID, "speculative_config: {decoding_type: Medusa, max_draft_len: 3}", TARGET),
    ("ok", MID, "+ speculative_config: {max_draft_len: 3, draft_len_schedule: {'1': 3}}", {}),
    ("ok", MID, "+ speculative_config: {max_draft_len: '3', draft_len_schedule: {'4': '3', 2048: 1}}", {}),
    ("error", MID, "+ speculative_config: {max_draft_len: 3, draft_len_schedule: {}}", {}),
    ("error", OLD, "+ speculative_config: {max_draft_len: 3, draft_len_schedule: {}}", {}),
    ("error", MID, "+ speculative_config: {max_draft_len: 3, draft_len_schedule: {0: 3}}", {}),
    ("error", MID, "+ speculative_config: {max_draft_len: 3, draft_len_schedule: {4: 3, 8: 4}}", {}),
    ("error", MID, "+ speculative_config: {max_draft_len: 3, draft_len_schedule: {4: 3, 8: -1}}", {}),
    ("ok", MID, "+ speculative_config: {max_draft_len: 3, draft_len_schedule: {8: 1, 4: 3}}", {}),
    ("error", OLD, "+ speculative_config: {max_draft_len: 3, draft_len_schedule: {4: 3}}", {}),
    ("ok", OLD, "+ speculative_config: {max_draft_len: 3, draft_len_schedule: {'1': 3, 8: 1}}", {}),
    ("ok", MID, "+ speculative_config: {max_draft_len: 3, draft_len_schedule: null}", {}),
    ("DYNAMIC-TREE -COMBINATION -OUT-OF-RANGE -EXCLUSIVE-KEYS", NEW,
     "+ speculative_config: {use_dynamic_tree: true, dynamic_tree_max_topK: 2, max_total_draft_tokens: 6}", {}),
    ("DYNAMIC-TREE COMBINATION", NEW, "+ speculative_config: {use_dynamic_tree: true}", {}),
    ("DYNAMIC-TREE COMBINATION", NEW, "+ speculative_config: {use_dynamic_tree: 'yes'}", {}),
    ("DYNAMIC-TREE COMBINATION", NEW, "+ speculative_config: {use_dynamic_tree: true, dynamic_tree_max_topK: 0}", {}),
    ("DYNAMIC-TREE EXCLUSIVE-KEYS", NEW,
     "+ speculative_config: {eagle_choices: [[0]], use_dynamic_tree: true, dynamic_tree_max_topK: 2}", {}),
    ("DYNAMIC-TREE", MID, "+ speculative_config: {dynamic_tree_max_topK: 2}", {}),
    ("-DYNAMIC-TREE", NEW, "+ speculative_config: {dynamic_tree_max_topK: 2}", {}),
    ("error", MID, "+ speculative_config: {eagle_choices: '8'}", {}),
    ("ok", MID, "+ speculative_config: {eagle_choices: None}", {}),
    ("error", NEW, "kv_cache_config: {free_gpu_memory_fraction: null}", {}),
    ("error", NEW, "attention_dp_config: {enable_balance: true, timeout_iters: -1}", {}),
    ("error", NEW, "skip_tokenizer_init: true\npost_processor_hook: a.B", {}),
    ("error", NEW, "encoder_cuda_graph_config: {mode: encode}", {}),
    ("error", NEW, "prefill_cuda_graph_backend: breakable\ntorch_compile_config: {}", {}),
    ("error", NEW, "speculative_config: {decoding_type: MTP, max_draft_len: 0}", {}),
    ("error", NEW, "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 0}", {}),
    ("error", NEW, "speculative_config: {decoding_type: NGram, max_draft_len: 4, max_matching_ngram_size: 0.0}", {}),
    ("error", NEW, "kv_cache_config: {mamba_state_config: {additional_snapshot_offsets_from_start: ['8']}}", {}),
    ("error", NEW, "ray_worker_nsight_options: {1: 2}", {}),
    ("error", NEW, "ray_worker_extension_cls: ''", {}),
    ("error", NEW, "speculative_config: {decoding_type: MTP, use_dynamic_tree: null}", {}),
    ("error", NEW, "speculative_config: {decoding_type: SA, max_draft_len: 4, max_matching_ngram_size: 0}", {}),
    ("ok", NEW, "sparse_attention_config: {algorithm: deepseek_v4}", {}),
    ("ok", NEW, "sparse_attention_config: {algorithm: deepseek_v4, index_head_dim: 64, indexer_k_dtype: fp8}", {}),
    ("ok", NEW, "speculative_config: {decoding_type: MTP}", {}),
    ("ok", NEW, "speculative_config: {decoding_type: SA, max_draft_len: 4, max_matching_ngram_size: -1}", {}),
    ("ok", NEW, "speculative_config: {decoding_type: SA, max_draft_len: 4, max_matching_ngram_size: -2}", {}),
    ("ok", NEW, "kv_cache_config: {mamba_state_config: {additional_snapshot_offsets_from_start: [8]}}", {}),
    ("ok", NEW, "ray_worker_nsight_options: {t: cuda}", {}),
    ("ok", NEW, "env_overrides: {1: 2}", {}),
    ("error", "1.3.0rc23", "prefill_cuda_graph_backend: piecewise", {}),
    ("ok", NEW, "prefill_cuda_graph_backend: piecewise", {}),
    ("error", "1.3.0rc23", "kv_cache_config: {kv_events_config: {hwm: 8}}", {}),
    ("ok", NEW, "kv_cache_config: {kv_events_config: {hwm: 8}}", {}),
    ("error", "1.3.0rc23", "kv_cache_config: {dtype: fp8_ds_mla}", {}),
    ("ok", NEW, "kv_cache_config: {dtype: fp8_ds_mla}", {}),
    ("error", NEW, "cp_config: {cp_anchor_size: 8}", {}),
    ("ok", "1.3.0rc23", "cp_config: {cp_anchor_size: 8}", {}),
    ("error", NEW, "sparse_attention_config: {algorithm: minimax_m3, sparse_index_dim: 0}", {}),
    ("ok", "1.3.0rc23", "sparse_attention_config: {algorithm: minimax_m3, sparse_index_dim: 0}", {}),
    ("error", MID, "kv_cache_config: {block_reuse_config: {policy: per_request}}", {}),
    ("ok", "1.3.0rc24", "kv_cache_config: {block_reuse_config: {policy: per_request}}", {}),
    ("MISSING-KEY", NEW, "speculative_config: {decoding_type: SaveState}", {}),
    ("-MISSING-KEY ok", NEW, "speculative_config: {decoding_type: SaveState, output_directory: /x}", {}),
    ("-MISSING-KEY ok", NEW, "speculative_config: {decoding_type: NGram, max_draft_len: 2}", {}),
    ("MISSING-KEY", NEW, "kv_cache_compression_config: {algorithm: triattention}", {}),
    ("-MISSING-KEY ok", NEW, "kv_cache_compression_config: {algorithm: quantization_for_cold_page}", {}),
    ("MISSING-KEY", NEW, "kv_cache_compression_config: {}", {}),
    ("MISSING-KEY", NEW, "sparse_attention_config: {topk: 1}", {}),
    ("-MISSING-KEY ok", NEW, "max_batch_size: 8", {}),
    ("TOKEN-BUDGET", NEW,
     "{speculative_config: {decoding_type: PARD, max_draft_len: 4, speculative_model_dir: /d}, "
     "max_batch_size: 8, max_num_tokens: 40}", TARGET),
    ("-TOKEN-BUDGET", NEW,
     "{speculative_config: {decoding_type: DFlash, max_draft_len: 4, speculative_model_dir: /d}, "
     "max_batch_size: 8, max_num_tokens: 40}", TARGET),
    ("MLA-HEAD-OLD-ENGINE", "1.3.0rc12", "+", K26),
    ("-MLA-HEAD-OLD-ENGINE", "1.3.0rc13", "+", K26),
    ("MODEL-TOO-NEW", "1.3.0rc6", "+", K26),
    ("-MODEL-TOO-NEW", "1.3.0rc7", "+", K26),
    ("PRUNED-MLA-HEAD error", NEW, "+", {**K26, "head": {"draft_vocab_size": 32_000}}),
    ("-PRUNED-MLA-HEAD", NEW, "+", {**K26, "head": {"draft_vocab_size": 32_000, "attention": "mha"}}),
    ("HEAD-DIFFERS", NEW, "+", {**K26, "head_name": "other/head"}),
    ("-HEAD-DIFFERS -PRUNED-MLA-HEAD", NEW, "+", {**K26, "head_name": "nvidia/Kimi-K2.6-Eagle3"}),
    ("SET-TWICE error", OLD, "max_batch_size: 8", {"argv": {"max_batch_size": 32}}),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "version", "text", "context"), TRAPS, ids=lambda value: str(value)[:40])
def test_a_trap_is_caught_where_it_is_one(expected: str, version: str, text: str, context: Context) -> None:
    findings = found(text, version, context)
    errors = [finding for finding in findings.values() if finding.severity == "error"]
    for word in expected.split():
        code, _, severity = word.replace("~", "=").partition("=")
        if word in ("ok", "error"):
            assert bool(errors) == (word == "error"), errors
        elif word.startswith("-"):
            assert word[1:] not in findings, findings[word[1:]]
        else:
            assert code in findings, findings.keys()
            finding = findings[code]
            assert finding.message and finding.problem("").remedy
            assert not severity or finding.severity == severity
            assert "=" not in word or any(name in finding.message for name in SOURCES)
            if not context and not text.startswith("+") and code != "VERSION-NEWER":
                assert finding.line and finding.line <= text.count("\n") + 1


def test_the_engine_is_no_dependency() -> None:
    """Its index entry is a stub that fetches the wheel from another index while metadata are read."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    everyday = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert not [name for name in everyday if "tensorrt" in name]


@pytest.mark.parametrize(
    ("gpu", "capability"),
    [("b200", "10.0"), ("GB300", "10.3"), ("h200", "9.0"), ("sm120", "12.0"), ("sm_100a", "10.0")],
)
def test_a_gpu_is_named_or_given_by_its_capability(gpu: str, capability: str) -> None:
    assert compute_capability(gpu) == capability
    with pytest.raises(UsageError):
        compute_capability("b9000")


def test_options_after_the_dashes_are_settings_and_are_judged() -> None:
    text = "max_batch_size: 8\n"
    deployment, _, problems = deployment_of(
        text, version=NEW, target=K26["target"], head=None, passed=["--max_batch_size", "32", "--no_such", "1"]
    )
    assert [problem.code for problem in problems] == ["TS-SERVE-UNKNOWN-OPTION"]
    assert deployment.argv["max_batch_size"] == 32
    assert {"TS-LINT-SET-TWICE", "TS-LINT-REMOTE-CODE-OFF"} <= {finding.code for finding in lint(text, deployment)}
