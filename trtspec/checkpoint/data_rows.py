"""Rows of data that somebody else wrote: JSON lines, a JSON array, a directory of these, or a hub data set, each row
with its file and line.

A line ends at a line feed and nowhere else: JSON strings may hold U+2028 and its like as they are. Lines are read one
at a time, so a file may be larger than memory.
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

LINES, ARRAY_OR_LINES = (".jsonl", ".ndjson"), ".json"
SUFFIXES = (*LINES, ARRAY_OR_LINES)
MOST_LINE = 256 * 2**20  # bytes of one row; a conversation of a million tokens has about 5 MB
MOST_ARRAY = 4 * 2**30  # bytes of a JSON array, which is read whole
EXTRA = "pip install 'trtspec[modelopt]'"
TIMEOUT_S = 10.0  # of the first request to the hub
CODE, REMEDY = "TS-DATA-ROW", "pass a data file"


@dataclass(frozen=True)
class DataRow:
    """`line` counts from 1: the line of a text, the row of a JSON array or a hub data set."""

    file: str
    line: int
    value: Any

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def from_hub(source: str) -> bool:
    """Whether `source` names a hub data set: not a path that exists, and written like an id."""
    return not Path(source).exists() and parse_hub_id(source.partition(":")[0]) is not None


def read_rows(source: str, split: str | None = None) -> Iterator[DataRow]:
    """Every row of a file, a directory (its files in the order of their names) or a hub data set
    `org/name[@revision][:config]`.

    `split` names the hub data set's split. Raises UsageError, with the line where there is one, for what is no data.
    """
    path = Path(source)
    if from_hub(source):
        yield from hub_rows(source, split)
    elif path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not found:
            raise UsageError(
                f"{path} holds none of {', '.join(SUFFIXES)}", "pass a directory of data files"
            )
        for file in found:
            yield from _file_rows(file)
    elif path.exists():
        yield from _file_rows(path)
    else:
        raise files.missing(path, REMEDY)


def _file_rows(path: Path) -> Iterator[DataRow]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            f"{path} is data of an unknown kind: its name ends in none of {', '.join(SUFFIXES)}",
            'write JSON lines, such as {"prompt": "..."}, or pass a hub data set',
        )
    if suffix == ARRAY_OR_LINES and _begins_with_bracket(path):
        yield from _array_rows(path)
    else:
        yield from _line_rows(path)


def _line_rows(path: Path) -> Iterator[DataRow]:
    """The row of each line that holds more than white space; a byte order mark is passed over."""
    number = 0
    with files.open_regular(path, REMEDY) as stream:
        while line := stream.readline(MOST_LINE + 1):
            number += 1
            if len(line) > MOST_LINE:
                raise UsageError(
                    f"{CODE} {path}:{number} is longer than {MOST_LINE:,} bytes", "split the row"
                )
            where = f"{path}:{number}"
            text = _decoded(line, where, first=number == 1).rstrip("\r\n")
            if text.strip():
                yield DataRow(str(path), number, _parsed(text, where))


def _decoded(data: bytes, where: str, first: bool) -> str:
    if first and data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{CODE} {where} is UTF-16", "save it as UTF-8 text")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{CODE} {where} is not UTF-8 text (byte {error.start + 1})", "repair the line"
        ) from None
    return text.removeprefix("\ufeff") if first else text


def _parsed(text: str, where: str) -> Any:
    try:
        return files.parse_json(text)
    except ValueError as error:
        remedy = (
            "one JSON object per line; a JSON array is a .json file"
            if text[:1] in "[]"
            else "repair the line"
        )
        raise UsageError(f"{CODE} {where} is not JSON: {error}", remedy) from None


def _begins_with_bracket(path: Path) -> bool:
    with files.open_regular(path, REMEDY) as stream:
        return stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _array_rows(path: Path) -> Iterator[DataRow]:
    """The items of a JSON array, which is read whole."""
    with files.open_regular(path, REMEDY) as stream:
        data = stream.read(MOST_ARRAY + 1)
    if len(data) > MOST_ARRAY:
        raise files.unreadable(
            path, f"it has more than {MOST_ARRAY:,} bytes", "write one JSON object per line: .jsonl"
        )
    try:
        items = files.parse_json(files.decoded(data, path, "save it as UTF-8 text"))
    except ValueError as error:
        raise UsageError(f"{CODE} {path} is not JSON: {error}", "repair the file") from None
    yield from (DataRow(str(path), number, item) for number, item in enumerate(items, 1))


def hub_rows(name: str, split: str | None, revision: str | None = None) -> Iterator[DataRow]:
    """Streams `org/name[@revision][:config]` (or a local data set directory) with the datasets library.

    A row without a category takes the name of the split, where one is asked for.
    """
    try:
        import datasets
    except ImportError:
        raise MissingDependency(f"reading the hub data set {name} needs datasets", EXTRA) from None
    import httpx
    from huggingface_hub import HfApi

    identifier, _, config = name.partition(":")
    hub_id = parse_hub_id(identifier) or HubId(identifier)
    wanted = split or "train"
    try:
        if is_online():  # the library below repeats each refused request for half a minute
            HfApi().dataset_info(hub_id.name, timeout=TIMEOUT_S)
        stream = datasets.load_dataset(
            hub_id.name,
            config or None,
            split=wanted,
            revision=hub_id.revision or revision,
            streaming=True,
        )
        for number, row in enumerate(stream, 1):
            yield DataRow(
                f"{name}[{wanted}]",
                number,
                {"category": wanted if split else "", **_without_nulls(row)},
            )
    except (OSError, ValueError, RuntimeError, httpx.TransportError) as error:
        raise UsageError(
            f"cannot read split {wanted!r} of the hub data set {name}: {error}",
            "check the network, `split`, `hf auth login` for gated data, or pass a file with its rows as JSON "
            "lines; bench and check take it as NAME=FILE",
        ) from None


def _without_nulls(value: Any) -> Any:
    """Columns give every struct the keys of all rows, null where a row has none; a template would print them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
