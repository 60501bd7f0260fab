"""One frozen record per command: a dataclass whose fields carry their declaration.

The command line, its environment variables, the line that replays a command, its parser and the
Python verb are all made from the record, so an option is written down once. Its metadata say where
an option is used. `checked` refuses by name an option that was set and is not used.

    @dataclass(frozen=True, kw_only=True)
    class ServeOptions:
        target: TargetArgument
        head: HeadOption = None
        draft_len: Annotated[
            int, option("Tokens drafted per step.", group="Sizes", min=1), Needs("head")
        ] = 3
        config: Annotated[Path | None, option("Engine YAML.", "-c"), Modes(ENGINE)] = None
        device: Annotated[str, option("cpu or cuda."), Modes(REFERENCE)] = "cpu"

    def serve(options: ServeOptions) -> None:
        options = checked(options, ENGINE if options.backend == "trtllm" else REFERENCE)
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import re
import shlex
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import typer
from typer.core import TyperCommand

from trtspec.data_files import load_yaml
from trtspec.errors import RunningCommand, UsageError, as_typed, nearest, running
from trtspec.report import note

Record = TypeVar("Record")
ORIGINS = ("COMMANDLINE", "ENVIRONMENT")  # click's names for the sources that a user sets
# typer brings a click of its own and does not export this class
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]
METAVARS: dict[Any, str] = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}


def option(
    help: str = "",
    *flags: str,
    default: str | bool = True,
    group: str | None = None,
    **more: Any,
) -> Any:
    """An option called like its field, for Annotated.

    Args:
        flags: further spellings, or all spellings if one begins with `--`
        default: what the help page shows for None
        group: section of the help page, called by what a user decides there
        more: keywords of typer.Option
    """
    info = typer.Option(help=help, show_default=default, rich_help_panel=group, **more)
    info.param_decls = flags
    return info


def argument(help: str, metavar: str | None = None) -> Any:
    """A positional argument, as `option` declares an option."""
    return typer.Argument(help=help, metavar=metavar, show_default=False)


# options that mean the same on every command
TargetArgument = Annotated[str, argument("Target model: a checkpoint directory or a hub id.")]
HeadOption = Annotated[str | None, option("Eagle3 head: a directory or a hub id.", metavar="HEAD")]
JsonOption = Annotated[bool, option("Print one JSON object on stdout.")]
DryRunOption = Annotated[bool, option("Run every check and show the plan; write nothing.")]
ForceOption = Annotated[bool, option("Replace existing output.")]
RestartOption = Annotated[bool, option("Discard an interrupted run and start over.")]
# on a help page, also if the record inherits them
LAST = ("dry_run", "restart", "force", "json_")
OUTPUT = ("output", *LAST)  # a section of their own


@dataclass(frozen=True)
class Mode:
    """One way to run a command. `how` selects it, as typed. `label`: its name on help pages."""

    name: str
    how: str
    label: str = ""


class Modes:
    """Rule: these modes use the option. An option without `Modes` is used in every mode.

    With `value`, the rule is about values of the option that match it. `instead`: the remedy for
    other modes.
    """

    def __init__(self, *modes: Mode, value: str = "*", instead: str = "") -> None:
        self.modes = modes
        self.value = value
        self.instead = instead

    def unused(self, options: Any, mode: Mode | None) -> tuple[str, str] | None:
        """Returns (where the option is not used, the remedy). None if it is used."""
        if mode is None or mode in self.modes:
            return None
        others = f"leave it out, or use {_listed([mode.how for mode in self.modes])}"
        return f"by {mode.name}", self.instead or others


class Needs:
    """Rule: the option is used only with one of these conditions.

    A condition is the name of a field that is set, `field=PATTERN`, or a property whose docstring
    names it.
    """

    value = "*"

    def __init__(self, *conditions: str) -> None:
        self.conditions = conditions

    def unused(self, options: Any, mode: Mode | None) -> tuple[str, str] | None:
        if any(_holds(options, condition) for condition in self.conditions):
            return None
        record = type(options)
        usable = [
            condition
            for condition in self.conditions
            if uses(record, condition.partition("=")[0], mode)
        ]
        wanted = _listed([_named(record, condition) for condition in usable or self.conditions])
        return f"without {wanted}", f"pass {wanted}, or leave it out"


class Excludes:
    """Rule: the option is not used with any of these conditions.

    Conditions are written as in `Needs`. `value` is as in `Modes`.
    """

    def __init__(self, *conditions: str, value: str = "*") -> None:
        self.conditions = conditions
        self.value = value

    def unused(self, options: Any, mode: Mode | None) -> tuple[str, str] | None:
        for condition in self.conditions:
            if _holds(options, condition):
                return f"with {_named(type(options), condition)}", "leave one of the two out"
        return None


def _holds(options: Any, condition: str) -> bool:
    name, equals, pattern = condition.partition("=")
    value = getattr(options, name)
    if not equals:
        return bool(value)
    items = value if isinstance(value, tuple) else (value,)
    return any(fnmatchcase(str(item), pattern) for item in items)


def _named(record: type, condition: str) -> str:
    name, _, value = condition.partition("=")
    if name not in fields_of(record):
        return str(getattr(record, name).__doc__)
    return f"`{fields_of(record)[name].keyword}` {value}".rstrip()


def _listed(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


@dataclass(frozen=True)
class OptionField:
    """One field of a record: its declaration with every spelling, and its rules.

    type: the type to which typer converts.
    default: `empty` if the option is required.
    parse: the class that parses the text itself.
    many: the tuple type, if it is one.
    flags: --on and --off.
    """

    name: str
    type: Any
    default: Any
    info: Any
    rules: tuple[Modes | Needs | Excludes, ...]
    parse: Any
    many: Any
    flags: tuple[str, str]
    empty: ClassVar = inspect.Parameter.empty

    @property
    def is_argument(self) -> bool:
        return isinstance(self.info, typer.models.ArgumentInfo)

    @property
    def keyword(self) -> str:
        """The parameter of the Python verb: the flag with underscores."""
        name = self.flags[0].removeprefix("--").replace("-", "_")
        if self.is_argument or name == self.name.strip("_"):
            return self.name
        return name

    @property
    def typed(self) -> str:
        return str(self.info.metavar) if self.is_argument else self.flags[0]


def _read(record: Any) -> dict[str, OptionField]:
    """The fields of a record by name."""
    hints = typing.get_type_hints(record, include_extras=True)
    fields = sorted(dataclasses.fields(record), key=lambda field: field.name in LAST)
    return {field.name: _field(field, hints[field.name]) for field in fields}


# cached, because annotations are text until they are read
fields_of: Callable[[type], dict[str, OptionField]] = functools.cache(_read)


def _field(field: Any, hint: Any) -> OptionField:
    field_type, *metadata = typing.get_args(hint)
    rules = tuple(item for item in metadata if isinstance(item, Modes | Needs | Excludes))
    declared = next(item for item in metadata if isinstance(item, typer.models.ParameterInfo))
    info: Any = copy.copy(declared)
    types = [item for item in (field_type, *typing.get_args(field_type)) if item is not type(None)]
    parse = next((item for item in types if hasattr(item, "parse")), None)
    many = next((item for item in types if typing.get_origin(item) is tuple), None)
    plain = next((item for item in types if item in METAVARS), None)
    default = field.default
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    if isinstance(info, typer.models.ArgumentInfo):
        info.metavar = info.metavar or field.name.upper()
        info.rich_help_panel = "Arguments"
        return OptionField(field.name, field_type, default, info, rules, parse, many, ("", ""))
    spelled = list(info.param_decls)
    if not any(text.startswith("--") for text in spelled):
        spelled = [f"--{field.name.strip('_').replace('_', '-')}", *spelled]
    on, _, off = next(text for text in spelled if text.startswith("--")).partition("/")
    info.param_decls = tuple(spelled)
    if info.metavar is None:
        metavar = getattr(parse, "metavar", getattr(parse, "example", None))
        info.metavar = metavar or METAVARS.get(plain)
    labels = dict.fromkeys(
        mode.label for rule in rules if isinstance(rule, Modes) for mode in rule.modes if mode.label
    )
    if 0 < len(labels) <= 2:
        info.help += f" With {_listed([*labels])}."
    if field.name in OUTPUT:
        info.rich_help_panel = "Output"
    return OptionField(field.name, field_type, default, info, rules, parse, many, (on, off))


def uses(record: type, name: str, mode: Mode | None) -> bool:
    """Whether the mode uses the field. Other conditions are not looked at."""
    field = fields_of(record).get(name)
    rules = field.rules if field else ()
    return mode is None or all(
        mode in rule.modes for rule in rules if isinstance(rule, Modes) and rule.value == "*"
    )


def checked(options: Record, mode: Mode | None = None) -> Record:
    """The same options, with every option that this run does not use at its default.

    Raises UsageError with the name and the remedy for an option that was set and is not used. A
    variable of the environment gets a note instead, because an image sets its variables for every
    mode.
    """
    record = type(options)
    named = given(options)
    fields = fields_of(record)
    command = running.get()
    origins = command.origins if command.options is record else {}
    rules = [(name, rule) for name in fields if name in named for rule in fields[name].rules]

    def first(item: tuple[str, Modes | Needs | Excludes]) -> tuple[bool, bool, bool]:
        """Sort key: mode rules, then value rules, then variables.

        An option dropped by one rule must not cause another error.
        """
        name, rule = item
        return not isinstance(rule, Modes), rule.value == "*", origins.get(name) != "ENVIRONMENT"

    for name, rule in sorted(rules, key=first):
        value = getattr(options, name)
        refused = rule.unused(options, mode)
        if refused is None or name not in named or not fnmatchcase(str(value), rule.value):
            continue
        where, remedy = refused
        if origins.get(name) != "ENVIRONMENT":
            condition = name
            if rule.value != "*":
                condition = f"{name}={value}"
            raise UsageError(f"{_named(record, condition)} is not used {where}", remedy)
        note(as_typed(f"`{fields[name].keyword}` is not used {where}"))
        default = {name: fields[name].default}
        options = dataclasses.replace(options, **default)  # type: ignore[type-var]
        named.discard(name)
    return options


def ready(options: Record) -> Record:
    """`checked`, by the record's own `mode`.

    A command with modes whose record has no `mode` calls `checked` itself.
    """
    rules = [rule for field in fields_of(type(options)).values() for rule in field.rules]
    if hasattr(options, "mode") or not any(isinstance(rule, Modes) for rule in rules):
        return checked(options, getattr(options, "mode", None))
    return options


def made(record: type[Record], values: Mapping[str, Any]) -> Record:
    """The record of these options, with paths and lists in place of their texts.

    Raises UsageError naming the field for a value that the option does not take.
    """
    fields = {field.keyword: field for field in fields_of(record).values()}
    options = {fields[name].name: _value(fields[name], value) for name, value in values.items()}
    return ready(record(**options))


def made_of_file(record: type[Record], path: Path, values: Mapping[str, Any]) -> Record:
    """`made` from the values in a file. Raises UsageError, which begins with its path."""
    try:
        return made(record, values)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.remedy) from None


def _value(field: OptionField, value: Any) -> Any:
    """The value as the command line would make it from a text.

    Raises UsageError naming the field for a value that the option does not take.
    """
    import pydantic  # here, because `trtspec --help` needs none

    several = isinstance(value, list | tuple)
    if field.many:
        item_field = dataclasses.replace(field, type=typing.get_args(field.many)[0], many=None)
        items = value if several else (value,)
        return tuple(_value(item_field, item) for item in items)
    if value is None or (field.parse is not None and isinstance(value, field.parse)):
        return value
    if field.parse is not None:
        text = ",".join(map(str, value)) if several else str(value)
        return parsed(field.parse, text, f"`{field.keyword}`")
    limits = pydantic.Field(
        ge=getattr(field.info, "min", None), le=getattr(field.info, "max", None)
    )
    limited: Any = Annotated[field.type, limits]
    try:
        plain = value if isinstance(value, bool) else str(value)
        return pydantic.TypeAdapter(limited).validate_python(plain)
    except pydantic.ValidationError as error:
        reason = plain_reason(error.errors(include_url=False)[0]["msg"])
        raise UsageError(f"`{field.keyword}` {value} is {reason}", "correct the value") from None


# pydantic's words for a value, and ours after "it is"
REASONS = {
    r"Value error, ": "",
    r"Input should be (?='|one of)": "not ",
    r"Input should be a valid integer.*": "not a whole number",
    r"Input should be a valid number.*": "not a number",
    r"Input should be a valid boolean.*": "neither true nor false",
    r"Input should be greater than or equal to ": "below ",
    r"Input should be less than or equal to ": "above ",
}


def plain_reason(text: str) -> str:
    """The fault of a value in our words, from pydantic's message. It follows "it is"."""
    for pattern, words in REASONS.items():
        text = re.sub(pattern, words, text)
    return text


def fill(record: type[Record], options: Any, **others: Any) -> Record:
    """A record with `others`, and with the values of `options` that have the same names.

    A None in `options` leaves the default.
    """
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    same = {field.name: getattr(options, field.name, None) for field in fields}
    return record(**{name: value for name, value in same.items() if value is not None} | others)


def record_of(function: Callable[..., Any]) -> type:
    """The record that a command takes."""
    hints = typing.get_type_hints(function).items()
    record: type = next(hint for name, hint in hints if name != "return")
    return record


def verb(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """A command as a Python function: its record is the signature."""
    record = record_of(function)
    parameters = []
    for name, field in fields_of(record).items():
        if name == "json_":
            continue
        passing: Any = inspect.Parameter.KEYWORD_ONLY
        if field.default is field.empty:
            passing = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(
            inspect.Parameter(field.keyword, passing, default=field.default, annotation=field.type)
        )
    signature = inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))

    def call(*arguments: Any, **options: Any) -> Any:
        return function(made(record, signature.bind(*arguments, **options).arguments))

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    return call


def click_command(name: str, record: type[Record], run: Callable[[Record], Any]) -> TyperCommand:
    """The command `name`, which fills `record` and calls `run` with it.

    Every option can also be given as TRTSPEC_<NAME>_<LONG FLAG>.
    """
    fields = fields_of(record)

    def filled(context: Any, **values: Any) -> Any:
        sources = {key: context.get_parameter_source(key).name for key in values}
        origins = {key: source for key, source in sources.items() if source in ORIGINS}
        variables = {item.name: set_by(context, item) for item in context.command.params}
        flags = {field.keyword: variables[key] or field.typed for key, field in fields.items()}
        outer = running.get()
        command = RunningCommand(record, flags, origins)
        token = running.set(command)
        try:
            for key in origins:
                if values[key] == "" or (isinstance(values[key], list) and "" in values[key]):
                    raise UsageError(
                        f"`{fields[key].keyword}` is empty, as with a variable that is not set",
                        "give it a value, or leave it out",
                    )
            passed = values.get("passed")  # options of an engine, which follow `--`
            if passed and not passed[0].startswith("-"):
                context.fail(f"Got unexpected extra argument ({passed[0]})")
            if str(values.get("output")) == "-":
                raise UsageError(
                    "`output` - would write a file named -; nothing goes to stdout",
                    "give it a path",
                )
            return run(record(**{key: _value(fields[key], values[key]) for key in origins}))
        finally:
            running.reset(token)
            outer.answered |= command.answered  # on the same stdout

    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    ]
    parameters += [_for_typer(name, field) for field in fields.values()]
    filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    filled.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    filled.__doc__ = run.__doc__
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    single.command(name, cls=RecordCommand)(filled)
    return typer.main.get_command(single)  # type: ignore[return-value]


def set_by(context: Any, parameter: Any) -> str:
    """The environment variable that sets this parameter of a command. "" if none does."""
    if context.get_parameter_source(parameter.name).name != "ENVIRONMENT":
        return ""
    variable: str = next(name for name in parameter.envvar if name in os.environ)
    return variable


def _for_typer(command: str, field: OptionField) -> inspect.Parameter:
    """The parameter from which typer makes an option.

    Typer fills lists, and texts that a class of ours parses. Records hold tuples, which cannot be
    changed.
    """
    typer_type = field.type
    default = field.default
    info = copy.copy(field.info)
    if not field.is_argument:
        variables = [variable(command, field.typed)]
        if info.envvar:
            variables.append(info.envvar)
        info.envvar = variables
        info.show_envvar = False  # the end of the page says it once
    if field.many:
        item_type = str if field.parse else typing.get_args(field.many)[0]
        typer_type = list[item_type] | None  # type: ignore[valid-type]
        if isinstance(default, tuple):
            default = list(default) or None
    elif field.parse is not None:
        typer_type = str | None
        if default not in (None, field.empty):
            default = str(default)
    hint: Any = Annotated[(typer_type, info)]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )


class PlainHelp:
    """A click command whose help page has a section for each group of options.

    No name and no word is broken.
    """

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        first = ("Arguments", "Options", "Output")
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in first}
        for parameter in self.get_params(ctx):
            parameter._get_number_range_help_str = lambda: None
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None
            section = sections.setdefault(parameter.rich_help_panel or "Options", [])
            section.append(parameter.get_help_record(ctx))
        for command in getattr(self, "commands", {}).values():
            sections.setdefault(command.rich_help_panel, []).append((command.name, command.help))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    for names, text in rows:
                        lines = textwrap.fill(
                            f"  {names:<28}  {text}",
                            formatter.width,
                            subsequent_indent=" " * 32,
                            break_on_hyphens=False,
                            break_long_words=False,
                        )
                        formatter.write(f"{lines}\n")


class RecordCommand(PlainHelp, TyperCommand):
    """A command whose help ends with two examples from data/examples.yaml."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        examples = load_yaml("examples.yaml").get(self.name, ())
        lines = ["", "Examples:", *(f"  {line}" for line in examples)]
        lines += ["", f"Options can also be set as {variable(str(self.name), '')}<OPTION>.", ""]
        formatter.write("\n".join(lines))


def variable(command: str, flag: str) -> str:
    """The environment variable of an option.

    TRTSPEC_BUILD_CONFIG_TP_SIZE is that for `--tp-size` of build-config.
    """
    return f"TRTSPEC_{command}_{flag.removeprefix('--')}".upper().replace("-", "_")


def unknown_variables(command: TyperCommand, environ: Iterable[str]) -> Iterator[str]:
    """Yields a note for each variable with the prefix of this command that no option reads."""
    known = {name for parameter in command.params if parameter.envvar for name in parameter.envvar}
    prefix = variable(str(command.name), "")
    for name in sorted(name for name in environ if name.startswith(prefix) and name not in known):
        near = nearest(name.removeprefix(prefix), spellings(command), "vllm", "options")
        remedy = ""
        if near:
            remedy = f"; did you mean {variable(str(command.name), near)}?"
        yield f"{name} is set, and trtspec {command.name} has no such option{remedy}"


def spellings(command: Any) -> list[str]:
    """Every spelling of the options of a command, and the names of its arguments."""
    names = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            names.append(parameter.metavar)
        else:
            names += [*parameter.opts, *parameter.secondary_opts]
    return names


def parsed(parser: Any, text: str, name: str) -> Any:
    """A value of a type that parses its own text. str() of the value is the text again.

    `parser.parse` raises ValueError for a text that is not `parser.what`. Then this raises
    UsageError with `name` and `parser.example`.
    """
    try:
        return parser.parse(text)
    except ValueError as error:
        reason = ""
        if str(error):
            reason = f": {error}"
        message = f"{name} {text} is not {parser.what}{reason}"
        raise UsageError(message, f"write {name} {parser.example}") from None


def given(options: Any) -> set[str]:
    """Names of the fields that the user set on the command line or in the environment.

    If no command runs: of all fields that differ from their defaults.
    """
    command = running.get()
    if command.options is type(options):
        return set(command.origins)
    return {
        name
        for name, field in fields_of(type(options)).items()
        if getattr(options, name) != field.default
    }


def words(record: Any, always: Iterable[str] = ()) -> list[str]:
    """The arguments and options that make `record` again, in the order of its fields.

    These are the fields that differ from their defaults, and the fields named in `always`.
    """
    kept = set(always)
    arguments: list[str] = []
    for name, field in fields_of(type(record)).items():
        value = getattr(record, name)
        if value is None or (value == field.default and name not in kept):
            continue
        items = value if isinstance(value, tuple) else (value,)
        on, off = field.flags
        if field.is_argument:
            arguments += map(str, items)
        elif isinstance(value, bool):
            flag = on if value else off
            if flag:
                arguments.append(flag)
        else:
            for item in items:
                arguments += [on, str(item)]
    return arguments


def parse(record: type[Record], line: str | Sequence[str], name: str = "command") -> Record:
    """The record that these words make, without the environment.

    Raises UsageError as the command line would.
    """
    split = shlex.split(line) if isinstance(line, str) else list(line)
    command = click_command(name, record, lambda options: options)
    for parameter in command.params:
        parameter.envvar = None
    try:
        options: Record = command.main(split, prog_name=name, standalone_mode=False)
        return options
    except CLICK_ERROR as error:
        raise UsageError(f"{shlex.join(split)} does not parse: {error.format_message()}") from None
    except UsageError as error:
        raise UsageError(
            f"{shlex.join(split)} does not parse: {error.message}", error.remedy
        ) from None
