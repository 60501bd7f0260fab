"""Explains command lines that Typer refuses, and names the next command."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from trtspec.data_files import load_yaml
from trtspec.errors import UsageError, did_you_mean, nearest
from trtspec.records import plain_reason, set_by, spellings

# option that a second argument is meant for, and the beginning of its value
SECOND = {"--head": "", "--against": "", "--against-url": "plain=", "--output": ""}


def usage_error(error: Any) -> UsageError:
    """Returns Typer's error with a remedy. Names the variable if the value came from a variable."""
    context = getattr(error, "ctx", None)
    parameter = getattr(error, "param", None)
    message = re.sub(
        r" \(Possible options.*|\. Did you mean.*", "", error.format_message().rstrip(".")
    )
    if context is None:  # an option without its value
        return UsageError(message, f"see `trtspec {' '.join(sys.argv[1:2])} --help`")
    page = f"see `{context.command_path} --help`"
    command = context.command
    if hasattr(error, "possibilities"):
        return UsageError(message, _meant_option(error.option_name, context) or page)
    unknown = re.match("No such command '(.+)'", message)
    if unknown:
        commands = [*command.commands]
        near = nearest(unknown[1], commands, "commands")
        remedy = f"did you mean `trtspec {near}`?" if near else page
        return UsageError(message, remedy)
    extra = re.match(r"Got unexpected extra .* \((.+)\)", message)
    if extra:
        message = f"`{context.command_path}` takes no further argument: {extra[1]}"
        return UsageError(message, _meant_argument(extra[1].split(), command) or page)
    if message.startswith("Missing") and (examples := load_yaml("examples.yaml").get(command.name)):
        return UsageError(message, f"for example `{examples[0]}`")
    if parameter is None:
        return UsageError(message, page)
    return _wrong_value(message, context, parameter, page)


def _meant_option(option: str, context: Any) -> str:
    """Returns the remedy for an option that the command does not have. "" if none is known."""
    command = context.command
    options = spellings(command)
    if context.parent and option in spellings(context.parent.command):
        return f"put it before the command: `trtspec {option} {command.name}`"
    near = nearest(option, options, "vllm", "options")
    if near in options and not near.startswith("-"):
        return f"{near} is given without an option: `trtspec {command.name} {near}`"
    if near:
        return f"did you mean {near}?"
    if context.parent is None:
        return f"an option follows its command: `trtspec COMMAND {option}`"
    if "[-- OPTIONS]" in options:
        return f"an option of the engine follows `--`: `trtspec {command.name} TARGET -- {option}`"
    return ""


def _meant_argument(extra: list[str], command: Any) -> str:
    """Returns the remedy for more arguments than the command takes. "" if none is known."""
    options = spellings(command)
    words = sys.argv
    index = words.index(extra[0]) if extra[0] in words else 0
    flag, value = ["", "", *words[:index]][-2:]  # before the first extra word
    if flag in options and value.isdigit():
        return f"write {flag} {','.join([value, *extra])}"
    if flag in options:
        return f"quote a value that has blanks: {flag} '{' '.join([value, *extra])}'"
    unused = (flag for flag in SECOND if flag in options and flag not in words)
    meant = next(unused, None)
    return f"did you mean {meant} {SECOND[meant]}{extra[0]}?" if meant else ""


def _wrong_value(message: str, context: Any, parameter: Any, page: str) -> UsageError:
    """Returns the error for an invalid value, with the option or variable as the user wrote it."""
    reason = plain_reason(message.partition(": ")[2])
    value, _, choices = reason.partition(" is not one of ")
    name = set_by(context, parameter)
    written = f"{name}={os.environ[name]}" if name else _typed_value(parameter, sys.argv)
    if not choices:
        remedy = page
        if parameter.help:
            remedy = f"{parameter.opts[0]}: {parameter.help} {page.capitalize()}"
        return UsageError(f"{written} is {reason}", remedy)
    meaning = f"write one of these: {parameter.help}"
    remedy = did_you_mean(value.strip("'"), re.findall("'(.+?)'", choices), meaning)
    return UsageError(f"{written} is not one of {choices}", remedy)


def _typed_value(parameter: Any, words: list[str]) -> str:
    """Returns the option and its value, as they were typed."""
    for index, word in enumerate(words):
        flag, equals, value = word.replace("_", "-").partition("=")
        if flag in parameter.opts:
            return f"{flag} {value if equals else words[index + 1]}"
    return str(parameter.opts[0])
