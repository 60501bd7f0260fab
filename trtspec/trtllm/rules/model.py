"""Rules that need the target, the head, the GPU or the command line that a file is served with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from trtspec.checkpoint import published
from trtspec.checkpoint.heads.pairing import pair_problems
from trtspec.checkpoint.hub import canonical_id
from trtspec.errors import Problem
from trtspec.planning.layout import format_refusal, layout_refusals
from trtspec.trtllm.deployment import (
    MODEL_KEYS,
    SPEC,
    Deployment,
    decoding_type,
    eagle3,
    head_in,
    method_of,
    name_problem,
)
from trtspec.trtllm.document import Document, add_key, set_value

ENGINE = "trtllm"  # of the parsers of a family
CAPTURE = f"{SPEC}.{eagle3().capture}"


def names(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks the names of checkpoints in the file."""
    for key in (*MODEL_KEYS, "model"):
        name = document.get(key)
        if isinstance(name, str) and name:
            problem = name_problem(name, deployment.here)
            if problem:
                yield replace(problem, key=key)


LAYOUT = {"tp_size": "tensor_parallel_size", "ep_size": "moe_expert_parallel_size"}


def layout(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the target spreads over the parallel sizes, as build-config does."""
    ranks = deployment.size(document, LAYOUT["tp_size"])
    target = deployment.target
    if not ranks or target is None:
        return
    attention_dp = deployment.setting(document, "enable_attention_dp") is True
    expert_ranks = deployment.size(document, LAYOUT["ep_size"], 1)
    for problem in layout_refusals(target, ranks, expert_ranks, attention_dp):
        yield replace(problem, key=LAYOUT.get(problem.key, ""))


def weight_format(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that TensorRT-LLM loads the target's weights on this GPU."""
    if deployment.target is None:
        return
    refusal = format_refusal(deployment.target, deployment.gpu)
    if refusal is not None:
        yield replace(refusal, key="")


def reasoning_parser(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the reasoning parser is the target's."""
    key = "reasoning_parser"
    target = deployment.target
    written = deployment.setting(document, key)
    if target is None or written in (None, "auto"):
        return
    right = published.reasoning_parser(target.family, deployment.target_name, ENGINE)
    if written == (right or target.family.reasoning_parsers[ENGINE]):
        return
    message = f"reasoning_parser {written} with {target.model_type}: "
    message += "reasoning lands in the answer, or the answer in the reasoning, without an error"
    fix = None
    if document.has(key) and right is not None:
        fix = partial(set_value, path=key, value=right)
    yield Problem("TS-LINT-WRONG-PARSER", "error", key, message, fix=fix)


def tool_parser(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the tool parser on the command line is the target's."""
    key = "--tool_parser"
    target = deployment.target
    written = (deployment.options or {}).get("tool_parser")
    if target is None:
        return
    right = target.family.tool_parser
    if written in (None, "auto", right):
        return
    message = f"{key} {written}: tool calls of this model stay in the text, without an error"
    yield Problem("TS-LINT-WRONG-TOOL-PARSER", "error", key, message, f"pass {key} {right}")


def head_use(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the file and the command name the same head."""
    written = head_in(document)
    given = deployment.head_name
    if (
        written
        and given
        and decoding_type(document)
        and canonical_id(written) != canonical_id(given)
    ):
        key = next(key for key in MODEL_KEYS if document.has(key))
        message = f"the file names the head {written}, the command {given}"
        yield Problem("TS-LINT-HEAD-DIFFERS", "warning", key, message)


def capture_layers(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks that the engine captures the layers on which the head was trained."""
    head = deployment.head
    target = deployment.target
    method = method_of(document)
    if head is None or target is None or method is None or not method.reads_target:
        return
    default = target.default_aux_layers
    written = document.get(CAPTURE)
    wanted = head.aux_layers or default
    trained = ", ".join(map(str, wanted))
    if written is None and sorted(wanted) != sorted(default):
        captured = ", ".join(map(str, default))
        message = f"the head was trained on layers {trained}; "
        message += f"the engine does not read that from the head and takes {captured}: "
        message += "acceptance near 0 on a healthy server"
        remedy = f"add `eagle3_layers_to_capture: [{trained}]`"
        fix = partial(add_key, path=CAPTURE, value=list(wanted))
        yield Problem("TS-LINT-CAPTURE-LAYERS-MISSING", "error", CAPTURE, message, remedy, fix)
    elif isinstance(written, list) and sorted(written) != sorted(wanted):
        message = f"eagle3_layers_to_capture {written} is not what the head was trained on "
        message += f"({trained})"
        inputs = [layer + 1 for layer in wanted]
        if sorted(written) == sorted(inputs):
            message += "; these are layer inputs as vLLM counts them, "
            message += "one above the outputs that this engine counts"
        remedy = f"write [{trained}]"
        fix = partial(set_value, path=CAPTURE, value=list(wanted))
        yield Problem("TS-LINT-CAPTURE-LAYERS-WRONG", "error", CAPTURE, message, remedy, fix)


def pair(document: Document, deployment: Deployment) -> Iterator[Problem]:
    """Checks the head against the target as `trtspec inspect` does, for this parallelism."""
    if deployment.head is None or deployment.target is None:
        return
    attention_dp = deployment.setting(document, "enable_attention_dp") is True
    ranks = 1 if attention_dp else deployment.size(document, "tensor_parallel_size", 1)
    ids = {"head_id": deployment.head_name or None, "target_id": deployment.target_name or None}
    for problem in pair_problems(deployment.head, deployment.target, tp_size=ranks, **ids):
        yield replace(problem, key=SPEC, remedy=f"{problem.key}: {problem.remedy}")


RULES = (
    names, layout, weight_format, reasoning_parser, tool_parser, head_use, capture_layers, pair,
)  # fmt: skip
