"""One printer: a result says itself in JSON, tables and one line."""

import pytest

from trtspec.errors import CheckFailed, Problem
from trtspec.report import Result, Table, print_result

WIDE = Table(
    "Loads",
    ("concurrency", *(f"figure number {n}" for n in range(12))),
    [(str(level), *(f"{level * n:,.3f}" for n in range(12))) for level in (1, 16, 4096)],
    note="per second",
)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_table_that_is_wider_than_the_terminal_loses_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    print_result(Result({}, tables=[WIDE]), as_json=False)
    printed = capsys.readouterr().out
    assert all(cell in printed for row in WIDE.rows for cell in row)


def test_a_result_is_one_envelope_one_line_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem("TS-X-Y", "error", "there", "it is <wrong>", "mend it")
    found = Result({"figure": 1}, [problem], [WIDE], ["the end"], CheckFailed("wrong"))
    assert (found.ok, found["figure"]) == (False, 1) and len(repr(found)) < 100
    assert list(found.to_dict()) == ["ok", "problems", "figure", "error"]
    with pytest.raises(CheckFailed):
        print_result(found, as_json=False)
    printed = capsys.readouterr().out
    assert (
        "the end\nerror   TS-X-Y there: it is <wrong>\n        -> mend it\n" in printed
        and "4,096.000" in printed
    )


def test_a_file_on_stdout_has_its_problems_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(
        Result({}, [Problem("TS-X-Y", "warning", "there", "odd")], text="a: 1\n"), as_json=False
    )
    out, err = capsys.readouterr()
    assert (out, err) == ("a: 1\n", "warning TS-X-Y there: odd\n")
