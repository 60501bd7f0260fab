"""Defines `trtspec lint`, which checks engine YAML for one TensorRT-LLM version and a pair."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml

from trtspec.errors import CheckFailed, Problem, TrtspecError, UsageError, listed, printable
from trtspec.records import JsonOption, Mode, Modes, argument, checked, option
from trtspec.report import Result, problem_lines, write_atomic, write_stderr

if TYPE_CHECKING:
    from trtspec.errors import Severity
    from trtspec.trtllm.carriers import Carried
    from trtspec.trtllm.document import Document
    from trtspec.trtllm.lint import EngineVerdict

# suffixes of the files that are read in a directory
SUFFIXES = {".yaml", ".yml", ".json", ".sh", ".bash", ".slurm", ".sbatch"}
BY_VLLM = "vLLM's configuration, by the options that are known here"
OF_TRTLLM = Modes(Mode("an engine file of TensorRT-LLM", "a file of TensorRT-LLM"))
OF_VLLM = Mode("a file of vLLM", "a file of vLLM")
MOST_COLUMNS = 65  # characters of a source line in the output, which then fits 80 columns


@dataclass(frozen=True, kw_only=True)
class LintOptions:
    """Options of `trtspec lint`.

    files: paths, and then the options of trtllm-serve from the first word that begins with a dash.
    """

    files: Annotated[
        tuple[str, ...],
        argument(
            "Engine YAML, or what carries it: Helm values, a manifest, a script. `-`: standard "
            "input. After `--`: the trtllm-serve options used with it.",
            metavar="FILE",
        ),
    ]
    trtllm_version: Annotated[
        str | None,
        option(
            "Version to check for. Default: the one in the file's first line, else the installed "
            "one."
        ),
        OF_TRTLLM,
    ] = None
    target: Annotated[
        str | None, option("Target that the file is for: a directory or a hub id."), OF_TRTLLM
    ] = None
    head: Annotated[
        str | None, option("Eagle3 head that the file is for: a directory or a hub id."), OF_TRTLLM
    ] = None
    gpu: Annotated[
        str | None,
        option("GPU type that the file is for: b200, gb200, b300, gb300, h200, h100, or sm120."),
        OF_TRTLLM,
    ] = None
    installed: Annotated[
        bool,
        option(
            "Also validate with the classes of the installed TensorRT-LLM, in a separate process."
        ),
        OF_TRTLLM,
    ] = False
    fix: Annotated[
        bool, option("Apply the corrections that are certain to the file.", group="Corrections")
    ] = False
    diff: Annotated[
        bool,
        option(
            "Print these corrections as a unified diff; writes nothing without --fix.",
            group="Corrections",
        ),
    ] = False
    strict: Annotated[bool, option("Exit with status 3 on warnings too.")] = False
    json_: JsonOption = False

    def split(self) -> tuple[list[str], list[str] | None]:
        """Returns the paths, and the options of trtllm-serve (None without options)."""
        # a single dash is standard input
        files = [*takewhile(lambda word: word == "-" or not word.startswith("-"), self.files)]
        return files, list(self.files[len(files) :]) or None


@dataclass(frozen=True)
class Judged:
    """Result of checking one file, and the commands in the file.

    name: path of the file.
    document: parsed file, after the corrections of --fix. None if the file could not be read.
    version: TensorRT-LLM version that the file was checked for. None for a file of another tool.
    reason: reason for the choice of the version.
    findings: problems that remain.
    corrected: problems that --fix has solved.
    diff: unified diff of the corrections, with --diff.
    error: reason if the file could not be checked, else None.
    """

    name: str
    document: Document | None = None
    version: str | None = None
    reason: str | None = None
    findings: list[Problem] = field(default_factory=list)
    corrected: list[Problem] = field(default_factory=list)
    diff: str = ""
    error: TrtspecError | None = None

    def count(self, severity: Severity) -> int:
        """Number of findings with this severity."""
        return [finding.severity for finding in self.findings].count(severity)

    @property
    def ok(self) -> bool:
        """Whether the file was checked and has no errors."""
        return self.error is None and not self.count("error")

    def to_dict(self) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "ok": self.ok,
            "file": self.name,
            "version": self.version,
            "version_reason": self.reason,
            "problems": [finding.to_dict() for finding in self.findings],
            "fixed": [finding.to_dict() for finding in self.corrected],
            "diff": self.diff,
        }
        if self.error:
            answer["error"] = self.error.to_dict()
        return answer


def lint(options: LintOptions) -> Result:
    """Check engine YAML files for one TensorRT-LLM version.

    Reports every problem with its line, code and remedy.
    """
    from trtspec.trtllm.deployment import assumed_release

    paths, passed = options.split()
    files: list[str] = []
    for path in paths:
        files += _files_of(path)
    if not files:
        raise UsageError(
            "no file is given before the options of trtllm-serve", "pass the engine YAML first"
        )
    if options.fix and "-" in files:
        raise UsageError(
            "--fix has no file to write for standard input", "use --diff, or pass a file"
        )
    judged = [_judge(file, passed, options) for file in dict.fromkeys(files)]
    if all(item.reason == BY_VLLM for item in judged):
        checked(options, OF_VLLM)
    for item in judged:
        # the error of a single file is the error of the command
        if len(judged) > 1 and item.error is not None:
            write_stderr(printable(f"{item.name}: not judged: {item.error.message}\n"))
    lines: list[str] = []
    for item in judged:
        lines += _lines(item)
    notes = (assumed_release(item.reason, item.document) for item in judged)
    # one note is enough, because the assumed release is the same for all files
    lines += problem_lines(next(filter(None, notes), []))
    return Result(_as_json(judged), lines=lines, failure=_failure(judged, options.strict))


def _files_of(name: str) -> list[str]:
    """Returns the files to check: the path `name` itself, unless it is a directory.

    In a directory, these are the files with engine settings, and the files that cannot be read, at
    any depth. Raises UsageError if there are none.
    """
    from trtspec.trtllm.carriers import carried
    from trtspec.trtllm.document import Document
    from trtspec.verbs.engine_files import engine_of

    if not Path(name).is_dir():
        return [name]
    paths = [path for path in Path(name).rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    files = []
    for path in sorted(paths):
        # a file that cannot be read stays in the list, so that lint reports the error
        with suppress(TrtspecError):
            document = Document.read(path)
            if not engine_of(document.mapping) and not carried(document.text):
                continue
        files.append(str(path))
    count = len(paths) - len(files)
    if count:
        write_stderr(printable(f"{name}: {count} files without engine settings were left out\n"))
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
    """Checks an engine configuration: a mapping, YAML text, or the path of a file.

    A string with a line break or with a colon and a space is YAML text. Every other string is a
    path.
    `options`: options of trtllm-serve, used with the file.
    """
    from trtspec.trtllm.carriers import Carried
    from trtspec.trtllm.document import Document

    name = "(text)"
    if isinstance(config, Mapping):
        name = "(dict)"
        try:
            config = yaml.safe_dump(dict(config), sort_keys=False)
        except yaml.YAMLError as error:
            message = f"the configuration cannot be written as YAML: {error}"
            raise UsageError(message, "use plain values") from None
    if isinstance(config, str) and ("\n" in config or ": " in config):
        document = Document.parse(config, name)
    else:
        document = Document.read(config)
    lint_options = LintOptions(
        files=(document.name,),
        trtllm_version=trtllm_version,
        target=str(target) if target else None,
        head=str(head) if head else None,
        gpu=gpu,
    )
    foreign = _foreign(document)
    if foreign is not None and foreign.reason == BY_VLLM:
        checked(lint_options, OF_VLLM)
    judged = foreign or judge_part(document, Carried(""), list(options) or None, lint_options)
    values = {"version": judged.version, "version_reason": judged.reason}
    return Result(values, judged.findings)


def _failure(judged: list[Judged], strict: bool) -> TrtspecError | None:
    """Returns the failure of the command. None if every file passes.

    A file that could not be checked comes first, then errors, then warnings if `strict`.
    """
    for item in judged:
        if item.error is not None:
            return item.error
    failed = [item for item in judged if not item.ok]
    with_warnings = [item.name for item in judged if strict and item.count("warning")]
    if failed:
        versions = listed(item.version for item in failed)
        engine = "the engine"
        if versions:
            engine = f"TensorRT-LLM {versions}"
        names = listed(item.name for item in failed)
        return CheckFailed(f"{engine} would reject {names} or ignore a part of it")
    if with_warnings:
        return CheckFailed(f"--strict: there are warnings about {listed(with_warnings)}")
    return None


def _as_json(judged: list[Judged]) -> dict[str, Any]:
    """Returns the JSON object: the object of a single file, or an object for several files.

    The object for several files has all their problems. `files` contains the object of each file.
    """
    files = [item.to_dict() for item in judged]
    if len(files) == 1:
        return files[0]
    versions = {item.version for item in judged}
    problems: list[dict[str, Any]] = []
    for file in files:
        problems += file["problems"]
    return {
        "ok": all(item.ok for item in judged),
        "version": versions.pop() if len(versions) == 1 else None,
        "problems": problems,
        "files": files,
    }


def _judge(file: str, passed: list[str] | None, options: LintOptions) -> Judged:
    """Checks a file, or every engine file and command inside it, such as in a Helm values file.

    Each finding has its line in the file. With --fix, writes the corrected file.

    file: path, or `-` for standard input.
    passed: options of trtllm-serve that are used with the file. None if they are not known.
    """
    from trtspec.trtllm.carriers import Carried, Origin, carried
    from trtspec.trtllm.document import Document

    try:
        document = Document.read(file)
    except TrtspecError as error:
        return Judged(file, error=error)
    text = document.text
    name = document.name
    try:
        parts = carried(text)
        if not parts:  # an engine file itself, unless it is a script or another tool's file
            parts = [Carried("", text, Origin(lines=text.count("\n") + 1))]
            if file.endswith(".sh") or text.startswith("#!") or (document.error and "{{" in text):
                message = f"{file} is a script or template without engine settings"
                raise UsageError(message, "pass the engine YAML")
            foreign = _foreign(document)
            if foreign:
                return foreign
        judged_parts = [
            judge_part(Document.parse(part.text, name), part, passed, options) for part in parts
        ]
    except TrtspecError as error:
        return Judged(name, document, error=error)
    # from the last part to the first, so that the lines of earlier parts stay correct
    for part, item in zip(reversed(parts), reversed(judged_parts), strict=True):
        if item.document is not None and item.document.text != part.text:
            text = part.written_into(text, item.document.text)
    corrected_document = document
    if text != document.text:
        corrected_document = Document.parse(text, name)
    if options.fix and corrected_document is not document:
        # resolved, because writing would replace a link and not the file that it links to
        write_atomic(Path(file).resolve(), text)
    findings: list[Problem] = []
    corrected: list[Problem] = []
    for item in judged_parts:
        findings += item.findings
        corrected += item.corrected
    diff = _diff(document, corrected_document) if options.diff else ""
    return Judged(
        name,
        corrected_document if options.fix else document,
        listed(item.version for item in judged_parts),
        listed(item.reason for item in judged_parts),
        list(dict.fromkeys(findings)),  # a variable is reported once for all parts
        corrected,
        diff,
    )


def judge_part(
    document: Document, part: Carried, passed: list[str] | None, options: LintOptions
) -> Judged:
    """Checks one engine file with its command, or a command alone.

    Each finding has its line in the file that contains the part. The document of the result is
    corrected, also without --fix.

    document: parsed engine file. Empty for a command alone.
    part: position of the engine file, and the command that serves it.
    passed: options of trtllm-serve from the command line of lint. None if not given.
    """
    from trtspec.trtllm.carriers import VLLM, role_in
    from trtspec.trtllm.deployment import deployment_of
    from trtspec.trtllm.lint import fix
    from trtspec.trtllm.lint import lint as find
    from trtspec.trtllm.shell import OMITTED

    # the warning that a part of the file, such as the output of a shell command, is not known
    text_before, omitted, _ = part.text.partition(OMITTED)
    line = text_before.count("\n") + 1 if omitted else None
    unread = document.placed(Problem("TS-LINT-NOT-READ", "warning", "", part.unread, line=line))
    command = part.command
    judged = Judged(document.name, document)
    if part.location and not command.engine and not part.text:
        return replace(judged, findings=[_moved(unread, part)])
    if command.engine == VLLM:
        foreign = None
        if part.text:
            foreign = _foreign(document)
        return foreign or _of_vllm(judged, part)
    if passed is None and command.engine:
        passed = command.words
    engine_verdict = None
    version = options.trtllm_version or part.version
    if options.installed:
        engine_verdict = _engine_verdict(document, options.trtllm_version)
        version = engine_verdict.version
    deployment, reason, problems = deployment_of(
        document,
        version=version,
        target=options.target,
        head=options.head,
        named=(part.target, part.head),
        passed=passed,
        here=options.installed,
    )
    # the variables in the file that contains the part, or of this process for an engine file
    environ = part.environ if part.location else os.environ
    role = part.role or role_in(Path(document.name).stem)
    deployment = deployment.served_on(options.gpu, environ, role)
    if command.partial:  # the shell adds options that are not known
        deployment = replace(deployment, options=None)
    findings = find(document, deployment)
    corrected_document, corrected = fix(document, deployment, findings)
    fixable = set(corrected)
    if options.fix:
        fixable = set()
        findings = find(corrected_document, deployment)
        if engine_verdict:
            engine_verdict = _engine_verdict(corrected_document, None)
    # --json reports a problem as fixable only if --fix would solve it
    findings = [item if item in fixable else replace(item, fix=None) for item in findings]
    if engine_verdict is not None:
        findings += engine_verdict.findings
        reason = "installed here; its own classes judged too"
    elif part.version and deployment.version == part.version:
        reason = "the image's tag"
    if command.config and not part.text:
        # settings that seem to be missing may be in the engine file, which is not here
        findings = [item for item in findings if item.key in {*deployment.argv, "--tool_parser"}]
        message = (
            f"the engine file {command.config} is not in this file: only the command's options "
            "were judged"
        )
        problems.append(Problem("TS-LINT-FILE-ELSEWHERE", "info", "", message))
    findings = [*map(document.placed, problems), *findings]
    if part.unread:
        findings += [unread]
    return replace(
        judged,
        document=corrected_document,
        version=deployment.version,
        reason=reason,
        findings=[_moved(item, part) for item in findings if not _is_about_dynamo(item, part)],
        corrected=[_moved(item, part) for item in corrected if options.fix],
    )


def _moved(finding: Problem, part: Carried) -> Problem:
    """Returns a finding about a part with its line and key in the file that contains the part.

    For a command of Dynamo, the texts name Dynamo's options.
    """
    from trtspec.trtllm.carriers import DYNAMO
    from trtspec.trtllm.deployment import dynamo_options
    from trtspec.trtllm.schema import read_beside

    if not part.location:  # the part is the whole file
        return finding
    line = part.line
    column = None
    variable = finding.key.removeprefix("environment.")
    if variable in part.environ:
        # without the part's location, because a variable is reported once for all parts
        return replace(finding, line=part.environ[variable])
    if finding.line:
        line = part.origin.line(finding.line - 1)
        if finding.column:
            column = part.origin.column(finding.column)
    elif part.command.engine:
        line = part.command.option_lines.get(finding.key, part.command.line)
    key = f"{part.location}: {finding.key}".removesuffix(": ")
    finding = replace(finding, key=key, line=line + 1, column=column)
    if part.command.engine != DYNAMO:
        return finding

    dynamo_names = {name: option for option, name in dynamo_options().items()}
    dynamo_names["--trust_remote_code"] = read_beside("dynamo.yaml")["trust"]

    def with_dynamo_names(text: str) -> str:
        """Returns the text with Dynamo's names of trtllm-serve's options."""
        return re.sub(r"--[a-z_]+", lambda flag: dynamo_names.get(flag[0], flag[0]), text)

    message = with_dynamo_names(finding.message)
    return replace(finding, message=message, remedy=with_dynamo_names(finding.remedy))


def _is_about_dynamo(finding: Problem, part: Carried) -> bool:
    """Whether a finding about a parser's name does not apply, because the command is Dynamo's.

    Dynamo has its own names of parsers, which do not depend on the engine's release.
    """
    from trtspec.trtllm.carriers import DYNAMO

    codes = ("TS-SERVE-OPTION-VALUE", "TS-SERVE-OPTION-UNCERTAIN", "TS-LINT-PARSER-TOO-NEW")
    return part.command.engine == DYNAMO and finding.code in codes and "parser" in finding.key


def _of_vllm(judged: Judged, part: Carried) -> Judged:
    """Returns the result with the findings about the options of a `vllm serve` command."""
    from trtspec.vllm import passed_options, unknown_options

    options = [
        replace(problem, key=f"--{problem.key}", file=judged.name)
        for problem in unknown_options(passed_options(part.command.words))
    ]
    findings = [_moved(option, part) for option in options]
    return replace(judged, reason=BY_VLLM, findings=findings)


def _foreign(document: Document) -> Judged | None:
    """Returns the result for a file of vLLM, an empty file, or a file that is not an engine file.

    None for a file that may be TensorRT-LLM's.
    """
    from trtspec.launch.serve_options import VLLM
    from trtspec.trtllm.carriers import is_foreign
    from trtspec.verbs.engine_files import engine_of
    from trtspec.vllm import unknown_options

    keys = document.mapping
    if engine_of(keys) is VLLM:
        findings = [document.placed(problem) for problem in unknown_options(keys)]
        return Judged(document.name, document, None, BY_VLLM, findings)
    severity: Severity = "error"
    message = f"no engine file is in it: its keys ({listed(map(str, keys))}) are another tool's"
    if document.name.endswith(".jsonl"):
        message = "no engine file is in it: JSON lines are data"
    elif document.value is None and document.error is None:
        severity = "warning"
        message = "the file is empty: it sets nothing, and some releases stop on it"
    # `architectures` is a key of a checkpoint's config.json, which also has keys of engines
    elif "architectures" not in keys and not is_foreign(map(str, keys)):
        return None
    finding = document.placed(Problem("TS-LINT-NO-ENGINE-FILE", severity, "", message))
    return Judged(document.name, document, None, "not an engine file", [finding])


def _engine_verdict(document: Document, requested: str | None) -> EngineVerdict:
    """Returns the findings of the installed engine's own classes.

    Raises UsageError if the user requested another version than the installed one.
    """
    from trtspec.trtllm.lint import judge
    from trtspec.trtllm.schema import parse_version

    verdict = judge(document)
    if requested and parse_version(requested) != parse_version(verdict.version):
        raise UsageError(
            f"TensorRT-LLM {verdict.version} is installed, not {requested}",
            "leave out one of the options",
        )
    return verdict


def _diff(before: Document, after: Document) -> str:
    """Returns the unified diff of two versions of a file, which `patch` can apply."""
    old = before.text.splitlines(keepends=True)
    new = after.text.splitlines(keepends=True)
    lines = difflib.unified_diff(old, new, before.name, before.name)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(judged: Judged) -> Iterator[str]:
    """Yields the output for a file: its diff, corrections, findings, and a line with the counts."""
    yield from judged.diff.splitlines()
    for finding in judged.corrected:
        yield f"fixed   {finding.code} {finding.key}: {finding.remedy}"
    if judged.error is not None:  # printed as the error of the command, or on stderr
        return
    for finding in judged.findings:
        message_line, *remedy_lines = problem_lines([finding])
        yield message_line
        if judged.document is not None and finding.line:
            yield from _excerpt(judged.document, finding, finding.line)
        yield from remedy_lines
    counts = {severity: judged.count(severity) for severity in ("error", "warning")}
    texts = [f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count]
    if not judged.count("error"):
        texts = ["no errors", *texts]
    verdict = ", ".join(texts)
    engine = f" for TensorRT-LLM {judged.version}" if judged.version else ""
    yield f"{judged.name}: {verdict}{engine} ({judged.reason})"


def _excerpt(document: Document, finding: Problem, number: int) -> Iterator[str]:
    """Yields the beginning of line `number` of the file, and carets below the key or value.

    Omits the carets if the key or value is outside the shown characters.
    """
    # a slice, because a finding may be on a line after the last
    line = "".join(document.text.split("\n")[number - 1 : number])
    shown = "".join(char if char.isprintable() else " " for char in line[:MOST_COLUMNS])
    yield f"{number:>12} | {shown}"
    if finding.column is not None and finding.column <= len(shown):
        width = min(finding.width, len(shown) + 1 - finding.column)
        yield f"{'':12} | {' ' * (finding.column - 1)}{'^' * max(1, width)}"
