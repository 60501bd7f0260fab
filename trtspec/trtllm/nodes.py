"""YAML as nodes with positions and the values that `yaml.safe_load` would give.

Size, depth and the number of values with aliases written out are limited on the parser's events,
before anything is built from them. Composing a deep file would overflow the C stack. A few aliases
of aliases expand beyond any memory.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import yaml

FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Characters. Shorter texts use the engine's own parser, which differs from the fast one in corners.
EXACT_UP_TO = 16_384
# Values of a file with every alias written out. An inline expert placement of 61 layers has 25,000.
MAX_VALUES = 30_000
MAX_LEVELS = 64
MAX_KEY = 1000  # characters of one key
MAX_DIGITS = 400  # characters of one number, more than any float has
MAX_SHOWN = 200  # characters of a message that quotes the file
BLOCK = ("|", ">")
STRING = "tag:yaml.org,2002:str"
MERGE = "tag:yaml.org,2002:merge"
VALUE = "tag:yaml.org,2002:value"
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
COLLECTIONS = {"mapping": "tag:yaml.org,2002:map", "sequence": "tag:yaml.org,2002:seq"}


class YamlError(Exception):
    """A text that is not YAML, or that exceeds a limit.

    Args:
        line: number of the line, from 1.
        column: number of the column, from 1.
        beyond: whether the text exceeds a limit.
    """

    def __init__(self, message: str, line: int, column: int = 1, beyond: bool = False) -> None:
        super().__init__(message)
        if len(message) > MAX_SHOWN:
            message = f"{message[:MAX_SHOWN]} ..."
        self.message = message
        self.line = line
        self.column = column
        self.beyond = beyond


@dataclass(slots=True)
class Node:
    """One value of a YAML text, with its position.

    Args:
        start: offset of the first character, in characters.
        end: offset after the last character.
        line: number of the line, from 0.
        column: number of the column, from 0.
        style: quote, `|` or `>` of a scalar, "flow" for a collection in brackets, else "".
        text: text of a scalar.
        items: nodes of a sequence, or (key, value) nodes of a mapping.
        alias: whether the value is written elsewhere. An alias has the items of the original.
        value: value as `yaml.safe_load` gives it.
        pairs: keys of a mapping with their values, merged ones included.
    """

    kind: Literal["scalar", "sequence", "mapping"]  # YAML's own word
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
    """One key of a mapping with its value.

    Args:
        key: key as `yaml.safe_load` gives it.
        merged: whether the key comes from another mapping, through `<<`.
    """

    key: Any
    key_node: Node
    value_node: Node
    merged: bool


def load_text(text: str) -> Any:
    """Value of a YAML text, None for an empty text. Raises YamlError if the text is not YAML."""
    root, _ = compose(text)
    return None if root is None else root.value


@functools.lru_cache(maxsize=1)  # one file is composed first as a carrier, again as an engine file
def compose(text: str) -> tuple[Node | None, list[tuple[int, int]]]:
    """Parses one YAML document. Returns its root node, and the offsets (start, end) of its scalars.

    The root is None for an empty text. In a scalar a `#` does not begin a comment. Raises YamlError
    if the text is not YAML or exceeds a limit.
    """
    loader = yaml.SafeLoader
    if len(text) > EXACT_UP_TO:
        loader = FAST_LOADER
    try:
        composed = _Composer(loader(text)).get_document()
    except (yaml.YAMLError, UnicodeError) as error:
        raise _syntax_error(text, error) from None
    reader = _Reader(text)
    root = None
    if composed is not None:
        root = reader.node(composed)
    return root, reader.scalars


def _syntax_error(text: str, error: Exception) -> YamlError:
    """The parser's error with its line and column in the text."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, int(error.position))
        return YamlError(str(error.reason), line + 1)
    reason = getattr(error, "problem", None) or str(error)
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return YamlError(reason, 1)
    last_line = text.count("\n")  # the mark of an unexpected end can be below it
    return YamlError(reason, min(mark.line, last_line) + 1, mark.column + 1)


class _Composer(yaml.composer.Composer):
    """Composes PyYAML's nodes within the limits.

    An alias becomes a copy of its value that has the positions of the alias. `count` is the number
    of values with aliases written out.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader
        self.level = 0
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        """Methods for events and tags, which the loader has."""
        return getattr(self.loader, name)

    def get_document(self) -> Any:
        """Root of the only document, as PyYAML's node. None for an empty text."""
        self.get_event()  # the stream begins
        if self.check_event(yaml.StreamEndEvent):
            return None
        root = self.compose_document()
        if not self.check_event(yaml.StreamEndEvent):
            second = self.get_event().start_mark
            message = "a second YAML document begins here, and the engine reads one"
            raise _error_at(second, message)
        return root

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Composes the node at the next event. Raises YamlError beyond a limit."""
        event = self.peek_event()
        before = self.count
        if isinstance(event, yaml.AliasEvent):
            original = super().compose_node(parent, index)
            node: Any = copy.copy(original)
            if not hasattr(node, "count"):  # the original is still being composed
                message = f"the alias {event.anchor!r} is inside its own value"
                raise _error_at(event.start_mark, message)
            self._add(event, node.count)
            node.start_mark = event.start_mark
            node.end_mark = event.end_mark
            node.alias = True
            return node
        if event.anchor in self.anchors:
            message = f"the anchor {event.anchor!r} is defined twice"
            raise _error_at(event.start_mark, message)
        if self.level == MAX_LEVELS and not isinstance(event, yaml.ScalarEvent):
            message = f"nested deeper than {MAX_LEVELS} levels"
            raise _error_at(event.start_mark, message, beyond=True)
        self._add(event, 1)
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        node.count = self.count - before
        return node

    def _add(self, event: Any, count: int) -> None:
        """Counts `count` more values.

        Raises YamlError at the event if the document has too many.
        """
        self.count += count
        if self.count > MAX_VALUES:
            message = f"more than {MAX_VALUES:,} values, with aliases written out"
            raise _error_at(event.start_mark, message, beyond=True)


class _Reader:
    """Makes each node of PyYAML a `Node` with its value.

    scalars: offsets (start, end) in which a `#` does not begin a comment.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.constructor = yaml.constructor.SafeConstructor()
        self.scalars: list[tuple[int, int]] = []

    def node(self, composed: Any, is_key: bool = False) -> Node:
        """Node with values for PyYAML's node `composed`, and for all nodes inside it."""
        first = composed.start_mark
        last = composed.end_mark
        is_alias = hasattr(composed, "alias")
        node = Node(
            composed.id, composed.tag, first.index, last.index, first.line, first.column,
            alias=is_alias,
        )  # fmt: skip
        if node.kind == "scalar":
            node.text = composed.value
            node.style = composed.style or ""
            node.value = node.text
            # the keys `<<` and `=` have no value of their own
            if not is_key or node.tag not in (MERGE, VALUE):
                node.value = self._value(node)
        elif node.tag != COLLECTIONS[node.kind]:
            type_name = node.tag.rpartition(":")[2]
            raise _error_at(node, f"a {node.kind} cannot have the type !!{type_name}")
        elif node.kind == "sequence":
            node.items = [self.node(item) for item in composed.value]
            node.value = [item.value for item in node.items]
        else:
            for key, value in composed.value:
                key_node = self.node(key, is_key=True)
                node.items.append((key_node, self.node(value)))
            node.pairs = _pairs(node)
            node.value = {pair.key_node.value: pair.value_node.value for pair in node.pairs}
        if node.kind != "scalar" and composed.flow_style:
            node.style = "flow"
        self._correct_end(node)
        return node

    def _correct_end(self, node: Node) -> None:
        """Corrects the end of a node in block style.

        Adds the offsets of a scalar or alias to `scalars`.
        """
        begin = node.start
        if node.alias:
            self.scalars.append((begin, node.end))
        elif node.kind == "scalar":
            if node.style in BLOCK:  # the line that opens it may end in a comment
                begin = self.text.find("\n", node.start, node.end) + 1 or node.end
                block = self.text[node.start : node.end]
                node.end = node.start + len(block.rstrip())
            self.scalars.append((begin, node.end))
        elif not node.style:  # the parser's own mark is at the next key, after comments
            last = node.items[-1]
            if node.kind == "mapping":
                _, last = last
            node.end = last.end

    def _value(self, node: Node) -> Any:
        """Value of a scalar by its tag. Raises YamlError if its text is not a value of the tag."""
        if any("\ud800" <= character <= "\udfff" for character in node.text):
            raise _error_at(node, "half a character (a lone surrogate), which no text can hold")
        if node.tag == STRING:
            return node.text
        if node.tag in NUMBERS and len(node.text) > MAX_DIGITS:
            message = f"a number of more than {MAX_DIGITS} characters"
            raise _error_at(node, message, beyond=True)
        try:
            plain = yaml.ScalarNode(node.tag, node.text)
            return self.constructor.construct_object(plain, deep=True)
        except yaml.YAMLError as error:
            reason = getattr(error, "problem", None) or str(error)
            raise _error_at(node, reason) from None
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            type_name = node.tag.rpartition(":")[2]
            message = f"{node.text[:40]!r} is not a value of the type !!{type_name}"
            raise _error_at(node, message) from None


def _pairs(node: Node) -> list[Pair]:
    """Keys of a mapping with their values.

    Merged keys come first, because the last equal key counts. An earlier mapping of `<<` has
    precedence over a later one.

    Raises YamlError for a key that is not a scalar or too long, and for an invalid `<<`.
    """
    merged: list[Pair] = []
    written: list[Pair] = []
    for key_node, value_node in node.items:
        if key_node.kind != "scalar":
            raise _error_at(key_node, "a key cannot be a list or a mapping")
        if len(key_node.text) > MAX_KEY:
            message = f"a key of more than {MAX_KEY} characters"
            raise _error_at(key_node, message, beyond=True)
        if key_node.tag != MERGE:
            written.append(Pair(key_node.value, key_node, value_node, False))
            continue
        sources = value_node.items
        if value_node.kind == "mapping":
            sources = [value_node]
        if value_node.kind == "scalar" or any(source.kind != "mapping" for source in sources):
            raise _error_at(value_node, "`<<` takes a mapping or a list of mappings")
        for source in reversed(sources):
            merged += [replace(pair, merged=True) for pair in source.pairs]
    return merged + written


def _error_at(mark: Any, message: str, beyond: bool = False) -> YamlError:
    """Error at the line and column of a mark or node."""
    return YamlError(message, mark.line + 1, mark.column + 1, beyond)
