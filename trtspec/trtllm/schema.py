"""Keys, options and behaviours of a TensorRT-LLM release, by the sources that were read.

Each file of `snapshots/*.json` has a release, its source, and classes of the engine. Only
tools/snapshots.py writes these files. A class is named by the dotted path of its mapping in the
YAML. The name is `path:variant` if the mapping's discriminator chooses among several classes, and
`--` for the options of `trtllm-serve`. A class that was read whole refuses every key that it does
not list, except its `unknown` keys. A class that was read in part only tells of the keys that it
lists.

`KeySupport` has the sources around a release for one key: the last source at or before the release,
and the first source after the release. A key is in doubt if only one of two sources takes it. It is
not known if no source takes or refuses it.

`schemas/*.yaml` have behaviours and rules with the dates of their changes. keys.yaml has the names
of keys in other releases and tools.
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
UNKNOWN = object()  # a default or a key that no source states
OPTIONS = "--"  # name of the class that has the options of trtllm-serve
# path of an object, and its key whose value (the variant) chooses the object's class
DISCRIMINATORS = {
    "speculative_config": "decoding_type",
    "sparse_attention_config": "algorithm",
    "kv_cache_compression_config": "algorithm",
    "cuda_graph_config": "mode",
}


@dataclass(frozen=True)
class Change:
    """The two sources between which the engine changed.

    Args:
        after: release of the last source read without the change. None if no source lacks it.
        by: release of the first source with the change. None if no source has it.
        evidence: what shows the change.
        source: file or page that shows the change.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    after: str | None = None
    by: str | None = None
    evidence: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    @property
    def interval(self) -> str:
        """Interval of releases in which the change happened, in words."""
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
        path: dotted path of the key.
        type: type of the value, a union such as "int|null" or "list[int]".
        min: smallest value, as `max` is the largest. Limits hold for every item of a list.
        above: number that the value must exceed.
        below: number that the value must not reach.
        not_empty: whether the engine refuses an empty list or mapping.
        allowed: values that the engine takes, empty for any value. They hold for every item of a
            list.
        strict: whether the engine refuses to convert text or 8.0 to an integer, and a number to
            text.
        default: value of an absent key, UNKNOWN if no source states it.
        variants: discriminator values of the objects that have the key, empty for all objects.
        status: stability, such as "stable" or "deprecated".
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
        """Members of the union `type`."""
        return tuple(self.type.split("|"))


@dataclass(frozen=True)
class Option:
    """One option of `trtllm-serve`.

    Args:
        path: name of the option without dashes.
        flags: spellings on the command line.
        type: type of the value.
        choices: values that the option takes, empty for any value.
        is_flag: whether the option takes no value.
        multiple: whether the option may be repeated.
        key: YAML path with the same meaning, None if there is no such path.
    """

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
    """A combination of settings that a release refuses or ignores.

    `when` and `unless` map dotted paths to conditions. A condition is one of: set (not null, false,
    0 or empty text), unset, given (written), absent (not written), filled (written and not null),
    empty (written as null), a value, a list of values, {written: x}, {not: x}, {outside: [...]},
    {above: n}, {below: n}, {unlike: path of another}. A setting that is not written has its
    default. Paths may also name `facts` of rules/from_data.py.

    Args:
        when: conditions. The rule applies if all of them hold.
        unless: conditions. The rule does not apply if there are some and all of them hold.
        since: change by which the rule began. None if the rule holds from the first release on.
        until: change by which the rule ended. None if the rule has not ended.
        at: key of the finding, by default the first key of `when`.
        fix: correction, {drop: path} or {write: {path: value}}.
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
    """One class of the engine as one source shows it.

    Args:
        release: release of the source.
        whole: whether the source shows all keys of the class, except the `unknown` ones.
        entries: keys or options that the class takes, by name.
        refuses: names of keys that the class refuses.
        unknown: names of keys that the source does not decide.
    """

    release: Version
    whole: bool
    entries: Mapping[str, Entry]
    refuses: frozenset[str]
    unknown: frozenset[str]

    def entry(self, name: str) -> Any:
        """Entry of a key.

        None if the source refuses the key, UNKNOWN if the source does not show it.
        """
        if name in self.entries:
            return self.entries[name]
        if name in self.refuses or (self.whole and name not in self.unknown):
            return None
        return UNKNOWN


@dataclass(frozen=True)
class KeySupport:
    """The support of one key by the sources around a release.

    Args:
        sources: (release, entry) of the last source at or before the release, and of the first
            source after the release. The entry is None if the source refuses the key.
        is_certain: whether the key is decided by a source of the release itself, or on both sides.
        earlier: whether a source at or before the release takes or refuses the key.
    """

    sources: tuple[tuple[Version, Entry | None], ...]
    is_certain: bool
    earlier: bool

    @property
    def taken(self) -> tuple[Any, ...]:
        """Entries of the sources that take the key, earlier release first."""
        return tuple(entry for _, entry in self.sources if entry is not None)

    @property
    def takes(self) -> bool:
        """Whether no source refuses the key, and a source at or before the release has the key."""
        return self.earlier and len(self.taken) == len(self.sources)

    @property
    def releases(self) -> str:
        """Each source's release, and whether the source takes the key, in words."""
        phrases = []
        for release, entry in self.sources:
            verb = "refuses" if entry is None else "takes"
            phrases.append(f"{release} {verb} it")
        return ", ".join(phrases)


@dataclass(frozen=True, eq=False)
class Schema:
    """The keys, behaviours and rules of one release.

    Args:
        behaviours: possible states by name, several if a change is in doubt for the release. A
            state is a mapping with keys of its own, empty if the release has no such behaviour.
        rules: possible states by name, oldest first. A state is a rule, or None for no rule.
        intervals: interval of the last change in doubt, by name of the behaviour or rule.
    """

    version: Version
    behaviours: Mapping[str, tuple[Mapping[str, Any], ...]]
    rules: Mapping[str, tuple[Rule | None, ...]]
    intervals: Mapping[str, str]

    def key_support(self, parent: str, name: str, variant: Any = None) -> KeySupport:
        """Support of the key `name` in the mapping at the path `parent`.

        `variant`: discriminator value of the mapping. If unknown, the variant counts that most
            likely takes the key.
        """
        if parent not in DISCRIMINATORS or name == DISCRIMINATORS[parent]:
            return _key_support(parent, name, self.version)
        variants = [variant] if variant in _variants(parent) else self.variants(parent)
        candidates = [
            _key_support(f"{parent}:{variant}", name, self.version) for variant in variants
        ]
        return max(candidates, key=lambda key: (key.takes, len(key.taken), not key.is_certain))

    def variants_with(self, parent: str, name: str) -> tuple[str, ...]:
        """Discriminator values of the object at `parent` whose class has the key `name`."""
        variants = self.variants(parent)
        return tuple(
            variant for variant in variants if self.key_support(parent, name, variant).taken
        )

    @functools.cached_property
    def fields(self) -> dict[str, Field]:
        """Keys that a source around the release takes, by dotted path."""
        known: dict[str, Field] = {}
        for owner in classes():  # a snapshot lists a mapping before the mappings inside
            parent, _, variant = owner.partition(":")
            # a class whose own key no source takes does not exist in this release
            if parent not in ("", *known) or (variant and variant not in self.variants(parent)):
                continue
            for name in _names(owner):
                path = f"{parent}.{name}".lstrip(".")
                support = _key_support(owner, name, self.version)
                if support.taken and path not in known:
                    variants = self.variants_with(parent, name) if variant else ()
                    known[path] = replace(support.taken[0], variants=variants)
        return known

    def variants(self, parent: str) -> tuple[str, ...]:
        """Discriminator values of the object at `parent` that a source around the release takes."""
        support = _key_support(parent, DISCRIMINATORS[parent], self.version)
        listed: set[str] = set()
        for entry in support.taken:
            listed.update(entry.allowed)
        # without a list of values, every variant that any source has is possible
        return tuple(variant for variant in _variants(parent) if variant in listed or not listed)

    @functools.cached_property
    def options(self) -> dict[str, Option]:
        """Options of trtllm-serve that a source around the release takes, by name."""
        supports = {name: _key_support(OPTIONS, name, self.version) for name in _names(OPTIONS)}
        return {name: support.taken[0] for name, support in supports.items() if support.taken}

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of the classes that no source of exactly this release shows whole."""
        unread = []
        for owner, readings in classes().items():
            if not any(each.whole and each.release == self.version for each in readings):
                unread.append(owner)
        return tuple(unread)

    def behaviour(self, name: str) -> Mapping[str, Any]:
        """Latest state of a behaviour that is possible for the release, {} without such a state."""
        return self.behaviours.get(name, ({},))[-1]

    @property
    def sampling_key(self) -> str | None:
        """Path of the key without which speculation may decode greedily in this release.

        None if the engine decides for each request whether to sample.
        """
        names = [state.get("asked_by") for state in self.behaviours["sampled_speculation"]]
        keys = [f"speculative_config.{name}" for name in names if name]
        return next((key for key in keys if key in self.fields), None)

    def current(self, path: str) -> str:
        """Name that a key has in this release.

        `path`: name in the release that a rule is written for.
        """
        renamed = renames().get(path)
        if renamed is not None and path not in self.fields and renamed["same_value"]:
            return self.current(renamed["to"])
        parent, dot, name = path.rpartition(".")
        return f"{self.current(parent)}.{name}" if dot else path

    def option(self, flag: str) -> KeySupport:
        """Support of the option of trtllm-serve that has this flag."""
        name = option_names().get(flag, "")
        return _key_support(OPTIONS, name, self.version)

    def last_release_with(self, path: str) -> Version | None:
        """Newest release that takes a key. None if no known release does."""
        parent, _, name = path.rpartition(".")
        owners = [owner for owner in classes() if owner.partition(":")[0] == parent]
        for release in reversed(releases()):
            takes = any(_key_support(owner, name, release).takes for owner in owners)
            if takes and not release.is_devrelease:
                return release
        return None

    def set_by(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Values of trtllm-serve's options, by the YAML path with the same meaning.

        `options`: values by name of the option. Options without a YAML path are left out.
        """
        keys = {name: option.key for name, option in self.options.items() if option.key}
        return {keys[name]: value for name, value in options.items() if name in keys}


def schema_for(text: str) -> Schema:
    """Returns the schema of exactly one release.

    Raises UsageError with the nearest releases if the text is not a known or newer release.
    """
    return _schema(parse_version(text))


@functools.lru_cache(maxsize=64)
def _schema(version: Version) -> Schema:
    """Builds the schema of a release from the schema files and the snapshots."""
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


State = dict[str, Any] | None  # a behaviour or rule between two changes, None if it has ended


def _states(
    changes: list[tuple[Change | None, State]], version: Version
) -> tuple[tuple[State, ...], str]:
    """Returns the possible states of a release, oldest first, and the interval of the last doubt.

    `changes`: (change, state after the change), oldest first. A change of None has no date, and its
        state holds from the first release on. The interval is "" if nothing is in doubt.
    """
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
    """Changes of each behaviour or rule by name, oldest first, with the state after each change.

    `part`: "behaviours" or "rules". A state of None means that the behaviour or rule ended.
    """
    histories: dict[str, list[tuple[Change | None, State]]] = {}
    issues = {"versions": {}, "rules": issue_rules()}
    for data in (*rule_files().values(), issues):
        begins = data["versions"].get("begins")
        for name, state in data.get(part, {}).items():
            dates = state or {}  # null ends what an earlier file began
            since = dates.get("since", begins)
            beginning = Change(**since) if since else None
            history = histories.setdefault(name, [])
            history.append((beginning, state))
            if "until" in dates:
                history.append((Change(**dates["until"]), None))
    return histories


def issue_rules() -> dict[str, dict[str, Any]]:
    """Facts of a `Rule` for each known issue of the release notes, by the issue's name.

    An issue lasts until the next release notes that were read.
    """
    notes = read_beside("releases.yaml")["notes"]
    names = [None, *notes, None]  # padded, so that the first and last notes have neighbours too
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
    """Rules for the known issues in the notes of exactly this release."""
    return [Rule(**row) for row in issue_rules().values() if row["since"]["by"] == release]


@functools.lru_cache(maxsize=65536)
def _key_support(owner: str, name: str, version: Version) -> KeySupport:
    """Support of the key `name` of the class `owner` by the sources around a release."""
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
        return KeySupport((before,), True, True)
    sources = tuple(source for source in (before, after) if source is not None)
    return KeySupport(sources, len(sources) == 2, before is not None)


@functools.cache
def classes() -> dict[str, tuple[Reading, ...]]:
    """Readings of each class of the engine by name, oldest release first."""
    readings: dict[str, list[Reading]] = {}
    for snapshot in snapshots():
        release = Version(snapshot["release"])
        for owner, listed in snapshot["classes"].items():
            fields = listed["fields"]
            entries = {name: _entry(owner, name, facts) for name, facts in fields.items()}
            refuses = frozenset(listed.get("refuses", ()))
            unknown = frozenset(listed.get("unknown", ()))
            reading = Reading(release, listed["whole"], entries, refuses, unknown)
            readings.setdefault(owner, []).append(reading)
    return {owner: tuple(by_release) for owner, by_release in readings.items()}


@functools.cache
def snapshots() -> tuple[dict[str, Any], ...]:
    """Contents of every snapshot file, oldest release first."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in SNAPSHOTS.glob("*.json")]
    return tuple(sorted(files, key=lambda data: Version(data["release"])))


@functools.cache
def _names(owner: str) -> tuple[str, ...]:
    """Names of the keys that any reading of the class `owner` has, in the order of the readings."""
    names: dict[str, None] = {}
    for reading in classes().get(owner, ()):
        names |= dict.fromkeys(reading.entries)
    return tuple(names)


@functools.cache
def _variants(parent: str) -> tuple[str, ...]:
    """Discriminator values of the object at `parent` that have a class in any source."""
    return tuple(owner.partition(":")[2] for owner in classes() if owner.startswith(f"{parent}:"))


@functools.cache
def option_names() -> dict[str, str]:
    """Names of the options of trtllm-serve by flag, in any release."""
    names: dict[str, str] = {}
    for reading in classes()[OPTIONS]:
        for name, option in reading.entries.items():
            names |= dict.fromkeys(option.flags, name)  # type: ignore[union-attr]
    return names


def _entry(owner: str, name: str, facts: Mapping[str, Any]) -> Entry:
    """Makes the `Option` or `Field` of a class from the facts of a snapshot."""
    entry_class: Any = Option if owner == OPTIONS else Field
    parent = owner.partition(":")[0].removeprefix(OPTIONS)
    path = f"{parent}.{name}".lstrip(".")
    # tuples, because an entry must be hashable
    lists = {key: tuple(facts[key]) for key in ("allowed", "choices", "flags") if key in facts}
    entry: Entry = entry_class(path=path, **{**facts, **lists})
    return entry


def parse_version(text: str) -> Version:
    """Returns the release that a text names, also a release newer than all known ones.

    Raises UsageError with the nearest releases if the text is not a release, or is an older release
    that is not known.
    """
    known = releases()
    try:
        version = Version(text)
    except InvalidVersion:
        message = f"{text!r} is not a TensorRT-LLM version"
        remedy = f"write it as the package does, for example {default_release()}"
        raise UsageError(message, remedy) from None
    version = Version(version.public)  # without a local part such as +cu130
    is_line = len(version.release) < 3  # a line of releases, such as 1.3
    if is_line or (version not in known and version < known[-1]):
        above = bisect(known, version)  # index of the next newer known release
        nearest = known[max(above - 1, 0) : above + 1]
        listed = " or ".join(map(str, nearest))
        message = f"TensorRT-LLM {text} is not among the known releases, {known[0]} to {known[-1]}"
        remedy = f"use {listed}, the nearest, or `trtllm_version` {default_release()}"
        raise UsageError(message, remedy)
    return version


@functools.cache
def releases() -> tuple[Version, ...]:
    """Known releases, and source states that were read between releases, oldest first."""
    listed = [Version(text) for text in read_beside("releases.yaml")["releases"]]
    listed += [Version(data["release"]) for data in snapshots()]
    return tuple(sorted(set(listed)))


def default_release() -> str:
    """Release that files are written and judged for unless the user names another one."""
    default: str = read_beside("releases.yaml")["default"]
    return default


@functools.cache
def known_names(section: str) -> dict[str, dict[str, Any]]:
    """Entries of keys.yaml by name: `to` (a dotted path), `same_value` and `note`.

    `section`: "renamed" for names of other releases, "foreign" for names of vLLM and other tools.
        `same_value`: false if the value means something else at `to`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for path, row in read_beside("keys.yaml")[section].items():
        if not isinstance(row, dict):
            row = {"to": row}
        rows[path] = {"same_value": True, "note": "", **row}
    return rows


def renames() -> dict[str, dict[str, Any]]:
    """Keys with another name in another release: entries of keys.yaml by that name."""
    return known_names("renamed")


@functools.cache
def rule_files() -> dict[str, dict[str, Any]]:
    """Contents of the files of behaviours and rules by line of releases, oldest line first."""
    lines = sorted((path.stem for path in SCHEMAS.glob("*.yaml")), key=Version)
    return {line: load_yaml(SCHEMAS / f"{line}.yaml") for line in lines}


@functools.cache
def read_beside(name: str) -> Any:
    """Reads a YAML data file of the directory trtspec/trtllm."""
    return load_yaml(Path(__file__).with_name(name))
