"""`trtspec convert`: an Eagle3 head from one project's layout to another's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trtspec.cli.options import DryRunOption, ForceOption, JsonOption
from trtspec.cli.progress import progress
from trtspec.errors import Problem, has_errors

Dialect = Literal["trtllm", "vllm", "sglang", "speculators", "torchspec", "specforge", "safeailab"]
Choice = Literal["auto", "keep", "drop", "target"]


def convert(
    head: Annotated[str, typer.Argument(help="The Eagle3 head: a directory or a hub id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the converted head.")],
    to: Annotated[Dialect, typer.Option(help="Whose layout to write; trtllm is ModelOpt's.")],
    from_: Annotated[
        Dialect | None, typer.Option("--from", help="Whose layout the head has. Default: detected.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="The head's target: to check the pair, and to borrow from if its weights are here."),
    ] = None,
    lm_head: Annotated[
        Choice, typer.Option(help="auto: the head's own, else the target's where the layout needs one.")
    ] = "auto",
    embed_tokens: Annotated[
        Choice, typer.Option(help="auto: as the layout has it, without losing an embedding that is not the target's.")
    ] = "auto",
    rope_theta: Annotated[
        float | None, typer.Option(min=1, help="The rope base that the head was trained with, if config.json is wrong.")
    ] = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json_output: JsonOption = False,
) -> None:
    """Rewrite an Eagle3 head from one project's layout to another's.

    Weights pass through unchanged. What the destination cannot express is refused with the reason, exit status 3.
    """
    from trtspec.checkpoint.hub import resolve
    from trtspec.heads.convert.conversion import Options, convert_head
    from trtspec.report import print_json

    options = Options(to, from_, lm_head, embed_tokens, rope_theta, dry_run, force)
    pair = resolve(target, allow_download=False) if target is not None else None
    with progress("converting") as show:
        result = convert_head(resolve(head), output, options, pair, show)
    problems: list[Problem] = result["problems"]
    if json_output:
        print_json(result | {"problems": [problem.to_dict() for problem in problems]})
    else:
        _show(result, output)
    if has_errors(problems):
        raise typer.Exit(3)


def _show(result: dict[str, Any], output: Path) -> None:
    from trtspec.report import problem_lines

    out = sys.stdout.write
    if has_errors(result["problems"]):
        out(f"not converted to {result['to']}:\n")
    else:
        verb = "would write" if result["dry_run"] else "wrote"
        out(f"{verb} {output}: {result['from']} -> {result['to']}, EAGLE-{result['eagle']}, ")
        out(f"{result['attention'].upper()}, {result['tensors']} tensors, {result['parameters']:,} parameters, ")
        out(f"{result['bytes_out']:,} bytes in {result['seconds']} s\n")
        layers = result["aux_layers"]
        out(f"captured layer outputs (0-based): {layers if layers else 'not said; engines take their default'}\n")
        if result["eagle3_layers_to_capture"]:
            out("TensorRT-LLM needs in its YAML, under speculative_config (build-config writes it):\n")
            out(f"    eagle3_layers_to_capture: {result['eagle3_layers_to_capture']}\n")
    lines = problem_lines(result["problems"])
    out("".join(f"{line}\n" for line in lines))
    if not has_errors(result["problems"]):
        for engine, command in result["serve"].items():
            out(f"\n# {engine}\n{command}\n")
