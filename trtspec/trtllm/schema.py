"""Keys, options and behaviours of a TensorRT-LLM release, by the sources that were read.

Each file of `snapshots/*.json` is a release, its source, and classes of the engine. Only
tools/snapshots.py writes them. A class is named by the dotted path of its mapping in the YAML. The
name is `path:variant` if the mapping's discriminator chooses among several classes, and `--` for
the options of `trtllm-serve`. A class that was read whole refuses every key that it does not list,
except keys in `unknown`. A class that was read in part says something about its listed keys alone.

A `Word` has the sources around a release for one key: the last source at or before the release,
and the first one after it. A key that only one of them shows is in doubt. A key in neither is not
known.

`schemas/*.yaml` hold behaviours and rules with the dates of their changes. keys.yaml holds the
names of keys in other releases and tools.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from packaging.version import InvalidVersion, Version

from trtspec.data_files import load_yaml
from trtspec.errors import Severity, UsageError

SCHEMAS = Path(__file__).parent / "schemas"
SNAPSHOTS = Path(__file__).parent / "snapshots"
UNKNOWN = object()  # a default that no source states
OPTIONS = "--"  # the class of the options of trtllm-serve
# the key that chooses the class of an object; `variants` of a field are values of it
DISCRIMINATORS = {
    "speculative_config": "decoding_type",
    "sparse_attention_config": "algorithm",
    "kv_cache_compression_config": "algorithm",
    "cuda_graph_config": "mode",
}


@dataclass(frozen=True)
class Change:
    """When something changed.

    `after`: the last source read without the change. `by`: the first source with it.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    after: str | None = None
    by: str | None = None
    evidence: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    @property
    def interval(self) -> str:
        return f"after {self.after}, by {self.by or 'a release that is not known'}"

    def happened(self, version: Version) -> bool | None:
        """Whether the release has the change. None if the release lies between the two sources."""
        if self.by is not None and version >= _release(self.by):
            return True
        if self.after is not None and version <= _release(self.after):
            return False
        return None


_release = functools.cache(Version)


@dataclass(frozen=True)
class Field:
    """One key of the engine's YAML.

    Args:
        type: a union such as "int|null" or "list[int]".
        min: inclusive, as `max` is. Limits and `allowed` hold for every item of a list.
        above: exclusive, as `below` is.
        strict: the engine makes no integer from text or 8.0, and no text from a number.
        variants: values of the discriminator whose object has the key.
    """

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
    required: bool = False
    variants: tuple[str, ...] = ()
    status: str = "stable"
    note: str = ""

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(self.type.split("|"))


@dataclass(frozen=True)
class Option:
    """One option of `trtllm-serve`. `path`: its name. `key`: the YAML path that means the same."""

    path: str
    flags: tuple[str, ...]
    type: str
    choices: tuple[str, ...] = ()
    default: Any = None
    is_flag: bool = False
    multiple: bool = False
    status: str = "stable"
    key: str | None = None


Entry = Field | Option


@dataclass(frozen=True)
class Rule:
    """Settings that a release refuses or voids beside each other.

    `when` and `unless` map dotted paths to conditions: set (not null, false, 0 or empty text),
    unset, given (written), absent (not written), filled (written and not null), empty (written as
    null), a value, a list of values, {written: x}, {not: x}, {outside: [...]}, {above: n},
    {below: n}, {unlike: path of another}. A setting that is not written has its default. Paths may
    also name `facts` of rules/from_data.py.

    Args:
        when: the rule applies if all of them hold.
        unless: the rule does not apply if all of them hold, and there is one.
        at: the key of the finding, by default the first one of `when`.
        fix: {drop: path} or {write: {path: value}}.
        feature: ability of the releases after the rule.
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
    feature: str = ""


@dataclass(frozen=True)
class Reading:
    """One class in one source: the `entries` that it takes and the keys that it `refuses`.

    `whole`: the source refuses every other key too, except `unknown` ones.
    """

    release: Version
    whole: bool
    entries: Mapping[str, Entry]
    refuses: frozenset[str]
    unknown: frozenset[str]

    def entry(self, name: str) -> Any:
        """The entry of a key. None if the source refuses the key, UNKNOWN if it does not say."""
        if name in self.entries:
            return self.entries[name]
        if name in self.refuses or (self.whole and name not in self.unknown):
            return None
        return UNKNOWN


@dataclass(frozen=True)
class Word:
    """One key in the sources around a release.

    Args:
        sources: (release, entry) of the last source at or before the release, and of the first one
            after it. The entry is None if the source refuses the key.
        settled: whether a source of the release itself says it, or sources on both sides.
        earlier: whether a source at or before the release says something.
    """

    sources: tuple[tuple[Version, Entry | None], ...]
    settled: bool
    earlier: bool

    @property
    def taken(self) -> tuple[Any, ...]:
        """The entries of the sources that take the key."""
        return tuple(entry for _, entry in self.sources if entry is not None)

    @property
    def takes(self) -> bool:
        """Whether no source refuses the key and an earlier one has it."""
        return self.earlier and len(self.taken) == len(self.sources)

    @property
    def releases(self) -> str:
        """Each source, and whether it takes the key."""
        words = []
        for release, entry in self.sources:
            verb = "refuses" if entry is None else "takes"
            words.append(f"{release} {verb} it")
        return ", ".join(words)


@dataclass(frozen=True, eq=False)
class Schema:
    """Behaviours and rules of a release, and its keys by the sources.

    Args:
        behaviours: possible states by name, several if a change is in doubt for the release. A
            state is a mapping with keys of its own, empty if the release has no such behaviour.
        rules: possible states by name. None: no rule.
        intervals: the interval of the change in doubt, by name.
    """

    version: Version
    behaviours: Mapping[str, tuple[Mapping[str, Any], ...]]
    rules: Mapping[str, tuple[Rule | None, ...]]
    intervals: Mapping[str, str]

    def word(self, parent: str, name: str, variant: Any = None) -> Word:
        """A key in the sources. With an unknown `variant`, the class that says most for the key."""
        if parent not in DISCRIMINATORS or name == DISCRIMINATORS[parent]:
            return _word(parent, name, self.version)
        variants = [variant] if variant in _variants(parent) else self.variants(parent)
        words = [_word(f"{parent}:{variant}", name, self.version) for variant in variants]
        return max(words, key=lambda word: (word.takes, len(word.taken), not word.settled))

    def variants_with(self, parent: str, name: str) -> tuple[str, ...]:
        """The variants of an object that have a key."""
        variants = self.variants(parent)
        return tuple(variant for variant in variants if self.word(parent, name, variant).taken)

    @functools.cached_property
    def fields(self) -> dict[str, Field]:
        """Every key that some source around the release takes, by path."""
        known: dict[str, Field] = {}
        for owner in classes():  # a mapping before its own mappings
            parent, _, variant = owner.partition(":")
            if parent not in ("", *known) or (variant and variant not in self.variants(parent)):
                continue
            for name in _names(owner):
                path = f"{parent}.{name}".lstrip(".")
                word = _word(owner, name, self.version)
                if word.taken and path not in known:
                    variants = self.variants_with(parent, name) if variant else ()
                    known[path] = replace(word.taken[0], variants=variants)
        return known

    def variants(self, parent: str) -> tuple[str, ...]:
        """The values of an object's discriminator that some source around the release takes."""
        word = _word(parent, DISCRIMINATORS[parent], self.version)
        listed: set[str] = set()
        for entry in word.taken:
            listed.update(entry.allowed)
        return tuple(variant for variant in _variants(parent) if variant in listed or not listed)

    @functools.cached_property
    def options(self) -> dict[str, Option]:
        """Every option of trtllm-serve that some source around the release takes, by name."""
        words = {name: _word(OPTIONS, name, self.version) for name in _names(OPTIONS)}
        return {name: word.taken[0] for name, word in words.items() if word.taken}

    @property
    def unread(self) -> tuple[str, ...]:
        """Classes that no source of this release lists whole."""
        unread = []
        for owner, readings in classes().items():
            if not any(each.whole and each.release == self.version for each in readings):
                unread.append(owner)
        return tuple(unread)

    def behaviour(self, name: str) -> Mapping[str, Any]:
        """The latest state that is possible for the release."""
        return self.behaviours.get(name, ({},))[-1]

    @property
    def sampling_key(self) -> str | None:
        """The key without which speculation may decode greedily in this release.

        None if the engine finds out per request whether to sample.
        """
        names = [state.get("asked_by") for state in self.behaviours["sampled_speculation"]]
        keys = [f"speculative_config.{name}" for name in names if name]
        return next((key for key in keys if key in self.fields), None)

    def current(self, path: str) -> str:
        """The name of a key in this release, by the name that it had when a rule was written."""
        renamed = renames().get(path)
        if renamed is not None and path not in self.fields and renamed["same_value"]:
            return self.current(renamed["to"])
        parent, dot, name = path.rpartition(".")
        return f"{self.current(parent)}.{name}" if dot else path

    def option(self, flag: str) -> Word:
        """The option with this flag in the sources."""
        name = option_names().get(flag, "")
        return _word(OPTIONS, name, self.version)

    def last_release_with(self, path: str) -> Version | None:
        """The newest release that takes a key."""
        parent, _, name = path.rpartition(".")
        owners = [owner for owner in classes() if owner.partition(":")[0] == parent]
        for release in reversed(releases()):
            takes = any(_word(owner, name, release).takes for owner in owners)
            if takes and not release.is_devrelease:
                return release
        return None

    def set_by(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The values of options of trtllm-serve, by YAML path."""
        keys = {name: option.key for name, option in self.options.items() if option.key}
        return {keys[name]: value for name, value in options.items() if name in keys}


def schema_for(text: str) -> Schema:
    """The schema of exactly one release. Raises UsageError as `parse_version` does."""
    return _schema(parse_version(text))


@functools.lru_cache(maxsize=64)
def _schema(version: Version) -> Schema:
    intervals: dict[str, str] = {}
    behaviours: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    for name, changes in _histories("behaviours").items():
        states, intervals[name] = _states(changes, version)
        behaviours[name] = tuple(state or {} for state in states)
    for name, changes in _histories("rules").items():
        states, intervals[name] = _states(changes, version)
        rules[name] = tuple(Rule(**state) if state else None for state in states)
    return Schema(version, behaviours, rules, intervals)


State = dict[str, Any] | None


def _states(
    changes: list[tuple[Change | None, State]], version: Version
) -> tuple[tuple[State, ...], str]:
    """Possible states of a release, oldest first, and the interval of the last change in doubt."""
    states: list[State] = [None]
    interval = ""
    for change, state in changes:
        if change is None:
            states = [state]
            continue
        happened = change.happened(version)
        if happened:
            states = [state]
        elif happened is None:
            states.append(state)
            interval = change.interval
    return tuple(states), interval


@functools.cache
def _histories(part: str) -> dict[str, list[tuple[Change | None, State]]]:
    """(change, state after it) of each behaviour or rule, oldest first. State None: it ended."""
    histories: dict[str, list[tuple[Change | None, State]]] = {}
    issues = {"versions": {}, "rules": issue_rules()}
    for data in (*rule_files().values(), issues):
        begins = data["versions"].get("begins")
        for name, state in data.get(part, {}).items():
            dates = state or {}
            since = dates.get("since", begins)
            beginning = Change(**since) if since else None
            history = histories.setdefault(name, [])
            history.append((beginning, state))
            if "until" in dates:
                history.append((Change(**dates["until"]), None))
    return histories


def issue_rules() -> dict[str, dict[str, Any]]:
    """The known issues of the release notes as rules by name.

    An issue lasts until the next notes that were read.
    """
    notes = read_beside("releases.yaml")["notes"]
    names = [None, *notes, None]
    rules: dict[str, dict[str, Any]] = {}
    neighbours = zip(names, notes.items(), names[2:], strict=False)
    for before, (release, issues), following in neighbours:
        facts = {
            "since": {"after": before, "by": release},
            "until": {"after": release, "by": following},
            "source": f"release notes of {release}",
        }
        rules |= {name: {**issue, **facts} for name, issue in issues.items()}
    return rules


def known_issues(release: str) -> list[Rule]:
    """The known issues in the release's own notes."""
    return [Rule(**row) for row in issue_rules().values() if row["since"]["by"] == release]


@functools.lru_cache(maxsize=65536)
def _word(owner: str, name: str, version: Version) -> Word:
    """A key of one class in the readings around a release."""
    before: tuple[Version, Any] | None = None
    after: tuple[Version, Any] | None = None
    for reading in classes().get(owner, ()):
        entry = reading.entry(name)
        if entry is UNKNOWN:
            continue
        if reading.release <= version:
            before = (reading.release, entry)
        elif after is None:
            after = (reading.release, entry)
    if before is not None and before[0] == version:
        return Word((before,), True, True)
    sources = tuple(source for source in (before, after) if source is not None)
    return Word(sources, len(sources) == 2, before is not None)


@functools.cache
def classes() -> dict[str, tuple[Reading, ...]]:
    """The readings of each class, oldest first."""
    readings: dict[str, list[Reading]] = {}
    for data in snapshots():
        release = Version(data["release"])
        for owner, read in data["classes"].items():
            entries = {name: _entry(owner, name, facts) for name, facts in read["fields"].items()}
            refuses = frozenset(read.get("refuses", ()))
            unknown = frozenset(read.get("unknown", ()))
            reading = Reading(release, read["whole"], entries, refuses, unknown)
            readings.setdefault(owner, []).append(reading)
    return {owner: tuple(listed) for owner, listed in readings.items()}


@functools.cache
def snapshots() -> tuple[dict[str, Any], ...]:
    """The data of every snapshot, oldest release first."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in SNAPSHOTS.glob("*.json")]
    return tuple(sorted(files, key=lambda data: Version(data["release"])))


@functools.cache
def _names(owner: str) -> tuple[str, ...]:
    """Every key that some reading of a class has, in the order of the readings."""
    names: dict[str, None] = {}
    for reading in classes().get(owner, ()):
        names |= dict.fromkeys(reading.entries)
    return tuple(names)


@functools.cache
def _variants(parent: str) -> tuple[str, ...]:
    return tuple(owner.partition(":")[2] for owner in classes() if owner.startswith(f"{parent}:"))


@functools.cache
def option_names() -> dict[str, str]:
    """The names of options by flag, in any release."""
    names: dict[str, str] = {}
    for reading in classes()[OPTIONS]:
        for name, option in reading.entries.items():
            names |= dict.fromkeys(option.flags, name)  # type: ignore[union-attr]
    return names


def _entry(owner: str, name: str, facts: Mapping[str, Any]) -> Entry:
    entry_class: Any = Option if owner == OPTIONS else Field
    parent = owner.partition(":")[0].removeprefix(OPTIONS)
    path = f"{parent}.{name}".lstrip(".")
    lists = {key: tuple(facts[key]) for key in ("allowed", "choices", "flags") if key in facts}
    entry: Entry = entry_class(path=path, **{**facts, **lists})
    return entry


def parse_version(text: str) -> Version:
    """The release that a text names. One newer than all known releases is taken, though unread.

    Raises UsageError with the nearest releases if the text is not a release.
    """
    known = releases()
    try:
        version = Version(text)
    except InvalidVersion:
        message = f"{text!r} is not a TensorRT-LLM version"
        remedy = f"write it as the package does, for example {default_release()}"
        raise UsageError(message, remedy) from None
    version = Version(version.public)
    is_line = len(version.release) < 3  # such as 1.3
    if is_line or (version not in known and version < known[-1]):
        above = bisect(known, version)
        nearest = known[max(above - 1, 0) : above + 1]
        listed = " or ".join(map(str, nearest))
        message = f"TensorRT-LLM {text} is not among the known releases, {known[0]} to {known[-1]}"
        remedy = f"use {listed}, the nearest, or `trtllm_version` {default_release()}"
        raise UsageError(message, remedy)
    return version


@functools.cache
def releases() -> tuple[Version, ...]:
    """Every known release and every source state that was read between releases, oldest first."""
    listed = [Version(text) for text in read_beside("releases.yaml")["releases"]]
    listed += [Version(data["release"]) for data in snapshots()]
    return tuple(sorted(set(listed)))


def default_release() -> str:
    """The release that everything is written and judged for unless another one is asked for."""
    default: str = read_beside("releases.yaml")["default"]
    return default


@functools.cache
def known_names(section: str) -> dict[str, dict[str, Any]]:
    """Rows of keys.yaml by name: `to` (a dotted path), `same_value` and `note`.

    `section`: `renamed` for names of other releases, `foreign` for names of vLLM and other tools.
    `same_value`: false if the value means something else at `to`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for path, row in read_beside("keys.yaml")[section].items():
        if not isinstance(row, dict):
            row = {"to": row}
        rows[path] = {"same_value": True, "note": "", **row}
    return rows


def renames() -> dict[str, dict[str, Any]]:
    return known_names("renamed")


@functools.cache
def rule_files() -> dict[str, dict[str, Any]]:
    """The files of behaviours and rules, oldest line first."""
    lines = sorted((path.stem for path in SCHEMAS.glob("*.yaml")), key=Version)
    return {line: load_yaml(SCHEMAS / f"{line}.yaml") for line in lines}


@functools.cache
def read_beside(name: str) -> Any:
    """A data file of this directory."""
    return load_yaml(Path(__file__).with_name(name))
