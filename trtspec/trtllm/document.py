"""An engine YAML as text with positions: values by dotted path, their line numbers, and edits that keep the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Entry:
    """One key: where it stands, its value, and the nodes of both (0-based marks)."""

    path: str
    value: Any
    key_node: yaml.Node
    value_node: yaml.Node

    @property
    def line(self) -> int:
        return self.key_node.start_mark.line + 1

    @property
    def name(self) -> str:
        return str(self.key_node.value)


@dataclass(frozen=True)
class Document:
    """A parsed file. `value` is None when the text is not YAML; `error` then says why."""

    text: str
    value: Any = None
    entries: dict[str, Entry] = field(default_factory=dict)
    duplicates: tuple[Entry, ...] = ()
    error: str = ""
    error_line: int = 1

    @staticmethod
    def parse(text: str) -> Document:
        loader = LOADER(text)
        try:
            node = loader.get_single_node()
            value = loader.construct_document(node) if node is not None else None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            reason = getattr(error, "problem", None) or str(error)
            return Document(text, error=reason, error_line=min(mark.line, text.count("\n")) + 1 if mark else 1)
        finally:
            loader.dispose()
        entries: dict[str, Entry] = {}
        duplicates: list[Entry] = []
        _collect(node, value, "", entries, duplicates)
        return Document(text, value, entries, tuple(duplicates))

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


def _collect(
    node: yaml.Node | None, value: Any, prefix: str, entries: dict[str, Entry], duplicates: list[Entry]
) -> None:
    if not isinstance(node, yaml.MappingNode) or not isinstance(value, dict):
        return
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue
        path = f"{prefix}{key_node.value}"
        child = next((v for k, v in value.items() if _same_key(k, key_node.value)), None)
        entry = Entry(path, child, key_node, value_node)
        if path in entries:
            duplicates.append(entry)
        entries[path] = entry
        _collect(value_node, child, f"{path}.", entries, duplicates)


def _same_key(key: Any, text: str) -> bool:
    """YAML 1.1 reads some keys as other types; compare what was written."""
    return key == text or (not isinstance(key, str) and yaml.safe_load(text) == key)


def scalar(value: Any) -> str:
    """One value as it is written on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def rename_key(document: Document, path: str, name: str) -> str:
    node = document.entries[path].key_node
    return _splice(document.text, node.start_mark, node.end_mark, name)


def set_value(document: Document, path: str, value: Any) -> str:
    node = document.entries[path].value_node
    return _splice(document.text, node.start_mark, node.end_mark, scalar(value))


def delete_key(document: Document, path: str) -> str:
    """Drops the key with all its lines (block style), or its pair (flow style)."""
    entry = document.entries[path]
    lines = document.text.splitlines(keepends=True)
    first, last = entry.key_node.start_mark, entry.value_node.end_mark
    if lines[first.line][: first.column].strip():
        return _delete_pair(document.text, first, last)
    end = last.line if last.column == 0 and last.line > first.line else last.line + 1
    return "".join(lines[: first.line] + lines[end:])


def add_key(document: Document, path: str, value: Any) -> str:
    """Adds `path` below its parent; a parent that is not there is written at the end of the file."""
    parent, _, name = path.rpartition(".")
    line = f"{name}: {scalar(value)}"
    if not parent:
        return document.text.rstrip("\n") + f"\n{line}\n"
    entry = document.entries.get(parent)
    if entry is None or not isinstance(entry.value_node, yaml.MappingNode) or not entry.value_node.value:
        text = delete_key(document, parent) if entry else document.text
        return text.rstrip("\n") + f"\n{parent}:\n  {line}\n"
    first_key, _ = entry.value_node.value[0]
    if entry.value_node.flow_style:
        return _insert(document.text, first_key.start_mark, f"{line}, ")
    return _insert(document.text, first_key.start_mark, f"{line}\n{' ' * first_key.start_mark.column}")


def _delete_pair(text: str, first: yaml.Mark, last: yaml.Mark) -> str:
    begin, end = _offset(text, first), _offset(text, last)
    while end < len(text) and text[end] in " ":
        end += 1
    if end < len(text) and text[end] == ",":
        return text[:begin] + text[end + 1 :].lstrip(" ")
    return text[:begin].rstrip(" ,") + text[end:]


def _splice(text: str, first: yaml.Mark, last: yaml.Mark, new: str) -> str:
    return text[: _offset(text, first)] + new + text[_offset(text, last) :]


def _insert(text: str, mark: yaml.Mark, new: str) -> str:
    at = _offset(text, mark)
    return text[:at] + new + text[at:]


def _offset(text: str, mark: yaml.Mark) -> int:
    """Character offset of a mark (the C parser's own index counts bytes)."""
    lines = text.splitlines(keepends=True)
    return sum(len(line) for line in lines[: mark.line]) + mark.column
