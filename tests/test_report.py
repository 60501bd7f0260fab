"""One printer: tables and lines fit the terminal, a result says itself in JSON, HTML and one line."""

from __future__ import annotations

import shlex

import pytest

from trtspec.errors import CheckFailed, Problem
from trtspec.report import Result, Table, fitting_lines, print_result

WIDE = Table(
    "Loads", ("concurrency", *(f"figure number {n}" for n in range(12))),
    [(str(level), *(f"{level * n:,.3f}" for n in range(12))) for level in (1, 16, 4096)], note="per second",
)  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_wide_table_becomes_several_that_lose_nothing(width: int) -> None:
    parts = WIDE.fitting(width)
    assert all(sum(size + 3 for size in part.widths()) + 1 <= width for part in parts)
    assert all(part.columns[0] == "concurrency" for part in parts)
    assert [name for part in parts for name in part.columns[1:]] == list(WIDE.columns[1:])
    assert [cell for part in parts for cell in part.rows[2][1:]] == list(WIDE.rows[2][1:])
    assert (parts[0].title, parts[-1].note) == ("Loads", "per second")


def test_lines_fit_and_commands_can_be_copied() -> None:
    command = (
        "  trtspec build-config nvidia/Kimi-K2.6-NVFP4 --head 'a directory/with blanks' --isl 1024 --concurrency 64"
    )
    parts = fitting_lines(command, 60)
    assert all(len(part) <= 60 for part in parts) and all(part.endswith(" \\") for part in parts[:-1])
    assert shlex.split("\n".join(parts).replace("\\\n", " ")) == shlex.split(command)
    prose = fitting_lines("a sentence " * 20, 40)
    assert all(len(part) <= 40 for part in prose) and " ".join(" ".join(prose).split()) == ("a sentence " * 20).strip()
    assert fitting_lines(command, 0) == [command]


def test_a_result_is_one_envelope_one_line_and_a_table_for_notebooks(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem("TS-X-Y", "error", "there", "it is <wrong>", "mend it")
    found = Result({"figure": 1}, [problem], [WIDE], ["the end"], CheckFailed("wrong"))
    assert (found.ok, found["figure"]) == (False, 1) and len(repr(found)) < 100
    assert list(found.to_dict()) == ["ok", "problems", "figure", "error"]
    page = found._repr_html_()
    assert "<th>concurrency</th>" in page and "it is &lt;wrong&gt;" in page
    with pytest.raises(CheckFailed):
        print_result(found, as_json=False)
    printed = capsys.readouterr().out
    assert "the end\nerror   TS-X-Y there: it is <wrong>\n        -> mend it\n" in printed and "4,096.000" in printed


def test_a_file_on_stdout_has_its_problems_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(Result({}, [Problem("TS-X-Y", "warning", "there", "odd")], text="a: 1\n"), as_json=False)
    out, err = capsys.readouterr()
    assert (out, err) == ("a: 1\n", "warning TS-X-Y there: odd\n")
