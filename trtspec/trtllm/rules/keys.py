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
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from trtspec.errors import Severity
from trtspec.trtllm.deployment import Finding, Fix
from trtspec.trtllm.document import Document, Entry, delete_key, move_key, same, scalar, set_value
from trtspec.trtllm.schema import DISCRIMINATORS, Field, Schema, Word, read_beside, renames

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
MAX_NAMED = 200  # unknown keys that are reported one by one
MAX_COMPARED = 100  # characters of a value that is compared with the allowed ones


def check_keys(document: Document, schema: Schema) -> Iterator[Finding]:
    for entry in document.duplicates:
        message = f"{entry.path} is written twice; YAML silently keeps the last"
        severity: Severity = "warning" if same(entry.value, document.get(entry.path)) else "error"
        yield Finding("TS-LINT-DUPLICATE-KEY", severity, entry.path, message, line=entry.line)
    yield from _missing(document, schema)
    unknown, doubtful, named = set[str](), set[str](), 0
    for path, entry in document.entries.items():
        if entry.parent in unknown:
            unknown.add(path)  # the parent's finding covers it
            continue
        if not schema.is_class(entry.parent):
            continue  # a free mapping
        word = schema.word(entry.parent, entry.name, kind_of(document, entry.parent))
        if word.taken and word.earlier:
            yield from _known(document, schema, entry, word)
        if word.takes:
            continue
        if word.taken:
            doubtful.add(path)
        else:
            unknown.add(path)
            named += 1
        told = word.taken and entry.parent in doubtful  # by the parent's finding
        if not told and named <= MAX_NAMED:
            yield _unknown(document, schema, entry, word)
    if named > MAX_NAMED:
        message = f"{named - MAX_NAMED} more keys are not known to TensorRT-LLM {schema.version}"
        yield Finding(
            "TS-LINT-UNKNOWN-KEY", "error", "", message, "check that this is an engine file"
        )


def kind_of(document: Document, parent: str) -> Any:
    """The value that says which class a mapping is; None for a mapping of one class."""
    return document.get(f"{parent}.{DISCRIMINATORS[parent]}") if parent in DISCRIMINATORS else None


def _missing(document: Document, schema: Schema) -> Iterator[Finding]:
    """Keys without which the engine refuses the object that they belong to."""
    meant = set(targets(document, schema).values())
    for path, field in schema.fields.items():
        parent, _, name = path.rpartition(".")
        written = isinstance(document.get(parent), dict) and not document.has(path)
        if not field.required or not parent or not written or path in meant:
            continue
        kind = kind_of(document, parent)
        if field.variants and kind not in field.variants:
            continue
        word = schema.word(parent, name, kind)
        if not word.takes or not all(entry.required for entry in word.taken):
            continue
        severity: Severity = "error" if word.settled else "warning"
        message = f"{parent} needs {name}"
        message += f" with {DISCRIMINATORS[parent]} {kind}" if kind is not None else ""
        yield Finding("TS-LINT-MISSING-KEY", severity, path, message, f"write {_example(field)}")


def _known(document: Document, schema: Schema, entry: Entry, word: Word) -> Iterator[Finding]:
    """What is wrong with the value of a key, and whether the key goes."""
    path, field = entry.path, word.taken[0]
    if field.status == "deprecated" and path != schema.sampling_key:
        # where speculation needs the sampling key, another rule asks for it
        why = field.note.removeprefix("deprecated, ")
        message = f"{path} is deprecated{f': {why}' if why else ''}"
        yield Finding("TS-LINT-DEPRECATED", "info", path, message)
    verdicts = [check_value(each, entry.value) for each in word.taken]
    refusals = [verdict for verdict in verdicts if verdict is not None and verdict[0] != "lax"]
    if refusals and len(refusals) < len(word.said):
        sides = [
            f"{release} {'refuses' if verdict else 'takes'} {shown(entry.value)}"
            for (release, taken), verdict in zip(word.said, verdicts, strict=False)
            if taken is not None
        ]
        message = f"{path}: {', '.join(sides)}; {schema.version} lies between"
        yield Finding("TS-LINT-VERSION-UNCERTAIN", "warning", path, message, on_value=True)
    elif refusals or verdicts[0] is not None:
        verdict = refusals[-1] if refusals else verdicts[0]
        assert verdict is not None
        yield _bad_value(schema, entry, field, verdict, word)
    elif isinstance(entry.value, int) and OTHER_NUMBER.fullmatch(entry.value_node.text):
        message = f"YAML reads {entry.value_node.text} as {entry.value}"
        yield Finding("TS-LINT-OTHER-NUMBER", "error", path, message, on_value=True)


def _bad_value(
    schema: Schema, entry: Entry, field: Field, verdict: tuple[str, str], word: Word
) -> Finding:
    kind, message = verdict
    if kind == "lax":
        return Finding(VALUE_CODES[kind], "info", entry.path, message, on_value=True)
    remedy, fix = f"{field.path} takes a value as in {_example(field)}", None
    if kind == "value":
        near, certain = _nearest_value(entry.value, field)
        if near is not None:
            remedy = f"write {near}" if certain else f"did you mean {near}?"
            fix = partial(set_value, path=entry.path, value=near) if certain else None
    severity: Severity = "error" if word.settled else "warning"
    if not word.settled:
        message += f", by the source of {word.said[0][0]}; what {schema.version} takes was not read"
    return Finding(VALUE_CODES[kind], severity, entry.path, message, remedy, fix, on_value=True)


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
    if not isinstance(value, str) or len(value) > MAX_COMPARED:
        return None, False
    by_plain = {str(item).lower().replace("_", ""): item for item in field.allowed}
    plain = value.lower().replace("_", "")
    near = difflib.get_close_matches(plain, list(by_plain), n=1, cutoff=0.75)
    return (by_plain[near[0]], near[0] == plain) if near else (None, False)


def _unknown(document: Document, schema: Schema, entry: Entry, word: Word) -> Finding:
    """A key that some source around the release refuses, or that none shows."""
    parent = entry.parent or "the top level"
    remedy, fix = _remedy(document, schema, entry)
    gone = read_beside("keys.yaml")["gone"].get(entry.path, {})
    renamed = renames().get(entry.path, {})
    note = gone.get("note") or renamed.get("note")
    told = f" ({note})" if note else ""
    if word.taken:
        message = f"{entry.path} in {schema.version}: {word.releases}{told}"
        remedy = remedy if renamed else ""
        return Finding("TS-LINT-VERSION-UNCERTAIN", "warning", entry.path, message, remedy)
    code = "TS-LINT-UNKNOWN-KEY" if word.settled else "TS-LINT-KEY-UNCERTAIN"
    severity: Severity = "error" if word.settled else "warning"
    message = (
        f"TensorRT-LLM {schema.version} refuses unknown keys, and {parent} has no key {entry.name}"
    )
    kinds = schema.kinds_with(entry.parent, entry.name) if entry.parent in DISCRIMINATORS else ()
    to, others = renamed.get("to"), schema.taken_by(entry.path)
    if "." in entry.name:
        code, severity = "TS-LINT-DOTTED-KEY", "error"
        message = f"the engine takes {entry.name} for the name of one key, which {parent} lacks"
    elif kinds:
        code = "TS-LINT-WRONG-VARIANT"
        kind, key = kind_of(document, entry.parent), DISCRIMINATORS[entry.parent]
        message = f"{key} {kind} has no key {entry.name} (only {', '.join(kinds)})"
        remedy, fix = f"leave it out, or use {key} {kinds[0]}", None
    elif to is not None and to in schema.fields:
        code, message = (
            "TS-LINT-RENAMED-KEY",
            f"{entry.path} is called {to} in {schema.version}{told}",
        )
    elif gone or others:
        code = "TS-LINT-REMOVED-KEY"
        message = f"{entry.path} does not exist in {schema.version}{told}"
        message += f"; the source of {others[-1]} has it" if others else ""
        if entry.value in gone.get("tolerated", ()):
            severity = "warning"
            message += "; some releases ignore it with a warning, others refuse it"
    if not word.settled:
        last = f"the last source is {word.said[0][0]}" if word.said else "no source shows it"
        message += f"; what {parent} takes was not read for this release ({last})"
    return Finding(code, severity, entry.path, message, remedy, fix)


def targets(document: Document, schema: Schema) -> dict[str, str]:
    """The key that each key of a file which the release refuses stands for, where one is meant."""
    meant: dict[str, str] = {}
    for path, entry in document.entries.items():
        if schema.is_class(entry.parent) and path not in schema.fields:
            target = meaning(schema, entry)
            if target is not None:
                meant[path] = target.path
    return meant


def _remedy(document: Document, schema: Schema, entry: Entry) -> tuple[str, Fix | None]:
    """What to write in place of a key: from what is known of it, else from its spelling."""
    target = meaning(schema, entry)
    if target is not None:
        fix = _moving(schema, entry, target.path) if target.same_value else None
        if not target.certain:
            return f"did you mean {target.path}?", None
        note = f" ({target.note})" if target.note else ""
        return f"write {target.path}{note}", fix
    name = entry.name.replace("-", "_")
    option = read_beside("keys.yaml")["foreign_options"].get(name, name)
    if options := schema.option(f"--{option}").taken:
        return f"pass {options[0].flags[0]} to trtllm-serve", None
    others = schema.taken_by(entry.path)
    known = bool(others) or entry.path in read_beside("keys.yaml")["gone"]
    remedy = f"leave it out, or use {others[-1]}" if others else f"remove {entry.name}"
    if isinstance(entry.value, dict):  # what it holds may be wanted under other names
        return f"{remedy}, and write its keys where they belong", None
    return remedy, partial(delete_key, path=entry.path) if known else None


@dataclass(frozen=True)
class Target:
    """The key that another one stands for. `certain`: by knowledge, not by spelling."""

    path: str
    certain: bool
    same_value: bool = True
    note: str = ""


def meaning(schema: Schema, entry: Entry) -> Target | None:
    """The key of this release that a refused key stands for: an old or a later name, a name of vLLM or of a flag, a
    leaf that only one mapping has; spelling last."""
    words = read_beside("keys.yaml")
    name = entry.name.replace("-", "_").strip()
    path = f"{entry.parent}.{name}".lstrip(".")
    for known in (renames(), words["foreign"]):
        for written in (path, name):
            to = known.get(written)
            stated: dict[str, Any] = to if isinstance(to, dict) else {"to": to}
            if stated["to"] in schema.fields and stated["to"] != entry.path:
                same_value = stated.get("same_value", True)
                return Target(stated["to"], True, same_value, stated.get("note", ""))
    reverse = (old for old, stated in renames().items() if stated["to"] == path)
    if (old := next((old for old in reverse if old in schema.fields), None)) is not None:
        return Target(old, True, renames()[old].get("same_value", True))
    if path in schema.fields and path != entry.path:
        return Target(path, True)
    option = schema.option(f"--{name}").taken
    if option and option[0].key in schema.fields:
        return Target(option[0].key, True)
    if (target := _by_structure(schema, entry, name)) is not None:
        return target
    known = entry.path in words["gone"] or schema.taken_by(entry.path)
    return None if known else _by_spelling(schema, entry, name)


def _by_structure(schema: Schema, entry: Entry, name: str) -> Target | None:
    """The one key with this name, or with this name after its mapping's (`moe_backend`), anywhere in the file."""
    leaves = [path for path in schema.fields if path.rpartition(".")[2] == name]
    joined = _joined(schema).get(name, [])
    top = [path for path in leaves if "." not in path]
    candidates = top or joined or leaves
    if len(candidates) == 1 and candidates[0] != entry.path:
        return Target(candidates[0], True)
    return None


@functools.cache
def _joined(schema: Schema) -> dict[str, list[str]]:
    """Paths by the name of their mapping and their own: `cuda_graph_max_batch_size`."""
    joined: dict[str, list[str]] = {}
    for path in schema.fields:
        parent, _, leaf = path.rpartition(".")
        if parent and "." not in parent:
            owner = parent.removesuffix("_config")
            for words in (f"{owner}_{leaf}", f"{parent}_{leaf}", f"{parent}.{leaf}"):
                joined.setdefault(words, []).append(path)
    return joined


def _by_spelling(schema: Schema, entry: Entry, name: str) -> Target | None:
    siblings = {child.lower(): child for child in schema.children(entry.parent)}
    near = difflib.get_close_matches(name.lower(), siblings, n=1, cutoff=0.7)
    if near:
        return Target(f"{entry.parent}.{siblings[near[0]]}".lstrip("."), False)
    near = difflib.get_close_matches(name.lower(), _joined(schema), n=1, cutoff=0.85)
    return Target(_joined(schema)[near[0]][0], False) if near else None


def _moving(schema: Schema, entry: Entry, to: str) -> Fix | None:
    """The fix that moves a key with its value; None where the value would mean something else there."""
    field = schema.fields.get(to)
    if field is None or check_value(field, entry.value) is not None:
        return None
    return partial(move_key, path=entry.path, to=to)
