"""`trtspec serve`: checks, then one server: TensorRT-LLM, the front of several, vLLM, or the reference backend."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtspec.cli.options import DryRunOption, HeadOption, JsonOption, TargetArgument
from trtspec.cli.serve_reference import ReferenceStart, start_reference
from trtspec.errors import CheckFailed, UsageError, has_errors
from trtspec.records import Mode, narrow, refuse_unused, words
from trtspec.trtllm.serve.start import EngineStart, FrontStart
from trtspec.vllm import VllmStart

if TYPE_CHECKING:
    from trtspec.launch.preflight import ServerPlan


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """All options of the command. Which of them a mode uses is the fields of the mode's own record."""

    target: TargetArgument
    passed: Annotated[
        tuple[str, ...],
        typer.Argument(metavar="[-- OPTIONS]", help="After `--`: any option of trtllm-serve or vllm serve."),
    ] = ()
    head: HeadOption = None
    backend: Annotated[
        Literal["trtllm", "vllm", "reference"],
        typer.Option(help="trtllm: NVIDIA TensorRT-LLM. vllm: vLLM. reference: plain PyTorch, on a CPU or a GPU."),
    ] = "trtllm"
    config: Annotated[
        Path | None, typer.Option(help="Engine YAML. Default: one generated for this launch; reference backend: none.")
    ] = None
    trtllm_version: Annotated[
        str | None, typer.Option(help="TensorRT-LLM version to check for. Default: the installed one.")
    ] = None
    vllm_version: Annotated[str | None, typer.Option(help="vLLM release to check for. Default: the installed one.")] = (
        None
    )
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 in a container.")] = "localhost"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port (reference backend only).")
    ] = 8000
    goal: Annotated[
        Literal["latency", "throughput"] | None,
        typer.Option(help="What the default sizes are chosen for, as in build-config. Default: latency."),
    ] = None
    tp_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tensor-parallel size. Default: the file's, else 4; with vLLM 8; with the reference backend 1."
        ),
    ] = None
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Requests per step.")] = None
    max_num_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per step.")] = None
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum length of prompt and answer together, in tokens.")
    ] = None
    draft_len: Annotated[int | None, typer.Option(min=1, help="Tokens drafted per step. Default: 3.")] = None
    speculation: Annotated[
        Literal["eagle3", "prompt-lookup", "none"] | None,
        typer.Option(help="Reference backend. Default: eagle3 with --head, else none."),
    ] = None
    draft_sampling: Annotated[
        Literal["argmax", "probabilistic"] | None,
        typer.Option(
            help="vLLM and reference backend: drafts of sampled requests are the head's likeliest tokens, or drawn "
            "from its distribution. Both keep the target's distribution. Default: argmax, as vLLM and TensorRT-LLM do."
        ),
    ] = None
    prefix_reuse: Annotated[
        Literal["warm", "blind", "off"] | None,
        typer.Option(
            help="Reference backend: who reuses the cache of a known prefix. warm: the target and the head. blind: the "
            "target only, as in TensorRT-LLM with a separate draft cache. off: nobody. Default: the file's, else warm."
        ),
    ] = None
    prefix_cache_mib: Annotated[
        int | None,
        typer.Option(
            "--prefix-cache-mib",
            min=1,
            help="Reference backend: memory for texts to reuse. Default: the file's, else 256.",
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(
            help="vLLM and reference backend: data type of the computation. auto: bfloat16 where it is native."
        ),
    ] = "auto"
    device: Annotated[str, typer.Option(help="Reference backend: cpu or cuda.")] = "cpu"
    served_model_name: Annotated[str | None, typer.Option(help="Name in /v1/models. Default: the target's.")] = None
    max_queue: Annotated[
        int | None,
        typer.Option(min=0, help="Reference backend: requests that may wait; more get status 429. Default: 512."),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="vLLM and reference backend: key that requests must carry. Better set TRTSPEC_SERVE_API_KEY: a "
            "command line is visible to other users.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the engine run the Python code in the checkpoint.")
    ] = False
    launcher: Annotated[
        Literal["direct", "slurm", "mpi", "lws"],
        typer.Option(help="What starts the ranks on several nodes: Slurm, MPI, or a LeaderWorkerSet's leader."),
    ] = "direct"
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes. Default: the file's, else 1.")] = None
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs to use on each node. Default: ranks divided by nodes.")
    ] = None
    launcher_args: Annotated[str, typer.Option(help="Extra arguments for srun or mpirun, as one quoted string.")] = ""
    role: Annotated[
        Literal["context", "generation"] | None,
        typer.Option(help="One half of a disaggregated deployment. Default: the file's, else none."),
    ] = None
    disaggregated: Annotated[
        Path | None, typer.Option(help="Launch the front of a disaggregated deployment from this file.")
    ] = None
    startup_timeout: Annotated[float, typer.Option(min=0, help="Seconds until the server must be ready.")] = 7200.0
    generation_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the first completion once /health is OK.")
    ] = 300.0
    stop_grace: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a clean shutdown before sending SIGKILL.")
    ] = 30.0
    health_interval: Annotated[
        float, typer.Option(min=0, help="Seconds between two health checks of a ready server; 0 turns them off.")
    ] = 15.0
    health_failures: Annotated[
        int, typer.Option(min=1, help="Failed health checks in a row after which the server is stopped as hung.")
    ] = 8
    dry_run: DryRunOption = False
    json_: JsonOption = False


ENGINE = Mode("the TensorRT-LLM engine", EngineStart, "--backend trtllm")
FRONT = Mode("the front of a disaggregated deployment", FrontStart, "--disaggregated FILE")
VLLM = Mode("vLLM", VllmStart, "--backend vllm")
REFERENCE = Mode("the reference backend", ReferenceStart, "--backend reference")
MODES = (ENGINE, FRONT, VLLM, REFERENCE)
SHARED = ("backend", "dry_run", "json_")  # what chooses the mode, and what all of them take


def serve(options: ServeOptions) -> None:
    """Run all preflight checks, then serve TARGET. Signals and the exit status are passed on; nothing is restarted."""
    servers = {"trtllm": _serve_trtllm, "vllm": _serve_vllm, "reference": _serve_reference}
    servers[options.backend](options)


def _serve_trtllm(options: ServeOptions) -> None:
    from trtspec.trtllm.serve.start import plan_engine, plan_front

    launching = not options.dry_run
    if options.disaggregated is not None:
        start = narrow(options, FRONT, MODES, selecting=(*SHARED, "disaggregated"))
        plan = plan_front(start, launching=launching)
    else:
        start = narrow(options, ENGINE, MODES, selecting=SHARED)
        _refuse_any_port(start.port, "trtllm-serve")
        typed = words(replace(options, passed=(), dry_run=False, json_=False))
        after = ("--", *options.passed) if options.passed else ()
        plan = plan_engine(start, replay=("trtspec", "serve", *typed, *after), launching=launching)
    _show_and_launch(plan, options)


def _serve_vllm(options: ServeOptions) -> None:
    from trtspec.vllm import plan_vllm

    start = narrow(options, VLLM, MODES, selecting=SHARED)
    _refuse_any_port(start.port, "vllm serve")
    _show_and_launch(plan_vllm(start, launching=not options.dry_run), options)


def _refuse_any_port(port: int, program: str) -> None:
    if port == 0:
        raise UsageError(f"{program} cannot be asked for any free port", "pass --port with a number above 0")


def _show_and_launch(plan: ServerPlan, options: ServeOptions) -> None:
    """What any engine is started with. Raises CheckFailed where a dry run found an error."""
    from trtspec.launch.preflight import launch
    from trtspec.report import print_json, problem_lines, write_stderr

    if options.json_:
        print_json(plan.to_dict())
    elif options.dry_run:
        sys.stdout.write(plan.text())
        write_stderr("".join(f"{line}\n" for line in problem_lines(plan.problems)))
    if not options.dry_run:
        status = launch(plan)
        if status:
            raise typer.Exit(status)
    elif has_errors(plan.problems):
        raise CheckFailed("a launch would be refused for the errors above")


def _serve_reference(options: ServeOptions) -> None:
    start: ReferenceStart = narrow(options, REFERENCE, MODES, selecting=SHARED)
    if options.config is None:
        refuse_unused(options, ["trtllm_version"], "without --config", "pass --config, or leave it out")
        options, start = replace(options, trtllm_version=None), replace(start, trtllm_version=None)
    typed = replace(options, api_key=None, dry_run=False, json_=False)
    if start.config is None:
        typed = replace(typed, speculation=start.drafter or "none")
    command = words(typed, always=("backend", "host", "port", "dtype", "device"))
    start_reference(start, command, dry_run=options.dry_run, as_json=options.json_)
