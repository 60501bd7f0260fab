"""The installed engine's own verdict on a file: its pydantic classes, run in a process of their own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import MissingDependency, Problem, TrtspecError
from trtspec.trtllm.deployment import Finding
from trtspec.trtllm.document import Document

PACKAGE = "tensorrt_llm"
MARK = "trtspec-verdict:"  # the engine prints on stdout while it is imported
# Keys that trtllm-serve takes out before the class sees them are taken out here too. The tokenizer is not loaded.
JUDGE = """
import importlib, json, sys
text = sys.stdin.read()
import yaml
import tensorrt_llm
module = importlib.import_module("tensorrt_llm.llmapi.llm_args")
kind = getattr(module, "TorchLlmArgs", None) or module.LlmArgs
values = yaml.safe_load(text) or {}
values.pop("disagg_cluster", None)
if "hf_revision" in values:
    values.setdefault("revision", values.pop("hf_revision"))
if "build_config" not in kind.model_fields:
    values.pop("build_config", None)
values.setdefault("model", "checkpoint")
if "skip_tokenizer_init" in kind.model_fields:
    values["skip_tokenizer_init"] = True
errors = []
try:
    kind(**values)
except Exception as error:
    listed = getattr(error, "errors", None)
    if callable(listed):
        errors = [{"loc": [str(part) for part in item["loc"]], "message": item["msg"]} for item in listed()]
    else:
        errors = [{"loc": [], "message": f"{type(error).__name__}: {error}"}]
print(MARK + json.dumps({"version": tensorrt_llm.__version__, "errors": errors}))
"""


@dataclass(frozen=True)
class Verdict:
    """What the engine of `version` says; empty findings mean that its classes take the file."""

    version: str
    findings: tuple[Finding, ...]


def engine_importable() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def engine_python() -> str:
    """The interpreter whose libraries are the engine's own: the base's, where this environment only sees its packages
    (`--system-site-packages`) and has other versions of what the engine imports."""
    spec = importlib.util.find_spec(PACKAGE)
    where = Path(spec.origin) if spec is not None and spec.origin is not None else Path(sys.prefix)
    inherited = where.is_relative_to(sys.base_prefix) and not where.is_relative_to(sys.prefix)
    base = getattr(sys, "_base_executable", None)  # as venv itself finds it
    return base if inherited and base else sys.executable


def judge(document: Document, timeout: float = 600.0) -> Verdict:
    """Raises MissingDependency where the engine is not importable, TrtspecError when it does not answer."""
    if not engine_importable():
        remedy = "run this inside NVIDIA's TensorRT-LLM image, or leave --installed out"
        raise MissingDependency(f"{PACKAGE} is not importable here, so its own classes cannot judge the file", remedy)
    code = JUDGE.replace("MARK", repr(MARK))
    try:
        done = subprocess.run(
            [engine_python(), "-c", code],
            input="" if document.error else document.text,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TrtspecError(f"{PACKAGE} did not answer within {timeout:.0f} s", "leave --installed out") from None
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TrtspecError(f"the installed {PACKAGE} failed while it judged the file: {last}", "leave --installed out")
    answer = json.loads(line.removeprefix(MARK))
    return Verdict(answer["version"], tuple(_finding(document, item) for item in answer["errors"]))


def engine_problems(document: Document | str, file: str) -> list[Problem]:
    """What a launch learns from the engine's classes; nothing where it cannot be imported by this interpreter."""
    if not engine_importable():
        return []
    try:
        parsed = Document.parse(document) if isinstance(document, str) else document
        return [finding.problem(file) for finding in judge(parsed).findings]
    except TrtspecError as error:
        return [Problem("TS-SERVE-ENGINE-SILENT", "warning", PACKAGE, error.message, "start anyway and read its log")]


def _finding(document: Document, item: dict[str, Any]) -> Finding:
    key = _key(document, item["loc"])
    message = f"the installed engine's own class says: {item['message']}"
    return Finding("TS-LINT-ENGINE-REFUSES", "error", key, message, "correct this key", document.line(key))


def _key(document: Document, parts: list[str]) -> str:
    """The dotted path of a pydantic location, which also names the member of a union and the index of a list."""
    path = ""
    for part in parts:
        longer = f"{path}.{part}" if path else part
        if document.has(longer):
            path = longer
    return path or ".".join(parts)
