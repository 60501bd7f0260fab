"""Rules that need the target, the head, the GPU or the command line that a file is served with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from trtspec.checkpoint.heads.pairing import pair_problems
from trtspec.checkpoint.hub import known, same_checkpoint
from trtspec.planning.layout import format_refusal, layout_refusals
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.deployment import (
    MODEL_KEYS,
    SPEC,
    Deployment,
    Finding,
    decoding_type,
    eagle3,
    family,
    finding_at,
    method_of,
    name_problem,
    reports,
)
from trtspec.trtllm.document import Document, add_key, delete_key, set_value
from trtspec.trtllm.schema import gates

CAPTURE = eagle3().capture_key


def check_model(document: Document, deployment: Deployment) -> Iterator[Finding]:
    yield from _names(document, deployment)
    if deployment.setting(document, "reasoning_parser") == "kimi_k25":
        yield from _gated(document, deployment, "kimi_k25_parser", "TS-LINT-PARSER-TOO-NEW", "reasoning_parser")
    if deployment.target is not None:
        yield from _target_gates(document, deployment, deployment.target)
        yield from _parser(document, deployment, deployment.target)
        yield from _layout(document, deployment, deployment.target)
    if deployment.head is not None:
        yield from _head_gates(document, deployment, deployment.head)
        yield from _head_use(document, deployment)
        yield from _capture_layers(document, deployment, deployment.head)
        yield from _pair(document, deployment, deployment.head)
        if deployment.target is not None:
            yield from _reported(document, deployment, deployment.target, deployment.head)


def _names(document: Document, deployment: Deployment) -> Iterator[Finding]:
    """Checkpoints that only the file names."""
    for key in (*MODEL_KEYS, "model"):
        written = document.get(key)
        if isinstance(written, str) and written and (problem := name_problem(written, deployment.here)):
            yield finding_at(document, problem.code, problem.severity, key, problem.message, problem.remedy)


LAYOUT = {"tp_size": "tensor_parallel_size", "ep_size": "moe_expert_parallel_size"}


def _layout(document: Document, deployment: Deployment, target: ModelSpec) -> Iterator[Finding]:
    """Parallel sizes over which the target does not spread, as build-config refuses them."""
    ranks, experts = (deployment.setting(document, key) for key in LAYOUT.values())
    if not isinstance(ranks, int) or ranks < 1:
        return
    experts = experts if isinstance(experts, int) and experts > 0 else 1
    attention_dp = deployment.setting(document, "enable_attention_dp") is True
    for problem in layout_refusals(target, ranks, experts, attention_dp):
        key = LAYOUT.get(problem.where, "")
        yield finding_at(document, problem.code, problem.severity, key, problem.message, problem.remedy)


def _gated(
    document: Document, deployment: Deployment, name: str, code: str, key: str, otherwise: str = ""
) -> Iterator[Finding]:
    needed = gates()[name]
    if not deployment.schema.has(name):
        message = f"TensorRT-LLM {deployment.version} is too old for this: {needed.what} ({needed.since.interval})"
        yield finding_at(document, code, "error", key, message, f"use {needed.since.by} or later{otherwise}")


def _target_gates(document: Document, deployment: Deployment, target: ModelSpec) -> Iterator[Finding]:
    if family(target) == "kimi_k25":
        yield from _gated(document, deployment, "kimi_k25", "TS-LINT-MODEL-TOO-NEW", "")
        if document.get("guided_decoding_backend"):
            remedy, key = ", or leave guided_decoding_backend out", "guided_decoding_backend"
            yield from _gated(document, deployment, "kimi_k25_guided", "TS-LINT-GUIDED-KIMI", key, remedy)
    refused = format_refusal(target, deployment.gpu) if target.quant.format.is_grouped_integer else None
    if refused is not None:
        yield finding_at(document, "TS-LINT-INT4-TARGET", "error", "", refused.message, refused.remedy)
    if target.quant.format.is_fp4 and not any("self_attn" in item for item in target.quant.exclude):
        message = "the checkpoint quantizes attention; kv_b_proj in NVFP4 crashes the loader"
        yield finding_at(
            document, "TS-LINT-ATTENTION-QUANTIZED", "error", "", message, "quantize with a published policy"
        )
    if target.remote_code and document.get("trust_remote_code") is False:
        message = "Kimi's tokenizer and config classes are code of the checkpoint; without trust the load fails"
        fix = partial(delete_key, path="trust_remote_code")
        remedy = "pass --trust_remote_code instead"
        yield finding_at(document, "TS-LINT-REMOTE-CODE-OFF", "error", "trust_remote_code", message, remedy, fix)


def right_parser(target: ModelSpec, name: str) -> str | None:
    """The reasoning parser of a target. K2.5 and later open the thinking in the template (kimi_k25); K2-Thinking
    writes its own tag (kimi_k2); K2-Instruct does not think, and its config alone does not tell it from K2-Thinking.
    """
    entry = known(name)
    if entry is not None:
        return entry[1].get("reasoning_parser")
    return "kimi_k25" if family(target) == "kimi_k25" else None


def _parser(document: Document, deployment: Deployment, target: ModelSpec) -> Iterator[Finding]:
    written = deployment.setting(document, "reasoning_parser")
    right = right_parser(target, deployment.target_name)
    if written in (None, "auto", right) or (right is None and written == "kimi_k2"):
        return
    message = f"reasoning_parser {written} with {target.model_type}: reasoning lands in the answer, or the answer in "
    message += "the reasoning, without an error"
    stated = document.has("reasoning_parser") and right is not None
    fix = partial(set_value, path="reasoning_parser", value=right) if stated else None
    remedy = f"use {right or 'kimi_k2, or none for K2-Instruct'}"
    yield finding_at(document, "TS-LINT-WRONG-PARSER", "error", "reasoning_parser", message, remedy, fix)


def _head_gates(document: Document, deployment: Deployment, head: HeadSpec) -> Iterator[Finding]:
    if method_of(document) is not eagle3():
        return
    if head.attention == "mla":
        remedy = ", or an MHA head"
        yield from _gated(document, deployment, "mla_head", "TS-LINT-MLA-HEAD-OLD-ENGINE", SPEC, remedy)
    if head.eagle == "3.1":
        remedy = "; older ones ignore fc_norm and only acceptance shows it"
        yield from _gated(document, deployment, "eagle31", "TS-LINT-EAGLE31-OLD-ENGINE", SPEC, remedy)
        if head.attention == "mla":
            message = "the change that brought EAGLE-3.1 lists Kimi's 3.1 MLA head as not tested"
            yield finding_at(
                document, "TS-LINT-UNTESTED", "info", SPEC, message, "measure acceptance with `trtspec bench`"
            )
    if head.norm_before_residual:
        message = "the head's residual is the normalised state; this engine computes the plain one, without a word"
        yield finding_at(
            document, "TS-LINT-HEAD-FUNCTION", "error", SPEC, message, "train one without norm_before_residual"
        )
    if head.layer_prefix == "layers.0.":
        remedy = ", or `trtspec convert` the head"
        yield from _gated(document, deployment, "head_layers_prefix", "TS-LINT-HEAD-NAMES-OLD-ENGINE", SPEC, remedy)


def _reported(document: Document, deployment: Deployment, target: ModelSpec, head: HeadSpec) -> Iterator[Finding]:
    for report in reports(deployment.schema.version, target, head) if method_of(document) is eagle3() else ():
        message = f"{report['what']} on {report['version']} ({report['source']})"
        yield finding_at(document, "TS-LINT-REPORTED", "warning", SPEC, message, report["remedy"])


def _head_use(document: Document, deployment: Deployment) -> Iterator[Finding]:
    written = next((document.get(key) for key in MODEL_KEYS if document.get(key)), None)
    if decoding_type(document) is None:
        message = f"the head {deployment.head_name} is given and the file does not use it"
        yield finding_at(
            document, "TS-LINT-HEAD-UNUSED", "warning", "", message, "add speculative_config, or drop `head`"
        )
    elif written and deployment.head_name and not same_checkpoint(str(written), deployment.head_name):
        message = f"the file names the head {written}, the command {deployment.head_name}"
        key = next(key for key in MODEL_KEYS if document.has(key))
        yield finding_at(document, "TS-LINT-HEAD-DIFFERS", "warning", key, message, "name one head in both")
    head = deployment.head
    shared = head is not None and head.has_embed_tokens and head.target_hidden_size == head.hidden_size
    if shared and deployment.target is not None and method_of(document) is eagle3():
        message = "the engine shares the target's embedding and ignores the head's own copy"
        yield finding_at(document, "TS-LINT-HEAD-EMBEDDING", "info", SPEC, message, "harmless unless it was fine-tuned")


def expected_layers(target: ModelSpec | None, head: HeadSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(layers the head was trained on, layers the engine takes by default), or None when they cannot be known."""
    if target is None:
        return None
    default = target.default_aux_layers
    return (head.aux_layers or default, default)


def _capture_layers(document: Document, deployment: Deployment, head: HeadSpec) -> Iterator[Finding]:
    layers = expected_layers(deployment.target, head)
    method = method_of(document)
    if layers is None or method is None or not method.reads_target:
        return
    wanted, default = layers
    written = document.get(CAPTURE)
    trained = ", ".join(map(str, wanted))
    if written is None:
        if sorted(wanted) == sorted(default):
            return
        message = f"the head was trained on layers {trained}; the engine does not read that from the head and takes "
        message += f"{', '.join(map(str, default))}: acceptance near 0 on a healthy server"
        remedy = f"add `eagle3_layers_to_capture: [{trained}]`"
        fix = partial(add_key, path=CAPTURE, value=list(wanted))
        yield finding_at(document, "TS-LINT-CAPTURE-LAYERS-MISSING", "error", CAPTURE, message, remedy, fix)
    elif isinstance(written, list) and sorted(written) != sorted(wanted):
        message = f"eagle3_layers_to_capture {written} is not what the head was trained on ({trained})"
        if sorted(written) == sorted(layer + 1 for layer in wanted):
            message += "; these are layer inputs as vLLM counts them, one above the outputs that this engine counts"
        fix = partial(set_value, path=CAPTURE, value=list(wanted))
        remedy = f"write [{trained}]"
        yield finding_at(document, "TS-LINT-CAPTURE-LAYERS-WRONG", "error", CAPTURE, message, remedy, fix)


def _pair(document: Document, deployment: Deployment, head: HeadSpec) -> Iterator[Finding]:
    """What the head and the target must agree on; the problems of `trtspec inspect`, judged for this parallelism."""
    if deployment.target is None:
        return
    tp = deployment.setting(document, "tensor_parallel_size", 1)
    attention_dp = deployment.setting(document, "enable_attention_dp", False) is True
    ranks = tp if isinstance(tp, int) and not isinstance(tp, bool) and tp > 0 and not attention_dp else 1
    names = {"head_id": deployment.head_name or None, "target_id": deployment.target_name or None}
    for problem in pair_problems(head, deployment.target, tp_size=ranks, **names):
        remedy = f"{problem.where}: {problem.remedy}"
        yield finding_at(document, problem.code, problem.severity, SPEC, problem.message, remedy)


WORKSTATION = 12  # SM120 and SM121


def check_machine(document: Document, deployment: Deployment) -> Iterator[Finding]:
    if deployment.gpu is not None:
        yield from _gpu(document, deployment, deployment.gpu)
    if deployment.options is not None:
        yield from _command(document, deployment, deployment.options)


def capability(gpu: str) -> tuple[int, int]:
    """(10, 3) of "10.3"."""
    major, _, minor = gpu.partition(".")
    return int(major), int(minor or 0)


def _gpu(document: Document, deployment: Deployment, gpu: str) -> Iterator[Finding]:
    found = capability(gpu)
    if deployment.target is not None and deployment.target.quant.format.is_fp4:
        refused = format_refusal(deployment.target, gpu)
        if refused is not None:
            yield finding_at(document, "TS-LINT-GPU-NVFP4", "error", "", refused.message, refused.remedy)
    if found[0] == WORKSTATION and method_of(document) is eagle3():
        message = f"Eagle3 heads on compute capability {gpu} answered gibberish (TensorRT-LLM issue 11125, 1.2.0rc8)"
        remedy = "use B200, GB200, B300 or GB300, or no head"
        yield finding_at(document, "TS-LINT-GPU-EAGLE", "error", SPEC, message, remedy)


def right_tool_parser(deployment: Deployment) -> str | None:
    """Every Kimi-K2 writes its tool calls alike; the data say so for each published one."""
    entry = known(deployment.target_name) if deployment.target_name else None
    if entry is not None:
        return entry[1].get("tool_parser")
    return "kimi_k2" if deployment.target is not None else None


def check_tool_parser(deployment: Deployment, argv: Sequence[str]) -> Iterator[Finding]:
    """The tool parser of a command line of trtllm-serve."""
    right = right_tool_parser(deployment)
    written = next((value for flag, value in pairwise(argv) if flag == "--tool_parser"), None)
    if written in (None, "auto") or right is None or written == right:
        return
    message = f"--tool_parser {written}: tool calls of this model stay in the text, without an error"
    if written == "kimi_k25":
        message = "there is no tool parser kimi_k25; K2.5 and later write tool calls as K2 does"
    yield Finding("TS-LINT-WRONG-TOOL-PARSER", "error", "--tool_parser", message, f"pass --tool_parser {right}")


def _command(document: Document, deployment: Deployment, options: Mapping[str, Any]) -> Iterator[Finding]:
    yield from check_tool_parser(deployment, ("--tool_parser", options.get("tool_parser") or "auto"))
    target = deployment.target
    if target is None:
        return
    if target.remote_code and deployment.setting(document, "trust_remote_code") is None:
        message = "neither the command line nor the file trusts the code that Kimi's tokenizer and config classes are"
        remedy = "pass --trust_remote_code"
        yield Finding("TS-LINT-REMOTE-CODE-OFF", "error", "--trust_remote_code", message, remedy)
    if family(target) == "kimi_k25" and deployment.setting(document, "reasoning_parser") is None:
        message = "no reasoning parser: the thinking lands in the answer"
        yield Finding("TS-LINT-NO-PARSER", "warning", "--reasoning_parser", message, "pass --reasoning_parser kimi_k25")
