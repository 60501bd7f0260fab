"""The `trtspec` command: lists every subcommand, and turns errors into one message and an exit status."""

from __future__ import annotations

import os
import sys
import typing
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from trtspec.errors import TrtspecError
from trtspec.records import click_command, note, unknown_variables, variable

COMMANDS = {
    "Start here": {
        "demo": "Run the whole chain on a small Kimi on this CPU and write a report.",
        "doctor": "Say what is installed, what each command lacks, and what this machine has.",
        "inspect": "Say what a target or head checkpoint is and what is wrong with it.",
    },
    "Target": {
        "quantize": "Turn a BF16, FP8 or INT4 Kimi into NVFP4, shard by shard.",
        "calibrate": "Measure activation scales, one decoder layer in memory at a time.",
    },
    "Draft head": {
        "synthesize": "Let the target answer prompts, as training data for a head.",
        "train": "Train an Eagle3 head with ModelOpt on the target's own answers.",
        "convert": "Rewrite a head from one project's layout to another's.",
    },
    "Endpoint": {
        "plan": "Say whether it fits, how fast it runs, and with which sizes.",
        "build-config": "Write the engine YAML for exactly one TensorRT-LLM version.",
        "lint": "Find every problem of an engine YAML, each with its remedy.",
        "serve": "Check everything, then serve with TensorRT-LLM or the reference backend.",
    },
    "Proof": {
        "bench": "Measure acceptance by category, throughput and latency of an endpoint.",
        "check": "Judge an endpoint: lossless, sane, tool calls alive, acceptance high enough?",
    },
}
# which extra brings an optional package
EXTRAS = {
    "torch": "reference", "transformers": "reference", "fastapi": "reference", "uvicorn": "reference",
    "prometheus_client": "reference", "modelopt": "modelopt", "accelerate": "modelopt", "datasets": "modelopt",
    "requests": "modelopt", "matplotlib": "report",
}  # fmt: skip
TITLES = {1: "Error", 2: "Usage error", 3: "Check failed", 4: "Missing", 130: "Interrupted"}


class LazyCommand(TyperCommand):
    """Listed by its summary; trtspec/cli/<name>.py is imported when the command is called, not for `--help`."""

    def load(self) -> TyperCommand:
        """The command itself: the function called like its module."""
        module = str(self.name).replace("-", "_")
        function = getattr(import_module(f"trtspec.cli.{module}"), module)
        epilog = f"Options can also be set as {variable(module, '')}<OPTION>."
        hints = typing.get_type_hints(function)
        if "options" in hints:
            return click_command(str(self.name), hints["options"], function, epilog=epilog)
        variables = f"TRTSPEC_{module.upper()}"  # TRTSPEC_SERVE_PORT=8001 is `serve --port 8001`
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(self.name, epilog=epilog, context_settings={"auto_envvar_prefix": variables})(function)
        command = typer.main.get_command(single)
        for parameter in command.params:
            parameter.show_envvar = False  # type: ignore[attr-defined]  # the epilog says it once
        return command  # type: ignore[return-value]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command = self.load()
        for name in unknown_variables(command, os.environ) if all(p.envvar for p in _options(command)) else ():
            note(f"{name} is set, and trtspec {self.name} has no such option")
        return command.make_context(info_name, args, parent, **extra)


def _options(command: TyperCommand) -> list[Any]:
    return [item for item in command.params if item.param_type_name == "option" and item.name != "help"]


class Commands(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for panel, summaries in COMMANDS.items():
            for name, summary in summaries.items():
                self.add_command(LazyCommand(name, help=summary, callback=None, rich_help_panel=panel))


app = typer.Typer(
    name="trtspec",
    cls=Commands,
    help="Takes Kimi-K2 models to production on TensorRT-LLM with Eagle3 heads, and proves each step.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)


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
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            _fail(f"this command needs {package}", f'pip install "trtspec[{EXTRAS[package]}]"', 4)
        _fail(f"the module {error.name} is missing", "install trtspec again, with -c constraints.txt", 1)
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
