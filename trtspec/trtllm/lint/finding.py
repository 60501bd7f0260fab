"""One thing that lint found: a problem with its place in the file, and the edit that corrects it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from trtspec.errors import Problem, Severity
from trtspec.trtllm.document import Document, Edit

Fix = Callable[[Document], Edit]


@dataclass(frozen=True)
class Finding:
    """`key` is the dotted path; `line` and `column` count from 1 (None: no line of the file is at fault). `width` is
    the number of characters at fault; `on_value` says that they are the value's and not the key's."""

    code: str
    severity: Severity
    key: str
    message: str
    remedy: str = ""
    line: int | None = None
    fix: Fix | None = field(default=None, compare=False)
    on_value: bool = False
    column: int | None = None
    width: int = 1

    def placed(self, document: Document) -> Finding:
        """With the column and width of its key or value in the text."""
        entry = document.entries.get(self.key)
        if self.column is not None or entry is None or entry.line != self.line:
            return self
        node = entry.key_node
        if self.on_value and entry.value_node.line == node.line and entry.value_node.end > entry.value_node.start:
            node = entry.value_node
        return replace(self, column=node.column + 1, width=max(node.end - node.start, 1))

    def problem(self, file: str) -> Problem:
        where = f"{file}:{self.line}" if self.line else file
        return Problem(self.code, self.severity, f"{where} {self.key}".rstrip(), self.message, self.remedy)

    def to_dict(self, file: str) -> dict[str, Any]:
        place = {"line": self.line, "column": self.column, "key": self.key}
        return {**self.problem(file).to_dict(), **place, "fixable": self.fix is not None}


def finding_at(
    document: Document, code: str, severity: Severity, key: str, message: str, remedy: str = "", fix: Fix | None = None
) -> Finding:
    """With the line of its key, or of the nearest parent that is there."""
    return Finding(code, severity, key, message, remedy, document.line(key), fix)
