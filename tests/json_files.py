"""JSON files, as a test reads, writes and edits them.

Without trtspec, like the checkpoints of tests/tiny.py.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    path.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def edit_json(path: Path, **keys: Any) -> None:
    """Sets these keys of the file's mapping, which is made if there is no file."""
    write_json(path, (read_json(path) if path.is_file() else {}) | keys)


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Writes a line of JSON for each row, and returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
