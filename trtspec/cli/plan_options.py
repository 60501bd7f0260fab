"""The options of `trtspec plan`, declared by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trtspec.cli.options import Gpu

Moe = Literal["TRTLLM", "CUTLASS", "DEEPGEMM", "MARLIN"]

GpuOption = Annotated[Gpu, typer.Option(help="Kind of GPU.")]
GpusOption = Annotated[int, typer.Option(min=1, help="GPUs of one server.")]
TpOption = Annotated[
    int | None, typer.Option("--tp", "--tp-size", min=1, help="Tensor-parallel size. Default: all GPUs.")
]
EpOption = Annotated[
    int | None, typer.Option("--ep", "--ep-size", min=1, help="Ranks that share whole experts: 1, or all.")
]
AttentionDpOption = Annotated[bool, typer.Option("--attention-dp", help="Each rank caches its own requests.")]
IslOption = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")]
OslOption = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]
ConcurrencyOption = Annotated[str, typer.Option(help="Requests at a time, such as 1,4,16.")]
AcceptanceOption = Annotated[
    str | None,
    typer.Option(help="Tokens per step that you measured, VALUE@DRAFTS, or results.json of `trtspec bench`."),
]
MaxDraftOption = Annotated[int, typer.Option(min=1, max=16, help="Longest draft to look at.")]
KvFractionOption = Annotated[float, typer.Option(min=0.01, max=1.0, help="free_gpu_memory_fraction of the engine.")]
MoeOption = Annotated[
    Moe | None, typer.Option(help="MoE kernels. Default: the fastest that the engine can be told to use.")
]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Also draw a plot: .png, .svg or .pdf.")]
