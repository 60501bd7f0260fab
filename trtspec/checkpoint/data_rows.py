"""Reads rows of data that somebody else wrote, each with its file and line.

They are JSON lines, a JSON array, a directory of these, or a hub data set. A line ends at a line
feed and nowhere else: JSON strings may hold U+2028 and its like as they are. Lines are read one at
a time, so a file may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec import files
from trtspec.checkpoint.remote import is_online
from trtspec.errors import MissingDependency, UsageError
from trtspec.foreign import HubId, parse_hub_id

LINES = (".jsonl", ".ndjson")
ARRAY_OR_LINES = ".json"
SUFFIXES = (*LINES, ARRAY_OR_LINES)
MAX_LINE_BYTES = 256 * 2**20  # a conversation of a million tokens has about 5 MB
MAX_ARRAY_BYTES = 4 * 2**30  # a JSON array is read whole
EXTRA = "pip install 'trtspec[modelopt]'"
TIMEOUT_S = 10.0  # of the first request to the hub
CODE = "TS-DATA-ROW"
REMEDY = "pass a data file"


@dataclass(frozen=True)
class DataRow:
    """`line` counts from 1: the line of a text, the row of a JSON array or a hub data set."""

    file: str
    line: int
    value: Any

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def read_rows(source: str, split: str | None = None) -> Iterator[DataRow]:
    """Yields every row of a file, a directory or a hub data set `org/name[@revision][:config]`.

    The files of a directory come in the order of their names. `split` names the hub data set's
    split. Raises UsageError if `source` is not data, with the line if one is at fault.
    """
    path = Path(source)
    if from_hub(source):
        yield from hub_rows(source, split)
    elif path.is_dir():
        data_files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not data_files:
            message = f"{path} holds none of {', '.join(SUFFIXES)}"
            raise UsageError(message, "pass a directory of data files")
        for file in data_files:
            yield from _file_rows(file)
    elif path.exists():
        yield from _file_rows(path)
    else:
        raise files.missing(path, REMEDY)


def from_hub(source: str) -> bool:
    """Whether `source` names a hub data set: not a path that exists, and written like an id."""
    return not Path(source).exists() and parse_hub_id(source.partition(":")[0]) is not None


def _file_rows(path: Path) -> Iterator[DataRow]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        endings = ", ".join(SUFFIXES)
        message = f"{path} is data of an unknown kind: its name ends in none of {endings}"
        remedy = 'write JSON lines, such as {"prompt": "..."}, or pass a hub data set'
        raise UsageError(message, remedy)
    if suffix == ARRAY_OR_LINES and _begins_with_bracket(path):
        yield from _array_rows(path)
    else:
        yield from _line_rows(path)


def _begins_with_bracket(path: Path) -> bool:
    with files.open_regular(path, REMEDY) as stream:
        text = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        return text[:1] == b"["


def _array_rows(path: Path) -> Iterator[DataRow]:
    """Yields the items of a JSON array, which is read whole."""
    with files.open_regular(path, REMEDY) as stream:
        data = stream.read(MAX_ARRAY_BYTES + 1)
    if len(data) > MAX_ARRAY_BYTES:
        reason = f"it has more than {MAX_ARRAY_BYTES:,} bytes"
        raise files.unreadable(path, reason, "write one JSON object per line: .jsonl")
    try:
        text = files.decoded(data, path, "save it as UTF-8 text")
        items = files.parse_json(text)
    except ValueError as error:
        raise UsageError(f"{CODE} {path} is not JSON: {error}", "repair the file") from None
    for number, item in enumerate(items, 1):
        yield DataRow(str(path), number, item)


def _line_rows(path: Path) -> Iterator[DataRow]:
    """Yields a row for each line that is not blank. A byte order mark is skipped."""
    number = 0
    with files.open_regular(path, REMEDY) as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                message = f"{CODE} {where} is longer than {MAX_LINE_BYTES:,} bytes"
                raise UsageError(message, "split the row")
            text = _decoded(line, where, first=number == 1).rstrip("\r\n")
            if text.strip():
                yield DataRow(str(path), number, _parsed(text, where))


def _decoded(data: bytes, where: str, first: bool) -> str:
    if first and data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{CODE} {where} is UTF-16", files.TO_UTF8)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{CODE} {where} is not UTF-8 text (byte {error.start + 1})"
        raise UsageError(message, files.TO_UTF8) from None
    return text.removeprefix("\ufeff") if first else text


def _parsed(text: str, where: str) -> Any:
    try:
        return files.parse_json(text)
    except ValueError as error:
        remedy = "repair the line"
        if text[:1] in "[]":
            remedy = "one JSON object per line; a JSON array is a .json file"
        raise UsageError(f"{CODE} {where} is not JSON: {error}", remedy) from None


def hub_rows(name: str, split: str | None, revision: str | None = None) -> Iterator[DataRow]:
    """Streams `org/name[@revision][:config]` (or a local data set) with the datasets library.

    A row without a category takes the name of the split, if one is asked for.
    """
    try:
        import datasets
    except ImportError:
        raise MissingDependency(f"reading the hub data set {name} needs datasets", EXTRA) from None
    import httpx
    from huggingface_hub import HfApi

    identifier, _, config = name.partition(":")
    hub_id = parse_hub_id(identifier) or HubId(identifier)
    split_name = split or "train"
    file = f"{name}[{split_name}]"
    try:
        if is_online():  # the library below repeats each refused request for half a minute
            HfApi().dataset_info(hub_id.name, timeout=TIMEOUT_S)
        stream = datasets.load_dataset(
            hub_id.name,
            config or None,
            split=split_name,
            revision=hub_id.revision or revision,
            streaming=True,
        )
        for number, row in enumerate(stream, 1):
            fields = {"category": split or "", **_without_nulls(row)}
            yield DataRow(file, number, fields)
    except (OSError, ValueError, RuntimeError, httpx.TransportError) as error:
        message = f"cannot read split {split_name!r} of the hub data set {name}: {error}"
        remedy = (
            "check the network, `split`, `hf auth login` for gated data, or pass a file with its "
            "rows as JSON lines; bench and check take it as NAME=FILE"
        )
        raise UsageError(message, remedy) from None


def _without_nulls(value: Any) -> Any:
    """Leaves out keys without a value, because a template would print them.

    A column gives every struct the keys of all rows, with null for absent ones.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
