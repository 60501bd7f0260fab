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

from trtspec.errors import Problem
from trtspec.files import read_yaml_text
from trtspec.trtllm.nodes import Node, YamlError, compose
from trtspec.trtllm.shell import MASK

HIDDEN = re.compile(MASK)


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
    """A parsed file. `value` is None when the text is not YAML, and `error` says why. `name` is how the user calls the
    file."""

    text: str
    value: Any = None
    entries: dict[str, Entry] = field(default_factory=dict)
    duplicates: tuple[Entry, ...] = ()
    error: YamlError | None = None
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
            return Document(text, error=error, name=name)
        document = Document(text, name=name, root=root, scalars=tuple(scalars))
        if root is None:
            return document
        duplicates: list[Entry] = []
        _collect(root, "", (), document.entries, duplicates)
        return replace(document, value=root.value, duplicates=tuple(duplicates))

    @property
    def mapping(self) -> dict[Any, Any]:
        """The value; empty for a file that is not a mapping."""
        return self.value if isinstance(self.value, dict) else {}

    def get(self, path: str, default: Any = None) -> Any:
        entry = self.entries.get(path)
        return default if entry is None else entry.value

    def has(self, path: str) -> bool:
        return path in self.entries

    def placed(self, problem: Problem) -> Problem:
        """At the line of its key, or of the nearest parent that is there; with the column of its key or value."""
        entry, path = self.entries.get(problem.key), problem.key
        while path and path not in self.entries:
            path = path.rpartition(".")[0]
        line = problem.line or (self.entries[path].line if path else None)
        problem = replace(problem, file=self.name, line=line)
        if problem.column is not None or entry is None or entry.line != line:
            return problem
        node = entry.key_node
        if problem.on_value and entry.value_node.line == node.line:
            node = entry.value_node
        return replace(problem, column=node.column + 1, width=max(node.end - node.start, 1))

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


class YamlDumper(yaml.SafeDumper):
    """Writes a value that comes twice out twice, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def scalar(value: Any) -> str:
    """One value as it is written on one line of YAML."""
    text = yaml.dump(
        value, Dumper=YamlDumper, default_flow_style=True, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def same(one: Any, other: Any) -> bool:
    """Equal in types too, as YAML writes them: true is not 1, and NaN is NaN."""
    return scalar(one) == scalar(other)


# --- edits

REMOVED = object()


@dataclass(frozen=True)
class Edit:
    """`text` is the edited file and `value` what it must mean: whoever applies it parses the text and compares.
    `added` is the path of a new key."""

    text: str
    value: Any
    added: str | None = None


def set_value(document: Document, path: str, value: Any) -> Edit:
    entry = _entry(document, path)
    text = _spliced(document.text, entry.value_node, scalar(value))
    return Edit(text, _changed(document, entry.keys, value))


def delete_key(document: Document, path: str) -> Edit:
    """Takes the key out with its value. Comments stay where they are, on lines of their own."""
    entry = _entry(document, path)
    owner = document.entries.get(entry.parent)
    mapping = owner.value_node if owner is not None else document.root
    assert mapping is not None  # it has this key
    meaning = _changed(document, entry.keys, REMOVED)
    text, begin = document.text, entry.key_node.start
    end = max(entry.value_node.end, entry.key_node.end + 1)
    if len(mapping.items) == 1 and owner is not None:  # a block mapping without keys would be null
        return Edit(_spliced(text, mapping, "{}"), meaning)
    if mapping.style == "flow":
        later = [key.start for key, _ in mapping.items if key.start > begin]
        earlier = [value.end for key, value in mapping.items if key.start < begin]
        if later:
            return Edit(text[:begin] + text[later[0] :], meaning)
        return Edit(text[: max(earlier, default=begin)] + text[end:], meaning)
    first, last = text.rfind("\n", 0, begin) + 1, _line_end(text, end)
    kept = [text[first:begin] + text[a:b] for a, b in document.comments if begin <= a < last]
    behind = text[last:].removeprefix("\r").removeprefix("\n")
    return Edit(
        text[:first] + "".join(f"{line}{_newline(text)}" for line in kept) + behind, meaning
    )


def add_key(document: Document, path: str, value: Any) -> Edit:
    """Adds `path` behind the last key of the mapping it belongs to, with every parent that is not there."""
    names = path.split(".")
    depth = len(names) - 1
    while depth and not document.has(".".join(names[:depth])):
        depth -= 1
    owner = document.entries.get(".".join(names[:depth]))
    mapping = owner.value_node if owner is not None else document.root
    if document.has(path):
        raise CannotEdit(f"{path} is there")
    meaning = _changed(document, names, value)
    for name in reversed(names[depth + 1 :]):
        value = {name: value}
    written, text, newline = scalar({names[depth]: value}), document.text, _newline(document.text)
    pair = written[1:-1]
    if mapping is None:
        return Edit(f"{text}{pair}{newline}", meaning, path)
    if not mapping.items:
        return Edit(_spliced(text, mapping, written), meaning, path)
    key_node, last = mapping.items[-1]
    end = max(last.end, key_node.end + 1)
    if mapping.style == "flow":
        return Edit(f"{text[:end]}, {pair}{text[end:]}", meaning, path)
    end = _line_end(text, end)
    return Edit(f"{text[:end]}{newline}{' ' * key_node.column}{pair}{text[end:]}", meaning, path)


def move_key(document: Document, path: str, to: str) -> Edit:
    """Renames in place where the parent stays, else takes the key out and adds it where it belongs."""
    entry = _entry(document, path)
    parent, _, name = to.rpartition(".")
    emptied = replace(document, value=_changed(document, entry.keys, REMOVED))
    meaning = _changed(emptied, to.split("."), entry.value)
    if entry.parent != parent:
        added = add_key(Document.parse(delete_key(document, path).text), to, entry.value)
        return Edit(added.text, meaning)
    return Edit(_spliced(document.text, entry.key_node, scalar(name)), meaning)


def _entry(document: Document, path: str) -> Entry:
    if not document.has(path):
        raise CannotEdit(f"{path} is not there")
    return document.entries[path]


def _changed(document: Document, keys: Iterable[Any], value: Any) -> Any:
    """What the document means with one value set or REMOVED."""
    *parents, last = keys
    meaning = copy.deepcopy(document.mapping)
    mapping = meaning
    for key in parents:
        if isinstance(mapping, dict):
            mapping = mapping.setdefault(key, {})
    if not isinstance(mapping, dict):  # null turns some of them off
        raise CannotEdit(f"what holds {last} is no mapping")
    if value is REMOVED:
        del mapping[last]
    else:
        mapping[last] = value
    return meaning


def _spliced(text: str, node: Node, written: str) -> str:
    """The text with `written` in place of a node; of an empty one, behind its key."""
    gap = " " * (node.start == node.end)
    return f"{text[: node.start]}{gap}{written}{text[node.end :]}"


def _line_end(text: str, offset: int) -> int:
    """Offset of the line break behind `offset`, or of the end of the text."""
    line = text[offset:].partition("\n")[0]
    return offset + len(line.removesuffix("\r"))


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
