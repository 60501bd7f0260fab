"""What one version of TensorRT-LLM accepts and what it means by it: YAML fields by dotted path, the options of
`trtllm-serve`, and behaviours.

`schemas/*.yaml` hold one file per version line, each stating what differs from the line it inherits; a new file is a
new line. Versions are ordered by `packaging.version`. An entry may be dated by releases: up to `after` (or `last`) it
does not hold, from `by` on it does, and between the two nobody knows. Where the release in which two lines part is not
known, a version between them has a `neighbour`: the other line that it may belong to.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from trtspec.errors import TrtspecError, UsageError
from trtspec.report import write_atomic

SCHEMAS = Path(__file__).parent / "schemas"
PARSED = SCHEMAS / "__pycache__" / "lines.json"
LINES = tuple(sorted((path.stem for path in SCHEMAS.glob("*.yaml")), key=Version))  # oldest first
RELEASE = re.compile(r"\d+\.\d+\.\d")  # a release such as 1.3.0rc24; a line has two parts
NOT_SEEN = "unknown"  # as the `by` of an interval
UNKNOWN = object()  # what no source states: a default, or the answer of a release inside an unknown interval
# the key that says which of several classes an object is; `variants` of a field are values of it
DISCRIMINATORS = {
    "speculative_config": "decoding_type",
    "sparse_attention_config": "algorithm",
    "kv_cache_compression_config": "algorithm",
    "cuda_graph_config": "mode",
}


@dataclass(frozen=True)
class Since:
    """Seen absent in `after`, seen present in `by`, each a line or a release ("unknown" where only `after` was looked
    at); evidence as in the schema files."""

    by: str
    evidence: str
    after: str | None = None
    source: str = ""

    @property
    def interval(self) -> str:
        if self.by == NOT_SEEN:
            return f"after {self.after}, in a release that is not known"
        return f"after {self.after}, by {self.by}" if self.after else f"by {self.by}"

    def place(self, version: Version) -> str:
        """ "before", "inside" or "past", as far as releases tell; lines alone say "past"."""
        if self.after is not None and RELEASE.match(self.after) and version <= Version(self.after):
            return "before"
        not_yet = RELEASE.match(self.by) is not None and version < Version(self.by)
        return "inside" if not_yet or self.by == NOT_SEEN else "past"


@dataclass(frozen=True)
class Field:
    """One key of the engine's YAML. `type` is a union such as "int|null" or "list[int]"; `min` and `max` are inclusive
    and, like `allowed`, hold for every item of a list. Of a `strict` one the engine makes no integer from text or 8.0,
    and no text from a number. `required` holds where the key's object is written, for the `variants` alone where they
    are named. `changed` is the interval in which it became what it is here from `otherwise`, `until` the one in which
    it goes."""

    path: str
    type: str
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    not_empty: bool = False
    allowed: tuple[Any, ...] = ()
    case_insensitive: bool = False
    strict: bool = False
    default: Any = UNKNOWN
    required: bool | tuple[str, ...] = False
    variants: tuple[str, ...] = ()
    status: str = "stable"
    open: bool = False
    since: Since | None = None
    changed: Since | None = None
    otherwise: Field | None = None
    until: Since | None = None
    note: str = ""

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(self.type.split("|"))

    @property
    def is_object(self) -> bool:
        return "object" in self.types

    def required_of(self, kind: Any) -> bool:
        """Whether the engine refuses the field's object without it; `kind` is the discriminator's value there."""
        if isinstance(self.required, tuple):
            return kind in self.required
        return self.required and (not self.variants or kind in self.variants)


@dataclass(frozen=True)
class Removed:
    """A key that an earlier line had; `last` and `by` are lines or releases. `renamed_to` is a dotted path, and
    `same_value` says whether the value carries over; the values in `tolerated` are ignored with a warning in some
    releases of the line."""

    path: str
    last: str
    evidence: str
    by: str | None = None
    renamed_to: str | None = None
    same_value: bool = True
    tolerated: tuple[Any, ...] = ()
    note: str = ""
    source: str = ""


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
class Behaviour:
    """What a release does with what it is given. False where it does nothing of the kind. In an `interval` where it is
    not known whether it changed already, `otherwise` holds the other possibility."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    evidence: str = ""
    source: str = ""
    interval: str = ""
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    dated: bool = False  # by releases, so that the line does not matter

    def __bool__(self) -> bool:
        return bool(self.values)

    def get(self, key: str, default: Any = None) -> Any:
        """One word of it; UNKNOWN where the two possibilities differ in it."""
        value = self.values.get(key, default)
        if self.interval and self.otherwise.get(key, default) != value:
            return UNKNOWN
        return value


@dataclass(frozen=True)
class Schema:
    """The accepted surface of `version`, and its behaviours by name."""

    version: Version
    line: str
    label: str
    fields: dict[str, Field]
    removed: dict[str, Removed]
    options: dict[str, Option]
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    seen: Version = Version("0")  # the release whose files the line was read from
    neighbour: Schema | None = field(default=None, repr=False)
    boundary: str = ""

    @property
    def precedence(self) -> Any:
        """Who wins when the YAML and a typed option name one setting: "yaml", "cli" or UNKNOWN."""
        return self.behaviour("precedence").get("winner")

    def behaviour(self, name: str) -> Behaviour:
        """What this release does; where it may be of two lines that differ in it, both possibilities."""
        own = self.behaviours.get(name, Behaviour(name))
        if self.neighbour is None or own.dated:
            return own
        other = self.neighbour.behaviours.get(name, Behaviour(name))
        if other.values == own.values and not other.interval:
            return own
        return replace(own, interval=self.boundary, otherwise=other.values)

    @property
    def sampling_key(self) -> str | None:
        """The key without which speculation decodes greedily here, or may; None where sampling is found per request."""
        asked = self.behaviour("sampled_speculation")
        name = asked.values.get("asked_by") or asked.otherwise.get("asked_by")
        key = f"speculative_config.{name}"
        return key if name is not None and key in self.fields else None

    def combinations(self) -> list[Behaviour]:
        """The behaviours that forbid, require or void settings beside others (`when` in the schema files)."""
        other = self.neighbour.behaviours if self.neighbour is not None else {}
        found = [self.behaviour(name) for name in {**self.behaviours, **other}]
        return [one for one in found if {"when", "exclusive"} & {*one.values, *one.otherwise}]

    def certain(self, since: Since | None) -> bool:
        """False when the thing may or may not exist in this version yet."""
        if since is None:
            return True
        if since.by not in LINES:
            return since.place(self.version) == "past"
        if self.line == since.by and since.after is not None:
            return self.neighbour is not None or self.version >= self.seen
        return LINES.index(self.line) >= LINES.index(since.by)

    def current(self, path: str) -> str:
        """What a key is called in this release, by the name that it had when a rule was written."""
        gone = self.removed.get(path)
        if gone is not None and gone.renamed_to is not None and gone.same_value:
            return gone.renamed_to
        parent, dot, name = path.rpartition(".")
        return f"{self.current(parent)}.{name}" if dot else path

    def interval(self, since: Since) -> str:
        """The two ends as releases: of a line, the one whose files were read."""
        ends = {line: _file(line)["versions"]["seen"] for line in LINES}
        after = since.after and ends.get(since.after, since.after)
        return replace(since, after=after, by=ends.get(since.by, since.by)).interval

    def children(self, path: str) -> list[str]:
        """Keys known directly below `path` ("" for the top level)."""
        prefix = f"{path}." if path else ""
        return [p[len(prefix) :] for p in self.fields if p.startswith(prefix) and "." not in p[len(prefix) :]]

    def option(self, flag: str) -> Option | None:
        return next((option for option in self.options.values() if flag in option.flags), None)


def parse_version(text: str) -> Version:
    """Raises UsageError for text that is not a version, or a release older than the oldest known one."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise UsageError(
            f"{text!r} is not a TensorRT-LLM version", f"write it as the package does, for example {newest_known()}"
        ) from None
    oldest = _file(LINES[0])["versions"]["from"]
    if version < Version(oldest):
        message = f"TensorRT-LLM {text} is too old: {oldest} to {newest_known()} are known"
        raise UsageError(message, f"use {oldest} or later, for example --trtllm-version {newest_known()}")
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
    return replace(schema, neighbour=_line(other, version), boundary=boundary)


def line_of(text: str) -> str:
    """The line that a version belongs to; raises UsageError as parse_version does."""
    version = parse_version(text)
    return next(line for line in reversed(LINES) if version >= Version(_file(line)["versions"]["from"]))


def newest_known() -> Version:
    return max(Version(data["versions"]["newest"]) for data in _files().values() if "newest" in data["versions"])


def _neighbour(version: Version, name: str) -> tuple[str | None, str]:
    """The other line that `version` may belong to, and the interval in which the change happened."""
    for older, newer in zip(LINES, LINES[1:], strict=False):
        begins = _file(newer)["versions"]["begins"]
        if name in (older, newer) and Version(begins["after"]) < version < Version(begins["by"]):
            return (newer if name == older else older), f"after {begins['after']}, by {begins['by']}"
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


Entries = tuple[dict[str, dict], dict[str, dict], dict[str, dict], dict[str, dict]]


@functools.cache
def _merged(line: str, version: Version | None = None) -> Entries:
    return merged(_file(line), version)


def merged(data: dict[str, Any], version: Version | None = None) -> Entries:
    """(fields, removed keys, options, behaviours) of a parsed schema file laid over the line that it inherits; of
    dated entries what holds for `version`, or without one what holds in the end."""
    inherited = _merged(data["inherits"], version) if "inherits" in data else ({}, {}, {}, {})
    known, removed, options, behaviours = ({key: dict(value) for key, value in part.items()} for part in inherited)
    for path, entry in data.get("fields", {}).items():
        where, was = _place(entry.get("changed") or entry.get("since"), version), known.get(path, {})
        if where != "before":
            other = {"otherwise": was} if where == "inside" and "changed" in entry and was else {}
            known[path] = {**was, **entry, **other}
            removed.pop(path, None)
    for path, entry in data.get("removed", {}).items():
        dates = {"after": entry["last"], "by": entry.get("by", ""), "evidence": entry["evidence"]}
        where = _place(dates, version) if "by" in entry else "past"
        if where == "past":
            known.pop(path, None)
            removed[path] = entry
        elif where == "inside" and path in known:
            known[path]["until"] = dates
    for name in data.get("removed_options", ()):
        options.pop(name)
    for name, entry in data.get("options", {}).items():
        if _place(entry.get("since"), version) != "before":
            options[name] = {**options.get(name, {}), **entry}
    for name, entry in data.get("behaviours", {}).items():
        behaviours[name] = _behaves(entry or {}, behaviours.get(name, {}), version)
    return known, removed, options, {name: entry for name, entry in behaviours.items() if entry}


def _behaves(entry: dict[str, Any], was: dict[str, Any], version: Version | None) -> dict[str, Any]:
    """What a behaviour is in a version: what it `was` in the line before, or as `entry` says, or nothing any more;
    with an `interval`, not known which."""
    begins = _place(entry.get("since"), version)
    if begins == "before":
        return was
    if begins == "inside":
        return {**entry, "otherwise": was, "interval": Since(**entry["since"]).interval}
    ends = _place(entry.get("until"), version) if "until" in entry else "before"
    if ends == "inside":
        return {**entry, "otherwise": {}, "interval": Since(**entry["until"]).interval}
    return entry if ends == "before" else {}


def _place(dates: dict[str, Any] | None, version: Version | None) -> str:
    return "past" if dates is None or version is None else Since(**dates).place(version)


@functools.lru_cache(maxsize=32)
def _line(line: str, version: Version) -> Schema:
    known, removed, options, behaviours = _merged(line, version)
    data = _file(line)
    return Schema(
        version=version,
        line=line,
        label=data["label"],
        fields={path: _field(path, entry) for path, entry in known.items()},
        removed={path: Removed(path=path, **_typed(entry)) for path, entry in removed.items()},
        options={name: Option(name=name, **_typed(entry)) for name, entry in options.items()},
        behaviours={name: _behaviour(name, entry) for name, entry in behaviours.items()},
        seen=Version(data["versions"]["seen"]),
    )


def _field(path: str, entry: dict[str, Any]) -> Field:
    typed = _typed(entry)
    if "otherwise" in typed:
        typed["otherwise"] = _field(path, typed["otherwise"])
    return Field(path=path, **typed)


def _behaviour(name: str, entry: dict[str, Any]) -> Behaviour:
    about = ("since", "until", "evidence", "source", "otherwise", "interval")
    values = {key: value for key, value in entry.items() if key not in about}
    was = {key: value for key, value in entry.get("otherwise", {}).items() if key not in about}
    dated = "since" in entry or "until" in entry
    return Behaviour(name, values, entry["evidence"], entry["source"], entry.get("interval", ""), was, dated)


def _typed(entry: dict[str, Any]) -> dict[str, Any]:
    typed: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) and key != "default" else value for key, value in entry.items()
    }
    for name in ("since", "changed", "until"):
        if name in typed:
            typed[name] = Since(**typed[name])
    return typed


def line_fields(line: str, path: str = "", key: str = "") -> Any:
    """Paths known in a line; with `path` and `key`, one attribute of one field there (empty when absent)."""
    known = _merged(line)[0]
    return known.get(path, {}).get(key, ()) if path else known.keys()


def removed_in(line: str) -> list[Removed]:
    """What exactly this line took away."""
    return [Removed(path=path, **_typed(entry)) for path, entry in _file(line).get("removed", {}).items()]
