"""The options of `trtspec serve`, declared by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Backend = Literal["trtllm", "reference"]
Speculation = Literal["eagle3", "prompt-lookup", "none"]
Dtype = Literal["auto", "float32", "bfloat16"]
Goal = Literal["latency", "throughput"]
Launcher = Literal["direct", "slurm", "mpi", "lws"]
Role = Literal["context", "generation"]

PassedArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="After `--`: any option of trtllm-serve.")
]
BackendOption = Annotated[Backend, typer.Option(help="trtllm, or reference: pure PyTorch, on a CPU too.")]
ConfigOption = Annotated[
    Path | None, typer.Option(help="Engine YAML; without it one is written for this start.")
]  # fmt: skip
VersionOption = Annotated[str | None, typer.Option(help="Version to check for. Default: the installed one.")]
HostOption = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 in a container.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535)]
GoalOption = Annotated[Goal | None, typer.Option(help="As in build-config.")]
TpSizeOption = Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size. Default: the file's, else 4.")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Requests per step.")]
TokensOption = Annotated[int | None, typer.Option(min=1, help="Tokens per step (trtllm).")]
SeqLenOption = Annotated[int | None, typer.Option(min=1, help="Prompt and answer together.")]
DraftLenOption = Annotated[int | None, typer.Option(min=1, help="Tokens drafted per step. Default: 3.")]
SpeculationOption = Annotated[
    Speculation | None, typer.Option(help="Reference backend. Default: eagle3 with --head, else none.")
]
DtypeOption = Annotated[
    Dtype, typer.Option(help="Reference backend: type of computation; auto is bfloat16 where it is native.")
]
DeviceOption = Annotated[str, typer.Option(help="Reference backend: cpu or cuda.")]
NameOption = Annotated[str | None, typer.Option(help="Name in /v1/models. Default: the target's.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the engine run the code that the target brings.")
]
StartupOption = Annotated[float, typer.Option(help="Seconds until the server must be healthy.")]
GenerationOption = Annotated[float, typer.Option(help="Seconds for the first answer of a healthy one.")]
GraceOption = Annotated[float, typer.Option(help="Seconds to end in after a signal, before it is killed.")]
LauncherOption = Annotated[
    Launcher, typer.Option(help="What starts the ranks on several nodes: Slurm, MPI, or a LeaderWorkerSet's leader.")
]
NodesOption = Annotated[int | None, typer.Option(min=1, help="Nodes. Default: the file's, else 1.")]
GpusPerNodeOption = Annotated[int | None, typer.Option(min=1, help="Default: all GPUs by the number of nodes.")]
LauncherArgsOption = Annotated[str, typer.Option(help="More words for srun or mpirun, as one quoted string.")]
RoleOption = Annotated[
    Role | None, typer.Option(help="One half of a disaggregated deployment. Default: the file's, else none.")
]
DisaggregatedOption = Annotated[
    Path | None, typer.Option(help="Launch the front of a disaggregated deployment from this file.")
]
