"""`trtspec inspect`: what a checkpoint is and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from trtspec.cli.options import JsonOption
from trtspec.errors import CheckFailed, Problem, has_errors
from trtspec.records import Mode, given, narrow, refuse_unused


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    path: Annotated[str, typer.Argument(help="Target or Eagle3 head: a checkpoint directory or a hub id.")]
    against: Annotated[
        str | None,
        typer.Option(
            help="For a head, its target. For a quantized or converted checkpoint, the source to re-read it against."
        ),
    ] = None
    sample: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of tensors to decode and compare with the source; 0 compares all. "
            "For a head, only 0 applies: check every value instead of a sample.",
        ),
    ] = 64
    modelopt: Annotated[
        bool, typer.Option("--modelopt", help="Also compare the packed bytes with ModelOpt's own packing.")
    ] = False
    json_: JsonOption = False


@dataclass(frozen=True, kw_only=True)
class InspectTarget:
    path: str
    json_: bool


@dataclass(frozen=True, kw_only=True)
class InspectHead:
    path: str
    sample: int
    json_: bool


@dataclass(frozen=True, kw_only=True)
class InspectPair:
    """A head against its target, or against the head that it was converted from."""

    path: str
    against: str
    sample: int
    json_: bool


@dataclass(frozen=True, kw_only=True)
class InspectDerived:
    """A target against the checkpoint that it was made from."""

    path: str
    against: str
    sample: int
    modelopt: bool
    json_: bool


TARGET = Mode("`inspect TARGET`", InspectTarget, "`inspect TARGET`")
HEAD = Mode("`inspect HEAD`", InspectHead, "`inspect HEAD`")
PAIR = Mode("`inspect HEAD --against ...`", InspectPair, "`inspect HEAD --against TARGET`")
DERIVED = Mode("`inspect TARGET --against SOURCE`", InspectDerived, "`inspect TARGET --against SOURCE`")
MODES = (TARGET, HEAD, PAIR, DERIVED)


def inspect(options: InspectOptions) -> None:
    """Report what a target or head checkpoint is and what is wrong with it.

    Reads headers, configs and samples of a head's values, so a terabyte takes no longer than a megabyte; --against
    also reads tensors. Published models that are not on this machine are answered from the built-in catalogue. Exits
    with status 3 when it finds an error.
    """
    from trtspec.checkpoint.describe import describe
    from trtspec.checkpoint.hub import resolve
    from trtspec.inspection import compare
    from trtspec.report import print_json

    resolved = resolve(options.path, allow_download=False)
    found = describe(resolved, all_values=options.sample == 0)
    narrow(options, _mode(options, found["kind"]), MODES)
    if options.against is not None:
        other = resolve(options.against, allow_download=False)
        found |= compare(resolved, other, found, options.sample, options.modelopt)
    problems: list[Problem] = found["problems"]
    if options.json_:
        print_json(found | {"problems": [problem.to_dict() for problem in problems]})
    else:
        show(options.path, found)
    if has_errors(problems):
        errors = sum(problem.severity == "error" for problem in problems)
        raise CheckFailed(f"{options.path} has {errors} error{'s' * (errors != 1)}", "follow the remedy of each above")


def _mode(options: InspectOptions, kind: str) -> Mode:
    """Raises UsageError for a sample of a head, whose values are sampled or read whole."""
    if kind == "target":
        return TARGET if options.against is None else DERIVED
    if options.sample != 0 and "sample" in given(options):
        mode = HEAD if options.against is None else PAIR
        refuse_unused(options, ["sample"], f"by {mode.name}, except --sample 0")
    return HEAD if options.against is None else PAIR


def show(name: str, report: dict[str, Any]) -> None:
    """A readable table on stdout, then the problems with their remedies."""
    from rich.console import Console
    from rich.table import Table

    from trtspec.report import problem_lines

    console = Console(highlight=False)
    table = Table(title=name, title_justify="left", show_header=False, box=None, pad_edge=False)
    for label, value in rows(report):
        table.add_row(label, value)
    console.print(table)
    lines = problem_lines(report["problems"])
    console.print("\n".join(["", *lines]) if lines else "\nno problems found", markup=False, soft_wrap=True)


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each line; figures that are not known are left out."""
    kind = "target" if report["kind"] == "target" else "Eagle3 draft head" if report["eagle"] else "no Eagle3 head"
    lines = [("kind", kind), ("architecture", f"{report['architecture']} ({report['model_type']})")]
    if report["kind"] == "head" and report["eagle"]:
        layers = report["aux_layers"]
        lines += [
            ("eagle", f"{report['eagle']}, {report['attention'].upper()} attention, {report['dialect']} layout"),
            ("reads layers", ", ".join(map(str, layers)) if layers else "not said; the target's default"),
            ("draft vocabulary", f"{report['draft_vocab_size']:,} of {report['vocab_size']:,}"),
        ]
    elif report["kind"] == "target":
        lines += [
            ("family", report["family"]),
            ("format", f"{report['format']}, KV cache {report['kv_cache'] or 'not quantized'}"),
            ("layers", f"{report['layers']}, default capture {report['default_aux_layers']}"),
            ("end of text", ", ".join(map(str, report["eos_token_ids"]))),
        ]
    if report["parameters"]:
        lines.append(("parameters", f"{report['parameters']:,}"))
    if report["bytes"]:
        shards = f" in {report['shards']} file{'s' * (report['shards'] != 1)}" if report["shards"] else ""
        lines.append(("bytes", f"{report['bytes']:,} ({report['bytes'] / 1e9:.3g} GB){shards}"))
    if report["dtypes"]:
        lines.append(
            ("stored as", ", ".join(f"{code} {size / 1e6:,.1f} MB" for code, size in report["dtypes"].items()))
        )
    if report["source"] == "catalogue":
        lines.append(("source", "trtspec's catalogue; the files are not on this machine"))
        lines.append(("not verified", ", ".join(report["unverified"]) or "nothing"))
    if "tensor_parallel_sizes" in report:
        lines.append(("tensor parallel", f"{report['tensor_parallel_sizes']} divide the head"))
    return lines + comparison_rows(report.get("comparison", {}))


def comparison_rows(comparison: dict[str, Any]) -> list[tuple[str, str]]:
    """What re-reading a derived checkpoint against its source found."""
    lines = []
    if comparison:
        lines.append(("re-read", f"{comparison['compared']} of {comparison['tensors']} tensors"))
    for name, found in comparison.get("classes", {}).items():
        error = f"relative error {found['relative_error']:.4f}, worst {found['worst']:.4f}, {found['tensors']} tensors"
        lines.append((name, error))
    for name, found in comparison.get("layers", {}).items():
        bar = "\u2588" * round(200 * found["relative_error"])  # one for every half per cent
        lines.append((f"layer {name}", f"{found['relative_error']:.4f} {bar}"))
    if comparison.get("classes"):
        lines.append(("all-zero blocks", f"{comparison['zero_blocks']:,}"))
    if "packed_alike" in comparison:
        lines.append(("ModelOpt's bytes", f"{comparison['packed_alike']} tensors packed alike"))
    return lines
