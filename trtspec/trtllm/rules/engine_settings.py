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
from trtspec.trtllm.deployment import DEFAULT_TOKENS, Deployment, draft_length, step_tokens
from trtspec.trtllm.document import Document, add_key, delete_key, set_value

BLOCK_TOKENS = 32  # tokens of one block of the KV cache, the engine's default
DEFAULT_GRAPH_BATCH = 128  # largest batch with CUDA graphs, the engine's default
BUFFER = "cache_transceiver_config.max_tokens_in_buffer"
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
    """Checks that max_num_tokens holds one decode step of a full batch."""
    batch = deployment.size(document, "max_batch_size")
    max_tokens = deployment.size(document, "max_num_tokens", DEFAULT_TOKENS)
    tokens_per_request = step_tokens(document)
    needed = batch * tokens_per_request
    if max_tokens < needed:
        message = (
            f"max_num_tokens {max_tokens} does not hold one step of a full batch: "
            f"{batch} x {tokens_per_request}"
        )
        fix = None
        # without drafts there is no fix, because max_batch_size can as well be wrong
        if draft_length(document) and document.has("max_num_tokens"):
            fix = partial(set_value, path="max_num_tokens", value=needed)
        yield Problem("TS-LINT-TOKEN-BUDGET", "warning", "max_num_tokens", message, fix=fix)


def sequence_length(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that max_seq_len does not exceed the model's positions."""
    length = deployment.size(document, "max_seq_len")  # 0 if it is not set
    limit = deployment.target.max_position_embeddings if deployment.target else None
    if limit and length > limit:
        message = f"max_seq_len {length} is beyond the model's {limit} positions"
        yield Problem("TS-LINT-SEQUENCE-TOO-LONG", "error", "max_seq_len", message)


def long_prompts(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that max_num_tokens holds the longest prompt, unless prompts are chunked."""
    max_tokens = deployment.size(document, "max_num_tokens", DEFAULT_TOKENS)
    length = deployment.size(document, "max_seq_len")  # 0 if it is not set
    chunked = deployment.setting(document, "enable_chunked_prefill")
    role = deployment.role_of(document)
    if length > max_tokens and not chunked and role != "generation":
        message = (
            f"prompts longer than max_num_tokens ({max_tokens}) are refused without "
            f"chunked prefill, and max_seq_len allows {length}"
        )
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
            message = (
                f"the KV cache holds {max(tokens, 0):,} tokens and one request may have {request:,}"
            )
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
    message = (
        f"the cache holds {held:,} requests of {length:,} tokens, "
        f"fewer than a full batch of {batch:,} "
        "(`trtspec plan`); a request without `max_tokens` reserves that length "
        "(TensorRT-LLM issue 9412)"
    )
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
            message = (
                f"max_batch_size {limit} and the largest of batch_sizes, {covered}, must be equal"
            )
            fix = partial(delete_key, path=limit_key)
            yield Problem("TS-LINT-GRAPH-SIZES", "error", limit_key, message, fix=fix)
    batch = deployment.size(document, "max_batch_size")
    is_off = document.has(key) and document.get(key) is None  # null turns CUDA graphs off
    if batch > covered and not is_off:
        message = (
            f"CUDA graphs end at batch {covered} and max_batch_size is {batch}: "
            "larger batches run without graphs"
        )
        path = limit_key
        value: Any = batch
        if has_sizes:
            path = list_key
            value = [*sizes, batch]
        edit = set_value if document.has(path) else add_key
        fix = partial(edit, path=path, value=value)
        yield Problem("TS-LINT-GRAPHS-TOO-SMALL", "warning", key, message, fix=fix)


def moe_kernel(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the file's MoE kernel runs the target's experts on this GPU."""
    key = "moe_config.backend"
    target = deployment.target
    backend = document.get(key, "AUTO")
    format = target.quant.format if target is not None else None
    if isinstance(backend, str):
        refusal = kernel_refusal(backend, format, deployment.gpu)
        if refusal is not None:
            yield Problem("TS-LINT-MOE-KERNEL", "error", key, refusal)


def load_balancer(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks the experts' load balancer: its number of slots, or the file that describes it."""
    expert_ranks = deployment.size(document, "moe_expert_parallel_size")
    key = "moe_config.load_balancer"
    balancer = document.get(key)
    slots = balancer.get("num_slots") if isinstance(balancer, dict) else None
    if isinstance(slots, int) and expert_ranks and slots % expert_ranks:
        message = f"num_slots {slots} does not divide by moe_expert_parallel_size {expert_ranks}"
        yield Problem("TS-LINT-EPLB-SLOTS", "error", f"{key}.num_slots", message)
    if isinstance(balancer, str) and not os.path.isfile(balancer):
        message = (
            f"{balancer} is not a file here; "
            "the engine stops with FileNotFoundError where it is missing"
        )
        # certain only if the engine runs on this machine, not in a pod
        severity: Severity = "error" if deployment.here else "warning"
        yield Problem("TS-LINT-EPLB-FILE", severity, key, message)


def expert_sizes(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the parallel sizes of experts multiply to the number of ranks."""
    ranks = deployment.size(document, "tensor_parallel_size")
    ranks_per_expert = deployment.size(document, "moe_tensor_parallel_size")
    expert_ranks = deployment.size(document, "moe_expert_parallel_size")
    if ranks and ranks_per_expert and expert_ranks and ranks_per_expert * expert_ranks != ranks:
        key = "moe_tensor_parallel_size"
        message = (
            f"{key} {ranks_per_expert} x moe_expert_parallel_size {expert_ranks} must be {ranks}"
        )
        yield Problem("TS-LINT-COMBINATION", "error", key, message, "leave one out")


def transfer_blocks(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the transfer buffer holds whole blocks of the KV cache."""
    buffer = deployment.size(document, BUFFER)
    block = _block_tokens(document, deployment)
    blocks = deployment.schema.behaviour("transfer_in_blocks")
    # the setting whose value makes the engine transfer without whole blocks
    (runtime_key, exempt), *_ = blocks["unless"].items()
    default = getattr(deployment.schema.fields.get(runtime_key), "default", None)
    runtime = document.get(runtime_key, default)
    if buffer % block and runtime != exempt:
        message = (
            f"the buffer must hold whole blocks of {block} tokens: "
            f"{buffer} stops the engine ({blocks['source']})"
        )
        fix = partial(set_value, path=BUFFER, value=_in_blocks(buffer, block))
        yield Problem("TS-LINT-TRANSFER-BLOCKS", "error", BUFFER, message, fix=fix)


def transfer_buffer(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the transfer buffer holds the longest prompt that this server accepts.

    A generation server gets prompts of any length up to max_seq_len. A buffer of 0 tokens is not
    judged, because caches are not copied without a buffer.
    """
    buffer = deployment.size(document, BUFFER)
    length = deployment.size(document, "max_seq_len")
    chunked = deployment.setting(document, "enable_chunked_prefill") is True
    generates = deployment.role_of(document) == "generation"
    if not chunked and not generates:  # because longer prompts are refused
        length = min(length, deployment.size(document, "max_num_tokens", DEFAULT_TOKENS))
    if 0 < buffer < length:
        message = f"prompts of {length} tokens are accepted and the transfer buffer holds {buffer}"
        block = _block_tokens(document, deployment)
        fix = partial(set_value, path=BUFFER, value=_in_blocks(length, block))
        # a generation server's max_seq_len counts the answer too, which the buffer never holds
        severity: Severity = "info" if generates and 2 * buffer >= length else "warning"
        yield Problem("TS-LINT-TRANSFER-BUFFER", severity, BUFFER, message, fix=fix)


def _block_tokens(document: Document, deployment: Deployment) -> int:
    """Number of tokens in one block of the KV cache, by default the release's number."""
    default = deployment.schema.behaviour("transfer_in_blocks")["tokens_per_block"]
    return deployment.size(document, "kv_cache_config.tokens_per_block", default)


def _in_blocks(tokens: int, block: int) -> int:
    """Number of tokens rounded up to whole blocks of `block` tokens."""
    return -(-tokens // block) * block


def forced_acceptance(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that no environment variable makes the engine accept drafts without verification."""
    message = (
        f"{FORCED_ACCEPTANCE} accepts drafts unseen: "
        "the throughput is made up and the text is corrupt"
    )
    key = f"env_overrides.{FORCED_ACCEPTANCE}"
    if document.has(key):
        fix = partial(delete_key, path=key)
        yield Problem("TS-LINT-FORCED-ACCEPTANCE", "error", key, message, fix=fix)
    if deployment.environ.get(FORCED_ACCEPTANCE):
        variable = f"environment.{FORCED_ACCEPTANCE}"
        yield Problem("TS-LINT-FORCED-ACCEPTANCE", "error", variable, message)


RULES = (
    double_settings, token_budget, sequence_length, long_prompts, pool, capacity, cuda_graphs,
    moe_kernel, load_balancer, expert_sizes, transfer_blocks, transfer_buffer, forced_acceptance,
)  # fmt: skip
