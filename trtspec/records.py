"""One frozen record per command: a dataclass whose fields carry their typer declaration.

The command line, its environment variables, the line that replays a command and the parser of that line are all made
from the record, so an option is written down once. A command with several modes has one record per mode beside it: the
names of its fields are the options which that mode uses, and `narrow` refuses the others by name.

    @dataclass(frozen=True, kw_only=True)
    class PlanOptions:
        target: Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")]
        gpus: Annotated[int, typer.Option(min=1, help="GPUs of one server.")] = 4
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
from typing import Any, Literal, TypeVar

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


@dataclass(frozen=True)
class Mode:
    """One way to run a command. `record` holds the options that it uses; `how` is what selects it, as typed."""

    name: str
    record: type
    how: str


def without(record: type, *unused: str) -> type:
    """The record of a mode that uses every field of `record` but these."""
    kept = [field for field in dataclasses.fields(record) if field.name not in unused]
    parts = [(field.name, Any, dataclasses.field(default=field.default)) for field in kept]
    return dataclasses.make_dataclass(record.__name__, parts, frozen=True, kw_only=True)


def click_command(name: str, record: type[Record], run: Callable[[Record], Any], **settings: Any) -> TyperCommand:
    """The command `name`, which fills `record` and calls `run` with it. Every option can also be given as
    TRTSPEC_<NAME>_<LONG FLAG>. `settings` go to typer, for example `epilog`."""

    def filled(context: typer.Context, **values: Any) -> Any:
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
        hints[field.name], default = _for_typer(hints[field.name], _default(field))
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


def narrow(options: Any, chosen: Mode, modes: Sequence[Mode], *, selecting: Iterable[str] = ()) -> Any:
    """The record of `chosen`, filled from `options`, whose fields it shares by name.

    What was typed and is not used there raises UsageError with the flag; what comes from the environment gets a note,
    because an image sets its variables for every mode. `selecting` are the fields that chose the mode.
    """
    used = {field.name for field in dataclasses.fields(chosen.record)}
    for field in dataclasses.fields(options):
        if field.name in used or field.name in selecting:
            continue
        others = [mode.how for mode in modes if field.name in {item.name for item in dataclasses.fields(mode.record)}]
        listed = " or ".join([", ".join(others[:-1]), others[-1]] if len(others) > 1 else others)
        remedy = f"leave it out, or use {listed}" if others else "leave it out"
        refuse_unused(options, (field.name,), f"by {chosen.name}", remedy)
    shared = used & {field.name for field in dataclasses.fields(options)}
    return chosen.record(**{name: getattr(options, name) for name in shared})


def refuse_unused(options: Any, names: Iterable[str], where: str, remedy: str = "leave it out") -> None:
    """Raises UsageError for the first of these fields that was typed, and notes those that come from the environment:
    "--force is not used `where`", for example "without --output"."""
    command, _, typed = _typed.get() or ("", type(options), {})
    for name in names:
        if name not in given(options):
            continue
        flag = flag_of(type(options), name)
        if typed.get(name) == "variable":
            note(f"{variable(command, flag)} is not used {where}")
        else:
            raise UsageError(f"{flag} is not used {where}", remedy)


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


def _for_typer(hint: Any, default: Any) -> tuple[Any, Any]:
    """Typer fills lists; records hold tuples, which cannot be changed later."""
    if not _is_tuple(hint):
        return hint, default
    inner, *metadata = typing.get_args(hint)
    listed: Any = list[typing.get_args(inner)[0]] | None  # type: ignore[misc]
    return typing.Annotated[(listed, *metadata)], list(default) or None if isinstance(default, tuple) else default
