"""Options that mean the same on every command, declared once."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Gpu = Literal["b200", "b300", "gb200", "gb300", "h200", "h100"]

TargetArgument = Annotated[str, typer.Argument(help="Checkpoint directory or hub id of the target.")]
HeadOption = Annotated[str | None, typer.Option(help="Eagle3 head: directory or hub id.")]
SourceArgument = Annotated[str, typer.Argument(metavar="SRC", help="A Kimi checkpoint: a directory or a hub id.")]
PolicyOption = Annotated[
    str | None,
    typer.Option(help="k2.5, k2.6, k2.7-code or a YAML file; default: the published one of the source's family."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of a table.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would happen, do nothing.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an output that already exists.")]
