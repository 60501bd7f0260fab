"""`trtspec convert`: an Eagle3 head from one project's layout to another's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtspec.checkpoint.heads.dialects import DIALECTS
from trtspec.errors import CheckFailed, has_errors
from trtspec.records import DryRunOption, ForceOption, JsonOption

if TYPE_CHECKING:
    from trtspec.heads.convert.conversion import HeadConversion

    Dialect = str
else:
    Dialect = Literal[tuple(row.option for row in DIALECTS.values())]
Choice = Literal["auto", "keep", "drop", "target"]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    head: Annotated[str, typer.Argument(help="Eagle3 head: a directory or a hub id.")]
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the converted head.")]
    to: Annotated[Dialect, typer.Option(help="Layout to write; trtllm is ModelOpt's layout.")]
    from_: Annotated[Dialect | None, typer.Option("--from", help="Layout of HEAD.", show_default="detected")] = None
    target: Annotated[
        str | None,
        typer.Option(
            help="Target model of the head. Checks the pair; supplies shared weights if they are stored here."
        ),
    ] = None
    lm_head: Annotated[
        Choice,
        typer.Option(
            help="Which lm_head to write. auto: the head's own, else the target's where the layout needs one."
        ),
    ] = "auto"
    embed_tokens: Annotated[
        Choice,
        typer.Option(
            help="Which embedding to write. auto: as in the layout, but keep one that differs from the target's."
        ),
    ] = "auto"
    rope_theta: Annotated[
        float | None, typer.Option(min=1, help="RoPE base the head was trained with, if its config.json is wrong.")
    ] = None
    dry_run: DryRunOption = False
    force: ForceOption = False
    json_: JsonOption = False


def convert(options: ConvertOptions) -> None:
    """Rewrite an Eagle3 head from one project's layout to another's.

    Weights pass through unchanged. A conversion that would lose something is refused with the reason, exit status 3.
    """
    from trtspec.report import print_json, progress_bar

    with progress_bar("converting") as bar:
        done = run(options, bar.show)
    if options.json_:
        print_json(done.to_json() | {"problems": [problem.to_dict() for problem in done.problems]})
    else:
        _show(done, options.output)
    if has_errors(done.problems):
        raise CheckFailed(f"{options.head} was not converted to {options.to}", "follow the remedy of each error above")


def run(options: ConvertOptions, progress: Callable[[int, int], None] | None = None) -> HeadConversion:
    """The conversion that the options ask for."""
    from trtspec.checkpoint.hub import resolve
    from trtspec.heads.convert.conversion import Options, convert_head

    chosen = Options(
        to=options.to,
        from_=options.from_,
        lm_head=options.lm_head,
        embed_tokens=options.embed_tokens,
        rope_theta=options.rope_theta,
        dry_run=options.dry_run,
        force=options.force,
    )
    pair = resolve(options.target, allow_download=False) if options.target is not None else None
    return convert_head(resolve(options.head), options.output, chosen, pair, progress)


def _show(done: HeadConversion, output: Path) -> None:
    from trtspec.report import problem_lines

    out, head = sys.stdout.write, done.head
    if has_errors(done.problems) or head is None:
        out(f"not converted to {done.to}:\n")
        out("".join(f"{line}\n" for line in problem_lines(done.problems)))
        return
    verb = "would write" if done.dry_run else "wrote"
    out(f"{verb} {output}: {done.source_dialect} -> {done.to}, EAGLE-{head.eagle}, ")
    out(f"{head.attention.upper()}, {done.tensors} tensors, {done.parameters:,} parameters, ")
    out(f"{done.bytes_out:,} bytes in {done.seconds} s\n")
    layers = list(head.aux_layers) if head.aux_layers else "not recorded; engines use their default"
    out(f"captured layer outputs (0-based): {layers}\n")
    if done.capture:
        out("TensorRT-LLM needs in its YAML, under speculative_config (build-config writes it):\n")
        out(f"    eagle3_layers_to_capture: {done.capture}\n")
    out("".join(f"repaired: {one.where}: {one.message} [{one.code}]\n" for one in done.repairs))
    out("".join(f"{line}\n" for line in problem_lines(done.problems)))
    for engine, command in done.serve.items():
        out(f"\n# {engine}\n{command}\n")
