"""`trtspec inspect`: what a checkpoint is and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtspec.cli.options import JsonOption
from trtspec.errors import Problem, UsageError, has_errors

if TYPE_CHECKING:
    from trtspec.checkpoint.hub import Resolved


def inspect(
    path: Annotated[str, typer.Argument(help="A checkpoint directory or hub id: a target or an Eagle3 head.")],
    against: Annotated[
        str | None,
        typer.Option(help="For a head: its target. For a quantized or converted checkpoint: its source, re-read."),
    ] = None,
    sample: Annotated[
        int,
        typer.Option(
            min=0, help="With --against SOURCE: how many tensors to decode and compare; 0: all, and all of a head."
        ),
    ] = 64,
    modelopt: Annotated[
        bool, typer.Option("--modelopt", help="With --against SOURCE: also compare the bytes with ModelOpt's packing.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Say what a target or head checkpoint is and what is wrong with it.

    Reads headers, configs and samples of a head's values, so it takes no longer for a terabyte than for a megabyte;
    --against also reads tensors. A published model that is not on this machine is answered from the catalogue. Exit
    status 3 when an error is found.
    """
    from trtspec.checkpoint.describe import describe
    from trtspec.checkpoint.hub import resolve
    from trtspec.report import print_json

    resolved = resolve(path, allow_download=False)
    report = describe(resolved, all_values=sample == 0)
    if against is not None:
        report |= compare(resolved, resolve(against, allow_download=False), report, sample, modelopt)
    problems: list[Problem] = report["problems"]
    if json_output:
        print_json(report | {"problems": [problem.to_dict() for problem in problems]})
    else:
        show(path, report)
    if has_errors(problems):
        raise typer.Exit(3)


def compare(
    resolved: Resolved, other: Resolved, report: dict[str, Any], sample: int, modelopt: bool = False
) -> dict[str, Any]:
    """The additional keys of --against; `problems` holds the old and the new ones."""
    if report["kind"] == "head" and other.kind == "target":
        return compare_pair(resolved, other, report)
    if report["kind"] != other.kind:
        raise UsageError(
            f"{resolved.name} is a target and {other.name} a head", "turn them around: inspect HEAD --against TARGET"
        )
    if report["kind"] == "head" and report["attention"]:
        return compare_derived_head(resolved, other, report)
    return compare_tensors(resolved, other, report, sample, modelopt)


def compare_pair(resolved: Resolved, other: Resolved, report: dict[str, Any]) -> dict[str, Any]:
    """A head against its target; a head that is none has nothing to compare."""
    from trtspec.checkpoint.headers import Checkpoint
    from trtspec.checkpoint.heads.pairing import config_problems, pair_problems, tensor_parallel_sizes, yarn_problems
    from trtspec.checkpoint.heads.read import read_head
    from trtspec.checkpoint.heads.shapes import canonical_names
    from trtspec.checkpoint.heads.values import embedding_problems

    if report["attention"] is None:
        return {"against": other.name}
    target = other.target_spec()
    checkpoint = Checkpoint.open(resolved.path) if report["source"] == "files" and resolved.path else None
    head = read_head(checkpoint)[0] if checkpoint is not None else resolved.head_spec()
    found = pair_problems(head, target, head_id=resolved.hub_id, target_id=other.hub_id)
    found += config_problems(resolved.config(), other.config())
    found += yarn_problems(head, target) if checkpoint is not None else []
    own = canonical_names(checkpoint.tensors).get("embed_tokens.weight") if checkpoint is not None else None
    if checkpoint is not None and own and other.path and any(other.path.glob("*.safetensors")):
        found += embedding_problems(checkpoint, own, Checkpoint.open(other.path), target)
    sizes = tensor_parallel_sizes(head)
    return {"against": other.name, "tensor_parallel_sizes": sizes, "problems": report["problems"] + found}


def compare_derived_head(resolved: Resolved, source: Resolved, report: dict[str, Any]) -> dict[str, Any]:
    """A converted head against the head it was made from, all bytes."""
    from trtspec.checkpoint.headers import Checkpoint
    from trtspec.checkpoint.heads.compare import compare_heads

    result = compare_heads(Checkpoint.open(local(resolved)), Checkpoint.open(local(source)))
    return {"against": source.name, "problems": report["problems"] + result.pop("problems"), "comparison": result}


def compare_tensors(
    resolved: Resolved, source: Resolved, report: dict[str, Any], sample: int, modelopt: bool = False
) -> dict[str, Any]:
    """A derived checkpoint against its source, tensor by tensor."""
    from trtspec.quant.modelopt import packed_by_modelopt
    from trtspec.quant.verify import compare as compare_checkpoints

    packs_as = packed_by_modelopt if modelopt else None
    result = compare_checkpoints(local(resolved), local(source), sample, packs_as)
    problems = [entry if isinstance(entry, Problem) else Problem(**entry) for entry in result.pop("problems")]
    return {"against": source.name, "comparison": result, "problems": report["problems"] + problems}


def local(resolved: Resolved) -> Path:
    if resolved.path is None:
        raise UsageError(
            f"comparing tensors needs {resolved.name} on this machine",
            f"run `hf download {resolved.hub_id}` and pass its directory",
        )
    return resolved.path


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
