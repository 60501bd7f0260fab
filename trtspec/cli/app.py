"""Runs the `trtspec` command.

Lists every subcommand, and turns an error into one message and an exit status.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib import import_module
from itertools import takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import trtspec
from trtspec import report
from trtspec.cli.mistyped import usage_error
from trtspec.errors import Interrupted, MissingDependency, RunningCommand, TrtspecError, running
from trtspec.records import (
    CLICK_ERROR,
    PlainHelp,
    click_command,
    ready,
    record_of,
    unknown_variables,
    variable,
)

# new objects before Python searches for reference cycles; the headers of a checkpoint are a million
# objects without cycles
YOUNG_OBJECTS = 200_000
# the summary of each command, by section of the help page
COMMANDS = {
    "Start here": {
        "demo": "Run the whole workflow on a small Kimi model on this CPU and write a report.",
        "doctor": "Report what is installed, what each command needs, and what this machine has.",
        "inspect": "Report what a target or head checkpoint is and what is wrong with it.",
        "explain": "Say what a problem code means and what to do about it.",
    },
    "Target": {
        "quantize": "Convert a BF16, FP8 or INT4 Kimi checkpoint to NVFP4, shard by shard.",
        "calibrate": "Measure activation scales, one decoder layer in memory at a time.",
    },
    "Draft head": {
        "synthesize": "Generate training data for a head from the target's own answers.",
        "train": "Train an Eagle3 head with ModelOpt on the target's own answers.",
        "convert": "Rewrite a head from one project's layout to another's.",
    },
    "Endpoint": {
        "plan": "Show whether a target fits, how fast it runs, and which settings to use.",
        "build-config": "Write the engine YAML for exactly one TensorRT-LLM version.",
        "lint": "Find every problem in an engine YAML, with its line and remedy.",
        "serve": "Run all checks, then serve with TensorRT-LLM, vLLM or the reference backend.",
    },
    "Proof": {
        "bench": "Measure acceptance, throughput and latency of an endpoint.",
        "check": "Check an endpoint: the same output as without speculation, "
        "at the wanted acceptance.",
        "prove": "Prove a target and its head on your own GPUs.",
        "watch": "Read acceptance of a live endpoint, as a Prometheus metric or as one verdict.",
    },
}
# first words of an error message, by exit status
TITLES = {1: "Error", 2: "Usage error", 3: "Check failed", 4: "Missing", 130: "Interrupted"}


class LazyCommand(TyperCommand):
    """Command that imports its module trtspec/cli/<name>.py only when the command is called.

    `trtspec --help` shows the command's summary without importing the module.
    """

    def load(self) -> TyperCommand:
        """Imports and returns the click command. Its callback prints the command's `Result`."""
        name = str(self.name).replace("-", "_")
        # the function has the name of its module
        function = getattr(import_module(f"trtspec.cli.{name}"), name)

        def run(options: Any) -> None:
            result = function(ready(options))
            if result is not None:  # some commands print by themselves, such as `serve`
                report.print_result(result, options.json_)

        run.__doc__ = function.__doc__
        return click_command(str(self.name), record_of(function), run)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Parses the arguments with the imported command.

        Writes a note for each environment variable with the command's prefix that no option reads.
        """
        command = self.load()
        for message in unknown_variables(command, os.environ):
            report.note(message)
        return command.make_context(info_name, args, parent, **extra)


class Commands(PlainHelp, TyperGroup):
    """Group of all subcommands. A subcommand is imported when it is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for panel, summaries in COMMANDS.items():
            for name, summary in summaries.items():
                self.add_command(
                    LazyCommand(name, help=summary, callback=None, rich_help_panel=panel)
                )


app = typer.Typer(
    name="trtspec",
    cls=Commands,
    help="Takes Kimi-K2 models to production on TensorRT-LLM with Eagle3 heads, "
    "and proves each step.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)


def _print_version(wanted: bool) -> None:
    """Prints the version and exits, if --version was given."""
    if wanted:
        print(f"trtspec {trtspec.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Suppress progress bars and messages on stderr.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    # without a docstring, which typer would show on the help page instead of `help`
    if quiet:
        # read by report.quiet, also in the processes that a command starts
        os.environ["TRTSPEC_QUIET"] = "1"


def main() -> None:
    """Runs the command line, and ends the process with the exit status.

    Turns every failure into a TrtspecError, writes its message to stderr, and exits with its
    status. With `--json`, prints an object with `ok` (false) and `error` on stdout, unless the
    command has already printed its own object.
    """
    running.set(RunningCommand())
    gc.set_threshold(YOUNG_OBJECTS)
    if os.getpid() == 1:
        # process 1 of a container ignores every signal for which it has no handler
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda caught, _: sys.exit(128 + caught))
    _open_missing_streams()
    try:
        status = app(prog_name="trtspec", standalone_mode=False)
    except TrtspecError as error:
        _fail(error)
    except CLICK_ERROR as error:
        # `trtspec` without a command: the message is the help page
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        _fail(usage_error(error))
    except ModuleNotFoundError as error:
        _fail(_missing_module(error.name or ""))
    except (KeyboardInterrupt, typer.Abort):
        _fail(Interrupted("stopped by Ctrl-C"))
    except (MemoryError, ImportError, OSError) as error:
        _fail(_system_failure(error))
    except Exception as error:  # users see tracebacks only with TRTSPEC_DEBUG=1
        reason = f"unexpected {type(error).__name__}: {error}"
        remedy = "set TRTSPEC_DEBUG=1 for the traceback, and report it as a bug"
        _fail(TrtspecError(reason, remedy, "TS-ERROR-UNEXPECTED"))
    if status == Interrupted.exit_code:  # click caught the Ctrl-C
        _print_json_failure(Interrupted("stopped by Ctrl-C"))
    if not isinstance(status, int):  # the return value of a command that succeeded
        status = 0
    sys.exit(status)


def _open_missing_streams() -> None:
    """Opens os.devnull for each standard stream that the caller closed.

    Otherwise a file or pipe that is opened later would get the file descriptor of the stream.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # `open` gets the lowest free file descriptor, which is `number`
            stream = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _missing_module(module: str) -> TrtspecError:
    """Returns the error for a missing module. Its remedy installs the smallest extra with it.

    If no extra has the module, the remedy installs trtspec again.
    """
    from trtspec.verbs.doctor import package_state

    package = module.partition(".")[0].replace("_", "-")
    extras, _ = package_state()
    by_size = sorted(filter(None, extras), key=lambda name: len(extras[name]))
    for extra in by_size:
        # the package of a module may have a prefix, such as nvidia-modelopt
        if any(name.endswith(package) for name in extras[extra]):
            remedy = f'pip install "trtspec[{extra}]"'
            return MissingDependency(f"this command needs {package}", remedy)
    return TrtspecError(
        f"the module {module} is missing", "install trtspec again, with -c constraints.txt"
    )


def _system_failure(error: Exception) -> TrtspecError:
    """Returns the error for a MemoryError, ImportError or OSError, with a remedy."""
    if isinstance(error, MemoryError):
        message = f"not enough memory: this process held {report.peak_rss():,} bytes"
        return TrtspecError(message, "free memory, or raise the limit of the job (`ulimit -v`)")
    if isinstance(error, ImportError):
        remedy = (
            "raise the memory limit of the job, or install trtspec again, with -c constraints.txt"
        )
        return TrtspecError(f"{error.name or 'a module'} cannot be loaded: {error}", remedy)
    path = getattr(error, "filename", None) or "a file or a connection"
    reason = getattr(error, "strerror", None) or str(error)
    remedy = "check that it is there, its disk and its permissions"
    return TrtspecError(f"cannot use {path}: {reason}", remedy, "TS-ERROR-FILE")


def _fail(error: TrtspecError) -> None:
    """Writes the message and the remedy to stderr, and exits with the status of the error.

    With TRTSPEC_DEBUG=1, also writes the traceback. With `--json`, also prints the error's object.
    """
    if os.environ.get("TRTSPEC_DEBUG") == "1":
        import traceback

        traceback.print_exc()
    _print_json_failure(error)
    message = f"{TITLES.get(error.exit_code, 'Error')}: {error.message}"
    remedy = ""
    if error.remedy:
        remedy = report.wrapped(f"-> {error.remedy}", "   ") + "\n"
    report.write_stderr(f"{report.wrapped(message, '')}\n{remedy}")
    sys.exit(error.exit_code)


def _print_json_failure(error: TrtspecError) -> None:
    """Prints the JSON object of a failure, if --json is set and no object is printed yet."""
    if _wants_json(sys.argv[1:]) and not running.get().answered:
        try:
            report.print_json(report.Result({}, failure=error).to_dict())
            sys.stdout.flush()
        except OSError:
            # the reader of stdout is gone; the exit status still reports the failure
            report.drop_unwritten(sys.stdout)


def _wants_json(arguments: list[str]) -> bool:
    """Whether a command line, or the environment variable of the command, sets --json.

    The command line may be invalid, so the words are compared and not parsed.
    """
    # the words after `--` are options of an engine
    own_arguments = list(takewhile("--".__ne__, arguments))
    command = next((word for word in own_arguments if not word.startswith("-")), "")
    value = os.environ.get(variable(command.replace("_", "-"), "--json"), "")
    # the texts that click accepts for true
    return "--json" in own_arguments or value.lower() in ("1", "true", "t", "yes", "y", "on")
