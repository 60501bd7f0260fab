"""Defines `trtspec convert`, which rewrites an Eagle3 head in another project's layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from trtspec.checkpoint.heads.dialects import DIALECTS
from trtspec.errors import check_failure, has_errors
from trtspec.records import DryRunOption, ForceOption, JsonOption, argument, fill, option
from trtspec.report import Result, progress_bar

if TYPE_CHECKING:
    from trtspec.heads.convert.conversion import HeadConversion

    Dialect = str  # a type checker does not read the names of the layouts
else:
    Dialect = Literal[tuple(row.option for row in DIALECTS.values())]
Choice = Literal["auto", "target"]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `trtspec convert`."""

    head: Annotated[str, argument("Eagle3 head: a directory or a hub id.")]
    output: Annotated[Path, option("Directory for the converted head.", "-o")]
    to: Annotated[Dialect, option("Layout to write; trtllm is ModelOpt's layout.")]
    from_: Annotated[Dialect | None, option("Layout of HEAD.", default="detected")] = None
    target: Annotated[
        str | None,
        option(
            "Target model of the head. Checks the pair; supplies shared weights if they are "
            "stored here."
        ),
    ] = None
    embed_tokens: Annotated[
        Choice, option("Which embedding to write: auto keeps one that differs from the target's.")
    ] = "auto"
    rope_theta: Annotated[
        float | None,
        option("RoPE base the head was trained with, if its config.json is wrong.", min=1),
    ] = None
    dry_run: DryRunOption = False
    force: ForceOption = False
    json_: JsonOption = False


def convert(options: ConvertOptions) -> Result:
    """Rewrite an Eagle3 head from one project's layout to another's.

    Weights pass through unchanged. A conversion that would lose something is refused with the
    reason, exit status 3.
    """
    from trtspec.checkpoint.hub import resolve
    from trtspec.heads.convert.conversion import Options, convert_head

    # weights=False downloads no weights; weights that are on this machine are used
    target = None
    if options.target is not None:
        target = resolve(options.target, weights=False)
    with progress_bar("converting") as bar:
        head = resolve(options.head)
        settings = fill(Options, options)
        conversion = convert_head(head, options.output, settings, target, bar)
    message = f"{options.head} was not converted to {options.to}"
    failure = check_failure(message, conversion.problems)
    lines = _lines(conversion, options.output)
    return Result(conversion.to_json(), conversion.problems, lines=lines, failure=failure)


def _lines(conversion: HeadConversion, output: Path) -> list[str]:
    """Returns the summary of a conversion: its output, repairs, and commands that serve the head.

    Returns one line if errors prevented the conversion.
    """
    head = conversion.head
    if has_errors(conversion.problems):
        return [f"not converted to {conversion.to}:"]
    verb = "would write" if conversion.dry_run else "wrote"
    layers = list(head.aux_layers or ()) or "not recorded; engines use their default"
    lines = [
        f"{verb} {output}: {conversion.source_dialect} -> {conversion.to}, "
        f"EAGLE-{head.eagle}, {head.attention.upper()}, "
        f"{conversion.tensors} tensors, {conversion.parameters:,} parameters, "
        f"{conversion.bytes_out:,} bytes in {conversion.seconds} s",
        f"captured layer outputs (0-based): {layers}",
    ]
    if conversion.capture:
        lines.append(
            "TensorRT-LLM needs in its YAML, under speculative_config (build-config writes it):"
        )
        lines.append(f"    eagle3_layers_to_capture: {conversion.capture}")
    repairs = conversion.repairs
    lines += [f"repaired: {item.where}: {item.message} [{item.code}]" for item in repairs]
    for engine, command in conversion.serve.items():
        lines += ("", f"# {engine}", command)
    return lines
