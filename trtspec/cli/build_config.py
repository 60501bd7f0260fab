"""`trtspec build-config`: the engine YAML of an intent for exactly one TensorRT-LLM version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.cli import build_config_options as opt
from trtspec.cli.options import DryRunOption, ForceOption, HeadOption, JsonOption, TargetArgument

if TYPE_CHECKING:
    from trtspec.trtllm.build.render import Recipe


def build_config(
    target: TargetArgument,
    output: opt.OutputOption = None,
    head: HeadOption = None,
    trtllm_version: opt.VersionOption = None,
    goal: opt.GoalOption = "latency",
    gpu: opt.GpuOption = None,
    tp_size: opt.TpSizeOption = 4,
    ep_size: opt.EpSizeOption = None,
    attention_dp: opt.AttentionDpOption = None,
    nodes: opt.NodesOption = 1,
    isl: opt.IslOption = None,
    osl: opt.OslOption = None,
    concurrency: opt.ConcurrencyOption = None,
    max_batch_size: opt.BatchOption = None,
    max_num_tokens: opt.TokensOption = None,
    max_seq_len: opt.SeqLenOption = None,
    draft_len: opt.DraftLenOption = 3,
    settings: opt.SetOption = None,
    role: opt.RoleOption = None,
    disaggregated: opt.DisaggregatedOption = None,
    context_url: opt.ContextUrlOption = None,
    generation_url: opt.GenerationUrlOption = None,
    trust_remote_code: opt.TrustOption = False,
    format: opt.FormatOption = "yaml",
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json_: JsonOption = False,
) -> None:
    """Write the engine YAML for exactly one TensorRT-LLM version; it always passes `trtspec lint`."""
    from trtspec.report import refuse_overwrite, say
    from trtspec.trtllm.build.render import disaggregated as parts
    from trtspec.trtllm.build.render import render_specs
    from trtspec.trtllm.intent import Intent
    from trtspec.trtllm.names import choose_version, load_head, load_target

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
