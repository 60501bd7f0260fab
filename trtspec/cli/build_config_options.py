"""The options of `trtspec build-config`, declared by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trtspec.cli.options import Gpu

Goal = Literal["latency", "throughput"]
Role = Literal["context", "generation", "front"]
Format = Literal["yaml", "helm-values"]

OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="File to write; without it the text goes to stdout.")
]
VersionOption = Annotated[
    str | None, typer.Option(help="Exact version, such as 1.3.0rc20. Default: installed, else newest verified.")
]
GoalOption = Annotated[Goal, typer.Option(help="What the sizes are chosen for.")]
GpuOption = Annotated[Gpu | None, typer.Option(help="Kind of GPU: refuses what does not fit, notes what does.")]
TpSizeOption = Annotated[int, typer.Option("--tp-size", "--tp", "--gpus", min=1, help="Tensor-parallel size: GPUs.")]
EpSizeOption = Annotated[
    int | None, typer.Option("--ep-size", "--ep", min=1, help="Ranks that share whole experts. Default: by the goal.")
]
AttentionDpOption = Annotated[
    bool | None,
    typer.Option("--attention-dp/--no-attention-dp", help="Each rank caches its own requests. Default: by the goal."),
]
NodesOption = Annotated[int, typer.Option(min=1, help="Machines that one server spreads over.")]
IslOption = Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt, with --osl.")]
OslOption = Annotated[int | None, typer.Option(min=1, help="Tokens of an answer, with --isl.")]
ConcurrencyOption = Annotated[int | None, typer.Option(min=1, help="Requests at a time in the whole server.")]
BatchOption = Annotated[
    int | None, typer.Option(min=1, help="Requests per step and rank. Default: by --concurrency or the goal.")
]
TokensOption = Annotated[int | None, typer.Option(min=1, help="Tokens per step. Default: 8192.")]
SeqLenOption = Annotated[
    int | None, typer.Option(min=1, help="Prompt and answer together. Default: --isl + --osl, else 8192.")
]
DraftLenOption = Annotated[int, typer.Option(min=1, help="Tokens drafted per step.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Any engine setting, dotted: key=value. Repeatable.")
]
RoleOption = Annotated[Role | None, typer.Option(help="One part of a disaggregated deployment.")]
DisaggregatedOption = Annotated[
    Path | None, typer.Option(help="Directory for context.yml, generation.yml and front.yml.")
]
ContextUrlOption = Annotated[
    list[str] | None, typer.Option(help="host:port of a context server, for the front. Repeatable.")
]
GenerationUrlOption = Annotated[
    list[str] | None, typer.Option(help="host:port of a generation server, for the front. Repeatable.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="The recipe says that the target's code may run.")
]
FormatOption = Annotated[Format, typer.Option(help="The file alone, or chart values.")]
