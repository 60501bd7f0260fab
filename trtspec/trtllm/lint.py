"""Judges an engine YAML for one release, corrects its text, and asks the installed engine.

The installed engine judges with its own pydantic classes, in a separate process.
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
# Findings about keys that the release may refuse. Such a key can hold a setting under another name,
# so a rule that misses the setting adds no key to the file.
DOUBTFUL_KEY = {
    "TS-LINT-UNKNOWN-KEY",
    "TS-LINT-KEY-UNCERTAIN",
    "TS-LINT-RENAMED-KEY",
    "TS-LINT-REMOVED-KEY",
    "TS-LINT-DOTTED-KEY",
}
REFUSED_VALUE = {*VALUE_CODES.values()}
# findings by the class of the engine, which do not hold for AutoDeploy
BY_CLASS = {*DOUBTFUL_KEY, *REFUSED_VALUE, "TS-LINT-MISSING-KEY", "TS-LINT-WRONG-VARIANT"}


def lint(document: Document | str, deployment: Deployment) -> list[Problem]:
    """Judges an engine file. Returns every finding, errors first, in the order of their lines.

    `document`: the file or its text.
    """
    if isinstance(document, str):
        document = Document.parse(document)
    problem = _unjudged(document)
    if problem is not None:
        return [document.placed(problem)]

    def rank(finding: Problem) -> tuple[int, int, str, str]:
        """Sort key: severity first, next the line."""
        severity = SEVERITIES.index(finding.severity)
        return severity, finding.line or 0, finding.key, finding.code

    placed = []
    for finding in _findings(document, deployment):
        keys = (finding.key, *finding.beside)
        # a value that only the shell or a template knows cannot be judged
        if not document.hides(keys, about_keys=finding.code in DOUBTFUL_KEY):
            placed.append(document.placed(finding))
    return sorted(placed, key=rank)


def _unjudged(document: Document) -> Problem | None:
    """Returns the only problem of a document that is not an engine file.

    None for an engine file.
    """
    error = document.error
    if error:
        code = "TS-LINT-LIMIT" if error.beyond else "TS-LINT-SYNTAX"
        return Problem(code, "error", "", error.message, line=error.line, column=error.column)
    if document.value is not None and not isinstance(document.value, dict):
        message = f"the file holds {type(document.value).__name__}, not a mapping of options"
        remedy = "write `key: value` lines"
        return Problem("TS-LINT-SYNTAX", "error", "", message, remedy, line=1)
    if set(document.mapping) >= FRONT_KEYS:
        message = (
            "this is the front of disaggregated servers, which has no engine settings to judge"
        )
        return Problem("TS-LINT-FRONT-FILE", "info", "", message)
    return None


def _findings(document: Document, deployment: Deployment) -> list[Problem]:
    """Judges the keys and values as they are written, and the values as the engine converts them.

    No rule judges a key whose value the engine refuses, nor the keys directly below it.
    """
    schema = deployment.schema
    seen = as_the_engine_sees_it(document, schema)
    findings = [*check_keys(document, schema)]
    newest = releases()[-1]
    if schema.version > newest:
        message = (
            f"TensorRT-LLM {schema.version} is newer than the newest version known here, {newest}"
        )
        findings.append(Problem("TS-LINT-VERSION-NEWER", "warning", "", message))
    refused = {finding.key for finding in findings if finding.code in REFUSED_VALUE}
    # a refused key's finding already covers the key that was intended
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
    return [autodeploy, *(finding for finding in findings if finding.code not in BY_CLASS)]


def as_the_engine_sees_it(document: Document, schema: Schema) -> Document:
    """Returns the document with every value as the engine converts it.

    A value that the engine refuses stays as written, or is None if its type is wrong, because no
    rule could compute with it. A key that a release renamed is also listed under its old name,
    which rules use. A refused key is also listed under the name that was intended.
    """

    def convert(path: str, value: Any) -> Any:
        """Value of one key as the engine converts it."""
        field = schema.fields.get(path)
        if field is None:
            return value
        try:
            return as_engine(field, value)
        except ValidationError:
            refusal = check_value(field, value)
            return None if refusal is not None and refusal[0] == "type" else value

    seen = document.converted(convert)
    names = {old: schema.current(old) for old in renames()}
    names |= {intended: written for written, intended in intended_keys(document, schema).items()}
    entries = {}
    for path, name in names.items():
        for written, entry in seen.entries.items():
            if written == name or written.startswith(f"{name}."):
                inner = written[len(name) :]
                entries[f"{path}{inner}"] = entry
    # a key that the file has itself comes before the same name of a renamed key
    return replace(seen, entries={**entries, **seen.entries})


def _current(finding: Problem, schema: Schema) -> Problem:
    """Returns a rule's finding with this release's names of keys, in the finding and in its fix."""
    fix = finding.fix
    if isinstance(fix, partial) and "path" in fix.keywords:
        path = schema.current(fix.keywords["path"])
        fix = partial(fix.func, **{**fix.keywords, "path": path})
    return replace(finding, key=schema.current(finding.key), fix=fix)


def fix(
    document: Document, deployment: Deployment, findings: list[Problem]
) -> tuple[Document, list[Problem]]:
    """Returns the corrected document, and the findings that were corrected, in order.

    Applies only fixes that make the file better and change nothing else. A second run is a no-op.
    `findings`: the findings of `lint` about the document.
    """
    corrected: list[Problem] = []
    while True:  # because a fix can move or remove other findings, one is applied at a time
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
    """Returns the document after one finding's fix, with its findings.

    None if the finding has no fix, or if the fix does not improve the file or changes anything
    else.
    """
    if finding.fix is None or finding.severity == "info":
        return None
    try:
        edit = finding.fix(document)
    except CannotEdit:
        return None
    if edit.added is not None and any(item.code in DOUBTFUL_KEY for item in findings):
        return None
    after = Document.parse(edit.text, document.name)
    # the edit of the text must give the values that were intended, and lose no comment
    if after.error or not same(after.mapping, edit.value):
        return None
    if document.comment_texts - after.comment_texts:
        return None
    findings_after = lint(after, deployment)
    if not _better(findings, findings_after):
        return None
    return after, findings_after


def _better(before: list[Problem], after: list[Problem]) -> bool:
    """Whether a fix removed errors and added none. If the errors are the same, warnings decide."""
    for severity in ("error", "warning"):
        old = _counts(before, severity)
        new = _counts(after, severity)
        if new - old:
            return False
        if old - new:
            return True
    return False


def _counts(findings: list[Problem], severity: str) -> Counter[tuple[str, str]]:
    """Number of findings of one severity, by code and key."""
    chosen = [finding for finding in findings if finding.severity == severity]
    return Counter((finding.code, finding.key) for finding in chosen)


PACKAGE = "tensorrt_llm"
# begins the line of the verdict, because the engine prints on stdout while it is imported
MARK = "trtspec-verdict:"
# Program that judges the engine YAML on its stdin. Like trtllm-serve, it removes some keys before
# the engine's class sees them. It loads no tokenizer.
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
    """The verdict of the installed engine about a file.

    Args:
        version: version of the engine.
        findings: problems that the engine's classes found, [] if they take the file.
    """

    version: str
    findings: list[Problem]


def engine_importable() -> bool:
    """Whether this interpreter finds the engine's package. Does not import it."""
    return importlib.util.find_spec(PACKAGE) is not None


def engine_python() -> str:
    """Path of the Python interpreter that has the engine and the engine's own libraries.

    An environment made with `--system-site-packages` sees the base's packages, but may have other
    versions of the libraries that the engine imports. In that case the path is the base
    interpreter's.
    """
    spec = importlib.util.find_spec(PACKAGE)
    origin = Path(sys.prefix)
    if spec is not None and spec.origin is not None:
        origin = Path(spec.origin)
    in_environment = origin.is_relative_to(sys.prefix)
    is_inherited = origin.is_relative_to(sys.base_prefix) and not in_environment
    base = getattr(sys, "_base_executable", None)  # as venv itself finds the base interpreter
    return base if is_inherited and base else sys.executable


def judge(document: Document, timeout: float = 600.0) -> EngineVerdict:
    """Runs the installed engine's classes on a file and returns their verdict. `timeout`: seconds.

    Raises MissingDependency if the engine is not importable. Raises TrtspecError if the engine
    fails or does not answer in time.
    """
    if not engine_importable():
        message = f"{PACKAGE} is not importable here, so its own classes cannot judge the file"
        remedy = "run this inside NVIDIA's TensorRT-LLM image, or leave `installed` out"
        raise MissingDependency(message, remedy)
    remedy = "leave `installed` out"
    command = [engine_python(), "-c", JUDGE.replace("MARK", repr(MARK))]
    text = "" if document.error else document.text  # lint itself reports a syntax error
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
    """Returns the findings of the installed engine's classes before a launch.

    Returns [] if this interpreter cannot import the engine, and a warning if the engine fails.
    """
    if not engine_importable():
        return []
    try:
        return judge(document).findings
    except TrtspecError as error:
        return [Problem("TS-SERVE-ENGINE-SILENT", "warning", PACKAGE, error.message)]


def _written_key(document: Document, parts: list[str]) -> str:
    """Dotted path of the key in the file that a pydantic location leads to.

    `parts`: the location, which also names union members and list indices. A location without a key
        in the file is returned as a path.
    """
    path = ""
    for part in parts:
        longer = f"{path}.{part}" if path else part
        if document.has(longer):
            path = longer
    return path or ".".join(parts)
