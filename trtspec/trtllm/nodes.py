"""YAML as nodes with positions and the values that `yaml.safe_load` would give.

Size, depth and the number of values with aliases written out are bounded on the parser's events, before anything is
built from them. Composing a deep file overflows the C stack; a few aliases of aliases expand beyond any memory.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import yaml

FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The engine's own parser, which differs from the C one in corners; above this length the C one is used, for its speed.
EXACT_UP_TO = 16_384
MOST_VALUES = (
    30_000  # with every alias written out; an inline expert placement of 61 layers has 25,000
)
MOST_LEVELS = 64
MOST_KEY = 1000  # characters of one key
MOST_DIGITS = 400  # of one number; more than any float has
MOST_SHOWN = 200  # characters of a message that quotes the file
BLOCK = ("|", ">")
STRING, MERGE, VALUE = (f"tag:yaml.org,2002:{name}" for name in ("str", "merge", "value"))
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
COLLECTIONS = {"mapping": "tag:yaml.org,2002:map", "sequence": "tag:yaml.org,2002:seq"}


class YamlError(Exception):
    """Text that is not YAML or is beyond the limits (`beyond`); `line` and `column` count from 1."""

    def __init__(self, message: str, line: int, column: int = 1, beyond: bool = False) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MOST_SHOWN else f"{message[:MOST_SHOWN]} ..."
        self.line, self.column, self.beyond = line, column, beyond


@dataclass(slots=True)
class Node:
    """One value of the text. `start` and `end` are offsets of characters, `line` and `column` count from 0.

    `items` are the nodes of a sequence or the (key, value) nodes of a mapping; `text` is what a scalar says. `style` is
    the quote or the `|` or `>` of a scalar, "flow" for a collection in brackets, else empty. An `alias` is a
    value that is written elsewhere, and has its items. `value` is what `yaml.safe_load` gives.
    """

    kind: Literal["scalar", "sequence", "mapping"]
    tag: str
    start: int
    end: int
    line: int
    column: int
    style: str = ""
    text: str = ""
    items: list[Any] = field(default_factory=list)
    alias: bool = False
    value: Any = None
    pairs: list[Pair] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pair:
    """One key of a mapping as it counts; `merged` ones come from another mapping, through `<<`."""

    key: Any
    key_node: Node
    value_node: Node
    merged: bool


def load_text(text: str) -> Any:
    """The value of a YAML text. Raises YamlError."""
    root, _ = compose(text)
    return None if root is None else root.value


@functools.lru_cache(maxsize=1)  # a file is composed to see what it carries, and as itself
def compose(text: str) -> tuple[Node | None, list[tuple[int, int]]]:
    """The root of one YAML document, each node with its value as `yaml.safe_load` gives it, and the offsets (start,
    end) in which a `#` begins no comment. None for an empty text. Raises YamlError."""
    try:
        composer = _Composer((yaml.SafeLoader if len(text) <= EXACT_UP_TO else FAST_LOADER)(text))
        made = composer.get_document()
    except (yaml.YAMLError, UnicodeError) as error:
        raise _syntax(text, error) from None
    reader = _Reader(text)
    return (None if made is None else reader.node(made)), reader.scalars


def _syntax(text: str, error: Exception) -> YamlError:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, int(error.position))
        return YamlError(str(error.reason), line + 1)
    reason, mark = (
        getattr(error, "problem", None) or str(error),
        getattr(error, "problem_mark", None),
    )
    if mark is None:
        return YamlError(reason, 1)
    return YamlError(reason, min(mark.line, text.count("\n")) + 1, mark.column + 1)


class _Composer(yaml.composer.Composer):
    """PyYAML's nodes, within the limits. An alias is a copy of its value, at the alias's place."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader, self.level, self.count = loader, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # events and tags

    def get_document(self) -> Any:
        self.get_event()  # the stream begins
        root = None if self.check_event(yaml.StreamEndEvent) else self.compose_document()
        if not self.check_event(yaml.StreamEndEvent):
            raise _wrong(
                self.get_event().start_mark,
                "a second YAML document begins here, and the engine reads one",
            )
        return root

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, before = self.peek_event(), self.count
        if isinstance(event, yaml.AliasEvent):
            node: Any = copy.copy(super().compose_node(parent, index))
            if not hasattr(node, "count"):
                raise _wrong(
                    event.start_mark, f"the alias {event.anchor!r} is inside its own value"
                )
            self._add(event, node.count)
            node.start_mark, node.end_mark, node.alias = event.start_mark, event.end_mark, True
            return node
        if event.anchor in self.anchors:
            raise _wrong(event.start_mark, f"the anchor {event.anchor!r} is defined twice")
        if self.level == MOST_LEVELS and not isinstance(event, yaml.ScalarEvent):
            raise _wrong(event.start_mark, f"nested deeper than {MOST_LEVELS} levels", beyond=True)
        self._add(event, 1)
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        node.count = self.count - before
        return node

    def _add(self, event: Any, count: int) -> None:
        """Counts the values that the whole has with its aliases written out."""
        self.count += count
        if self.count > MOST_VALUES:
            raise _wrong(
                event.start_mark,
                f"more than {MOST_VALUES:,} values, with aliases written out",
                beyond=True,
            )


class _Reader:
    """PyYAML's nodes as `Node`s with their values. `scalars` are the offsets in which a `#` begins no comment."""

    def __init__(self, text: str) -> None:
        self.text, self.constructor = text, yaml.constructor.SafeConstructor()
        self.scalars: list[tuple[int, int]] = []

    def node(self, made: Any, is_key: bool = False) -> Node:
        first, last = made.start_mark, made.end_mark
        node = Node(
            made.id,
            made.tag,
            first.index,
            last.index,
            first.line,
            first.column,
            alias=hasattr(made, "alias"),
        )
        if node.kind == "scalar":
            node.text, node.style = made.value, made.style or ""
            node.value = made.value if is_key and made.tag in (MERGE, VALUE) else self._value(node)
        elif node.tag != COLLECTIONS[node.kind]:
            raise _wrong(
                node, f"a {node.kind} cannot have the type !!{node.tag.rpartition(':')[2]}"
            )
        elif node.kind == "sequence":
            node.items = [self.node(item) for item in made.value]
            node.value = [item.value for item in node.items]
        else:
            node.items = [
                (self.node(key, is_key=True), self.node(value)) for key, value in made.value
            ]
            node.pairs = _pairs(node)
            node.value = {pair.key_node.value: pair.value_node.value for pair in node.pairs}
        self._place(node, "flow" if node.kind != "scalar" and made.flow_style else node.style)
        return node

    def _place(self, node: Node, style: str) -> None:
        begin, node.style = node.start, style
        if node.alias:
            self.scalars.append((node.start, node.end))
        elif node.kind == "scalar":
            if style in BLOCK:  # the line that opens it may end in a comment
                begin = self.text.find("\n", node.start, node.end) + 1 or node.end
                node.end = node.start + len(self.text[node.start : node.end].rstrip())
            self.scalars.append((begin, node.end))
        elif not style:  # the parser's own mark is at the next key, behind comments
            last = node.items[-1]
            node.end = last.end if node.kind == "sequence" else last[1].end

    def _value(self, node: Node) -> Any:
        if any("\ud800" <= character <= "\udfff" for character in node.text):
            raise _wrong(node, "half a character (a lone surrogate), which no text can hold")
        if node.tag == STRING:
            return node.text
        if node.tag in NUMBERS and len(node.text) > MOST_DIGITS:
            raise _wrong(node, f"a number of more than {MOST_DIGITS} characters", beyond=True)
        try:
            return self.constructor.construct_object(
                yaml.ScalarNode(node.tag, node.text), deep=True
            )
        except yaml.YAMLError as error:
            raise _wrong(node, getattr(error, "problem", None) or str(error)) from None
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            kind = node.tag.rpartition(":")[2]
            raise _wrong(node, f"{node.text[:40]!r} is not a value of the type !!{kind}") from None


def _pairs(node: Node) -> list[Pair]:
    """Merged pairs first: of equal keys the last one counts, and those of an earlier mapping before a later one's."""
    merged: list[Pair] = []
    own: list[Pair] = []
    for key_node, value_node in node.items:
        if key_node.kind != "scalar":
            raise _wrong(key_node, "a key cannot be a list or a mapping")
        if len(key_node.text) > MOST_KEY:
            raise _wrong(key_node, f"a key of more than {MOST_KEY} characters", beyond=True)
        if key_node.tag != MERGE:
            own.append(Pair(key_node.value, key_node, value_node, False))
            continue
        sources = [value_node] if value_node.kind == "mapping" else value_node.items
        if value_node.kind == "scalar" or any(source.kind != "mapping" for source in sources):
            raise _wrong(value_node, "`<<` takes a mapping or a list of mappings")
        for source in reversed(sources):
            merged += [replace(pair, merged=True) for pair in source.pairs]
    return merged + own


def _wrong(place: Any, message: str, beyond: bool = False) -> YamlError:
    """`place` has a line and a column."""
    return YamlError(message, place.line + 1, place.column + 1, beyond)
