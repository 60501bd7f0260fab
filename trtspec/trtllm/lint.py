"""All problems of an engine YAML at once, for exactly one version; the corrected text; and the installed engine's own
verdict: its pydantic classes, run in a process of their own."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic_core import ValidationError

from trtspec.errors import MissingDependency, Problem, Severity, TrtspecError
from trtspec.trtllm.deployment import Deployment, Finding
from trtspec.trtllm.document import CannotEdit, Document, same
from trtspec.trtllm.rules import engine, model, speculation
from trtspec.trtllm.rules.keys import VALUE_CODES, as_engine, check_keys, check_value
from trtspec.trtllm.rules.rows import check_rows
from trtspec.trtllm.schema import Change, Schema, newest_known

RULES = (*speculation.RULES, *model.RULES, *engine.RULES, check_rows)
FRONT_KEYS = {"context_servers", "generation_servers"}
ORDER = {"error": 0, "warning": 1, "info": 2}
UNKNOWN_KEY = "TS-LINT-UNKNOWN-KEY"
# a mapping with such a key may hold under that name what a rule misses, so nothing is added to it
UNSETTLED = {
    UNKNOWN_KEY,
    "TS-LINT-RENAMED-KEY",
    "TS-LINT-REMOVED-KEY",
    "TS-LINT-DOTTED-KEY",
}
MISSING = "TS-LINT-MISSING-KEY"
REFUSED_VALUE = {VALUE_CODES["type"], VALUE_CODES["value"], VALUE_CODES["range"]}
ABOUT_KEYS = {*UNSETTLED, *VALUE_CODES.values(), MISSING, "TS-LINT-WRONG-VARIANT"}
MEANING = (
    "TS-LINT-SCHEDULE-MEANING"  # what a value means: reported only where two possibilities differ
)


def lint(document: Document | str, deployment: Deployment) -> list[Finding]:
    """Every finding about a file, errors first, then by line. A version that is in doubt is judged by both of its
    possibilities: what both say is said as it is, and what only one says is a warning that names both."""
    if isinstance(document, str):
        document = Document.parse(document)
    if document.error:
        code = "TS-LINT-LIMIT" if document.beyond_limits else "TS-LINT-SYNTAX"
        line, column = document.error_line, document.error_column
        return [Finding(code, "error", "", document.error, line=line, column=column)]
    if document.value is not None and not isinstance(document.value, dict):
        message = f"the file holds {type(document.value).__name__}, not a mapping of options"
        return [Finding("TS-LINT-SYNTAX", "error", "", message, "write `key: value` lines", line=1)]
    if set(document.value or {}) >= FRONT_KEYS:
        message = (
            "this is the front of disaggregated servers, which has no engine settings to judge"
        )
        return [Finding("TS-LINT-FRONT-FILE", "info", "", message)]
    placed = [finding.placed(document) for finding in Doubt(document, deployment).findings()]
    return sorted(placed, key=lambda f: (ORDER[f.severity], f.line or 0, f.key, f.code))


def _judged(document: Document, deployment: Deployment, schema: Schema) -> list[Finding]:
    """By one possibility. Keys and values are judged as they are written; all other rules see the values that the
    engine makes of them, and say nothing about a key whose value it refuses."""
    one = replace(deployment, schema=schema)
    seen = as_the_engine_sees_it(document, schema)
    found = [*check_keys(document, schema)]
    if schema.version > newest_known():
        message = f"TensorRT-LLM {schema.version} is newer than the newest version known here, {newest_known()}"
        found.append(Finding("TS-LINT-VERSION-NEWER", "warning", "", message))
    refused = {finding.key for finding in found if finding.code in REFUSED_VALUE}
    judged = (_current(finding, schema) for rule in RULES for finding in rule(seen, one))
    found += [finding for finding in judged if refused.isdisjoint(finding.keys)]
    if one.setting(document, "backend") != "_autodeploy":
        return found
    message = "AutoDeploy reads the file by a class of its own, so keys and values are not judged"
    autodeploy = Finding("TS-LINT-AUTODEPLOY", "info", "backend", message)
    return [autodeploy, *(finding for finding in found if finding.code not in ABOUT_KEYS)]


class Doubt:
    """The findings about a file before and after the changes that are in doubt for its version."""

    def __init__(self, document: Document, deployment: Deployment) -> None:
        self.schema = deployment.schema
        self.judged = functools.cache(partial(_judged, document, deployment))
        self.before, self.after = (self.judged(self.schema.possibilities[at]) for at in (0, -1))

    def findings(self) -> Iterator[Finding]:
        both = {_signature(f) for f in self.before} & {_signature(f) for f in self.after}
        yield from (f for f in self.after if _signature(f) in both and f.code != MEANING)
        old, new = (
            [f for f in side if _signature(f) not in both] for side in (self.before, self.after)
        )
        for finding in [*new]:
            other = next((f for f in old if (f.code, f.key) == (finding.code, finding.key)), None)
            if other is not None:
                old.remove(other)
                new.remove(finding)
                yield self._in_doubt(other, finding)
        certain = [f for f in new if self._either_way(f, old, new=True)]
        certain += [f for f in old if self._either_way(f, new, new=False)]
        yield from (self._in_doubt(None, f) for f in new if f not in certain)
        yield from (self._in_doubt(f, None) for f in old if f not in certain)
        reported = {
            f.key for f in certain if f.code not in UNSETTLED
        }  # one error for a key that both refuse
        yield from (f for f in certain if f.code not in UNSETTLED or f.key not in reported)

    def _either_way(self, finding: Finding, others: list[Finding], *, new: bool) -> bool:
        """Whether the other possibility refuses a key that this finding is about, or one that it is below, and the one
        change that decides this leaves the finding as it is."""
        if (
            finding.code == MISSING
            and not new
            and finding.key not in self.schema.possibilities[-1].fields
        ):
            return True  # earlier releases refuse the file without the key, later ones with it
        for other in others:
            if other.severity == "error" and any(
                _touches(finding, key, other.key) for key in finding.keys
            ):
                change = self._change(*((other, None) if new else (None, other)))
                done = [change] if new else self.schema.doubts - {change}
                found = {(f.code, f.key) for f in self.judged(self.schema.assuming(*done))}
                return (finding.code, finding.key) in found
        return False

    def _in_doubt(self, old: Finding | None, new: Finding | None) -> Finding:
        """One finding where the two possibilities differ, naming the change of the release that decides."""
        change, version = self._change(old, new), self.schema.version
        ends = {change.after or "an earlier release": old, change.by or "a later release": new}
        said = [
            f"{finding.message}, if {version} is like {end}"
            for end, finding in ends.items()
            if finding
        ]
        message = "; ".join(said)
        message += "" if change.interval in message else f" (changed {change.interval})"
        finding = new or old
        assert finding is not None
        if old is not None and new is not None and finding.code != MEANING:
            return replace(
                finding,
                message=message,
                severity=min(old.severity, new.severity, key=ORDER.__getitem__),
            )
        severity: Severity = "info" if finding.severity == "info" else "warning"
        if finding.code not in ABOUT_KEYS or finding.severity != "error":
            return replace(finding, message=message, severity=severity)
        # the key is right for one of the two: nothing that could be written or removed suits both
        return Finding("TS-LINT-VERSION-UNCERTAIN", "warning", finding.key, message)

    def _change(self, old: Finding | None, new: Finding | None) -> Change:
        """What brings `new` and takes `old` away."""

        def says(schema: Schema) -> tuple[bool, bool]:
            found = {_signature(finding) for finding in self.judged(schema)}
            return old is not None and _signature(old) in found, new is not None and _signature(
                new
            ) in found

        return self.schema.decided_by(says)


def _touches(finding: Finding, key: str, refused: str) -> bool:
    """Whether a key is refused, or one above it; of a rule's finding, also one below it."""
    if key == refused or key.startswith(f"{refused}."):
        return bool(refused)
    return bool(key) and finding.code not in ABOUT_KEYS and refused.startswith(f"{key}.")


def _signature(finding: Finding) -> tuple[str, str, str]:
    """What makes two findings the same."""
    return finding.code, finding.key, finding.message


def as_the_engine_sees_it(document: Document, schema: Schema) -> Document:
    """With every value as the engine converts it. One that it refuses stays as it is written, but for one of another
    type, with which no rule could compute. A key that a release renamed is there under its old name too, which is the
    one that rules know."""

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
    names = {
        path: gone.renamed_to
        for path, gone in schema.removed.items()
        if schema.current(path) != path
    }
    old = {
        f"{path}{written[len(name) :]}": entry
        for path, name in names.items()
        for written, entry in seen.entries.items()
        if name is not None and (written == name or written.startswith(f"{name}."))
    }
    return replace(seen, entries={**old, **seen.entries})


def _current(finding: Finding, schema: Schema) -> Finding:
    """A rule's finding with the names of this release, its fix too."""
    fix = finding.fix
    if isinstance(fix, partial) and "path" in fix.keywords:
        fix = partial(fix.func, **{**fix.keywords, "path": schema.current(fix.keywords["path"])})
    return replace(finding, key=schema.current(finding.key), fix=fix)


def fix(
    document: Document | str, deployment: Deployment, found: list[Finding] | None = None
) -> tuple[Document, list[Finding]]:
    """The corrected document, and what was corrected in that order. Every fix that would not make the file better, or
    would touch anything else, is left out; so a second run changes nothing. `found` is what `lint` says about it."""
    if isinstance(document, str):
        document = Document.parse(document)
    findings, corrected = lint(document, deployment) if found is None else found, []
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
    document: Document, findings: list[Finding], finding: Finding, deployment: Deployment
) -> tuple[Document, list[Finding]] | None:
    """The document after one fix, with its findings; None where there is none or it is not an improvement."""
    if finding.fix is None or finding.severity == "info":
        return None
    try:
        edit = finding.fix(document)
    except CannotEdit:
        return None
    unsettled = {
        document.entries[f.key].parent
        for f in findings
        if f.code in UNSETTLED and document.has(f.key)
    }
    if edit.added is not None and not unsettled.isdisjoint(_mappings_above(document, edit.added)):
        return None
    after = Document.parse(edit.text, document.name)
    if (
        after.error
        or not same(after.value or {}, edit.value or {})
        or document.comment_texts - after.comment_texts
    ):
        return None
    found = lint(after, deployment)
    return (after, found) if _better(findings, found) else None


def _mappings_above(document: Document, path: str) -> set[str]:
    """The mappings, down from the top level, in which an added key or one of its new parents is written."""
    parents = {path.rpartition(".")[0]}
    while (lowest := path.rpartition(".")[0]) and not document.has(lowest):
        path = lowest
        parents.add(path.rpartition(".")[0])
    return parents


def _better(before: list[Finding], after: list[Finding]) -> bool:
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
        found.append(Finding("TS-LINT-ENGINE-REFUSES", "error", key, message).placed(document))
    return Verdict(answer["version"], tuple(found))


def engine_problems(document: Document) -> list[Problem]:
    """What the engine's own classes say before a launch; nothing where this interpreter cannot import it."""
    if not engine_importable():
        return []
    try:
        return [finding.problem(document.name) for finding in judge(document).findings]
    except TrtspecError as error:
        return [
            Problem(
                "TS-SERVE-ENGINE-SILENT",
                "warning",
                PACKAGE,
                error.message,
                "start anyway and read its log",
            )
        ]


def _written_key(document: Document, parts: list[str]) -> str:
    """The dotted path of a pydantic location, which also names the member of a union and the index of a list."""
    path = ""
    for part in parts:
        longer = f"{path}.{part}" if path else part
        if document.has(longer):
            path = longer
    return path or ".".join(parts)
