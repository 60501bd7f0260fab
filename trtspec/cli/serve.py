"""`trtspec serve`: checks, then one server: TensorRT-LLM, the front of several, vLLM, or the reference backend in this
process."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec.cli.options import DryRunOption, HeadOption, JsonOption, TargetArgument
from trtspec.errors import CheckFailed, MissingDependency, UsageError, has_errors
from trtspec.records import Mode, narrow, words
from trtspec.trtllm.serve.start import EngineStart, FrontStart
from trtspec.vllm import VllmStart

if TYPE_CHECKING:
    from trtspec.checkpoint.hub import Resolved
    from trtspec.launch.preflight import ServerPlan

API_KEY = "TRTSPEC_SERVE_API_KEY"  # the key itself is never printed


@dataclass(frozen=True, kw_only=True)
class ReferenceStart:
    """The options that the reference backend uses; None leaves the choice to the server."""

    target: str
    head: str | None = None
    host: str = "localhost"
    port: int = 8000
    dtype: str = "auto"
    device: str = "cpu"
    speculation: Literal["eagle3", "prompt-lookup", "none"] | None = None
    draft_len: int | None = None
    draft_sampling: Literal["argmax", "probabilistic"] | None = None
    prefix_reuse: Literal["warm", "off"] | None = None
    prefix_cache_mib: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    served_model_name: str | None = None
    max_queue: int | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def drafter(self) -> Literal["eagle3", "prompt-lookup"] | None:
        """eagle3, prompt-lookup, or None for no speculation."""
        if self.speculation is None:
            return "eagle3" if self.head else None
        return None if self.speculation == "none" else self.speculation

    def checked(self) -> ReferenceStart:
        """Itself. Raises UsageError for options that contradict each other."""
        if self.drafter == "eagle3" and not self.head:
            raise UsageError("--speculation eagle3 needs a head", "pass --head")
        if self.drafter != "eagle3" and self.head:
            raise UsageError(f"--head is not used with --speculation {self.speculation}", "leave one of the two out")
        if self.draft_len is not None and self.drafter is None:
            raise UsageError("--draft-len is not used without speculation", "pass --head, or leave it out")
        if self.draft_sampling is not None and self.drafter != "eagle3":
            raise UsageError("--draft-sampling is not used without a head", "pass --head, or leave it out")
        if self.prefix_reuse == "off" and self.prefix_cache_mib is not None:
            raise UsageError("--prefix-cache-mib is not used with --prefix-reuse off", "leave one of the two out")
        return self


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
        Path | None, typer.Option(help="Engine YAML of TensorRT-LLM. Default: one generated for this launch.")
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
        typer.Option(min=1, help="Tensor-parallel size. Default: the file's, else 4; with vLLM 8."),
    ] = None
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests per step. Default: the file's, else the goal's; with vLLM its own; with the reference "
            "backend 16.",
        ),
    ] = None
    max_num_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per step. Default: the file's, else the goal's; with vLLM its own; with the reference backend "
            "512 of prompts.",
        ),
    ] = None
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum length of prompt and answer together, in tokens. Default: the file's, else the goal's; with "
            "vLLM its own; with the reference backend the target's, at most 4096.",
        ),
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
        Literal["warm", "off"] | None,
        typer.Option(help="Reference backend. warm: reuse the caches of a known prefix. off: do not. Default: warm."),
    ] = None
    prefix_cache_mib: Annotated[
        int | None,
        typer.Option(
            "--prefix-cache-mib",
            min=1,
            help="Reference backend: memory for texts to reuse. Default: 256.",
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
    from trtspec.addresses import bearer

    bearer(options.api_key, "the key of --api-key or TRTSPEC_SERVE_API_KEY")
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
    start: ReferenceStart = narrow(options, REFERENCE, MODES, selecting=SHARED).checked()
    if options.dry_run or options.json_:
        chosen = vars(start) | {"api_key": None, "speculation": start.drafter or "none"}
        typed = ServeOptions(**chosen, backend="reference")
        _show(start, words(typed, always=("backend", "host", "port", "dtype", "device")), options.json_)
    if not options.dry_run:
        _run(start)


def _show(start: ReferenceStart, command: list[str], as_json: bool) -> None:
    """The `command` with every choice written out; names are looked up, nothing is fetched."""
    from trtspec.checkpoint.hub import load_head, load_target
    from trtspec.checkpoint.target_problems import require_target
    from trtspec.report import print_json

    target = load_target(start.target)
    if target.resolved.path is not None:
        require_target(target.resolved.path)
    if start.head:
        load_head(start.head)
    argv = [sys.executable, "-m", "trtspec", "serve", *command]
    if as_json:
        print_json(
            {"argv": argv, "env": {API_KEY: "(not shown)"} if start.api_key else {}, "config": {}, "problems": []}
        )
    else:
        sys.stdout.write((f'{API_KEY}="${API_KEY}" ' if start.api_key else "") + shlex.join(argv) + "\n")


def _run(start: ReferenceStart) -> None:
    """Fetches what is not here, then serves until a signal ends it."""
    from trtspec.checkpoint.hub import must_be_head, must_be_target

    _refuse_known(start.target, must_be_target)  # before the seconds that importing PyTorch takes
    if start.head:
        _refuse_known(start.head, must_be_head)
    try:
        from trtspec.engine.server import ServerOptions, run
    except ModuleNotFoundError as missing:
        raise MissingDependency(
            f"the reference backend needs {missing.name}", "pip install 'trtspec[reference]'"
        ) from None
    target = _local(start.target, must_be_target)
    head = _local(start.head, must_be_head) if start.head else None
    sizes = ("draft_len", "draft_sampling", "max_batch_size", "max_num_tokens", "max_seq_len", "max_queue")
    known: dict[str, Any] = {key: getattr(start, key) for key in sizes if getattr(start, key) is not None}
    if start.prefix_cache_mib is not None:
        known["prefix_bytes"] = start.prefix_cache_mib << 20
    options = ServerOptions(
        host=start.host,
        port=start.port,
        dtype=start.dtype,
        device=start.device,
        drafter=start.drafter,
        prefix_reuse=start.prefix_reuse != "off",
        served_model_name=start.served_model_name or target[1],
        api_key=start.api_key,
        **known,
    )
    run(target[0], head[0] if head else None, options)


def _refuse_known(name: str, require: Callable[[Resolved], None]) -> None:
    """Raises UsageError where what is here, or known of the name, is not what is wanted; nothing is fetched."""
    from trtspec.checkpoint.hub import resolve

    known = resolve(name, allow_download=False)
    if known.path is not None or known.known is not None:
        require(known)


def _local(name: str, require: Callable[[Resolved], None]) -> tuple[Path, str | None]:
    """Directory and hub id of a checkpoint, fetched where it must be."""
    from trtspec.checkpoint.hub import resolve

    resolved = resolve(name)
    require(resolved)
    if resolved.path is None:
        raise UsageError(f"{name} is not on this machine", "pass its directory")
    return resolved.path, resolved.hub_id
