"""Files that somebody else wrote: read within bounds, and never waited for.

Whatever stands at a path (nothing, a directory, a pipe, a loop of links, a failing disk, gigabytes), opening it ends in
bytes or in one error that names the file and the reason.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from trtspec.errors import TrtspecError, UsageError

MOST_JSON = 256 * 2**20  # bytes; the index of a large model has about 20 MB
KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
CODE = "TS-ERROR-FILE"


def open_regular(path: str | Path, remedy: str = "") -> BinaryIO:
    """A regular file, open for reading. Raises FileNotFoundError where there is none, UsageError for anything else."""
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
        try:
            data = stream.read(most + 1)  # /proc and growing files say another size
        except OSError as error:
            raise unreadable(path, error.strerror or str(error), remedy) from None
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


def read_object(path: str | Path, most: int = MOST_JSON, remedy: str = "") -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError where there is none, TrtspecError for anything else."""
    try:
        value = parse_json(read_text(path, most, remedy))
    except ValueError as error:
        raise TrtspecError(f"{path} is not valid JSON: {error}", remedy) from None
    if not isinstance(value, dict):
        raise TrtspecError(f"{path} holds {type(value).__name__}, not a JSON object", remedy)
    return value


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for all that is none: too deep, numbers of thousands of digits, or
    strings that are no text (lone surrogates), which nothing could print."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    escape = b"\\ud" if isinstance(text, bytes) else "\\ud"
    if escape in text.lower():  # type: ignore[operator]
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a string holds half a character (a lone surrogate)") from None
    return value


def unreadable(path: str | Path, reason: str, remedy: str = "") -> UsageError:
    return UsageError(f"{path} cannot be read: {reason}", remedy or "pass a regular file", CODE)
