"""Files that somebody else wrote: read within bounds, and never waited for.

Whatever is at a path (nothing, a directory, a pipe, a loop of links, a failing disk, gigabytes), opening it ends in
bytes or in one error that names the file and the reason.

YAML is read as nodes with positions and the values that `yaml.safe_load` would give. Size, depth and the number of
values with aliases written out are bounded on the parser's events, before anything is built from them. Composing a deep
file overflows the C stack, and a few aliases of aliases expand to more values than any memory holds.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import yaml

from trtspec.errors import TrtspecError, UsageError

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_JSON = 256 * 2**20  # bytes; the index of a large model has about 20 MB
KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
CODE = "TS-ERROR-FILE"


@contextmanager
def open_regular(path: str | Path, remedy: str = "") -> Iterator[BinaryIO]:
    """A regular file, open for reading. Raises FileNotFoundError where there is none, UsageError for anything else and
    for a disk that fails while it is read."""
    with _opened(path, remedy) as stream:
        try:
            yield stream
        except OSError as error:
            raise unreadable(path, error.strerror or str(error), remedy or "check the disk that it lies on") from None


def _opened(path: str | Path, remedy: str) -> BinaryIO:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(path, getattr(error, "strerror", None) or str(error), remedy) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        what = next((name for holds, name in KINDS if holds(mode)), "a device")
        raise unreadable(path, f"it is {what}, not a regular file", remedy)
    return os.fdopen(handle, "rb")


def read_bytes(path: str | Path, most: int = MOST_JSON, remedy: str = "") -> bytes:
    """At most `most` bytes; a larger file is an error."""
    with open_regular(path, remedy) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise unreadable(path, f"it has {size} bytes, more than {most}", remedy)
        data = stream.read(most + 1)  # /proc and growing files say another size
    if len(data) > most:
        raise unreadable(path, f"it has more than {most} bytes", remedy)
    return data


def read_text(path: str | Path, most: int = MOST_JSON, remedy: str = "") -> str:
    """UTF-8 text, without a byte order mark."""
    return decoded(read_bytes(path, most, remedy), path, remedy)


def decoded(data: bytes, path: str | Path, remedy: str = "") -> str:
    """Bytes of `path` as UTF-8 text."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise unreadable(path, f"line {line} is not UTF-8 text", remedy) from None


def read_object(path: str | Path, most: int = MOST_JSON, remedy: str = "", unique: bool = False) -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError where there is none, TrtspecError for anything else, with
    `unique` also for a key that occurs twice."""
    try:
        value = parse_json(read_text(path, most, remedy), unique)
    except ValueError as error:
        raise TrtspecError(f"{path} is not valid JSON: {error}", remedy, CODE) from None
    if not isinstance(value, dict):
        raise TrtspecError(f"{path} holds {type(value).__name__}, not a JSON object", remedy, CODE)
    return value


def first_fault(error: ValidationError) -> str:
    """What pydantic finds wrong first, without the value: `field.of.field: why`."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def parse_json(text: str | bytes, unique: bool = False) -> Any:
    """The value of a JSON text. Raises ValueError for all that is none: too deep, numbers of thousands of digits, or
    strings that are no text (lone surrogates), which nothing could print; with `unique` also for a key that an object
    has twice, of which json would drop the first."""
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    escape = b"\\ud" if isinstance(text, bytes) else "\\ud"
    if escape in text.lower():  # type: ignore[operator]
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a string holds half a character (a lone surrogate)") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        unseen = set(found)
        twice = next(key for key, _ in pairs if key not in unseen or unseen.remove(key))  # type: ignore[func-returns-value]
        raise DoubledKey(f"an object has the key {twice[:60]!r} twice")
    return found


class DoubledKey(ValueError):
    """A JSON object has a key twice."""


def unreadable(path: str | Path, reason: str, remedy: str = "") -> UsageError:
    return UsageError(f"{path} cannot be read: {reason}", remedy or "pass a regular file", CODE)


FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The engine's own parser, which differs from the C one in corners; above this length the C one is used, for its speed.
EXACT_UP_TO = 16_384
MOST_BYTES = 2**20  # an engine file has a few thousand
MOST_VALUES = 30_000  # with every alias written out; an inline expert placement of 61 layers has 25,000
MOST_LEVELS = 64
MOST_KEY = 1000  # characters of one key
MOST_DIGITS = 400  # of one number; more than any float has
MOST_SHOWN = 200  # characters of a message that quotes the file
STDIN = "-"
BLOCK = ("|", ">")
STRING, MAPPING, SEQUENCE, MERGE, VALUE = (
    f"tag:yaml.org,2002:{name}" for name in ("str", "map", "seq", "merge", "value")
)
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
REMEDY = "pass a YAML file, or `-` for standard input"


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


def read_yaml_text(path: str | Path, remedy: str = REMEDY) -> str:
    """The text of a regular file, or of standard input for `-`. Raises UsageError for what cannot be read as UTF-8
    text of at most MOST_BYTES; never waits for a pipe or a device."""
    if str(path) != STDIN:
        try:
            return read_text(path, MOST_BYTES, remedy)
        except FileNotFoundError:
            raise unreadable(path, "there is no such file", remedy) from None
    if sys.stdin is None:
        raise unreadable(STDIN, "standard input is closed", remedy)
    data = sys.stdin.buffer.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise unreadable(path, f"it is larger than {MOST_BYTES // 2**20} MiB", remedy)
    return decoded(data, path, remedy)


def load_text(text: str) -> Any:
    """The value of a YAML text. Raises YamlError."""
    root, _ = compose(text)
    return None if root is None else root.value


def load_file(path: str | Path) -> Any:
    """The value of a YAML file. Raises UsageError for a file that cannot be read or is not YAML."""
    text = read_yaml_text(path)
    try:
        return load_text(text)
    except YamlError as error:
        message = f"{path}:{error.line} is not valid YAML: {error.message}"
        raise UsageError(message, "correct that line", "TS-ERROR-YAML") from None


def compose(text: str) -> tuple[Node | None, list[tuple[int, int]]]:
    """The root of one YAML document, each node with its value as `yaml.safe_load` gives it, and the offsets (start,
    end) in which a `#` begins no comment. None for an empty text. Raises YamlError."""
    try:
        loader = (yaml.SafeLoader if len(text) <= EXACT_UP_TO else FAST_LOADER)(text)
    except (yaml.YAMLError, UnicodeError) as error:
        raise _syntax(text, error) from None
    try:
        composer = _Composer(text, loader)
        if (root := composer.compose()) is not None:
            _construct(root, yaml.constructor.SafeConstructor())
        return root, composer.scalars
    except yaml.YAMLError as error:
        raise _syntax(text, error) from None
    finally:
        loader.dispose()


def _syntax(text: str, error: Exception) -> YamlError:
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.reader.ReaderError) and isinstance(error.position, int):
        before = text.encode("utf-8", "replace")[: error.position].decode("utf-8", "replace")
        lines = before.split("\n")
        return YamlError(str(error.reason), len(lines), len(lines[-1]) + 1)
    reason = getattr(error, "problem", None) or str(error)
    if mark is None:
        return YamlError(reason, 1)
    return YamlError(reason, min(mark.line, text.count("\n")) + 1, mark.column + 1)


class _Composer:
    """Nodes from events, with the count of values that the whole would have without aliases."""

    def __init__(self, text: str, loader: Any) -> None:
        self.text, self.loader = text, loader
        self.anchors: dict[str, tuple[Node, int] | None] = {}  # with its count; None: the value has not ended
        self.count = 0
        self.scalars: list[tuple[int, int]] = []

    def compose(self) -> Node | None:
        self.loader.get_event()  # the stream begins
        if self.loader.check_event(yaml.StreamEndEvent):
            return None
        self.loader.get_event()  # the document begins
        root = self._node(0)
        self.loader.get_event()
        if not self.loader.check_event(yaml.StreamEndEvent):
            second = self.loader.get_event()
            raise self._error(second, "a second YAML document begins here, and the engine reads one")
        return root

    def _error(self, event: Any, message: str, beyond: bool = False) -> YamlError:
        return YamlError(message, event.start_mark.line + 1, event.start_mark.column + 1, beyond)

    def _node(self, level: int) -> Node:
        """The value that begins at the next event, below `level` collections."""
        event = self.loader.get_event()
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if event.anchor in self.anchors:
            raise self._error(event, f"the anchor {event.anchor!r} is defined twice")
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        before = self.count
        self._add(event, 1)
        node = self._scalar(event) if isinstance(event, yaml.ScalarEvent) else self._collection(event, level)
        if event.anchor is not None:
            self.anchors[event.anchor] = node, self.count - before
        return node

    def _scalar(self, event: Any) -> Node:
        tag = event.tag
        if tag is None or tag == "!":
            tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        first, last = event.start_mark, event.end_mark
        node = Node("scalar", tag, first.index, last.index, first.line, first.column, event.style or "", event.value)
        begin = node.start
        if node.style in BLOCK:  # the line that opens it may end in a comment
            begin = self.text.find("\n", node.start, node.end) + 1 or node.end
            node.end = node.start + len(self.text[node.start : node.end].rstrip())
        self.scalars.append((begin, node.end))
        return node

    def _collection(self, event: Any, level: int) -> Node:
        if level >= MOST_LEVELS:
            raise self._error(event, f"nested deeper than {MOST_LEVELS} levels", beyond=True)
        mapping = isinstance(event, yaml.MappingStartEvent)
        tag = event.tag
        if tag is None or tag == "!":
            tag = MAPPING if mapping else SEQUENCE
        mark = event.start_mark
        style = "flow" if event.flow_style else ""
        node = Node("mapping" if mapping else "sequence", tag, mark.index, mark.index, mark.line, mark.column, style)
        last = None
        while not self.loader.check_event(yaml.MappingEndEvent, yaml.SequenceEndEvent):
            item = last = self._node(level + 1)
            if mapping:
                last = self._node(level + 1)
            node.items.append((item, last) if mapping else item)
        end = self.loader.get_event().end_mark.index
        # the parser's own mark of a block collection is at the next key, behind comments
        node.end = end if style else last.end if last else node.start
        return node

    def _alias(self, event: Any) -> Node:
        if event.anchor not in self.anchors:
            raise self._error(event, f"the alias {event.anchor!r} is not defined above")
        found = self.anchors[event.anchor]
        if found is None:
            raise self._error(event, f"the alias {event.anchor!r} is inside its own value")
        node, weight = found
        first, last = event.start_mark, event.end_mark
        self.scalars.append((first.index, last.index))
        self._add(event, weight)
        return replace(node, start=first.index, end=last.index, line=first.line, column=first.column, alias=True)

    def _add(self, event: Any, weight: int) -> None:
        self.count += weight
        if self.count > MOST_VALUES:
            raise self._error(event, f"more than {MOST_VALUES:,} values, with aliases written out", beyond=True)


def _construct(node: Node, constructor: Any) -> Any:
    if node.kind == "scalar":
        node.value = _scalar_value(node, constructor)
    elif node.tag not in (SEQUENCE, MAPPING) or (node.tag == MAPPING) != (node.kind == "mapping"):
        raise _wrong(node, f"a {node.kind} cannot have the type !!{node.tag.rpartition(':')[2]}")
    elif node.kind == "sequence":
        node.value = [_construct(item, constructor) for item in node.items]
    else:
        node.pairs, node.value = _pairs(node, constructor), {}
        for pair in node.pairs:
            try:
                node.value[pair.key] = pair.value_node.value
            except TypeError:
                raise _wrong(pair.key_node, "a key cannot be a list or a mapping") from None
    return node.value


def _pairs(node: Node, constructor: Any) -> list[Pair]:
    """Merged pairs first: of equal keys the last one counts, and those of an earlier mapping before a later one's."""
    merged: list[Pair] = []
    own: list[Pair] = []
    for key_node, value_node in node.items:
        if key_node.tag == MERGE:
            sources = [value_node] if value_node.kind == "mapping" else value_node.items
            if value_node.kind == "scalar" or any(getattr(item, "kind", "") != "mapping" for item in sources):
                raise _wrong(value_node, "`<<` takes a mapping or a list of mappings")
            for source in reversed(sources):
                merged += [replace(pair, merged=True) for pair in _pairs(source, constructor)]
            continue
        if len(key_node.text) > MOST_KEY:
            raise _wrong(key_node, f"a key of more than {MOST_KEY} characters", beyond=True)
        key = key_node.text if key_node.tag == VALUE else _construct(key_node, constructor)
        _construct(value_node, constructor)
        own.append(Pair(key, key_node, value_node, False))
    return merged + own


def _scalar_value(node: Node, constructor: Any) -> Any:
    if any("\ud800" <= character <= "\udfff" for character in node.text):
        raise _wrong(node, "half a character (a lone surrogate), which no text can hold")
    if node.tag == STRING:
        return node.text
    if node.tag in NUMBERS and len(node.text) > MOST_DIGITS:
        raise _wrong(node, f"a number of more than {MOST_DIGITS} characters", beyond=True)
    try:
        return constructor.construct_object(yaml.ScalarNode(node.tag, node.text), deep=True)
    except yaml.YAMLError as error:
        raise _wrong(node, getattr(error, "problem", None) or str(error)) from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        kind = node.tag.rpartition(":")[2]
        raise _wrong(node, f"{node.text[:40]!r} is not a value of the type !!{kind}") from None


def _wrong(node: Node, message: str, beyond: bool = False) -> YamlError:
    return YamlError(message, node.line + 1, node.column + 1, beyond)
