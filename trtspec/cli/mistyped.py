"""Words of a command that Typer refuses: what is wrong with them, and the next command."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from trtspec.data_files import load_yaml
from trtspec.errors import UsageError, did_you_mean, nearest
from trtspec.records import plain_reason, set_by, spellings

# what a second argument is meant as, and what its value begins with
SECOND = {"--head": "", "--against": "", "--against-url": "plain=", "--output": ""}


def usage_error(error: Any) -> UsageError:
    """Typer's complaint. A value that came from a variable is called by the variable's name."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    message = re.sub(
        r" \(Possible options.*|\. Did you mean.*", "", error.format_message().rstrip(".")
    )
    if context is None:  # of an option without its value
        return UsageError(message, f"see `trtspec {' '.join(sys.argv[1:2])} --help`")
    page, command = f"see `{context.command_path} --help`", context.command
    if hasattr(error, "possibilities"):
        return UsageError(message, _meant_option(error.option_name, context) or page)
    if unknown := re.match("No such command '(.+)'", message):
        commands = [*command.commands]
        near = nearest(unknown[1], commands, "commands")
        return UsageError(message, f"did you mean `trtspec {near}`?" if near else page)
    if extra := re.match(r"Got unexpected extra .* \((.+)\)", message):
        message = f"`{context.command_path}` takes no further argument: {extra[1]}"
        return UsageError(message, _meant_argument(extra[1].split(), command) or page)
    if message.startswith("Missing") and (examples := load_yaml("examples.yaml").get(command.name)):
        return UsageError(message, f"for example `{examples[0]}`")
    return (
        UsageError(message, page)
        if parameter is None
        else _wrong_value(message, context, parameter, page)
    )


def _meant_option(option: str, context: Any) -> str:
    """The remedy for an option that the command does not have; "" if nothing is known of it."""
    command = context.command
    own = spellings(command)
    if context.parent and option in spellings(context.parent.command):
        return f"put it before the command: `trtspec {option} {command.name}`"
    near = nearest(option, own, "vllm", "options")
    if near in own and not near.startswith("-"):
        return f"{near} is given without an option: `trtspec {command.name} {near}`"
    if near:
        return f"did you mean {near}?"
    if "[-- OPTIONS]" in own:
        return f"an option of the engine follows `--`: `trtspec {command.name} TARGET -- {option}`"
    return ""


def _meant_argument(extra: list[str], command: Any) -> str:
    """The remedy for more arguments than the command takes; "" if nothing is known of them."""
    own, words = spellings(command), sys.argv
    index = words.index(extra[0]) if extra[0] in words else 0
    flag, value = ["", "", *words[:index]][-2:]  # before the first extra word
    if flag in own and value.isdigit():
        return f"write {flag} {','.join([value, *extra])}"
    if flag in own:
        return f"quote a value that has blanks: {flag} '{' '.join([value, *extra])}'"
    meant = next((flag for flag in SECOND if flag in own and flag not in words), None)
    return f"did you mean {meant} {SECOND[meant]}{extra[0]}?" if meant else ""


def _wrong_value(message: str, context: Any, parameter: Any, page: str) -> UsageError:
    """A value that its option does not take, with the option or variable as it was written."""
    reason = plain_reason(message.partition(": ")[2])
    value, _, choices = reason.partition(" is not one of ")
    name = set_by(context, parameter)
    written = f"{name}={os.environ[name]}" if name else _typed_value(parameter, sys.argv)
    if not choices:
        remedy = (
            f"{parameter.opts[0]}: {parameter.help} {page.capitalize()}" if parameter.help else page
        )
        return UsageError(f"{written} is {reason}", remedy)
    remedy = did_you_mean(value.strip("'"), re.findall("'(.+?)'", choices), "write one of these")
    return UsageError(f"{written} is not one of {choices}", remedy)


def _typed_value(parameter: Any, words: list[str]) -> str:
    """The option and its value among the words of a command line."""
    for index, word in enumerate(words):
        flag, equals, value = word.replace("_", "-").partition("=")
        if flag in parameter.opts:
            return f"{flag} {value if equals else words[index + 1]}"
    return str(parameter.opts[0])
