"""`trtspec lint`: any engine YAML against one TensorRT-LLM version, and the target and head it is for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtspec.cli.options import JsonOption

if TYPE_CHECKING:
    from trtspec.errors import Problem
    from trtspec.trtllm.lint.finding import Finding
    from trtspec.trtllm.lint.installed import Verdict


def lint(
    file: Annotated[Path, typer.Argument(help="Engine YAML (extra-llm-api-config.yml), written by anybody.")],
    passed: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="After `--`: the options of trtllm-serve that it is served with."),
    ] = None,
    trtllm_version: Annotated[
        str | None, typer.Option(help="Version to judge for. Default: the file's first line, else the installed one.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target it is for: directory or hub id.")] = None,
    head: Annotated[str | None, typer.Option(help="Eagle3 head it is for: directory or hub id.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU it is for: b200, gb200, b300, gb300, h200, h100, or sm120.")
    ] = None,
    installed: Annotated[
        bool, typer.Option("--installed", help="Let the installed engine's own classes judge too (in a process).")
    ] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Write the corrected file in place.")] = False,
    json_: JsonOption = False,
) -> None:
    """Find every problem of an engine YAML at once, with its line, its code and its remedy."""
    import os

    from trtspec.errors import CheckFailed, UsageError, has_errors
    from trtspec.report import write_atomic
    from trtspec.trtllm.lint.deployment import deployment_of
    from trtspec.trtllm.lint.linter import fix as mend
    from trtspec.trtllm.lint.linter import lint as find

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read ({error})", "pass the engine YAML") from None
    verdict = _judged(text, trtllm_version) if installed else None
    version = verdict.version if verdict else trtllm_version
    deployment, reason, wrong = deployment_of(
        text, version=version, target=target, head=head, gpu=gpu, passed=passed, environ=os.environ
    )
    mended: list[Finding] = []
    if fix:
        corrected, mended = mend(text, deployment)
        if corrected.text != text:
            write_atomic(file, corrected.text)
        text = corrected.text
    findings = find(text, deployment)
    if verdict is not None:
        verdict = _judged(text, None) if mended else verdict
        findings += verdict.findings
        reason = "installed here; its own classes judged too"
    problems = [*wrong, *(finding.problem(str(file)) for finding in findings)]
    _report(file, json_, deployment.version, reason, wrong, findings, mended)
    if has_errors(problems):
        raise CheckFailed(f"{file} would not start or not do what it says on TensorRT-LLM {deployment.version}")


def _judged(text: str, asked: str | None) -> Verdict:
    """The installed engine's verdict; raises UsageError when another version was asked for."""
    from packaging.version import Version

    from trtspec.errors import UsageError
    from trtspec.trtllm.document import Document
    from trtspec.trtllm.lint.installed import judge
    from trtspec.trtllm.schema import parse_version

    verdict = judge(Document.parse(text))
    if asked and parse_version(asked) != Version(verdict.version):
        message = f"TensorRT-LLM {verdict.version} is installed, not {asked}"
        raise UsageError(message, "leave out one of the two options")
    return verdict


def _report(
    file: Path,
    json_: bool,
    version: str,
    reason: str,
    wrong: list[Problem],
    findings: list[Finding],
    mended: list[Finding],
) -> None:
    from trtspec.errors import has_errors
    from trtspec.report import print_json, problem_lines

    problems = [*wrong, *(finding.problem(str(file)) for finding in findings)]
    ok = not has_errors(problems)
    if json_:
        listed = [{**problem.to_dict(), "line": None, "key": problem.where, "fixable": False} for problem in wrong]
        listed += [finding.to_dict(str(file)) for finding in findings]
        fixed = [finding.to_dict(str(file)) for finding in mended]
        print_json({"ok": ok, "version": version, "version_reason": reason, "problems": listed, "fixed": fixed})
        return
    lines = [f"fixed   {finding.code} {finding.key}: {finding.remedy}" for finding in mended]
    lines += problem_lines(problems)
    verdict = "no errors" if ok else f"{sum(p.severity == 'error' for p in problems)} error(s)"
    lines.append(f"{file}: {verdict} for TensorRT-LLM {version} ({reason})")
    sys.stdout.write("\n".join(lines) + "\n")
