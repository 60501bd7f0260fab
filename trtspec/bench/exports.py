"""What `bench` found for others to read: Markdown for a pull request or a model card, JUnit and annotations for CI."""

from __future__ import annotations

import os
from collections.abc import Sequence
from xml.etree import ElementTree

from trtspec.bench import card_tables, tables
from trtspec.bench.results import BenchResults
from trtspec.errors import Problem
from trtspec.report import Table, write_stderr

CONTROL = {place: None for place in range(32) if chr(place) not in "\t\n\r"}  # XML 1.0 has none of them


def markdown(results: BenchResults, others: Sequence[BenchResults] = ()) -> str:
    """The tables of the report and its findings."""
    lines = [
        f"# {results.name}: {results.server.model} on {results.server.kind}",
        "",
        tables.workload_line(results),
        "",
    ]
    lines += [tables.quality_line(results), ""]
    for problem in results.problems:
        lines += [f"- **{problem.severity} {problem.code}** {problem.where}: {problem.message}. {problem.remedy}"]
    lines += [""] if results.problems else []
    for table in [
        *tables.all_tables(results),
        *card_tables.of_run(results, others),
        *card_tables.published(results, others),
    ]:
        lines += [f"## {table.title}", "", *markdown_table(table), ""]
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return "\n".join([*lines, f"Measured {results.created}. {versions}.", ""])


def markdown_table(table: Table) -> list[str]:
    """A table of GitHub's Markdown with its note below."""
    marks = [":--" if place in table.text_columns else "--:" for place in range(len(table.columns))]
    rows = [table.columns, marks, *table.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return [*lines, *(["", table.note] if table.note else [])]


def junit(results: BenchResults) -> str:
    """One test case for the measurement of each endpoint and one per finding; errors are failures."""
    suite = ElementTree.Element("testsuite", name="trtspec bench", timestamp=results.created)
    failures = 0
    for endpoint in results.all:
        found = [problem for problem in results.problems if problem.where == endpoint.name]
        _case(suite, endpoint.name, "measured", [p for p in found if p.severity == "error"])
    for problem in results.problems:
        if problem.where not in {endpoint.name for endpoint in results.all} or problem.severity != "error":
            _case(suite, problem.where, problem.code, [problem] if problem.severity == "error" else [])
    failures = len(suite.findall("testcase/failure"))
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("failures", str(failures))
    suite.set("errors", "0")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, place: str, name: str, failed: Sequence[Problem]) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=f"bench.{place}".translate(CONTROL), name=name)
    if failed:
        text = "\n".join(f"{problem.code} {problem.message}\n{problem.remedy}" for problem in failed)
        short = ", ".join(problem.code for problem in failed)
        ElementTree.SubElement(case, "failure", message=short).text = text.translate(CONTROL)


def annotate(problems: Sequence[Problem]) -> None:
    """Where GitHub Actions runs the command, its findings stand beside the job."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    for problem in problems:
        level = {"error": "error", "warning": "warning", "info": "notice"}[problem.severity]
        text = f"{problem.where}: {problem.message}. {problem.remedy}"
        for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
            text = text.replace(sign, code)
        write_stderr(f"::{level} title={problem.code}::{text}\n")
