"""Defines `trtspec doctor`, which reports installed packages, needs of commands and hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtspec.errors import Problem, check_failure
from trtspec.records import JsonOption
from trtspec.report import Result, Table, value_table

if TYPE_CHECKING:
    from trtspec.verbs.doctor import DoctorReport


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Options of `trtspec doctor`."""

    json_: JsonOption = False


def doctor(options: DoctorOptions) -> Result:
    """Report what is installed, what each command lacks, and what hardware this machine has.

    Changes nothing. Exits with status 3 when something is broken, not when an optional part is
    absent.
    """
    from trtspec.verbs.doctor import examine

    state = examine()
    problems = state.pop("problems")
    failure = check_failure("this installation or machine has errors", problems)
    return Result(state, problems, tables(state), lines(state, problems), failure)


def tables(report: DoctorReport) -> list[Table]:
    """Returns the table of the commands, and the table of the machine's properties."""
    rows = [
        (command, "ready" if state["ready"] else "missing", ", ".join(state["missing"]))
        for command, state in report["commands"].items()
    ]
    disk = [
        f"{name.replace('_', ' ')} {size / 1e9:,.0f} GB" for name, size in report["disk"].items()
    ]
    machine = {key: value for key, value in report.items() if key != "commands"}
    machine |= {
        "gpus": report["gpus"] or "nvidia-smi is missing or reports no GPU",
        "disk": ", ".join(disk),
    }
    all_columns = frozenset(range(3))
    return [
        Table("", ("command", "", "missing"), rows, text_columns=all_columns, ruled=False),
        value_table(machine),
    ]


def lines(report: DoctorReport, problems: list[Problem]) -> list[str]:
    """Returns each install command with the names of the commands that need it.

    The last line says so if there are no problems.
    """
    output = [""]
    commands: dict[str, list[str]] = {}
    for name, state in report["commands"].items():
        commands.setdefault(state["install"], []).append(name)
    commands.pop("", None)  # these commands are ready
    for install, names in commands.items():
        output += [f"for {', '.join(names)}:", f"    {install}"]
    if not problems:
        output += ["no problems found"]
    return output
