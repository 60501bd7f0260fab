"""An append-only record of finished work, so that a killed command continues where it stopped.

The first line holds the header (what the work depends on), each further line one finished key. Every line is fsynced
before the work counts as done; a line torn by a kill is cut off on the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from trtspec.errors import UsageError
from trtspec.report import fsync_directory


class Journal:
    """`done` maps each finished key to its record. The file is locked while open: one run per output.

    Raises UsageError when `header` is not the one that the file was begun with (naming what changed), when the file
    is no journal, and when another process holds it. `restart` forgets what the file records, once it is locked.
    """

    def __init__(
        self,
        path: Path,
        header: dict[str, Any],
        *,
        restart: bool = False,
        remedy: str = "pass --restart to start over",
    ) -> None:
        self.path, self.remedy = path, remedy
        self.done: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            if restart:
                os.ftruncate(self._file, 0)
            self._load(json.loads(json.dumps(header)))
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another run is writing {self.path.parent} (it holds {self.path.name})",
                "wait for it to end, or choose another output",
            ) from None

    def _load(self, header: dict[str, Any]) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.ftruncate(self._file, len(whole))
        if not whole:
            self._append({"header": header})
            fsync_directory(self.path.parent)
            return
        try:
            first, *records = [json.loads(line) for line in whole.splitlines()]
            self._compare(first["header"], header)
            self.done = {record["key"]: record for record in records}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            raise UsageError(f"{self.path} is not a journal of this command", self.remedy) from None

    def _compare(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        if changed:
            parts = [f"{key} was {_short(old.get(key))}, now {_short(new.get(key))}" for key in changed]
            raise UsageError(f"{self.path} was begun with something else: {'; '.join(parts)}", self.remedy)

    def record(self, key: str, **fields: Any) -> None:
        """Appends and fsyncs; after it returns, a rerun finds `key` in `done`."""
        entry = {"key": key, **fields}
        self._append(entry)
        self.done[key] = entry

    def _append(self, value: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n")
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
