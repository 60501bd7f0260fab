"""Reads a schema out of an engine's own pydantic classes and click options; for those who add a version."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

Entry = dict[str, Any]
PLAIN = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null"}
LISTS = (list, set, tuple, frozenset)
DEEPEST = 6  # levels of nested objects; the engine has four


@dataclass
class Shape:
    """What an annotation says: kinds of the schema files, listed values, limits, and the classes of its objects."""

    kinds: list[str] = field(default_factory=list)
    allowed: list[Any] = field(default_factory=list)
    limits: Entry = field(default_factory=dict)
    models: list[type[BaseModel]] = field(default_factory=list)
    open: bool = False

    def add(self, other: Shape) -> None:
        self.kinds += [kind for kind in other.kinds if kind not in self.kinds]
        self.allowed += [value for value in other.allowed if value not in self.allowed]
        self.limits |= other.limits
        self.models += other.models
        self.open |= other.open


def fields_of(model: type[BaseModel], prefix: str = "", depth: int = 0) -> dict[str, Entry]:
    """Every field by dotted path, nested ones included, as an entry of a schema file."""
    entries: dict[str, Entry] = {}
    for name, info in model.model_fields.items():
        shape = _shape(info.annotation, info.metadata)
        for spelling in _spellings(name, info):
            path = f"{prefix}{spelling}"
            entries[path] = _entry(shape, info)
            if shape.models and depth < DEEPEST:
                entries |= _nested(shape.models, f"{path}.", depth + 1)
    return entries


def options_of(command: Any) -> dict[str, Entry]:
    """The options of a click command, as entries of a schema file."""
    return {param.name: _option(param) for param in command.params if param.param_type_name == "option"}


def _spellings(name: str, info: FieldInfo) -> list[str]:
    alias = info.validation_alias or info.alias
    choices = getattr(alias, "choices", None) or ([alias] if alias else [name])
    return [choice for choice in choices if isinstance(choice, str)]


def _entry(shape: Shape, info: FieldInfo) -> Entry:
    entry: Entry = {"type": "|".join(shape.kinds), **shape.limits}
    if shape.allowed:
        entry["allowed"] = shape.allowed
    default = _default(info)
    entry |= {"required": True} if default is PydanticUndefined else {"default": default}
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    status = extra.get("status") or ("deprecated" if info.deprecated else None)
    if status:
        entry["status"] = status
    if shape.open:
        entry["open"] = True
    if "list[" in entry["type"] and any(getattr(item, "min_length", None) for item in info.metadata):
        entry["not_empty"] = True
    return entry


def _default(info: FieldInfo) -> Any:
    value = info.default
    if info.default_factory is not None:
        value = info.default_factory()  # type: ignore[call-arg]
    if isinstance(value, BaseModel):
        return "object"
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def _nested(models: list[type[BaseModel]], prefix: str, depth: int) -> dict[str, Entry]:
    """Fields of one class, or of several that a discriminator tells apart: then each says which of them take it."""
    parts = [fields_of(model, prefix, depth) for model in models]
    if len(parts) == 1:
        return parts[0]
    telling = _discriminator(models)
    merged: dict[str, Entry] = {}
    for path in dict.fromkeys(path for part in parts for path in part):
        holders = [index for index, part in enumerate(parts) if path in part]
        entry = dict(parts[holders[0]][path])
        if telling and path == f"{prefix}{telling}":
            entry = {"type": "str", "allowed": [_tag(model, telling) for model in models], "required": True}
        elif telling and len(holders) < len(models):
            entry["variants"] = [_tag(models[index], telling) for index in holders]
        merged[path] = entry
    return merged


def _discriminator(models: list[type[BaseModel]]) -> str | None:
    """The field that holds another single word in each class."""
    for name in models[0].model_fields:
        tags = [_tag(model, name) for model in models if name in model.model_fields]
        if len(tags) == len(models) == len(set(tags)) and None not in tags:
            return name
    return None


def _tag(model: type[BaseModel], name: str) -> Any:
    arguments = typing.get_args(model.model_fields[name].annotation)
    literal = typing.get_origin(model.model_fields[name].annotation) is typing.Literal
    return arguments[0] if literal and len(arguments) == 1 else None


def _shape(annotation: Any, metadata: list[Any]) -> Shape:
    shape = _of(annotation)
    shape.limits |= dict(_limits(metadata, shape.kinds))
    return shape


def _of(annotation: Any) -> Shape:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _shape(arguments[0], list(arguments[1:]))
    if origin in (typing.Union, types.UnionType):
        shape = Shape()
        for argument in arguments:
            shape.add(_of(argument))
        return shape
    if origin is typing.Literal:
        return Shape(list(dict.fromkeys(PLAIN.get(type(value), "str") for value in arguments)), list(arguments))
    if annotation in PLAIN:
        return Shape([PLAIN[annotation]])
    if origin in LISTS:
        return _list(arguments)
    if origin is dict:
        kind = ",".join(PLAIN.get(argument, "?") for argument in arguments)
        return Shape([f"dict[{kind}]"]) if kind in ("int,int", "str,str") else Shape(["object"], open=True)
    if isinstance(annotation, type):
        return _class(annotation)
    return Shape(["object"], open=True)


def _list(arguments: tuple[Any, ...]) -> Shape:
    inner = _of(arguments[0]) if arguments else Shape(["str"])
    kind = inner.kinds[0] if inner.kinds else "str"
    return Shape([f"list[{kind}]"], inner.allowed, inner.limits)


def _class(annotation: type) -> Shape:
    if issubclass(annotation, Enum):
        return Shape(["str"], [member.value for member in annotation])
    if issubclass(annotation, PurePath):
        return Shape(["str"])
    if issubclass(annotation, BaseModel):
        return Shape(["object"], models=[annotation])
    return Shape(["object"], open=True)


def _limits(metadata: list[Any], kinds: list[str]) -> Iterator[tuple[str, Any]]:
    """Inclusive limits of whole numbers; a limit on a list's length is none of its items."""
    whole = not any("float" in kind for kind in kinds)
    for item in metadata:
        for name, key, strict in (
            ("ge", "min", False),
            ("le", "max", False),
            ("gt", "above", True),
            ("lt", "below", True),
        ):
            value = getattr(item, name, None)
            if value is None:
                continue
            if strict and whole:
                yield ("min", value + 1) if name == "gt" else ("max", value - 1)
            else:
                yield key, value


def _option(param: Any) -> Entry:
    choices = list(getattr(param.type, "choices", ()))
    kind = {"integer": "int", "float": "float", "boolean": "bool"}.get(param.type.name, "str")
    entry: Entry = {"flags": sorted([*param.opts, *param.secondary_opts]), "type": kind}
    if choices:
        entry["choices"] = choices
    default = param.default
    plain = default is None or isinstance(default, (bool, int, float, str))
    entry["default"] = default if plain else None  # click's marker for "not given"
    return entry | ({"is_flag": True} if param.is_flag else {}) | ({"multiple": True} if param.multiple else {})
