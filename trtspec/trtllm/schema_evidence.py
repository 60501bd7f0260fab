"""What proofs from other machines say about the schemas: which entries they verify, narrow or refute, as a patch.

An observation is one release's own classes and options, as `schema_tools from-installed` wrote them. `since` says that
an entry was absent in one line or release and present in another; an observation at or beyond an end bears it out.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml
from packaging.version import Version

from trtspec.trtllm.schema import LINES, RELEASE, SCHEMAS, Entries, Since, line_of, merged
from trtspec.trtllm.schema_observed import PLACES, Observation, RequestObservation, Seen, line_data
from trtspec.trtllm.schema_tools import changes, flow

Weight = Literal["verified", "supported", "narrowed", "refuted"]
Part = Literal["fields", "removed", "options", "behaviours"]  # of a schema file
# what an engine's classes and command line tell for certain; others stand in validators, or are written by hand
TOLD = {
    "fields": ("type", "min", "max", "above", "below", "default"),
    "options": ("flags", "type", "choices", "default"),
}
CHANGES = ("allowed", "default", "min")  # attributes that became something else between two releases
WORDS = {
    "since": ("absent", "present"),
    "changed": ("as it was", "changed"),
}  # an entry before its interval and past it
REQUESTS = ("requests_refused", "requests_ignored", "penalties_need_a_key")  # behaviours that check's probes show
DOUBTFUL = ("inferred", "unknown")


@dataclass(frozen=True)
class SchemaFinding:
    """What the observations say about one entry of one part of a schema file; `replacement` is its new line ("" to
    remove it, None where nothing changes)."""

    line: str
    entry: str
    weight: Weight
    message: str
    replacement: str | None = None
    part: Part = "fields"


def weigh(seen: Sequence[Observation], asked: Sequence[RequestObservation] = ()) -> list[SchemaFinding]:
    """Findings on every dated entry whose evidence is inferred or unknown, on what releases do with requests, and on
    every attribute that a release shows to be otherwise. Refuted ones first."""
    found = [*_dated(seen), *_changed(seen), *_gone(seen), *_requests(asked)]
    for part in ("fields", "options"):
        found += [*_attributes(seen, part), *_unknown_keys(seen, part)]
    order = ("refuted", "narrowed", "verified", "supported")
    return sorted(found, key=lambda finding: (order.index(finding.weight), finding.line, finding.entry))


@functools.cache
def expected(version: str) -> Entries:
    """What the schemas say of exactly this version."""
    return merged({"inherits": line_of(version), "fields": {}}, Version(version))


def _dated(seen: Sequence[Observation]) -> Iterator[SchemaFinding]:
    for part in ("fields", "options"):
        for line in LINES:
            for path, entry in (line_data(line).get(part) or {}).items():
                since = entry.get("since")
                if since is None or since["evidence"] not in DOUBTFUL:
                    continue
                finding = _weigh_since(line, part, path, entry, seen)
                if finding is not None:
                    yield finding


def _weigh_since(
    line: str, part: Part, path: str, entry: dict[str, Any], seen: Sequence[Observation]
) -> SchemaFinding | None:
    looked: list[tuple[Seen, bool]] = []
    for one in seen:
        if not one.tells(part, path):
            continue  # the object itself is not there, or not read: that is its own finding
        where, present = _place(Since(**entry["since"]), one.version), path in one.told(part)
        if where == "past" and not present and path not in expected(one.version)[PLACES[part]]:
            continue  # a later line took it away again
        looked.append((one, present))
    return _begun(line, part, path, entry, looked)


def _changed(seen: Sequence[Observation]) -> Iterator[SchemaFinding]:
    """Fields that became what a line says between two releases: which of the two a release of the line, or of the one
    before, has."""
    for line, earlier in zip(LINES[1:], LINES, strict=False):
        near = [one for one in seen if LINES.index(line_of(one.version)) >= LINES.index(earlier)]
        for path, entry in (line_data(line).get("fields") or {}).items():
            if entry.get("changed", {}).get("evidence") not in DOUBTFUL:
                continue
            before, after = _field(earlier, path), _field(line, path)
            differ = [key for key in CHANGES if before.get(key) != after.get(key) and key in after]
            looked: list[tuple[Seen, bool]] = []
            for one in near:
                told = one.told("fields").get(path, {})
                known = {key for key in differ if key in told}
                is_was, is_now = (not known & set(changes(value, told)) for value in (before, after))
                if is_was != is_now:
                    looked.append((one, is_now))
                elif known and not is_now:
                    listed = ", ".join(f"{key} {told[key]!r}" for key in sorted(known))
                    message = f"{listed} in {one.version}, neither as before nor as after the change ({one.bundle})"
                    yield SchemaFinding(line, path, "refuted", message)
            finding = _begun(line, "fields", path, entry, looked, "changed")
            if finding is not None:
                yield finding


def _field(line: str, path: str) -> dict[str, Any]:
    """What a field is in the end in a line; {} where it is not there."""
    return merged({"inherits": line, "fields": {}})[0].get(path, {})


def _requests(asked: Sequence[RequestObservation]) -> Iterator[SchemaFinding]:
    for line in LINES:
        for name in REQUESTS:
            entry = (line_data(line).get("behaviours") or {}).get(name)
            if entry and entry.get("since", {}).get("evidence") in DOUBTFUL:
                shown = [(one, one.shows(line, name)) for one in asked]
                looked: list[tuple[Seen, bool]] = [(one, there) for one, there in shown if there is not None]
                finding = _begun(line, "behaviours", name, entry, looked)
                if finding is not None:
                    yield finding


def _begun(
    line: str, part: Part, path: str, entry: dict[str, Any], looked: Sequence[tuple[Seen, bool]], key: str = "since"
) -> SchemaFinding | None:
    """What releases say of the interval in which an entry began, or became what it is ("changed")."""
    since, ends, words = Since(**entry[key]), {"before": "", "past": ""}, WORDS[key]
    inside: list[tuple[Seen, bool]] = []
    for one, present in looked:
        where = _place(since, one.version)
        if where == "inside":
            inside.append((one, present))
            continue
        if present != (where == "past"):
            message = f"{words[present]} in {one.version}, where the schema has it {where} " \
                      f"{since.interval} ({one.bundle})"  # fmt: skip
            # what a release does, or changed, is not taken back with its line
            gone = where == "past" and part != "behaviours" and key == "since"
            return SchemaFinding(line, path, "refuted", message, "" if gone else None, part)
        ends[where] = f"{one.version} ({one.bundle})"
    if inside:
        present_in, absent_in = _sorted_versions(inside)
        if present_in and absent_in and Version(absent_in[-1]) > Version(present_in[0]):
            return _contradicted(SchemaFinding(line, path, "refuted", "", part=part), inside, words)
        moved = {"by": present_in[0]} if present_in else {}
        moved |= {"after": absent_in[-1]} if absent_in else {}
        changed = {**entry, key: {**entry[key], **moved}}
        return _narrowed(SchemaFinding(line, path, "narrowed", since.interval, part=part), changed, inside, words)
    changed = {**entry, key: {**entry[key], "evidence": "verified"}}
    return _borne_out(SchemaFinding(line, path, "supported", "", part=part), changed, ends, words)


def _gone(seen: Sequence[Observation]) -> Iterator[SchemaFinding]:
    """Removed keys: present up to `last`, absent from `by` on, or from the line that says so."""
    for line in LINES:
        for path, entry in (line_data(line).get("removed") or {}).items():
            if entry["evidence"] in DOUBTFUL and _is_end(entry["last"]):
                finding = _weigh_removed(line, path, entry, seen)
                if finding is not None:
                    yield finding


def _is_end(text: str) -> bool:
    return text in LINES or RELEASE.match(text) is not None


def _weigh_removed(line: str, path: str, entry: dict[str, Any], seen: Sequence[Observation]) -> SchemaFinding | None:
    dates, ends = Since(entry.get("by", line), entry["evidence"], entry["last"]), {"before": "", "past": ""}
    inside: list[tuple[Seen, bool]] = []
    for one in seen:
        where, present = _place(dates, one.version), path in one.told("removed")
        known = path in expected(one.version)[0]
        if not one.tells("removed", path) or where == "past" and known or where == "before" and not known:
            continue  # not read, there again in a later line, or not there yet
        if where == "inside":
            inside.append((one, present))
            continue
        if present != (where == "before"):
            message = f"{'present' if present else 'absent'} in {one.version}, where the schema has it removed " \
                      f"{dates.interval} ({one.bundle})"  # fmt: skip
            return SchemaFinding(line, path, "refuted", message, "" if where == "past" else None, "removed")
        ends[where] = f"{one.version} ({one.bundle})"
    if inside:
        present_in, absent_in = _sorted_versions(inside)
        if present_in and absent_in and Version(present_in[-1]) > Version(absent_in[0]):
            return _contradicted(SchemaFinding(line, path, "refuted", "", part="removed"), inside, WORDS["since"])
        moved = {"last": present_in[-1]} if present_in else {}
        moved |= {"by": absent_in[0]} if absent_in else {}
        finding = SchemaFinding(line, path, "narrowed", dates.interval, part="removed")
        return _narrowed(finding, {**entry, **moved}, inside, WORDS["since"])
    changed = {**entry, "evidence": "verified"}
    words = WORDS["since"][::-1]
    return _borne_out(SchemaFinding(line, path, "supported", "", part="removed"), changed, ends, words)


def _sorted_versions(inside: Sequence[tuple[Seen, bool]]) -> tuple[list[str], list[str]]:
    """Releases that have the entry, and those that have not, oldest first."""
    found = [sorted((one.version for one, there in inside if there == has), key=Version) for has in (True, False)]
    return found[0], found[1]


def _narrowed(
    finding: SchemaFinding, changed: dict[str, Any], inside: Sequence[tuple[Seen, bool]], words: tuple[str, str]
) -> SchemaFinding:
    """Releases between the two ends of an interval (the finding's message) move them."""
    message = f"{_said(inside, words)}, inside {finding.message} ({inside[0][0].bundle})"
    return replace(finding, message=message, replacement=f"  {finding.entry}: {flow(changed)}")


def _contradicted(finding: SchemaFinding, inside: Sequence[tuple[Seen, bool]], words: tuple[str, str]) -> SchemaFinding:
    """Releases that have the entry, and have it not, in an order that no interval has: it came and went, or a bundle is
    wrong."""
    bundles = ", ".join(sorted({one.bundle for one, _ in inside}))
    return replace(finding, message=f"{_said(inside, words)}, which no interval has ({bundles})")


def _said(inside: Sequence[tuple[Seen, bool]], words: tuple[str, str]) -> str:
    present, absent = _sorted_versions(inside)
    there, not_there = words[True], words[False]
    return ", ".join([f"{there} in {one}" for one in present] + [f"{not_there} in {one}" for one in absent])


def _borne_out(
    finding: SchemaFinding, changed: dict[str, Any], ends: dict[str, str], words: tuple[str, str]
) -> SchemaFinding | None:
    """Verified where releases before and past the interval were seen, supported by one of them, else nothing."""
    known = [f"{word} in {ends[end]}" for end, word in zip(("before", "past"), words, strict=True) if ends[end]]
    if len(known) == 2:
        line = f"  {finding.entry}: {flow(changed)}"
        return replace(finding, weight="verified", message=", ".join(known), replacement=line)
    return replace(finding, message=known[0]) if known else None


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


def _attributes(seen: Sequence[Observation], part: Part) -> Iterator[SchemaFinding]:
    """Types, limits and defaults that a release has other than the schema says for it."""
    for one in seen:
        known = expected(one.version)[PLACES[part]]
        for path, entry in one.told(part).items():
            was = known.get(path)
            if was is None:
                continue
            differ = {key: value for key, value in changes(was, entry).items() if key in TOLD[part] and key in entry}
            differ = {key: value for key, value in differ.items() if key != "default" or "default" in was}
            if entry.get("open"):  # an object whose keys the classes do not tell; the schema may know more
                differ.pop("type", None)
            if differ:
                listed = ", ".join(f"{key} {was.get(key)!r} is {value!r}" for key, value in differ.items())
                owner = _owner(line_of(one.version), part, path)
                new = {**(line_data(owner).get(part) or {}).get(path, {}), **differ} if owner else {}
                replacement = f"  {path}: {flow(new)}" if owner else None
                message = f"{listed} in {one.version} ({one.bundle})"
                yield SchemaFinding(owner or line_of(one.version), path, "refuted", message, replacement, part)


def _unknown_keys(seen: Sequence[Observation], part: Part) -> Iterator[SchemaFinding]:
    """Keys and options that a release has and the schema of its line does not know."""
    for one in seen:
        line = line_of(one.version)
        known, removed = expected(one.version)[PLACES[part]], expected(one.version)[1] if part == "fields" else {}
        dated = {path for name in LINES for path in (line_data(name).get(part) or {})}
        for path, entry in one.told(part).items():
            if path in known or path in dated and path not in removed:
                continue  # the latter is judged with its interval
            if path in removed and removed[path]["evidence"] in DOUBTFUL and _is_end(removed[path]["last"]):
                continue  # judged with its interval too
            new = {**entry, "since": {"by": line, "evidence": "verified", "source": f"seen in {one.version}"}}
            message = f"present in {one.version}, unknown to the schema ({one.bundle})"
            yield SchemaFinding(line, path, "refuted", message, f"  {path}: {flow(new)}", part)


def _owner(line: str, part: Part, path: str) -> str | None:
    """The file of the line, or the nearest that it inherits, which has the entry."""
    name: str | None = line
    while name is not None:
        data = line_data(name)
        if path in (data.get(part) or {}):
            return name
        name = data.get("inherits")
    return None


def doubtful() -> dict[str, int]:
    """How many statements of the schema files are inferred or unknown, by what becomes of them here: those that are
    compared with releases (`weighed`), and those that classes and options do not show."""
    found = {"weighed": 0, "behaviours": 0, "removed, without a release": 0}
    for line in LINES:
        data = line_data(line)
        dated = [entry.get("since") for part in PLACES for entry in (data.get(part) or {}).values()]
        removed = [entry for entry in (data.get("removed") or {}).values() if entry["evidence"] in DOUBTFUL]
        ends = sum(_is_end(entry["last"]) for entry in removed)
        found["weighed"] += _count_doubtful(dated) + ends
        found["removed, without a release"] += len(removed) - ends
        told = data.get("behaviours") or {}
        requests = _count_doubtful([(told.get(name) or {}).get("since") for name in REQUESTS])
        found["behaviours"] += _count_doubtful(told) - requests
        found["weighed"] += requests
        found["weighed"] += _count_doubtful([entry.get("changed") for entry in (data.get("fields") or {}).values()])
    return found


def _count_doubtful(value: Any) -> int:
    """Objects of a data file, at any depth, whose `evidence` is inferred or unknown."""
    if isinstance(value, dict):
        return (value.get("evidence") in DOUBTFUL) + sum(map(_count_doubtful, value.values()))
    return sum(map(_count_doubtful, value)) if isinstance(value, list) else 0


def patch(findings: Sequence[SchemaFinding]) -> str:
    """A unified diff of the schema files, for review; "" where nothing changes."""
    parts = []
    for line in LINES:
        before = (SCHEMAS / f"{line}.yaml").read_text(encoding="utf-8").splitlines()
        after = list(before)
        for finding in _together([one for one in findings if one.line == line and one.replacement is not None]):
            _apply(after, finding)
        name = f"trtspec/trtllm/schemas/{line}.yaml"
        made = list(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="", n=1))
        parts += [f"{row}\n" for row in made]
    return "".join(parts)


def _together(findings: Sequence[SchemaFinding]) -> list[SchemaFinding]:
    """One finding for each entry of a line, with what all of them change; a removal wins."""
    found: dict[tuple[str, str], SchemaFinding] = {}
    for finding in findings:
        key, made = (finding.part, finding.entry), finding.replacement or ""
        earlier = found.get(key)
        if earlier is not None and made and earlier.replacement:
            was = (line_data(finding.line).get(finding.part) or {}).get(finding.entry, {})
            parts = [yaml.safe_load(text)[finding.entry] for text in (earlier.replacement, made)]
            changed = [{name: value for name, value in part.items() if was.get(name) != value} for part in parts]
            made = f"  {finding.entry}: {flow(was | changed[0] | changed[1])}"
        elif earlier is not None:
            made = ""
        found[key] = replace(finding, replacement=made)
    return list(found.values())


def _apply(lines: list[str], finding: SchemaFinding) -> None:
    """Replaces, removes or adds the line of an entry in its part of the file, which begins there if it was not."""
    if not any(row.startswith(f"{finding.part}:") for row in lines):
        lines.append(f"{finding.part}:")
    begin = next(n for n, row in enumerate(lines) if row.startswith(f"{finding.part}:"))
    end = next((n for n in range(begin + 1, len(lines)) if re.match(r"\S", lines[n])), len(lines))
    found = next((n for n in range(begin + 1, end) if lines[n].startswith(f"  {finding.entry}:")), None)
    new = [finding.replacement] if finding.replacement else []
    if found is None:
        lines[end:end] = new
    else:
        lines[found : found + 1] = new
