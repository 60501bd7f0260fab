"""Keys, types and values of a file against the schema of one version: what the engine's classes would refuse."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import partial
from typing import Any

from trtspec.errors import Severity
from trtspec.trtllm.document import Document, Entry, add_key, delete_key, rename_key, scalar, set_value
from trtspec.trtllm.lint.finding import Deployment, Finding, Fix
from trtspec.trtllm.lint.values import check_value
from trtspec.trtllm.schema import DISCRIMINATORS, LINES, Field, Removed, Schema, line_fields, removed_in

VALUE_CODES = {
    "type": "TS-LINT-WRONG-TYPE",
    "value": "TS-LINT-BAD-VALUE",
    "range": "TS-LINT-OUT-OF-RANGE",
    "lax": "TS-LINT-CONVERTED-VALUE",
}


def check_keys(document: Document, deployment: Deployment) -> Iterator[Finding]:
    """Findings of the version's own line; where it may be another line, only what both refuse is an error."""
    yield from _duplicates(document)
    here = list(_judge(document, deployment.schema))
    other_schema = deployment.schema.neighbour
    if other_schema is None:
        yield from here
        return
    other = list(_judge(document, other_schema))
    both = {(f.code, f.key) for f in here} & {(f.code, f.key) for f in other}
    where = f"the release where this changed is not known ({deployment.schema.boundary})"
    for finding in here:
        yield finding if (finding.code, finding.key) in both else _doubted(finding, where, deployment.schema.line)
    for finding in other:
        if (finding.code, finding.key) not in both and finding.severity == "error":
            yield _doubted(finding, where, other_schema.line)


def _doubted(finding: Finding, where: str, line: str) -> Finding:
    severity: Severity = "warning" if finding.severity == "error" else finding.severity
    message = f"in the {line} line: {finding.message}; {where}"
    remedy = "write what both lines take, or pin a release on one side of the interval"
    code = "TS-LINT-VERSION-UNCERTAIN" if finding.severity == "error" else finding.code
    return Finding(code, severity, finding.key, message, remedy, finding.line)


def _duplicates(document: Document) -> Iterator[Finding]:
    for entry in document.duplicates:
        message = f"{entry.path} is written twice; YAML silently keeps the last"
        yield Finding("TS-LINT-DUPLICATE-KEY", "error", entry.path, message, "keep one of the two lines", entry.line)


def _judge(document: Document, schema: Schema) -> Iterator[Finding]:
    unknown: list[str] = []
    for path, entry in document.entries.items():
        if any(path.startswith(f"{parent}.") for parent in unknown):
            continue
        field = schema.fields.get(path)
        if field is not None:
            yield from _known(document, schema, entry, field)
            continue
        unknown.append(path)
        finding = _unknown(document, schema, entry)
        if finding is not None:
            yield finding


def _known(document: Document, schema: Schema, entry: Entry, field: Field) -> Iterator[Finding]:
    path, line = entry.path, entry.line
    if not schema.certain(field.since) and field.since is not None:
        message = f"not known whether {schema.version} has {path}: it came {field.since.interval} (lines)"
        yield Finding(
            "TS-LINT-KEY-UNCERTAIN", "warning", path, message, "leave it out unless you have seen it work", line
        )
    if field.status == "deprecated":
        why = field.note.removeprefix("deprecated, ")
        message = f"{path} is deprecated{f': {why}' if why else ''}"
        yield Finding("TS-LINT-DEPRECATED", "info", path, message, "", line)
    top = path.partition(".")[0]
    kind = document.get(f"{top}.{DISCRIMINATORS.get(top)}")
    if field.variants and isinstance(kind, str) and kind not in field.variants:
        message = f"{DISCRIMINATORS[top]} {kind} has no key {entry.name} (only {', '.join(field.variants)})"
        remedy = f"remove {entry.name}"
        yield Finding("TS-LINT-WRONG-VARIANT", "error", path, message, remedy, line, partial(delete_key, path=path))
    verdict = check_value(field, entry.value)
    if verdict is not None:
        yield _bad_value(schema, entry, field, verdict)


def _bad_value(schema: Schema, entry: Entry, field: Field, verdict: tuple[str, str]) -> Finding:
    kind, message = verdict
    remedy, fix = f"{field.path} takes a value as in {_example(field)}", None
    if kind == "lax":
        return Finding(VALUE_CODES[kind], "info", entry.path, message, "write the value itself", entry.line)
    if kind == "value":
        near = _nearest_value(entry.value, field)
        lines = [line for line in LINES if entry.value in line_fields(line, entry.path, "allowed")]
        if lines:
            message += f" in {schema.version}; the lines {', '.join(lines)} have it"
        if near is not None:
            remedy, fix = f"write {near}", partial(set_value, path=entry.path, value=near)
    return Finding(VALUE_CODES[kind], "error", entry.path, message, remedy, entry.line, fix)


def _example(field: Field) -> str:
    if field.allowed:
        return f"`{field.path.rpartition('.')[2]}: {field.allowed[0]}`"
    samples: dict[str, Any] = {"int": 8, "float": 0.5, "bool": True, "str": "text", "object": {}, "list[int]": [1, 2]}
    sample = next((samples[kind] for kind in field.types if kind in samples), None)
    return f"`{field.path.rpartition('.')[2]}: {scalar(sample)}`"


def _nearest_value(value: Any, field: Field) -> Any:
    if not isinstance(value, str):
        return None
    by_plain = {str(item).lower().replace("_", ""): item for item in field.allowed}
    plain = value.lower().replace("_", "")
    near = difflib.get_close_matches(plain, list(by_plain), n=1, cutoff=0.75)
    return by_plain[near[0]] if near else None


def _unknown(document: Document, schema: Schema, entry: Entry) -> Finding | None:
    parent, _, name = entry.path.rpartition(".")
    owner = schema.fields.get(parent) if parent else None
    if owner is not None and not owner.is_object:
        return None  # a free mapping, or a wrong type that is already reported
    if entry.path in schema.removed:
        return _removed(document, schema, entry, schema.removed[entry.path])
    siblings = schema.children(parent)
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if owner is not None and owner.open and not near:
        if not siblings:
            return None
        message = f"the keys of {parent} are not all known for {schema.version}; {name} is not among those that are"
        return Finding("TS-LINT-KEY-UNCERTAIN", "warning", entry.path, message, "check it on the engine", entry.line)
    return _refused(schema, entry, parent, near[0] if near else "")


def _refused(schema: Schema, entry: Entry, parent: str, near: str) -> Finding:
    place = parent or "the top level"
    message = f"TensorRT-LLM {schema.version} refuses unknown keys, and {place} has no key {entry.name}"
    later = [line for line in LINES if entry.path in line_fields(line)]
    old = next((path for path, to in _renames_after(schema.line) if to == entry.path and path in schema.fields), None)
    if later:
        message += f" (the lines {', '.join(later)} have it)"
    elsewhere = [path for path in schema.fields if path.rpartition(".")[2] == entry.name]
    fix: Fix | None = None
    if old is not None:
        leaf = old.rpartition(".")[2]
        remedy, fix = f"here it is called {leaf}", partial(rename_key, path=entry.path, name=leaf)
    elif near and not later:
        remedy, fix = f"did you mean {near}?", partial(rename_key, path=entry.path, name=near)
    elif elsewhere:
        remedy = f"did you mean {elsewhere[0]}?"
        fix = partial(_move, path=entry.path, to=elsewhere[0]) if len(elsewhere) == 1 else None
    else:
        remedy, fix = f"remove {entry.name}", partial(delete_key, path=entry.path)
    return Finding("TS-LINT-UNKNOWN-KEY", "error", entry.path, message, remedy, entry.line, fix)


def _renames_after(line: str) -> list[tuple[str, str]]:
    later = LINES[LINES.index(line) + 1 :]
    return [(r.path, r.renamed_to) for name in later for r in removed_in(name) if r.renamed_to is not None]


def _removed(document: Document, schema: Schema, entry: Entry, gone: Removed) -> Finding:
    note = f"; {gone.note}" if gone.note else ""
    if gone.renamed_to is None:
        message = f"{entry.path} does not exist in {schema.version} (last: {gone.last}){note}"
        severity: Severity = "error"
        if entry.value in gone.tolerated:
            message, severity = f"{message}; some releases ignore it with a warning, others refuse it", "warning"
        fix: Fix = partial(delete_key, path=entry.path)
        return Finding("TS-LINT-REMOVED-KEY", severity, entry.path, message, f"remove {entry.name}", entry.line, fix)
    message = f"{entry.path} is called {gone.renamed_to} in {schema.version}{note}"
    keeps_meaning = "length became a rate" not in gone.note and not isinstance(entry.value, dict)
    move = partial(_move, path=entry.path, to=gone.renamed_to) if keeps_meaning else None
    remedy = f"write {gone.renamed_to}"
    return Finding("TS-LINT-RENAMED-KEY", "error", entry.path, message, remedy, entry.line, move)


def _move(document: Document, path: str, to: str) -> str:
    """Renames in place where the parent stays, else takes the line out and adds it where it belongs."""
    if path.rpartition(".")[0] == to.rpartition(".")[0]:
        return rename_key(document, path, to.rpartition(".")[2])
    value = document.entries[path].value
    return add_key(Document.parse(delete_key(document, path)), to, value)
