"""The options of `trtspec serve`, and what they are used by: TensorRT-LLM, the front of several servers, vLLM, or the
reference backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from trtspec.records import DryRunOption, Excludes, HeadOption, JsonOption, Mode, Modes, Needs, TargetArgument

ENGINE = Mode("the TensorRT-LLM engine", "`backend` trtllm", "TensorRT-LLM")
FRONT = Mode("the front of a disaggregated deployment", "`disaggregated` FILE", "TensorRT-LLM")
VLLM = Mode("vLLM", "`backend` vllm", "vLLM")
REFERENCE = Mode("the reference backend", "`backend` reference", "the reference backend")
SERVERS = Modes(ENGINE, VLLM, REFERENCE)  # whatever generates
LAUNCHED = Modes(ENGINE, FRONT, VLLM)  # whatever runs in a process of its own


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """None: not given, and the choice of whatever serves. Times in seconds."""

    target: TargetArgument
    passed: Annotated[
        tuple[str, ...],
        typer.Argument(metavar="[-- OPTIONS]", help="Any option of trtllm-serve or vllm serve, after `--`."),
        Modes(ENGINE, VLLM),
    ] = ()
    head: Annotated[HeadOption, SERVERS] = None
    backend: Annotated[
        Literal["trtllm", "vllm", "reference"],
        typer.Option(help="trtllm: NVIDIA TensorRT-LLM. vllm: vLLM. reference: plain PyTorch, on a CPU or a GPU."),
    ] = "trtllm"
    config: Annotated[
        Path | None, typer.Option(help="Engine YAML. Default: one generated for this launch."), Modes(ENGINE)
    ] = None
    trtllm_version: Annotated[
        str | None, typer.Option(help="Version to check for. Default: the installed one."), Modes(ENGINE)
    ] = None
    vllm_version: Annotated[
        str | None, typer.Option(help="Release to check for. Default: the installed one."), Modes(VLLM)
    ] = None
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 in a container."), SERVERS] = "localhost"
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port (reference backend only)."),
        SERVERS,
    ] = 8000
    goal: Annotated[
        Literal["latency", "throughput"] | None,
        typer.Option(help="What the default sizes are chosen for, as in build-config. Default: latency."),
        Modes(ENGINE),
    ] = None
    tp_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tensor-parallel size. Default: the file's, else 4; with vLLM 8."),
        Modes(ENGINE, VLLM),
    ] = None
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests per step. Default: the file's, else the goal's; with vLLM its own; with the reference "
            "backend 16.",
        ),
        SERVERS,
    ] = None
    max_num_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per step. Default: the file's, else the goal's; with vLLM its own; with the reference backend "
            "512 of prompts.",
        ),
        SERVERS,
    ] = None
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum length of prompt and answer together, in tokens. Default: the file's, else the goal's; with "
            "vLLM its own; with the reference backend the target's, at most 4096.",
        ),
        SERVERS,
    ] = None
    draft_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens drafted per step. Default: 3."),
        SERVERS,
        Excludes("config", why="which decides it"),
        Needs("head"),
    ] = None
    draft_sampling: Annotated[
        Literal["argmax", "probabilistic"] | None,
        typer.Option(
            help="Drafts of sampled requests are the head's likeliest tokens, or drawn "
            "from its distribution. Both keep the target's distribution. Default: argmax, as vLLM and TensorRT-LLM do."
        ),
        Modes(VLLM, REFERENCE),
        Needs("head"),
    ] = None
    prefix_cache_mib: Annotated[
        int | None,
        typer.Option(
            "--prefix-cache-mib",
            min=0,
            help="Memory for the caches of known prefixes; 0: none is reused. Default: 256.",
        ),
        Modes(REFERENCE),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Data type of the computation. auto: bfloat16 where it is native."),
        Modes(VLLM, REFERENCE),
    ] = "auto"
    device: Annotated[str, typer.Option(help="cpu or cuda."), Modes(REFERENCE)] = "cpu"
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in /v1/models. Default: the target's."), SERVERS
    ] = None
    max_queue: Annotated[
        int | None,
        typer.Option(min=0, help="Requests that may wait; more get status 429. Default: 512."),
        Modes(REFERENCE),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that requests must carry. Better set TRTSPEC_SERVE_API_KEY: a "
            "command line is visible to other users.",
        ),
        Modes(VLLM, REFERENCE),
    ] = field(default=None, repr=False)
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Let the engine run the Python code in the checkpoint."),
        Modes(ENGINE, VLLM),
    ] = False
    launcher: Annotated[
        Literal["direct", "slurm", "mpi", "lws"],
        typer.Option(help="What starts the ranks on several nodes: Slurm, MPI, or a LeaderWorkerSet's leader."),
        Modes(ENGINE),
    ] = "direct"
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of nodes. Default: the file's, else 1."), Modes(ENGINE)
    ] = None
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs to use on each node. Default: ranks divided by nodes."),
        Modes(ENGINE),
    ] = None
    launcher_args: Annotated[
        str,
        typer.Option(help="Extra arguments for srun or mpirun, as one quoted string."),
        Modes(ENGINE),
        Needs("launcher=slurm", "launcher=mpi", "launcher=lws"),
    ] = ""
    role: Annotated[
        Literal["context", "generation"] | None,
        typer.Option(help="One half of a disaggregated deployment. Default: the file's, else none."),
        Modes(ENGINE),
    ] = None
    disaggregated: Annotated[
        Path | None, typer.Option(help="Launch the front of a disaggregated deployment from this file."), Modes(FRONT)
    ] = None
    startup_timeout: Annotated[float, typer.Option(min=0, help="Seconds until the server must be ready."), LAUNCHED] = (
        7200.0
    )
    generation_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the first completion once /health is OK."), LAUNCHED
    ] = 300.0
    stop_grace: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a clean shutdown before sending SIGKILL."), LAUNCHED
    ] = 30.0
    health_interval: Annotated[
        float,
        typer.Option(min=0, help="Seconds between two health checks of a ready server; 0 turns them off."),
        LAUNCHED,
    ] = 15.0
    health_failures: Annotated[
        int,
        typer.Option(min=1, help="Failed health checks in a row after which the server is stopped as hung."),
        LAUNCHED,
    ] = 8
    dry_run: DryRunOption = False
    json_: JsonOption = False

    @property
    def mode(self) -> Mode:
        served = {"trtllm": ENGINE, "vllm": VLLM, "reference": REFERENCE}[self.backend]
        return FRONT if served is ENGINE and self.disaggregated is not None else served
