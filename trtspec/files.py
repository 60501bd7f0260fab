"""Files that somebody else wrote: read within bounds, and never waited for.

A path may hold nothing, a directory, a pipe, a loop of links, gigabytes, or lie on a failing disk.
Opening it ends in bytes, or in one error that names the file and the reason.

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
KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
CODE = "TS-ERROR-FILE"
MOST_BYTES = 2**20  # of an engine file, which has a few thousand
MOST_OPTIONS = 2**16  # bytes of a file of options, which has a few thousand
STDIN = "-"
YAML_REMEDY = "pass a YAML file, a directory, or `-` for standard input"
TO_UTF8 = (
    "unpack a compressed file; convert text with `iconv -t UTF-8 -f ENCODING FILE`, where ENCODING "
    "is UTF-16 (PowerShell) or WINDOWS-1252 (Latin letters)"
)


@contextmanager
def open_regular(path: str | Path, remedy: str = "") -> Iterator[BinaryIO]:
    """Opens a regular file for reading.

    Raises FileNotFoundError if nothing is at the path. Raises UsageError for anything else and for
    a disk that fails while it is read.
    """
    try:
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
            what = next((name for holds, name in KINDS if holds(mode)), "a device")
            raise unreadable(path, f"it is {what}, not a regular file", remedy)
        try:
            yield stream
        except OSError as error:
            reason = error.strerror or str(error)
            disk_remedy = remedy or "check the disk that it lies on"
            raise unreadable(path, reason, disk_remedy) from None


def read_bytes(path: str | Path, most: int = MOST_JSON, remedy: str = "") -> bytes:
    """Reads a file of at most `most` bytes. Raises UsageError for a larger file."""
    with open_regular(path, remedy) as stream:
        data = stream.read(most + 1)
    return _within(most, data, path, remedy)


def _within(most: int, data: bytes, path: str | Path, remedy: str) -> bytes:
    if len(data) > most:
        raise unreadable(path, f"it has more than {most} bytes", remedy)
    return data


def read_text(path: str | Path, most: int = MOST_JSON, remedy: str = "") -> str:
    """Reads UTF-8 text, without a byte order mark."""
    return decoded(read_bytes(path, most, remedy), path, remedy)


def decoded(data: bytes, path: str | Path, remedy: str = "") -> str:
    """Decodes bytes of `path` as UTF-8 text."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise unreadable(path, f"line {line} is not UTF-8 text", TO_UTF8) from None


def read_object(path: str | Path, most: int = MOST_JSON, remedy: str = "") -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises FileNotFoundError if nothing is at the path, TrtspecError for any other content.
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
    """The first error that pydantic reports, without the value: `field.of.field: why`."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def parse_json(text: str | bytes, nan: bool = True) -> Any:
    """Parses a JSON text in UTF-8. Without `nan`, NaN and Infinity are refused too.

    Raises ValueError for any other text. Examples are a key twice in an object, a lone surrogate
    and a number of thousands of digits.
    """
    if isinstance(text, str):
        text = text.encode()
    return jiter.from_json(text, allow_inf_nan=nan, catch_duplicate_keys=True)


def unreadable(path: str | Path, reason: str, remedy: str = "") -> UsageError:
    return UsageError(f"{path} cannot be read: {reason}", remedy or "pass a regular file", CODE)


def missing(path: str | Path, remedy: str) -> UsageError:
    """The error for a path to nothing. Its remedy names an entry with nearly the same name."""
    near = beside(path)
    if near:
        remedy = f"did you mean {near}?"
    return unreadable(path, "there is no such file", remedy)


def beside(path: str | Path) -> Path | None:
    """The entry of a directory with the name nearest to a path to nothing. None if none is near."""
    name = Path(path).name
    directory = user_path(path).parent
    entries: list[str] = []
    if directory.is_dir():
        entries = [entry.name for entry in directory.iterdir()]
    if name in entries:
        return None
    near = nearest(name, entries)
    return directory / near if near else None


def read_yaml_text(path: str | Path, remedy: str = YAML_REMEDY, most: int = MOST_BYTES) -> str:
    """Reads the text of a regular file, or of standard input for `-`.

    Raises UsageError for anything but UTF-8 text of at most `most` bytes. Never waits for a pipe or
    a device.
    """
    if str(path) != STDIN:
        try:
            return read_text(path, most, remedy)
        except FileNotFoundError:
            raise missing(path, remedy) from None
    if sys.stdin is None:
        raise unreadable(STDIN, "standard input is closed", remedy)
    data = sys.stdin.buffer.read(most + 1)
    return decoded(_within(most, data, path, remedy), path, remedy)


class _Loader(yaml.SafeLoader):
    """Refuses aliases: a few can expand to more values than any memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            problem = "write the value out in place of an alias"
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return super().compose_node(parent, index)


def load_file(path: str | Path, remedy: str = YAML_REMEDY) -> Any:
    """Parses a YAML file of options. Raises UsageError if it cannot be read or is not YAML."""
    text = read_yaml_text(path, remedy, MOST_OPTIONS)
    line = ""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        reason = "it is nested too deep"
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
