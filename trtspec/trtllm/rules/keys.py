"""Keys, types and values of a file against the schema of one version, as the engine's classes do.

Pydantic's own validators judge values. They are built from the schema's types and limits with
pydantic-core, to which a pydantic class compiles.
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
# likeness of a slip of the hand; the nearest option of vLLM with another meaning has 0.82
NEAR = 0.83


def check_value(field: Field, value: Any) -> Verdict | None:
    """The engine's refusal of a value. None if the engine takes it or can convert it."""
    try:
        as_engine(field, value)
    except ValidationError as error:
        return _refusal(field, value, error)
    return None


def as_engine(field: Field, value: Any) -> Any:
    """The value as the engine converts it. Raises pydantic's ValidationError if it refuses it."""
    limits = (field.min, field.max, field.above, field.below)
    validator = _validator(
        field.type, limits, field.not_empty, field.allowed, field.case_insensitive, field.strict
    )
    return validator.validate_python(value)


@functools.cache
def _validator(
    union: str, limits: tuple[float | None, ...], not_empty: bool, allowed: tuple[Any, ...],
    case_insensitive: bool, strict: bool,
) -> SchemaValidator:  # fmt: skip
    """The validator of a field. `limits`: (min, max, above, below)."""
    names = ("ge", "le", "gt", "lt")
    bounds = {name: limit for name, limit in zip(names, limits, strict=True) if limit is not None}
    length = 1 if not_empty else None

    def schema_of(type_name: str) -> CoreSchema:
        if type_name == "int":
            return core_schema.int_schema(strict=strict, **bounds)  # type: ignore[arg-type]
        if type_name == "float":
            return core_schema.float_schema(**bounds)  # type: ignore[arg-type]
        if type_name == "any":
            return core_schema.any_schema()
        if type_name == "bool":
            return core_schema.bool_schema()
        if type_name == "str":
            return _string_schema(allowed, case_insensitive)
        inner = type_name[5:-1]
        if type_name.startswith("list["):
            return core_schema.list_schema(schema_of(inner), min_length=length)
        # the engine itself makes strings of env_overrides, the only `dict[str,str]` that is lax
        if type_name.startswith("dict[") and (inner != "str,str" or strict):
            key, _, item = inner.partition(",")
            return core_schema.dict_schema(schema_of(key), schema_of(item), min_length=length)
        return core_schema.dict_schema(min_length=length)

    types = union.split("|")
    schemas = [schema_of(type_name) for type_name in types if type_name != "null"]
    schema = schemas[0] if len(schemas) == 1 else core_schema.union_schema([*schemas])
    if "null" in types:
        schema = core_schema.nullable_schema(schema)
    return SchemaValidator(schema)


def _string_schema(allowed: tuple[Any, ...], case_insensitive: bool) -> CoreSchema:
    listed = [item for item in allowed if isinstance(item, str)]
    if not listed:
        return core_schema.str_schema()
    if not case_insensitive:
        return core_schema.literal_schema(listed)
    lowered = dict.fromkeys(map(str.lower, listed))
    literal = core_schema.literal_schema([*lowered, *listed])
    return core_schema.no_info_before_validator_function(
        lambda value: value.lower() if isinstance(value, str) else value, literal
    )


def _refusal(field: Field, value: Any, error: ValidationError) -> Verdict:
    error_types = {item["type"] for item in error.errors(include_url=False, include_input=False)}
    items = value if isinstance(value, list) else [value]
    has_text = any(isinstance(item, str) for item in items)
    refused: Literal["type", "value", "range"] = "type"
    if error_types & RANGE_ERRORS and value is not None:
        refused = "range"
    elif "literal_error" in error_types and has_text:
        refused = "value"
    return refused, f"must be {describe(field)}, not {shown(value)}"


def shown(value: Any) -> str:
    """A value in a message, on one line of limited length."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def describe(field: Field) -> str:
    """The accepted values in words."""
    words = [NAMES.get(name, name) for name in field.types if name != "null"]
    if field.allowed:
        words = [NAMES[name] for name in field.types if name in ("bool", "int", "float")]
        listed = ", ".join(map(str, field.allowed))
        words.append(f"one of {listed}")
    elif "null" in field.types:
        words.append("null")
    for name, phrase in LIMITS.items():
        limit = getattr(field, name)
        if limit is not None:
            words[-1] += f", {phrase} {limit}"
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
    unknown: set[str] = set()
    doubtful: set[str] = set()
    for path, entry in document.entries.items():
        if entry.parent in unknown:
            unknown.add(path)  # the parent's finding covers it
            continue
        if entry.parent not in classes():
            continue  # a free mapping
        word = schema.word(entry.parent, entry.name, variant_of(document, entry.parent))
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


def variant_of(document: Document, parent: str) -> Any:
    """The value that chooses the class of a mapping. None for a mapping of one class."""
    if parent in DISCRIMINATORS:
        return document.get(f"{parent}.{DISCRIMINATORS[parent]}")
    return None


def _missing(document: Document, schema: Schema) -> Iterator[Problem]:
    """Yields a problem for each missing key without which the engine refuses its object."""
    meant = targets(document, schema).values()
    for path, field in schema.fields.items():
        parent, _, name = path.rpartition(".")
        absent = isinstance(document.get(parent), dict) and not document.has(path)
        if not field.required or not absent or path in meant:
            continue
        variant = variant_of(document, parent)
        word = schema.word(parent, name, variant)
        if word.takes and (not field.variants or variant in field.variants):
            message = f"{parent} needs {name}"
            yield Problem("TS-LINT-MISSING-KEY", _severity(word), path, message)


def _severity(word: Word) -> Severity:
    """The severity of a refusal by every source around a release."""
    return "error" if word.settled else "warning"


def _known(schema: Schema, entry: Entry, word: Word) -> Iterator[Problem]:
    """Judges the value of a key that the release takes, and whether the key is deprecated."""
    path = entry.path
    field = word.taken[0]
    if field.status == "deprecated" and path != schema.sampling_key:
        # if speculation needs the sampling key, another rule asks for it
        message = f"{path} is deprecated: {field.note or 'it will go'}"
        yield Problem("TS-LINT-DEPRECATED", "info", path, message)
    verdicts = [check_value(each, entry.value) for each in word.taken]
    refused = [verdict is not None for verdict in verdicts]
    if any(refused) and not all(refused):
        earlier, later = ["refuses" if each else "takes" for each in refused]
        (before, _), (after, _) = word.sources
        message = f"{path}: {before} {earlier} and {after} {later} "
        message += f"{shown(entry.value)}; {schema.version} lies between"
        yield Problem("TS-LINT-VERSION-UNCERTAIN", "warning", path, message, on_value=True)
    elif verdicts[-1] is not None:
        yield _bad_value(entry, field, verdicts[-1], word)
    elif isinstance(entry.value, int) and OTHER_NUMBER.fullmatch(entry.value_node.text):
        message = f"YAML reads {entry.value_node.text} as {entry.value}"
        yield Problem("TS-LINT-OTHER-NUMBER", "error", path, message, on_value=True)


def _bad_value(entry: Entry, field: Field, verdict: Verdict, word: Word) -> Problem:
    refused, message = verdict
    near, certain = _nearest_value(entry.value, field)
    remedy = ""
    fix = None
    if near is not None and certain:
        remedy = f"write {near}"
        fix = partial(set_value, path=entry.path, value=near)
    elif near is not None:
        remedy = f"did you mean {near}?"
    if not word.settled:
        message += f" at {word.sources[0][0]}, the last source read"
    code = VALUE_CODES[refused]
    return Problem(code, _severity(word), entry.path, message, remedy, fix, on_value=True)


def _nearest_value(value: Any, field: Field) -> tuple[Any, bool]:
    """(the allowed value that was probably meant, whether only case or underscores differ).

    (None, False) if no allowed value is near.
    """
    if not isinstance(value, str) or len(value) > MAX_COMPARED:
        return None, False
    by_plain = {str(item).lower().replace("_", ""): item for item in field.allowed}
    plain = value.lower().replace("_", "")
    matches = difflib.get_close_matches(plain, by_plain, n=1, cutoff=0.75)
    if not matches:
        return None, False
    nearest = matches[0]
    return by_plain[nearest], nearest == plain


def _unknown(document: Document, schema: Schema, entry: Entry, word: Word) -> Problem:
    """The problem of a key that some source around the release refuses, or that none shows."""
    path = entry.path
    name = entry.name
    parent = entry.parent
    owner = parent or "the top level"
    target = meaning(schema, parent, name)
    last = schema.last_release_with(path)
    gone = read_beside("keys.yaml")["gone"].get(path, {})
    renamed = renames().get(path, gone)
    note = f" ({renamed['note']})" if renamed.get("note") else ""
    if word.taken:
        message = f"{path} in {schema.version}: {word.releases}{note}"
        remedy = f"write {target.path}" if target is not None and "to" in renamed else ""
        return Problem("TS-LINT-VERSION-UNCERTAIN", "warning", path, message, remedy)
    remedy, fix = _remedy(schema, entry, target, last)
    severity = _severity(word)
    unread = f"{owner} was not read whole for {schema.version} ({word.releases or 'no source'})"
    if word.settled:
        code = "TS-LINT-UNKNOWN-KEY"
        message = f"TensorRT-LLM {schema.version} refuses unknown keys, and {owner} has no key "
        message += name
    else:
        code = "TS-LINT-KEY-UNCERTAIN"
        message = f"whether there is a key {name} is not known: {unread}"
    variants: tuple[str, ...] = ()
    if parent in DISCRIMINATORS:
        variants = schema.variants_with(parent, name)
    if not name.isidentifier():
        code = "TS-LINT-DOTTED-KEY"
        severity = "error"
        message = f"the engine takes {name} for the name of one key, which {owner} lacks"
    elif variants:
        code = "TS-LINT-WRONG-VARIANT"
        variant = variant_of(document, parent)
        message = f"{DISCRIMINATORS[parent]} {variant} has no key {name} "
        message += f"(only {', '.join(variants)})"
        remedy = ""
        fix = None
    elif renamed.get("to") in schema.fields:
        code = "TS-LINT-RENAMED-KEY"
        message = f"{path} is called {renamed['to']} in {schema.version}{note}"
    elif gone or last is not None:
        code = "TS-LINT-REMOVED-KEY"
        message = f"{path} does not exist in {schema.version}{note}"
        if entry.value in gone.get("tolerated", ()):
            severity = "warning"
    if not word.settled and code != "TS-LINT-KEY-UNCERTAIN":
        message += f"; {unread}"
    return Problem(code, severity, path, message, remedy, fix)


def targets(document: Document, schema: Schema) -> dict[str, str]:
    """The keys of a file that the release refuses, each with the key that it means.

    A similar spelling counts only if the release surely refuses the key. Otherwise the absence of
    the similar key is judged too.
    """
    meant: dict[str, str] = {}
    for path, entry in document.entries.items():
        if entry.parent in classes() and path not in schema.fields:
            target = meaning(schema, entry.parent, entry.name)
            if target is None:
                continue
            variant = variant_of(document, entry.parent)
            if target.certain or schema.word(entry.parent, entry.name, variant).settled:
                meant[path] = target.path
    return meant


def _remedy(
    schema: Schema, entry: Entry, target: MeantKey | None, last: Version | None
) -> tuple[str, Fix | None]:
    """(remedy, fix or None) of a refused key. `last`: the newest release that has the key."""
    if target is not None and not target.certain:
        return f"did you mean {target.path}?", None
    if target is not None:
        fix = _moving(schema, entry, target.path) if target.same_value else None
        return f"write {target.words}", fix
    name = entry.name.replace("-", "_")
    option = read_beside("keys.yaml")["foreign_options"].get(name, name)
    options = schema.option(f"--{option}").taken
    if options:
        return f"pass {options[0].flags[0]} to trtllm-serve", None
    remedy = f"remove {entry.name}" if last is None else f"leave it out, or use {last}"
    if isinstance(entry.value, dict):  # its keys may be wanted under other names
        inner = [meaning(schema, "", str(key)) for key in entry.value]
        names = [target.words for target in inner if target is not None]
        if names:
            remedy += f" and write its keys as {', '.join(names)}"
        return remedy, None
    if last is not None or entry.path in read_beside("keys.yaml")["gone"]:
        return remedy, partial(delete_key, path=entry.path)
    return remedy, None


@dataclass(frozen=True)
class MeantKey:
    """The key that a refused key means. `certain`: by knowledge, not by spelling."""

    path: str
    certain: bool
    same_value: bool = True
    note: str = ""

    @property
    def words(self) -> str:
        return f"{self.path} ({self.note})" if self.note else self.path


@functools.cache
def meaning(schema: Schema, parent: str, written: str) -> MeantKey | None:
    """The key of this release that a refused key means. None if nothing is near.

    Names go before spelling: an old or a later name, a name of vLLM or of a flag, then a leaf that
    only one mapping has.
    """
    name = written.replace("-", "_").strip()
    path = f"{parent}.{name}".lstrip(".")
    itself = f"{parent}.{written}".lstrip(".")
    is_gone = itself in read_beside("keys.yaml")["gone"]
    is_real = is_gone or schema.last_release_with(itself) is not None
    known = renames()
    if not is_real:  # a key of another release is no name of another tool
        known = {**known_names("foreign"), **known}
    plain: dict[str, Any] = {"same_value": True, "note": ""}
    rows = [{**plain, "to": path}]
    rows += [known[each] for each in (path, name) if each in known]
    rows += [{**row, "to": old} for old, row in renames().items() if row["to"] == path]
    rows += [{**plain, "to": option.key} for option in schema.option(f"--{name}").taken]
    for row in rows:
        if row["to"] in schema.fields and (row["to"] != itself or "." in written):
            return MeantKey(row["to"], True, row["same_value"], row["note"])
    if is_real:
        return None
    return _by_structure(schema, itself, name) or _by_spelling(schema, parent, name)


def _by_structure(schema: Schema, itself: str, name: str) -> MeantKey | None:
    """The only key with this name, or with this name after its mapping's (`moe_backend`)."""
    leaves = [path for path in schema.fields if path.rpartition(".")[2] == name]
    candidates = _joined(schema).get(name, leaves)
    if len(candidates) == 1 and candidates[0] != itself:
        return MeantKey(candidates[0], True)
    return None


@functools.cache
def _joined(schema: Schema) -> dict[str, list[str]]:
    """Paths by the path itself and by mapping and leaf joined: `cuda_graph_max_batch_size`."""
    joined: dict[str, list[str]] = {}
    for path in schema.fields:
        parent, _, leaf = path.rpartition(".")
        mapping = parent.removesuffix("_config")
        for name in {path, f"{mapping}_{leaf}".strip("_")}:
            joined.setdefault(name, []).append(path)
    return joined


def _by_spelling(schema: Schema, parent: str, name: str) -> MeantKey | None:
    """The nearest key of the same mapping or of the top level.

    For a key of the top level, the nearest key of any mapping.
    """
    names = {path.removeprefix(f"{parent}."): path for path in schema.fields}
    if not parent:
        names = {joined: paths[0] for joined, paths in _joined(schema).items()}
    for each, path in list(names.items()):
        names.setdefault(each.removesuffix("_config"), path)
    matches = difflib.get_close_matches(name.lower(), names, n=1, cutoff=NEAR)
    if not matches:
        return None
    return MeantKey(names[matches[0]], False)


def _moving(schema: Schema, entry: Entry, to: str) -> Fix | None:
    """The fix that moves a key with its value. None if the value would be refused there."""
    field = schema.fields.get(to)
    if field is None or check_value(field, entry.value) is not None:
        return None
    return partial(move_key, path=entry.path, to=to)
