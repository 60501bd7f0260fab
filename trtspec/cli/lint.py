"""`trtspec lint`: any engine YAML against one TensorRT-LLM version, and the target and head it is for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trtspec.cli.options import JsonOption


def lint(
    file: Annotated[Path, typer.Argument(help="Engine YAML (extra-llm-api-config.yml), written by anybody.")],
    trtllm_version: Annotated[
        str | None, typer.Option(help="Version to judge for. Default: the file's first line, else the installed one.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target it is for: directory or hub id.")] = None,
    head: Annotated[str | None, typer.Option(help="Eagle3 head it is for: directory or hub id.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Write the corrected file in place.")] = False,
    json_: JsonOption = False,
) -> None:
    """Find every problem of an engine YAML at once, with its line, its code and its remedy."""
    from trtspec.errors import CheckFailed, UsageError, has_errors
    from trtspec.report import print_json, problem_lines, write_atomic
    from trtspec.trtllm.finding import Finding
    from trtspec.trtllm.lint import fix as mend
    from trtspec.trtllm.lint import lint as find
    from trtspec.trtllm.linting import subject_of

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read ({error})", "pass the engine YAML") from None
    subject, reason = subject_of(text, version=trtllm_version, target=target, head=head)
    mended: list[Finding] = []
    if fix:
        corrected, mended = mend(text, subject)
        if corrected != text:
            write_atomic(file, corrected)
        text = corrected
    findings = find(text, subject)
    problems = [finding.problem(str(file)) for finding in findings]
    ok = not has_errors(problems)
    if json_:
        listed = [finding.to_dict(str(file)) for finding in findings]
        fixed = [finding.to_dict(str(file)) for finding in mended]
        print_json({"ok": ok, "version": subject.version, "version_reason": reason, "problems": listed, "fixed": fixed})
    else:
        lines = [f"fixed   {finding.code} {finding.key}: {finding.remedy}" for finding in mended]
        lines += problem_lines(problems)
        verdict = "no errors" if ok else f"{sum(p.severity == 'error' for p in problems)} error(s)"
        lines.append(f"{file}: {verdict} for TensorRT-LLM {subject.version} ({reason})")
        sys.stdout.write("\n".join(lines) + "\n")
    if not ok:
        raise CheckFailed(f"{file} would not start or not do what it says on TensorRT-LLM {subject.version}")
