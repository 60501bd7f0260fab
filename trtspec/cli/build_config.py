"""Defines `trtspec build-config`, which writes the engine YAML for one TensorRT-LLM version."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from trtspec.records import (
    DryRunOption,
    Excludes,
    ForceOption,
    JsonOption,
    Needs,
    fill,
    option,
    words,
)
from trtspec.report import Result, next_command, refuse_existing, write_atomic
from trtspec.trtllm.intent import CACHES, ENGINE_FILE, VLLM, Intent

if TYPE_CHECKING:
    from trtspec.errors import Problem
    from trtspec.trtllm.build import EngineConfig


@dataclass(frozen=True, kw_only=True)
class BuildConfigOptions(Intent):
    """Options of `trtspec build-config`: the settings of a server, and the paths of its files."""

    output: Annotated[
        Path | None,
        option("File to write. Default: print to stdout.", "-o"),
        Excludes("disaggregated"),
    ] = None
    disaggregated: Annotated[
        Path | None,
        option(
            "Directory for context.yml, generation.yml and front.yml; or dynamo.yml, or "
            "values.yaml.",
            group="Disaggregated servers",
        ),
    ] = None
    dry_run: DryRunOption = False
    force: Annotated[ForceOption, Needs("output", "disaggregated")] = False
    json_: JsonOption = False


def build_config(options: BuildConfigOptions) -> Result:
    """Write the engine YAML for exactly one TensorRT-LLM version.

    The file always passes `trtspec lint`.
    """
    from trtspec.checkpoint.hub import find_target, load_head
    from trtspec.errors import CheckFailed
    from trtspec.trtllm.build import build
    from trtspec.trtllm.deployment import assumed_release, choose_version
    from trtspec.trtllm.document import Document
    from trtspec.trtllm.kubernetes import default_image

    model = find_target(options.target, options.like)
    drafter = load_head(options.head) if options.head else None
    pair = (model, drafter)
    with_code = [item.resolved.name for item in pair if item and item.resolved.code()]
    if options.format in ("helm-values", "dynamo") and with_code and not options.trust_remote_code:
        message = (
            f"{with_code[0]} brings code of its own, and a pod that does not trust it never starts"
        )
        raise CheckFailed(
            message, "read that code, then pass `trust_remote_code`", "TS-SERVE-REMOTE-CODE"
        )
    target = model.spec
    head = drafter.spec if drafter else None
    if options.format == VLLM:
        return _vllm(options)
    version, reason = choose_version(options.version or None)
    image_problems: list[Problem] = []
    if options.format == "dynamo" and not (options.version or options.image):
        image, image_problems = default_image(version)
        options = replace(options, image=image)
    # the first line of an engine YAML names no options of the other formats
    intent = fill(Intent, options, version=version, format="yaml", image=None, quantize_from=None)
    intents = _intents_by_file(intent.fitted(target.max_position_embeddings), options)
    files: dict[Path | None, list[EngineConfig]] = {}
    for path, parts in intents.items():
        if path is not None and not options.dry_run:
            refuse_existing(path, options.force, ENGINE_FILE)
        name: dict[str, str] = {}
        if path and options.format == "yaml":
            name = {"config_path": path.name}
        cache = CACHES.get(options.format)
        files[path] = [build(part, target, head, cache=cache, **name) for part in parts]
    texts = {path: _text(parts, options) for path, parts in files.items()}
    written = [path for path in texts if path is not None and not options.dry_run]
    for path in written:
        write_atomic(path, texts[path])
    servers: list[tuple[Path | None, EngineConfig, list[Problem]]] = []
    for path, configs in files.items():
        file = str(path or "(stdout)")
        for config in configs:
            findings = [replace(finding, file=file) for finding in config.findings]
            servers.append((path, config, findings))
    entries = [
        {
            "output": str(path) if path in written else None,
            "config": part.values,
            "text": texts[path],
            "argv": part.argv,
            "problems": [finding.to_dict() for finding in findings],
        }
        for path, part, findings in servers
    ]
    # the entries of the first server, and `files` with the entries of all servers if several
    values = {
        "version": version,
        "version_reason": reason,
        **entries[0],
        "files": entries if len(entries) > 1 else [],
    }
    problems = [*assumed_release(reason, Document.parse(servers[0][1].text)), *image_problems]
    for _, _, findings in servers:
        # `build` raises errors, and notes (info) are about settings that the user did not choose
        problems += [finding for finding in findings if finding.severity == "warning"]
    text = "".join(text for path, text in texts.items() if path not in written)
    messages = [f"wrote {path}" for path in written]
    if written:
        messages += _next_lines(options)
    return Result(values, problems, text=text, messages=messages)


def _vllm(options: BuildConfigOptions) -> Result:
    """Returns the configuration file of vLLM for the pair. Writes the file if `output` is given.

    Raises CheckFailed if `trtspec serve --backend vllm` would refuse the pair, and UsageError for
    several nodes or an existing output.
    """
    from trtspec.errors import CheckFailed, UsageError, errors_in
    from trtspec.launch.serve_options import ServeOptions
    from trtspec.report import problem_lines
    from trtspec.trtllm.intent import COMMAND
    from trtspec.vllm import plan_vllm, vllm_file

    if options.nodes > 1:
        raise UsageError("`format` vllm is for one node", "leave `nodes` out")
    served = fill(ServeOptions, options, backend="vllm")
    problems = errors_in(plan_vllm(served, launching=False).problems)
    if problems:
        raise CheckFailed("vLLM cannot serve this:\n" + "\n".join(problem_lines(problems)))
    text = vllm_file(served, f"# vLLM: {COMMAND} {shlex.join(words(fill(Intent, options)))}")
    path = None if options.dry_run else options.output
    if path is None:
        return Result({"output": None, "text": text}, text=text)
    refuse_existing(path, options.force, "vllm.yaml")
    write_atomic(path, text)
    serve_words = ("serve", options.target, "--backend", "vllm", "--config", path, "--dry-run")
    messages = [f"wrote {path}", next_command(*serve_words)]
    return Result({"output": str(path), "text": text}, text="", messages=messages)


def _next_lines(options: BuildConfigOptions) -> list[str]:
    """Returns the line with the next command, after the file is written.

    [] unless `output` is a file of Helm values, or the YAML of one engine without a role.
    """
    if options.format == "helm-values" and options.output:
        return [
            f"next: helm install kimi docker/helm/trtspec -f "
            f"{shlex.quote(str(options.output))} --set image.repository=REPOSITORY"
        ]
    if options.format == "yaml" and options.output and options.role is None:
        code: list[str] = []
        if options.trust_remote_code:
            code = ["--trust-remote-code"]
        file = ("--config", options.output, *code, "--dry-run")
        return [next_command("serve", options.target, *file)]
    return []


def _intents_by_file(
    intent: Intent, options: BuildConfigOptions
) -> dict[Path | None, list[Intent]]:
    """Returns the settings of the servers that each file describes, by path. None for stdout."""
    from trtspec.trtllm.build import disaggregated

    directory = options.disaggregated
    if directory is None:
        return {options.output: [intent]}
    parts = disaggregated(intent)
    if options.format != "yaml":
        name = {"dynamo": "dynamo.yml", "helm-values": "values.yaml"}[options.format]
        return {directory / name: [part for part in parts.values() if part.role != "front"]}
    return {directory / name: [part] for name, part in parts.items()}


def _text(parts: list[EngineConfig], options: BuildConfigOptions) -> str:
    """Returns the text of a file that describes the servers `parts`, in the format of `options`."""
    if options.format == "yaml":
        return parts[0].text
    from trtspec.trtllm.kubernetes import dynamo, helm_values

    if options.format == "dynamo":
        return dynamo(parts, options.image)
    return helm_values(*parts, quantize_from=options.quantize_from)
