"""An engine YAML as text with positions: values by dotted path, and edits that keep the rest.

Edits replace the text at the positions of its nodes, because a round-trip library would attach a
comment to the key before it and lose it with that key. Each edit also gives the value that the new
text must have, so that the caller can compare.
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
    """An edit whose key is missing or already there, or has a parent that is not a mapping."""


@dataclass(frozen=True)
class Entry:
    """One key of a document with its value.

    Args:
        path: dotted path of the key.
        keys: keys from the top level to this key, as YAML reads them.
        value: value as YAML reads it.
    """

    path: str
    keys: tuple[Any, ...]
    value: Any
    key_node: Node
    value_node: Node

    @property
    def line(self) -> int:
        """Number of the key's line, from 1."""
        return self.key_node.line + 1

    @property
    def name(self) -> str:
        """Text of the key, without its path."""
        return self.key_node.text

    @property
    def parent(self) -> str:
        """Path of the mapping that contains the key, "" for the top level."""
        return self.path[: -len(segment(self.key_node))].removesuffix(".")


@dataclass(frozen=True)
class Document:
    """A parsed file.

    Args:
        text: text of the file.
        value: value of the whole file. None if the text is not YAML.
        entries: keys by path. A mapping comes before the keys inside.
        duplicates: keys that come again later in the same mapping, with the value of the first.
        error: reason why the text is not YAML.
        name: name of the file for the user.
        root: node of the whole file. None for an empty text.
        scalars: offsets (start, end) in which a `#` does not begin a comment.
    """

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
        """Reads and parses a file. Text that is not YAML is a document with an `error`.

        Raises UsageError if the file cannot be read.
        """
        name = "<stdin>"
        if str(path) != "-":
            name = os.fsencode(path).decode("utf-8", "replace")
        return Document.parse(read_yaml_text(path), name)

    @staticmethod
    def parse(text: str, name: str = "") -> Document:
        """Parses a text. Text that is not YAML is a document with an `error`."""
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
        """Value of the whole file, or {} if the file is not a mapping."""
        return self.value if isinstance(self.value, dict) else {}

    def get(self, path: str, default: Any = None) -> Any:
        """Value of the key at a path, `default` if the file does not have the key."""
        entry = self.entries.get(path)
        return default if entry is None else entry.value

    def has(self, path: str) -> bool:
        """Whether the file has the key at a path, also with the value null."""
        return path in self.entries

    def placed(self, problem: Problem) -> Problem:
        """Returns a problem with the file's name and the line of its key, or of a key around it.

        A problem whose key is in the file also gets the column and width of the key or value.
        """
        entry = self.entries.get(problem.key)
        path = problem.key
        while path and path not in self.entries:
            path = path.rpartition(".")[0]
        line_of_key = self.entries[path].line if path else None
        line = problem.line or line_of_key
        problem = replace(problem, file=self.name, line=line)
        if problem.column is not None or entry is None or entry.line != line:
            return problem
        node = entry.key_node
        if problem.on_value and entry.value_node.line == node.line:
            node = entry.value_node
        # at least one column, so that an empty value is marked too
        width = max(node.end - node.start, 1)
        return replace(problem, column=node.column + 1, width=width)

    def converted(self, convert: Callable[[str, Any], Any]) -> Document:
        """Returns the same text with other values.

        `convert`: returns the new value for the path and the value of a key. Inner keys are
            converted first.
        """
        entries = dict(self.entries)
        for path in reversed(self.entries):  # parents come before their children
            entry = entries[path]
            value = entry.value
            pairs = entry.value_node.pairs
            if isinstance(value, dict) and pairs:
                # the keys inside are converted already, so that the mapping takes their new values
                paths = {pair.key: f"{path}.{segment(pair.key_node)}" for pair in pairs}
                value = {key: entries[paths[key]].value for key in value}
            entries[path] = replace(entry, value=convert(path, value))
        return replace(self, entries=entries)

    @cached_property
    def comments(self) -> tuple[tuple[int, int], ...]:
        """Offsets (start, end) of the comments."""
        comments = []
        at = 0  # offset up to which the text has been searched
        length = len(self.text)
        # a `#` between two scalars begins a comment, and the end of the text counts as a scalar
        for begin, end in [*self.scalars, (length, length)]:
            while at < begin:
                start = self.text.find("#", at, begin)
                if start < 0:
                    break
                at = _line_end(self.text, start)
                comments.append((start, at))
            at = max(at, end)
        return tuple(comments)

    def hides(self, paths: Iterable[str], about_keys: bool) -> bool:
        """Whether one of these keys, or a part of its value, is only known to a shell or template.

        `about_keys`: whether to look at the keys alone.
        """
        texts = [*paths]
        if not about_keys:
            nodes = [self.entries[path].value_node for path in paths if path in self.entries]
            texts += [self.text[node.start : node.end] for node in nodes]
        return any(map(HIDDEN.search, texts))

    @cached_property
    def comment_texts(self) -> Counter[str]:
        """Number of comments by text."""
        return Counter(self.text[start:end].strip() for start, end in self.comments)


def segment(key_node: Node) -> str:
    """Key as a segment of a dotted path. It is in quotes if it is empty or has a dot itself."""
    text = key_node.text if key_node.kind == "scalar" else "?"  # a list or mapping is an error
    if "." in text or not text:
        text = f'"{text}"'
    return text


def _collect(
    node: Node, prefix: str, keys: tuple[Any, ...],
    entries: dict[str, Entry], duplicates: list[Entry],
) -> None:  # fmt: skip
    """Adds every key below `node` to `entries`, and to `duplicates` if its path is already written.

    Args:
        prefix: path of the node with a dot at its end, "" for the top level.
        keys: keys that lead to the node, as YAML reads them.
    """
    written: set[str] = set()
    for pair in node.pairs:
        path = f"{prefix}{segment(pair.key_node)}"
        value_node = pair.value_node
        entry = Entry(path, (*keys, pair.key), value_node.value, pair.key_node, value_node)
        if path in written:
            duplicates.append(replace(entry, value=entries[path].value))
        if not pair.merged:  # because a key that replaces a merged one is not a duplicate
            written.add(path)
        if path in entries:
            _forget(entries[path].value_node, f"{path}.", entries)
        entries[path] = entry
        _collect(value_node, f"{path}.", entry.keys, entries, duplicates)


def _forget(node: Node, prefix: str, entries: dict[str, Entry]) -> None:
    """Removes the keys below `node`, the value that a later key of the same name replaces."""
    for pair in node.pairs:
        path = f"{prefix}{segment(pair.key_node)}"
        entries.pop(path, None)
        _forget(pair.value_node, f"{path}.", entries)


class YamlDumper(yaml.SafeDumper):
    """Writes every value in full, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Whether PyYAML writes a repeated value in full: always."""
        return True


def scalar(value: Any) -> str:
    """Any value as one line of YAML, without a line break."""
    text = yaml.dump(
        value, Dumper=YamlDumper, default_flow_style=True, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def same(left: Any, right: Any) -> bool:
    """Whether YAML writes both values the same. Types count: true is not 1, and NaN equals NaN."""
    return scalar(left) == scalar(right)


REMOVED = object()  # in place of a value: the key is removed


@dataclass(frozen=True)
class Edit:
    """A change of a document's text.

    Args:
        text: text of the edited file.
        value: value that the edited file must have.
        added: path of the key that the edit adds, None if it adds no key.
    """

    text: str
    value: Any
    added: str | None = None


def set_value(document: Document, path: str, value: Any) -> Edit:
    """Replaces the value of a key. Raises CannotEdit if the key is not in the file."""
    entry = _entry(document, path)
    text = _spliced(document.text, entry.value_node, scalar(value))
    return Edit(text, _changed(document, entry.keys, value))


def delete_key(document: Document, path: str) -> Edit:
    """Removes a key with its value. Its comments stay, each on a line of its own.

    Raises CannotEdit if the key is not in the file.
    """
    entry = _entry(document, path)
    owner = document.entries.get(entry.parent)
    mapping = owner.value_node if owner is not None else document.root
    assert mapping is not None  # it has this key
    expected = _changed(document, entry.keys, REMOVED)
    text = document.text
    begin = entry.key_node.start
    end = max(entry.value_node.end, entry.key_node.end + 1)  # an empty value ends after the colon
    if len(mapping.items) == 1 and owner is not None:  # a block mapping without keys would be null
        return Edit(_spliced(text, mapping, "{}"), expected)
    if mapping.style == "flow":
        later = [key.start for key, _ in mapping.items if key.start > begin]
        earlier = [value.end for key, value in mapping.items if key.start < begin]
        if later:
            return Edit(text[:begin] + text[later[0] :], expected)
        last_end = max(earlier, default=begin)
        return Edit(text[:last_end] + text[end:], expected)
    line_start = text.rfind("\n", 0, begin) + 1
    line_end = _line_end(text, end)
    indent = text[line_start:begin]
    newline = _newline(text)
    edited = text[:line_start]
    for comment_start, comment_end in document.comments:
        if begin <= comment_start < line_end:
            edited += f"{indent}{text[comment_start:comment_end]}{newline}"
    rest = text[line_end:].removeprefix("\r").removeprefix("\n")
    return Edit(edited + rest, expected)


def add_key(document: Document, path: str, value: Any) -> Edit:
    """Adds a key after the last key of its mapping, with every missing mapping around it.

    Raises CannotEdit if the file already has the path.
    """
    names = path.split(".")
    depth = len(names) - 1
    parent = ".".join(names[:depth])
    while depth and not document.has(parent):  # up to the innermost mapping that the file has
        depth -= 1
        parent = ".".join(names[:depth])
    owner = document.entries.get(parent)
    mapping = owner.value_node if owner is not None else document.root
    if document.has(path):
        raise CannotEdit(f"{path} is there")
    expected = _changed(document, names, value)
    for name in reversed(names[depth + 1 :]):
        value = {name: value}
    text = document.text
    newline = _newline(text)
    written = scalar({names[depth]: value})
    pair = written[1:-1]  # without the brackets of the mapping
    if mapping is None:
        return Edit(f"{text}{pair}{newline}", expected, path)
    if not mapping.items:
        return Edit(_spliced(text, mapping, written), expected, path)
    key_node, last = mapping.items[-1]
    end = max(last.end, key_node.end + 1)
    if mapping.style == "flow":
        return Edit(f"{text[:end]}, {pair}{text[end:]}", expected, path)
    end = _line_end(text, end)
    indent = " " * key_node.column
    return Edit(f"{text[:end]}{newline}{indent}{pair}{text[end:]}", expected, path)


def move_key(document: Document, path: str, to: str) -> Edit:
    """Moves a key with its value to the path `to`. In the same mapping it only renames the key.

    Raises CannotEdit if the key is not in the file, or if the file already has `to`.
    """
    entry = _entry(document, path)
    parent, _, name = to.rpartition(".")
    emptied = replace(document, value=_changed(document, entry.keys, REMOVED))
    expected = _changed(emptied, to.split("."), entry.value)
    if entry.parent != parent:
        without_key = Document.parse(delete_key(document, path).text)
        added = add_key(without_key, to, entry.value)
        return Edit(added.text, expected)
    return Edit(_spliced(document.text, entry.key_node, scalar(name)), expected)


def _entry(document: Document, path: str) -> Entry:
    """Entry at a path. Raises CannotEdit if the file does not have the path."""
    if not document.has(path):
        raise CannotEdit(f"{path} is not there")
    return document.entries[path]


def _changed(document: Document, keys: Iterable[Any], value: Any) -> Any:
    """Value of the whole document after one key is set to `value`, or removed for REMOVED.

    `keys`: keys from the top level. Raises CannotEdit if a value around the key is not a mapping.
    """
    *parents, last = keys
    changed = copy.deepcopy(document.mapping)
    mapping = changed
    for key in parents:
        if isinstance(mapping, dict):
            mapping = mapping.setdefault(key, {})
    if not isinstance(mapping, dict):  # such as null, which turns some objects off
        raise CannotEdit(f"the value around {last} is not a mapping")
    if value is REMOVED:
        del mapping[last]
    else:
        mapping[last] = value
    return changed


def _spliced(text: str, node: Node, written: str) -> str:
    """Text with `written` in place of a node, or after a key with an empty value."""
    gap = " " if node.start == node.end else ""
    return f"{text[: node.start]}{gap}{written}{text[node.end :]}"


def _line_end(text: str, offset: int) -> int:
    """Offset of the first line break at or after `offset`, or of the end of the text."""
    line = text[offset:].partition("\n")[0]
    return offset + len(line.removesuffix("\r"))


def _newline(text: str) -> str:
    """Line break that the text uses."""
    return "\r\n" if "\r\n" in text else "\n"
