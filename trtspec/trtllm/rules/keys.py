"""Judges the keys, types and values of a file by the schema of one release, as the engine does.

Pydantic's own validators judge values. They are built with pydantic-core from the schema's types
and limits.
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
    KeySupport,
    Schema,
    classes,
    known_names,
    read_beside,
    renames,
)

Verdict = tuple[Literal["type", "value", "range"], str]  # what the engine refuses, and a message

# words for the types of a schema in a message
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
# likeness (difflib) from which a key is a misspelled one: the most similar option of vLLM with
# another meaning has 0.82
NEAR = 0.83
NEAR_VALUE = 0.75  # likeness from which a text is a misspelled value


def check_value(field: Field, value: Any) -> Verdict | None:
    """Judges one value.

    Returns the engine's refusal, None if the engine takes or converts the value.
    """
    try:
        as_engine(field, value)
    except ValidationError as error:
        return _refusal(field, value, error)
    return None


def as_engine(field: Field, value: Any) -> Any:
    """Returns the value as the engine converts it.

    Raises ValidationError if the engine refuses it.
    """
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
    """Builds the validator of a field's type.

    Args:
        union: types, such as "int|null" or "list[int]".
        limits: numbers (min, max, above, below), None for no limit.
        not_empty: whether an empty list or mapping is refused.
        allowed: texts that are taken, empty for any text.
        case_insensitive: whether the case of an allowed text is free.
        strict: whether 8.0 is refused as an integer, and a number as a text.
    """
    names = ("ge", "le", "gt", "lt")
    bounds = {name: limit for name, limit in zip(names, limits, strict=True) if limit is not None}
    min_length = 1 if not_empty else None

    def schema_of(type_name: str) -> CoreSchema:
        """Schema of pydantic-core for one member of the union."""
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
        inner = type_name[5:-1]  # between the brackets of `list[...]` or `dict[...]`
        if type_name.startswith("list["):
            return core_schema.list_schema(schema_of(inner), min_length=min_length)
        # the engine itself makes strings of env_overrides, the only `dict[str,str]` that is lax
        if type_name.startswith("dict[") and (inner != "str,str" or strict):
            key, _, item = inner.partition(",")
            return core_schema.dict_schema(schema_of(key), schema_of(item), min_length=min_length)
        return core_schema.dict_schema(min_length=min_length)

    types = union.split("|")
    schemas = [schema_of(type_name) for type_name in types if type_name != "null"]
    schema = schemas[0] if len(schemas) == 1 else core_schema.union_schema([*schemas])
    if "null" in types:
        schema = core_schema.nullable_schema(schema)
    return SchemaValidator(schema)


def _string_schema(allowed: tuple[Any, ...], case_insensitive: bool) -> CoreSchema:
    """Schema for a text, or for one of the allowed texts if there are any."""
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
    """Verdict on a value that the validator refused with `error`."""
    error_types = {item["type"] for item in error.errors(include_url=False, include_input=False)}
    items = value if isinstance(value, list) else [value]
    has_text = any(isinstance(item, str) for item in items)
    refused: Literal["type", "value", "range"] = "type"
    # null has no size, and only a text can be a misspelled value
    if error_types & RANGE_ERRORS and value is not None:
        refused = "range"
    elif "literal_error" in error_types and has_text:
        refused = "value"
    return refused, f"must be {describe(field)}, not {shown(value)}"


def shown(value: Any) -> str:
    """Text of a value for a message, on one line of at most SHOWN characters and " ..."."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def describe(field: Field) -> str:
    """Describes in words the values that the engine accepts for a field."""
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
    if field.not_empty:
        words[-1] += ", not empty"
    return " or ".join(words)


VALUE_CODES = {
    "type": "TS-LINT-WRONG-TYPE",
    "value": "TS-LINT-BAD-VALUE",
    "range": "TS-LINT-OUT-OF-RANGE",
}
OTHER_NUMBER = re.compile(r"[-+]?(0[0-7_]+|\d+(:\d+)+)")  # octal, and base 60
MAX_UNKNOWN = 200  # keys, after which the rest of a file is not judged
MAX_COMPARED = 100  # characters of a value that is compared with the allowed ones


def check_keys(document: Document, schema: Schema) -> Iterator[Problem]:
    """Yields the problems of the keys in a file, and of their values.

    Problems are duplicate, missing, unknown and deprecated keys, and refused values.
    """
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
            continue  # a mapping in which the engine takes any key
        support = schema.key_support(entry.parent, entry.name, variant_of(document, entry.parent))
        if support.taken and support.earlier:
            yield from _known(schema, entry, support)
        if support.takes:
            continue
        if support.taken:
            doubtful.add(path)
        else:
            unknown.add(path)
        if not (support.taken and entry.parent in doubtful):  # else the parent's finding covers it
            yield _unknown(document, schema, entry, support)
        if len(unknown) > MAX_UNKNOWN:  # the file is not an engine file, or a very long mistake
            message = f"more than {MAX_UNKNOWN} keys are not known to TensorRT-LLM {schema.version}"
            yield Problem("TS-LINT-UNKNOWN-KEY", "error", "", message)
            return


def variant_of(document: Document, parent: str) -> Any:
    """Value of the key that chooses the class of the mapping at `parent`.

    None if it has one class, or if the key is not written.
    """
    if parent in DISCRIMINATORS:
        return document.get(f"{parent}.{DISCRIMINATORS[parent]}")
    return None


def _missing(document: Document, schema: Schema) -> Iterator[Problem]:
    """Yields a problem for each missing key without which the engine refuses its mapping."""
    intended = intended_keys(document, schema).values()
    for path, field in schema.fields.items():
        parent, _, name = path.rpartition(".")
        absent = isinstance(document.get(parent), dict) and not document.has(path)
        if not field.required or not absent or path in intended:
            continue
        variant = variant_of(document, parent)
        support = schema.key_support(parent, name, variant)
        if support.takes and (not field.variants or variant in field.variants):
            message = f"{parent} needs {name}"
            yield Problem("TS-LINT-MISSING-KEY", _severity(support), path, message)


def _severity(support: KeySupport) -> Severity:
    """Severity of a refusal by all sources around a release."""
    return "error" if support.is_certain else "warning"


def _known(schema: Schema, entry: Entry, support: KeySupport) -> Iterator[Problem]:
    """Judges the value of a key that the release takes, and whether the key is deprecated."""
    path = entry.path
    field = support.taken[0]
    if field.status == "deprecated" and path != schema.sampling_key:
        # if speculation needs the sampling key, another rule asks for it
        message = f"{path} is deprecated: {field.note or 'it will go'}"
        yield Problem("TS-LINT-DEPRECATED", "info", path, message)
    verdicts = [check_value(each, entry.value) for each in support.taken]
    refused = [verdict is not None for verdict in verdicts]
    if any(refused) and not all(refused):  # so there are two sources, which disagree
        earlier, later = ["refuses" if is_refused else "takes" for is_refused in refused]
        (before, _), (after, _) = support.sources
        message = (
            f"{path}: {before} {earlier} and {after} {later} "
            f"{shown(entry.value)}; {schema.version} lies between"
        )
        yield Problem("TS-LINT-VERSION-UNCERTAIN", "warning", path, message, on_value=True)
    elif verdicts[-1] is not None:
        yield _bad_value(entry, field, verdicts[-1], support)
    # YAML 1.1 reads 010 as 8 and 1:30 as 90, which nobody expects
    elif isinstance(entry.value, int) and OTHER_NUMBER.fullmatch(entry.value_node.text):
        message = f"YAML reads {entry.value_node.text} as {entry.value}"
        yield Problem("TS-LINT-OTHER-NUMBER", "error", path, message, on_value=True)


def _bad_value(entry: Entry, field: Field, verdict: Verdict, support: KeySupport) -> Problem:
    """Problem of a refused value. The fix writes the allowed value that differs in form only."""
    refused, message = verdict
    near, certain = _nearest_value(entry.value, field)
    remedy = ""
    fix = None
    if near is not None and certain:
        remedy = f"write {near}"
        fix = partial(set_value, path=entry.path, value=near)
    elif near is not None:
        remedy = f"did you mean {near}?"
    if not support.is_certain:
        message += f" at {support.sources[0][0]}, the last source read"
    code = VALUE_CODES[refused]
    return Problem(code, _severity(support), entry.path, message, remedy, fix, on_value=True)


def _nearest_value(value: Any, field: Field) -> tuple[Any, bool]:
    """Returns the allowed value nearest to a misspelled one, and whether only its form differs.

    The form is the case and underscores. Returns (None, False) if no allowed value is near.
    """
    if not isinstance(value, str) or len(value) > MAX_COMPARED:
        return None, False
    by_plain_form = {str(item).lower().replace("_", ""): item for item in field.allowed}
    plain_form = value.lower().replace("_", "")
    matches = difflib.get_close_matches(plain_form, by_plain_form, n=1, cutoff=NEAR_VALUE)
    if not matches:
        return None, False
    nearest = matches[0]
    return by_plain_form[nearest], nearest == plain_form


def _unknown(document: Document, schema: Schema, entry: Entry, support: KeySupport) -> Problem:
    """Problem of a key that a source around the release refuses, or that no source shows."""
    path = entry.path
    name = entry.name
    parent = entry.parent
    owner = parent or "the top level"
    intended = intended_key(schema, parent, name)
    last_release = schema.last_release_with(path)
    # fields of keys.yaml on a key without a successor: `note` and the values that are harmless
    removed = read_beside("keys.yaml")["gone"].get(path, {})
    renamed = renames().get(path, removed)
    note = f" ({renamed['note']})" if renamed.get("note") else ""
    if support.taken:
        message = f"{path} in {schema.version}: {support.releases}{note}"
        remedy = f"write {intended.path}" if intended is not None and "to" in renamed else ""
        return Problem("TS-LINT-VERSION-UNCERTAIN", "warning", path, message, remedy)
    remedy, fix = _remedy(schema, entry, intended, last_release)
    severity = _severity(support)
    unread = f"{owner} was not read whole for {schema.version} ({support.releases or 'no source'})"
    if support.is_certain:
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
        message = (
            f"{DISCRIMINATORS[parent]} {variant} has no key {name} (only {', '.join(variants)})"
        )
        remedy = ""
        fix = None
    elif renamed.get("to") in schema.fields:
        code = "TS-LINT-RENAMED-KEY"
        message = f"{path} is called {renamed['to']} in {schema.version}{note}"
    elif removed or last_release is not None:
        code = "TS-LINT-REMOVED-KEY"
        message = f"{path} does not exist in {schema.version}{note}"
        if entry.value in removed.get("tolerated", ()):
            severity = "warning"
    if not support.is_certain and code != "TS-LINT-KEY-UNCERTAIN":
        message += f"; {unread}"
    return Problem(code, severity, path, message, remedy, fix)


def intended_keys(document: Document, schema: Schema) -> dict[str, str]:
    """Keys that a file's author intended, by the written key that the release refuses.

    Keys for which nothing is near are left out. A similar spelling counts only if the release
    surely refuses the written key. Otherwise the absence of the similar key is judged too.
    """
    intended: dict[str, str] = {}
    for path, entry in document.entries.items():
        if entry.parent in classes() and path not in schema.fields:
            key = intended_key(schema, entry.parent, entry.name)
            if key is None:
                continue
            variant = variant_of(document, entry.parent)
            if key.certain or schema.key_support(entry.parent, entry.name, variant).is_certain:
                intended[path] = key.path
    return intended


def _remedy(
    schema: Schema, entry: Entry, intended: IntendedKey | None, last_release: Version | None
) -> tuple[str, Fix | None]:
    """Returns the remedy for a refused key, and the fix, None if no edit is certain.

    Args:
        intended: key that the author intended. None if nothing is near.
        last_release: newest release that has the refused key. None if no release has it.
    """
    if intended is not None and not intended.certain:
        return f"did you mean {intended.path}?", None
    if intended is not None:
        fix = _moving(schema, entry, intended.path) if intended.same_value else None
        return f"write {intended.words}", fix
    name = entry.name.replace("-", "_")
    option = read_beside("keys.yaml")["foreign_options"].get(name, name)
    options = schema.option(f"--{option}").taken
    if options:
        return f"pass {options[0].flags[0]} to trtllm-serve", None
    remedy = f"remove {entry.name}"
    if last_release is not None:
        remedy = f"leave it out, or use {last_release}"
    if isinstance(entry.value, dict):  # its keys may be wanted under other names
        inner_keys = [intended_key(schema, "", str(key)) for key in entry.value]
        names = [inner.words for inner in inner_keys if inner is not None]
        if names:
            remedy += f" and write its keys as {', '.join(names)}"
        return remedy, None
    # only a key that an engine once had is deleted: any other may be a misspelled one
    if last_release is not None or entry.path in read_beside("keys.yaml")["gone"]:
        return remedy, partial(delete_key, path=entry.path)
    return remedy, None


@dataclass(frozen=True)
class IntendedKey:
    """The key of a release that the author of a refused key intended.

    Args:
        path: dotted path of the key.
        certain: whether a list or the structure names the key. False if only its spelling is near.
        same_value: whether the value means the same at `path`.
        note: advice on the value, "" for none.
    """

    path: str
    certain: bool
    same_value: bool = True
    note: str = ""

    @property
    def words(self) -> str:
        """Path with the note, for a remedy."""
        return f"{self.path} ({self.note})" if self.note else self.path


@functools.cache
def intended_key(schema: Schema, parent: str, written: str) -> IntendedKey | None:
    """Finds the key of this release that the author of a refused key intended.

    None if nothing is near.

    Looks for the name with underscores, names of other releases and tools, options of the command,
    a last name that only one mapping has, and a similar spelling, in this order. A key that the
    engine once had is not compared by its last name or spelling.

    `parent`: path of the mapping with the refused key.
    """
    name = written.replace("-", "_").strip()
    path = f"{parent}.{name}".lstrip(".")
    refused = f"{parent}.{written}".lstrip(".")
    is_listed_as_gone = refused in read_beside("keys.yaml")["gone"]
    is_engine_key = is_listed_as_gone or schema.last_release_with(refused) is not None
    known = renames()
    if not is_engine_key:  # because a key of another release is not a name of another tool
        known = {**known_names("foreign"), **known}
    same: dict[str, Any] = {"same_value": True, "note": ""}
    # candidates, the most certain first: the same name with underscores, a listed name, the old
    # name of a later key, an option of the command
    candidates = [{**same, "to": path}]
    candidates += [known[listed] for listed in (path, name) if listed in known]
    candidates += [{**row, "to": old} for old, row in renames().items() if row["to"] == path]
    candidates += [{**same, "to": option.key} for option in schema.option(f"--{name}").taken]
    for candidate in candidates:
        to = candidate["to"]
        if to in schema.fields and (to != refused or "." in written):
            return IntendedKey(to, True, candidate["same_value"], candidate["note"])
    if is_engine_key:  # because it is spelled right, no other key was intended
        return None
    return _by_structure(schema, refused, name) or _by_spelling(schema, parent, name)


def _by_structure(schema: Schema, refused: str, name: str) -> IntendedKey | None:
    """The only key with the last name `name`, or with its mapping's name before it (`moe_backend`).

    None if no key or several keys match. `refused`: path of the refused key.
    """
    leaves = [path for path in schema.fields if path.rpartition(".")[2] == name]
    candidates = _joined(schema).get(name, leaves)
    if len(candidates) == 1 and candidates[0] != refused:
        return IntendedKey(candidates[0], True)
    return None


@functools.cache
def _joined(schema: Schema) -> dict[str, list[str]]:
    """Paths of keys by the path itself, and by the names of mapping and key joined.

    Joined names are such as `cuda_graph_max_batch_size`. Several paths can have the same one.
    """
    joined: dict[str, list[str]] = {}
    for path in schema.fields:
        parent, _, leaf = path.rpartition(".")
        mapping = parent.removesuffix("_config")
        for name in {path, f"{mapping}_{leaf}".strip("_")}:
            joined.setdefault(name, []).append(path)
    return joined


def _by_spelling(schema: Schema, parent: str, name: str) -> IntendedKey | None:
    """Finds the key whose spelling is nearest to `name`. None if no key is near.

    Looks at the keys of the mapping `parent` and of the top level. For a key of the top level it
    looks at the keys of every mapping.
    """
    names = {path.removeprefix(f"{parent}."): path for path in schema.fields}
    if not parent:
        names = {joined: paths[0] for joined, paths in _joined(schema).items()}
    for known, path in list(names.items()):
        names.setdefault(known.removesuffix("_config"), path)
    matches = difflib.get_close_matches(name.lower(), names, n=1, cutoff=NEAR)
    if not matches:
        return None
    return IntendedKey(names[matches[0]], False)


def _moving(schema: Schema, entry: Entry, to: str) -> Fix | None:
    """Fix that moves a key with its value to `to`.

    None if the engine would refuse the value there.
    """
    field = schema.fields.get(to)
    if field is None or check_value(field, entry.value) is not None:
        return None
    return partial(move_key, path=entry.path, to=to)
