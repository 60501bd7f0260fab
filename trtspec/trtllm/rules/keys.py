"""Keys, types and values of a file against the schema of one version: what the engine's classes would refuse.

Values are judged by pydantic's own validators, built from the schema's types and limits with pydantic-core, which is
what a pydantic class compiles to.
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from trtspec.errors import Severity
from trtspec.trtllm.deployment import Finding, Fix
from trtspec.trtllm.document import Document, Entry, delete_key, move_key, same, scalar, set_value
from trtspec.trtllm.schema import (
    DISCRIMINATORS,
    LINES,
    Field,
    Removed,
    Schema,
    line_fields,
    removed_in,
)

Verdict = tuple[Literal["type", "value", "range", "lax"], str]

NAMES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "object": "a mapping",
}
LIMITS = {"ge": "at least", "le": "at most", "gt": "above", "lt": "below"}
ITEMS: dict[str, tuple[str, Callable[[list[float]], bool]]] = {
    "increasing": ("increase", lambda items: all(map(operator.lt, items, items[1:]))),
    "shares": (
        "be above 0 and add up to 1",
        lambda items: min(items) > 0 and math.isclose(sum(items), 1, abs_tol=1e-6),
    ),
}
SHOWN = 80  # characters of a value in a message


def check_value(field: Field, value: Any) -> Verdict | None:
    """None when the value is good; "lax" when the engine converts it on its own."""
    try:
        made = as_engine(field, value)
    except ValidationError as error:
        return _refusal(field, value, error)
    if isinstance(made, list) and field.items:
        wanted, holds = ITEMS[field.items]
        if not holds(made):
            return "range", f"must {wanted}, not {shown(value)}"
    if _unchanged(value, made):
        return None
    return "lax", f"{shown(value)} is not {describe(field)}; the engine reads it as {shown(made)}"


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
            whole = {
                name: int(limit) if limit == int(limit) else limit for name, limit in bounds.items()
            }
            return core_schema.int_schema(strict=strict, **whole)  # type: ignore[arg-type]
        if kind == "float":
            return core_schema.float_schema(**bounds)  # type: ignore[arg-type]
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


def _unchanged(value: Any, made: Any) -> bool:
    """Case aside, and an integer is a number."""
    if isinstance(value, str) and isinstance(made, str):
        return value.lower() == made.lower()
    if isinstance(value, int) and not isinstance(value, bool) and isinstance(made, float):
        return True
    if isinstance(value, list) and isinstance(made, list):
        return len(value) == len(made) and all(map(_unchanged, value, made))
    return same(value, made)


def _refusal(field: Field, value: Any, error: ValidationError) -> Verdict:
    if value is None:
        return "type", f"must be {describe(field)}, not empty"
    found = error.errors(include_url=False, include_input=False)
    for item in found:
        limit = next(
            ((name, item["ctx"][name]) for name in LIMITS if name in item.get("ctx", {})), None
        )
        if limit is not None:
            return "range", f"must be {LIMITS[limit[0]]} {_number(limit[1])}, not {shown(value)}"
        if item["type"] == "too_short":
            return (
                "range",
                f"must not be {'an empty mapping' if isinstance(value, dict) else 'an empty list'}",
            )
    words = [
        item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)
    ]
    fold = str.lower if field.case_insensitive else str
    known = {fold(str(choice)) for choice in field.allowed}
    wrong = next((word for word in words if fold(word) not in known), None)
    if wrong is not None and any(item["type"] == "literal_error" for item in found):
        return "value", f"{shown(wrong)} is not {describe(field)}"
    return "type", f"must be {describe(field)}, not {shown(value)}"


def _number(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else str(limit)


def shown(value: Any) -> str:
    """A value in a message, on one line and never long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def describe(field: Field) -> str:
    """The accepted values in words."""
    if field.allowed:
        plain = " or ".join(NAMES[kind] for kind in field.types if kind in ("bool", "int", "float"))
        listed = f"one of {', '.join(str(item) for item in field.allowed)}"
        return f"{plain} or {listed}" if plain else listed
    words = [NAMES.get(kind) or _container(kind) for kind in field.types if kind != "null"]
    return " or ".join(words) + (" or null" if "null" in field.types else "")


def _container(kind: str) -> str:
    if kind.startswith("list["):
        return f"a list ({kind[5:-1]})"
    return f"a mapping ({kind[5:-1].replace(',', ' -> ')})"


VALUE_CODES = {
    "type": "TS-LINT-WRONG-TYPE",
    "value": "TS-LINT-BAD-VALUE",
    "range": "TS-LINT-OUT-OF-RANGE",
    "lax": "TS-LINT-CONVERTED-VALUE",
}
OTHER_NUMBER = re.compile(r"[-+]?(0[0-7_]+|\d+(:\d+)+)")  # octal, and base 60
MOST_NAMED = 200  # unknown keys that are reported one by one
MOST_COMPARED = 100  # characters of a value that is compared with the allowed ones


def check_keys(document: Document, schema: Schema) -> Iterator[Finding]:
    for entry in document.duplicates:
        message = f"{entry.path} is written twice; YAML silently keeps the last"
        severity: Severity = "warning" if same(entry.value, document.get(entry.path)) else "error"
        yield Finding("TS-LINT-DUPLICATE-KEY", severity, entry.path, message, line=entry.line)
    yield from _missing(document, schema)
    unknown, named = set[str](), 0
    children = functools.cache(schema.children)
    for path, entry in document.entries.items():
        if entry.parent in unknown:
            unknown.add(path)  # the parent's finding covers it
            continue
        field = schema.fields.get(path)
        if field is not None:
            yield from _known(document, schema, entry, field)
            continue
        unknown.add(path)
        named += 1
        if (
            named <= MOST_NAMED
            and (finding := _unknown(schema, entry, children(entry.parent))) is not None
        ):
            yield finding
    if named > MOST_NAMED:
        message = f"{named - MOST_NAMED} more keys are not known to TensorRT-LLM {schema.version}"
        yield Finding(
            "TS-LINT-UNKNOWN-KEY", "error", "", message, "check that this is an engine file"
        )


def _missing(document: Document, schema: Schema) -> Iterator[Finding]:
    """Keys without which the engine refuses the object that they belong to."""
    for path, field in schema.fields.items():
        parent, _, name = path.rpartition(".")
        if (
            not field.required
            or not parent
            or not isinstance(document.get(parent), dict)
            or document.has(path)
        ):
            continue
        telling = DISCRIMINATORS.get(parent)
        kind = document.get(f"{parent}.{telling}") if telling else None
        if field.required_of(kind):
            message = f"{parent} needs {name}" + (
                f" with {telling} {kind}" if kind is not None else ""
            )
            yield Finding("TS-LINT-MISSING-KEY", "error", path, message, f"write {_example(field)}")


def _known(document: Document, schema: Schema, entry: Entry, field: Field) -> Iterator[Finding]:
    path = entry.path
    if field.status == "deprecated" and all(
        path != one.sampling_key for one in schema.possibilities
    ):
        # where speculation needs the sampling key, another rule asks for it
        why = field.note.removeprefix("deprecated, ")
        message = f"{path} is deprecated{f': {why}' if why else ''}"
        yield Finding("TS-LINT-DEPRECATED", "info", path, message)
    top = path.partition(".")[0]
    kind = document.get(f"{top}.{DISCRIMINATORS.get(top)}")
    if field.variants and isinstance(kind, str) and kind not in field.variants:
        message = f"{DISCRIMINATORS[top]} {kind} has no key {entry.name} (only {', '.join(field.variants)})"
        yield Finding("TS-LINT-WRONG-VARIANT", "error", path, message)
    verdict = check_value(field, entry.value)
    if verdict is not None:
        yield _bad_value(schema, entry, field, verdict)
    elif isinstance(entry.value, int) and OTHER_NUMBER.fullmatch(entry.value_node.text):
        message = f"YAML reads {entry.value_node.text} as {entry.value}"
        yield Finding("TS-LINT-OTHER-NUMBER", "error", path, message, on_value=True)


def _bad_value(schema: Schema, entry: Entry, field: Field, verdict: tuple[str, str]) -> Finding:
    kind, message = verdict
    if kind == "lax":
        return Finding(VALUE_CODES[kind], "info", entry.path, message, on_value=True)
    remedy, fix = f"{field.path} takes a value as in {_example(field)}", None
    if kind == "value":
        lines = [line for line in LINES if entry.value in line_fields(line, entry.path, "allowed")]
        if lines:
            message += f" in {schema.version}; the lines {', '.join(lines)} have it"
        near, certain = _nearest_value(entry.value, field)
        if near is not None:
            remedy = f"write {near}" if certain else f"did you mean {near}?"
            fix = partial(set_value, path=entry.path, value=near) if certain else None
    return Finding(VALUE_CODES[kind], "error", entry.path, message, remedy, fix, on_value=True)


def _example(field: Field) -> str:
    if field.allowed:
        return f"`{field.path.rpartition('.')[2]}: {field.allowed[0]}`"
    samples: dict[str, Any] = {
        "int": 8,
        "float": 0.5,
        "bool": True,
        "str": "text",
        "object": {},
        "list[int]": [1, 2],
        "list[float]": [0.25, 0.75],
    }
    sample = next((samples[kind] for kind in field.types if kind in samples), None)
    return f"`{field.path.rpartition('.')[2]}: {scalar(sample)}`"


def _nearest_value(value: Any, field: Field) -> tuple[Any, bool]:
    """The allowed value that was probably meant, and whether only its case or underscores differ."""
    if not isinstance(value, str) or len(value) > MOST_COMPARED:
        return None, False
    by_plain = {str(item).lower().replace("_", ""): item for item in field.allowed}
    plain = value.lower().replace("_", "")
    near = difflib.get_close_matches(plain, list(by_plain), n=1, cutoff=0.75)
    return (by_plain[near[0]], near[0] == plain) if near else (None, False)


def _unknown(schema: Schema, entry: Entry, siblings: list[str]) -> Finding | None:
    """`siblings`: the keys that are known in the same mapping."""
    parent, name = entry.parent, entry.name
    owner = schema.fields.get(parent) if parent else None
    if owner is not None and not owner.is_object:
        return None  # a free mapping, or a wrong type that is already reported
    if entry.path in schema.removed:
        return _removed(schema, entry, schema.removed[entry.path])
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    dated = any(entry.path in one.fields for one in schema.possibilities)  # known to come later
    if owner is not None and owner.open and not near and not dated:
        if not siblings:
            return None
        message = f"the keys of {parent} are not all known for {schema.version}; {name} is not among those that are"
        return Finding(
            "TS-LINT-KEY-UNCERTAIN", "warning", entry.path, message, "check it on the engine"
        )
    if "." in name:
        return _dotted(schema, entry)
    return _refused(schema, entry, near[0] if near else "")


def _dotted(schema: Schema, entry: Entry) -> Finding:
    """A key such as `moe_config.backend`, which many tools take for a path and the engine for a name."""
    to = f"{entry.parent}.{entry.name}".lstrip(".")
    message = f"the engine takes {entry.name} for the name of one key, which {entry.parent or 'the top level'} lacks"
    first, _, rest = entry.name.partition(".")
    remedy = (
        f"nest it: `{first}: {{{rest}: ...}}`" if to in schema.fields else f"remove {entry.name}"
    )
    fix = _moving(schema, entry, to)
    return Finding("TS-LINT-DOTTED-KEY", "error", entry.path, message, remedy, fix)


def _refused(schema: Schema, entry: Entry, near: str) -> Finding:
    place = entry.parent or "the top level"
    message = (
        f"TensorRT-LLM {schema.version} refuses unknown keys, and {place} has no key {entry.name}"
    )
    later = [line for line in LINES if entry.path in line_fields(line)]
    earlier = _names_before(schema.line).get(entry.path, ())
    old = next((path for path in earlier if path in schema.fields), None)
    if later:
        message += f" (the lines {', '.join(later)} have it)"
    elsewhere = [path for path in schema.fields if path.rpartition(".")[2] == entry.name]
    fix: Fix | None = None
    if old is not None:
        remedy, fix = f"here it is called {old}", _moving(schema, entry, old)
    elif near and not later:
        remedy = f"did you mean {near}?"
    elif elsewhere:
        remedy = f"did you mean {elsewhere[0]}?"
    else:
        remedy = f"remove {entry.name}"
    return Finding("TS-LINT-UNKNOWN-KEY", "error", entry.path, message, remedy, fix)


@functools.cache
def _names_before(line: str) -> dict[str, list[str]]:
    """What keys of later lines are called in this one, or in one between."""
    names: dict[str, list[str]] = {}
    for later in LINES[LINES.index(line) + 1 :]:
        for gone in removed_in(later):
            names.setdefault(gone.renamed_to or "", []).append(gone.path)
    return names


def _removed(schema: Schema, entry: Entry, gone: Removed) -> Finding:
    note = f"; {gone.note}" if gone.note else ""
    if gone.renamed_to is None:
        went = f" (it went {gone.until.interval})" if gone.until else ""
        message = f"{entry.path} does not exist in {schema.version}{went}{note}"
        severity: Severity = "error"
        if entry.value in gone.tolerated:
            message, severity = (
                f"{message}; some releases ignore it with a warning, others refuse it",
                "warning",
            )
        # what a mapping holds may be wanted under other names
        fix: Fix | None = (
            None if isinstance(entry.value, dict) else partial(delete_key, path=entry.path)
        )
        return Finding(
            "TS-LINT-REMOVED-KEY", severity, entry.path, message, f"remove {entry.name}", fix
        )
    message = f"{entry.path} is called {gone.renamed_to} in {schema.version}{note}"
    keeps_meaning = gone.same_value and not isinstance(entry.value, dict)
    fix = _moving(schema, entry, gone.renamed_to) if keeps_meaning else None
    return Finding(
        "TS-LINT-RENAMED-KEY", "error", entry.path, message, f"write {gone.renamed_to}", fix
    )


def _moving(schema: Schema, entry: Entry, to: str) -> Fix | None:
    """The fix that moves a key with its value; None where the value would mean something else there."""
    field = schema.fields.get(to)
    if field is None or check_value(field, entry.value) is not None:
        return None
    return partial(move_key, path=entry.path, to=to)
