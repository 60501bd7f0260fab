"""`trtspec inspect`: what a checkpoint is and what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from trtspec.errors import UsageError, check_failure, errors_in
from trtspec.records import JsonOption, Mode, Modes, argument, checked, option
from trtspec.report import Result, Table, value_table

TARGET = Mode("`inspect TARGET`", "`inspect TARGET`")
HEAD = Mode("`inspect HEAD`", "`inspect HEAD`")
PAIR = Mode("`inspect HEAD --against ...`", "`inspect HEAD --against TARGET`")
DERIVED = Mode("`inspect TARGET --against SOURCE`", "`inspect TARGET --against SOURCE`")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    path: Annotated[str, argument("Target or Eagle3 head: a checkpoint directory or a hub id.")]
    against: Annotated[
        str | None,
        option(
            "For a head, its target. For a quantized or converted checkpoint, the source to "
            "re-read it against."
        ),
    ] = None
    sample: Annotated[
        int | None,
        option(
            "Number of large tensors to read; 0 reads all. Default: 64 with --against, else none; "
            "small tensors are always read. For a head, only 0 applies: check every value.",
            min=0,
        ),
        Modes(TARGET, DERIVED, value="[!0]*"),
    ] = None
    hashes: Annotated[
        bool,
        option(
            "Read every byte and compare the files' SHA-256 with provenance.json or the hub's "
            "records."
        ),
    ] = False
    json_: JsonOption = False


def inspect(options: InspectOptions) -> Result:
    """Report what a target or head checkpoint is and what is wrong with it.

    Reads headers, configs, a target's small tensors and samples of a head's values, so a terabyte
    takes seconds. --sample, --against and --hashes read more. Published models that are not on this
    machine are answered from the built-in catalogue. Exits with status 3 when it finds an error.
    """
    from trtspec.checkpoint.describe import describe
    from trtspec.checkpoint.hub import resolve
    from trtspec.checkpoint.published import PublishedHead
    from trtspec.specs import HeadSpec
    from trtspec.verbs.inspect import compare_derived, compare_pair, first_releases

    resolved = resolve(options.path, weights=False)
    sample = options.sample
    if options.against is not None:
        sample = None  # the comparison reads the tensors
    everything = options.sample == 0
    report = describe(resolved, all_values=everything, sample=sample, hashes=options.hashes)
    alone, against = (TARGET, DERIVED) if report.kind == "target" else (HEAD, PAIR)
    options = checked(options, alone if options.against is None else against)
    entries = report.to_dict().items()
    values = {key: value for key, value in entries if key not in ("ok", "problems")}
    if isinstance(report.known, PublishedHead) and isinstance(report.spec, HeadSpec):
        values["first_releases"] = first_releases(report.known, report.spec)
    problems = list(report.problems)
    if options.against is not None:
        other = resolve(options.against, weights=False)
        values["against"] = other.name
        if report.kind == "head" and other.kind == "target":
            values, problems = compare_pair(values, problems, report, resolved, other)
        elif report.kind == other.kind:
            result = compare_derived(report.kind, resolved, other, options.sample)
            compared = asdict(result).items()
            values["comparison"] = {name: value for name, value in compared if name != "problems"}
            problems += result.problems
        else:
            remedy = "turn them around: `trtspec inspect HEAD --against TARGET`"
            raise UsageError(f"{resolved.name} is a target and {other.name} a head", remedy)
    errors = len(errors_in(problems))
    message = f"{options.path} has {errors} error{'s' * (errors != 1)}"
    failure = check_failure(message, problems)
    lines = [""]
    if not problems:
        lines += ["no problems found"]
    tables = _tables(options.path, values, report.known)
    return Result(values, problems, tables, lines, failure)


def _tables(path: str, values: dict[str, Any], known: object) -> list[Table]:
    """Returns the tables of a checkpoint that have rows.

    They show its properties, the rounding errors by class after a comparison, its files of code,
    and a head's published tokens per step.
    """
    compared = values.get("comparison", {})
    omitted = ("comparison", "classes", "code_files", "acceptance", "sources")
    entries = (values | compared).items()
    facts = {key: value for key, value in entries if key not in omitted}
    rows = [
        (name, f"{error['tensors']:,}", f"{error['relative_error']:.4f}", f"{error['worst']:.4f}")
        for name, error in compared.get("classes", {}).items()
    ]
    errors = Table("", ("linears", "tensors", "relative error", "worst"), rows, ruled=False)
    files = list(values.get("code_files", {}).items())
    code = Table("", ("code", "SHA-256"), files, text_columns=frozenset({0, 1}), ruled=False)
    measured = [
        (json.dumps(each.figures).replace('"', ""), str(each.draft_len), each.protocol)
        for each in getattr(known, "acceptance", ())
    ]
    columns = ("published tokens per step", "drafts", "by")
    published = Table("", columns, measured, text_columns=frozenset({0, 2}), ruled=False)
    tables = (errors, code, published)
    return [value_table(facts, path), *(table for table in tables if table.rows)]
