"""`trtspec serve`: preflight, then one launch; of trtllm-serve, or of the reference backend when asked by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.cli import serve_options as opt
from trtspec.cli.options import DryRunOption, HeadOption, JsonOption, TargetArgument

if TYPE_CHECKING:
    from trtspec.trtllm.serve.start import ServePlan


def serve(
    target: TargetArgument,
    passed: opt.PassedArgument = None,
    head: HeadOption = None,
    backend: opt.BackendOption = "trtllm",
    config: opt.ConfigOption = None,
    trtllm_version: opt.VersionOption = None,
    host: opt.HostOption = "localhost",
    port: opt.PortOption = 8000,
    goal: opt.GoalOption = None,
    tp_size: opt.TpSizeOption = None,
    max_batch_size: opt.BatchOption = None,
    max_num_tokens: opt.TokensOption = None,
    max_seq_len: opt.SeqLenOption = None,
    draft_len: opt.DraftLenOption = None,
    speculation: opt.SpeculationOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "cpu",
    served_model_name: opt.NameOption = None,
    trust_remote_code: opt.TrustOption = False,
    launcher: opt.LauncherOption = "direct",
    nodes: opt.NodesOption = None,
    gpus_per_node: opt.GpusPerNodeOption = None,
    launcher_args: opt.LauncherArgsOption = "",
    role: opt.RoleOption = None,
    disaggregated: opt.DisaggregatedOption = None,
    startup_timeout: opt.StartupOption = 7200.0,
    generation_timeout: opt.GenerationOption = 300.0,
    stop_grace: opt.GraceOption = 30.0,
    dry_run: DryRunOption = False,
    json_: JsonOption = False,
) -> None:
    """Check everything, then serve TARGET; signals and the exit status pass through, nothing is restarted."""
    typed = locals()
    if backend == "reference":
        _serve_reference(typed)
        return
    _refuse_reference_options(speculation, port)
    plan = _front_plan(typed) if disaggregated else _engine_plan(typed)
    if dry_run:
        _show(plan, json_)
    else:
        _launch(plan, {key: typed[key] for key in ("startup_timeout", "generation_timeout", "stop_grace")})


def _serve_reference(typed: dict[str, Any]) -> None:
    from trtspec.cli.serve_reference import ReferenceRequest, launch_reference, refuse_trtllm_options, show_reference

    refuse_trtllm_options(
        {"--config": typed["config"], "--goal": typed["goal"], "--max-num-tokens": typed["max_num_tokens"],
         "-- OPTIONS": typed["passed"] or None, "--trtllm-version": typed["trtllm_version"],
         "--tp-size": None if typed["tp_size"] == 1 else typed["tp_size"], "--nodes": typed["nodes"],
         "--launcher": None if typed["launcher"] == "direct" else typed["launcher"],
         "--role": typed["role"], "--disaggregated": typed["disaggregated"]}
    )  # fmt: skip
    names = (
        "target", "head", "host", "port", "dtype", "device", "speculation", "draft_len", "max_batch_size",
        "max_seq_len", "served_model_name",
    )  # fmt: skip
    request = ReferenceRequest(**{name: typed[name] for name in names})
    show_reference(request, typed["json_"]) if typed["dry_run"] else launch_reference(request)


def _refuse_reference_options(speculation: str | None, port: int) -> None:
    from trtspec.errors import UsageError

    if port == 0:
        raise UsageError("trtllm-serve cannot be asked for any free port", "pass --port with a number above 0")

    if speculation in ("prompt-lookup", "none"):
        remedy = "leave --head out for none; for prompt-lookup pass --backend reference"
        raise UsageError("--speculation belongs to the reference backend", remedy)


def _engine_plan(typed: dict[str, Any]) -> ServePlan:
    import shlex

    from trtspec.trtllm.serve.start import Request, plan_serve

    name = typed["served_model_name"]
    same = (
        "target", "head", "config", "goal", "tp_size", "max_batch_size", "max_num_tokens", "max_seq_len", "draft_len",
        "trust_remote_code", "host", "port", "launcher", "nodes", "gpus_per_node", "role",
    )  # fmt: skip
    request = Request(
        **{key: typed[key] for key in same},
        version=typed["trtllm_version"],
        launcher_args=tuple(shlex.split(typed["launcher_args"])),
        passed=[*(typed["passed"] or []), *(["--served_model_name", name] if name else [])],
        words=_own_words(),
    )
    return plan_serve(request, launching=not typed["dry_run"])


def _own_words() -> tuple[str, ...]:
    """This command as it was typed, without what makes it only look."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    return ("trtspec", *(w for w in words[:end] if w not in ("--dry-run", "--dry_run", "--json")), *words[end:])


def _front_plan(typed: dict[str, Any]) -> ServePlan:
    from trtspec.errors import UsageError
    from trtspec.trtllm.serve.start import plan_front

    for key in ("config", "head", "role", "nodes", "passed"):
        if typed[key]:
            flag = "-- OPTIONS" if key == "passed" else f"--{key}"
            raise UsageError(f"{flag} belongs to the servers behind a front", "start them with `trtspec serve` first")
    return plan_front(Path(typed["disaggregated"]), typed["startup_timeout"], launching=not typed["dry_run"])


def _show(plan: ServePlan, json_: bool) -> None:
    """The command line and the file it reads on stdout, problems on stderr; exit status 3 when one is an error."""
    import shlex

    from trtspec.errors import CheckFailed, has_errors
    from trtspec.report import print_json, problem_lines

    if json_:
        print_json(
            {"argv": plan.argv, "env": plan.env, "config": plan.config, "config_text": plan.config_text,
             "version": plan.version, "version_reason": plan.version_reason, "job": plan.job or None,
             "problems": [problem.to_dict() for problem in plan.problems]}
        )  # fmt: skip
    else:
        sys.stdout.write(f"{shlex.join(plan.argv)}\n\n# {plan.config_path}\n{plan.config_text}")
        if plan.job:
            sys.stdout.write(f"\n# job script; submit it with sbatch\n{plan.job}")
        sys.stderr.write("".join(f"{line}\n" for line in problem_lines(plan.problems)))
    if has_errors(plan.problems):
        raise CheckFailed("a launch would be refused for the errors above")


def _launch(plan: ServePlan, times: dict[str, Any]) -> None:
    """Raises before anything starts when a problem is an error."""
    import tempfile

    from trtspec.errors import CheckFailed, has_errors
    from trtspec.launch.supervisor import Launch, run
    from trtspec.report import problem_lines, say
    from trtspec.trtllm.serve.cluster import STARTERS
    from trtspec.trtllm.serve.command import CONFIG_NAME
    from trtspec.trtllm.serve.preflight import require_executable

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
        foreign = argv[0] in STARTERS.values()
        run(Launch(argv, plan.host, plan.port, plan.env, generates=plan.generates, own_statuses=foreign, **times))
