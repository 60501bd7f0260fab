"""`trtspec serve`: preflight, then one launch; of trtllm-serve, or of the reference backend when asked by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtspec.cli.options import DryRunOption, JsonOption

if TYPE_CHECKING:
    from trtspec.trtllm.serving import ServePlan

Backend = Literal["trtllm", "reference"]
Speculation = Literal["eagle3", "prompt-lookup", "none"]
Dtype = Literal["auto", "float32", "bfloat16"]


def serve(
    target: Annotated[str, typer.Argument(help="Checkpoint directory or hub id of the target.")],
    passed: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="After `--`: any option of trtllm-serve.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Eagle3 head: directory or hub id.")] = None,
    backend: Annotated[Backend, typer.Option(help="trtllm, or reference: pure PyTorch, on a CPU too.")] = "trtllm",
    config: Annotated[Path | None, typer.Option(help="Engine YAML; without it one is written for this start.")] = None,
    trtllm_version: Annotated[
        str | None, typer.Option(help="Version to check for. Default: the installed one.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 in a container.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    goal: Annotated[Literal["latency", "throughput"] | None, typer.Option(help="As in build-config.")] = None,
    tp_size: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel size. Default: the file's, else 4.")
    ] = None,
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Requests per step.")] = None,
    max_num_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per step (trtllm).")] = None,
    max_seq_len: Annotated[int | None, typer.Option(min=1, help="Prompt and answer together.")] = None,
    draft_len: Annotated[int | None, typer.Option(min=1, help="Tokens drafted per step. Default: 3.")] = None,
    speculation: Annotated[
        Speculation | None, typer.Option(help="Reference backend. Default: eagle3 with --head, else none.")
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Reference backend: type of computation; auto is bfloat16 where it is native.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="Reference backend: cpu or cuda.")] = "cpu",
    served_model_name: Annotated[str | None, typer.Option(help="Name in /v1/models. Default: the target's.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the engine run the code that the target brings.")
    ] = False,
    startup_timeout: Annotated[float, typer.Option(help="Seconds until the server must be healthy.")] = 7200.0,
    generation_timeout: Annotated[float, typer.Option(help="Seconds for the first answer of a healthy one.")] = 300.0,
    stop_grace: Annotated[float, typer.Option(help="Seconds to end in after a signal, before it is killed.")] = 30.0,
    dry_run: DryRunOption = False,
    json_: JsonOption = False,
) -> None:
    """Check everything, then serve TARGET; signals and the exit status pass through, nothing is restarted."""
    words = list(passed or [])
    if backend == "reference":
        from trtspec.cli.serve_reference import (
            ReferenceRequest,
            launch_reference,
            refuse_trtllm_options,
            show_reference,
        )

        refuse_trtllm_options(
            {"--config": config, "--goal": goal, "--max-num-tokens": max_num_tokens, "-- OPTIONS": words or None,
             "--trtllm-version": trtllm_version, "--tp-size": None if tp_size == 1 else tp_size}
        )  # fmt: skip
        reference = ReferenceRequest(
            target, head, host, port, dtype, device, speculation,
            draft_len, max_batch_size, max_seq_len, served_model_name,
        )  # fmt: skip
        show_reference(reference, json_) if dry_run else launch_reference(reference)
        return
    from trtspec.trtllm.serving import Request, plan_serve

    _refuse_reference_options(speculation, port)
    words += ["--served_model_name", served_model_name] if served_model_name else []
    request = Request(
        target, head, config, trtllm_version, goal, tp_size, max_batch_size, max_num_tokens, max_seq_len, draft_len,
        trust_remote_code=trust_remote_code, host=host, port=port, passed=words,
    )  # fmt: skip
    if dry_run:
        _show(plan_serve(request, launching=False), json_)
    else:
        times = {"startup_timeout": startup_timeout, "generation_timeout": generation_timeout, "stop_grace": stop_grace}
        _launch(plan_serve(request, launching=True), host, port, times)


def _refuse_reference_options(speculation: Speculation | None, port: int) -> None:
    from trtspec.errors import UsageError

    if port == 0:
        raise UsageError("trtllm-serve cannot be asked for any free port", "pass --port with a number above 0")

    if speculation in ("prompt-lookup", "none"):
        remedy = "leave --head out for none; for prompt-lookup pass --backend reference"
        raise UsageError("--speculation belongs to the reference backend", remedy)


def _show(plan: ServePlan, json_: bool) -> None:
    """The command line and the file it reads on stdout, problems on stderr; exit status 3 when one is an error."""
    import shlex

    from trtspec.errors import CheckFailed, has_errors
    from trtspec.report import print_json, problem_lines

    if json_:
        print_json(
            {"argv": plan.argv, "env": plan.env, "config": plan.config, "config_text": plan.config_text,
             "version": plan.version, "version_reason": plan.version_reason,
             "problems": [problem.to_dict() for problem in plan.problems]}
        )  # fmt: skip
    else:
        sys.stdout.write(f"{shlex.join(plan.argv)}\n\n# {plan.config_path}\n{plan.config_text}")
        sys.stderr.write("".join(f"{line}\n" for line in problem_lines(plan.problems)))
    if has_errors(plan.problems):
        raise CheckFailed("a launch would be refused for the errors above")


def _launch(plan: ServePlan, host: str, port: int, times: dict[str, float]) -> None:
    """Raises before anything starts when a problem is an error."""
    import tempfile

    from trtspec.errors import CheckFailed, has_errors
    from trtspec.report import problem_lines, say
    from trtspec.trtllm.command import CONFIG_NAME
    from trtspec.trtllm.launch import Launch, run
    from trtspec.trtllm.preflight import require_executable

    require_executable()
    listed = "\n".join(problem_lines(plan.problems))
    if has_errors(plan.problems):
        raise CheckFailed(f"not launched:\n{listed}")
    if listed:
        sys.stderr.write(f"{listed}\n")
    say(f"TensorRT-LLM {plan.version}: {plan.version_reason}")
    with tempfile.TemporaryDirectory(prefix="trtspec-serve-") as directory:
        argv = list(plan.argv)
        if plan.config_path == CONFIG_NAME:
            written = Path(directory) / CONFIG_NAME
            written.write_text(plan.config_text, encoding="utf-8")
            argv[argv.index("--extra_llm_api_options") + 1] = str(written)
        run(Launch(argv, host, port, plan.env, **times))
