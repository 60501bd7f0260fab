"""`trtspec build-config`: the engine YAML of an intent for exactly one TensorRT-LLM version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec.cli.options import DryRunOption, ForceOption, JsonOption

if TYPE_CHECKING:
    from trtspec.trtllm.recipe import Recipe

Gpu = Literal["b200", "b300", "gb200", "gb300", "h200", "h100"]


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
    gpu: Annotated[Gpu | None, typer.Option(help="Kind of GPU: refuses what does not fit, notes what does.")] = None,
    tp_size: Annotated[int, typer.Option("--tp-size", "--tp", "--gpus", min=1, help="Tensor-parallel size: GPUs.")] = 4,
    ep_size: Annotated[
        int | None,
        typer.Option("--ep-size", "--ep", min=1, help="Ranks that share whole experts. Default: by the goal."),
    ] = None,
    attention_dp: Annotated[
        bool | None,
        typer.Option(
            "--attention-dp/--no-attention-dp", help="Each rank caches its own requests. Default: by the goal."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines that one server spreads over.")] = 1,
    isl: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt, with --osl.")] = None,
    osl: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer, with --isl.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at a time in the whole server.")] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Requests per step and rank. Default: by --concurrency or the goal.")
    ] = None,
    max_num_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per step. Default: 8192.")] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Prompt and answer together. Default: --isl + --osl, else 8192.")
    ] = None,
    draft_len: Annotated[int, typer.Option(min=1, help="Tokens drafted per step.")] = 3,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any engine setting, dotted: key=value. Repeatable.")
    ] = None,
    role: Annotated[
        Literal["context", "generation", "front"] | None, typer.Option(help="One part of a disaggregated deployment.")
    ] = None,
    disaggregated: Annotated[
        Path | None, typer.Option(help="Directory for context.yml, generation.yml and front.yml.")
    ] = None,
    context_url: Annotated[
        list[str] | None, typer.Option(help="host:port of a context server, for the front. Repeatable.")
    ] = None,
    generation_url: Annotated[
        list[str] | None, typer.Option(help="host:port of a generation server, for the front. Repeatable.")
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
    from trtspec.report import refuse_overwrite, say
    from trtspec.trtllm.intent import Intent
    from trtspec.trtllm.recipe import disaggregated as parts
    from trtspec.trtllm.recipe import render_specs
    from trtspec.trtllm.subject import choose_version, load_head, load_target

    _compatible(output, disaggregated, role, format)
    model = load_target(target).spec
    draft = load_head(head).spec if head else None
    version, reason = choose_version(trtllm_version, model, draft)
    say(f"TensorRT-LLM {version}: {reason}")
    intent = Intent(
        target, version, head, goal, tp_size, max_batch_size, max_num_tokens, max_seq_len, draft_len,
        tuple(settings or ()), trust_remote_code, gpu, nodes, role, attention_dp, ep_size, isl, osl, concurrency,
        tuple(context_url or ()), tuple(generation_url or ()),
    ).checked().fitted(model.max_position_embeddings)  # fmt: skip
    wanted = parts(intent) if disaggregated else {str(output) if output else "": intent}
    place = disaggregated or Path()
    files: dict[Path | None, Recipe] = {}
    for name, item in wanted.items():
        path = place / name if name else None
        if path is not None and not dry_run:
            refuse_overwrite(path, force)
        files[path] = render_specs(item, model, draft, path.name if path else "extra-llm-api-config.yml")
    texts = {path: item.text if format == "yaml" else item.values_text() for path, item in files.items()}
    _write(texts, dry_run)
    report = {"version": version, "version_reason": reason}
    _show(files, texts, report, dry_run, json_)


def _compatible(output: Path | None, disaggregated: Path | None, role: str | None, format: str) -> None:
    from trtspec.errors import UsageError

    if disaggregated is not None and (output is not None or role is not None):
        raise UsageError("--disaggregated writes all parts into a directory", "leave --output and --role out")
    if format == "helm-values" and (disaggregated is not None or role is not None):
        raise UsageError("the chart runs whole servers, not parts", "write the YAML and use `trtspec serve`")


def _write(texts: dict[Path | None, str], dry_run: bool) -> None:
    from trtspec.report import write_atomic

    for path, text in texts.items():
        if path is not None and not dry_run:
            write_atomic(path, text)


def _show(
    files: dict[Path | None, Recipe], texts: dict[Path | None, str], report: dict[str, Any], dry_run: bool, json_: bool
) -> None:
    """The JSON contract (of the first file; all of them under `files`), or the text where nothing was written."""
    from trtspec.report import print_json

    entries = []
    for path, recipe in files.items():
        problems = [finding.to_dict(str(path or "(stdout)")) for finding in recipe.findings]
        if json_:
            written = str(path) if path and not dry_run else None
            values = _values(recipe.text)
            entries.append(
                {"output": written, "config": values, "text": texts[path], "argv": recipe.argv, "problems": problems}
            )
            continue
        if path is None or dry_run:
            sys.stdout.write(texts[path])
        for problem in problems:
            if problem["severity"] == "warning":
                sys.stderr.write(f"warning {problem['code']} {problem['message']}\n")
    if json_:
        print_json({**report, **entries[0], "files": entries if len(entries) > 1 else []})


def _values(text: str) -> Any:
    from trtspec.trtllm.document import Document

    return Document.parse(text).value
