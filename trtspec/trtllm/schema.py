"""What a release of TensorRT-LLM accepts, by what was read of it, and what it does with it.

`snapshots/*.json` hold what sources say: each file is a release, its source, and classes of the engine (a mapping of
the YAML by its dotted path; `path:kind` where the mapping's discriminator chooses among several classes; `--` for the
options of `trtllm-serve`). A class that was read whole refuses every key that it does not list, except those in
`unknown`; a class that was read in part says something about the keys that it lists alone. Written by
tools/snapshots.py, never by hand.

A `Word` is what the sources around a release say of one key: the last one at or before it, and the first one after it.
What both say holds. What only one says is in doubt, and what neither shows is not known.

`schemas/*.yaml` hold behaviours and rules with the dates of their changes, and keys.yaml what keys were called.
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
        return f"after {self.after}, by {self.by or 'a release that is not known'}"

    def happened(self, version: Version) -> bool | None:
        """None between the two sources."""
        if self.by is not None and version >= _release(self.by):
            return True
        return False if self.after is not None and version <= _release(self.after) else None


_release = functools.cache(Version)


@dataclass(frozen=True)
class Field:
    """One key of the engine's YAML. `type` is a union such as "int|null" or "list[int]"; `min` and `max` are inclusive
    and, like `allowed`, hold for every item of a list. Of a `strict` one the engine
    makes no integer from text or 8.0, and no text from a number. `variants`: the kinds of its object that have it."""

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
    """One option of `trtllm-serve`: `path` is its name, and `key` the YAML path that means the same."""

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
    """Settings that a release refuses or voids beside each other. The rule speaks where all of `when` holds and not all
    of `unless` does; the finding is at the key `at`, by default the first one of `when`. `fix` drops a key or
    writes one: {drop: path} or {write: {path: value}}. `feature`: what a release can do from the end of the rule on.

    `when` and `unless` map dotted paths to conditions: set (not null, false, 0 or empty text), unset, given (written),
    absent (not written), filled (written and not null), empty (written as null), a value, a list of values,
    {written: x}, {not: x}, {outside: [...]}, {above: n}, {below: n}, {unlike: path of another}. A setting that is
    not written has its default. Paths may also name what is known beside the file: `facts` in rules/from_data.py.
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
    """What one source says of one class: `entries` it takes, `refuses` it does not; all others if it was read whole,
    except `unknown`."""

    release: Version
    whole: bool
    entries: Mapping[str, Entry]
    refuses: frozenset[str]
    unknown: frozenset[str]

    def entry(self, name: str) -> Any:
        """None if the source refuses the key, UNKNOWN if it does not say."""
        if name in self.entries:
            return self.entries[name]
        refused = name in self.refuses or (self.whole and name not in self.unknown)
        return None if refused else UNKNOWN


@dataclass(frozen=True)
class Word:
    """What the sources around a release say of a key: (release, entry) of the last one at or before it and of the first
    one after it, the entry None where it refuses the key. `settled`: a source of the release itself, or both sides."""

    said: tuple[tuple[Version, Entry | None], ...]
    settled: bool
    earlier: bool  # whether a source at or before the release says something

    @property
    def taken(self) -> tuple[Any, ...]:
        return tuple(entry for _, entry in self.said if entry is not None)

    @property
    def takes(self) -> bool:
        """Whether no source refuses the key and an earlier one has it."""
        return self.earlier and len(self.taken) == len(self.said)

    @property
    def releases(self) -> str:
        """The sources, and what each says."""
        words = [
            f"{release} {'refuses' if entry is None else 'takes'} it"
            for release, entry in self.said
        ]
        return ", ".join(words)


@dataclass(frozen=True, eq=False)
class Schema:
    """What is known of `version`. A behaviour is a mapping of its own words, empty where the release does nothing of
    the kind. `behaviours` and `rules` hold the states that are possible for the release by name: several where a change
    is in doubt for it, with the interval of that change."""

    version: Version
    behaviours: Mapping[str, tuple[Mapping[str, Any], ...]]
    rules: Mapping[str, tuple[Rule | None, ...]]
    intervals: Mapping[str, str]

    def word(self, parent: str, name: str, kind: Any = None) -> Word:
        """What the sources say of a key; with an unknown `kind`, the class that says most for it."""
        if parent not in DISCRIMINATORS or name == DISCRIMINATORS[parent]:
            return _word(parent, name, self.version)
        chosen = [kind] if kind in _kinds(parent) else self.kinds(parent)
        words = [_word(f"{parent}:{each}", name, self.version) for each in chosen]
        return max(words, key=lambda word: (word.takes, len(word.taken), not word.settled))

    def kinds_with(self, parent: str, name: str) -> tuple[str, ...]:
        """The kinds of an object that have a key."""
        kinds = self.kinds(parent)
        return tuple(each for each in kinds if self.word(parent, name, each).taken)

    @functools.cached_property
    def fields(self) -> dict[str, Field]:
        """Every key that some source around the release takes, by path."""
        known: dict[str, Field] = {}
        for owner in classes():  # a mapping before what it holds
            parent, _, kind = owner.partition(":")
            exists = parent in ("", *known) and (not kind or kind in self.kinds(parent))
            for name in _names(owner) if exists else ():
                path = f"{parent}.{name}".lstrip(".")
                word = _word(owner, name, self.version)
                if word.taken and path not in known:
                    variants = self.kinds_with(parent, name) if kind else ()
                    known[path] = replace(word.taken[0], variants=variants)
        return known

    def kinds(self, parent: str) -> tuple[str, ...]:
        """The values of an object's discriminator that some source around the release takes."""
        word = _word(parent, DISCRIMINATORS[parent], self.version)
        listed = dict.fromkeys(kind for entry in word.taken for kind in entry.allowed)
        return tuple(kind for kind in _kinds(parent) if kind in listed or not listed)

    @functools.cached_property
    def options(self) -> dict[str, Option]:
        words = {name: _word(OPTIONS, name, self.version) for name in _names(OPTIONS)}
        return {name: word.taken[0] for name, word in words.items() if word.taken}

    @property
    def unread(self) -> tuple[str, ...]:
        """Classes that no source of this release lists whole."""
        return tuple(
            owner
            for owner, readings in classes().items()
            if not any(each.whole and each.release == self.version for each in readings)
        )

    def behaviour(self, name: str) -> Mapping[str, Any]:
        """The latest that is possible for the release."""
        return self.behaviours.get(name, ({},))[-1]

    @property
    def sampling_key(self) -> str | None:
        """The key without which speculation may decode greedily here; None where sampling is found per request."""
        names = [each.get("asked_by") for each in self.behaviours["sampled_speculation"]]
        keys = [f"speculative_config.{name}" for name in names if name]
        return next((key for key in keys if key in self.fields), None)

    def current(self, path: str) -> str:
        """What a key is called in this release, by the name that it had when a rule was written."""
        renamed = renames().get(path)
        if renamed is not None and path not in self.fields and renamed["same_value"]:
            return self.current(renamed["to"])
        parent, dot, name = path.rpartition(".")
        return f"{self.current(parent)}.{name}" if dot else path

    def option(self, flag: str) -> Word:
        """What the sources say of the option with this flag."""
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
        """What options of trtllm-serve set, by YAML path."""
        known = {name: option.key for name, option in self.options.items() if option.key}
        return {known[name]: value for name, value in options.items() if name in known}


def schema_for(text: str) -> Schema:
    """What is known of exactly one release."""
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
        rules[name] = tuple(state and Rule(**state) for state in states)
    return Schema(version, behaviours, rules, intervals)


State = dict[str, Any] | None


def _states(
    changes: list[tuple[Change | None, State]], version: Version
) -> tuple[tuple[State, ...], str]:
    """The states that are possible for a release, oldest first, and the interval of the last change in doubt."""
    states: list[State] = [None]
    interval = ""
    for change, state in changes:
        happened = True if change is None else change.happened(version)
        if happened:
            states = [state]
        elif happened is None and change is not None:
            states.append(state)
            interval = change.interval
    return tuple(states), interval


@functools.cache
def _histories(part: str) -> dict[str, list[tuple[Change | None, State]]]:
    """What each behaviour or rule became with each change, in order; None: nothing."""
    histories: dict[str, list[tuple[Change | None, State]]] = {}
    for data in (*rule_files().values(), {"versions": {}, "rules": issue_rules()}):
        begins = data["versions"].get("begins")
        for name, state in data.get(part, {}).items():
            dates = state or {}
            since = dates.get("since", begins)
            history = histories.setdefault(name, [])
            history.append((Change(**since) if since else None, state))
            if "until" in dates:
                history.append((Change(**dates["until"]), None))
    return histories


def issue_rules() -> dict[str, dict[str, Any]]:
    """The known issues of the release notes, each until the next notes that were read."""
    notes = read_beside("releases.yaml")["notes"]
    names = [None, *notes, None]
    rules: dict[str, dict[str, Any]] = {}
    for before, (release, issues), following in zip(names, notes.items(), names[2:], strict=False):
        facts = {
            "since": {"after": before, "by": release},
            "until": {"after": release, "by": following},
            "source": f"release notes of {release}",
        }
        rules |= {name: {**issue, **facts} for name, issue in issues.items()}
    return rules


def known_issues(release: str) -> list[Rule]:
    """By its own release notes."""
    return [Rule(**row) for row in issue_rules().values() if row["since"]["by"] == release]


@functools.lru_cache(maxsize=65536)
def _word(owner: str, name: str, version: Version) -> Word:
    """What the readings of one class say around a release."""
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
    said = tuple(side for side in (before, after) if side is not None)
    return Word(said, len(said) == 2, before is not None)


@functools.cache
def classes() -> dict[str, tuple[Reading, ...]]:
    """The readings of each class, oldest first."""
    readings: dict[str, list[Reading]] = {}
    for data in snapshots():
        for owner, read in data["classes"].items():
            entries = {name: _entry(owner, name, facts) for name, facts in read["fields"].items()}
            refuses, unknown = (frozenset(read.get(key, ())) for key in ("refuses", "unknown"))
            reading = Reading(Version(data["release"]), read["whole"], entries, refuses, unknown)
            readings.setdefault(owner, []).append(reading)
    return {owner: tuple(listed) for owner, listed in readings.items()}


@functools.cache
def snapshots() -> tuple[dict[str, Any], ...]:
    """What was read, oldest release first."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in SNAPSHOTS.glob("*.json")]
    return tuple(sorted(files, key=lambda data: Version(data["release"])))


@functools.cache
def _names(owner: str) -> tuple[str, ...]:
    """Every key that some reading of a class has."""
    readings = classes().get(owner, ())
    return tuple(dict.fromkeys(name for reading in readings for name in reading.entries))


@functools.cache
def _kinds(parent: str) -> tuple[str, ...]:
    return tuple(owner.partition(":")[2] for owner in classes() if owner.startswith(f"{parent}:"))


@functools.cache
def option_names() -> dict[str, str]:
    """The names of options by flag, in any release."""
    readings = classes()[OPTIONS]
    return {
        flag: name
        for reading in readings
        for name, option in reading.entries.items()
        for flag in option.flags  # type: ignore[union-attr]
    }


def _entry(owner: str, name: str, facts: Mapping[str, Any]) -> Entry:
    make: Any = Option if owner == OPTIONS else Field
    parent = owner.partition(":")[0].removeprefix(OPTIONS)
    lists = {key: tuple(facts[key]) for key in ("allowed", "choices", "flags") if key in facts}
    return make(path=f"{parent}.{name}".lstrip("."), **{**facts, **lists})


def parse_version(text: str) -> Version:
    """Raises UsageError for text that is not a release, and names the nearest ones. A release newer than all known ones
    is taken: nobody has read it."""
    known = releases()
    try:
        version = Version(text)
    except InvalidVersion:
        raise UsageError(
            f"{text!r} is not a TensorRT-LLM version",
            f"write it as the package does, for example {default_release()}",
        ) from None
    version = Version(version.public)
    is_line = len(version.release) < 3  # such as 1.3
    if is_line or (version not in known and version < known[-1]):
        above = bisect(known, version)
        near = " or ".join(map(str, known[max(above - 1, 0) : above + 1]))
        raise UsageError(
            f"TensorRT-LLM {text} is not among the known releases, {known[0]} to {known[-1]}",
            f"use {near}, the nearest, or `trtllm_version` {default_release()}",
        )
    return version


@functools.cache
def releases() -> tuple[Version, ...]:
    """Every release that is known, oldest first, and the states of the source that were read between them."""
    listed = [Version(text) for text in read_beside("releases.yaml")["releases"]]
    return tuple(sorted({*listed, *(Version(data["release"]) for data in snapshots())}))


def default_release() -> str:
    """The release that everything is written and judged for unless another one is asked for."""
    default: str = read_beside("releases.yaml")["default"]
    return default


@functools.cache
def known_names(part: str) -> dict[str, dict[str, Any]]:
    """What names of keys mean: `to` a dotted path, `same_value` unless the value means something else there.
    `part`: `renamed` for names of other releases, `foreign` for those of vLLM and other tools."""
    rows = read_beside("keys.yaml")[part].items()
    stated = {path: row if isinstance(row, dict) else {"to": row} for path, row in rows}
    return {path: {"same_value": True, "note": "", **row} for path, row in stated.items()}


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
