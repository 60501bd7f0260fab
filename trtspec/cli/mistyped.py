"""Turns the errors of Typer about a command line into errors with a remedy."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from trtspec.data_files import load_yaml
from trtspec.errors import UsageError, did_you_mean, nearest
from trtspec.records import plain_reason, set_by, spellings

# options that a user probably means by an argument too many, and the beginning of their values
PROBABLE_OPTIONS = {"--head": "", "--against": "", "--against-url": "plain=", "--output": ""}


def usage_error(error: Any) -> UsageError:
    """Returns an error with the message of a Typer error, and a remedy."""
    context = getattr(error, "ctx", None)
    parameter = getattr(error, "param", None)
    # without Typer's own proposals, which the remedy replaces
    message = re.sub(
        r" \(Possible options.*|\. Did you mean.*", "", error.format_message().rstrip(".")
    )
    if context is None:  # an option without its value
        return UsageError(message, f"see `trtspec {' '.join(sys.argv[1:2])} --help`")
    see_help = f"see `{context.command_path} --help`"
    command = context.command
    if hasattr(error, "possibilities"):  # click's NoSuchOption
        return UsageError(message, _unknown_option_remedy(error.option_name, context) or see_help)
    unknown = re.match("No such command '(.+)'", message)
    if unknown:
        commands = [*command.commands]
        near = nearest(unknown[1], commands, "commands")
        remedy = f"did you mean `trtspec {near}`?" if near else see_help
        return UsageError(message, remedy)
    extra = re.match(r"Got unexpected extra .* \((.+)\)", message)
    if extra:
        message = f"`{context.command_path}` takes no further argument: {extra[1]}"
        return UsageError(message, _extra_argument_remedy(extra[1].split(), command) or see_help)
    if message.startswith("Missing") and (examples := load_yaml("examples.yaml").get(command.name)):
        return UsageError(message, f"for example `{examples[0]}`")
    if parameter is None:
        return UsageError(message, see_help)
    return _invalid_value(message, context, parameter, see_help)


def _unknown_option_remedy(option: str, context: Any) -> str:
    """Returns the remedy for an option that the command does not have. "" if no remedy is known."""
    command = context.command
    options = spellings(command)
    if context.parent and option in spellings(context.parent.command):
        # an option of `trtspec` itself, such as -q
        return f"put it before the command: `trtspec {option} {command.name}`"
    near = nearest(option, options, "vllm", "options")
    if near in options and not near.startswith("-"):
        # the name of an argument, such as --target for TARGET
        return f"{near} is given without an option: `trtspec {command.name} {near}`"
    if near:
        return f"did you mean {near}?"
    if context.parent is None:
        return f"an option follows its command: `trtspec COMMAND {option}`"
    if "[-- OPTIONS]" in options:
        return f"an option of the engine follows `--`: `trtspec {command.name} TARGET -- {option}`"
    return ""


def _extra_argument_remedy(extra: list[str], command: Any) -> str:
    """Returns the remedy for more arguments than a command accepts. "" if no remedy is known.

    extra: arguments that are too many.
    """
    options = spellings(command)
    words = sys.argv
    index = words.index(extra[0]) if extra[0] in words else 0
    # the two words before the first extra argument, probably an option and its value
    flag, value = ["", "", *words[:index]][-2:]
    if flag in options and value.isdigit():
        return f"write {flag} {','.join([value, *extra])}"
    if flag in options:
        return f"quote a value that has blanks: {flag} '{' '.join([value, *extra])}'"
    unused = (flag for flag in PROBABLE_OPTIONS if flag in options and flag not in words)
    option = next(unused, None)
    return f"did you mean {option} {PROBABLE_OPTIONS[option]}{extra[0]}?" if option else ""


def _invalid_value(message: str, context: Any, parameter: Any, see_help: str) -> UsageError:
    """Returns the error for the invalid value of an option.

    The error shows the option or environment variable with the value, as the user wrote them.

    message: click's message, which contains the reason after a colon.
    see_help: remedy that names the help page.
    """
    reason = plain_reason(message.partition(": ")[2])
    value, _, choices = reason.partition(" is not one of ")
    variable = set_by(context, parameter)
    if variable:
        assignment = f"{variable}={os.environ[variable]}"
    else:
        assignment = _typed_value(parameter, sys.argv)
    if not choices:
        remedy = see_help
        if parameter.help:
            remedy = f"{parameter.opts[0]}: {parameter.help} {see_help.capitalize()}"
        return UsageError(f"{assignment} is {reason}", remedy)
    meaning = f"write one of these. {parameter.opts[0]}: {parameter.help}"
    remedy = did_you_mean(value.strip("'"), re.findall("'(.+?)'", choices), meaning)
    return UsageError(f"{assignment} is not one of {choices}", remedy)


def _typed_value(parameter: Any, words: list[str]) -> str:
    """Returns an option and its value as they were typed.

    Returns the option's flag if the option is not among `words`.
    """
    for index, word in enumerate(words):
        flag, equals, value = word.replace("_", "-").partition("=")  # trtspec accepts --tp_size
        if flag in parameter.opts:
            return f"{flag} {value if equals else words[index + 1]}"
    return str(parameter.opts[0])
