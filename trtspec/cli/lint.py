"""`trtspec lint`: any engine YAML against one TensorRT-LLM version, and the target and head it is for."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml

from trtspec.errors import CheckFailed, Problem, TrtspecError, UsageError
from trtspec.records import JsonOption, argument, option
from trtspec.report import Result, problem_lines, write_atomic, write_stderr

if TYPE_CHECKING:
    from trtspec.errors import Severity
    from trtspec.trtllm.carriers import Carried
    from trtspec.trtllm.deployment import Finding
    from trtspec.trtllm.document import Document
    from trtspec.trtllm.lint import Verdict

WALKED = {".yaml", ".yml", ".json", ".sh", ".bash", ".slurm", ".sbatch"}
MAX_NAMED = 5  # files in one message
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
        str | None,
        option(
            "Version to check for. Default: the one in the file's first line, else the installed one."
        ),
    ] = None
    target: Annotated[
        str | None, option("Target that the file is for: a directory or a hub id.")
    ] = None
    head: Annotated[
        str | None, option("Eagle3 head that the file is for: a directory or a hub id.")
    ] = None
    gpu: Annotated[
        str | None,
        option("GPU type that the file is for: b200, gb200, b300, gb300, h200, h100, or sm120."),
    ] = None
    installed: Annotated[
        bool,
        option(
            "Also validate with the classes of the installed TensorRT-LLM, in a separate process."
        ),
    ] = False
    fix: Annotated[bool, option("Apply the corrections that are certain to the file.")] = False
    diff: Annotated[
        bool, option("Print these corrections as a unified diff; writes nothing without --fix.")
    ] = False
    strict: Annotated[bool, option("Exit with status 3 on warnings too.")] = False
    json_: JsonOption = False

    def split(self) -> tuple[list[str], list[str] | None]:
        """The files, and the words after `--` (None where there are none)."""
        end = next(
            (n for n, word in enumerate(self.files) if word.startswith("-") and word != "-"),
            len(self.files),
        )
        return list(self.files[:end]), list(self.files[end:]) or None


@dataclass(frozen=True)
class Judged:
    """One file: what is wrong with it or the options it is served with. `corrected` are the findings that a fix solves,
    `fix_applied` says whether the file has it now. Where it could not be judged, `error` says why."""

    name: str
    document: Document | None = None
    version: str | None = None
    reason: str | None = None
    findings: list[Finding] = field(default_factory=list)
    corrected: list[Finding] = field(default_factory=list)
    fix_applied: bool = False
    diff: str = ""
    error: TrtspecError | None = None

    def count(self, severity: Severity) -> int:
        return [finding.severity for finding in self.findings].count(severity)

    @property
    def ok(self) -> bool:
        return self.error is None and not self.count("error")

    def placed(self, part: Carried) -> Judged:
        """With each finding about a part of a file at its line of the file."""
        if not part.place:
            return self

        origin = part.origin

        def move(finding: Finding) -> Finding:
            variable = finding.key.partition(".")[2]
            if finding.key.startswith("environment.") and variable in part.environ:
                return replace(finding, line=part.environ[variable][1] + 1)
            line = part.line if part.words is None else part.command
            line = part.option_lines.get(finding.key, line)
            if finding.line:
                line = origin.line(finding.line - 1)
            column = finding.column + origin.indent if finding.column and origin.exact else None
            key = f"{part.place}: {finding.key}".removesuffix(": ")
            return replace(finding, key=key, line=line + 1, column=column)

        return replace(
            self, findings=[*map(move, self.findings)], corrected=[*map(move, self.corrected)]
        )

    def to_dict(self) -> dict[str, Any]:
        fixable = (
            set()
            if self.fix_applied
            else {(finding.code, finding.key) for finding in self.corrected}
        )
        found: dict[str, Any] = {
            "ok": self.ok,
            "file": self.name,
            "version": self.version,
            "version_reason": self.reason,
            "problems": [
                {**finding.to_dict(self.name), "fixable": (finding.code, finding.key) in fixable}
                for finding in self.findings
            ],
            "fixed": [finding.to_dict(self.name) for finding in self.corrected]
            if self.fix_applied
            else [],
            "diff": self.diff,
        }
        return found | ({"error": self.error.to_dict()} if self.error else {})


def lint(options: LintOptions) -> Result:
    """Check engine YAML files for one TensorRT-LLM version; report every problem with its line, code and remedy."""
    named, passed = options.split()
    files = [file for name in named for file in _files_of(name)]
    if not files:
        raise UsageError(
            "no file is given before the options of trtllm-serve", "pass the engine YAML first"
        )
    if options.fix and "-" in files:
        raise UsageError(
            "--fix has no file to write for standard input", "use --diff, or pass a file"
        )
    if len(set(files)) < len(files):
        raise UsageError("a file is given twice", "give each file once")
    judged = [_judge(file, passed, options) for file in files]
    failed = [
        (item.name, item.error.message)
        for item in judged
        if item.error is not None and len(judged) > 1
    ]
    write_stderr("".join(f"{name}: not judged: {message}\n" for name, message in failed))
    return Result(_as_json(judged), lines=[line for item in judged for line in _lines(item)],
                  failure=_failure(judged, options.strict))  # fmt: skip


def _files_of(name: str) -> list[str]:
    """The file itself; of a directory, every file below it that has engine settings. Raises UsageError if none has."""
    from trtspec.trtllm.carriers import carried, is_engine_file
    from trtspec.trtllm.document import Document
    from trtspec.vllm import is_vllm_file

    if not Path(name).is_dir():
        return [name]
    files, left_out = list[str](), 0
    for path in sorted(Path(name).rglob("*")):
        if path.suffix not in WALKED or not path.is_file():
            continue
        try:
            document = Document.read(path)
        except TrtspecError:
            files.append(str(path))  # judged, so that the error is reported
            continue
        keys = document.value if isinstance(document.value, dict) else ()
        if is_engine_file(map(str, keys)) or carried(document.text) or is_vllm_file(keys):
            files.append(str(path))
        else:
            left_out += 1
    if left_out:
        write_stderr(f"{name}: {left_out} files without engine settings were left out\n")
    if not files:
        raise UsageError(f"no file below {name} has engine settings", "pass the engine YAML")
    return files


def lint_configuration(
    config: Mapping[str, Any] | str | Path,
    *,
    trtllm_version: str | None = None,
    target: str | Path | None = None,
    head: str | Path | None = None,
    gpu: str | None = None,
    options: tuple[str, ...] = (),
) -> Result:
    """Judges an engine configuration: a mapping, YAML text, or the path of a file. Text has a line break or a colon
    followed by a space; every other string is a path. `options`: of trtllm-serve, used with the file."""
    from trtspec.trtllm.carriers import Carried
    from trtspec.trtllm.document import Document

    if isinstance(config, Mapping):
        try:
            document = Document.parse(yaml.safe_dump(dict(config), sort_keys=False), "(dict)")
        except yaml.YAMLError as error:
            raise UsageError(
                f"the configuration cannot be written as YAML: {error}", "use plain values"
            ) from None
    elif isinstance(config, str) and ("\n" in config or ": " in config):
        document = Document.parse(config, "(text)")
    else:
        document = Document.read(config)
    pair = [None if one is None else str(one) for one in (target, head)]
    asked = LintOptions(
        files=(document.name,), trtllm_version=trtllm_version, target=pair[0], head=pair[1], gpu=gpu
    )
    judged = judge_part(document, Carried(""), list(options) or None, asked)
    problems = [finding.problem(document.name) for finding in judged.findings]
    return Result({"version": judged.version, "version_reason": judged.reason}, problems)


def _failure(judged: list[Judged], strict: bool) -> TrtspecError | None:
    """The error of the first file that could not be judged, else what the problems mean."""
    wrong, warned = (
        [item for item in judged if not item.ok],
        [item.name for item in judged if item.count("warning")],
    )
    if unjudged := [item.error for item in judged if item.error is not None]:
        return unjudged[0]
    if wrong:
        versions = ", ".join(dict.fromkeys(item.version for item in wrong if item.version))
        engine = f"TensorRT-LLM {versions}" if versions else "the engine"
        names = ", ".join(item.name for item in wrong[:MAX_NAMED])
        more = f" and {len(wrong) - MAX_NAMED} more files" if len(wrong) > MAX_NAMED else ""
        return CheckFailed(f"{engine} would reject {names}{more} or ignore a part of it")
    return (
        CheckFailed(f"--strict: there are warnings about {', '.join(warned)}")
        if strict and warned
        else None
    )


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
    """The file, or every engine file and command that it carries, each finding at its line of the file."""
    from trtspec.trtllm.carriers import Carried, Origin, carried
    from trtspec.trtllm.document import Document

    try:
        document = Document.read(file)
    except TrtspecError as error:
        return Judged(file, error=error)
    text, shift, every = document.text, 0, list[Judged]()
    try:
        parts = carried(text)
        if not parts and (
            text.startswith("#!") or file.endswith(".sh") or (document.error and "{{" in text)
        ):
            raise UsageError(
                f"{file} is a script or template without engine settings", "pass the engine YAML"
            )
        if not parts and (foreign := _foreign(document)):
            return foreign
        whole = Carried("", text, Origin(lines=len(text.splitlines())))
        for part in parts or [whole]:
            inner = (
                document if part.text == document.text else Document.parse(part.text, document.name)
            )
            judged = judge_part(inner, part, passed, options)
            every.append(judged.placed(part))
            if judged.document is not None and judged.document.text != part.text:
                moved = replace(part, origin=replace(part.origin, first=part.origin.first + shift))
                text = moved.written_into(text, judged.document.text)
                shift = text.count("\n") - document.text.count("\n")
    except TrtspecError as error:
        return Judged(document.name, document, error=error)
    better = document if text == document.text else Document.parse(text, document.name)
    if options.fix and better is not document:
        write_atomic(Path(file).resolve(), text)  # behind a link the file itself is written
    return Judged(
        document.name,
        better if options.fix else document,
        ", ".join(dict.fromkeys(judged.version for judged in every if judged.version)),
        ", ".join(dict.fromkeys(judged.reason for judged in every if judged.reason)),
        list(dict.fromkeys(finding for judged in every for finding in judged.findings)),
        [finding for judged in every for finding in judged.corrected],
        options.fix,
        _diff(document, better) if options.diff else "",
    )


def judge_part(
    document: Document, part: Carried, passed: list[str] | None, options: LintOptions
) -> Judged:
    """One engine file or command, with what `part` says of how it is served. The document is the corrected one."""
    from trtspec.trtllm.carriers import role_in
    from trtspec.trtllm.deployment import Finding, deployment_of, name_problem
    from trtspec.trtllm.lint import fix
    from trtspec.trtllm.lint import lint as find
    from trtspec.trtllm.shell import OMITTED

    line = part.text.count("\n", 0, part.text.find(OMITTED)) + 1 if OMITTED in part.text else None
    unread = Finding("TS-LINT-NOT-READ", "warning", "", part.unread, line=line)
    if not part.text and part.words is None and part.place:
        return Judged(document.name, document, findings=[unread])
    if part.foreign:
        return _foreign(document) or Judged(document.name, document)
    environ = {name: value for name, (value, _) in part.environ.items()}
    version, names, wrong = (
        options.trtllm_version or part.version,
        {"target": options.target, "head": options.head},
        [],
    )
    passed = list(part.words) if passed is None and part.words is not None else passed
    for role, name in (("target", part.target), ("head", part.head)):
        if name and names[role] is None and "$" not in name:
            problem = name_problem(name)
            wrong += [problem] if problem is not None else []
            names[role] = name if problem is None else None
    verdict = _engine_verdict(document, options.trtllm_version) if options.installed else None
    deployment, reason, more = deployment_of(
        document, version=verdict.version if verdict else version, **names,
        gpu=options.gpu, passed=passed, environ=environ if part.place else os.environ,
        here=options.installed, role=part.role or role_in(Path(document.name).stem),
    )  # fmt: skip
    deployment = replace(deployment, options=None) if part.partial else deployment
    findings = find(document, deployment)
    better, corrected = fix(document, deployment, findings)
    if options.fix and better.text != document.text:
        findings, verdict = (
            find(better, deployment),
            _engine_verdict(better, None) if verdict else None,
        )
    if verdict is not None:
        findings, reason = (
            [*findings, *verdict.findings],
            "installed here; its own classes judged too",
        )
    elif version is not None and version == part.version:
        reason = "the image's tag"
    if part.elsewhere and not part.text:  # the rest may be in the file that is not here
        findings = [item for item in findings if item.key in {*deployment.argv, "--tool_parser"}]
        message = f"the engine file {part.elsewhere} is not in this file: only the command's options were judged"
        more.append(
            Problem("TS-LINT-FILE-ELSEWHERE", "info", "", message, f"lint {part.elsewhere} too")
        )
    # Dynamo's parsers have names and releases of their own
    own = ("TS-SERVE-OPTION-VALUE", "TS-LINT-PARSER-TOO-NEW") if part.dynamo else ()
    said = [*(Finding.of(problem, problem.where) for problem in (*wrong, *more)), *findings]
    kept = [finding for finding in said if not (finding.code in own and "parser" in finding.key)]
    kept = [_in_words_of_dynamo(finding) for finding in kept] if part.dynamo else kept
    kept += [unread] if part.unread else []
    return Judged(document.name, better, deployment.version, reason, kept, corrected)


def _in_words_of_dynamo(finding: Finding) -> Finding:
    """With the options of `dynamo.trtllm` in place of those of trtllm-serve."""
    from trtspec.trtllm.deployment import IN_DYNAMO

    def in_dynamo(text: str) -> str:
        return re.sub(r"--[a-z_]+", lambda flag: IN_DYNAMO.get(flag[0], flag[0]), text)

    return replace(finding, message=in_dynamo(finding.message), remedy=in_dynamo(finding.remedy))


def _foreign(document: Document) -> Judged | None:
    """A file of vLLM, or one without any key of an engine; None for any other."""
    from trtspec.trtllm.carriers import is_foreign
    from trtspec.trtllm.deployment import Finding
    from trtspec.vllm import is_vllm_file, unknown_options

    keys = document.value if isinstance(document.value, dict) else {}
    if is_vllm_file(keys):
        findings = [
            Finding.of(problem, problem.where).placed(document) for problem in unknown_options(keys)
        ]
        reason = "vLLM's configuration, by the options that are known here"
        return Judged(document.name, document, None, reason, findings)
    if not is_foreign(map(str, keys)):
        return None
    shown = ", ".join(map(str, [*keys][:MAX_NAMED]))
    message = f"none of its keys ({shown}) is TensorRT-LLM's, and nothing in it is an engine file"
    finding = Finding("TS-LINT-NO-ENGINE-FILE", "error", "", message)
    return Judged(document.name, document, None, "not an engine file", [finding])


def _engine_verdict(document: Document, asked: str | None) -> Verdict:
    """The installed engine's verdict; raises UsageError when another version was asked for."""
    from trtspec.trtllm.lint import judge
    from trtspec.trtllm.schema import parse_version

    verdict = judge(document)
    if asked and parse_version(asked) != parse_version(verdict.version):
        raise UsageError(
            f"TensorRT-LLM {verdict.version} is installed, not {asked}",
            "leave out one of the options",
        )
    return verdict


def _diff(before: Document, after: Document) -> str:
    old, new = before.text.splitlines(keepends=True), after.text.splitlines(keepends=True)
    lines = difflib.unified_diff(old, new, before.name, before.name)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(judged: Judged) -> Iterator[str]:
    yield from judged.diff.splitlines()
    for finding in judged.corrected if judged.fix_applied else ():
        yield f"fixed   {finding.code} {finding.key}: {finding.problem(judged.name).remedy}"
    if judged.error is not None:
        return
    for finding in judged.findings:
        at = ":".join(
            str(part) for part in (judged.name, finding.line, finding.column) if part is not None
        )
        place = f"{at} {finding.key}".rstrip()
        head, *remedy = problem_lines(
            [Problem(finding.code, finding.severity, place, finding.message, finding.remedy)]
        )
        yield from [
            head,
            *(_excerpt(judged.document, finding) if judged.document and finding.line else []),
            *remedy,
        ]
    errors, warnings = judged.count("error"), judged.count("warning")
    verdict = f"{errors} error{'s' if errors > 1 else ''}" if errors else "no errors"
    verdict += f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    engine = f" for TensorRT-LLM {judged.version}" if judged.version else ""
    yield f"{judged.name}: {verdict}{engine} ({judged.reason})"


def _excerpt(document: Document, finding: Finding) -> list[str]:
    """The line at fault, and carets below the key or value where its column is known."""
    lines, number = document.text.split("\n"), finding.line or 1
    if number > len(lines):
        return []
    line, column, width = lines[number - 1].rstrip("\r"), (finding.column or 1) - 1, finding.width
    shift = max(0, column - MOST_COLUMNS // 2) if len(line) > MOST_COLUMNS else 0
    shown = "".join(
        char if char.isprintable() else " " for char in line[shift : shift + MOST_COLUMNS]
    )
    found = [f"{number:>12} | {shown}"]
    if finding.column is not None:
        carets = "^" * max(1, min(width, len(shown) - (column - shift)))
        found.append(f"{'':12} | {' ' * (column - shift)}{carets}")
    return found
