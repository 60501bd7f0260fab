"""Declares the options of each command once, as the fields of a frozen dataclass (its record).

The parser, the help page, the environment variables, the line that repeats a command and the Python
function are all generated from the record. A field's metadata say when the option is used.
`checked` raises an error for an option that the user set and that is not used.

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
# typer contains a copy of click and does not export this class, the base of click's errors
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]
# placeholder of a value on help pages, by the option's type
METAVARS: dict[Any, str] = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}


def option(
    help: str = "",
    *flags: str,
    default: str | bool = True,
    group: str | None = None,
    **more: Any,
) -> Any:
    """Returns the declaration of an option, for the Annotated type of a record's field.

    Args:
        flags: further spellings, or all spellings if one begins with `--`. By default the flag is
            the name of the field with dashes.
        default: text that the help page shows for a default of None
        group: section of the help page
        more: keyword arguments of typer.Option
    """
    info = typer.Option(help=help, show_default=default, rich_help_panel=group, **more)
    info.param_decls = flags
    return info


def argument(help: str, metavar: str | None = None) -> Any:
    """Returns the declaration of a positional argument, for the Annotated type of a field."""
    return typer.Argument(help=help, metavar=metavar, show_default=False)


# options that mean the same on every command
TargetArgument = Annotated[str, argument("Target model: a checkpoint directory or a hub id.")]
HeadOption = Annotated[str | None, option("Eagle3 head: a directory or a hub id.", metavar="HEAD")]
JsonOption = Annotated[bool, option("Print one JSON object on stdout.")]
DryRunOption = Annotated[bool, option("Run every check and show the plan; write nothing.")]
ForceOption = Annotated[bool, option("Replace existing output.")]
RestartOption = Annotated[bool, option("Discard an interrupted run and start over.")]
# fields that are last on a help page, also if the record inherits them
LAST = ("dry_run", "restart", "force", "json_")
OUTPUT = ("output", *LAST)  # fields in the section "Output" of a help page


@dataclass(frozen=True)
class Mode:
    """Way to run a command, such as one of the engines of `serve`.

    name: name of the mode in messages.
    how: option and value that select the mode.
    label: name of the mode on help pages. Empty if help pages omit the mode.
    """

    name: str
    how: str
    label: str = ""


class Modes:
    """Rule that an option is used only in `modes`. Every mode uses an option without this rule.

    value: pattern of the option's values that the rule is about. Default: all values.
    instead: remedy for other modes. Default: to leave the option out, or use one of `modes`.
    """

    def __init__(self, *modes: Mode, value: str = "*", instead: str = "") -> None:
        self.modes = modes
        self.value = value
        self.instead = instead

    def unused(self, options: Any, mode: Mode | None) -> tuple[str, str] | None:
        """Returns the circumstances without use of the option (for a message), and the remedy.

        None if `mode` uses the option.
        """
        if mode is None or mode in self.modes:
            return None
        default_remedy = f"leave it out, or use {_alternatives([mode.how for mode in self.modes])}"
        return f"by {mode.name}", self.instead or default_remedy


class Needs:
    """Rule that an option is used only if one of `conditions` holds.

    A condition is `FIELD` (the option is set), `FIELD=PATTERN` (its value matches), or the name of
    a property of the record. The docstring of the property names the condition in messages.
    """

    value = "*"  # the rule is about all values, see `Modes`

    def __init__(self, *conditions: str) -> None:
        self.conditions = conditions

    def unused(self, options: Any, mode: Mode | None) -> tuple[str, str] | None:
        """Returns the circumstances without use of the option (for a message), and the remedy.

        None if a condition holds.
        """
        if any(_holds(options, condition) for condition in self.conditions):
            return None
        record = type(options)
        # the remedy must not propose an option that this mode does not use
        usable = [
            condition
            for condition in self.conditions
            if uses(record, condition.partition("=")[0], mode)
        ]
        names = [_condition_name(record, condition) for condition in usable or self.conditions]
        wanted = _alternatives(names)
        return f"without {wanted}", f"pass {wanted}, or leave it out"


class Excludes:
    """Rule that an option is not used if one of `conditions` holds.

    Conditions have the syntax of `Needs`. `value`: pattern of values, as in `Modes`.
    """

    def __init__(self, *conditions: str, value: str = "*") -> None:
        self.conditions = conditions
        self.value = value

    def unused(self, options: Any, mode: Mode | None) -> tuple[str, str] | None:
        """Returns the circumstances without use of the option (for a message), and the remedy.

        None if no condition holds.
        """
        for condition in self.conditions:
            if _holds(options, condition):
                name = _condition_name(type(options), condition)
                return f"with {name}", "leave one of the two out"
        return None


def _holds(options: Any, condition: str) -> bool:
    """Whether a condition of a rule (see `Needs`) holds for the options."""
    name, equals, pattern = condition.partition("=")
    value = getattr(options, name)
    if not equals:
        return bool(value)
    items = value if isinstance(value, tuple) else (value,)
    return any(fnmatchcase(str(item), pattern) for item in items)


def _condition_name(record: type, condition: str) -> str:
    """Returns the name of a condition (see `Needs`) in messages, such as "`backend` vllm"."""
    name, _, value = condition.partition("=")
    if name not in fields_of(record):
        return str(getattr(record, name).__doc__)
    return f"`{fields_of(record)[name].keyword}` {value}".rstrip()


def _alternatives(names: Sequence[str]) -> str:
    """Returns the names as "A, B or C"."""
    all_but_last = ", ".join(names[:-1])
    return " or ".join(filter(None, (all_but_last, names[-1])))


@dataclass(frozen=True)
class OptionField:
    """Declaration of an option: one field of a record.

    name: name of the field.
    type: type of the value.
    default: default value. `empty` if the option is required.
    info: typer's declaration, with every spelling.
    rules: conditions under which the option is used.
    parse: class of the value if the class parses text by itself (see `parsed`), else None.
    many: tuple type if the option takes several values, else None.
    flags: long flag that sets the option, and the flag that switches the option off (may be empty).
        Both are empty for an argument.
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
        """Name of the parameter of the Python function: the flag with underscores."""
        flag_name = self.flags[0].removeprefix("--").replace("-", "_")
        if self.is_argument or flag_name == self.name.strip("_"):
            return self.name
        return flag_name

    @property
    def typed(self) -> str:
        """Name of the option on the command line: the flag, or the placeholder of an argument."""
        return str(self.info.metavar) if self.is_argument else self.flags[0]


def _read_fields(record: Any) -> dict[str, OptionField]:
    """Returns the declarations of a record's options by field name, with the fields LAST last."""
    hints = typing.get_type_hints(record, include_extras=True)
    fields = sorted(dataclasses.fields(record), key=lambda field: field.name in LAST)
    return {field.name: _option_field(field, hints[field.name]) for field in fields}


# cached, because evaluating the text of annotations takes long
fields_of: Callable[[type], dict[str, OptionField]] = functools.cache(_read_fields)


def _option_field(field: Any, hint: Any) -> OptionField:
    """Returns the declaration of an option from a dataclass field and its Annotated type."""
    field_type, *metadata = typing.get_args(hint)
    rules = tuple(item for item in metadata if isinstance(item, Modes | Needs | Excludes))
    declared = next(item for item in metadata if isinstance(item, typer.models.ParameterInfo))
    info: Any = copy.copy(declared)  # several records share a declaration such as HeadOption
    # the members of a union, such as Path for `Path | None`
    types = [item for item in (field_type, *typing.get_args(field_type)) if item is not type(None)]
    parse = next((item for item in types if hasattr(item, "parse")), None)
    many = next((item for item in types if typing.get_origin(item) is tuple), None)
    built_in = next((item for item in types if item in METAVARS), None)
    default = field.default
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    if isinstance(info, typer.models.ArgumentInfo):
        info.metavar = info.metavar or field.name.upper()
        info.rich_help_panel = "Arguments"
        return OptionField(field.name, field_type, default, info, rules, parse, many, ("", ""))
    flags = list(info.param_decls)
    if not any(text.startswith("--") for text in flags):
        default_flag = f"--{field.name.strip('_').replace('_', '-')}"
        flags = [default_flag, *flags]
    # a Boolean option may have the form --on/--off
    on, _, off = next(text for text in flags if text.startswith("--")).partition("/")
    info.param_decls = tuple(flags)
    if info.metavar is None:
        metavar = getattr(parse, "metavar", getattr(parse, "example", None))
        info.metavar = metavar or METAVARS.get(built_in)
    labels: dict[str, None] = {}
    for rule in rules:
        if isinstance(rule, Modes):
            labels |= dict.fromkeys(mode.label for mode in rule.modes if mode.label)
    # an option of three modes is used by nearly all, so its help does not list them
    if 0 < len(labels) <= 2:
        info.help += f" With {_alternatives([*labels])}."
    if field.name in OUTPUT:
        info.rich_help_panel = "Output"
    return OptionField(field.name, field_type, default, info, rules, parse, many, (on, off))


def uses(record: type, name: str, mode: Mode | None) -> bool:
    """Whether `mode` uses the option of field `name`, by its `Modes` rules for all values.

    Ignores `Needs` and `Excludes`.
    """
    field = fields_of(record).get(name)
    rules = field.rules if field else ()
    return mode is None or all(
        mode in rule.modes for rule in rules if isinstance(rule, Modes) and rule.value == "*"
    )


def checked(options: Record, mode: Mode | None = None) -> Record:
    """Returns the options of a run in `mode`, with unused environment variables at their defaults.

    Raises UsageError for an option that the user set and that the run does not use. For an
    environment variable, writes a note, because an image sets its variables for every mode.
    """
    record = type(options)
    set_names = given(options)
    fields = fields_of(record)
    command = running.get()
    origins = command.origins if command.options is record else {}
    rules: list[tuple[str, Modes | Needs | Excludes]] = []
    for name in fields:
        if name in set_names:
            rules += [(name, rule) for rule in fields[name].rules]

    def precedence(item: tuple[str, Modes | Needs | Excludes]) -> tuple[bool, bool, bool]:
        """Sort key of a rule: rules of modes first, and among them rules for some values first.

        Among equals, environment variables come first. A variable that a rule resets must not
        cause an error by a later rule.
        """
        name, rule = item
        return not isinstance(rule, Modes), rule.value == "*", origins.get(name) != "ENVIRONMENT"

    for name, rule in sorted(rules, key=precedence):
        value = getattr(options, name)
        unused = rule.unused(options, mode)
        # an earlier rule may have reset the option, or this rule is about other values
        if unused is None or name not in set_names or not fnmatchcase(str(value), rule.value):
            continue
        circumstances, remedy = unused
        if origins.get(name) != "ENVIRONMENT":
            condition = name
            if rule.value != "*":
                condition = f"{name}={value}"
            subject = _condition_name(record, condition)
            raise UsageError(f"{subject} is not used {circumstances}", remedy)
        note(as_typed(f"`{fields[name].keyword}` is not used {circumstances}"))
        default = {name: fields[name].default}
        options = dataclasses.replace(options, **default)  # type: ignore[type-var]
        set_names.discard(name)
    return options


def ready(options: Record) -> Record:
    """Returns the options after `checked`, for the mode in the record's property `mode`.

    Returns the same options if the record has `Modes` rules and no `mode`. The command then calls
    `checked`, because it finds out its mode.
    """
    rules: list[Modes | Needs | Excludes] = []
    for field in fields_of(type(options)).values():
        rules += field.rules
    if hasattr(options, "mode") or not any(isinstance(rule, Modes) for rule in rules):
        return checked(options, getattr(options, "mode", None))
    return options


def made(record: type[Record], values: Mapping[str, Any]) -> Record:
    """Returns the record with these values, converted to the types of the fields and checked.

    values: values by the parameter names of the Python function.
    Raises UsageError for an invalid value, or an option that is not used.
    """
    fields = {field.keyword: field for field in fields_of(record).values()}
    options = {fields[name].name: _converted(fields[name], value) for name, value in values.items()}
    return ready(record(**options))


def made_of_file(record: type[Record], path: Path, values: Mapping[str, Any]) -> Record:
    """Returns the record with the values in the file `path`, converted and checked as by `made`.

    Raises UsageError that names the file.
    """
    try:
        return made(record, values)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.remedy) from None


def _converted(field: OptionField, value: Any) -> Any:
    """Returns a value of an option, or its text, converted to the type of the field.

    Raises UsageError for a value that the option does not accept.
    """
    import pydantic  # here, because `trtspec --help` does not need the package

    is_list = isinstance(value, list | tuple)
    if field.many:
        item_field = dataclasses.replace(field, type=typing.get_args(field.many)[0], many=None)
        items = value if is_list else (value,)
        return tuple(_converted(item_field, item) for item in items)
    if value is None or (field.parse is not None and isinstance(value, field.parse)):
        return value
    if field.parse is not None:
        text = ",".join(map(str, value)) if is_list else str(value)
        return parsed(field.parse, text, f"`{field.keyword}`")
    limits = pydantic.Field(
        ge=getattr(field.info, "min", None), le=getattr(field.info, "max", None)
    )
    limited: Any = Annotated[field.type, limits]
    try:
        # as text, so that Python's values are converted like those of the command line
        text_or_bool = value if isinstance(value, bool) else str(value)
        return pydantic.TypeAdapter(limited).validate_python(text_or_bool)
    except pydantic.ValidationError as error:
        reason = plain_reason(error.errors(include_url=False)[0]["msg"])
        raise UsageError(f"`{field.keyword}` {value} is {reason}", "correct the value") from None


# patterns of pydantic's messages, and their replacements in a sentence such as "`port` x is ..."
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
    """Returns the fault of a value for a sentence such as "`port` x is ...", by REASONS.

    text: message of pydantic or click.
    """
    for pattern, replacement in REASONS.items():
        text = re.sub(pattern, replacement, text)
    return text


def fill(record: type[Record], options: Any, **others: Any) -> Record:
    """Returns a record with the values `others`, and otherwise with the values of `options`.

    Copies the attributes of `options` that are named like a field and are not None.
    """
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    shared = {field.name: getattr(options, field.name, None) for field in fields}
    copied = {name: value for name, value in shared.items() if value is not None}
    return record(**copied | others)


def record_of(function: Callable[..., Any]) -> type:
    """Returns the class of a command's options: the type of its only parameter."""
    hints = typing.get_type_hints(function).items()
    record: type = next(hint for name, hint in hints if name != "return")
    return record


def verb(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a command as a Python function with one parameter for each option."""
    record = record_of(function)
    parameters = []
    for name, field in fields_of(record).items():
        if name == "json_":  # a Python function always returns its result
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
    """Returns the command `name`, which calls `run` with the options as a `record`.

    Every option can also be set by the environment variable TRTSPEC_<NAME>_<LONG FLAG>.
    """
    fields = fields_of(record)

    def run_with_record(context: Any, **values: Any) -> Any:
        """Calls `run` with the options that the user set. Messages name options by their flags."""
        sources = {key: context.get_parameter_source(key).name for key in values}
        origins = {key: source for key, source in sources.items() if source in ORIGINS}
        variables = {item.name: set_by(context, item) for item in context.command.params}
        flags = {field.keyword: variables[key] or field.typed for key, field in fields.items()}
        outer = running.get()
        command = RunningCommand(record, flags, origins)
        token = running.set(command)
        try:
            for key in origins:
                value = values[key]
                if value == "" or (isinstance(value, list) and "" in value):
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
            return run(record(**{key: _converted(fields[key], values[key]) for key in origins}))
        finally:
            running.reset(token)
            # `prove` runs other commands, which print on the same stdout
            outer.answered |= command.answered

    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    ]
    parameters += [_for_typer(name, field) for field in fields.values()]
    # typer generates the options from the signature, and the help page from the docstring
    run_with_record.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_with_record.__annotations__ = {item.name: item.annotation for item in parameters}
    run_with_record.__doc__ = run.__doc__
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    single.command(name, cls=RecordCommand)(run_with_record)
    return typer.main.get_command(single)  # type: ignore[return-value]


def set_by(context: Any, parameter: Any) -> str:
    """Name of the environment variable that set this parameter. "" if no variable did."""
    if context.get_parameter_source(parameter.name).name != "ENVIRONMENT":
        return ""
    variable: str = next(name for name in parameter.envvar if name in os.environ)
    return variable


def _for_typer(command: str, field: OptionField) -> inspect.Parameter:
    """Returns the function parameter from which typer generates an option.

    Typer returns lists, which `click_command` converts to tuples. Typer returns text for a type
    that parses its own text.
    """
    typer_type = field.type
    default = field.default
    info = copy.copy(field.info)
    if not field.is_argument:
        variables = [variable(command, field.typed)]
        if info.envvar:
            variables.append(info.envvar)
        info.envvar = variables
        info.show_envvar = False  # the end of the help page describes all variables at once
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
    """Click command whose help page is plain text, with a section for each group of options."""

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        """Writes the sections of a help page. Breaks no flag and no word."""
        first = ("Arguments", "Options", "Output")
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in first}
        for parameter in self.get_params(ctx):
            # without the range of a number and the type of an argument, which clutter the page
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
    """Command whose help page ends with the command's examples from data/examples.yaml."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes the examples, and the prefix of the command's environment variables."""
        examples = load_yaml("examples.yaml").get(self.name, ())
        lines = ["", "Examples:", *(f"  {line}" for line in examples)]
        lines += ["", f"Options can also be set as {variable(str(self.name), '')}<OPTION>.", ""]
        formatter.write("\n".join(lines))


def variable(command: str, flag: str) -> str:
    """Name of an option's environment variable.

    For `--tp-size` of build-config: TRTSPEC_BUILD_CONFIG_TP_SIZE.
    """
    return f"TRTSPEC_{command}_{flag.removeprefix('--')}".upper().replace("-", "_")


def unknown_variables(command: TyperCommand, environ: Iterable[str]) -> Iterator[str]:
    """Yields a note for each environment variable of `command` that none of its options reads.

    environ: names of the environment variables.
    """
    known = {name for parameter in command.params if parameter.envvar for name in parameter.envvar}
    prefix = variable(str(command.name), "")
    for name in sorted(name for name in environ if name.startswith(prefix) and name not in known):
        near = nearest(name.removeprefix(prefix), spellings(command), "vllm", "options")
        remedy = ""
        if near:
            remedy = f"; did you mean {variable(str(command.name), near)}?"
        yield f"{name} is set, and trtspec {command.name} has no such option{remedy}"


def spellings(command: Any) -> list[str]:
    """Returns every spelling of the options of a click command, and the names of its arguments."""
    names = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            names.append(parameter.metavar)
        else:
            names += [*parameter.opts, *parameter.secondary_opts]
    return names


def parsed(parser: Any, text: str, name: str) -> Any:
    """Returns the value that the class `parser` parses from text. str() of it parses to the same.

    parser: class with `parse`, `what` (noun for a valid text, in messages) and `example`.
    name: name of the option in messages.
    Raises UsageError if `parser.parse` raises ValueError.
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

    Names of the fields that differ from their defaults, if no command with this record runs.
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
    """Returns the words of a command line that sets the same options, in the order of the fields.

    Includes the fields that differ from their defaults, and the fields named in `always`.
    """
    always_included = set(always)
    arguments: list[str] = []
    for name, field in fields_of(type(record)).items():
        value = getattr(record, name)
        # no word of a command line means None
        if value is None or (value == field.default and name not in always_included):
            continue
        items = value if isinstance(value, tuple) else (value,)
        on, off = field.flags
        if field.is_argument:
            arguments += map(str, items)
        elif isinstance(value, bool):
            flag = on if value else off
            if flag:  # most Boolean options have no flag for false, which is their default
                arguments.append(flag)
        else:
            for item in items:
                arguments += [on, str(item)]
    return arguments


def parse(record: type[Record], line: str | Sequence[str], name: str = "command") -> Record:
    """Returns the record of a command line, given as text or as words. Ignores the environment.

    Raises UsageError for an invalid command line.
    """
    arguments = shlex.split(line) if isinstance(line, str) else list(line)
    command = click_command(name, record, lambda options: options)
    for parameter in command.params:
        parameter.envvar = None
    try:
        options: Record = command.main(arguments, prog_name=name, standalone_mode=False)
        return options
    except CLICK_ERROR as error:
        reason = error.format_message()
        raise UsageError(f"{shlex.join(arguments)} does not parse: {reason}") from None
    except UsageError as error:
        message = f"{shlex.join(arguments)} does not parse: {error.message}"
        raise UsageError(message, error.remedy) from None
