"""`trtspec serve`: checks, then one server: TensorRT-LLM, the front of several, vLLM, or the reference backend, which
executes an engine YAML in this process.
"""

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
from trtspec.records import Mode, narrow, refuse_unused, words
from trtspec.trtllm.serve.start import EngineStart, FrontStart
from trtspec.vllm import VllmStart

if TYPE_CHECKING:
    from trtspec.checkpoint.hub import Resolved
    from trtspec.launch.preflight import ServerPlan
    from trtspec.trtllm.reference import Executed

API_KEY = "TRTSPEC_SERVE_API_KEY"  # the key itself is never printed


@dataclass(frozen=True, kw_only=True)
class ReferenceStart:
    """The options that the reference backend uses; None leaves the choice to the file, then to the server."""

    target: str
    head: str | None = None
    config: Path | None = None
    trtllm_version: str | None = None
    host: str = "localhost"
    port: int = 8000
    dtype: str = "auto"
    device: str = "cpu"
    speculation: Literal["eagle3", "prompt-lookup", "none"] | None = None
    draft_len: int | None = None
    draft_sampling: Literal["argmax", "probabilistic"] | None = None
    prefix_reuse: Literal["warm", "blind", "off"] | None = None
    prefix_cache_mib: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    served_model_name: str | None = None
    max_queue: int | None = None
    api_key: str | None = field(default=None, repr=False)
    tp_size: int | None = None
    cuda_graphs: bool = False

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
        if self.prefix_reuse == "blind" and self.drafter != "eagle3":
            raise UsageError("--prefix-reuse blind is about a head's cache", "pass --head, or leave it out")
        if self.prefix_reuse == "off" and self.prefix_cache_mib is not None:
            raise UsageError("--prefix-cache-mib is not used with --prefix-reuse off", "leave one of the two out")
        if self.cuda_graphs and self.device.partition(":")[0] != "cuda":
            raise UsageError(f"--cuda-graphs needs a GPU, not --device {self.device}", "pass --device cuda")
        if self.cuda_graphs and (self.tp_size or 1) > 1:
            raise UsageError(f"--cuda-graphs is for one GPU, not --tp-size {self.tp_size}", "leave one of the two out")
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
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs",
            help="Reference backend, one GPU: capture the passes of a step as CUDA graphs. Experimental.",
        ),
    ] = False
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
    start: ReferenceStart = narrow(options, REFERENCE, MODES, selecting=SHARED)
    if options.config is None:
        refuse_unused(options, ["trtllm_version"], "without --config", "pass --config, or leave it out")
        options, start = replace(options, trtllm_version=None), replace(start, trtllm_version=None)
    typed = replace(options, api_key=None, dry_run=False, json_=False)
    if start.config is None:
        typed = replace(typed, speculation=start.drafter or "none")
    command = words(typed, always=("backend", "host", "port", "dtype", "device"))
    start_reference(start, command, dry_run=options.dry_run, as_json=options.json_)


def start_reference(start: ReferenceStart, command: list[str], *, dry_run: bool, as_json: bool) -> None:
    """Shows what is asked for with `--dry-run` or `--json`, and serves without `--dry-run`. `command` is this one as
    words, with every choice written out."""
    executed = _executed(start)
    if executed is None:
        settings = start.checked()
    else:
        settings, executed = _with_file(start, executed), _beside(start, executed)
    if dry_run or as_json:
        _show(settings, executed, command, as_json)
    elif executed is not None:
        from trtspec.report import write_stderr

        write_stderr("".join(f"{line}\n" for line in executed.lines()))
    if not dry_run:
        _run(settings, executed)


def _executed(start: ReferenceStart) -> Executed | None:
    """The file of `--config` as this backend means it. Raises UsageError with its errors."""
    if start.config is None:
        return None
    from trtspec.trtllm.reference import execute, refuse_errors

    executed = execute(start.config, start.trtllm_version)
    refuse_errors(executed)
    return executed


def _with_file(start: ReferenceStart, executed: Executed) -> ReferenceStart:
    """The options with those of the file: sizes, the head and the reuse of prefixes may be set beside it."""
    for name in ("speculation", "draft_len", "draft_sampling"):
        if getattr(start, name) is not None:
            message = f"{_flag(name)} is not used with --config: the file decides"
            raise UsageError(message, "leave it out, or change speculative_config")
    file = executed.settings
    if start.head and file.draft_len is None:
        raise UsageError(f"--head is not used: {executed.path} does not speculate", "leave it out")
    chosen = {
        name: getattr(start, name) if getattr(start, name) is not None else getattr(file, name)
        for name in ("head", "prefix_reuse", "max_batch_size", "max_num_tokens", "max_seq_len")
    }
    if file.draft_len is not None and not chosen["head"]:
        raise UsageError(f"{executed.path} speculates and names no head", "pass --head")
    if start.max_seq_len is None and file.max_seq_len is not None:
        _check_positions(start.target, executed)
    return replace(
        start,
        speculation="eagle3" if file.draft_len else "none",
        draft_len=file.draft_len,
        draft_sampling=file.draft_sampling if file.draft_len else None,
        **chosen,
    ).checked()


def _beside(start: ReferenceStart, executed: Executed) -> Executed:
    """The file's list with what the command line says instead."""
    from trtspec.trtllm.deployment import MODEL_KEYS
    from trtspec.trtllm.reference import RANKS, REUSE, SIZES

    keys = {name: name for name in SIZES} | {"prefix_reuse": REUSE}
    keys |= {"head": next((key for key in MODEL_KEYS if key in executed.honoured), MODEL_KEYS[0])}
    instead = {}
    for name, key in keys.items():
        if getattr(start, name) is not None:
            written = executed.honoured.get(key, "nothing").replace(" (the file's first line)", "")
            instead[key] = f"{getattr(start, name)} ({_flag(name)}; the file: {written})"
    if start.tp_size is not None and RANKS in executed.not_applicable:
        instead[RANKS] = f"{start.tp_size} (--tp-size, whatever the file says)"
    idle = {key: reason for key, reason in executed.not_applicable.items() if key not in instead}
    return replace(executed, honoured=executed.honoured | instead, not_applicable=idle)


def _check_positions(target: str, executed: Executed) -> None:
    """Raises UsageError where the file asks for longer texts than the target has positions."""
    from trtspec.checkpoint.hub import load_target

    positions = load_target(target).spec.max_position_embeddings
    wanted = executed.settings.max_seq_len
    if wanted is not None and wanted > positions:
        message = f"{executed.path} asks for max_seq_len {wanted}, and {target} has {positions} positions"
        raise UsageError(message, f"pass --max-seq-len {positions} or less")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _show(start: ReferenceStart, executed: Executed | None, command: list[str], as_json: bool) -> None:
    """The command, and what is made of a file; names are looked up, nothing is fetched."""
    from trtspec.checkpoint.hub import load_head, load_target
    from trtspec.checkpoint.target_problems import require_target
    from trtspec.report import print_json, problem_lines, write_stderr

    target = load_target(start.target)
    if target.resolved.path is not None:
        require_target(target.resolved.path)
    if start.head:
        load_head(start.head)
    argv = [sys.executable, "-m", "trtspec", "serve", *command]
    if as_json:
        env = {API_KEY: "(not shown)"} if start.api_key else {}
        problems = executed.to_dict().pop("problems") if executed else []
        found = {"argv": argv, "env": env, "config": executed.to_dict() if executed else {}, "problems": problems}
        print_json(found)
        return
    sys.stdout.write((f'{API_KEY}="${API_KEY}" ' if start.api_key else "") + shlex.join(argv) + "\n")
    if executed is not None:
        sys.stdout.write("\n" + "".join(f"{line}\n" for line in executed.lines()))
        write_stderr("".join(f"{line}\n" for line in problem_lines(executed.problems)))


def _run(start: ReferenceStart, executed: Executed | None) -> None:
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
    sizes: dict[str, Any] = {
        key: getattr(start, key)
        for key in (
            "draft_len",
            "draft_sampling",
            "max_batch_size",
            "max_num_tokens",
            "max_seq_len",
            "max_queue",
            "tp_size",
            "cuda_graphs",
        )
    }
    if start.prefix_reuse is not None:
        sizes["prefix_reuse"] = start.prefix_reuse
    if executed is not None:
        file = executed.settings
        sizes |= {key: getattr(file, key) for key in ("draft_schedule", "chunked_prefill", "kv_cache_dtype")}
        sizes |= {"prefix_bytes": file.prefix_bytes, "block_tokens": file.block_tokens}
    if start.prefix_cache_mib is not None:
        sizes["prefix_bytes"] = start.prefix_cache_mib << 20
    known = {key: value for key, value in sizes.items() if value is not None}
    if known.get("prefix_reuse") == "off":
        known["prefix_reuse"] = None
    options = ServerOptions(
        host=start.host,
        port=start.port,
        dtype=start.dtype,
        device=start.device,
        drafter=start.drafter,
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
