"""Predictions beside measurements: the document is up to date, and says what the models give."""

import re
import sys

from tests.command_line import ROOT, printed

DOCS = ROOT / "docs" / "reference"


def test_the_tables_of_the_document_are_up_to_date() -> None:
    printed(sys.executable, ROOT / "tools" / "plan_checks.py", "--check")


def errors(section: str) -> list[float]:
    """The first error of each row of the table below a heading, as a share."""
    text = (DOCS / "plan-checks.md").read_text()
    table = text.partition(f"## {section}")[2].partition("##")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "%" in line]
    return [float(re.findall(r"([+-][\d.]+) %", row)[0]) / 100 for row in rows]


def test_what_the_document_promises_about_the_errors() -> None:
    assert (
        len(errors("Checkpoint sizes")) == 4 and max(map(abs, errors("Checkpoint sizes"))) < 0.005
    )
    assert max(map(abs, errors("Cache capacity"))) < 0.05
    announced = errors("EAGLE 3.1 of Kimi-K2.6")
    assert len(announced) == 3 and max(map(abs, announced)) < 0.07
    held_out = errors("EAGLE 3.1 of Kimi-K2.7")
    assert len(held_out) == 10 and max(map(abs, held_out)) < 0.18
    assert len(errors("Kimi-K2.5 INT4, tensor parallel 8")) == 15
    assert len(errors("Kimi-K2.5-NVFP4 with lightseek")) == 10  # shown, and nothing promised


def test_plain_decode_is_within_ten_percent_of_aiconfigurator() -> None:
    """Steps agree for aiconfigurator's own targets, GPUs, layouts, contexts and concurrencies.

    Compared is wherever both have tables.
    """
    text = (DOCS / "plan-checks.md").read_text()
    table = text.partition("## Plain decode steps of aiconfigurator")[2].partition("##")[0]
    differences = [float(value) for value in re.findall(r"([+-][\d.]+) %[;|]? ", table)]
    assert len(differences) > 90 and max(map(abs, differences)) < 10
