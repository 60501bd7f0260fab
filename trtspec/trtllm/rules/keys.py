"""Keys, types and values of a file against the schema of one version: what the engine's classes would refuse.

Values are judged by pydantic's own validators, built from the schema's types and limits with pydantic-core, which is
what a pydantic class compiles to.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from packaging.version import Version
from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from trtspec.errors import Problem, Severity
from trtspec.trtllm.deployment import Fix
from trtspec.trtllm.document import Document, Entry, delete_key, move_key, same, set_value
from trtspec.trtllm.schema import (
    DISCRIMINATORS,
    Field,
    Schema,
    Word,
    classes,
    known_names,
    read_beside,
    renames,
)

Verdict = tuple[Literal["type", "value", "range"], str]

NAMES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "object": "a mapping",
}
LIMITS = {"min": "at least", "max": "at most", "above": "above", "below": "below"}
RANGE_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "too_short"}
SHOWN = 80  # characters of a value in a message
NEAR = 0.83  # likeness of a slip of the hand; the nearest option of vLLM that means something else has 0.82


def check_value(field: Field, value: Any) -> Verdict | None:
    """What the engine refuses about a value. None for a value that it takes, also by converting it."""
    try:
        as_engine(field, value)
    except ValidationError as error:
        return _refusal(field, value, error)
    return None


def as_engine(field: Field, value: Any) -> Any:
    """What the engine makes of a value. Raises pydantic's ValidationError where it refuses it."""
    limits = (field.min, field.max, field.above, field.below)
    rules = (
        field.type,
        limits,
        field.not_empty,
        field.allowed,
        field.case_insensitive,
        field.strict,
    )
    return _validator(*rules).validate_python(value)


@functools.cache
def _validator(
    union: str,
    limits: tuple[float | None, ...],
    not_empty: bool,
    allowed: tuple[Any, ...],
    case_insensitive: bool,
    strict: bool,
) -> SchemaValidator:
    names = ("ge", "le", "gt", "lt")
    bounds = {name: limit for name, limit in zip(names, limits, strict=True) if limit is not None}
    length = 1 if not_empty else None

    def made(kind: str) -> CoreSchema:
        if kind == "int":
            return core_schema.int_schema(strict=strict, **bounds)  # type: ignore[arg-type]
        if kind == "float":
            return core_schema.float_schema(**bounds)  # type: ignore[arg-type]
        if kind == "any":
            return core_schema.any_schema()
        if kind == "bool":
            return core_schema.bool_schema()
        if kind == "str":
            return _words(allowed, case_insensitive)
        if kind.startswith("list["):
            return core_schema.list_schema(made(kind[5:-1]), min_length=length)
        if kind.startswith("dict["):
            key, _, item = kind[5:-1].partition(",")
            if (key, item) == (
                "str",
                "str",
            ) and not strict:  # env_overrides, which makes strings of both itself
                return core_schema.dict_schema(min_length=length)
            return core_schema.dict_schema(made(key), made(item), min_length=length)
        return core_schema.dict_schema(min_length=length)

    kinds = [kind for kind in union.split("|") if kind != "null"]
    schema = (
        made(kinds[0])
        if len(kinds) == 1
        else core_schema.union_schema([made(kind) for kind in kinds])
    )
    return SchemaValidator(
        core_schema.nullable_schema(schema) if "null" in union.split("|") else schema
    )


def _words(allowed: tuple[Any, ...], case_insensitive: bool) -> CoreSchema:
    listed = [item for item in allowed if isinstance(item, str)]
    if not listed:
        return core_schema.str_schema()
    if not case_insensitive:
        return core_schema.literal_schema(listed)
    spelled = {item.lower(): item for item in listed}
    literal = core_schema.literal_schema([*spelled, *listed])
    return core_schema.no_info_before_validator_function(
        lambda value: value.lower() if isinstance(value, str) else value, literal
    )


def _refusal(field: Field, value: Any, error: ValidationError) -> Verdict:
    kinds = {item["type"] for item in error.errors(include_url=False, include_input=False)}
    words = [
        item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)
    ]
    kind: Literal["type", "value", "range"] = "type"
    if kinds & RANGE_ERRORS and value is not None:
        kind = "range"
    elif "literal_error" in kinds and words:
        kind = "value"
    return kind, f"must be {describe(field)}, not {shown(value)}"


def shown(value: Any) -> str:
    """A value in a message, on one line and never long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def describe(field: Field) -> str:
    """The accepted values in words."""
    words = [NAMES.get(kind, kind) for kind in field.types if kind != "null"]
    if field.allowed:
        words = [NAMES[kind] for kind in field.types if kind in ("bool", "int", "float")]
        words.append(f"one of {', '.join(map(str, field.allowed))}")
    elif "null" in field.types:
        words.append("null")
    for name, limit in LIMITS.items():
        if getattr(field, name) is not None:
            words[-1] += f", {limit} {getattr(field, name)}"
    return " or ".join(words) + ", not empty" * field.not_empty


VALUE_CODES = {
    "type": "TS-LINT-WRONG-TYPE",
    "value": "TS-LINT-BAD-VALUE",
    "range": "TS-LINT-OUT-OF-RANGE",
}
OTHER_NUMBER = re.compile(r"[-+]?(0[0-7_]+|\d+(:\d+)+)")  # octal, and base 60
MAX_UNKNOWN = 200  # keys, after which the rest of a file is not judged
MAX_COMPARED = 100  # characters of a value that is compared with the allowed ones


def check_keys(document: Document, schema: Schema) -> Iterator[Problem]:
    for entry in document.duplicates:
        message = f"{entry.path} is written twice; YAML silently keeps the last"
        severity: Severity = "warning" if same(entry.value, document.get(entry.path)) else "error"
        yield Problem("TS-LINT-DUPLICATE-KEY", severity, entry.path, message, line=entry.line)
    yield from _missing(document, schema)
    unknown, doubtful = set[str](), set[str]()
    for path, entry in document.entries.items():
        if entry.parent in unknown:
            unknown.add(path)  # the parent's finding covers it
            continue
        if entry.parent not in classes():
            continue  # a free mapping
        word = schema.word(entry.parent, entry.name, kind_of(document, entry.parent))
        if word.taken and word.earlier:
            yield from _known(schema, entry, word)
        if word.takes:
            continue
        if word.taken:
            doubtful.add(path)
        else:
            unknown.add(path)
        if not (word.taken and entry.parent in doubtful):  # else the parent's finding covers it
            yield _unknown(document, schema, entry, word)
        if len(unknown) > MAX_UNKNOWN:
            message = f"more than {MAX_UNKNOWN} keys are not known to TensorRT-LLM {schema.version}"
            yield Problem("TS-LINT-UNKNOWN-KEY", "error", "", message)
            return


def kind_of(document: Document, parent: str) -> Any:
    """The value that says which class a mapping is; None for a mapping of one class."""
    return document.get(f"{parent}.{DISCRIMINATORS[parent]}") if parent in DISCRIMINATORS else None


def _missing(document: Document, schema: Schema) -> Iterator[Problem]:
    """Keys without which the engine refuses the object that they belong to."""
    meant = targets(document, schema).values()
    for path, field in schema.fields.items():
        parent, _, name = path.rpartition(".")
        absent = isinstance(document.get(parent), dict) and not document.has(path)
        if not field.required or not absent or path in meant:
            continue
        kind = kind_of(document, parent)
        word = schema.word(parent, name, kind)
        if word.takes and (not field.variants or kind in field.variants):
            message = f"{parent} needs {name}"
            yield Problem("TS-LINT-MISSING-KEY", _severity(word), path, message)


def _severity(word: Word) -> Severity:
    """Of what every source around a release refuses."""
    return "error" if word.settled else "warning"


def _known(schema: Schema, entry: Entry, word: Word) -> Iterator[Problem]:
    """What is wrong with the value of a key, and whether the key goes."""
    path, field = entry.path, word.taken[0]
    if field.status == "deprecated" and path != schema.sampling_key:
        # where speculation needs the sampling key, another rule asks for it
        message = f"{path} is deprecated: {field.note or 'it will go'}"
        yield Problem("TS-LINT-DEPRECATED", "info", path, message)
    verdicts = [check_value(each, entry.value) for each in word.taken]
    refused = [verdict is not None for verdict in verdicts]
    if any(refused) and not all(refused):
        sides = ["refuses" if each else "takes" for each in refused]
        message = f"{path}: {word.said[0][0]} {sides[0]} and {word.said[1][0]} {sides[1]} "
        message += f"{shown(entry.value)}; {schema.version} lies between"
        yield Problem("TS-LINT-VERSION-UNCERTAIN", "warning", path, message, on_value=True)
    elif verdicts[-1] is not None:
        yield _bad_value(entry, field, verdicts[-1], word)
    elif isinstance(entry.value, int) and OTHER_NUMBER.fullmatch(entry.value_node.text):
        message = f"YAML reads {entry.value_node.text} as {entry.value}"
        yield Problem("TS-LINT-OTHER-NUMBER", "error", path, message, on_value=True)


def _bad_value(entry: Entry, field: Field, verdict: tuple[str, str], word: Word) -> Problem:
    kind, message = verdict
    near, certain = _nearest_value(entry.value, field)
    remedy, fix = "", None
    if near is not None:
        remedy = f"write {near}" if certain else f"did you mean {near}?"
        fix = partial(set_value, path=entry.path, value=near) if certain else None
    message += "" if word.settled else f" at {word.said[0][0]}, the last source read"
    code, severity = VALUE_CODES[kind], _severity(word)
    return Problem(code, severity, entry.path, message, remedy, fix, on_value=True)


def _nearest_value(value: Any, field: Field) -> tuple[Any, bool]:
    """The allowed value that was probably meant, and whether only its case or underscores differ."""
    if not isinstance(value, str) or len(value) > MAX_COMPARED:
        return None, False
    by_plain = {str(item).lower().replace("_", ""): item for item in field.allowed}
    plain = value.lower().replace("_", "")
    near = difflib.get_close_matches(plain, by_plain, n=1, cutoff=0.75)
    return (by_plain[near[0]], near[0] == plain) if near else (None, False)


def _unknown(document: Document, schema: Schema, entry: Entry, word: Word) -> Problem:
    """A key that some source around the release refuses, or that none shows."""
    parent = entry.parent or "the top level"
    target, last = meaning(schema, entry.parent, entry.name), schema.last_release_with(entry.path)
    gone = read_beside("keys.yaml")["gone"].get(entry.path, {})
    renamed = renames().get(entry.path, gone)
    told = f" ({renamed['note']})" if renamed.get("note") else ""
    if word.taken:
        message = f"{entry.path} in {schema.version}: {word.releases}{told}"
        remedy = f"write {target.path}" if target is not None and "to" in renamed else ""
        return Problem("TS-LINT-VERSION-UNCERTAIN", "warning", entry.path, message, remedy)
    remedy, fix = _remedy(schema, entry, target, last)
    code = "TS-LINT-UNKNOWN-KEY" if word.settled else "TS-LINT-KEY-UNCERTAIN"
    severity = _severity(word)
    unread = f"{parent} was not read whole for {schema.version} ({word.releases or 'no source'})"
    message = f"whether there is a key {entry.name} is not known: {unread}"
    if word.settled:
        message = f"TensorRT-LLM {schema.version} refuses unknown keys, and {parent} has no key "
        message += entry.name
    kinds = schema.kinds_with(entry.parent, entry.name) if entry.parent in DISCRIMINATORS else ()
    if not entry.name.isidentifier():
        code, severity = "TS-LINT-DOTTED-KEY", "error"
        message = f"the engine takes {entry.name} for the name of one key, which {parent} lacks"
    elif kinds:
        code = "TS-LINT-WRONG-VARIANT"
        kind, key = kind_of(document, entry.parent), DISCRIMINATORS[entry.parent]
        message = f"{key} {kind} has no key {entry.name} (only {', '.join(kinds)})"
        remedy, fix = "", None
    elif renamed.get("to") in schema.fields:
        code = "TS-LINT-RENAMED-KEY"
        message = f"{entry.path} is called {renamed['to']} in {schema.version}{told}"
    elif gone or last is not None:
        code = "TS-LINT-REMOVED-KEY"
        message = f"{entry.path} does not exist in {schema.version}{told}"
        if entry.value in gone.get("tolerated", ()):
            severity = "warning"
    if not word.settled and code != "TS-LINT-KEY-UNCERTAIN":
        message += f"; {unread}"
    return Problem(code, severity, entry.path, message, remedy, fix)


def targets(document: Document, schema: Schema) -> dict[str, str]:
    """The key that each key of a file which the release refuses means."""
    meant: dict[str, str] = {}
    for path, entry in document.entries.items():
        if entry.parent in classes() and path not in schema.fields:
            target = meaning(schema, entry.parent, entry.name)
            if target is not None:
                meant[path] = target.path
    return meant


def _remedy(
    schema: Schema, entry: Entry, target: MeantKey | None, last: Version | None
) -> tuple[str, Fix | None]:
    """What to write in place of a key. `last`: the newest release that has it."""
    if target is not None and not target.certain:
        return f"did you mean {target.path}?", None
    if target is not None:
        fix = _moving(schema, entry, target.path) if target.same_value else None
        return f"write {target.words}", fix
    name = entry.name.replace("-", "_")
    option = read_beside("keys.yaml")["foreign_options"].get(name, name)
    if options := schema.option(f"--{option}").taken:
        return f"pass {options[0].flags[0]} to trtllm-serve", None
    remedy = f"remove {entry.name}" if last is None else f"leave it out, or use {last}"
    if isinstance(entry.value, dict):  # what it holds may be wanted under other names
        inner = [meaning(schema, "", str(key)) for key in entry.value]
        named = [target.words for target in inner if target is not None]
        return remedy + (f" and write its keys as {', '.join(named)}" if named else ""), None
    known = last is not None or entry.path in read_beside("keys.yaml")["gone"]
    return remedy, partial(delete_key, path=entry.path) if known else None


@dataclass(frozen=True)
class MeantKey:
    """The key that another one means. `certain`: by knowledge, not by spelling."""

    path: str
    certain: bool
    same_value: bool = True
    note: str = ""

    @property
    def words(self) -> str:
        return f"{self.path} ({self.note})" if self.note else self.path


@functools.cache
def meaning(schema: Schema, parent: str, written: str) -> MeantKey | None:
    """The key of this release that a refused key means: an old or a later name, a name of vLLM or of a flag, a
    leaf that only one mapping has; spelling last."""
    name = written.replace("-", "_").strip()
    path = f"{parent}.{name}".lstrip(".")
    itself = f"{parent}.{written}".lstrip(".")
    # a key of another release means what it means there
    real = (
        itself in read_beside("keys.yaml")["gone"] or schema.last_release_with(itself) is not None
    )
    known = renames() if real else {**known_names("foreign"), **renames()}
    plain = {"same_value": True, "note": ""}
    rows = [{**plain, "to": path}, *(known[each] for each in (path, name) if each in known)]
    rows += [{**row, "to": old} for old, row in renames().items() if row["to"] == path]
    rows += [{**plain, "to": option.key} for option in schema.option(f"--{name}").taken]
    for row in rows:
        if row["to"] in schema.fields and (row["to"] != itself or "." in written):
            return MeantKey(row["to"], True, row["same_value"], row["note"])
    if real:
        return None
    return _by_structure(schema, itself, name) or _by_spelling(schema, parent, name)


def _by_structure(schema: Schema, itself: str, name: str) -> MeantKey | None:
    """The one key with this name, or with this name after its mapping's (`moe_backend`), anywhere in the file."""
    leaves = [path for path in schema.fields if path.rpartition(".")[2] == name]
    candidates = _joined(schema).get(name, leaves)
    if len(candidates) == 1 and candidates[0] != itself:
        return MeantKey(candidates[0], True)
    return None


@functools.cache
def _joined(schema: Schema) -> dict[str, list[str]]:
    """Paths by the name of their mapping and their own: `cuda_graph_max_batch_size`."""
    joined: dict[str, list[str]] = {}
    for path in schema.fields:
        parent, _, leaf = path.rpartition(".")
        for name in {path, f"{parent.removesuffix('_config')}_{leaf}".strip("_")}:
            joined.setdefault(name, []).append(path)
    return joined


def _by_spelling(schema: Schema, parent: str, name: str) -> MeantKey | None:
    """The nearest key of the same mapping or of the top level; at the top level, of any mapping."""
    names = {path.removeprefix(f"{parent}."): path for path in schema.fields}
    if not parent:
        names = {joined: paths[0] for joined, paths in _joined(schema).items()}
    for each, path in list(names.items()):
        names.setdefault(each.removesuffix("_config"), path)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=NEAR)
    return MeantKey(names[near[0]], False) if near else None


def _moving(schema: Schema, entry: Entry, to: str) -> Fix | None:
    """The fix that moves a key with its value; None where the value would mean something else there."""
    field = schema.fields.get(to)
    if field is None or check_value(field, entry.value) is not None:
        return None
    return partial(move_key, path=entry.path, to=to)
