"""Reads files of users and other tools, with a limit on their size and without waiting.

A path may be missing, a directory, a pipe or a loop of links. A file may have gigabytes or lie on a
failing disk. Reading returns bytes, or raises one error that names the file and the reason.

YAML with positions, which only engine files need, is in trtllm/nodes.py.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import jiter
import yaml

from trtspec.errors import TrtspecError, UsageError, nearest
from trtspec.foreign import user_path

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_JSON = 256 * 2**20  # bytes; the index of a large model has about 20 MB
# test of a file's mode, and the name of the file type in messages
KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
CODE = "TS-ERROR-FILE"
MOST_BYTES = 2**20  # limit for an engine file, which has a few thousand bytes
MOST_OPTIONS = 2**16  # bytes; limit for a file of options, which has a few thousand bytes
STDIN = "-"
YAML_REMEDY = "pass a YAML file, a directory, or `-` for standard input"
TO_UTF8 = (
    "unpack a compressed file; convert text with `iconv -t UTF-8 -f ENCODING FILE`, where ENCODING "
    "is UTF-16 (PowerShell) or WINDOWS-1252 (Latin letters)"
)


@contextmanager
def open_regular(path: str | Path, remedy: str = "") -> Iterator[BinaryIO]:
    """Opens a regular file for reading.

    Raises FileNotFoundError if the path does not exist. Raises UsageError if the path is not a
    regular file, cannot be opened, or fails while the block reads.
    """
    try:
        # O_NONBLOCK, because opening a pipe would wait for its writer
        stream = open(  # noqa: SIM115
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(path, getattr(error, "strerror", None) or str(error), remedy) from None
    with stream:
        mode = os.fstat(stream.fileno()).st_mode
        if not stat.S_ISREG(mode):
            file_type = next((name for is_type, name in KINDS if is_type(mode)), "a device")
            raise unreadable(path, f"it is {file_type}, not a regular file", remedy)
        try:
            yield stream
        except OSError as error:
            reason = error.strerror or str(error)
            disk_remedy = remedy or "check the disk that it lies on"
            raise unreadable(path, reason, disk_remedy) from None


def read_bytes(path: str | Path, most: int = MOST_JSON, remedy: str = "") -> bytes:
    """Returns the bytes of a regular file. Raises UsageError for more than `most` bytes."""
    with open_regular(path, remedy) as stream:
        data = stream.read(most + 1)  # a byte more, to see that the file is too large
    return _limited(most, data, path, remedy)


def _limited(most: int, data: bytes, path: str | Path, remedy: str) -> bytes:
    """Returns `data`. Raises UsageError that names `path` for more than `most` bytes."""
    if len(data) > most:
        raise unreadable(path, f"it has more than {most} bytes", remedy)
    return data


def read_text(path: str | Path, most: int = MOST_JSON, remedy: str = "") -> str:
    """Returns the UTF-8 text of a file of at most `most` bytes, without a byte order mark.

    Raises UsageError for a larger file or another encoding.
    """
    return decoded(read_bytes(path, most, remedy), path, remedy)


def decoded(data: bytes, path: str | Path, remedy: str = TO_UTF8) -> str:
    """Returns bytes as UTF-8 text, without a byte order mark.

    Raises UsageError that names `path` and the first line in another encoding.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise unreadable(path, f"line {line} is not UTF-8 text", remedy) from None


def read_object(path: str | Path, most: int = MOST_JSON, remedy: str = "") -> dict[str, Any]:
    """Returns the JSON object in a file of at most `most` bytes.

    Raises FileNotFoundError if the path does not exist. Raises TrtspecError if the file cannot be
    read or is not a JSON object.
    """
    try:
        value = parse_json(read_text(path, most, remedy))
    except ValueError as error:
        remedy = f"correct the file there, or {remedy or 'fetch it again'}"
        raise TrtspecError(f"{path} is not valid JSON: {error}", remedy, CODE) from None
    if not isinstance(value, dict):
        raise TrtspecError(f"{path} holds {type(value).__name__}, not a JSON object", remedy, CODE)
    return value


def first_fault(error: ValidationError) -> str:
    """Returns the first error that pydantic reports, as `path.of.field: message`.

    Omits the value, which may be long.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    field_path = ".".join(map(str, first["loc"]))
    return f"{field_path}: {first['msg']}"


def parse_json(text: str | bytes, nan: bool = True) -> Any:
    """Parses JSON text in UTF-8.

    Raises ValueError for invalid JSON, a repeated key in an object, a lone surrogate or a number
    with thousands of digits. Also raises ValueError for NaN and Infinity if `nan` is false.
    """
    if isinstance(text, str):
        text = text.encode()
    return jiter.from_json(text, allow_inf_nan=nan, catch_duplicate_keys=True)


def unreadable(path: str | Path, reason: str, remedy: str = "") -> UsageError:
    """Returns the error for a path that cannot be read, with the reason."""
    return UsageError(f"{path} cannot be read: {reason}", remedy or "pass a regular file", CODE)


def missing(path: str | Path, remedy: str) -> UsageError:
    """Returns the error for a path that does not exist.

    If the directory has an entry with a similar name, the remedy proposes that entry.
    """
    near = beside(path)
    if near:
        remedy = f"did you mean {near}?"
    return unreadable(path, "there is no such file", remedy)


def beside(path: str | Path) -> Path | None:
    """Path of the entry beside the missing `path` with the most similar name.

    None if no name is similar, the directory does not exist, or `path` is a link to a missing file.
    """
    name = Path(path).name
    directory = user_path(path).parent
    entries: list[str] = []
    if directory.is_dir():
        entries = [entry.name for entry in directory.iterdir()]
    if name in entries:
        # a link to a missing file: the name itself is right
        return None
    near = nearest(name, entries)
    return directory / near if near else None


def read_yaml_text(path: str | Path, remedy: str = YAML_REMEDY, most: int = MOST_BYTES) -> str:
    """Returns the text of a regular file, or of standard input if `path` is `-`.

    Raises UsageError if the path cannot be read, is not UTF-8, or has more than `most` bytes.
    """
    if str(path) != STDIN:
        try:
            return read_text(path, most, remedy)
        except FileNotFoundError:
            raise missing(path, remedy) from None
    if sys.stdin is None:
        raise unreadable(STDIN, "standard input is closed", remedy)
    data = sys.stdin.buffer.read(most + 1)
    return decoded(_limited(most, data, path, remedy), path)


class _Loader(yaml.SafeLoader):
    """YAML loader that raises MarkedYAMLError for an alias.

    A few nested aliases can expand to more values than fit in memory.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            problem = "write the value out in place of an alias"
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return super().compose_node(parent, index)


def load_file(path: str | Path, remedy: str = "pass a YAML file, or `-` for stdin") -> Any:
    """Returns the parsed content of a YAML file of options, of at most MOST_OPTIONS bytes.

    Raises UsageError if the file cannot be read or is not valid YAML.
    """
    text = read_yaml_text(path, remedy, MOST_OPTIONS)
    line = ""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        reason = "it is nested too deep"
    # PyYAML raises all of these for invalid values, such as a date of month 13
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:
        mark = getattr(error, "problem_mark", None)
        if mark:
            line = f":{mark.line + 1}"
        reason = getattr(error, "problem", None) or str(error)
    message = f"{path}{line} is not valid YAML: {reason}"
    raise UsageError(message, "correct the file", "TS-ERROR-YAML")
