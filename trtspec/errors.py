"""The one tree of exceptions that commands raise, and the record of a problem found in somebody's input.

Commands raise; only `trtspec.cli.app.main` catches, prints the message with its remedy, and exits with `exit_code`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


class TrtspecError(Exception):
    """A failure that the user can act on: what, why, and the next command.

    `message` names the thing and the reason; `remedy` is the next command or edit.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class UsageError(TrtspecError):
    """The command line or an option value is wrong (exit status 2)."""

    exit_code = 2


class CheckFailed(TrtspecError):
    """A check ran and found problems (exit status 3)."""

    exit_code = 3


class MissingDependency(TrtspecError):
    """A package, an executable or hardware that this command needs is absent (exit status 4)."""

    exit_code = 4


@dataclass(frozen=True)
class Problem:
    """One finding. `code` is stable and documented in docs/problems.md; `where` names a file, key or tensor."""

    code: str
    severity: Severity
    where: str
    message: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def has_errors(problems: list[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)
