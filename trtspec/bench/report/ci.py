"""Results for other programs: JUnit XML, as continuous integration reads it, annotations of GitHub, and Markdown
for a pull request or a model card.

JUnit as Jenkins and GitLab read it: one test case per row; a failure has the problem's code as its type, a row that
could not be measured is skipped (https://github.com/testmoapp/junitxml).
"""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as xml
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtspec.bench.report import bench, tables
from trtspec.bench.results import BenchResults
from trtspec.errors import Problem, TrtspecError
from trtspec.report import Table, write_stderr

# what XML 1.0 cannot hold at all, even escaped
UNPRINTABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
BENCH = "trtspec bench"
UNMEASURED = "measurement"  # the only case of a suite where nothing could be measured
LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


@dataclass(frozen=True)
class JunitCase:
    """One row: passed, failed with a code, or skipped with a reason."""

    name: str
    status: Literal["pass", "fail", "skipped"]
    message: str
    code: str = ""
    remedy: str = ""


def junit_xml(suite: str, cases: Sequence[JunitCase]) -> str:
    """One test suite as a document."""
    failures = sum(case.status == "fail" for case in cases)
    skipped = sum(case.status == "skipped" for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": str(skipped)}
    root = xml.Element("testsuites", counts)
    found = xml.SubElement(root, "testsuite", {"name": _clean(suite), **counts})
    for case in cases:
        item = xml.SubElement(found, "testcase", {"classname": _clean(suite), "name": _clean(case.name)})
        message = _clean(case.message)
        if case.status == "fail":
            failure = xml.SubElement(item, "failure", {"type": case.code, "message": message})
            failure.text = _clean(case.remedy)
        elif case.status == "skipped":
            xml.SubElement(item, "skipped", {"message": message})
        else:
            xml.SubElement(item, "system-out").text = message
    xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def annotation(level: str, title: str, message: str) -> str:
    """A workflow command of GitHub Actions: `::error title=...::message`."""
    return f"::{level} title={_escaped(title, properties=True)}::{_escaped(message)}"


def bench_xml(results: BenchResults) -> str:
    """Each endpoint that was measured as a test case, and each finding as one: errors fail, the rest passes."""
    measured = [JunitCase(endpoint.name, "pass", "measured") for endpoint in results.all]
    found = [
        JunitCase(f"{p.code} {p.where}", "fail" if p.severity == "error" else "pass", p.message, p.code, p.remedy)
        for p in results.problems
    ]
    return junit_xml(BENCH, measured + found)


def failed_xml(error: TrtspecError, suite: str) -> str:
    """A run that measured nothing, as one failed case that says why."""
    return junit_xml(suite, [JunitCase(UNMEASURED, "fail", error.message, error.code, error.remedy)])


def nothing_measured(path: Path) -> bool:
    """Whether a file is one that `failed_xml` wrote, which a later run may replace."""
    try:
        cases = list(xml.parse(path).iter("testcase"))
    except (OSError, xml.ParseError):
        return False
    return [(case.get("classname"), case.get("name")) for case in cases] == [(BENCH, UNMEASURED)]


def annotate(lines: Iterable[str]) -> None:
    """Annotations go to stderr where GitHub Actions runs the command, and nowhere else."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in lines:
            write_stderr(f"{line}\n")


def problem_annotations(problems: Iterable[Problem]) -> list[str]:
    return [annotation(LEVELS[p.severity], p.code, f"{p.where}: {p.message} -> {p.remedy}") for p in problems]


def _clean(text: str) -> str:
    return UNPRINTABLE.sub("\ufffd", text)


def _escaped(text: str, properties: bool = False) -> str:
    """https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts"""
    found = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return found.replace(":", "%3A").replace(",", "%2C") if properties else found


def markdown(results: BenchResults, others: Sequence[BenchResults] = ()) -> str:
    """The sentence, the findings and the tables of the report."""
    lines = [f"# {bench.sentence(results)}", "", tables.workload_line(results), "", tables.quality_line(results), ""]
    for problem in results.problems:
        lines += [f"- **{problem.severity} {problem.code}** {problem.where}: {problem.message}. {problem.remedy}"]
    lines += [""] if results.problems else []
    for table in [*bench.all_tables(results, others), *tables.published_tables([results, *others])]:
        lines += [f"## {table.title}", "", *markdown_table(table), ""]
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return "\n".join([*lines, f"Measured {results.created}. {versions}.", ""])


def markdown_table(table: Table) -> list[str]:
    """A table of GitHub's Markdown with its note below."""
    marks = [":--" if place in table.text_columns else "--:" for place in range(len(table.columns))]
    rows = [table.columns, marks, *table.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return [*lines, *(["", table.note] if table.note else [])]
