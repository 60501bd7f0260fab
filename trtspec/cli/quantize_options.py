"""The options of `trtspec quantize`, declared by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Directory for the NVFP4 checkpoint.")]
KvCacheOption = Annotated[
    str, typer.Option(help="fp8: serve with an FP8 KV cache (a cast without scales); none: leave it to the engine.")
]
InputScalesOption = Annotated[
    str, typer.Option(help="Activation scales: `one` for 1.0 everywhere, or the file that calibration wrote.")
]
WeightScalesOption = Annotated[
    str, typer.Option(help="Block scales: max, as ModelOpt exports them; mse: of least squared error, same format.")
]
WorkersOption = Annotated[int, typer.Option(min=0, help="Processes; 0: one per core for a large source.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, or cuda: the same bytes computed on a GPU.")]
ShardOption = Annotated[
    str | None, typer.Option(help="i/n, i from 0: only part i of n, for several machines on one output directory.")
]
MergeOption = Annotated[
    bool, typer.Option("--merge", help="Check that all parts are done, then write index, card and configs.")
]
EngineOption = Annotated[
    str,
    typer.Option(help="stream: shard by shard in bounded memory; modelopt: ModelOpt's whole-model PTQ and export."),
]
RestartOption = Annotated[bool, typer.Option("--restart", help="Forget what an earlier run finished, begin anew.")]
