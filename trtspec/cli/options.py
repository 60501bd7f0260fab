"""Options that mean the same on every command, declared once."""

from __future__ import annotations

from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of a table.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would happen, do nothing.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an output that already exists.")]
