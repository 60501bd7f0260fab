"""What proofs from other machines say about the schemas: which entries they verify, narrow or refute, as a patch.

An observation is one release's own classes and options, as `schema_tools from-installed` wrote them. `since` says that
an entry was absent in one line or release and present in another; an observation at or beyond an end bears it out.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from packaging.version import Version

from trtspec.errors import UsageError
from trtspec.trtllm.schema import LINES, RELEASE, SCHEMAS, Entries, Since, line_of, merged
from trtspec.trtllm.schema_tools import changes, flow

Weight = Literal["verified", "supported", "narrowed", "refuted"]
# what an engine's classes tell for certain; other attributes stand in validators, or are written by hand
TOLD = ("type", "min", "max", "above", "below", "default")


@dataclass(frozen=True)
class Observation:
    """One release as it is: `version`, its entries, and the bundle that shows it."""

    version: str
    entries: Entries
    bundle: str

    @property
    def fields(self) -> dict[str, dict[str, Any]]:
        return self.entries[0]


@dataclass(frozen=True)
class SchemaFinding:
    """What the observations say about one entry of one schema file; `replacement` is its new line ("" to remove it,
    None where nothing changes)."""

    line: str
    entry: str
    weight: Weight
    message: str
    replacement: str | None = None


def observation(text: str, bundle: str) -> Observation:
    """Raises UsageError for a text that is no schema file."""
    try:
        data = yaml.safe_load(text)
        return Observation(str(data["versions"]["seen"]), merged(data), bundle)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the schema of {bundle} is not one: {error}", "ask for the bundle again") from None


def weigh(seen: Sequence[Observation]) -> list[SchemaFinding]:
    """Findings on every dated entry whose evidence is inferred or unknown, and on every attribute that a release shows
    to be otherwise. Refuted ones first."""
    found = [*_dated(seen), *_attributes(seen), *_unknown_keys(seen)]
    order = ("refuted", "narrowed", "verified", "supported")
    return sorted(found, key=lambda finding: (order.index(finding.weight), finding.line, finding.entry))


@functools.cache
def expected(version: str) -> Entries:
    """What the schemas say of exactly this version."""
    return merged({"inherits": line_of(version), "fields": {}}, Version(version))


@functools.cache
def _raw(line: str) -> dict[str, Any]:
    return yaml.safe_load((SCHEMAS / f"{line}.yaml").read_text(encoding="utf-8"))


def _dated(seen: Sequence[Observation]) -> Iterator[SchemaFinding]:
    for line in LINES:
        for path, entry in (_raw(line).get("fields") or {}).items():
            since = entry.get("since")
            if since is None or since["evidence"] == "verified":
                continue
            finding = _weigh_since(line, path, entry, seen)
            if finding is not None:
                yield finding


def _weigh_since(line: str, path: str, entry: dict[str, Any], seen: Sequence[Observation]) -> SchemaFinding | None:
    since, ends = Since(**entry["since"]), {"before": "", "past": ""}
    inside: list[tuple[Observation, bool]] = []
    parent = path.rpartition(".")[0]
    for one in seen:
        where, present = _place(since, one.version), path in one.fields
        if parent and parent not in one.fields:
            continue  # the object itself is not there, or not read: that is its own finding
        if where == "past" and not present and path not in expected(one.version)[0]:
            continue  # a later line took it away again
        if where == "inside":
            inside.append((one, present))
            continue
        if present != (where == "past"):
            message = f"{'present' if present else 'absent'} in {one.version}, where the schema has it {where} " \
                      f"{since.interval} ({one.bundle})"  # fmt: skip
            return SchemaFinding(line, path, "refuted", message, "" if where == "past" else None)
        ends[where] = f"{one.version} ({one.bundle})"
    if inside:
        return _narrowed(line, path, entry, inside)
    if all(ends.values()):
        changed = {**entry, "since": {**entry["since"], "evidence": "verified"}}
        message = f"absent in {ends['before']}, present in {ends['past']}"
        return SchemaFinding(line, path, "verified", message, f"  {path}: {flow(changed)}")
    known = [f"{word} in {ends[end]}" for end, word in (("before", "absent"), ("past", "present")) if ends[end]]
    return SchemaFinding(line, path, "supported", known[0]) if known else None


def _narrowed(line: str, path: str, entry: dict[str, Any], inside: list[tuple[Observation, bool]]) -> SchemaFinding:
    """Releases between the two ends move them: the first that has the entry, the last that has not."""
    present = [one.version for one, there in inside if there]
    absent = [one.version for one, there in inside if not there]
    ends = {"by": min(present, key=Version)} if present else {}
    ends |= {"after": max(absent, key=Version)} if absent else {}
    changed = {**entry, "since": {**entry["since"], **ends}}
    said = [f"present in {version}" for version in present] + [f"absent in {version}" for version in absent]
    message = f"{', '.join(said)}, inside {Since(**entry['since']).interval} ({inside[0][0].bundle})"
    return SchemaFinding(line, path, "narrowed", message, f"  {path}: {flow(changed)}")


def _place(since: Since, version: str) -> str:
    """before, inside or past the interval, whether its ends are lines or releases."""
    own = LINES.index(line_of(version))
    after, by = since.after, since.by
    if by in LINES and own >= LINES.index(by) or (RELEASE.match(by) and Version(version) >= Version(by)):
        return "past"
    if after is not None and after in LINES and own <= LINES.index(after):
        return "before"
    if after is not None and RELEASE.match(after) and Version(version) <= Version(after):
        return "before"
    return "inside"


def _attributes(seen: Sequence[Observation]) -> Iterator[SchemaFinding]:
    """Types, limits and defaults that a release has other than the schema says for it."""
    for one in seen:
        known = expected(one.version)[0]
        for path, entry in one.fields.items():
            was = known.get(path)
            if was is None:
                continue
            differ = {key: value for key, value in changes(was, entry).items() if key in TOLD and key in entry}
            differ = {key: value for key, value in differ.items() if key != "default" or "default" in was}
            if entry.get("open"):  # an object whose keys the classes do not tell; the schema may know more
                differ.pop("type", None)
            if differ:
                listed = ", ".join(f"{key} {was.get(key)!r} is {value!r}" for key, value in differ.items())
                owner = _owner(line_of(one.version), path)
                new = {**(_raw(owner).get("fields") or {}).get(path, {}), **differ} if owner else {}
                replacement = f"  {path}: {flow(new)}" if owner else None
                message = f"{listed} in {one.version} ({one.bundle})"
                yield SchemaFinding(owner or line_of(one.version), path, "refuted", message, replacement)


def _unknown_keys(seen: Sequence[Observation]) -> Iterator[SchemaFinding]:
    """Keys that a release has and the schema of its line does not know."""
    for one in seen:
        line = line_of(one.version)
        known, removed, _, _ = expected(one.version)
        dated = {path for name in LINES for path in (_raw(name).get("fields") or {})}
        for path, entry in one.fields.items():
            if path in known or path in dated and path not in removed:
                continue  # the latter is judged with its interval
            new = {**entry, "since": {"by": line, "evidence": "verified", "source": f"seen in {one.version}"}}
            message = f"present in {one.version}, unknown to the schema ({one.bundle})"
            yield SchemaFinding(line, path, "refuted", message, f"  {path}: {flow(new)}")


def _owner(line: str, path: str) -> str | None:
    """The file of the line, or the nearest that it inherits, which has the entry."""
    name: str | None = line
    while name is not None:
        data = _raw(name)
        if path in (data.get("fields") or {}):
            return name
        name = data.get("inherits")
    return None


def patch(findings: Sequence[SchemaFinding]) -> str:
    """A unified diff of the schema files, for review; "" where nothing changes."""
    parts = []
    for line in LINES:
        before = (SCHEMAS / f"{line}.yaml").read_text(encoding="utf-8").splitlines()
        after = list(before)
        for finding in findings:
            if finding.line == line and finding.replacement is not None:
                _apply(after, finding)
        name = f"trtspec/trtllm/schemas/{line}.yaml"
        made = list(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="", n=1))
        parts += [f"{row}\n" for row in made]
    return "".join(parts)


def _apply(lines: list[str], finding: SchemaFinding) -> None:
    """Replaces, removes or adds the line of an entry under `fields:`."""
    begin = next(n for n, row in enumerate(lines) if row.startswith("fields:"))
    end = next((n for n in range(begin + 1, len(lines)) if re.match(r"\S", lines[n])), len(lines))
    found = next((n for n in range(begin + 1, end) if lines[n].startswith(f"  {finding.entry}:")), None)
    new = [finding.replacement] if finding.replacement else []
    if found is None:
        lines[end:end] = new
    else:
        lines[found : found + 1] = new
