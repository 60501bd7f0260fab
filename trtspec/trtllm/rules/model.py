"""Rules that need the target, the head, the GPU or the command line that a file is served with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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
)
from trtspec.trtllm.document import Document, add_key, set_value

CAPTURE = eagle3().capture_key


def check_model(document: Document, deployment: Deployment) -> Iterator[Finding]:
    yield from _names(document, deployment)
    yield from check_tool_parser(deployment, (deployment.options or {}).get("tool_parser"))
    if deployment.target is not None:
        yield from _format(document, deployment, deployment.target)
        yield from _parser(document, deployment, deployment.target)
        yield from _layout(document, deployment, deployment.target)
    if deployment.head is not None:
        yield from _head_use(document, deployment)
        yield from _capture_layers(document, deployment, deployment.head)
        yield from _pair(document, deployment, deployment.head)


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


def _format(document: Document, deployment: Deployment, target: ModelSpec) -> Iterator[Finding]:
    """Weights that TensorRT-LLM does not load on this GPU."""
    refused = format_refusal(target, deployment.gpu)
    codes = {"TS-ROUTE-INT4": "TS-LINT-INT4-TARGET", "TS-ROUTE-GPU": "TS-LINT-GPU-NVFP4"}
    if refused is not None and (target.quant.format.is_fp4 or target.quant.format.is_grouped_integer):
        yield finding_at(document, codes[refused.code], "error", "", refused.message, refused.remedy)


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


def check_tool_parser(deployment: Deployment, written: str | None) -> Iterator[Finding]:
    """`written`: the tool parser of the command line, None where there is none or it is not known."""
    # every Kimi-K2 writes its tool calls alike; the data say so for each published one
    entry = known(deployment.target_name) if deployment.target_name else None
    right = entry[1].get("tool_parser") if entry is not None else "kimi_k2" if deployment.target is not None else None
    if written in (None, "auto") or right is None or written == right:
        return
    message = f"--tool_parser {written}: tool calls of this model stay in the text, without an error"
    if written == "kimi_k25":
        message = "there is no tool parser kimi_k25; K2.5 and later write tool calls as K2 does"
    yield Finding("TS-LINT-WRONG-TOOL-PARSER", "error", "--tool_parser", message, f"pass --tool_parser {right}")
