"""`trtspec convert`: an Eagle3 head from one project's layout to another's."""

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

    Dialect = str
else:
    Dialect = Literal[tuple(row.option for row in DIALECTS.values())]
Choice = Literal["auto", "target"]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
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

    # the target's config.json is enough: it fills in what the head's does not say
    target = None
    if options.target is not None:
        target = resolve(options.target, weights=False)
    with progress_bar("converting") as bar:
        head = resolve(options.head)
        settings = fill(Options, options)
        done = convert_head(head, options.output, settings, target, bar)
    message = f"{options.head} was not converted to {options.to}"
    failure = check_failure(message, done.problems)
    lines = _lines(done, options.output)
    return Result(done.to_json(), done.problems, lines=lines, failure=failure)


def _lines(done: HeadConversion, output: Path) -> list[str]:
    head = done.head
    if has_errors(done.problems):
        return [f"not converted to {done.to}:"]
    verb = "would write" if done.dry_run else "wrote"
    layers = list(head.aux_layers or ()) or "not recorded; engines use their default"
    lines = [
        f"{verb} {output}: {done.source_dialect} -> {done.to}, "
        f"EAGLE-{head.eagle}, {head.attention.upper()}, "
        f"{done.tensors} tensors, {done.parameters:,} parameters, "
        f"{done.bytes_out:,} bytes in {done.seconds} s",
        f"captured layer outputs (0-based): {layers}",
    ]
    if done.capture:
        lines.append(
            "TensorRT-LLM needs in its YAML, under speculative_config (build-config writes it):"
        )
        lines.append(f"    eagle3_layers_to_capture: {done.capture}")
    lines += [f"repaired: {item.where}: {item.message} [{item.code}]" for item in done.repairs]
    for engine, command in done.serve.items():
        lines += ("", f"# {engine}", command)
    return lines
