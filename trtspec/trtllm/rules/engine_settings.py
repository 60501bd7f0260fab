"""Rules about the settings of the engine around the model.

They judge the token budget, CUDA graphs, MoE kernels, the KV cache, the transfer of caches and the
environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from trtspec.data_files import gpu_names
from trtspec.errors import Problem, Severity
from trtspec.planning.layout import kernel_refusal
from trtspec.specs import gpu_spec
from trtspec.trtllm.deployment import Deployment, draft_length, step_tokens
from trtspec.trtllm.document import Document, add_key, delete_key, set_value

BLOCK_TOKENS = 32  # tokens of one block of the KV cache, the engine's default
DEFAULT_GRAPH_BATCH = 128  # largest batch with CUDA graphs, the engine's default
FORCED_ACCEPTANCE = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


def double_settings(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Yields a problem for each setting that is both in the file and on the command line.

    Two different values are always an error, because their precedence changed between releases.
    """
    precedence = deployment.schema.behaviour("precedence")
    winner = "file" if precedence["winner"] == "yaml" else "option"
    for key, option in deployment.argv.items():
        if not document.has(key):
            continue
        severity: Severity = "error"
        message = f"{key} is in the file and on the command line"
        if document.get(key) == option:
            severity = "info"
        else:
            message += f"; in {deployment.version} the {winner} wins, in other versions the other"
        fix = partial(delete_key, path=key)
        yield Problem("TS-LINT-SET-TWICE", severity, key, message, fix=fix)


def token_budget(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks max_num_tokens and max_seq_len.

    max_num_tokens must hold one decode step of a full batch, and the longest prompt. max_seq_len
    must not exceed the model's positions.
    """
    batch = deployment.size(document, "max_batch_size")
    max_tokens = deployment.size(document, "max_num_tokens", 8192)  # the engine's value for null
    tokens_per_request = step_tokens(document)
    needed = batch * tokens_per_request
    if max_tokens < needed:
        message = f"max_num_tokens {max_tokens} does not hold one step of a full batch: "
        message += f"{batch} x {tokens_per_request}"
        fix = None
        # without drafts there is no fix, because max_batch_size can as well be wrong
        if draft_length(document) and document.has("max_num_tokens"):
            fix = partial(set_value, path="max_num_tokens", value=needed)
        yield Problem("TS-LINT-TOKEN-BUDGET", "warning", "max_num_tokens", message, fix=fix)
    length = deployment.size(document, "max_seq_len")  # 0 if it is not set
    limit = deployment.target.max_position_embeddings if deployment.target else None
    if limit and length > limit:
        message = f"max_seq_len {length} is beyond the model's {limit} positions"
        yield Problem("TS-LINT-SEQUENCE-TOO-LONG", "error", "max_seq_len", message)
    chunked = deployment.setting(document, "enable_chunked_prefill")
    role = deployment.role_of(document)
    if length > max_tokens and not chunked and role != "generation":
        message = f"prompts longer than max_num_tokens ({max_tokens}) are refused without "
        message += f"chunked prefill, and max_seq_len allows {length}"
        severity: Severity = "warning"
        # a generation server prefills nothing, and a file alone does not show on which side it runs
        if not role and document.get("cache_transceiver_config.backend"):
            severity = "info"
        beside = ("max_num_tokens",)
        yield Problem("TS-LINT-LONG-PROMPTS", severity, "max_seq_len", message, beside=beside)


def pool(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the KV cache holds one request of the longest length that is served.

    Without a target and without max_seq_len, the cache must hold one block.
    """
    target = deployment.target
    longest = target.max_position_embeddings if target else BLOCK_TOKENS
    request = deployment.size(document, "max_seq_len", longest)
    pools = {"max_tokens": document.get("kv_cache_config.max_tokens")}
    if deployment.setting(document, "kv_cache_config.free_gpu_memory_fraction") == 0:
        pools["free_gpu_memory_fraction"] = 0
    for name, tokens in pools.items():
        if isinstance(tokens, int) and tokens < request:
            message = f"the KV cache holds {max(tokens, 0):,} tokens "
            message += f"and one request may have {request:,}"
            # without max_seq_len the length is the model's, which few requests reach
            certain = tokens < deployment.size(document, "max_seq_len", BLOCK_TOKENS)
            severity: Severity = "error" if certain else "warning"
            yield Problem("TS-LINT-POOL", severity, f"kv_cache_config.{name}", message)


def capacity(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the KV cache of this GPU holds a full batch of requests of full length.

    The figure is the one that build-config writes into its file.
    """
    length = deployment.size(document, "max_seq_len")
    target = deployment.target
    gpu = deployment.gpu_name
    if target is None or gpu not in gpu_names() or not length:
        return
    held, batch = deployment.held_requests(document, target, gpu_spec(gpu))
    if held >= batch:
        return
    message = f"the cache holds {held:,} requests of {length:,} tokens, "
    message += f"fewer than a full batch of {batch:,} "
    message += "(`trtspec plan`); a request without `max_tokens` reserves that length "
    message += "(TensorRT-LLM issue 9412)"
    yield Problem("TS-LINT-CAPACITY", "info" if held else "error", "max_seq_len", message)


def cuda_graphs(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that CUDA graphs cover a full batch, and that their two size settings agree."""
    key = "cuda_graph_config"
    list_key = f"{key}.batch_sizes"
    limit_key = f"{key}.max_batch_size"
    sizes = document.get(list_key)
    limit = deployment.size(document, limit_key)
    covered = limit or DEFAULT_GRAPH_BATCH  # largest batch that has a graph
    is_list = bool(sizes) and isinstance(sizes, list)
    has_sizes = is_list and all(isinstance(size, int) for size in sizes)
    if has_sizes:
        covered = max(sizes)
        if limit and limit != covered:
            message = f"max_batch_size {limit} and the largest of batch_sizes, {covered}, "
            message += "must be equal"
            fix = partial(delete_key, path=limit_key)
            yield Problem("TS-LINT-GRAPH-SIZES", "error", limit_key, message, fix=fix)
    batch = deployment.size(document, "max_batch_size")
    is_off = document.has(key) and document.get(key) is None  # null turns CUDA graphs off
    if batch > covered and not is_off:
        message = f"CUDA graphs end at batch {covered} and max_batch_size is {batch}: "
        message += "larger batches run without graphs"
        path = limit_key
        value: Any = batch
        if has_sizes:
            path = list_key
            value = [*sizes, batch]
        edit = set_value if document.has(path) else add_key
        fix = partial(edit, path=path, value=value)
        yield Problem("TS-LINT-GRAPHS-TOO-SMALL", "warning", key, message, fix=fix)


def moe(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks the MoE kernels, the experts' load balancer and the parallel sizes of expert_ranks."""
    key = "moe_config.backend"
    target = deployment.target
    backend = document.get(key, "AUTO")
    format = target.quant.format if target is not None else None
    if isinstance(backend, str):
        refusal = kernel_refusal(backend, format, deployment.gpu)
        if refusal is not None:
            yield Problem("TS-LINT-MOE-KERNEL", "error", key, refusal)
    ranks = deployment.size(document, "tensor_parallel_size")
    ranks_per_expert = deployment.size(document, "moe_tensor_parallel_size")
    expert_ranks = deployment.size(document, "moe_expert_parallel_size")
    key = "moe_config.load_balancer"
    balancer = document.get(key)
    slots = balancer.get("num_slots") if isinstance(balancer, dict) else None
    if isinstance(slots, int) and expert_ranks and slots % expert_ranks:
        message = f"num_slots {slots} does not divide by moe_expert_parallel_size {expert_ranks}"
        yield Problem("TS-LINT-EPLB-SLOTS", "error", f"{key}.num_slots", message)
    if isinstance(balancer, str) and not os.path.isfile(balancer):
        message = f"{balancer} is not a file here; "
        message += "the engine stops with FileNotFoundError where it is missing"
        # certain only if the engine runs on this machine, not in a pod
        severity: Severity = "error" if deployment.here else "warning"
        yield Problem("TS-LINT-EPLB-FILE", severity, key, message)
    if ranks and ranks_per_expert and expert_ranks and ranks_per_expert * expert_ranks != ranks:
        key = "moe_tensor_parallel_size"
        message = (
            f"{key} {ranks_per_expert} x moe_expert_parallel_size {expert_ranks} must be {ranks}"
        )
        yield Problem("TS-LINT-COMBINATION", "error", key, message, "leave one out")


def transfer_buffer(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the transfer buffer holds the longest prompt that this server accepts.

    The buffer must hold whole blocks of the KV cache. A generation server gets prompts of any
    length up to max_seq_len. A buffer of 0 tokens is not judged, because caches are then not
    copied.
    """
    key = "cache_transceiver_config.max_tokens_in_buffer"
    buffer = deployment.size(document, key)
    length = deployment.size(document, "max_seq_len")
    blocks = deployment.schema.behaviour("transfer_in_blocks")
    # the setting whose value makes the engine transfer without whole blocks
    (runtime_key, exempt), *_ = blocks["unless"].items()
    block = deployment.size(
        document, "kv_cache_config.tokens_per_block", blocks["tokens_per_block"]
    )

    def in_blocks(tokens: int) -> int:
        """Tokens rounded up to whole blocks."""
        return -(-tokens // block) * block

    default = getattr(deployment.schema.fields.get(runtime_key), "default", None)
    runtime = document.get(runtime_key, default)
    if buffer % block and runtime != exempt:
        message = f"the buffer must hold whole blocks of {block} tokens: "
        message += f"{buffer} stops the engine ({blocks['source']})"
        fix = partial(set_value, path=key, value=in_blocks(buffer))
        yield Problem("TS-LINT-TRANSFER-BLOCKS", "error", key, message, fix=fix)
    chunked = deployment.setting(document, "enable_chunked_prefill") is True
    generates = deployment.role_of(document) == "generation"
    if not chunked and not generates:  # because longer prompts are refused
        length = min(length, deployment.size(document, "max_num_tokens", 8192))
    if 0 < buffer < length:
        message = f"prompts of {length} tokens are accepted and the transfer buffer holds {buffer}"
        fix = partial(set_value, path=key, value=in_blocks(length))
        # a generation server's max_seq_len counts the answer too, which the buffer never holds
        severity: Severity = "info" if generates and 2 * buffer >= length else "warning"
        yield Problem("TS-LINT-TRANSFER-BUFFER", severity, key, message, fix=fix)


def forced_acceptance(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that no environment variable makes the engine accept drafts without verification."""
    message = f"{FORCED_ACCEPTANCE} accepts drafts unseen: "
    message += "the throughput is made up and the text is corrupt"
    key = f"env_overrides.{FORCED_ACCEPTANCE}"
    if document.has(key):
        fix = partial(delete_key, path=key)
        yield Problem("TS-LINT-FORCED-ACCEPTANCE", "error", key, message, fix=fix)
    if deployment.environ.get(FORCED_ACCEPTANCE):
        variable = f"environment.{FORCED_ACCEPTANCE}"
        yield Problem("TS-LINT-FORCED-ACCEPTANCE", "error", variable, message)


RULES = (
    double_settings, token_budget, pool, capacity,
    cuda_graphs, moe, transfer_buffer, forced_acceptance,
)  # fmt: skip
