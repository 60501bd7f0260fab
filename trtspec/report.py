"""Writes the output of commands: files, JSON and tables on stdout, messages on stderr.

Files are written atomically. The progress bar is on stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from trtspec.errors import (
    SEVERITIES,
    UNPRINTABLE,
    Problem,
    TrtspecError,
    UsageError,
    has_errors,
    printable,
    running,
)
from trtspec.foreign import PlainName

SHORTEST_TEXT = 12  # characters; the minimum width of a folded column of text
# ANSI colours of severities, each the first word of its line
COLOURS = {"error": "1;31", "warning": "1;33", "info": "1;36", "fixed": "1;32"}
MOST_ITEMS = 8  # items of a list that a table shows
CREATE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW  # O_NOFOLLOW: a link is refused
PRIVATE = 0o600  # mode of files that may hold secrets
# packages whose versions decide results
VERSIONED_PACKAGES = ("trtspec", "torch", "transformers", "nvidia-modelopt", "safetensors")


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replaces the file `path` by `data` in one step, so no reader sees a part of the file.

    Text is written in UTF-8. An existing file keeps its permissions. Raises TrtspecError if the
    file system fails.
    """
    if isinstance(data, str):
        data = data.encode("utf-8")
    with writing(path):
        mode = 0o644
        if path.exists():
            mode = path.stat().st_mode & 0o7777
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{path.name}."
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        fsync(path.parent)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the block, which writes `path`, into a TrtspecError with a remedy."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        action = "free space on that disk" if is_full else "check that disk and its permissions"
        message = f"cannot write {path}: {error.strerror or error}"
        remedy = f"{action}, then run the command again"
        if isinstance(error, NotADirectoryError | FileExistsError):
            remedy = "choose another path: a part of this one is a file"
        raise TrtspecError(message, remedy, "TS-ERROR-FILE") from error


def create(path: Path) -> BinaryIO:
    """Opens an empty file for writing and reading. Empties a file that exists.

    Raises TrtspecError if `path` is a link or the file system fails.
    """
    with writing(path):
        return os.fdopen(os.open(path, CREATE, 0o644), "w+b")


def remove_file(directory: Path, name: PlainName) -> None:
    """Removes the file or link `name` in a directory that belongs to the running command.

    The target of a link stays. Raises TrtspecError if `name` is a directory.
    """
    with writing(directory / name):
        (directory / name).unlink(missing_ok=True)


def remove_folder(directory: Path, name: PlainName) -> None:
    """Removes the folder, file or link `name` in a directory that belongs to the running command.

    The target of a link stays.
    """
    path = directory / name
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def fsync(path: Path) -> None:
    """Flushes the bytes of a file, or the entries of a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_text(value: Any) -> str:
    """Returns indented JSON text with a final line feed, as in files and on stdout."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_atomic(path, json_text(value))


@dataclass(frozen=True)
class OutputOptions:
    """Options for output that already exists.

    dry_run: whether to write nothing.
    restart: whether to discard an interrupted run and start over.
    force: whether to replace files of the user.
    """

    dry_run: bool = False
    restart: bool = False
    force: bool = False


def refuse_overwrite(
    path: Path, force: bool, remedy: str = "pass `force`, or choose another `output`"
) -> None:
    """Raises UsageError if `path` is a file or a directory with entries, and `force` is false."""
    if not force and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        raise UsageError(f"{path} already exists and would be overwritten", remedy)


def refuse_existing(file: Path, force: bool, example: str) -> None:
    """Raises UsageError if the output `file` exists and `force` is false, or is a directory.

    example: file name that the remedy proposes inside the directory.
    """
    if file.is_dir():
        raise UsageError(f"{file} is a directory", f"name the file, for example {file / example}")
    refuse_overwrite(file, force)


def refuse_input(file: Path, read: Path | None, field: str) -> None:
    """Raises UsageError if the output `file` is the input `read`, also through a link.

    field: name of the option for the output.
    """
    if read and os.path.realpath(file) == os.path.realpath(read):
        raise UsageError(
            f"{file} is also read, and would be overwritten", f"choose another `{field}`"
        )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def peak_rss() -> int:
    """Peak memory of this process (resident set) so far, in bytes."""
    # not ru_maxrss, which includes the parent process on Linux
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return 1024 * peak_kib


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that decide results, by name."""
    # imported here, because the import takes as long as a command without torch
    from importlib import metadata

    installed = {"python": platform.python_version()}
    for name in VERSIONED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def next_command(*words: object) -> str:
    """Returns the line with the next command, which is the last line of an output.

    words: arguments of `trtspec`, which are quoted for a shell.
    """
    return f"next: trtspec {shlex.join(map(str, words))}"


def now() -> str:
    """Current UTC time as ISO 8601 text, in seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def provenance(
    command: str, source: Mapping[str, Any], options: Mapping[str, Any], **more: Any
) -> Any:
    """Returns the content of provenance.json, which is written beside a command's output.

    source: identity of the input.
    more: further entries of the file.
    """
    # without a time, so that a resumed run writes the same bytes as an uninterrupted run
    return {
        "command": command,
        "source": source,
        "options": options,
        "versions": versions(),
        **more,
    }


def print_json(value: Any) -> None:
    """Prints the JSON object of `--json` on stdout, with unprintable characters as escapes."""
    escaped = UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json_text(value))
    sys.stdout.write(escaped)
    running.get().answered = True


def wanted() -> bool:
    """Whether progress and messages are shown.

    They are shown on a terminal or with TRTSPEC_PROGRESS=1, but not with -q.
    """
    enabled = sys.stderr.isatty() or os.environ.get("TRTSPEC_PROGRESS") == "1"
    return enabled and not quiet()


def quiet() -> bool:
    """Whether -q was given to this command or to the command that started this process."""
    return os.environ.get("TRTSPEC_QUIET") == "1"


def say(text: str) -> None:
    """Writes a message to stderr on a terminal or with TRTSPEC_PROGRESS=1, but not with -q."""
    if wanted():
        write_stderr(printable(text) + "\n")


def announce(text: str) -> None:
    """Writes a message to stderr, also without a terminal, but not with -q.

    For messages that belong in a log, such as that a server is ready.
    """
    if not quiet():
        write_stderr(printable(text) + "\n")


def note(text: str) -> None:
    """Writes a note about options to stderr, also without a terminal, but not with -q."""
    announce(f"note: {text}")


def write_stderr(text: str) -> None:
    """Writes text to stderr. Does not raise if stderr is a broken pipe, a full disk or closed."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        # a log that cannot be written must not end a server or change the exit status
        drop_unwritten(sys.stderr)


@functools.cache  # once for each stream
def drop_unwritten(stream: Any) -> None:
    """Discards the unwritten text of a stream at the end of the process.

    Python flushes its streams at the end. A failed flush would change the exit status to 120.
    """

    @atexit.register
    def to_devnull() -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream may be closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@dataclass(frozen=True, repr=False)
class Result:
    """Result of a command. From Python, `result["key"]` is a value.

    values: entries of the JSON object of `--json`, without `ok`, `problems` and `error`.
    problems: findings in the input.
    tables: tables for people.
    lines: lines for people, below the tables.
    text: file that the command prints on stdout instead of tables and lines, with the problems on
        stderr. Empty if the command wrote the file. None for other commands.
    messages: messages for stderr.
    failure: error that is raised after everything is printed.
    """

    values: Mapping[str, Any]
    problems: Sequence[Problem] = ()
    tables: Sequence[Table] = ()
    lines: Sequence[str] = ()
    failure: TrtspecError | None = None
    text: str | None = None
    messages: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", [printable(line) for line in self.lines])

    @property
    def ok(self) -> bool:
        """Whether the command succeeded and found no errors in its input."""
        return self.failure is None and not has_errors(self.problems)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object of `--json`."""
        envelope = {
            "ok": self.ok,
            "problems": [problem.to_dict() for problem in self.problems],
            **self.values,
        }
        if self.failure:
            envelope["error"] = self.failure.to_dict()
        return envelope

    def __repr__(self) -> str:
        keys = ", ".join(self.values)
        return f"Result(ok={self.ok}, {len(self.problems)} problems; keys: {keys})"


def print_result(result: Result, as_json: bool) -> None:
    """Prints a command's result: one JSON object, or the text, or tables, lines and problems.

    Raises the result's failure after printing.
    """
    problems = problem_lines(result.problems)
    if as_json:
        print_json(result.to_dict())
    elif result.text is not None:
        sys.stdout.write(result.text)
        write_stderr("".join(f"{line}\n" for line in problems))
    else:
        print_tables(result.tables, [*result.lines, *problems])
    for message in result.messages:
        say(message)
    if result.failure is not None:
        raise result.failure


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """Returns the problems as wrapped lines, errors first.

    A problem has the line `SEVERITY CODE LOCATION: MESSAGE`, and a line with the remedy if any.
    """
    lines = []
    for problem in sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity)):
        location = problem.location(problem.line, problem.column)
        lines.append(f"{problem.severity:7} {problem.code} {location}: {problem.message}")
        if problem.remedy:
            lines.append(f"        -> {problem.remedy}")
    # indented, so that a line break in a message cannot imitate the line of another problem
    return [wrapped(line, 8 * " ") for line in lines]


def wrapped(text: str, indent: str) -> str:
    """Returns text wrapped to COLUMNS or the width of the terminal.

    Indents every line except the first by `indent`. Breaks no word and no command in backticks. In
    a pipe or a log, lines are not wrapped.
    """
    default_width = 80 if sys.stderr.isatty() else sys.maxsize
    width = shutil.get_terminal_size((default_width, 0)).columns
    # NUL replaces a blank at which `fill` must not break; as_typed has escaped every other NUL
    unbroken = re.sub("`[^`\n]+`", lambda command: command[0].replace(" ", "\0"), text)
    lines = [
        textwrap.fill(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for line in unbroken.split("\n")
    ]
    return f"\n{indent}".join(lines).replace("\0", " ")


@dataclass(frozen=True)
class Table:
    """Table with a title.

    columns: headings. Empty for a table of names and values.
    rows: printable text of the cells.
    note: meaning of the figures, shown below the table.
    text_columns: indices of the columns that are aligned left. Other columns are aligned right.
    ruled: whether the table has lines between its columns.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: frozenset[int] = field(default=frozenset({0}))
    ruled: bool = True

    def __post_init__(self) -> None:
        cells = [[printable(cell) for cell in row] for row in self.rows]
        object.__setattr__(self, "title", printable(self.title))
        object.__setattr__(self, "rows", cells)


def value_table(values: Mapping[str, Any], title: str = "") -> Table:
    """Returns a table with the name and the text of each value that is not None."""
    rows = [
        (name.replace("_", " "), _cell_text(value))
        for name, value in values.items()
        if value is not None
    ]
    return Table(title, (), rows, text_columns=frozenset({0, 1}), ruled=False)


def _cell_text(value: Any) -> str:
    """Returns the text of a JSON value in a table. A list shows at most MOST_ITEMS items."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        items = [f"{name} {_cell_text(item)}" for name, item in value.items() if item is not None]
        return ", ".join(items) or "none"
    if isinstance(value, list | tuple):
        items = [_cell_text(item) for item in value[:MOST_ITEMS]]
        if len(value) > MOST_ITEMS:
            items.append(f"and {len(value) - MOST_ITEMS} more")
        return ", ".join(items) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def print_tables(tables: Sequence[Table], lines: Sequence[str] = ()) -> None:
    """Prints tables on stdout, then `lines` without wrapping, so that users can copy commands.

    On a terminal, the severity at the beginning of a line has a colour.
    """
    for table in tables:
        _print_table(table)
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in lines:
        word, _, rest = line.partition(" ")
        colour = COLOURS.get(word)
        if coloured and colour:
            line = f"\033[{colour}m{word}\033[0m {rest}"
        sys.stdout.write(f"{line}\n")


def _print_table(table: Table) -> None:
    """Prints a table on stdout, as wide as the terminal, or 160 columns without a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    drawn = RichTable(
        title=table.title,
        caption=table.note or None,
        title_justify="left",
        caption_justify="left",
        show_header=bool(table.columns),
        box=box.HEAVY_HEAD if table.ruled else None,
        pad_edge=table.ruled,
    )
    for index in range(max(map(len, [table.columns, *table.rows]), default=0)):
        heading = table.columns[index] if table.columns else ""
        cells = [row[index] for row in table.rows if index < len(row)]
        # wide enough for every cell and for every word of the heading, which may wrap
        width = max(map(len, [*cells, *heading.split()]), default=0)
        justify: Literal["left", "right"] = "right"
        if index in table.text_columns:
            justify = "left"
            width = min(width, SHORTEST_TEXT)
        drawn.add_column(heading, justify=justify, min_width=width, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    # not cropped, because a terminal wraps wide lines and cropping would lose text
    console.print(drawn, crop=False)


class ProgressBar:
    """Progress of a running command, on stderr.

    update: function that changes the displayed bar. By default no bar is displayed.
    """

    def __init__(self, update: Callable[..., None] = lambda **_: None) -> None:
        self.update = update

    def advance(self, amount: float, note: str = "") -> None:
        """Adds `amount` to the progress, and shows `note` on a line below the bar."""
        self.update(advance=amount, note=printable(note))

    def show(self, done: float, total: float) -> None:
        """Sets the progress to `done` of `total`, in the unit of the bar."""
        self.update(completed=done, total=total)

    def say(self, text: str) -> None:
        """Writes a message above the bar, if messages are shown."""
        say(text)


@contextlib.contextmanager
def progress_bar(title: str, total: float | None = None, unit: str = "") -> Iterator[ProgressBar]:
    """Displays a progress bar on stderr while the block runs, if progress is shown.

    total: amount of work. None if `ProgressBar.show` sets the amount later.
    unit: unit of `total`, such as "layers". Bytes if empty.
    """
    if not wanted():
        yield ProgressBar()
        return
    from rich import progress as rich
    from rich.console import Console, RenderableType
    from rich.text import Text

    class ProgressWithNote(rich.Progress):
        """Progress bars with the note of each task on a line below."""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            for note in (task.fields["note"] for task in self.tasks if task.fields["note"]):
                yield Text(f"  {note}", no_wrap=True, overflow="ellipsis")

    counts = (rich.MofNCompleteColumn(), rich.TextColumn(unit))
    amount = counts if unit else (rich.DownloadColumn(), rich.TransferSpeedColumn())
    times = (rich.TimeElapsedColumn(), rich.TextColumn("eta"), rich.TimeRemainingColumn())
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(bar_width=16), *amount, *times)
    with ProgressWithNote(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task(title, total=total, note="")
        yield ProgressBar(functools.partial(progress.update, task))
