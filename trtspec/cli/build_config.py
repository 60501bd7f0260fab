"""`trtspec build-config`: the engine YAML of an intent for exactly one TensorRT-LLM version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from trtspec.cli.options import DryRunOption, ForceOption, JsonOption


def build_config(
    target: Annotated[str, typer.Argument(help="Checkpoint directory or hub id of the target.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; without it the text goes to stdout.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Eagle3 head: directory or hub id.")] = None,
    trtllm_version: Annotated[
        str | None, typer.Option(help="Exact version, such as 1.3.0rc20. Default: installed, else newest verified.")
    ] = None,
    goal: Annotated[Literal["latency", "throughput"], typer.Option(help="What the sizes are chosen for.")] = "latency",
    tp_size: Annotated[int, typer.Option("--tp-size", "--gpus", min=1, help="Tensor-parallel size: GPUs.")] = 4,
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Requests per step. Default: by the goal.")] = None,
    max_num_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per step. Default: 8192.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(min=1, help="Prompt and answer together. Default: 8192.")] = None,
    draft_len: Annotated[int, typer.Option(min=1, help="Tokens drafted per step.")] = 3,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any engine setting, dotted: key=value. Repeatable.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="The recipe says that the target's code may run.")
    ] = False,
    format: Annotated[Literal["yaml", "helm-values"], typer.Option(help="The file alone, or chart values.")] = "yaml",
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json_: JsonOption = False,
) -> None:
    """Write the engine YAML for exactly one TensorRT-LLM version; it always passes `trtspec lint`."""
    from trtspec.report import print_json, refuse_overwrite, say, write_atomic
    from trtspec.trtllm.command import build_command
    from trtspec.trtllm.config import build
    from trtspec.trtllm.document import Document
    from trtspec.trtllm.helm_values import helm_values
    from trtspec.trtllm.intent import Intent
    from trtspec.trtllm.schema import schema_for
    from trtspec.trtllm.subject import choose_version, load_head, load_target

    if output is not None and not dry_run:
        refuse_overwrite(output, force)
    target_spec = load_target(target).spec
    head_spec = load_head(head).spec if head else None
    version, reason = choose_version(trtllm_version, target_spec, head_spec)
    say(f"TensorRT-LLM {version}: {reason}")
    sizes = {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
    intent = Intent(
        target, version, head, goal, tp_size, **sizes,
        draft_len=draft_len, settings=tuple(settings or ()), trust_remote_code=trust_remote_code,
    ).fitted(target_spec.max_position_embeddings)  # fmt: skip
    built = build(intent, target_spec, head_spec)
    command = build_command(
        intent, target_spec, schema_for(version), Document.parse(built.text),
        host="0.0.0.0", port=8000, config_path=str(output or "extra-llm-api-config.yml"), explicit={}, passed=[],
    )  # fmt: skip
    text = built.text if format == "yaml" else helm_values(built, command.argv)
    if output is not None and not dry_run:
        write_atomic(output, text)
    file = str(output or "(stdout)")
    problems = [finding.to_dict(file) for finding in built.findings]
    if json_:
        written = str(output) if output and not dry_run else None
        print_json(
            {"output": written, "version": version, "version_reason": reason, "config": built.values,
             "text": text, "argv": command.argv, "problems": problems}
        )  # fmt: skip
        return
    if output is None or dry_run:
        sys.stdout.write(text)
    for problem in problems:
        if problem["severity"] == "warning":
            sys.stderr.write(f"warning {problem['code']} {problem['message']}\n")
