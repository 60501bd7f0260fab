"""Output of commands: atomic files, provenance.json, JSON and tables on stdout.

Messages and the progress bar go to stderr.
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

SHORTEST_TEXT = 12  # characters to which a column of text may be folded
# by the first word of a line
COLOURS = {"error": "1;31", "warning": "1;33", "info": "1;36", "fixed": "1;32"}
MOST_ITEMS = 8  # of a list on one line
CREATE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW  # a link is refused
PRIVATE = 0o600  # mode of files that may hold secrets
VERSIONED_PACKAGES = ("trtspec", "torch", "transformers", "nvidia-modelopt", "safetensors")


def write_atomic(path: Path, data: bytes | str) -> None:
    """Writes to a temporary name beside `path`, fsyncs, renames.

    A reader sees the old file or the whole new one. An existing file keeps its permissions.
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
    """Raises TrtspecError that names `path` if the file system fails while the block runs."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        first = "free space on that disk" if full else "check that disk and its permissions"
        message = f"cannot write {path}: {error.strerror or error}"
        remedy = f"{first}, then run the command again"
        if isinstance(error, NotADirectoryError | FileExistsError):
            remedy = "choose another path: a part of this one is a file"
        raise TrtspecError(message, remedy, "TS-ERROR-FILE") from error


def create(path: Path) -> BinaryIO:
    """Opens an empty file for writing and reading. Raises TrtspecError if `path` is a link."""
    with writing(path):
        return os.fdopen(os.open(path, CREATE, 0o644), "w+b")


def remove_file(directory: Path, name: PlainName) -> None:
    """Removes a file or a link of a claimed directory, never what a link points to.

    Raises TrtspecError if `name` is a directory.
    """
    with writing(directory / name):
        (directory / name).unlink(missing_ok=True)


def remove_folder(directory: Path, name: PlainName) -> None:
    """Removes a folder that the command made in a directory that it claimed. Follows no link."""
    path = directory / name
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def fsync(path: Path) -> None:
    """Makes the bytes of a file, or the renames in a directory, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_text(value: Any) -> str:
    """JSON as this program writes it, in files and on stdout."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json_text(value))


@dataclass(frozen=True)
class OutputOptions:
    """How to treat existing output: only look, start from scratch, or replace a user's file."""

    dry_run: bool = False
    restart: bool = False
    force: bool = False


def refuse_overwrite(
    path: Path, force: bool, remedy: str = "pass `force`, or choose another `output`"
) -> None:
    """Raises UsageError when `path` holds something the user made and `--force` was not given."""
    if not force and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        raise UsageError(f"{path} already exists and would be overwritten", remedy)


def refuse_existing(file: Path, force: bool, example: str) -> None:
    """Does as `refuse_overwrite`, for an output that is one file. Refuses a directory, too."""
    if file.is_dir():
        raise UsageError(f"{file} is a directory", f"name the file, for example {file / example}")
    refuse_overwrite(file, force)


def refuse_input(file: Path, read: Path | None, field: str) -> None:
    """Raises UsageError if a command would write the file that it reads. `field`: the output's."""
    if read and os.path.realpath(file) == os.path.realpath(read):
        raise UsageError(
            f"{file} is also read, and would be overwritten", f"choose another `{field}`"
        )


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def peak_rss() -> int:
    """The largest resident set of this process so far, in bytes.

    Not ru_maxrss, which includes the parent process on Linux.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide results, without importing them."""
    # here, because the import takes as long as a torch-free command
    from importlib import metadata

    installed = {"python": platform.python_version()}
    for name in VERSIONED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def next_command(*words: object) -> str:
    """The last line of a command that another one follows."""
    return f"next: trtspec {shlex.join(map(str, words))}"


def now() -> str:
    """The time in UTC, as results name it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def provenance(
    command: str, source: Mapping[str, Any], options: Mapping[str, Any], **more: Any
) -> Any:
    """The record written as provenance.json beside everything a command makes.

    It has no time: a run that was killed and resumed leaves the same bytes as one that was not.
    """
    return {
        "command": command,
        "source": source,
        "options": options,
        "versions": versions(),
        **more,
    }


def print_json(value: Any) -> None:
    """Prints the one object of `--json` on stdout. Nothing else goes there."""
    shown = UNPRINTABLE.sub(lambda mark: f"\\u{ord(mark[0]):04x}", json_text(value))
    sys.stdout.write(shown)
    running.get().answered = True


def wanted() -> bool:
    """Whether progress and messages are shown: to a person, or with TRTSPEC_PROGRESS=1.

    Never with -q.
    """
    asked = sys.stderr.isatty() or os.environ.get("TRTSPEC_PROGRESS") == "1"
    return asked and not quiet()


def quiet() -> bool:
    """Whether -q was given, here or to the process that started this one."""
    return os.environ.get("TRTSPEC_QUIET") == "1"


def say(text: str) -> None:
    """Writes a message to stderr, if messages are wanted."""
    if wanted():
        write_stderr(printable(text) + "\n")


def announce(text: str) -> None:
    """Writes a message that a log must show too, such as that a server is ready. Not with -q."""
    if not quiet():
        write_stderr(printable(text) + "\n")


def note(text: str) -> None:
    """Writes a note about the options that a log must show too. Not with -q."""
    announce(f"note: {text}")


def write_stderr(text: str) -> None:
    """Writes to stderr, and never raises.

    A log whose reader has gone or whose disk is full does not end a server or change its status.
    """
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        drop_unwritten(sys.stderr)


@functools.cache  # once for each stream
def drop_unwritten(stream: Any) -> None:
    """Sends the rest of a stream to nowhere when Python ends.

    Python flushes its streams then, and a failure there would replace the exit status by 120.
    """

    @atexit.register
    def to_nowhere() -> None:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a command. From Python, `result["key"]` is a value.

    values: the keys of `--json` beside `ok`, `problems` and `error`.
    tables, lines: the same for people.
    text: a file for stdout, empty if it was written. Then problems go to stderr.
    messages: go to stderr.
    failure: raised after everything was printed.
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
        return self.failure is None and not has_errors(self.problems)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def to_dict(self) -> dict[str, Any]:
        """The one envelope of `--json`."""
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
    """Prints one JSON object, or tables, lines and problems. Then raises the failure, if any."""
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
    """Readable lines, errors first: `error CODE where: message` and the remedy below."""
    lines = []
    for problem in sorted(problems, key=lambda problem: SEVERITIES.index(problem.severity)):
        where = problem.location(problem.line, problem.column)
        lines.append(f"{problem.severity:7} {problem.code} {where}: {problem.message}")
        if problem.remedy:
            lines.append(f"        -> {problem.remedy}")
    return [wrapped(line, 8 * " ") for line in lines]  # no text begins a line of its own


def wrapped(text: str, indent: str) -> str:
    """Lines as wide as COLUMNS or the terminal, the second and later ones indented.

    No word is cut, nor a command in backticks. In a pipe or a log each line of the text stays
    whole.
    """
    default_width = 80 if sys.stderr.isatty() else sys.maxsize
    width = shutil.get_terminal_size((default_width, 0)).columns
    kept = re.sub("`[^`\n]+`", lambda command: command[0].replace(" ", "\0"), text)
    lines = [
        textwrap.fill(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for line in kept.split("\n")
    ]
    return f"\n{indent}".join(lines).replace("\0", " ")


@dataclass(frozen=True)
class Table:
    """A titled table. Without `columns` it lists names and values.

    note: the meaning of the figures.
    text_columns: indices of the columns that are set to the left. Others are set to the right.
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
    """A table with name and text of each value of `--json` that is not None."""
    rows = [
        (name.replace("_", " "), _plain(value))
        for name, value in values.items()
        if value is not None
    ]
    return Table(title, (), rows, text_columns=frozenset({0, 1}), ruled=False)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        items = [f"{name} {_plain(item)}" for name, item in value.items() if item is not None]
        return ", ".join(items) or "none"
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value[:MOST_ITEMS]]
        if len(value) > MOST_ITEMS:
            items.append(f"and {len(value) - MOST_ITEMS} more")
        return ", ".join(items) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def print_tables(tables: Sequence[Table], lines: Sequence[str] = ()) -> None:
    """Prints to stdout, as wide as the terminal, or 160 columns without one.

    The lines below the tables are not broken, so that a command can be copied.
    """
    for table in tables:
        _draw(table)
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in lines:
        word, _, rest = line.partition(" ")
        colour = COLOURS.get(word)
        if coloured and colour:
            line = f"\033[{colour}m{word}\033[0m {rest}"
        sys.stdout.write(f"{line}\n")


def _draw(table: Table) -> None:
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
        # Each cell is shown whole, and headings wrap.
        width = max(map(len, [*cells, *heading.split()]), default=0)
        justify: Literal["left", "right"] = "right"
        if index in table.text_columns:
            justify = "left"
            width = min(width, SHORTEST_TEXT)
        drawn.add_column(heading, justify=justify, min_width=width, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    # Without the crop, the terminal wraps lines that are too wide, and nothing is lost.
    console.print(drawn, crop=False)


class ProgressBar:
    """Shows the progress of a running command. Without `update` it shows only messages."""

    def __init__(self, update: Callable[..., None] = lambda **_: None) -> None:
        self.update = update

    def advance(self, amount: float, note: str = "") -> None:
        """Adds `amount`. The note has a line of its own, so that both fit 80 columns."""
        self.update(advance=amount, note=printable(note))

    def show(self, done: float, total: float) -> None:
        """Shows that `done` of `total` is done."""
        self.update(completed=done, total=total)

    def say(self, text: str) -> None:
        """Writes a line above the bar, which rich keeps below all other lines of stderr."""
        say(text)


@contextlib.contextmanager
def progress_bar(title: str, total: float | None = None, unit: str = "") -> Iterator[ProgressBar]:
    """Shows a bar of `total` in `unit`, or in bytes without a unit, while the block runs.

    `total` None: `show` gives it.
    """
    if not wanted():
        yield ProgressBar()
        return
    from rich import progress as rich
    from rich.console import Console, RenderableType
    from rich.text import Text

    class Noted(rich.Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            for note in (task.fields["note"] for task in self.tasks if task.fields["note"]):
                yield Text(f"  {note}", no_wrap=True, overflow="ellipsis")

    counts = (rich.MofNCompleteColumn(), rich.TextColumn(unit))
    amount = counts if unit else (rich.DownloadColumn(), rich.TransferSpeedColumn())
    times = (rich.TimeElapsedColumn(), rich.TextColumn("eta"), rich.TimeRemainingColumn())
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(bar_width=16), *amount, *times)
    with Noted(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task(title, total=total, note="")
        yield ProgressBar(functools.partial(progress.update, task))
