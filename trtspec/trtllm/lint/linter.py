"""All problems of an engine YAML at once, for exactly one version; and the corrected text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic_core import ValidationError

from trtspec.trtllm.deployment import Deployment, Finding
from trtspec.trtllm.document import CannotEdit, Document, same
from trtspec.trtllm.lint.engine import check_combinations, check_engine
from trtspec.trtllm.lint.keys import as_engine, check_keys, check_value
from trtspec.trtllm.lint.model import check_machine, check_model
from trtspec.trtllm.lint.speculation import check_speculation, check_traps
from trtspec.trtllm.schema import Schema, newest_known

RULES = (check_speculation, check_model, check_engine, check_combinations, check_machine, check_traps)
FRONT_KEYS = {"context_servers", "generation_servers"}
ORDER = {"error": 0, "warning": 1, "info": 2}
# a mapping with such a key may hold under that name what a rule misses, so nothing is added to it
UNSETTLED = {"TS-LINT-UNKNOWN-KEY", "TS-LINT-RENAMED-KEY", "TS-LINT-REMOVED-KEY", "TS-LINT-DOTTED-KEY"}


def lint(document: Document | str, deployment: Deployment) -> list[Finding]:
    """Every finding about a file, errors first, then by line. Keys and values are judged as they are written; all other
    rules see the values that the engine makes of them."""
    if isinstance(document, str):
        document = Document.parse(document)
    if document.error:
        code = "TS-LINT-LIMIT" if document.beyond_limits else "TS-LINT-SYNTAX"
        remedy = "no engine file is like this" if document.beyond_limits else "correct the YAML"
        line, column = document.error_line, document.error_column
        return [Finding(code, "error", "", document.error, remedy, line, column=column)]
    if document.value is not None and not isinstance(document.value, dict):
        message = f"the file holds {type(document.value).__name__}, not a mapping of options"
        return [Finding("TS-LINT-SYNTAX", "error", "", message, "write `key: value` lines", 1)]
    if FRONT_KEYS & set(document.value or {}):
        message = "this is the front of disaggregated servers, which has no engine settings to judge"
        remedy = "check it with `trtspec serve TARGET --disaggregated FILE --dry-run`"
        return [Finding("TS-LINT-FRONT-FILE", "info", "", message, remedy)]
    found = [*_version(deployment), *check_keys(document, deployment)]
    seen = as_the_engine_sees_it(document, deployment.schema)
    found += [_current(finding, deployment.schema) for rule in RULES for finding in rule(seen, deployment)]
    placed = [finding.placed(document) for finding in found]
    return sorted(placed, key=lambda f: (ORDER[f.severity], f.line or 0, f.key, f.code))


def as_the_engine_sees_it(document: Document, schema: Schema) -> Document:
    """With every value as the engine converts it; what it refuses stays as it is written. A key that a release renamed
    is there under its old name too, which is the one that rules know."""

    def convert(path: str, value: Any) -> Any:
        field = schema.fields.get(path)
        if field is None:
            return value
        try:
            return as_engine(field, value)
        except ValidationError:
            verdict = check_value(field, value)
            return None if verdict is not None and verdict[0] == "type" else value

    seen = document.converted(convert)
    names = {path: gone.renamed_to for path, gone in schema.removed.items() if schema.current(path) != path}
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


def _version(deployment: Deployment) -> Iterator[Finding]:
    newest = newest_known()
    if deployment.schema.version > newest:
        message = f"TensorRT-LLM {deployment.version} is newer than the newest version known here, {newest}"
        yield Finding("TS-LINT-VERSION-NEWER", "warning", "", message, "judged as the newest known line")
    last = deployment.schema.last
    if last is not None and deployment.schema.version > last:
        message = f"no release {deployment.version} is known; the last of its line is {last}"
        yield Finding("TS-LINT-VERSION-NEWER", "warning", "", message, f"judged as {last}")


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
    unsettled = {document.entries[f.key].parent for f in findings if f.code in UNSETTLED and document.has(f.key)}
    if edit.added is not None and edit.added.rpartition(".")[0] in unsettled:
        return None
    after = Document.parse(edit.text, document.name)
    if after.error or not same(after.value or {}, edit.value or {}) or document.comment_texts - after.comment_texts:
        return None
    found = lint(after, deployment)
    return (after, found) if _better(findings, found) else None


def _better(before: list[Finding], after: list[Finding]) -> bool:
    """Fewer errors and no other ones; or the same errors, with fewer warnings and no other ones."""
    for severity in ("error", "warning"):
        old, new = (Counter((f.code, f.key) for f in found if f.severity == severity) for found in (before, after))
        if new - old:
            return False
        if old - new:
            return True
    return False
