"""`trtspec build-config`: the engine YAML of an intent for exactly one TensorRT-LLM version."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtspec.cli.options import DryRunOption, ForceOption, JsonOption
from trtspec.trtllm.intent import Intent

if TYPE_CHECKING:
    from trtspec.trtllm.build.config import EngineConfig

FRONT_USES = {"target", "version", "role", "context_urls", "generation_urls"}
FILE_OPTIONS = {"output", "disaggregated", "dry_run", "force", "json_"}


@dataclass(frozen=True, kw_only=True)
class BuildConfigOptions(Intent):
    """An intent, and where its files go."""

    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: print to stdout.")] = (
        None
    )
    disaggregated: Annotated[
        Path | None, typer.Option(help="Directory for context.yml, generation.yml and front.yml, or dynamo.yml.")
    ] = None
    dry_run: DryRunOption = False
    force: ForceOption = False
    json_: JsonOption = False


def build_config(options: BuildConfigOptions) -> None:
    """Write the engine YAML for exactly one TensorRT-LLM version; it always passes `trtspec lint`."""
    from trtspec.report import refuse_overwrite, say
    from trtspec.trtllm.build.config import build
    from trtspec.trtllm.deployment import choose_version, load_head, load_target

    _refuse_unused(options)
    _refuse_absent(options)
    target = load_target(options.target, options.like).spec
    head = load_head(options.head).spec if options.head else None
    version, reason = choose_version(options.version or None, target, head)
    say(f"TensorRT-LLM {version}: {reason}")
    intent = Intent(**{item.name: getattr(options, item.name) for item in fields(Intent)})
    intent = replace(intent, version=version, format="yaml", image=None).fitted(target.max_position_embeddings)
    wanted = _wanted(intent, options)
    files: dict[Path | None, list[EngineConfig]] = {}
    for path, parts in wanted.items():
        if path is not None and not options.dry_run:
            refuse_overwrite(path, options.force)
        name = {"config_path": path.name} if path and options.format == "yaml" else {}
        files[path] = [build(part, target, head, **name) for part in parts]
    texts = {path: _text(parts, options) for path, parts in files.items()}
    _write(texts, options.dry_run)
    _show(files, texts, {"version": version, "version_reason": reason}, options)


def _refuse_unused(options: BuildConfigOptions) -> None:
    """Raises UsageError for an option that was set and that this form, or this part of a deployment, does not use."""
    from trtspec.records import given, refuse_unused

    set_, every = given(options), {item.name for item in fields(options)}
    if options.disaggregated is not None:
        refuse_unused(options, {"output", "role"}, "by --disaggregated, which writes every part into a directory")
    elif options.role == "front":
        refuse_unused(
            options, every - FRONT_USES - FILE_OPTIONS - {"format"}, "by the front, which only forwards requests"
        )
    else:
        remedy = "use --disaggregated DIR or --role front"
        refuse_unused(options, {"context_urls", "generation_urls"}, "by a server, which answers by itself", remedy)
    if options.role is not None:
        refuse_unused(options, {"format"} if options.format != "yaml" else set(), "by one part of a deployment")
    if options.format == "dynamo":
        refuse_unused(
            options, {"context_urls", "generation_urls"}, "by Dynamo, whose frontend finds the servers by itself"
        )
    else:
        refuse_unused(options, {"image"}, f"by --format {options.format}", "use --format dynamo")
    if options.disaggregated is not None and options.format == "helm-values":
        refuse_unused(options, {"disaggregated"}, "by the chart, which runs whole servers", "use --format dynamo")
    if not options.head and "draft_len" in set_:
        refuse_unused(options, {"draft_len"}, "by a server without a head", "name one with --head")
    if options.output is None and options.disaggregated is None:
        refuse_unused(options, {"force"}, "by a text on stdout", "name a file with --output")


def _refuse_absent(options: BuildConfigOptions) -> None:
    """Raises UsageError for a directory that is not there and is not said to be like a published checkpoint."""
    from trtspec.errors import UsageError

    path = options.target.startswith(("/", ".", "~"))
    if path and options.like is None and not Path(options.target).expanduser().exists():
        remedy = (
            "check the path; where a job makes it later, name the published checkpoint that it will equal with --like"
        )
        raise UsageError(f"{options.target} does not exist", remedy)


def _wanted(intent: Intent, options: BuildConfigOptions) -> dict[Path | None, list[Intent]]:
    """The files by path (None: stdout), each with the servers that it describes."""
    from trtspec.trtllm.build.config import disaggregated

    place = options.disaggregated
    if place is None:
        return {options.output: [intent]}
    parts = disaggregated(intent)
    if options.format == "dynamo":
        return {place / "dynamo.yml": [part for part in parts.values() if part.role != "front"]}
    return {place / name: [part] for name, part in parts.items()}


def _text(parts: list[EngineConfig], options: BuildConfigOptions) -> str:
    """What the file holds, in the form that was asked for."""
    if options.format == "yaml":
        return parts[0].text
    from trtspec.trtllm.build.kubernetes import dynamo, helm_values

    return helm_values(parts[0]) if options.format == "helm-values" else dynamo(parts, options.image)


def _write(texts: dict[Path | None, str], dry_run: bool) -> None:
    from trtspec.report import write_atomic

    for path, text in texts.items():
        if path is not None and not dry_run:
            write_atomic(path, text)


def _show(
    files: dict[Path | None, list[EngineConfig]],
    texts: dict[Path | None, str],
    report: dict[str, Any],
    options: BuildConfigOptions,
) -> None:
    """The JSON contract (of the first server; all of them under `files`), or the text where nothing was written."""
    from trtspec.report import print_json

    entries = []
    for path, parts in files.items():
        if not options.json_ and (path is None or options.dry_run):
            sys.stdout.write(texts[path])
        for part in parts:
            problems = [finding.to_dict(str(path or "(stdout)")) for finding in part.findings]
            written = str(path) if path and not options.dry_run else None
            entries.append(
                {"output": written, "config": part.values, "text": texts[path], "argv": part.argv, "problems": problems}
            )
            for problem in problems:
                if problem["severity"] == "warning" and not options.json_:
                    sys.stderr.write(f"warning {problem['code']} {problem['message']}\n")
    if options.json_:
        print_json({**report, **entries[0], "files": entries if len(entries) > 1 else []})
