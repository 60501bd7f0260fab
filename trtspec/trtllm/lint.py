"""All problems of an engine YAML at once, for exactly one version; the corrected text; and the installed engine's own
verdict: its pydantic classes, run in a process of their own."""

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
from trtspec.trtllm.rules.keys import VALUE_CODES, as_engine, check_keys, check_value, targets
from trtspec.trtllm.schema import Schema, releases, renames

RULES = (*speculation.RULES, *model.RULES, *engine_settings.RULES, check_rows)
# a file with such a key may hold under that name what a rule misses, so nothing is added to it
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
    if document.error:
        error = document.error
        code = "TS-LINT-LIMIT" if error.beyond else "TS-LINT-SYNTAX"
        problem = Problem(code, "error", "", error.message, line=error.line, column=error.column)
        return [document.placed(problem)]
    if document.value is not None and not isinstance(document.value, dict):
        message = f"the file holds {type(document.value).__name__}, not a mapping of options"
        remedy = "write `key: value` lines"
        return [document.placed(Problem("TS-LINT-SYNTAX", "error", "", message, remedy, line=1))]
    if set(document.mapping) >= FRONT_KEYS:
        message = (
            "this is the front of disaggregated servers, which has no engine settings to judge"
        )
        return [document.placed(Problem("TS-LINT-FRONT-FILE", "info", "", message))]
    placed = [
        document.placed(finding)
        for finding in _judged(document, deployment)
        if not document.hides((finding.key, *finding.beside), about_keys=finding.code in UNSETTLED)
    ]
    return sorted(placed, key=lambda f: (SEVERITIES.index(f.severity), f.line or 0, f.key, f.code))


def _judged(document: Document, deployment: Deployment) -> list[Problem]:
    """Keys and values are judged as they are written; all other rules see the values that the engine makes of them, and
    say nothing about a key whose value it refuses, nor about what it holds."""
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
    refused.update(targets(document, schema).values())
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
    """With every value as the engine converts it. One that it refuses stays as it is written, but for one of another
    type, with which no rule could compute. A key that a release renamed is there under its old name too, which is the
    one that rules know, and a refused key under the one that it means."""

    def convert(path: str, value: Any) -> Any:
        field = schema.fields.get(path)
        if field is None:
            return value
        try:
            return as_engine(field, value)
        except ValidationError:
            kind, *_ = check_value(field, value) or ("",)
            return None if kind == "type" else value

    seen = document.converted(convert)
    names = {old: schema.current(old) for old in renames()}
    names |= {path: written for written, path in targets(document, schema).items()}
    old = {
        f"{path}{written[len(name) :]}": entry
        for path, name in names.items()
        for written, entry in seen.entries.items()
        if written == name or written.startswith(f"{name}.")
    }
    return replace(seen, entries={**old, **seen.entries})


def _current(finding: Problem, schema: Schema) -> Problem:
    """A rule's finding with the names of this release, its fix too."""
    fix = finding.fix
    if isinstance(fix, partial) and "path" in fix.keywords:
        fix = partial(fix.func, **{**fix.keywords, "path": schema.current(fix.keywords["path"])})
    return replace(finding, key=schema.current(finding.key), fix=fix)


def fix(
    document: Document, deployment: Deployment, findings: list[Problem]
) -> tuple[Document, list[Problem]]:
    """The corrected document, and what was corrected in that order. Every fix that would not make the file better, or
    would touch anything else, is left out; so a second run changes nothing. `findings`: of `lint`."""
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
    """The document after one fix, with its findings; None where there is none or it is not an improvement."""
    if finding.fix is None or finding.severity == "info":
        return None
    try:
        edit = finding.fix(document)
    except CannotEdit:
        return None
    if edit.added is not None and any(item.code in UNSETTLED for item in findings):
        return None
    after = Document.parse(edit.text, document.name)
    if (
        after.error
        or not same(after.mapping, edit.value)
        or document.comment_texts - after.comment_texts
    ):
        return None
    found = lint(after, deployment)
    return (after, found) if _better(findings, found) else None


def _better(before: list[Problem], after: list[Problem]) -> bool:
    """Fewer errors and no other ones; or the same errors, with fewer warnings and no other ones."""
    for severity in ("error", "warning"):
        old, new = (
            Counter((f.code, f.key) for f in found if f.severity == severity)
            for found in (before, after)
        )
        if new - old:
            return False
        if old - new:
            return True
    return False


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
class EngineVerdict:
    """What the engine of `version` says; empty findings mean that its classes take the file."""

    version: str
    findings: list[Problem]


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


def judge(document: Document, timeout: float = 600.0) -> EngineVerdict:
    """Raises MissingDependency where the engine is not importable, TrtspecError when it does not answer."""
    if not engine_importable():
        remedy = "run this inside NVIDIA's TensorRT-LLM image, or leave `installed` out"
        raise MissingDependency(
            f"{PACKAGE} is not importable here, so its own classes cannot judge the file", remedy
        )
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
        raise TrtspecError(
            f"{PACKAGE} did not answer within {timeout:.0f} s", "leave `installed` out"
        ) from None
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TrtspecError(
            f"the installed {PACKAGE} failed while it judged the file: {last}",
            "leave `installed` out",
        )
    answer = json.loads(line.removeprefix(MARK))
    found = []
    for item in answer["errors"]:
        key, message = (
            _written_key(document, item["loc"]),
            f"the installed engine's own class says: {item['message']}",
        )
        found.append(document.placed(Problem("TS-LINT-ENGINE-REFUSES", "error", key, message)))
    return EngineVerdict(answer["version"], found)


def engine_problems(document: Document) -> list[Problem]:
    """What the engine's own classes say before a launch; nothing where this interpreter cannot import it."""
    if not engine_importable():
        return []
    try:
        return judge(document).findings
    except TrtspecError as error:
        return [Problem("TS-SERVE-ENGINE-SILENT", "warning", PACKAGE, error.message)]


def _written_key(document: Document, parts: list[str]) -> str:
    """The dotted path of a pydantic location, which also names the member of a union and the index of a list."""
    path = ""
    for part in parts:
        longer = f"{path}.{part}" if path else part
        if document.has(longer):
            path = longer
    return path or ".".join(parts)
