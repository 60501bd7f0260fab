"""What one version of TensorRT-LLM accepts and what it means by it: YAML fields by dotted path, the options of
`trtllm-serve`, behaviours that code asks for by name, and rules about settings beside each other.

`schemas/*.yaml` hold one file per version line, in the order of `packaging.version`; each states what its line changed.
Every change has a date: `since` (a field, option, behaviour or rule came, or became what the entry says) or
`until` (it went). A date names the last source read without the change (`after`) and the first one read with it (`by`);
either may be missing. An entry without a date came with its line (`begins`). A version up to `after` is before the
change, one from `by` on is past it. For a version between the two there are two possible schemas: in one none of the
changes in doubt has happened, in the other all have. `schema_for` returns the latter; `possibilities` has both.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from packaging.version import InvalidVersion, Version

from trtspec.data_files import load_yaml
from trtspec.errors import Severity, TrtspecError, UsageError
from trtspec.report import write_atomic

T = TypeVar("T")
SCHEMAS = Path(__file__).parent / "schemas"
PARSED = SCHEMAS / "__pycache__" / "lines.json"
LINES = tuple(sorted((path.stem for path in SCHEMAS.glob("*.yaml")), key=Version))  # oldest first
UNKNOWN = object()  # a default that no source states
# the key that says which of several classes an object is; `variants` of a field are values of it
DISCRIMINATORS = {
    "speculative_config": "decoding_type",
    "sparse_attention_config": "algorithm",
    "kv_cache_compression_config": "algorithm",
    "cuda_graph_config": "mode",
}


@dataclass(frozen=True)
class Change:
    """When something changed: `after` is the last source read without the change, `by` the first one with it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    after: str | None = None
    by: str | None = None
    evidence: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    @property
    def interval(self) -> str:
        words = [f"{word} {end}" for word, end in (("after", self.after), ("by", self.by)) if end]
        return ", ".join(words) if self.by else f"{words[0]}, in a release that is not known"

    def happened(self, version: Version) -> bool | None:
        """None between the two sources."""
        if self.by is not None and version >= _release(self.by):
            return True
        return False if self.after is not None and version <= _release(self.after) else None


_release = functools.cache(Version)


@dataclass(frozen=True)
class Field:
    """One key of the engine's YAML. `type` is a union such as "int|null" or "list[int]"; `min` and `max` are inclusive
    and, like `allowed`, hold for every item of a list, `items` for all of them together. Of a `strict` one the engine
    makes no integer from text or 8.0, and no text from a number. `required` holds where the key's object is written,
    for the `variants` alone where they are named."""

    path: str
    type: str
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    not_empty: bool = False
    items: Literal["", "increasing", "shares"] = ""
    allowed: tuple[Any, ...] = ()
    case_insensitive: bool = False
    strict: bool = False
    default: Any = UNKNOWN
    required: bool | tuple[str, ...] = False
    variants: tuple[str, ...] = ()
    status: str = "stable"
    open: bool = False
    note: str = ""

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(self.type.split("|"))

    @property
    def is_object(self) -> bool:
        return "object" in self.types

    def required_of(self, kind: Any) -> bool:
        """Whether the engine refuses the object without this field; `kind` is the object's discriminator."""
        if isinstance(self.required, tuple):
            return kind in self.required
        return self.required and (not self.variants or kind in self.variants)


@dataclass(frozen=True)
class Removed:
    """A key that earlier releases had, or that documents invent (no `until`). `renamed_to` is a dotted path, and
    `same_value` says whether the value carries over; the engine ignores the values in `tolerated` with a warning."""

    path: str
    until: Change | None = None
    renamed_to: str | None = None
    same_value: bool = True
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


@dataclass(frozen=True)
class Rule:
    """Settings that a release refuses or voids beside each other. The rule speaks where all of `when` holds and not all
    of `unless` does; the finding is at the key `at`, by default the first one of `when`. `fix` drops a key, writes
    one, or adds one that is not there: {drop: path}, {write: {path: value}} or {add: {path: value}}.

    `when` and `unless` map dotted paths to conditions: set (not null, false, 0 or empty text), unset, given (written),
    absent (not written), filled (written and not null), empty (written as null), a value, a list of values,
    {written: x}, {not: x}, {outside: [...]}, {above: n}, {below: n}, {unlike: path of another}. A setting that is
    not written has its default. Paths may also name what is known beside the file: `facts` in rules/rows.py. `only`:
    one release, as reported.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    when: dict[str, Any]
    message: str
    remedy: str
    evidence: str
    source: str
    unless: dict[str, Any] = field(default_factory=dict)
    since: Change | None = None
    until: Change | None = None
    code: str = "TS-LINT-COMBINATION"
    severity: Severity = "error"
    at: str | None = None
    fix: dict[str, Any] = field(default_factory=dict)
    only: str | None = None


Entries = dict[str, dict[str, dict[str, Any]]]
PARTS = ("fields", "removed", "options", "behaviours", "rules")


@dataclass(frozen=True, eq=False)
class Schema:
    """The accepted surface of `version` as one possibility has it: of the changes in doubt, those in `done` happened.
    A behaviour is a mapping of its own words, empty where the release does nothing of the kind."""

    version: Version
    line: str
    done: frozenset[Change]
    fields: dict[str, Field]
    removed: dict[str, Removed]
    options: dict[str, Option]
    behaviours: dict[str, dict[str, Any]]
    rules: dict[str, Rule]

    @property
    def possibilities(self) -> tuple[Schema, ...]:
        """The schema before and past the changes that are in doubt for this version; one where none is."""
        return _possibilities(self.version)

    @property
    def doubts(self) -> frozenset[Change]:
        return self.possibilities[-1].done

    def assuming(self, *done: Change) -> Schema:
        """As if of the changes in doubt exactly these had happened."""
        return _schema(self.version, frozenset(done))

    def agreed(self, ask: Callable[[Schema], T]) -> T | None:
        """The answer that every possibility gives; None where they differ."""
        answers = [ask(schema) for schema in self.possibilities]
        return answers[0] if all(answer == answers[0] for answer in answers) else None

    def behaviour(self, name: str) -> Mapping[str, Any]:
        return self.behaviours.get(name, {})

    @property
    def sampling_key(self) -> str | None:
        """The key without which speculation decodes greedily here; None where sampling is found per request."""
        key = f"speculative_config.{self.behaviour('sampled_speculation').get('asked_by')}"
        return key if key in self.fields else None

    def current(self, path: str) -> str:
        """What a key is called in this release, by the name that it had when a rule was written."""
        gone = self.removed.get(path)
        if gone is not None and gone.renamed_to is not None and gone.same_value:
            return gone.renamed_to
        parent, dot, name = path.rpartition(".")
        return f"{self.current(parent)}.{name}" if dot else path

    def children(self, path: str) -> list[str]:
        """Keys known directly below `path` ("" for the top level)."""
        prefix = f"{path}." if path else ""
        return [
            p[len(prefix) :]
            for p in self.fields
            if p.startswith(prefix) and "." not in p[len(prefix) :]
        ]

    def option(self, flag: str) -> Option | None:
        return next((option for option in self.options.values() if flag in option.flags), None)

    def set_by(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What options of trtllm-serve set, by YAML path."""
        known = {
            self.options[name].key: value for name, value in options.items() if name in self.options
        }
        return {key: value for key, value in known.items() if key is not None}

    def decided_by(self, ask: Callable[[Schema], Any]) -> Change:
        """The change in doubt that alone brings the later answer; all as one where only several together do."""
        answer, doubts = (
            ask(self.possibilities[-1]),
            sorted(self.doubts, key=lambda change: change.interval),
        )
        for change in doubts:
            if ask(self.assuming(change)) == answer:
                return change
        after = max((change.after for change in doubts if change.after), key=Version, default=None)
        return Change(
            after, min((change.by for change in doubts if change.by), key=Version, default=None)
        )


def schema_for(text: str) -> Schema:
    """The schema of exactly one version, past every change that is in doubt for it."""
    return _possibilities(parse_version(text))[-1]


@functools.cache
def _possibilities(version: Version) -> tuple[Schema, ...]:
    doubts = frozenset(change for change in _changes() if change.happened(version) is None)
    return tuple(_schema(version, done) for done in dict.fromkeys((frozenset[Change](), doubts)))


@functools.lru_cache(maxsize=64)
def _schema(version: Version, done: frozenset[Change]) -> Schema:
    def happened(change: Change) -> bool:
        known = change.happened(version)
        return change in done if known is None else known

    found = merged(_files().values(), happened)
    return Schema(
        version=version,
        line=line_of(str(version)),
        done=done,
        fields={path: _typed(Field, entry, path=path) for path, entry in found["fields"].items()},
        removed={
            path: _typed(Removed, entry, path=path) for path, entry in found["removed"].items()
        },
        options={
            name: _typed(Option, entry, name=name) for name, entry in found["options"].items()
        },
        behaviours=found["behaviours"],
        rules={name: Rule(**entry) for name, entry in found["rules"].items()},
    )


def merged(
    files: Iterable[Mapping[str, Any]], happened: Callable[[Change], bool] = lambda change: True
) -> Entries:
    """The entries of schema files laid over each other, oldest first; by default what holds in the end."""
    found: Entries = {part: {} for part in PARTS}
    for data in files:
        begun = "begins" not in data["versions"] or happened(Change(**data["versions"]["begins"]))

        def dated(entry: Mapping[str, Any] | None, name: str, begun: bool = begun) -> bool:
            date = (entry or {}).get(name)
            return begun if date is None else happened(Change(**date))

        for part in ("fields", "options"):
            for name, entry in data.get(part, {}).items():
                if dated(entry, "since") and (
                    name in found[part] or "type" in entry
                ):  # else what it refines is absent
                    found[part][name] = {**found[part].get(name, {}), **entry}
                    found["removed"].pop(name, None)
        for path, entry in data.get("removed", {}).items():
            if dated(entry, "until"):
                found["fields"].pop(path, None)
                found["removed"][path] = entry
        for name in data.get("removed_options", ()) if begun else ():
            found["options"].pop(name, None)
        for part in ("behaviours", "rules"):
            for name, entry in data.get(part, {}).items():
                if dated(entry, "since"):
                    found[part].pop(name, None)
                    if entry and not ("until" in entry and dated(entry, "until")):
                        found[part][name] = entry
    return found


def _typed(kind: Callable[..., T], entry: Mapping[str, Any], **name: str) -> T:
    """An object of the class; what the files say about an entry, such as its source, is not among its fields."""
    known = _field_names(kind)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) and key != "default" else value
        for key, value in entry.items()
        if key in known
    }
    if "until" in values:
        values["until"] = Change(**values["until"])
    return kind(**name, **values)


@functools.cache
def _field_names(kind: Any) -> frozenset[str]:
    return frozenset(each.name for each in fields(kind))


def parse_version(text: str) -> Version:
    """Raises UsageError for text that is not a version, or a release older than the oldest known one."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise UsageError(
            f"{text!r} is not a TensorRT-LLM version",
            f"write it as the package does, for example {newest_known()}",
        ) from None
    oldest = _files()[LINES[0]]["versions"]["from"]
    if version < Version(oldest):
        message = f"TensorRT-LLM {text} is too old: {oldest} to {newest_known()} are known"
        raise UsageError(
            message, f"use {oldest} or later, for example `trtllm_version` {newest_known()}"
        )
    return version


def line_of(text: str) -> str:
    """The line that a version belongs to; raises UsageError as parse_version does."""
    version = parse_version(text)
    return next(
        line for line in reversed(LINES) if version >= Version(_files()[line]["versions"]["from"])
    )


def newest_known() -> Version:
    return max(
        Version(data["versions"]["newest"])
        for data in _files().values()
        if "newest" in data["versions"]
    )


def newest_read() -> Version:
    """The last release whose classes were read whole; what later ones lack or add is not known."""
    stated = [data["versions"] for data in _files().values()]
    return max(Version(versions.get("read", versions["from"])) for versions in stated)


@functools.cache
def _files() -> dict[str, dict[str, Any]]:
    """Every schema file, parsed and its rules checked. Like bytecode, what was parsed once is kept beside the files
    until one changes: reading it back takes a twentieth of the time, and every torch-free command needs it."""
    files = {line: SCHEMAS / f"{line}.yaml" for line in LINES}
    stamp = {
        line: [(found := path.stat()).st_mtime_ns, found.st_size] for line, path in files.items()
    }
    try:
        kept = json.loads(PARSED.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return kept["lines"]
    except (OSError, ValueError, KeyError):
        pass
    from pydantic import TypeAdapter

    lines = {line: load_yaml(path) for line, path in files.items()}
    rules = TypeAdapter(dict[str, Rule | None])
    for data in lines.values():
        rules.validate_python(data.get("rules", {}))
    if not sys.dont_write_bytecode:
        with contextlib.suppress(
            OSError, TrtspecError
        ):  # an installation that may not be written is only slower
            PARSED.parent.mkdir(exist_ok=True)
            write_atomic(PARSED, json.dumps({"stamp": stamp, "lines": lines}))
    return lines


@functools.cache
def read_beside(name: str) -> Any:
    """A data file of this directory."""
    return load_yaml(Path(__file__).with_name(name))


@functools.cache
def _changes() -> frozenset[Change]:
    return frozenset(Change(**date) for date in _dates(list(_files().values())))


def _dates(entry: Any) -> Iterator[dict[str, Any]]:
    """Every date in a parsed file."""
    for name, value in (
        entry.items() if isinstance(entry, dict) else ((None, value) for value in entry)
    ):
        if name in ("since", "until", "begins"):
            yield value
        elif isinstance(value, (dict, list)):
            yield from _dates(value)


@functools.cache
def entries_of(line: str) -> Entries:
    """What holds in a line in the end."""
    return merged(files_up_to(line))


def files_up_to(line: str) -> list[dict[str, Any]]:
    return [data for name, data in _files().items() if Version(name) <= Version(line)]


def line_fields(line: str, path: str = "", key: str = "") -> Any:
    """Paths known in a line in the end; with `path` and `key`, one attribute of a field there (empty when absent)."""
    known = entries_of(line)["fields"]
    return known.get(path, {}).get(key, ()) if path else known.keys()


def removed_in(line: str) -> list[Removed]:
    """What exactly this line took away."""
    return [
        _typed(Removed, entry, path=path)
        for path, entry in _files()[line].get("removed", {}).items()
    ]
