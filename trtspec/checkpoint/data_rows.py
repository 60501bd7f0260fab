"""Reads rows of data that users bring, each with its file and line.

The data are JSON lines, a JSON array, a directory of such files, or a hub data set. Only a line
feed ends a line, because JSON strings may hold U+2028 and similar characters unescaped. Lines are
read one at a time, so a file may be larger than memory.
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
# command that installs the datasets library
EXTRA = "pip install 'trtspec[modelopt]'"
TIMEOUT_S = 10.0  # of the first request to the hub
CODE = "TS-DATA-ROW"
REMEDY = "pass a data file"


@dataclass(frozen=True)
class DataRow:
    """Row of a data file or a hub data set.

    file: path of the file, or name of the hub data set with its split.
    line: number from 1 of the line, or of the item of a JSON array or a hub data set.
    value: parsed JSON value.
    """

    file: str
    line: int
    value: Any

    @property
    def where(self) -> str:
        """Text FILE:LINE for messages."""
        return f"{self.file}:{self.line}"


def read_rows(source: str, split: str | None = None) -> Iterator[DataRow]:
    """Yields every row of a file, a directory or a hub data set `org/name[@revision][:config]`.

    The files of a directory are read in the order of their names. Raises UsageError if `source` is
    not data, or with file and line if a row is invalid.

    `split`: split of the hub data set. None: train.
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
    """Whether `source` names a hub data set. An existing path is never a hub data set."""
    return not Path(source).exists() and parse_hub_id(source.partition(":")[0]) is not None


def _file_rows(path: Path) -> Iterator[DataRow]:
    """Yields the rows of one file. The beginning of a .json file shows whether it is an array."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        endings = ", ".join(SUFFIXES)
        message = f"{path} is data of an unknown type: its name must end in one of {endings}"
        remedy = 'write JSON lines, such as {"prompt": "..."}, or pass a hub data set'
        raise UsageError(message, remedy)
    if suffix == ARRAY_OR_LINES and _begins_with_bracket(path):
        yield from _array_rows(path)
    else:
        yield from _line_rows(path)


def _begins_with_bracket(path: Path) -> bool:
    """Whether the first character of a file, after a byte order mark, is `[`."""
    with files.open_regular(path, REMEDY) as stream:
        text = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        return text[:1] == b"["


def _array_rows(path: Path) -> Iterator[DataRow]:
    """Yields the items of a JSON array, which is parsed as a whole."""
    with files.open_regular(path, REMEDY) as stream:
        data = stream.read(MAX_ARRAY_BYTES + 1)
    if len(data) > MAX_ARRAY_BYTES:
        reason = f"it has more than {MAX_ARRAY_BYTES:,} bytes"
        raise files.unreadable(path, reason, "write one JSON object per line: .jsonl")
    try:
        text = files.decoded(data, path)
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
            # `readline` stops there, because a file without line feeds could exceed memory.
            if len(line) > MAX_LINE_BYTES:
                message = f"{CODE} {where} is longer than {MAX_LINE_BYTES:,} bytes"
                raise UsageError(message, "split the row")
            text = _decoded(line, where, first=number == 1).rstrip("\r\n")
            if text.strip():
                yield DataRow(str(path), number, _parsed(text, where))


def _decoded(data: bytes, where: str, first: bool) -> str:
    """Returns a line as text, without a byte order mark if it is the `first` line.

    Raises UsageError if the line is not UTF-8.
    """
    if first and data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{CODE} {where} is UTF-16", files.TO_UTF8)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{CODE} {where} is not UTF-8 text (byte {error.start + 1})"
        raise UsageError(message, files.TO_UTF8) from None
    return text.removeprefix("\ufeff") if first else text


def _parsed(text: str, where: str) -> Any:
    """Returns the value of a line of JSON. Raises UsageError if the line is not JSON."""
    try:
        return files.parse_json(text)
    except ValueError as error:
        remedy = "repair the line"
        if text[:1] in "[]":
            remedy = "write one JSON object per line, or give a JSON array the suffix .json"
        raise UsageError(f"{CODE} {where} is not JSON: {error}", remedy) from None


def hub_rows(name: str, split: str | None, revision: str | None = None) -> Iterator[DataRow]:
    """Yields the rows of `org/name[@revision][:config]`, or of a local data set, one at a time.

    A row without a category has the name of the split as its category, if a split is given. Raises
    MissingDependency without the datasets library, and UsageError if the data cannot be read.

    `revision`: revision if the name has none.
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
        # One request first, because `load_dataset` repeats a refused request for half a minute.
        if is_online():
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
    """Returns the value without keys whose value is null, because a template would print them.

    A hub data set gives each object the keys of all rows, with null for missing ones.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
