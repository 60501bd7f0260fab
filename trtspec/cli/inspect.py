"""Defines `trtspec inspect`, which reports what a checkpoint is and what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from trtspec.errors import UsageError, check_failure, errors_in
from trtspec.records import JsonOption, Mode, Modes, argument, checked, option
from trtspec.report import Result, Table, value_table

# modes, by the type of the checkpoint and by --against
TARGET = Mode("`inspect TARGET`", "`inspect TARGET`")
HEAD = Mode("`inspect HEAD`", "`inspect HEAD`")
PAIR = Mode("`inspect HEAD --against ...`", "`inspect HEAD --against TARGET`")
DERIVED = Mode("`inspect TARGET --against SOURCE`", "`inspect TARGET --against SOURCE`")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `trtspec inspect`."""

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
        sample = None  # the comparison below reads the tensors
    all_values = options.sample == 0
    report = describe(resolved, all_values=all_values, sample=sample, hashes=options.hashes)
    mode_alone, mode_against = (TARGET, DERIVED) if report.kind == "target" else (HEAD, PAIR)
    # only now, because the mode depends on the type of the checkpoint
    options = checked(options, mode_alone if options.against is None else mode_against)
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
            comparison = compare_derived(report.kind, resolved, other, options.sample)
            entries = asdict(comparison).items()
            values["comparison"] = {name: value for name, value in entries if name != "problems"}
            problems += comparison.problems
        else:
            remedy = "turn them around: `trtspec inspect HEAD --against TARGET`"
            raise UsageError(f"{resolved.name} is a target and {other.name} a head", remedy)
    errors = len(errors_in(problems))
    plural = "" if errors == 1 else "s"
    message = f"{options.path} has {errors} error{plural}"
    failure = check_failure(message, problems)
    lines = [""]
    if not problems:
        lines += ["no problems found"]
    tables = _tables(options.path, values, report.known)
    return Result(values, problems, tables, lines, failure)


def _tables(path: str, values: dict[str, Any], known: object) -> list[Table]:
    """Returns the table of a checkpoint's properties, and the other tables that are not empty.

    The other tables show the rounding errors of a comparison by class of linears, the files of
    code, and the acceptance that was published for a head.

    path: name of the checkpoint, the title of the first table.
    values: entries of the JSON object.
    known: entry of the catalogue of published models, if any.
    """
    comparison = values.get("comparison", {})
    omitted = ("comparison", "classes", "code_files", "acceptance", "sources")
    entries = (values | comparison).items()
    properties = {key: value for key, value in entries if key not in omitted}
    rows = [
        (name, f"{error['tensors']:,}", f"{error['relative_error']:.4f}", f"{error['worst']:.4f}")
        for name, error in comparison.get("classes", {}).items()
    ]
    errors = Table("", ("linears", "tensors", "relative error", "worst"), rows, ruled=False)
    files = list(values.get("code_files", {}).items())
    code = Table("", ("code", "SHA-256"), files, text_columns=frozenset({0, 1}), ruled=False)
    acceptance_rows = [
        (json.dumps(entry.figures).replace('"', ""), str(entry.draft_len), entry.protocol)
        for entry in getattr(known, "acceptance", ())  # only heads have published acceptance
    ]
    columns = ("published tokens per step", "drafts", "by")
    acceptance = Table("", columns, acceptance_rows, text_columns=frozenset({0, 2}), ruled=False)
    tables = (errors, code, acceptance)
    return [value_table(properties, path), *(table for table in tables if table.rows)]
