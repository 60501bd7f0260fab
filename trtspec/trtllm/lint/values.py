"""Whether the engine takes a value for a field: pydantic's lax mode, the allowed values and the limits."""

from __future__ import annotations

from typing import Any, Literal

from trtspec.trtllm.schema import Field

Verdict = tuple[Literal["type", "value", "range", "lax"], str]

BOOLEAN_WORDS = {"true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "1", "0"}
NAMES = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string", "object": "a mapping"}


def check_value(field: Field, value: Any) -> Verdict | None:
    """None when the value is good; "lax" when the engine converts it on its own."""
    if value is None:
        return None if "null" in field.types else ("type", f"must be {describe(field)}, not empty")
    exact = [kind for kind in field.types if _is(kind, value)]
    refused = _check_allowed(field, value) or _check_range(field, value) if exact else None
    if exact and refused is None:
        return None
    for kind in field.types:
        if kind in exact:
            continue
        converted = _converted(kind, value)
        if converted is not None:
            limit = _check_range(field, converted)
            return limit or ("lax", f"{value!r} is not {NAMES[kind]}; the engine reads it as {converted!r}")
    return refused or ("type", f"must be {describe(field)}, not {value!r}")


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


def _is(kind: str, value: Any) -> bool:
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "str":
        return isinstance(value, str)
    if kind == "object":
        return isinstance(value, dict)
    if kind.startswith("list["):
        return isinstance(value, list) and all(_is(kind[5:-1], item) for item in value)
    if kind == "dict[int,int]":
        return isinstance(value, dict) and all(_is("int", item) for pair in value.items() for item in pair)
    return kind.startswith("dict[") and isinstance(value, dict)


def _converted(kind: str, value: Any) -> Any:
    """What pydantic makes of a value of another type, or None where it refuses."""
    if kind == "bool" and (value in (0, 1) or (isinstance(value, str) and value.lower() in BOOLEAN_WORDS)):
        return str(value).lower() in ("true", "yes", "on", "t", "y", "1", "1.0")
    if kind in ("int", "float") and isinstance(value, (bool, str, float)):
        try:
            number = float(value)
        except ValueError:
            return None
        if kind == "float":
            return number
        whole = number.is_integer() and not (isinstance(value, str) and not value.strip().lstrip("+-").isdigit())
        return int(number) if whole else None
    return None


def _check_allowed(field: Field, value: Any) -> Verdict | None:
    if not field.allowed:
        return None
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, str):
            continue
        choices = [str(choice) for choice in field.allowed]
        good = item.lower() in map(str.lower, choices) if field.case_insensitive else item in choices
        if not good:
            return "value", f"{item!r} is not {describe(field)}"
    return None


def _check_range(field: Field, value: Any) -> Verdict | None:
    """The limits of a number, or of every item of a list."""
    if isinstance(value, list):
        if field.not_empty and not value:
            return "range", "must not be an empty list"
        return next((verdict for item in value if (verdict := _check_range(field, item))), None)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    limits = (
        (field.min, lambda limit: value >= limit, "at least"),
        (field.max, lambda limit: value <= limit, "at most"),
        (field.above, lambda limit: value > limit, "above"),
        (field.below, lambda limit: value < limit, "below"),
    )
    for limit, holds, words in limits:
        if limit is not None and not holds(limit):
            return "range", f"must be {words} {limit}, not {value}"
    return None
