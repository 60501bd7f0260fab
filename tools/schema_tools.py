"""For those who add a version: `python tools/schema_tools.py diff A B | from-installed`.

A and B are lines (1.4), versions (1.3.0rc20) or files that `from-installed` wrote. docs/adding-a-version.md says how
the two fit together. `from-installed` reads a schema out of an engine's own pydantic classes and click options.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trtspec.errors import MissingDependency, TrtspecError, UsageError
from trtspec.report import write_atomic
from trtspec.trtllm.schema import (
    LINES,
    Entries,
    entries_of,
    files_up_to,
    line_of,
    merged,
    newest_known,
)

Entry = dict[str, Any]
ORDER = (
    "flags", "type", "min", "max", "above", "below", "not_empty", "items", "allowed", "choices",
    "case_insensitive", "strict", "default", "required", "is_flag", "multiple", "variants", "status", "key", "open",
    "since", "note",
)  # fmt: skip
# what the engine's classes do not tell: written by hand, so a difference is no change of the engine
BY_HAND = ("items", "case_insensitive", "strict", "key", "open", "since", "note")
COMPARED = tuple(name for name in ORDER if name not in BY_HAND)
HEADER = """\
line: "{line}"
label: "{label}"
versions: {{from: {version}, {begins}seen: {version}, newest: {version}}}
sources:
  - "the classes of tensorrt_llm {version}, read where it is installed"
"""
PLAIN = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null"}
LISTS = (list, set, tuple, frozenset)
DEEPEST = 6  # levels of nested objects; the engine has four


def load(name: str) -> Entries:
    """The complete entries of a line, a version or a file; raises UsageError for anything else."""
    if Path(name).is_file():
        data = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        older = files_up_to(data["line"]) if "begins" in data["versions"] else []
        return merged([*(one for one in older if one["line"] != data["line"]), data])
    return entries_of(name if name in LINES else line_of(name))


def differences(old: Entries, new: Entries) -> Iterator[str]:
    """One line each: + added, - gone, ~ changed attributes; fields first, then options."""
    for title, part in (("", "fields"), ("--", "options")):
        before, after = old[part], new[part]
        for path in sorted({*before, *after}):
            if path not in before:
                yield f"+ {title}{path}: {flow(after[path])}"
            elif path not in after:
                renamed = new["removed"].get(path, {}).get("renamed_to")
                yield f"- {title}{path}" + (f" (now {renamed})" if renamed else "")
            else:
                changed = changes(before[path], after[path])
                if changed:
                    listed = ", ".join(
                        f"{key} {before[path].get(key)!r} -> {value!r}"
                        for key, value in changed.items()
                    )
                    yield f"~ {title}{path}: {listed}"


def changes(before: Entry, after: Entry) -> Entry:
    """The attributes of `after` that differ; the order of listed values and of a union's members does not count."""
    return {
        key: after.get(key) for key in COMPARED if _plain(before.get(key)) != _plain(after.get(key))
    }


def _plain(value: Any) -> Any:
    if isinstance(value, str) and "|" in value:
        return sorted(value.split("|"))
    if isinstance(value, (list, tuple)):
        return sorted(map(str, value))
    return None if value in (False, "stable") else value


def installed_entries(package: str) -> tuple[Entries, str]:
    """Entries of the installed engine's classes and options, and its version."""

    try:
        engine = importlib.import_module(package)
        module = importlib.import_module(f"{package}.llmapi.llm_args")
    except ImportError as error:
        remedy = "run this inside NVIDIA's TensorRT-LLM image"
        raise MissingDependency(f"{package} cannot be imported here ({error})", remedy) from None
    kind = getattr(module, "TorchLlmArgs", None) or module.LlmArgs
    serve = importlib.import_module(f"{package}.commands.serve").main.commands["serve"]
    return {"fields": fields_of(kind), "options": options_of(serve)}, engine.__version__


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
    return {
        param.name: _option(param) for param in command.params if param.param_type_name == "option"
    }


@dataclass
class Shape:
    """An annotation as types of the schema files, listed values, limits, and the classes of its objects."""

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
    if "list[" in entry["type"] and any(
        getattr(item, "min_length", None) for item in info.metadata
    ):
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
    """Fields of one class, or of several with a discriminator: then each field names the classes that have it."""
    parts = [fields_of(model, prefix, depth) for model in models]
    if len(parts) == 1:
        return parts[0]
    telling = _discriminator(models)
    merged: dict[str, Entry] = {}
    for path in dict.fromkeys(path for part in parts for path in part):
        holders = [index for index, part in enumerate(parts) if path in part]
        entry = dict(parts[holders[0]][path])
        if telling and path == f"{prefix}{telling}":
            entry = {
                "type": "str",
                "allowed": [_tag(model, telling) for model in models],
                "required": True,
            }
        elif telling and len(holders) < len(models):
            entry["variants"] = [_tag(models[index], telling) for index in holders]
        merged[path] = entry
    return merged


def _discriminator(models: list[type[BaseModel]]) -> str | None:
    """The field with a different single value in each class."""
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
        return Shape(
            list(dict.fromkeys(PLAIN.get(type(value), "str") for value in arguments)),
            list(arguments),
        )
    if annotation in PLAIN:
        return Shape([PLAIN[annotation]])
    if origin in LISTS:
        return _list(arguments)
    if origin is dict:
        kind = ",".join(PLAIN.get(argument, "?") for argument in arguments)
        return (
            Shape([f"dict[{kind}]"])
            if kind in ("int,int", "str,str")
            else Shape(["object"], open=True)
        )
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
    """Inclusive limits of whole numbers; limits on the length of a list are left out."""
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
    return (
        entry
        | ({"is_flag": True} if param.is_flag else {})
        | ({"multiple": True} if param.multiple else {})
    )


def as_file(entries: Entries, version: str, line: str, inherits: str | None) -> str:
    """The schema file of `entries`: whole, or only what differs from the line that it inherits."""
    fields, removed, options, gone = entries["fields"], {}, entries["options"], []
    if inherits is not None:
        old = load(inherits)
        removed = {path: {"evidence": "verified"} for path in old["fields"] if path not in fields}
        gone = [name for name in old["options"] if name not in options]
        fields, options = (
            dict(_changed(entries[part], old[part])) for part in ("fields", "options")
        )
    text = HEADER.format(
        line=line, label=f"{line}, read from {version}", version=version,
        begins=f"begins: {{after: {newest_known()}, by: {version}}}, " if inherits else "",
    )  # fmt: skip
    for title, part in (("fields", fields), ("removed", removed), ("options", options)):
        text += f"{title}:{'' if part else ' {}'}\n" + "".join(
            f"  {key}: {flow(part[key])}\n" for key in sorted(part)
        )
    return text + (f"removed_options: {flow(gone)}\n" if gone else "")


def _changed(part: dict[str, Entry], was: dict[str, Entry]) -> Iterator[tuple[str, Entry]]:
    """New entries whole, of others the attributes that the classes change. Limits and values that only validators know,
    and what click does not report, keep their inherited values."""
    for path, entry in part.items():
        if path not in was:
            yield path, entry
            continue
        changed = {key: value for key, value in changes(was[path], entry).items() if key in entry}
        if was[path].get("variants") and "variants" not in entry:
            changed["variants"] = []
        if was[path].get("required") and "required" not in entry:
            changed["required"] = False
        if changed:
            yield path, changed


def flow(value: Any) -> str:
    """One line of YAML, attributes in the order of the schema files."""
    if isinstance(value, dict):
        value = {
            key: value[key]
            for key in sorted(value, key=lambda key: ORDER.index(key) if key in ORDER else 99)
        }
    text = yaml.safe_dump(
        value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tools/schema_tools.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    diff = commands.add_parser("diff", help="what B has other than A")
    diff.add_argument("a")
    diff.add_argument("b")
    read = commands.add_parser(
        "from-installed", help="write the schema of the engine that is installed here"
    )
    read.add_argument("--line", help="name of the new line (default: major.minor of the version)")
    read.add_argument("--inherits", choices=LINES, help="write only what differs from this line")
    read.add_argument("--package", default="tensorrt_llm")
    read.add_argument("-o", "--output", type=Path, help="file to write (default: standard output)")
    given = parser.parse_args(words)
    try:
        return _diff(given.a, given.b) if given.command == "diff" else _read(given)
    except TrtspecError as error:
        sys.stderr.write(f"{error.message}\n-> {error.remedy}\n")
        return error.exit_code


def _diff(a: str, b: str) -> int:
    for name in (a, b):
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise UsageError(f"{name} is not a file here", "write it with from-installed -o")
    sys.stdout.writelines(f"{line}\n" for line in differences(load(a), load(b)))
    return 0


def _read(given: argparse.Namespace) -> int:
    entries, version = installed_entries(given.package)
    line = given.line or ".".join(version.split(".")[:2])
    text = as_file(entries, version, line, given.inherits)
    if given.output is None:
        sys.stdout.write(text)
    else:
        write_atomic(given.output, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
