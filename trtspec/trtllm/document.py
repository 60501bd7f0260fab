"""An engine YAML as text with positions: values by dotted path, and edits that keep everything else.

Edits splice the text at the positions of its nodes. A round-trip library would hang a comment on the key before it and
lose it with that key; here each edit also says what the new text must mean, so that whoever applies it can compare.
"""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from trtspec.files import read_yaml_text
from trtspec.trtllm.nodes import BLOCK, Node, YamlError, compose
from trtspec.trtllm.shell import MASK

HIDDEN = re.compile(MASK)
INDENT = "  "


class CannotEdit(Exception):
    """The text is written in a way in which this edit cannot be made without touching something else."""


@dataclass(frozen=True)
class Entry:
    """One key that counts: its path, the keys that lead to it as YAML reads them, its value and the nodes of both."""

    path: str
    keys: tuple[Any, ...]
    value: Any
    key_node: Node
    value_node: Node

    @property
    def line(self) -> int:
        return self.key_node.line + 1

    @property
    def name(self) -> str:
        return self.key_node.text

    @property
    def parent(self) -> str:
        """Path of the mapping that contains it."""
        return self.path[: -len(segment(self.key_node))].removesuffix(".")


@dataclass(frozen=True)
class Document:
    """A parsed file. `value` is None when the text is not YAML; `error` then says why, at `error_line` and
    `error_column`, and `beyond_limits` whether it is too deep or too large rather than wrong. `name` is how the user
    calls the file."""

    text: str
    value: Any = None
    entries: dict[str, Entry] = field(default_factory=dict)
    duplicates: tuple[Entry, ...] = ()
    error: str = ""
    error_line: int = 1
    error_column: int = 1
    beyond_limits: bool = False
    name: str = ""
    root: Node | None = None
    scalars: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def read(path: str | Path) -> Document:
        """Raises UsageError for a file that cannot be read; text that is not YAML is a document with an `error`."""
        name = "<stdin>" if str(path) == "-" else os.fsencode(path).decode("utf-8", "replace")
        return Document.parse(read_yaml_text(path), name)

    @staticmethod
    def parse(text: str, name: str = "") -> Document:
        try:
            root, scalars = compose(text)
        except YamlError as error:
            return Document(
                text, error=error.message, error_line=error.line, error_column=error.column,
                beyond_limits=error.beyond, name=name,
            )  # fmt: skip
        entries: dict[str, Entry] = {}
        duplicates: list[Entry] = []
        if root is None:
            return Document(text, None, name=name, scalars=tuple(scalars))
        _collect(root, "", (), entries, duplicates)
        return Document(
            text,
            root.value,
            entries,
            tuple(duplicates),
            name=name,
            root=root,
            scalars=tuple(scalars),
        )

    def get(self, path: str, default: Any = None) -> Any:
        entry = self.entries.get(path)
        return default if entry is None else entry.value

    def has(self, path: str) -> bool:
        return path in self.entries

    def line(self, path: str) -> int | None:
        """Line of the key, or of the nearest parent that is there."""
        while path:
            if path in self.entries:
                return self.entries[path].line
            path = path.rpartition(".")[0]
        return None

    def converted(self, convert: Callable[[str, Any], Any]) -> Document:
        """The same text with other values: `convert` gets the path and the value of each key, inner ones first."""
        entries = dict(self.entries)
        for path in reversed(self.entries):  # parents come before their children
            entry = entries[path]
            value = entry.value
            if isinstance(value, dict) and entry.value_node.pairs:
                inner = {
                    pair.key: f"{path}.{segment(pair.key_node)}" for pair in entry.value_node.pairs
                }
                value = {key: entries[inner[key]].value for key in value}
            entries[path] = replace(entry, value=convert(path, value))
        return replace(self, entries=entries)

    @cached_property
    def comments(self) -> tuple[tuple[int, int], ...]:
        """Where comments begin and end."""
        found, at = [], 0
        for begin, end in [*self.scalars, (len(self.text), len(self.text))]:
            while at < begin and (start := self.text.find("#", at, begin)) >= 0:
                at = _line_end(self.text, start)
                found.append((start, at))
            at = max(at, end)
        return tuple(found)

    def hides(self, paths: Iterable[str], about_keys: bool) -> bool:
        """Whether only a shell or a template knows one of these keys or, unless it is `about_keys`, a part of its
        value."""
        nodes = [self.entries[path].value_node for path in paths if path in self.entries]
        values = [] if about_keys else [self.text[node.start : node.end] for node in nodes]
        return any(HIDDEN.search(text) for text in (*paths, *values))

    @cached_property
    def comment_texts(self) -> Counter[str]:
        return Counter(self.text[start:end].strip() for start, end in self.comments)


def segment(key_node: Node) -> str:
    """A key as a part of a path: in quotes where it has a dot itself."""
    text = key_node.text if key_node.kind == "scalar" else "?"
    return f'"{text}"' if "." in text or not text else text


def _collect(
    node: Node,
    prefix: str,
    keys: tuple[Any, ...],
    entries: dict[str, Entry],
    duplicates: list[Entry],
) -> None:
    own: set[str] = set()
    for pair in node.pairs:
        path = f"{prefix}{segment(pair.key_node)}"
        entry = Entry(
            path, (*keys, pair.key), pair.value_node.value, pair.key_node, pair.value_node
        )
        if path in own:
            duplicates.append(replace(entry, value=entries[path].value))
        if not pair.merged:
            own.add(path)
        if path in entries:
            _forget(entries[path].value_node, f"{path}.", entries)
        entries[path] = entry
        _collect(pair.value_node, f"{path}.", entry.keys, entries, duplicates)


def _forget(node: Node, prefix: str, entries: dict[str, Entry]) -> None:
    """Takes out what a value held that a later key of the same name replaces."""
    for pair in node.pairs:
        path = f"{prefix}{segment(pair.key_node)}"
        entries.pop(path, None)
        _forget(pair.value_node, f"{path}.", entries)


def scalar(value: Any) -> str:
    """One value as it is written on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def same(one: Any, other: Any) -> bool:
    """Equal in types too: YAML's true is not 1, and NaN is NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(item, other[key]) for key, item in one.items()
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


# --- edits


@dataclass(frozen=True)
class Edit:
    """`text` is the edited file and `value` what it must mean; `added` is a path that nothing stood in for before."""

    text: str
    value: Any
    added: str | None = None


def rename_key(document: Document, path: str, name: str) -> Edit:
    entry = _own_entry(document, path)
    *parents, last = entry.keys
    value = copy.deepcopy(document.value)
    place = _inside(value, parents)
    renamed = {name if key == last else key: item for key, item in place.items()}
    if name in place:
        raise CannotEdit(f"{name} is there already")
    place.clear()
    place.update(renamed)
    text = (
        document.text[: entry.key_node.start] + scalar(name) + document.text[entry.key_node.end :]
    )
    return Edit(text, value)


def set_value(document: Document, path: str, value: Any) -> Edit:
    entry = _own_entry(document, path)
    meaning = copy.deepcopy(document.value)
    _inside(meaning, entry.keys[:-1])[entry.keys[-1]] = value
    return Edit(_with_value(document, entry, scalar(value)), meaning)


def delete_key(document: Document, path: str) -> Edit:
    """Takes the key out with its value. Comments stay where they are, on lines of their own."""
    entry = _own_entry(document, path)
    meaning = copy.deepcopy(document.value)
    parent = _inside(meaning, entry.keys[:-1])
    del parent[entry.keys[-1]]
    if not parent and len(entry.keys) > 1:  # a block mapping without keys would be null
        owner = document.entries[entry.parent]
        if not _is_flow(document, entry):
            return Edit(_with_value(document, owner, "{}"), meaning)
    return Edit(_without(document, entry), meaning)


def add_key(document: Document, path: str, value: Any, comment: str = "") -> Edit:
    """Adds `path`, with every parent that is not there, behind the last key of the mapping it belongs to."""
    if document.has(path):
        raise CannotEdit(f"{path} is there already")
    names = path.split(".")
    depth = next(
        n for n in range(len(names) - 1, -1, -1) if n == 0 or document.has(".".join(names[:n]))
    )
    nested: Any = value
    for name in reversed(names[depth + 1 :]):
        nested = {name: nested}
    meaning = copy.deepcopy(document.value) if document.value is not None else {}
    if depth == 0:
        if not isinstance(meaning, dict):
            raise CannotEdit("the file is not a mapping")
        meaning[names[0]] = nested
        return Edit(_with_pair(document, document.root, names, value, comment), meaning, path)
    owner = _own_entry(document, ".".join(names[:depth]))
    place, last = _inside(meaning, owner.keys[:-1]), owner.keys[-1]
    if not isinstance(owner.value, dict):  # null turns some of them off
        raise CannotEdit(f"{owner.path} is not a mapping")
    place[last] = {**owner.value, names[depth]: nested}
    if not owner.value:
        return Edit(
            _with_value(document, owner, scalar({names[depth]: nested}), comment), meaning, path
        )
    return Edit(
        _with_pair(document, owner.value_node, names[depth:], value, comment), meaning, path
    )


def move_key(document: Document, path: str, to: str) -> Edit:
    """Renames in place where the parent stays, else takes the key out and adds it with its comment where it belongs."""
    entry = _own_entry(document, path)
    if entry.parent == to.rpartition(".")[0]:
        return rename_key(document, path, to.rpartition(".")[2])
    along, cut = "", document
    behind = [place for place in document.comments if place[0] >= entry.value_node.end]
    line_end = _line_end(document.text, entry.value_node.end)
    if behind and behind[0][0] < line_end and not _is_flow(document, entry):
        start, end = behind[0]
        along = document.text[start:end]
        cut = Document.parse(document.text[:start].rstrip(" \t") + document.text[end:])
    taken = delete_key(cut, path)
    between = Document.parse(taken.text)
    if not same(between.value or {}, taken.value):
        raise CannotEdit(f"{path} cannot be taken out")
    edit = add_key(between, to, entry.value, along)
    return Edit(edit.text, edit.value)


def _own_entry(document: Document, path: str) -> Entry:
    """The entry, when its text belongs to it alone."""
    entry = document.entries.get(path)
    if entry is None:
        raise CannotEdit(f"{path} is not there")
    key, value = entry.key_node, entry.value_node
    if key.alias or value.start < key.end:
        raise CannotEdit(f"{path} is written elsewhere")
    return entry


def _inside(value: Any, keys: Any) -> Any:
    for key in keys:
        value = value[key]
    return value


def _is_flow(document: Document, entry: Entry) -> bool:
    """Whether the pair is in brackets."""
    parent = document.entries.get(entry.parent)
    node = parent.value_node if parent else document.root
    return node is not None and node.style == "flow"


def _with_value(document: Document, entry: Entry, written: str, comment: str = "") -> str:
    """The text with another value behind the key; comments inside the old one are kept below it."""
    text, key, old = document.text, entry.key_node, entry.value_node
    colon = text.find(":", key.end, max(old.start, key.end) + 1)
    if colon < 0:
        raise CannotEdit(f"{entry.path} has no value")
    inside = [text[a:b] for a, b in document.comments if colon < a < old.end]
    begin = (
        old.start
        if text[colon + 1 : old.start].strip(" \t") == "" and old.end > colon + 1
        else colon + 1
    )
    gap = "" if begin > colon + 1 else " "
    if not inside and old.style not in BLOCK:
        return f"{text[:begin]}{gap}{written}{f'  {comment}' if comment else ''}{text[max(old.end, colon + 1) :]}"
    if _is_flow(document, entry):
        raise CannotEdit(f"there are comments inside {entry.path}")
    end = _line_end(text, old.end)
    trailing = text[old.end : end].strip()
    newline, margin = _newline(text), " " * key.column
    below = [*inside, *([trailing] if trailing else []), *([comment] if comment else [])]
    lines = [f"{text[: colon + 1]} {written}", *(f"{margin}{line.strip()}" for line in below)]
    return newline.join(lines) + text[end:]


def _without(document: Document, entry: Entry) -> str:
    text, begin, end = (
        document.text,
        entry.key_node.start,
        max(entry.value_node.end, entry.key_node.end + 1),
    )
    if _is_flow(document, entry):
        return _without_pair(text, begin, end)
    first = text.rfind("\n", 0, begin) + 1
    last = _line_end(text, end)
    comments = [(a, b) for a, b in document.comments if begin <= a < last]
    behind = next((a for a, _ in comments if a >= end), last)
    if text[first:begin].strip() or text[end:behind].strip():
        raise CannotEdit(f"{entry.path} shares its line")
    margin = text[first:begin]
    kept = [f"{margin}{text[a:b].strip()}{_newline(text)}" for a, b in comments]
    return text[:first] + "".join(kept) + text[_next_line(text, last) :]


def _without_pair(text: str, begin: int, end: int) -> str:
    behind = len(text) - len(text[end:].lstrip())
    if text[behind : behind + 1] == ",":
        end = behind + 1
        while text[end : end + 1] == " ":
            end += 1
        return text[:begin] + text[end:]
    before = text[:begin].rstrip()
    return (before[:-1] if before.endswith(",") else text[:begin]) + text[end:]


def _with_pair(
    document: Document, node: Node | None, names: list[str], value: Any, comment: str
) -> str:
    """The text with `names`, nested, behind the last key of a mapping; None is an empty file."""
    text, newline = document.text, _newline(document.text)
    if node is None or not node.items:
        if node is not None:
            raise CannotEdit("an empty mapping at the top level")
        begun = text if not text or text.endswith("\n") else text + newline
        return begun + newline.join(_nested(names, value, comment, "")) + newline
    if node.alias or node.kind != "mapping":
        raise CannotEdit("written elsewhere")
    key_node, last = node.items[0][0], node.items[-1][1]
    end = max(last.end, node.items[-1][0].end + 1)
    if node.style == "flow":
        if comment:
            raise CannotEdit("a comment would be inside brackets")
        nested = value
        for name in reversed(names[1:]):
            nested = {name: nested}
        return f"{text[:end]}, {names[0]}: {scalar(nested)}{text[end:]}"
    at = _line_end(text, end)
    lines = _nested(names, value, comment, " " * key_node.column)
    return text[:at] + newline + newline.join(lines) + newline + text[_next_line(text, at) :]


def _nested(names: list[str], value: Any, comment: str, margin: str) -> list[str]:
    lines = [f"{margin}{INDENT * depth}{name}:" for depth, name in enumerate(names)]
    lines[-1] += f" {scalar(value)}" + (f"  {comment}" if comment else "")
    return lines


def _line_end(text: str, at: int) -> int:
    """Offset of the line break behind `at`, or of the end of the text."""
    found = text.find("\n", at)
    if found < 0:
        return len(text)
    return found - 1 if found > at and text[found - 1] == "\r" else found


def _next_line(text: str, line_end: int) -> int:
    return line_end + 2 if text.startswith("\r\n", line_end) else min(line_end + 1, len(text))


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
