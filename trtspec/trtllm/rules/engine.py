"""Rules about the engine around the model: token budget, CUDA graphs, MoE kernels, KV cache, transfer, environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from trtspec.errors import Severity
from trtspec.formats import KV_ELEMENT_BYTES
from trtspec.planning.layout import kernel_refusal
from trtspec.trtllm.deployment import Deployment, Finding, draft_length, finding_at, step_tokens
from trtspec.trtllm.document import Document, add_key, delete_key, set_value

FORCED_ACCEPTANCE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


def check_engine(document: Document, deployment: Deployment) -> Iterator[Finding]:
    yield from _double_settings(document, deployment)
    yield from _token_budget(document, deployment)
    yield from _pool(document, deployment)
    yield from _cuda_graphs(document, deployment)
    yield from _moe(document, deployment)
    yield from _transfer_buffer(document, deployment)
    yield from _forced_acceptance(document, deployment)
    yield from _disk_cache(document, deployment)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _double_settings(document: Document, deployment: Deployment) -> Iterator[Finding]:
    """Who wins flipped between versions, so two values of one setting are always an error."""
    for key, option in deployment.argv.items():
        if not document.has(key):
            continue
        severity: Severity = "info" if document.get(key) == option else "error"
        who = "file" if deployment.schema.behaviour("precedence")["winner"] == "yaml" else "option"
        message = f"{key} is in the file and on the command line"
        message += (
            f"; in {deployment.version} the {who} wins, in other versions the other" if severity == "error" else ""
        )
        fix = partial(delete_key, path=key)
        yield finding_at(document, "TS-LINT-SET-TWICE", severity, key, message, f"remove {key} from the file", fix)


def _token_budget(document: Document, deployment: Deployment) -> Iterator[Finding]:
    batch = deployment.setting(document, "max_batch_size")
    tokens = deployment.setting(document, "max_num_tokens", 8192)
    draft, step = draft_length(document), step_tokens(document)
    if _whole(batch) and _whole(tokens) and tokens < batch * step:
        message = f"max_num_tokens {tokens} does not hold one step of a full batch: {batch} x {step}"
        fixable = draft and document.has("max_num_tokens")
        fix = partial(set_value, path="max_num_tokens", value=batch * step) if fixable else None
        remedy = f"at least {batch * step}"
        yield finding_at(document, "TS-LINT-TOKEN-BUDGET", "warning", "max_num_tokens", message, remedy, fix)
    length = deployment.setting(document, "max_seq_len")
    limit = deployment.target.max_position_embeddings if deployment.target else None
    if _whole(length) and limit and length > limit:
        message = f"max_seq_len {length} is beyond the model's {limit} positions"
        yield finding_at(document, "TS-LINT-SEQUENCE-TOO-LONG", "error", "max_seq_len", message, f"at most {limit}")
    chunked = deployment.setting(document, "enable_chunked_prefill", False)
    role = str((deployment.options or {}).get("server_role") or "").casefold()
    if _whole(length) and _whole(tokens) and length > tokens and not chunked and not role.startswith("gen"):
        message = f"prompts longer than max_num_tokens ({tokens}) are refused without chunked prefill, and max_seq_len "
        message += f"allows {length}"
        # a generation server prefills nothing, and a file alone does not show on which side it runs
        either = not role and bool(document.get("cache_transceiver_config.backend"))
        remedy = "turn enable_chunked_prefill on, or raise max_num_tokens"
        remedy = f"on a context server {remedy}" if either else remedy
        severity: Severity = "info" if either else "warning"
        yield finding_at(document, "TS-LINT-LONG-PROMPTS", severity, "max_seq_len", message, remedy)


def _pool(document: Document, deployment: Deployment) -> Iterator[Finding]:
    """The KV cache must hold one request of the length that is served, at the least one block."""
    block, length = document.get("kv_cache_config.tokens_per_block", 32), deployment.setting(document, "max_seq_len")
    request = length if _whole(length) else block if _whole(block) else 1
    pools = {"max_tokens": document.get("kv_cache_config.max_tokens")}
    if deployment.setting(document, "kv_cache_config.free_gpu_memory_fraction") == 0:
        pools["free_gpu_memory_fraction"] = 0
    total, target = document.get("kv_cache_config.max_gpu_total_bytes"), deployment.target
    if target is not None and _whole(total) and total > 0:  # 0: no limit
        bytes_per_token = target.kv_elements_per_token * KV_ELEMENT_BYTES[target.quant.kv_cache or "bf16"]
        pools["max_gpu_total_bytes"] = int(total / bytes_per_token)
    for name, tokens in pools.items():
        if _whole(tokens) and tokens < request:
            message = f"the KV cache holds {max(tokens, 0):,} tokens and one request may have {request:,}"
            remedy = "raise it, or remove it" + (", or lower max_seq_len" if _whole(length) else "")
            yield finding_at(document, "TS-LINT-POOL", "error", f"kv_cache_config.{name}", message, remedy)


def _cuda_graphs(document: Document, deployment: Deployment) -> Iterator[Finding]:
    key = "cuda_graph_config"
    sizes, written = document.get(f"{key}.batch_sizes"), document.get(f"{key}.max_batch_size")
    largest = written if _whole(written) else 0
    whole = isinstance(sizes, list) and bool(sizes) and all(_whole(size) for size in sizes)
    if whole and largest and largest != max(sizes):
        message = f"max_batch_size {largest} and the largest of batch_sizes, {max(sizes)}, must be equal"
        fix = partial(delete_key, path=f"{key}.max_batch_size")
        remedy = "keep batch_sizes only"
        yield finding_at(document, "TS-LINT-GRAPH-SIZES", "error", f"{key}.max_batch_size", message, remedy, fix)
    batch = deployment.setting(document, "max_batch_size")
    if document.has(key) and document.get(key) is None:
        return
    covered = max(sizes) if whole else largest or 128
    if _whole(batch) and batch > covered:
        message = f"CUDA graphs end at batch {covered} and max_batch_size is {batch}: larger batches run without graphs"
        place = f"{key}.batch_sizes" if whole else f"{key}.max_batch_size"
        value = [*sizes, batch] if whole else batch
        fix = partial(set_value if document.has(place) else add_key, path=place, value=value)
        remedy = f"let them reach {batch}"
        yield finding_at(document, "TS-LINT-GRAPHS-TOO-SMALL", "warning", key, message, remedy, fix)


def _moe(document: Document, deployment: Deployment) -> Iterator[Finding]:
    key, target = "moe_config.backend", deployment.target
    value = document.get(key, "AUTO")
    format = target.quant.format if target is not None else None
    refused = kernel_refusal(value, format, deployment.gpu) if isinstance(value, str) else None
    if refused is not None:
        known = "TRTLLM" if kernel_refusal("TRTLLM", format, deployment.gpu) is None else "CUTLASS"
        yield finding_at(document, "TS-LINT-MOE-KERNEL", "error", key, refused, f"write {known}")
    balancer = document.get("moe_config.load_balancer")
    slots = balancer.get("num_slots") if isinstance(balancer, dict) else None
    experts = deployment.setting(document, "moe_expert_parallel_size")
    if _whole(slots) and _whole(experts) and experts > 0 and slots % experts:
        message = f"num_slots {slots} does not divide by moe_expert_parallel_size {experts}"
        path = "moe_config.load_balancer.num_slots"
        yield finding_at(document, "TS-LINT-EPLB-SLOTS", "error", path, message, "use a multiple")
    if isinstance(balancer, str) and not os.path.isfile(balancer):
        message = f"{balancer} is not a file here; the engine stops with FileNotFoundError where it is missing"
        place = "moe_config.load_balancer"
        yield finding_at(document, "TS-LINT-EPLB-FILE", _absent(deployment), place, message, "check the path")
    tp, moe_tp = deployment.setting(document, "tensor_parallel_size"), document.get("moe_tensor_parallel_size")
    if all(_whole(item) and item > 0 for item in (tp, moe_tp, experts)) and moe_tp * experts != tp:
        message = f"moe_tensor_parallel_size {moe_tp} x moe_expert_parallel_size {experts} must be {tp}"
        yield finding_at(document, "TS-LINT-COMBINATION", "error", "moe_tensor_parallel_size", message, "leave one out")


def _absent(deployment: Deployment) -> Severity:
    """Of a path that is not here: certain where the engine runs here, not where the file is for a pod."""
    return "error" if deployment.here else "warning"


def _transfer_buffer(document: Document, deployment: Deployment) -> Iterator[Finding]:
    """The buffer must hold the longest prompt, in whole blocks; 0 means transfers without a copy."""
    key = "cache_transceiver_config.max_tokens_in_buffer"
    buffer, length = document.get(key), deployment.setting(document, "max_seq_len")
    if not _whole(buffer) or buffer <= 0:
        return
    blocks = deployment.schema.behaviour("transfer_in_blocks")
    (unless, other), *_ = blocks["unless"].items()
    block = document.get("kv_cache_config.tokens_per_block", blocks["tokens_per_block"])
    block = block if _whole(block) and block > 0 else 1
    if buffer % block and document.get(unless) != other:
        whole = -(-buffer // block) * block
        message = f"the buffer must hold whole blocks of {block} tokens: {buffer} stops the engine ({blocks['source']})"
        fix = partial(set_value, path=key, value=whole)
        yield finding_at(document, "TS-LINT-TRANSFER-BLOCKS", "error", key, message, f"write {whole}", fix)
    if not _whole(length):
        return
    tokens = deployment.setting(document, "max_num_tokens", 8192)
    longest = length
    if deployment.setting(document, "enable_chunked_prefill", False) is not True and _whole(tokens):
        longest = min(length, tokens)  # longer prompts are refused
    if buffer < longest:
        message = f"prompts of {longest} tokens are accepted and the transfer buffer holds {buffer}"
        enough = -(-longest // block) * block
        fix = partial(set_value, path=key, value=enough)
        yield finding_at(document, "TS-LINT-TRANSFER-BUFFER", "warning", key, message, f"at least {enough}", fix)


def _forced_acceptance(document: Document, deployment: Deployment) -> Iterator[Finding]:
    key = "env_overrides"
    forced = document.get(key)
    if isinstance(forced, dict) and FORCED_ACCEPTANCE in forced:
        message = f"{FORCED_ACCEPTANCE} accepts drafts unseen: the throughput is made up and the text is corrupt"
        path = f"{key}.{FORCED_ACCEPTANCE}"
        fix = partial(delete_key, path=path)
        yield finding_at(document, "TS-LINT-FORCED-ACCEPTANCE", "error", path, message, "remove it", fix)
    if deployment.environ.get(FORCED_ACCEPTANCE):
        message = f"the environment sets {FORCED_ACCEPTANCE}: throughput would be made up and the text corrupt"
        remedy = f"unset {FORCED_ACCEPTANCE}"
        yield Finding("TS-LINT-FORCED-ACCEPTANCE", "error", "environment", message, remedy)


def _disk_cache(document: Document, deployment: Deployment) -> Iterator[Finding]:
    """A directory that must be there."""
    place = "kv_cache_config.disk_cache_path"
    size, folder = document.get("kv_cache_config.disk_cache_size"), document.get(place)
    if isinstance(size, int) and size > 0 and isinstance(folder, str) and folder and not Path(folder).is_dir():
        message = f"{folder} is not a directory here; the engine stops where it is missing"
        remedy = "make it on the machine that serves"
        yield finding_at(document, "TS-LINT-DISK-CACHE-PATH", _absent(deployment), place, message, remedy)
