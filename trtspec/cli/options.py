"""Options that mean the same on every command, declared once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtspec.data_files import gpu_names, policy_names

if TYPE_CHECKING:
    Gpu = str
else:
    Gpu = Literal[tuple(gpu_names())]  # a row in gpus.yaml is a choice here

TargetArgument = Annotated[str, typer.Argument(help="Target model: a checkpoint directory or a hub id.")]
HeadOption = Annotated[str | None, typer.Option(help="Eagle3 head: a directory or a hub id.")]
SourceArgument = Annotated[str, typer.Argument(metavar="SRC", help="Kimi checkpoint: a directory or a hub id.")]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        help=f"What to quantize and how: {', '.join(policy_names())} or a YAML file.",
        show_default="the published policy of the model family",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Run every check and show the plan; write nothing.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace existing output.")]
RestartOption = Annotated[bool, typer.Option("--restart", help="Discard an interrupted run and start over.")]
