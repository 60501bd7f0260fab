"""Whether the engine takes a value for a field, and what it makes of it: pydantic's own validators, as its classes use.

They are built from the schema's types and limits with pydantic-core, which is what a pydantic class compiles to.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from trtspec.trtllm.document import same
from trtspec.trtllm.schema import Field

Verdict = tuple[Literal["type", "value", "range", "lax"], str]

NAMES = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string", "object": "a mapping"}
LIMITS = {"ge": "at least", "le": "at most", "gt": "above", "lt": "below"}
SHOWN = 80  # characters of a value in a message


def check_value(field: Field, value: Any) -> Verdict | None:
    """None when the value is good; "lax" when the engine converts it on its own."""
    try:
        made = as_engine(field, value)
    except ValidationError as error:
        return _refusal(field, value, error)
    if _unchanged(value, made):
        return None
    return "lax", f"{shown(value)} is not {describe(field)}; the engine reads it as {shown(made)}"


def as_engine(field: Field, value: Any) -> Any:
    """What the engine makes of a value. Raises pydantic's ValidationError where it refuses it."""
    limits = (field.min, field.max, field.above, field.below)
    rules = (field.type, limits, field.not_empty, field.allowed, field.case_insensitive)
    return _validator(*rules).validate_python(value)


@functools.cache
def _validator(
    union: str, limits: tuple[float | None, ...], not_empty: bool, allowed: tuple[Any, ...], case_insensitive: bool
) -> SchemaValidator:
    names = ("ge", "le", "gt", "lt")
    bounds = {name: limit for name, limit in zip(names, limits, strict=True) if limit is not None}
    length = 1 if not_empty else None

    def made(kind: str) -> CoreSchema:
        if kind == "int":
            whole = {name: int(limit) if limit == int(limit) else limit for name, limit in bounds.items()}
            return core_schema.int_schema(**whole)  # type: ignore[arg-type]
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
            if (key, item) == ("str", "str"):  # env_overrides, which turns keys and values into strings itself
                return core_schema.dict_schema(min_length=length)
            return core_schema.dict_schema(made(key), made(item), min_length=length)
        return core_schema.dict_schema(min_length=length)

    kinds = [kind for kind in union.split("|") if kind != "null"]
    schema = made(kinds[0]) if len(kinds) == 1 else core_schema.union_schema([made(kind) for kind in kinds])
    return SchemaValidator(core_schema.nullable_schema(schema) if "null" in union.split("|") else schema)


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
        limit = next(((name, item["ctx"][name]) for name in LIMITS if name in item.get("ctx", {})), None)
        if limit is not None:
            return "range", f"must be {LIMITS[limit[0]]} {_number(limit[1])}, not {shown(value)}"
        if item["type"] == "too_short":
            return "range", f"must not be {'an empty mapping' if isinstance(value, dict) else 'an empty list'}"
    words = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
    wrong = next((word for word in words if not _is_word(field, word)), None)
    if wrong is not None and any(item["type"] == "literal_error" for item in found):
        return "value", f"{shown(wrong)} is not {describe(field)}"
    return "type", f"must be {describe(field)}, not {shown(value)}"


def _is_word(field: Field, word: str) -> bool:
    choices = [str(choice) for choice in field.allowed]
    return word.lower() in map(str.lower, choices) if field.case_insensitive else word in choices


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
