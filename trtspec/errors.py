"""The exceptions that commands raise, and the record of a problem in somebody's input.

Commands and the Python API raise. Only `trtspec.cli.app.main` catches, prints the message with its
remedy, and exits with `exit_code`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, get_args

from trtspec.data_files import documented, load_yaml

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # in the order in which they are shown
LEADING_CODE = re.compile(r"\[?(TS-[A-Z0-9]+(?:-[A-Z0-9]+)+)\b")
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
MAX_LISTED = 5  # names in one message
FIELD = re.compile(r"`([a-z][a-z0-9_]*)`")


@dataclass
class RunningCommand:
    """One command while it runs, or the default if none runs.

    A new thread does not see it without `copy_context`.

    flags: the flag or variable of each field of its `options`.
    origins: the source of each field that the user set.
    answered: whether stdout has the object of `--json`.
    """

    options: type | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    answered: bool = False


running = ContextVar("running", default=RunningCommand())  # noqa: B039  # the library's own


def as_typed(text: str) -> str:
    """A message that names options as fields of their record, in backticks, made printable.

    While a command runs, its flags replace the fields.
    """
    flags = running.get().flags
    return printable(FIELD.sub(lambda match: flags.get(match[1], match[0]), text))


def printable(text: str) -> str:
    """Shows control characters, marks of direction and lone surrogates as escapes.

    So none of them acts on a terminal. Line ends and tabs stay.
    """
    return UNPRINTABLE.sub(lambda character: ascii(character[0])[1:-1], text)


class TrtspecError(Exception):
    """A failure that the user can act on: what, why, and the next command.

    `message` names the thing and the reason, `remedy` is the next command or edit. `code` is stable
    and documented in docs/reference/problems.md. A message may begin with its code. Others have the
    code of their class.
    """

    exit_code = 1
    default_code = "TS-ERROR-FAILED"

    def __init__(self, message: str, remedy: str = "", code: str | None = None) -> None:
        self.message = as_typed(message)
        self.remedy = as_typed(remedy)
        super().__init__(self.message)
        leading = LEADING_CODE.match(message)
        default_code = leading[1] if leading else self.default_code
        self.code = code or default_code

    def to_dict(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message, "remedy": self.remedy}


class UsageError(TrtspecError):
    """The command line or an option value is wrong (exit status 2)."""

    exit_code = 2
    default_code = "TS-ERROR-USAGE"


class CheckFailed(TrtspecError):
    """A check ran and found problems (exit status 3)."""

    exit_code = 3
    default_code = "TS-ERROR-CHECK"


class MissingDependency(TrtspecError):
    """A package, an executable or hardware that this command needs is absent (exit status 4)."""

    exit_code = 4
    default_code = "TS-ERROR-MISSING"


class Interrupted(TrtspecError):
    """Ctrl-C (exit status 130)."""

    exit_code = 130
    default_code = "TS-ERROR-INTERRUPTED"


def listed(names: Iterable[str | None]) -> str:
    """Different names in one message: the first MAX_LISTED, and how many more there are."""
    different = [*dict.fromkeys(name for name in names if name)]
    more = len(different) - MAX_LISTED
    text = ", ".join(different[:MAX_LISTED])
    if more > 0:
        text += f" and {more} more"
    return text


def did_you_mean(value: str, choices: Collection[str], otherwise: str) -> str:
    """A remedy: the choice that is meant by `value`, or `otherwise`."""
    near = nearest(value, choices)
    return f"did you mean {near}?" if near else otherwise


def nearest(value: str, choices: Collection[str], *tables: str) -> str | None:
    """The choice that `value` means. None if no choice is near.

    `value` may be the choice in another tool's words, contain it as a word, or nearly spell it.
    `tables`: the tables of words.yaml with other tools' words.
    """
    wanted = _spelled(value)
    words = load_yaml("words.yaml")
    translated = [
        ours
        for table in tables or ("values",)
        for ours, theirs in words[table].items()
        if wanted in map(_spelled, theirs.split())
    ]
    contained = [choice for choice in choices if choice in re.split(r"[^a-z0-9.]+", value.lower())]
    spelled = {_spelled(choice): choice for choice in choices}
    near = [spelled[name] for name in get_close_matches(wanted, spelled, n=1, cutoff=0.8)]
    candidates = (*translated, *contained, *near)
    return next((choice for choice in candidates if choice in choices), None)


def _spelled(word: str) -> str:
    """A word in lower case, without dashes, underscores and blanks."""
    return re.sub(r"[-_\s]", "", word.lower())


@contextmanager
def signals_handled(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Calls `handler` for these signals while the block runs."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM, with which schedulers end a job, unwind like Ctrl-C while the block runs."""
    with signals_handled(signal.default_int_handler, signal.SIGTERM):
        yield


@dataclass(frozen=True)
class Problem:
    """One finding. `code` is stable. Without a `remedy` it has the documented one of its code.

    `key` names a file, setting or tensor. In a `file` with lines: the dotted path of a setting.

    - `beside`: the other settings that a rule is about.
    - `on_value`: the value is at fault, not the name.
    - `line`, `column`: from 1. None if no line is at fault.
    - `width`: in characters.
    - `fix`: edits the parsed file.
    """

    code: str
    severity: Severity
    key: str
    message: str
    remedy: str = ""
    fix: Callable[[Any], Any] | None = field(default=None, compare=False)
    on_value: bool = False
    beside: tuple[str, ...] = ()
    file: str | None = None
    line: int | None = None
    column: int | None = None
    width: int = 1

    def __post_init__(self) -> None:
        remedy = self.remedy or documented().get(self.code, {}).get("remedy", "")
        for name, text in (("code", self.code), ("message", self.message), ("remedy", remedy)):
            object.__setattr__(self, name, as_typed(text))

    @property
    def where(self) -> str:
        """The key as people read it, behind its file and line."""
        return self.location(self.line)

    def location(self, *numbers: int | None) -> str:
        """The key as people read it, behind its file and the known `numbers` (line, column)."""
        if self.file is None:
            return as_typed(self.key)
        position = ":".join([self.file, *map(str, filter(None, numbers))])
        return as_typed(f"{position} {self.key}".rstrip())

    def to_dict(self) -> dict[str, Any]:
        values = {
            "code": self.code,
            "severity": self.severity,
            "where": self.where,
            "message": self.message,
            "remedy": self.remedy,
        }
        if self.file is None:
            return values
        return {
            **values,
            "line": self.line,
            "column": self.column,
            "key": self.key,
            "fixable": self.fix is not None,
        }


def errors_in(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def has_errors(problems: Iterable[Problem]) -> bool:
    return bool(errors_in(problems))


def check_failure(
    message: str,
    problems: Iterable[Problem],
    remedy: str = "follow the remedy of each error above",
) -> CheckFailed | None:
    """The failure of a check that found errors. None without errors."""
    return CheckFailed(message, remedy) if has_errors(problems) else None
