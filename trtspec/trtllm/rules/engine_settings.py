"""Rules about the engine around the model: token budget, CUDA graphs, MoE kernels, KV cache, transfer, environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from trtspec.data_files import gpu_names
from trtspec.errors import Problem, Severity
from trtspec.planning.layout import kernel_refusal
from trtspec.specs import gpu_spec
from trtspec.trtllm.deployment import Deployment, draft_length, step_tokens
from trtspec.trtllm.document import Document, add_key, delete_key, set_value

FORCED_ACCEPTANCE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


def double_settings(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Who wins flipped between versions, so two values of one setting are always an error."""
    for key, option in deployment.argv.items():
        if not document.has(key):
            continue
        severity: Severity = "info" if document.get(key) == option else "error"
        who = "file" if deployment.schema.behaviour("precedence")["winner"] == "yaml" else "option"
        message = f"{key} is in the file and on the command line"
        if severity == "error":
            message += f"; in {deployment.version} the {who} wins, in other versions the other"
        yield Problem(
            "TS-LINT-SET-TWICE", severity, key, message, fix=partial(delete_key, path=key)
        )


def token_budget(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """max_num_tokens against a step of a full batch and the longest prompt, max_seq_len against the model."""
    batch = deployment.size(document, "max_batch_size")
    tokens = deployment.size(document, "max_num_tokens", 8192)  # what the engine takes for null
    step = step_tokens(document)
    if tokens < batch * step:
        message = (
            f"max_num_tokens {tokens} does not hold one step of a full batch: {batch} x {step}"
        )
        # without drafts the batch is as likely what is wrong
        fixable = draft_length(document) and document.has("max_num_tokens")
        fix = partial(set_value, path="max_num_tokens", value=batch * step) if fixable else None
        yield Problem("TS-LINT-TOKEN-BUDGET", "warning", "max_num_tokens", message, fix=fix)
    length = deployment.size(document, "max_seq_len")
    limit = deployment.target.max_position_embeddings if deployment.target else None
    if limit and length > limit:
        message = f"max_seq_len {length} is beyond the model's {limit} positions"
        yield Problem("TS-LINT-SEQUENCE-TOO-LONG", "error", "max_seq_len", message)
    chunked = deployment.setting(document, "enable_chunked_prefill")
    role = deployment.role_of(document)
    if length > tokens and not chunked and role != "generation":
        message = f"prompts longer than max_num_tokens ({tokens}) are refused without chunked prefill, and max_seq_len "
        message += f"allows {length}"
        # a generation server prefills nothing, and a file alone does not show on which side it runs
        either = not role and bool(document.get("cache_transceiver_config.backend"))
        yield Problem(
            "TS-LINT-LONG-PROMPTS", "info" if either else "warning", "max_seq_len", message,
            beside=("max_num_tokens",),
        )  # fmt: skip


def pool(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """The KV cache must hold one request of the length that is served, at the least one block."""
    target = deployment.target
    longest = target.max_position_embeddings if target else 32
    request = deployment.size(document, "max_seq_len", longest)
    pools = {"max_tokens": document.get("kv_cache_config.max_tokens")}
    if deployment.setting(document, "kv_cache_config.free_gpu_memory_fraction") == 0:
        pools["free_gpu_memory_fraction"] = 0
    for name, tokens in pools.items():
        if isinstance(tokens, int) and tokens < request:
            message = (
                f"the KV cache holds {max(tokens, 0):,} tokens and one request may have {request:,}"
            )
            # without max_seq_len the length is the model's, which few requests reach
            certain = tokens < deployment.size(document, "max_seq_len", 32)
            severity: Severity = "error" if certain else "warning"
            yield Problem("TS-LINT-POOL", severity, f"kv_cache_config.{name}", message)


def capacity(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Requests of full length that the cache of this GPU holds, as build-config writes it into its file."""
    length = deployment.size(document, "max_seq_len")
    target, gpu = deployment.target, deployment.gpu_name
    if target is None or gpu not in gpu_names() or not length:
        return
    held, batch = deployment.held_requests(document, target, gpu_spec(gpu))
    if held >= batch:
        return
    message = f"the cache holds {held:,} requests of {length:,} tokens, fewer than a full batch of {batch:,} "
    message += "(`trtspec plan`); a request without `max_tokens` reserves that length (TensorRT-LLM issue 9412)"
    yield Problem("TS-LINT-CAPACITY", "info" if held else "error", "max_seq_len", message)


def cuda_graphs(document: Document, deployment: Deployment) -> Iterator[Problem]:
    key = "cuda_graph_config"
    listed, most = f"{key}.batch_sizes", f"{key}.max_batch_size"
    sizes, largest = document.get(listed), deployment.size(document, most)
    whole = bool(sizes) and isinstance(sizes, list) and all(isinstance(size, int) for size in sizes)
    covered = max(sizes) if whole else largest or 128
    if whole and largest and largest != covered:
        message = (
            f"max_batch_size {largest} and the largest of batch_sizes, {covered}, must be equal"
        )
        fix = partial(delete_key, path=most)
        yield Problem("TS-LINT-GRAPH-SIZES", "error", most, message, fix=fix)
    batch = deployment.size(document, "max_batch_size")
    off = document.has(key) and document.get(key) is None
    if batch > covered and not off:
        message = f"CUDA graphs end at batch {covered} and max_batch_size is {batch}: larger batches run without graphs"
        path = listed if whole else most
        change = set_value if document.has(path) else add_key
        fix = partial(change, path=path, value=[*sizes, batch] if whole else batch)
        yield Problem("TS-LINT-GRAPHS-TOO-SMALL", "warning", key, message, fix=fix)


def moe(document: Document, deployment: Deployment) -> Iterator[Problem]:
    key, target = "moe_config.backend", deployment.target
    value, format = document.get(key, "AUTO"), target.quant.format if target is not None else None
    refused = kernel_refusal(value, format, deployment.gpu) if isinstance(value, str) else None
    if refused is not None:
        yield Problem("TS-LINT-MOE-KERNEL", "error", key, refused)
    tp, moe_tp, experts = (
        deployment.size(document, name)
        for name in ("tensor_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size")
    )
    key = "moe_config.load_balancer"
    balancer = document.get(key)
    slots = balancer.get("num_slots") if isinstance(balancer, dict) else None
    if isinstance(slots, int) and experts and slots % experts:
        message = f"num_slots {slots} does not divide by moe_expert_parallel_size {experts}"
        yield Problem("TS-LINT-EPLB-SLOTS", "error", f"{key}.num_slots", message)
    if isinstance(balancer, str) and not os.path.isfile(balancer):
        message = f"{balancer} is not a file here; the engine stops with FileNotFoundError where it is missing"
        # certain where the engine runs here, not where the file is for a pod
        severity: Severity = "error" if deployment.here else "warning"
        yield Problem("TS-LINT-EPLB-FILE", severity, key, message)
    if tp and moe_tp and experts and moe_tp * experts != tp:
        message = (
            f"moe_tensor_parallel_size {moe_tp} x moe_expert_parallel_size {experts} must be {tp}"
        )
        yield Problem(
            "TS-LINT-COMBINATION", "error", "moe_tensor_parallel_size", message, "leave one out"
        )


def transfer_buffer(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """The buffer must hold the longest prompt that this side accepts, in whole blocks; 0: no copy is made. Prompts of
    any length up to max_seq_len are handed to a generation server."""
    key = "cache_transceiver_config.max_tokens_in_buffer"
    buffer, length = deployment.size(document, key), deployment.size(document, "max_seq_len")
    blocks = deployment.schema.behaviour("transfer_in_blocks")
    (unless, other), *_ = blocks["unless"].items()
    block = deployment.size(
        document, "kv_cache_config.tokens_per_block", blocks["tokens_per_block"]
    )

    def in_blocks(tokens: int) -> int:
        return -(-tokens // block) * block

    default = getattr(deployment.schema.fields.get(unless), "default", None)
    runtime = document.get(unless, default)
    if buffer % block and runtime != other:
        message = f"the buffer must hold whole blocks of {block} tokens: {buffer} stops the engine ({blocks['source']})"
        fix = partial(set_value, path=key, value=in_blocks(buffer))
        yield Problem("TS-LINT-TRANSFER-BLOCKS", "error", key, message, fix=fix)
    chunked = deployment.setting(document, "enable_chunked_prefill") is True
    generates = deployment.role_of(document) == "generation"
    if not chunked and not generates:  # longer prompts are refused
        length = min(length, deployment.size(document, "max_num_tokens", 8192))
    if 0 < buffer < length:
        message = f"prompts of {length} tokens are accepted and the transfer buffer holds {buffer}"
        fix = partial(set_value, path=key, value=in_blocks(length))
        # a generation server's max_seq_len holds the answer too, which nobody sends to it
        severity: Severity = "info" if generates and 2 * buffer >= length else "warning"
        yield Problem("TS-LINT-TRANSFER-BUFFER", severity, key, message, fix=fix)


def forced_acceptance(document: Document, deployment: Deployment) -> Iterator[Problem]:
    message = f"{FORCED_ACCEPTANCE} accepts drafts unseen: the throughput is made up and the text is corrupt"
    key = f"env_overrides.{FORCED_ACCEPTANCE}"
    if document.has(key):
        yield Problem(
            "TS-LINT-FORCED-ACCEPTANCE", "error", key, message, fix=partial(delete_key, path=key)
        )
    if deployment.environ.get(FORCED_ACCEPTANCE):
        variable = f"environment.{FORCED_ACCEPTANCE}"
        yield Problem("TS-LINT-FORCED-ACCEPTANCE", "error", variable, message)


RULES = (
    double_settings, token_budget, pool, capacity, cuda_graphs, moe, transfer_buffer, forced_acceptance,
)  # fmt: skip
