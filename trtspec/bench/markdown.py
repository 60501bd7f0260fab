"""What `bench` measured as Markdown, for a pull request or a model card."""

from __future__ import annotations

from collections.abc import Sequence

from trtspec.bench import tables
from trtspec.bench.results import BenchResults
from trtspec.report import Table


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
        *tables.card_tables(results, others),
        *tables.published_tables(results, others),
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
