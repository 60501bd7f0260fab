"""What one version of TensorRT-LLM accepts: YAML fields by dotted path, and the options of `trtllm-serve`.

`schemas/*.yaml` hold one file per version line, each stating what differs from the line it inherits. Versions are
ordered by `packaging.version`. Where the release in which two lines part is not known, a version between them has a
`neighbour`: the other line that it may belong to.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from trtspec.errors import TrtspecError, UsageError
from trtspec.report import write_atomic

SCHEMAS = Path(__file__).parent / "schemas"
PARSED = SCHEMAS / "__pycache__" / "lines.json"
LINES = ("1.0", "1.1", "1.2", "1.3", "1.4")
UNKNOWN = object()  # a default that no source states
# the key that says which of several classes an object is; `variants` of a field are values of it
DISCRIMINATORS = {
    "speculative_config": "decoding_type",
    "sparse_attention_config": "algorithm",
    "kv_cache_compression_config": "algorithm",
    "cuda_graph_config": "mode",
}


@dataclass(frozen=True)
class Since:
    """Seen absent in line `after`, seen present in line `by`; evidence as in the schema files."""

    by: str
    evidence: str
    after: str | None = None

    @property
    def interval(self) -> str:
        return f"after {self.after}, by {self.by}" if self.after else f"by {self.by}"


@dataclass(frozen=True)
class Field:
    """One key of the engine's YAML. `type` is a union such as "int|null" or "list[int]"; `min` and `max` are inclusive
    and, like `allowed`, hold for every item of a list."""

    path: str
    type: str
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    not_empty: bool = False
    allowed: tuple[Any, ...] = ()
    case_insensitive: bool = False
    default: Any = UNKNOWN
    required: bool = False
    variants: tuple[str, ...] = ()
    status: str = "stable"
    open: bool = False
    since: Since | None = None
    note: str = ""

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(self.type.split("|"))

    @property
    def is_object(self) -> bool:
        return "object" in self.types


@dataclass(frozen=True)
class Removed:
    """A key that an earlier line had. `renamed_to` is a dotted path; the values in `tolerated` are ignored with a
    warning in some releases of the line."""

    path: str
    last: str
    evidence: str
    renamed_to: str | None = None
    tolerated: tuple[Any, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Option:
    """One option of `trtllm-serve`. `key` is the YAML path that means the same."""

    name: str
    flags: tuple[str, ...]
    type: str
    choices: tuple[str, ...] = ()
    default: Any = None
    is_flag: bool = False
    multiple: bool = False
    status: str = "stable"
    key: str | None = None
    since: Since | None = None


@dataclass(frozen=True)
class Schema:
    """The accepted surface of `version`. `precedence` says who wins when YAML and a typed option name one setting."""

    version: Version
    line: str
    label: str
    precedence: str
    fields: dict[str, Field]
    removed: dict[str, Removed]
    options: dict[str, Option]
    neighbour: Schema | None = field(default=None, repr=False)
    boundary: str = ""

    def certain(self, since: Since | None) -> bool:
        """False when the thing may or may not exist in this line yet."""
        return since is None or LINES.index(self.line) >= LINES.index(since.by)

    def children(self, path: str) -> list[str]:
        """Keys known directly below `path` ("" for the top level)."""
        prefix = f"{path}." if path else ""
        return [p[len(prefix) :] for p in self.fields if p.startswith(prefix) and "." not in p[len(prefix) :]]

    def option(self, flag: str) -> Option | None:
        return next((option for option in self.options.values() if flag in option.flags), None)


def parse_version(text: str) -> Version:
    """Raises UsageError for text that is not a version, or a version older than the first known line."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise UsageError(
            f"{text!r} is not a TensorRT-LLM version", "write it as the package does, for example 1.3.0rc20"
        ) from None
    if version < Version("1.0.0rc0"):
        raise UsageError(f"TensorRT-LLM {text} is older than the first known line, 1.0", "use 1.0.0 or later")
    return version


@functools.cache
def schema_for(text: str) -> Schema:
    """The schema of exactly one version, with the neighbouring line where the boundary between them is not known."""
    version = parse_version(text)
    name = line_of(text)
    other, boundary = _neighbour(version, name)
    schema = _line(name, version)
    if other is None:
        return schema
    return Schema(**{**_as_dict(schema), "neighbour": _line(other, version), "boundary": boundary})


def line_of(text: str) -> str:
    """The line that a version belongs to; raises UsageError as parse_version does."""
    version = parse_version(text)
    return next(line for line in reversed(LINES) if version >= Version(_file(line)["versions"]["from"]))


def newest_known() -> Version:
    return Version(_file(LINES[-1])["versions"]["newest"])


def _neighbour(version: Version, name: str) -> tuple[str | None, str]:
    """The other line that `version` may belong to, and the interval in which the change happened."""
    for older, newer in zip(LINES, LINES[1:], strict=False):
        boundary = _file(older)["versions"]["boundary"]
        if name in (older, newer) and Version(boundary["after"]) < version < Version(boundary["by"]):
            return (newer if name == older else older), f"after {boundary['after']}, by {boundary['by']}"
    return None, ""


def _file(line: str) -> dict[str, Any]:
    return _files()[line]


@functools.cache
def _files() -> dict[str, dict[str, Any]]:
    """Every schema file, parsed. Like bytecode, what was parsed once is kept beside the files until one changes:
    reading it back takes a twentieth of the time, and every torch-free command needs it."""
    files = {line: SCHEMAS / f"{line}.yaml" for line in LINES}
    stamp = {line: [(found := path.stat()).st_mtime_ns, found.st_size] for line, path in files.items()}
    try:
        kept = json.loads(PARSED.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return kept["lines"]
    except (OSError, ValueError, KeyError):
        pass
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    lines = {line: yaml.load(path.read_text(encoding="utf-8"), Loader=loader) for line, path in files.items()}
    if not sys.dont_write_bytecode:
        with contextlib.suppress(OSError, TrtspecError):  # an installation that may not be written is only slower
            PARSED.parent.mkdir(exist_ok=True)
            write_atomic(PARSED, json.dumps({"stamp": stamp, "lines": lines}))
    return lines


Entries = tuple[dict[str, dict], dict[str, dict], dict[str, dict]]


@functools.cache
def _merged(line: str) -> Entries:
    return merged(_file(line))


def merged(data: dict[str, Any]) -> Entries:
    """(fields, removed keys, options) of a parsed schema file laid over the line that it inherits."""
    inherited = _merged(data["inherits"]) if "inherits" in data else ({}, {}, {})
    known, removed, options = ({key: dict(value) for key, value in part.items()} for part in inherited)
    for path in data.get("removed", {}):
        known.pop(path, None)
    for path, entry in data["fields"].items():
        known[path] = {**known.get(path, {}), **entry}
        removed.pop(path, None)
    removed.update(data.get("removed", {}))
    for name in data.get("removed_options", ()):
        options.pop(name)
    for name, entry in data.get("options", {}).items():
        options[name] = {**options.get(name, {}), **entry}
    return known, removed, options


@functools.lru_cache(maxsize=32)
def _line(line: str, version: Version) -> Schema:
    known, removed, options = _merged(line)
    data = _file(line)
    return Schema(
        version=version,
        line=line,
        label=data["label"],
        precedence=data["precedence"],
        fields={path: Field(path=path, **_typed(entry)) for path, entry in known.items()},
        removed={path: Removed(path=path, **_typed(entry)) for path, entry in removed.items()},
        options={name: Option(name=name, **_typed(entry)) for name, entry in options.items()},
    )


def _typed(entry: dict[str, Any]) -> dict[str, Any]:
    typed: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) and key != "default" else value for key, value in entry.items()
    }
    if "since" in typed:
        typed["since"] = Since(**typed["since"])
    return typed


def _as_dict(schema: Schema) -> dict[str, Any]:
    return {item.name: getattr(schema, item.name) for item in fields(schema)}


def line_fields(line: str, path: str = "", key: str = "") -> Any:
    """Paths known in a line; with `path` and `key`, one attribute of one field there (empty when absent)."""
    known = _merged(line)[0]
    return known.get(path, {}).get(key, ()) if path else known.keys()


def removed_in(line: str) -> list[Removed]:
    """What exactly this line took away."""
    return [Removed(path=path, **_typed(entry)) for path, entry in _file(line).get("removed", {}).items()]
