"""One frozen record per command: a dataclass whose fields carry their typer declaration.

The command line, its environment variables, the line that replays a command and the parser of that line are all made
from the record, so an option is written down once. Where an option is used stands in its metadata; `checked` refuses
by name what was typed and is not used.

    @dataclass(frozen=True, kw_only=True)
    class ServeOptions:
        target: TargetArgument
        head: HeadOption = None
        draft_len: Annotated[int, typer.Option(min=1, help="Tokens drafted per step."), Needs("head")] = 3
        config: Annotated[Path | None, typer.Option(help="Engine YAML."), Modes(ENGINE)] = None
        device: Annotated[str, typer.Option(help="cpu or cuda."), Modes(REFERENCE)] = "cpu"

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
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperOption

from trtspec.errors import UsageError

Record = TypeVar("Record")
Origin = Literal["flag", "variable"]
# of the running command: its name, its record, and where each option came from that the user set; None where none runs
_typed: ContextVar[tuple[str, type, dict[str, Origin]] | None] = ContextVar("typed", default=None)
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]  # typer brings a click of its own and does not export this class
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
LINK_NAME = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
ORIGINS: dict[str, Origin] = {"COMMANDLINE": "flag", "ENVIRONMENT": "variable"}


# options that mean the same on every command
TargetArgument = Annotated[str, typer.Argument(help="Target model: a checkpoint directory or a hub id.")]
HeadOption = Annotated[str | None, typer.Option(help="Eagle3 head: a directory or a hub id.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Run every check and show the plan; write nothing.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace existing output.")]
RestartOption = Annotated[bool, typer.Option("--restart", help="Discard an interrupted run and start over.")]


@dataclass(frozen=True)
class Mode:
    """One way to run a command. `how` is what selects it, as typed. `label` is what help pages call it, if they do."""

    name: str
    how: str
    label: str = ""


class Modes:
    """These modes use the option; one without `Modes` is used in every mode. With `value`, the rule is about values of
    the option that match it."""

    def __init__(self, *modes: Mode, value: str = "*") -> None:
        self.modes, self.value = modes, value

    def unused(self, options: Any, mode: Mode | None) -> tuple[str, str] | None:
        """(where the option is not used, what to do), or None where it is used."""
        if mode is None or mode in self.modes:
            return None
        return f"by {mode.name}", f"leave it out, or use {_listed([one.how for one in self.modes])}"


class Needs:
    """The option is used beside one of these: the name of a field or property that is set, or `field=PATTERN`.
    `where` says it in words where the conditions are no options."""

    value = "*"

    def __init__(self, *conditions: str, where: str = "") -> None:
        self.conditions, self.where = conditions, where

    def unused(self, options: Any, mode: Mode | None) -> tuple[str, str] | None:
        if any(_holds(options, condition) for condition in self.conditions):
            return None
        if self.where:
            return self.where, "leave it out"
        record = type(options)
        usable = [one for one in self.conditions if uses(record, one.partition("=")[0], mode)] or self.conditions
        wanted = _listed([_as_typed(record, one) for one in usable])
        return f"without {wanted}", f"pass {wanted}, or leave it out"


class Excludes:
    """The option is not used beside any of these, written as in `Needs`. `why` follows the flag of the other one."""

    def __init__(self, *conditions: str, value: str = "*", why: str = "", where: str = "") -> None:
        self.conditions, self.value, self.why, self.where = conditions, value, why, where

    def unused(self, options: Any, mode: Mode | None) -> tuple[str, str] | None:
        found = next((condition for condition in self.conditions if _holds(options, condition)), None)
        if found is None:
            return None
        if self.where:
            return self.where, "leave it out"
        return f"with {_as_typed(type(options), found)}{self.why and ', ' + self.why}", "leave one of the two out"


def _holds(options: Any, condition: str) -> bool:
    name, equals, pattern = condition.partition("=")
    value = getattr(options, name)
    if not equals:
        return bool(value)
    return any(fnmatchcase(str(item), pattern) for item in (value if isinstance(value, tuple) else (value,)))


def _as_typed(record: type, condition: str) -> str:
    name, _, value = condition.partition("=")
    return " ".join(filter(None, (flag_of(record, name), value)))


def _listed(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def rules_of(record: type, name: str) -> list[Modes | Needs | Excludes]:
    """What the metadata of a field says about its use."""
    return [item for item in _hints(record)[name].__metadata__ if isinstance(item, Modes | Needs | Excludes)]


def uses(record: type, name: str, mode: Mode | None) -> bool:
    """Whether the mode uses the field, beside whatever else."""
    rules = rules_of(record, name)
    return mode is None or all(mode in rule.modes for rule in rules if isinstance(rule, Modes) and rule.value == "*")


def checked(options: Record, mode: Mode | None = None) -> Record:
    """The same options, each one that this run does not use at its default.

    What was typed and is not used raises UsageError with its flag and what would use it; what comes from the
    environment gets a note, because an image sets its variables for every mode.
    """
    record, running = type(options), _typed.get()
    command, origins = (running[0], running[2]) if running and running[1] is record else ("", {})
    named = given(options)
    defaults = {field.name: _default(field) for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    found = [(name, rule) for name in defaults if name in named for rule in rules_of(record, name)]

    def first(item: tuple[str, Modes | Needs | Excludes]) -> tuple[bool, bool, bool]:
        """Modes, then values, then variables: what is unused by one of these is no reason against another option."""
        name, rule = item
        return not isinstance(rule, Modes), rule.value == "*", origins.get(name) != "variable"

    for name, rule in sorted(found, key=first):
        value, refused = getattr(options, name), rule.unused(options, mode)
        if refused is None or name not in named or not fnmatchcase(str(value), rule.value):
            continue
        flag, (where, remedy) = flag_of(record, name), refused
        if origins.get(name) != "variable":
            raise UsageError(f"{flag if rule.value == '*' else f'{flag} {value}'} is not used {where}", remedy)
        note(f"{variable(command, flag)} is not used {where}")
        options = dataclasses.replace(options, **{name: defaults[name]})  # type: ignore[type-var]
        named.discard(name)
    return options


def click_command(name: str, record: type[Record], run: Callable[[Record], Any], **settings: Any) -> TyperCommand:
    """The command `name`, which fills `record` and calls `run` with it. Every option can also be given as
    TRTSPEC_<NAME>_<LONG FLAG>. `settings` go to typer, for example `epilog`."""

    def filled(context: typer.Context, **values: Any) -> Any:
        if str(values.get("output")) == "-":
            raise UsageError("--output - would write a file named `-`; nothing goes to stdout", "give it a path")
        sources = {key: ORIGINS.get(getattr(context.get_parameter_source(key), "name", "")) for key in values}
        running = _typed.set((name, record, {key: origin for key, origin in sources.items() if origin}))
        try:
            return run(record(**{key: tuple(v or ()) if key in tuples else v for key, v in values.items()}))
        finally:
            _typed.reset(running)

    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    hints = dict(_hints(record))  # type: ignore[arg-type]
    tuples = {key for key, hint in hints.items() if _is_tuple(hint)}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        hint = _with_parser(_with_modes(hints[field.name]), flag_of(record, field.name))
        hints[field.name], default = _for_typer(hint, _default(field))
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
        )
    filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    filled.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    # typer would keep the line breaks of the source, which fit no other width of a terminal
    filled.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(run.__doc__ or ""))
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, cls=RecordCommand, **settings)(filled)
    command = typer.main.get_command(single)
    for parameter in command.params:
        if isinstance(parameter, TyperOption) and parameter.name != "help":
            declared = [parameter.envvar] if isinstance(parameter.envvar, str) else list(parameter.envvar or ())
            parameter.envvar = [variable(name, long_flag(parameter)), *declared]
            parameter.show_envvar = False  # the epilog says it once
    return command  # type: ignore[return-value]


class RecordCommand(TyperCommand):
    """Its help shows text as it is written, brackets included, and no type beside a switch."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = copy.copy(self)
        shown.params = [copy.copy(parameter) for parameter in self.params]
        shown.help, shown.epilog = _escaped(self.help), _escaped(self.epilog)
        for parameter in shown.params:
            parameter.help = _escaped(parameter.help)  # type: ignore[attr-defined]
        super(RecordCommand, shown).format_help(ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))


def without_types(parameters: list[Any]) -> list[Any]:
    """The same parameters; help pages then show no `<bool>` beside a switch."""
    for parameter in parameters:
        if getattr(parameter, "is_bool_flag", False):
            parameter.display_type_rich = lambda ctx: None
    return parameters


def _escaped(text: str | None) -> str | None:
    """For rich, which takes `[mla]` for markup. A backslash before the bracket keeps it."""
    return re.sub(r"\\*\[(?=[a-zA-Z/@#])", lambda found: "\\" + found[0], text) if text else text


def variable(command: str, flag: str) -> str:
    """The environment variable of an option: TRTSPEC_BUILD_CONFIG_TP_SIZE of `--tp-size` of build-config."""
    return f"TRTSPEC_{command}_{flag.removeprefix('--')}".upper().replace("-", "_")


def long_flag(option: TyperOption) -> str:
    """The first spelling with two dashes, which also names the variable."""
    return next(flag for flag in option.opts if flag.startswith("--"))


def unknown_variables(command: TyperCommand, environ: Iterable[str]) -> list[str]:
    """Variables with the prefix of this command that none of its options reads, such as a misspelt one."""
    known = {name for parameter in command.params if parameter.envvar for name in parameter.envvar}
    prefix = variable(str(command.name), "")
    return sorted(name for name in environ if name.startswith(prefix) and name not in known)


def ignore_service_links(command: TyperCommand, environ: Mapping[str, str]) -> list[str]:
    """The variables that Kubernetes sets in every pod for a Service called like the command, such as
    TRTSPEC_SERVE_PORT=tcp://10.0.0.1:8000 for `trtspec-serve`; the options of `command` no longer read them."""
    prefix = variable(str(command.name), "")
    own = {name: value for name, value in environ.items() if name.startswith(prefix)}
    links = {name for name, value in own.items() if LINK_VALUE.fullmatch(value) or LINK_NAME.search(name)}
    for parameter in command.params:
        if parameter.envvar:
            parameter.envvar = [name for name in parameter.envvar if name not in links]
    return sorted(links)


def parsed(kind: Any, text: str, name: str) -> Any:
    """A value of a type that parses its own text: `kind.parse` raises ValueError for a text that is not `kind.what`,
    and this UsageError, with `name` and `kind.example`. str() of a value is the text again."""
    if text == "":
        raise UsageError(f"{name} is empty, as with a variable that is not set", "give it a value, or leave it out")
    try:
        return kind.parse(text)
    except ValueError as error:
        why = f": {error}" if str(error) else ""
        raise UsageError(f"{name} {text} is not {kind.what}{why}", f"write {name} {kind.example}") from None


def refuse_empty(options: Any) -> None:
    """Raises UsageError for the first field that is an empty text, as the variable of a script is that is not set: it
    would be taken for one that was not given."""
    for name, value in vars(options).items():
        if value == "" or (isinstance(value, tuple) and "" in value):
            flag = flag_of(type(options), name)
            raise UsageError(f"{flag} is empty, as with a variable that is not set", "give it a value, or leave it out")


def note(text: str) -> None:
    """A line on stderr, also where no person is there; not with -q."""
    if os.environ.get("TRTSPEC_QUIET") != "1":
        sys.stderr.write(f"note: {text}\n")


def given(options: Any) -> set[str]:
    """Names of the fields that the user set: on the command line or in the environment, or, where no command runs,
    whatever differs from its default."""
    running = _typed.get()
    if running is not None and running[1] is type(options):
        return set(running[2])
    return {field.name for field in dataclasses.fields(options) if getattr(options, field.name) != _default(field)}


def flag_of(record: type, name: str) -> str:
    """How a field is typed: `--tp-size`, or the name of an argument."""
    declared = _declared(record, name)
    if isinstance(declared, typer.models.ArgumentInfo):
        return str(declared.metavar or name.upper())
    return _flags(declared, name)[0]


def words(record: Any, always: Iterable[str] = ()) -> list[str]:
    """The arguments and options that make `record` again, in the order of its fields: what differs from its default,
    and the fields named in `always`."""
    kept, found = set(always), []
    for field in dataclasses.fields(record):
        value, declared = getattr(record, field.name), _declared(type(record), field.name)
        if value is None or (value == _default(field) and field.name not in kept):
            continue
        if isinstance(declared, typer.models.ArgumentInfo):
            found += [str(item) for item in (value if isinstance(value, tuple) else (value,))]
            continue
        on, off = _flags(declared, field.name)
        if isinstance(value, bool):
            found += [on if value else off] if value or off else []
        else:
            found += [word for item in (value if isinstance(value, tuple) else (value,)) for word in (on, str(item))]
    return found


def parse(record: type[Record], line: str | Sequence[str], name: str = "command") -> Record:
    """The record that these words make, the environment left out. Raises UsageError as the command line would."""
    split = shlex.split(line) if isinstance(line, str) else list(line)
    running = _typed.get()
    command = click_command(name, record, lambda options: options)
    for parameter in command.params:
        parameter.envvar = None
    try:
        return command.main(split, prog_name=name, standalone_mode=False)
    except CLICK_ERROR as error:
        raise UsageError(f"{shlex.join(split)} does not parse: {error.format_message()}") from None
    except UsageError as error:
        raise UsageError(f"{shlex.join(split)} does not parse: {error.message}", error.remedy) from None
    finally:
        _typed.set(running)


def _declared(record: type, name: str) -> Any:
    hint = _hints(record)[name]
    return next(item for item in hint.__metadata__ if isinstance(item, typer.models.ParameterInfo))


@functools.cache
def _hints(record: Any) -> dict[str, Any]:
    """Evaluated once: the annotations are text until then, and each of them calls typer."""
    return typing.get_type_hints(record, include_extras=True)


def _flags(declared: Any, name: str) -> tuple[str, str]:
    """The long spelling and, of a switch with two, the one that turns it off."""
    written = [declared.default, *(declared.param_decls or ())]  # in Annotated, the first spelling is `default`
    spelled = [text for text in written if isinstance(text, str) and text.startswith("--")]
    on, _, off = (spelled[0] if spelled else f"--{name.replace('_', '-')}").partition("/")
    return on, off


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(next(iter(typing.get_args(hint)), None)) is tuple


def _with_modes(hint: Any) -> Any:
    """The same declaration, its help beginning with the modes that use the option, where they are one or two."""
    kind, *metadata = typing.get_args(hint)
    labels = [mode.label for rule in metadata if isinstance(rule, Modes) for mode in rule.modes if mode.label]
    if not 0 < len(labels) <= 2:
        return hint
    said = " and ".join(labels)
    said = said.capitalize() if said.islower() else said
    shown = [copy.copy(item) for item in metadata if isinstance(item, typer.models.ParameterInfo)]
    for item in shown:
        item.help = f"{said}: {item.help}"
    return typing.Annotated[(kind, *shown)]


def _with_parser(hint: Any, flag: str) -> Any:
    """The same declaration, with the parser of a type that has one of its own."""
    inner, *metadata = typing.get_args(hint)
    kind = next((one for one in (inner, *typing.get_args(inner)) if hasattr(one, "parse")), None)
    if kind is None:
        return hint
    infos = [copy.copy(item) for item in metadata if isinstance(item, typer.models.ParameterInfo)]
    for info in infos:
        info.parser = lambda value: parsed(kind, value, flag) if isinstance(value, str) else value
        if isinstance(info, typer.models.OptionInfo):
            info.metavar = info.metavar or getattr(kind, "metavar", kind.example)
    return typing.Annotated[(inner, *infos)]


def _for_typer(hint: Any, default: Any) -> tuple[Any, Any]:
    """Typer fills lists; records hold tuples, which cannot be changed later."""
    if not _is_tuple(hint):
        return hint, default
    inner, *metadata = typing.get_args(hint)
    listed: Any = list[typing.get_args(inner)[0]] | None  # type: ignore[misc]
    return typing.Annotated[(listed, *metadata)], list(default) or None if isinstance(default, tuple) else default
