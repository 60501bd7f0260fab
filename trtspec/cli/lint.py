"""`trtspec lint`: any engine YAML against one TensorRT-LLM version, and the target and head it is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from trtspec.errors import CheckFailed, Problem, TrtspecError, UsageError
from trtspec.records import JsonOption, argument, option
from trtspec.report import Result, problem_lines, write_stderr

if TYPE_CHECKING:
    from trtspec.errors import Severity
    from trtspec.trtllm.carriers import Carried
    from trtspec.trtllm.deployment import Finding
    from trtspec.trtllm.document import Document
    from trtspec.trtllm.lint import Verdict

MOST_COLUMNS = 65  # of a source line in the output, which then fits 80


@dataclass(frozen=True, kw_only=True)
class LintOptions:
    """`files` holds the options of trtllm-serve too, from the first word that begins with a dash."""

    files: Annotated[
        tuple[str, ...],
        argument(
            "Engine YAML, or what carries it: Helm values, a manifest, a script. `-`: standard input. After `--`: "
            "the trtllm-serve options used with it.",
            metavar="FILE",
        ),
    ]
    trtllm_version: Annotated[
        str | None, option("Version to check for. Default: the one in the file's first line, else the installed one.")
    ] = None
    target: Annotated[str | None, option("Target that the file is for: a directory or a hub id.")] = None
    head: Annotated[str | None, option("Eagle3 head that the file is for: a directory or a hub id.")] = None
    gpu: Annotated[
        str | None, option("GPU type that the file is for: b200, gb200, b300, gb300, h200, h100, or sm120.")
    ] = None
    installed: Annotated[
        bool, option("Also validate with the classes of the installed TensorRT-LLM, in a separate process.")
    ] = False
    fix: Annotated[bool, option("Apply the corrections that are certain to the file.")] = False
    diff: Annotated[bool, option("Print these corrections as a unified diff; writes nothing without --fix.")] = False
    strict: Annotated[bool, option("Exit with status 3 on warnings too.")] = False
    json_: JsonOption = False

    def split(self) -> tuple[list[str], list[str] | None]:
        """The files, and the words after `--` (None where there are none)."""
        dashed = [n for n, word in enumerate(self.files) if word.startswith("-") and word != "-"]
        end = dashed[0] if dashed else len(self.files)
        return list(self.files[:end]), list(self.files[end:]) or None


@dataclass(frozen=True)
class Judged:
    """One file: what is wrong with the options it is served with (`wrong`), with itself, and what was or would be
    corrected. Where it could not be judged, `error` says why."""

    name: str
    document: Document | None = None
    version: str | None = None
    reason: str | None = None
    wrong: list[Problem] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    corrected: list[Finding] = field(default_factory=list)
    fixable: frozenset[tuple[str, str]] = frozenset()
    diff: str = ""
    error: TrtspecError | None = None

    def count(self, severity: Severity) -> int:
        found: list[Severity] = [problem.severity for problem in self.wrong]
        return [*found, *(finding.severity for finding in self.findings)].count(severity)

    @property
    def ok(self) -> bool:
        return self.error is None and not self.count("error")

    def to_dict(self) -> dict[str, Any]:
        place = {"line": None, "column": None, "fixable": False}
        problems = [{**problem.to_dict(), **place, "key": problem.where} for problem in self.wrong]
        for finding in self.findings:
            problems.append({**finding.to_dict(self.name), "fixable": (finding.code, finding.key) in self.fixable})
        fixed = [finding.to_dict(self.name) for finding in self.corrected]
        found: dict[str, Any] = {
            "ok": self.ok, "file": self.name, "version": self.version, "version_reason": self.reason,
            "problems": problems, "fixed": fixed, "diff": self.diff,
        }  # fmt: skip
        return found | ({"error": self.error.to_dict()} if self.error else {})


def lint(options: LintOptions) -> Result:
    """Check engine YAML files for one TensorRT-LLM version; report every problem with its line, code and remedy."""
    files, passed = options.split()
    if not files:
        raise UsageError("no file is given before the options of trtllm-serve", "pass the engine YAML first")
    if options.fix and "-" in files:
        raise UsageError("--fix has no file to write for standard input", "use --diff, or pass a file")
    if len(set(files)) < len(files):
        raise UsageError("a file is given twice", "give each file once")
    judged = [_judge(file, passed, options) for file in files]
    failed = [(item.name, item.error.message) for item in judged if item.error is not None and len(judged) > 1]
    write_stderr("".join(f"{name}: not judged: {message}\n" for name, message in failed))
    return Result(_as_json(judged), lines=[line for item in judged for line in _lines(item)],
                  failure=_failure(judged, options.strict))  # fmt: skip


def _failure(judged: list[Judged], strict: bool) -> TrtspecError | None:
    """The error of the first file that could not be judged, else what the problems mean."""
    wrong, warned = [item for item in judged if not item.ok], [item.name for item in judged if item.count("warning")]
    unjudged = next((item.error for item in judged if item.error is not None), None)
    if unjudged is not None:
        return unjudged
    if wrong:
        versions = ", ".join(dict.fromkeys(str(item.version) for item in wrong))
        names = ", ".join(item.name for item in wrong)
        return CheckFailed(f"TensorRT-LLM {versions} would reject {names} or ignore a part of it")
    return CheckFailed(f"--strict: there are warnings about {', '.join(warned)}") if strict and warned else None


def _as_json(judged: list[Judged]) -> dict[str, Any]:
    """One file as its own object; several with all problems together, and each by itself under `files`."""
    listed = [item.to_dict() for item in judged]
    if len(listed) == 1:
        return listed[0]
    versions = {item.version for item in judged}
    return {
        "ok": all(item.ok for item in judged),
        "version": versions.pop() if len(versions) == 1 else None,
        "problems": [problem for item in listed for problem in item["problems"]],
        "files": listed,
    }


def _judge(file: str, passed: list[str] | None, options: LintOptions) -> Judged:
    from trtspec.trtllm.carriers import carried
    from trtspec.trtllm.document import Document

    try:
        document = Document.read(file)
    except TrtspecError as error:
        return Judged(file, error=error)
    try:
        parts = carried(document.text)
        judged = _judge_parts(document, parts, passed, options) if parts else _judge_file(document, passed, options)
    except TrtspecError as error:
        return Judged(document.name, document, error=error)
    if options.fix and judged.document is not None and judged.document.text != document.text:
        _write(file, judged.document.text)
    return judged


def _judge_file(
    document: Document, passed: list[str] | None, options: LintOptions, part: Carried | None = None
) -> Judged:
    """One engine file; `part` says what else is known of one that another file carries."""
    import os

    from trtspec.trtllm.deployment import deployment_of, name_problem
    from trtspec.trtllm.lint import fix
    from trtspec.trtllm.lint import lint as find

    version, names, unfound = options.trtllm_version, {"target": options.target, "head": options.head}, []
    if part is not None:
        version = version or part.version
        passed = list(part.words) if passed is None and part.words is not None else passed
        for role, name in (("target", part.target), ("head", part.head)):
            if name and names[role] is None and "$" not in name:
                problem = name_problem(name)
                unfound += [problem] if problem is not None else []
                names[role] = name if problem is None else None
    verdict = _engine_verdict(document, options.trtllm_version) if options.installed else None
    deployment, reason, wrong = deployment_of(
        document, version=verdict.version if verdict else version, **names,
        gpu=options.gpu, passed=passed, environ=os.environ, here=options.installed,
    )  # fmt: skip
    findings = find(document, deployment)
    better, corrected = fix(document, deployment, findings)
    changed = _diff(document, better) if options.diff and part is None else ""
    fixable = frozenset((finding.code, finding.key) for finding in corrected)
    if options.fix and better.text != document.text:
        document, fixable, findings = better, frozenset(), find(better, deployment)
        verdict = _engine_verdict(document, None) if verdict else None
    if verdict is not None:
        findings, reason = [*findings, *verdict.findings], "installed here; its own classes judged too"
    elif part is not None and version == part.version and version is not None:
        reason = "the image's tag"
    if part is not None and part.elsewhere:  # the rest may be in the file that is not here
        findings = [item for item in findings if item.key in {*deployment.argv, "--tool_parser"}]
    return Judged(
        document.name, document, deployment.version, reason, [*unfound, *wrong], findings,
        corrected if options.fix else [], fixable, changed,
    )  # fmt: skip


def _judge_parts(document: Document, parts: list[Carried], passed: list[str] | None, options: LintOptions) -> Judged:
    """Every engine file and command that a file carries, each finding at its line of the file."""
    from dataclasses import replace

    from trtspec.errors import Problem
    from trtspec.trtllm.document import Document as Read

    text, every, shift = document.text, [], 0
    for part in sorted(parts, key=lambda part: part.first):
        inner = Read.parse(part.text, document.name)
        judged = _judge_file(inner, passed, options, part)
        hidden = {key for key, entry in inner.entries.items() if part.expands and "$" in str(entry.value)}
        findings = [
            replace(
                finding, key=f"{part.place}: {finding.key}".removesuffix(": "),
                line=shift + (part.first + finding.line if finding.line else part.command + 1),
                column=finding.column and finding.column + part.indent,
            )
            for finding in judged.findings
            if finding.key not in hidden
        ]  # fmt: skip
        at = f"line {part.command + shift + 1}: "
        wrong = [replace(problem, where=at + problem.where) for problem in judged.wrong]
        if part.elsewhere:
            message = f"the engine file {part.elsewhere} is not in this file: only the command's options were judged"
            remedy = f"lint {part.elsewhere} too"
            wrong.append(Problem("TS-LINT-FILE-ELSEWHERE", "info", at + part.place, message, remedy))
        if judged.document is not None and judged.document.text != part.text:
            text = replace(part, first=part.first + shift).written_into(text, judged.document.text)
            shift += judged.document.text.count("\n") - part.lines
        every.append(replace(judged, findings=findings, wrong=wrong))
    after = Read.parse(text, document.name)
    versions = ", ".join(dict.fromkeys(str(item.version) for item in every))
    reasons = ", ".join(dict.fromkeys(str(item.reason) for item in every))
    return Judged(
        document.name, after, versions, reasons, [one for item in every for one in item.wrong],
        [one for item in every for one in item.findings], [one for item in every for one in item.corrected],
        frozenset().union(*(item.fixable for item in every)), _diff(document, after) if options.diff else "",
    )  # fmt: skip


def _engine_verdict(document: Document, asked: str | None) -> Verdict:
    """The installed engine's verdict; raises UsageError when another version was asked for."""
    from packaging.version import Version

    from trtspec.trtllm.lint import judge
    from trtspec.trtllm.schema import parse_version

    verdict = judge(document)
    if asked and parse_version(asked) != Version(verdict.version):
        message = f"TensorRT-LLM {verdict.version} is installed, not {asked}"
        raise UsageError(message, "leave out one of the two options")
    return verdict


def _diff(before: Document, after: Document) -> str:
    import difflib

    old, new = before.text.splitlines(keepends=True), after.text.splitlines(keepends=True)
    lines = []
    for line in difflib.unified_diff(old, new, before.name, before.name):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)


def _write(file: str, text: str) -> None:
    """Behind a link the file itself is written, and keeps its permissions."""
    from pathlib import Path

    from trtspec.report import write_atomic

    place = Path(file).resolve()
    try:
        mode = place.stat().st_mode & 0o7777
        write_atomic(place, text)
        place.chmod(mode)
    except OSError as error:
        raise TrtspecError(f"{file} cannot be written: {error.strerror}", "print the corrections with --diff") from None


def _lines(judged: Judged) -> Iterator[str]:
    yield from judged.diff.splitlines()
    for finding in judged.corrected:
        yield f"fixed   {finding.code} {finding.key}: {finding.remedy}"
    if judged.error is not None:
        return
    yield from problem_lines(judged.wrong)
    for finding in judged.findings:
        at = ":".join(str(part) for part in (judged.name, finding.line, finding.column) if part is not None)
        place = f"{at} {finding.key}".rstrip()
        head, *remedy = problem_lines([Problem(finding.code, finding.severity, place, finding.message, finding.remedy)])
        yield from [head, *(_excerpt(judged.document, finding) if judged.document and finding.line else []), *remedy]
    errors, warnings = judged.count("error"), judged.count("warning")
    verdict = f"{errors} error{'s' if errors > 1 else ''}" if errors else "no errors"
    verdict += f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    yield f"{judged.name}: {verdict} for TensorRT-LLM {judged.version} ({judged.reason})"


def _excerpt(document: Document, finding: Finding) -> list[str]:
    """The line at fault, and carets below the key or value where its column is known."""
    lines = document.text.split("\n")
    number = finding.line or 1
    if number > len(lines):
        return []
    line, column, width = lines[number - 1].rstrip("\r"), (finding.column or 1) - 1, finding.width
    shift = max(0, column - MOST_COLUMNS // 2) if len(line) > MOST_COLUMNS else 0
    shown = "".join(char if char.isprintable() else " " for char in line[shift : shift + MOST_COLUMNS])
    margin = " " * 8
    found = [f"{margin}{number:>4} | {shown}"]
    if finding.column is not None:
        carets = "^" * max(1, min(width, len(shown) - (column - shift)))
        found.append(f"{margin}     | {' ' * (column - shift)}{carets}")
    return found
