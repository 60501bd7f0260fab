"""The `trtspec` command: registers every subcommand and turns errors into one message and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from trtspec.errors import MissingDependency, TrtspecError


class Command(TyperCommand):
    """Every option also comes from a variable, TRTSPEC_SERVE_PORT for `serve --port`; one line of help says so."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        name = str(options.get("name") or "").replace("-", "_").upper()
        options["context_settings"] = {"auto_envvar_prefix": f"TRTSPEC_{name}", **(options["context_settings"] or {})}
        options["epilog"] = f"Options can also be set as TRTSPEC_{name}_<OPTION>."
        super().__init__(*arguments, **options)
        for parameter in self.params:
            parameter.show_envvar = False  # type: ignore[attr-defined]


app = typer.Typer(
    name="trtspec",
    help="Takes Kimi-K2 models to production on TensorRT-LLM with Eagle3 heads, and proves each step.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)


def _command(name: str) -> Callable[..., Any]:
    module = name.replace("-", "_")
    try:
        return getattr(import_module(f"trtspec.cli.{module}"), module)
    except (ModuleNotFoundError, AttributeError):

        def missing() -> None:
            """Not here yet."""
            raise MissingDependency(f"`trtspec {name}` is not here yet")

        return missing


TITLES = {1: "Error", 2: "Usage error", 3: "Check failed", 4: "Missing", 130: "Interrupted"}
NOT_BUILT = ("calibrate", "convert", "plan")
PANELS = {
    "Start here": ("demo", "doctor", "inspect"),
    "Target": ("quantize", "calibrate"),
    "Draft head": ("synthesize", "train", "convert"),
    "Endpoint": ("plan", "build-config", "lint", "serve"),
    "Proof": ("bench", "check"),
}
for panel, names in PANELS.items():
    for name in names:
        passing = {"allow_extra_args": True, "ignore_unknown_options": True} if name in NOT_BUILT else None
        app.command(name, cls=Command, rich_help_panel=panel, context_settings=passing)(_command(name))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"trtspec {metadata.version('trtspec')}")
        raise typer.Exit()


@app.callback()
def root(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no talk on stderr.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if quiet:
        os.environ["TRTSPEC_QUIET"] = "1"  # read by report.say, also in the processes that a command starts


def main() -> None:
    """Entry point. TrtspecError -> its message and exit status; an interrupt -> 130; anything else -> 1."""
    try:
        app(prog_name="trtspec")
    except TrtspecError as error:
        _fail(error.message, error.remedy, error.exit_code)
    except KeyboardInterrupt:
        _fail("stopped by Ctrl-C", "", 130)
    except Exception as error:  # the last resort: a user never sees a traceback unasked
        reason = f"unexpected {type(error).__name__}: {error}"
        _fail(reason, "set TRTSPEC_DEBUG=1 for the traceback, and report it as a bug", 1)


def _fail(message: str, remedy: str, status: int) -> None:
    title = TITLES.get(status, "Error")
    if os.environ.get("TRTSPEC_DEBUG") == "1":
        import traceback

        traceback.print_exc()
    body = f"{message}\n-> {remedy}" if remedy else message
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.panel import Panel
        from rich.text import Text

        Console(stderr=True).print(Panel(Text(body), title=title, title_align="left", border_style="red"))
    else:  # logs and pipes: no frame, so that paths are never wrapped
        sys.stderr.write(f"{title}: {body}\n")
    sys.exit(status)
