"""Rules that need to know the GPU, or the command line that a file is served with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from trtspec.checkpoint.known import known
from trtspec.planning.routes import format_refusal
from trtspec.trtllm.document import Document
from trtspec.trtllm.lint.finding import Deployment, Finding
from trtspec.trtllm.releases import family
from trtspec.trtllm.speculation import SPEC, eagle3, method_of

BLACKWELL = (10, 0)
WORKSTATION = 12  # SM120 and SM121
ONLY_BLACKWELL = ("use_cute_dsl_bf16_bmm", "use_cute_dsl_bf16_gemm")


def check_machine(document: Document, deployment: Deployment) -> Iterator[Finding]:
    if deployment.gpu is not None:
        yield from _gpu(document, deployment, deployment.gpu)
    if deployment.options is not None:
        yield from _command(document, deployment, deployment.options)


def _at(document: Document, code: str, severity: Any, key: str, message: str, remedy: str = "") -> Finding:
    return Finding(code, severity, key, message, remedy, document.line(key))


def capability(gpu: str) -> tuple[int, int]:
    """(10, 3) of "10.3"."""
    major, _, minor = gpu.partition(".")
    return int(major), int(minor or 0)


def _gpu(document: Document, deployment: Deployment, gpu: str) -> Iterator[Finding]:
    found = capability(gpu)
    if deployment.target is not None and deployment.target.quant.format.is_fp4:
        refused = format_refusal(deployment.target, gpu)
        if refused is not None:
            yield _at(document, "TS-LINT-GPU-NVFP4", "error", "", refused.message, refused.remedy)
    if found[0] == WORKSTATION and method_of(document) is eagle3():
        message = f"Eagle3 heads on compute capability {gpu} answered gibberish (TensorRT-LLM issue 11125, 1.2.0rc8)"
        remedy = "use B200, GB200, B300 or GB300, or no head"
        yield _at(document, "TS-LINT-GPU-EAGLE", "error", SPEC, message, remedy)
    for key in ONLY_BLACKWELL:
        if document.get(key) is True and found < BLACKWELL:
            yield _at(document, "TS-LINT-COMBINATION", "error", key, f"{key} needs Blackwell", "remove it")
    if document.get("moe_config.backend") == "TRTLLM" and found < BLACKWELL:
        message = f"the TRTLLM MoE kernels are for Blackwell; compute capability {gpu} has CUTLASS and DEEPGEMM"
        yield _at(document, "TS-LINT-COMBINATION", "error", "moe_config.backend", message, "write CUTLASS")


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
