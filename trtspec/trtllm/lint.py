"""All problems of an engine YAML for one version, its corrected text, and the engine's verdict.

The verdict is by the installed engine's pydantic classes, run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import ValidationError

from trtspec.errors import SEVERITIES, MissingDependency, Problem, TrtspecError
from trtspec.trtllm.carriers import FRONT_KEYS
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.document import CannotEdit, Document, same
from trtspec.trtllm.rules import engine_settings, model, speculation
from trtspec.trtllm.rules.from_data import check_rows
from trtspec.trtllm.rules.keys import VALUE_CODES, as_engine, check_keys, check_value, intended_keys
from trtspec.trtllm.schema import Schema, releases, renames

RULES = (*speculation.RULES, *model.RULES, *engine_settings.RULES, check_rows)
# a file with such a key may have under that name a setting that a rule misses, so no key is added
UNSETTLED = {
    "TS-LINT-UNKNOWN-KEY",
    "TS-LINT-KEY-UNCERTAIN",
    "TS-LINT-RENAMED-KEY",
    "TS-LINT-REMOVED-KEY",
    "TS-LINT-DOTTED-KEY",
}
REFUSED_VALUE = {*VALUE_CODES.values()}
ABOUT_KEYS = {*UNSETTLED, *REFUSED_VALUE, "TS-LINT-MISSING-KEY", "TS-LINT-WRONG-VARIANT"}


def lint(document: Document | str, deployment: Deployment) -> list[Problem]:
    """Every finding about a file, errors first, then by line."""
    if isinstance(document, str):
        document = Document.parse(document)
    problem = _unjudged(document)
    if problem is not None:
        return [document.placed(problem)]
    placed = []
    for finding in _findings(document, deployment):
        keys = (finding.key, *finding.beside)
        if not document.hides(keys, about_keys=finding.code in UNSETTLED):
            placed.append(document.placed(finding))
    return sorted(placed, key=lambda f: (SEVERITIES.index(f.severity), f.line or 0, f.key, f.code))


def _unjudged(document: Document) -> Problem | None:
    """The only problem of a document that is no engine file, None for an engine file."""
    error = document.error
    if error:
        code = "TS-LINT-LIMIT" if error.beyond else "TS-LINT-SYNTAX"
        return Problem(code, "error", "", error.message, line=error.line, column=error.column)
    if document.value is not None and not isinstance(document.value, dict):
        message = f"the file holds {type(document.value).__name__}, not a mapping of options"
        remedy = "write `key: value` lines"
        return Problem("TS-LINT-SYNTAX", "error", "", message, remedy, line=1)
    if set(document.mapping) >= FRONT_KEYS:
        message = "this is the front of disaggregated servers, "
        message += "which has no engine settings to judge"
        return Problem("TS-LINT-FRONT-FILE", "info", "", message)
    return None


def _findings(document: Document, deployment: Deployment) -> list[Problem]:
    """Judges keys and values as they are written, then the values as the engine converts them.

    No rule judges a key whose value the engine refuses, nor keys directly below it.
    """
    schema = deployment.schema
    seen = as_the_engine_sees_it(document, schema)
    findings = [*check_keys(document, schema)]
    newest = releases()[-1]
    if schema.version > newest:
        message = f"TensorRT-LLM {schema.version} is newer than "
        message += f"the newest version known here, {newest}"
        findings.append(Problem("TS-LINT-VERSION-NEWER", "warning", "", message))
    refused = {finding.key for finding in findings if finding.code in REFUSED_VALUE}
    refused.update(intended_keys(document, schema).values())
    for rule in RULES:
        for finding in rule(seen, deployment):
            current = _current(finding, schema)
            parent = current.key.rpartition(".")[0]
            if refused.isdisjoint((parent, current.key, *current.beside)):
                findings.append(current)
    if deployment.setting(document, "backend") != "_autodeploy":
        return findings
    message = "AutoDeploy reads the file by a class of its own, so keys and values are not judged"
    autodeploy = Problem("TS-LINT-AUTODEPLOY", "info", "backend", message)
    return [autodeploy, *(finding for finding in findings if finding.code not in ABOUT_KEYS)]


def as_the_engine_sees_it(document: Document, schema: Schema) -> Document:
    """The document with every value as the engine converts it.

    A value that the engine refuses stays as written. It is None if its type is wrong, because no
    rule could compute with it. A key that a release renamed is also there under its old name,
    which rules know. A refused key is also there under the name that it means.
    """

    def convert(path: str, value: Any) -> Any:
        field = schema.fields.get(path)
        if field is None:
            return value
        try:
            return as_engine(field, value)
        except ValidationError:
            refused, *_ = check_value(field, value) or ("",)
            return None if refused == "type" else value

    seen = document.converted(convert)
    names = {old: schema.current(old) for old in renames()}
    names |= {path: written for written, path in intended_keys(document, schema).items()}
    entries = {}
    for path, name in names.items():
        for written, entry in seen.entries.items():
            if written == name or written.startswith(f"{name}."):
                inner = written[len(name) :]
                entries[f"{path}{inner}"] = entry
    return replace(seen, entries={**entries, **seen.entries})


def _current(finding: Problem, schema: Schema) -> Problem:
    """A rule's finding and its fix with the names of keys in this release."""
    fix = finding.fix
    if isinstance(fix, partial) and "path" in fix.keywords:
        path = schema.current(fix.keywords["path"])
        fix = partial(fix.func, **{**fix.keywords, "path": path})
    return replace(finding, key=schema.current(finding.key), fix=fix)


def fix(
    document: Document, deployment: Deployment, findings: list[Problem]
) -> tuple[Document, list[Problem]]:
    """(the corrected document, the findings that were corrected, in order).

    Applies only fixes that make the file better and change nothing else. A second run is a no-op.
    `findings`: from `lint`.
    """
    corrected: list[Problem] = []
    while True:
        for finding in findings:
            better = _corrected(document, findings, finding, deployment)
            if better is not None:
                document, findings = better
                corrected.append(finding)
                break
        else:
            return document, corrected


def _corrected(
    document: Document, findings: list[Problem], finding: Problem, deployment: Deployment
) -> tuple[Document, list[Problem]] | None:
    """(the document after one fix, its findings). None if there is no fix or no improvement."""
    if finding.fix is None or finding.severity == "info":
        return None
    try:
        edit = finding.fix(document)
    except CannotEdit:
        return None
    if edit.added is not None and any(item.code in UNSETTLED for item in findings):
        return None
    after = Document.parse(edit.text, document.name)
    if after.error or not same(after.mapping, edit.value):
        return None
    if document.comment_texts - after.comment_texts:
        return None
    findings_after = lint(after, deployment)
    if not _better(findings, findings_after):
        return None
    return after, findings_after


def _better(before: list[Problem], after: list[Problem]) -> bool:
    """Whether errors were removed and none added. If the errors are the same, warnings decide."""
    for severity in ("error", "warning"):
        old = Counter((f.code, f.key) for f in before if f.severity == severity)
        new = Counter((f.code, f.key) for f in after if f.severity == severity)
        if new - old:
            return False
        if old - new:
            return True
    return False


PACKAGE = "tensorrt_llm"
MARK = "trtspec-verdict:"  # the engine prints on stdout while it is imported
# Like trtllm-serve, it removes some keys before the class sees them. It loads no tokenizer.
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
        for item in listed():
            errors.append({"loc": [str(part) for part in item["loc"]], "message": item["msg"]})
    else:
        errors = [{"loc": [], "message": f"{type(error).__name__}: {error}"}]
print(MARK + json.dumps({"version": tensorrt_llm.__version__, "errors": errors}))
"""


@dataclass(frozen=True)
class EngineVerdict:
    """The verdict of the engine of `version`. Its classes take a file without findings."""

    version: str
    findings: list[Problem]


def engine_importable() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def engine_python() -> str:
    """The interpreter that has the engine's own libraries.

    It is the base's if this environment only sees the base's packages (`--system-site-packages`),
    because it may have other versions of the libraries that the engine imports.
    """
    spec = importlib.util.find_spec(PACKAGE)
    origin = Path(sys.prefix)
    if spec is not None and spec.origin is not None:
        origin = Path(spec.origin)
    inherited = origin.is_relative_to(sys.base_prefix) and not origin.is_relative_to(sys.prefix)
    base = getattr(sys, "_base_executable", None)  # as venv itself finds it
    return base if inherited and base else sys.executable


def judge(document: Document, timeout: float = 600.0) -> EngineVerdict:
    """The verdict of the installed engine's classes. `timeout`: seconds.

    Raises MissingDependency if the engine is not importable, TrtspecError if it does not answer.
    """
    if not engine_importable():
        message = f"{PACKAGE} is not importable here, so its own classes cannot judge the file"
        remedy = "run this inside NVIDIA's TensorRT-LLM image, or leave `installed` out"
        raise MissingDependency(message, remedy)
    remedy = "leave `installed` out"
    command = [engine_python(), "-c", JUDGE.replace("MARK", repr(MARK))]
    text = "" if document.error else document.text
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        message = f"{PACKAGE} did not answer within {timeout:.0f} s"
        raise TrtspecError(message, remedy) from None
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        message = f"the installed {PACKAGE} failed while it judged the file: {last}"
        raise TrtspecError(message, remedy)
    answer = json.loads(line.removeprefix(MARK))
    findings = []
    for item in answer["errors"]:
        key = _written_key(document, item["loc"])
        message = f"the installed engine's own class says: {item['message']}"
        finding = Problem("TS-LINT-ENGINE-REFUSES", "error", key, message)
        findings.append(document.placed(finding))
    return EngineVerdict(answer["version"], findings)


def engine_problems(document: Document) -> list[Problem]:
    """The findings of the engine's own classes before a launch.

    [] if this interpreter cannot import the engine.
    """
    if not engine_importable():
        return []
    try:
        return judge(document).findings
    except TrtspecError as error:
        return [Problem("TS-SERVE-ENGINE-SILENT", "warning", PACKAGE, error.message)]


def _written_key(document: Document, parts: list[str]) -> str:
    """The dotted path of a pydantic location, which also names union members and list indices."""
    path = ""
    for part in parts:
        longer = f"{path}.{part}" if path else part
        if document.has(longer):
            path = longer
    return path or ".".join(parts)
