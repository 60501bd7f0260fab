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
MIN_SIMILARITY = 0.8  # of a misspelt word, by difflib's measure from 0 to 1
FIELD = re.compile(r"`([a-z][a-z0-9_]*)`")


@dataclass
class RunningCommand:
    """Command that runs in the current context, or an empty record if no command runs.

    A new thread sees the command only inside a copy of the context (`copy_context`).

    options: record class of the command's options.
    flags: flag or environment variable of each option, by field name.
    origins: source of each option that the user set, by field name (see records.ORIGINS).
    answered: whether stdout already has the JSON object of `--json`.
    """

    options: type | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    answered: bool = False


running = ContextVar("running", default=RunningCommand())  # noqa: B039  # the library's own


def as_typed(text: str) -> str:
    """Returns a printable message, with each field name in backticks replaced by its flag.

    Keeps the field names if no command runs.
    """
    flags = running.get().flags
    return printable(FIELD.sub(lambda match: flags.get(match[1], match[0]), text))


def printable(text: str) -> str:
    """Returns text with control characters, direction marks and lone surrogates as escapes.

    A terminal then shows these characters and does not obey them. Line feeds and tabs stay.
    """
    return UNPRINTABLE.sub(lambda character: ascii(character[0])[1:-1], text)


class TrtspecError(Exception):
    """Failure that a user can act on.

    message: what failed, and why. The message may begin with its code.
    remedy: next command or edit.
    code: stable code from docs/reference/problems.md. By default the code in the message, or the
        code of the class if the message has none.
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
    """Error in the command line or in the value of an option (exit status 2)."""

    exit_code = 2
    default_code = "TS-ERROR-USAGE"


class CheckFailed(TrtspecError):
    """Failure of a check that ran and found problems (exit status 3)."""

    exit_code = 3
    default_code = "TS-ERROR-CHECK"


class MissingDependency(TrtspecError):
    """Absence of a package, an executable or hardware that a command needs (exit status 4)."""

    exit_code = 4
    default_code = "TS-ERROR-MISSING"


class Interrupted(TrtspecError):
    """Interruption by Ctrl-C or a signal (exit status 130)."""

    exit_code = 130
    default_code = "TS-ERROR-INTERRUPTED"


def listed(names: Iterable[str | None]) -> str:
    """Returns the first MAX_LISTED distinct names as text, and the number of omitted names.

    Skips None and empty names.
    """
    distinct = [*dict.fromkeys(name for name in names if name)]
    omitted = len(distinct) - MAX_LISTED
    text = ", ".join(distinct[:MAX_LISTED])
    if omitted > 0:
        text += f" and {omitted} more"
    return text


def did_you_mean(value: str, choices: Collection[str], otherwise: str) -> str:
    """Returns a remedy that proposes the choice nearest to `value`.

    Returns `otherwise` if no choice is near.
    """
    near = nearest(value, choices)
    return f"did you mean {near}?" if near else otherwise


def nearest(value: str, choices: Collection[str], *tables: str) -> str | None:
    """Returns the choice that `value` probably means. None if no choice is near.

    `value` may be another tool's name of a choice, contain a choice as a word, or misspell it.
    `tables`: tables of words.yaml that translate other tools' names. Default: `values`.
    """
    wanted = _normalized(value)
    translations = load_yaml("words.yaml")
    translated = []
    for table in tables or ("values",):
        for ours, theirs in translations[table].items():
            if wanted in map(_normalized, theirs.split()):
                translated.append(ours)
    value_words = re.split(r"[^a-z0-9.]+", value.lower())
    contained = [choice for choice in choices if choice in value_words]
    by_spelling = {_normalized(choice): choice for choice in choices}
    similar = get_close_matches(wanted, by_spelling, n=1, cutoff=MIN_SIMILARITY)
    # translations come first, because they are certain; they may name options of other commands
    candidates = (*translated, *contained, *(by_spelling[spelling] for spelling in similar))
    return next((choice for choice in candidates if choice in choices), None)


def _normalized(word: str) -> str:
    """Returns a word in lower case, without dashes, underscores and white space."""
    return re.sub(r"[-_\s]", "", word.lower())


@contextmanager
def signals_handled(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Calls `handler` for the signals `numbers` while the block runs.

    Restores the previous handlers at the end of the block.
    """
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt, like Ctrl-C, while the block runs.

    Schedulers end a job by SIGTERM, and the block can then clean up.
    """
    with signals_handled(signal.default_int_handler, signal.SIGTERM):
        yield


@dataclass(frozen=True)
class Problem:
    """Finding in a user's input.

    code: stable code.
    key: name of a file, setting or tensor, or dotted path of a setting in a `file` with lines.
    remedy: next command or edit. By default the documented remedy of the code.
    fix: function that takes the parsed file and returns its corrected text. None without a
        correction.
    on_value: whether the setting's value is at fault, and not its name.
    beside: dotted paths of other settings that the finding is about.
    file: path of a file with lines. None for other inputs.
    line: line number from 1. None if no line is at fault.
    column: column number from 1. None if no column is at fault.
    width: number of characters at fault, from `column` on.
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
        """Text `FILE:LINE KEY` for people. `KEY` if the finding has no file."""
        return self.location(self.line)

    def location(self, *numbers: int | None) -> str:
        """Returns the text `FILE:LINE:COLUMN KEY` for people. `KEY` if the finding has no file.

        `numbers`: line and column, omitted if None.
        """
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
    """Returns the problems with severity `error`."""
    return [problem for problem in problems if problem.severity == "error"]


def has_errors(problems: Iterable[Problem]) -> bool:
    return bool(errors_in(problems))


def check_failure(
    message: str,
    problems: Iterable[Problem],
    remedy: str = "follow the remedy of each error above",
) -> CheckFailed | None:
    """Returns the failure of a check if `problems` has errors. None if it has none."""
    return CheckFailed(message, remedy) if has_errors(problems) else None
