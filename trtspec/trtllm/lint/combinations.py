"""Settings that exclude, require or undo each other; most are validators of the engine's own classes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from trtspec.trtllm.document import Document, add_key, delete_key
from trtspec.trtllm.lint.finding import Deployment, Finding

CONNECTOR = "kv_connector_config"


def check_combinations(document: Document, deployment: Deployment) -> Iterator[Finding]:
    yield from _connector(document, deployment)
    yield from _required_together(document)
    yield from _excluded(document)
    yield from _without_effect(document, deployment)


def _at(
    document: Document, code: str, severity: Any, key: str, message: str, remedy: str = "", fix: Any = None
) -> Finding:
    return Finding(code, severity, key, message, remedy, document.line(key), fix)


def _connector(document: Document, deployment: Deployment) -> Iterator[Finding]:
    if not isinstance(document.get(CONNECTOR), dict):
        return
    policy = document.get("scheduler_config.capacity_scheduler_policy", "GUARANTEED_NO_EVICT")
    if policy != "GUARANTEED_NO_EVICT":
        message = f"a KV connector needs GUARANTEED_NO_EVICT, not {policy}"
        key = "scheduler_config.capacity_scheduler_policy"
        yield _at(document, "TS-LINT-KV-CONNECTOR", "error", key, message, "remove the policy")
    if deployment.setting(document, "enable_attention_dp") is True:
        message = "a KV connector with attention DP stops at an assertion"
        yield _at(document, "TS-LINT-KV-CONNECTOR", "error", "enable_attention_dp", message, "use one of the two")
    parts = [
        f"{CONNECTOR}.{name}" for name in ("connector_module", "connector_scheduler_class", "connector_worker_class")
    ]
    if not document.get(f"{CONNECTOR}.connector") and not all(document.get(part) for part in parts):
        message = "a KV connector is a preset (`connector`) or a module with both of its classes"
        yield _at(
            document, "TS-LINT-KV-CONNECTOR", "error", CONNECTOR, message, "write `connector: kvbm`, or all three"
        )


def _required_together(document: Document) -> Iterator[Finding]:
    code = "TS-LINT-COMBINATION"
    for key in ("ray_placement_config", "ray_worker_extension_cls"):
        if document.get(key) and document.get("orchestrator_type") != "ray":
            yield _at(document, code, "error", key, f"{key} needs `orchestrator_type: ray`", "remove it")
    if document.get("enable_iter_req_stats") is True and document.get("enable_iter_perf_stats") is not True:
        message = "enable_iter_req_stats needs enable_iter_perf_stats"
        stated = document.has("enable_iter_perf_stats")
        fix = None if stated else partial(add_key, path="enable_iter_perf_stats", value=True)
        yield _at(document, code, "error", "enable_iter_req_stats", message, "turn both on", fix)
    size = document.get("kv_cache_config.disk_cache_size")
    if isinstance(size, int) and size > 0 and not document.get("kv_cache_config.disk_cache_path"):
        message = "disk_cache_size needs disk_cache_path, an existing directory"
        yield _at(document, code, "error", "kv_cache_config.disk_cache_size", message, "add disk_cache_path")
    blocks = document.get("cp_config.tokens_per_block")
    own = document.get("kv_cache_config.tokens_per_block", 32)
    if document.get("cp_config.cp_type") == "HELIX" and blocks is not None and blocks != own:
        message = f"HELIX needs equal blocks: cp_config.tokens_per_block is {blocks}, kv_cache_config's is {own}"
        yield _at(document, code, "error", "cp_config.tokens_per_block", message, f"write {own}")


def _excluded(document: Document) -> Iterator[Finding]:
    code = "TS-LINT-COMBINATION"
    if str(document.get("load_format", "")).lower() == "gms" and document.get("moe_config.load_balancer"):
        message = "load_format GMS and moe_config.load_balancer exclude each other"
        yield _at(document, code, "error", "load_format", message, "drop one")
    spec = "speculative_config"
    if document.get(f"{spec}.use_rejection_sampling") is True and document.get(f"{spec}.sa_config"):
        message = "use_rejection_sampling and sa_config exclude each other"
        yield _at(document, code, "error", f"{spec}.use_rejection_sampling", message, "drop one")
    if document.get("encode_only") is True and document.get("mm_encoder_only") is True:
        message = "encode_only and mm_encoder_only exclude each other"
        yield _at(document, code, "error", "encode_only", message, "drop both: neither serves a Kimi")
    multimodal = "multimodal_config"
    ahead = document.get(f"{multimodal}.encoder_side_stream_max_ahead")
    if document.get(f"{multimodal}.encoder_cuda_graph") and ahead:
        message = "encoder_cuda_graph and encoder_side_stream_max_ahead exclude each other"
        yield _at(document, code, "error", f"{multimodal}.encoder_cuda_graph", message, "drop one")


def _without_effect(document: Document, deployment: Deployment) -> Iterator[Finding]:
    """What is set and does nothing, because the setting that would switch it on is not there."""
    code = "TS-LINT-NO-EFFECT"
    gms = [key for key in ("gms_config.socket_path", "gms_config.mode", "gms_config.tag") if document.has(key)]
    if gms and str(document.get("load_format", "")).lower() != "gms":
        yield _at(document, code, "warning", gms[0], "gms_config does nothing without `load_format: gms`", "remove it")
    if document.get("mx_config.server_url") and document.get("checkpoint_format") != "MX":
        message = "mx_config does nothing without `checkpoint_format: MX`"
        yield _at(document, code, "warning", "mx_config.server_url", message, "remove it, or set the format")
    key = "perf_metrics_max_requests"
    if document.get(key) and document.get("return_perf_metrics") is not True and deployment.schema.line != "1.4":
        message = f"{key} does nothing without return_perf_metrics"
        fix = None if document.has("return_perf_metrics") else partial(add_key, path="return_perf_metrics", value=True)
        yield _at(document, code, "warning", key, message, "turn return_perf_metrics on", fix)
    if document.get("enable_early_first_token_response") is True and document.get("disable_overlap_scheduler") is True:
        key = "enable_early_first_token_response"
        fix = partial(delete_key, path=key)
        yield _at(document, code, "warning", key, f"{key} needs the overlap scheduler", "remove it", fix)
