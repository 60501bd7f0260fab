"""The one reader of conversations: equal records from every format, each field used or refused."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.json_files import read_lines
from trtspec.checkpoint.conversations import Conversation, conversation, read_conversations
from trtspec.checkpoint.data_rows import hub_rows
from trtspec.errors import UsageError

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = {
    "id": "functions.weather:0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
}
ROWS = Path(__file__).parent / "rows"
# JSON's text, and what Python's splitlines would split on, which JSON allows inside a string
BREAKS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n\ufeff\0"

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def one(tmp_path: Path, row: Any, name: str = "data.jsonl") -> Conversation:
    path = tmp_path / name
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (found,) = read_conversations(path)
    return found


def plain(found: list[Conversation]) -> list[Conversation]:
    return [replace(conversation, file="", line=0) for conversation in found]


@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_format_gives_the_same_records(tmp_path: Path, ascii_only: bool) -> None:
    rows = [line["row"] for line in read_lines(ROWS / "read.jsonl")]
    rows += [{"text": BREAKS}, {"messages": [{**USER, "content": f"a{BREAKS}b"}, ANSWER]}]

    def lines(of: list[Any], end: str = "\n") -> bytes:
        return "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in of).encode()

    files = {
        "plain.jsonl": lines(rows),
        "windows.jsonl": b"\xef\xbb\xbf" + lines(rows, "\r\n"),
        "blank.ndjson": b"\n \n" + lines(rows, "\n\n"),
        "array.json": json.dumps(rows, ensure_ascii=ascii_only, indent=1).encode(),
        "lines.json": lines(rows),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    want = plain(list(read_conversations(tmp_path / "plain.jsonl")))
    assert len(want) == len(rows) and want[-2].text == BREAKS
    for name in files:
        assert plain(list(read_conversations(tmp_path / name))) == want, name


@pytest.mark.parametrize("line", read_lines(ROWS / "read.jsonl"))
def test_pairs_and_namings(tmp_path, capsys, line):
    assert list(one(tmp_path, line["row"]).messages) == line["messages"]
    assert "not read" not in capsys.readouterr().err


def test_tools_stand_beside_or_in_the_metadata(tmp_path):
    for row in (
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"metadata": json.dumps({"tools": [TOOL]})},
    ):
        assert one(tmp_path, {"messages": [USER], **row}).tools == (TOOL,)
    assert one(tmp_path, {"messages": [USER], "metadata": "a remark"}).tools == ()


def test_what_is_not_read_is_named_once_with_counts(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    rows = [
        {"messages": [{**USER, "mood": "good"}], "score": n, "rejected": None, "tags": []}
        for n in range(3)
    ]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "q", "chosen": "a"}])
    )
    assert len(list(read_conversations(path))) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "chosen (1), messages[].mood (3), score (3)" in said


@pytest.mark.parametrize("bad", read_lines(ROWS / "refused.jsonl"), ids=lambda bad: bad["says"])
def test_a_row_that_is_no_conversation_is_named_by_line(tmp_path, bad):
    row = bad["row"]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "fine"}) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(UsageError) as refused:
        list(read_conversations(path))
    assert refused.value.code == "TS-DATA-ROW"
    assert f"{path}:3" in refused.value.message
    assert bad["says"] in refused.value.message


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt"', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "\xff"}\n', "a.jsonl:2 is not UTF-8"),
        ("a.jsonl", '{"prompt": "x"}\n'.encode("utf-16"), "a.jsonl:1 is UTF-16"),
        ("a.jsonl", b'{"prompt": "x", "prompt": "y"}\n', 'duplicate key "prompt"'),
        ("a.jsonl", b'{"prompt": "\\ud800"}\n', "hex escape"),
        ("a.jsonl", b"[" * 100_000, "recursion limit"),
        ("a.jsonl", b"\0\0\n", "a.jsonl:1 is not JSON"),
        ("a.json", b'[{"prompt": "x"},\n\n{"prompt": }]', "a.json is not JSON: .*line 3"),
        ("a.json", b'[{"prompt": "x"}\n{"prompt": "y"}]', "expected `,` or `]` at line 2"),
        ("a.json", b'[{"prompt": "x"}] x', "trailing characters at line 1"),
        ("a.json", b'[{"prompt": "x"}', "EOF while parsing a list at line 1"),
        ("a.json", b"[" * 100_000, "recursion limit"),
        ("a.csv", b"prompt\nx\n", "unknown type"),
        ("a.parquet", b"PAR1", "unknown type"),
    ],
)
def test_a_damaged_file_is_named_by_line(tmp_path, name, data, says):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UsageError, match=says):
        list(read_conversations(path))


def test_what_is_no_file(tmp_path):
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(UsageError):
            list(read_conversations(path))


def test_empty_files_hold_nothing(tmp_path):
    for name, data in (
        ("a.jsonl", b""),
        ("b.jsonl", b"\xef\xbb\xbf"),
        ("c.json", b" []\n"),
        ("d.jsonl", b"\n \n"),
    ):
        (tmp_path / name).write_bytes(data)
        assert list(read_conversations(tmp_path / name)) == []


def test_a_line_of_50_megabytes(tmp_path):
    assert len(one(tmp_path, {"text": "x" * 50_000_000}).text) == 50_000_000


def test_a_file_is_read_a_line_at_a_time(tmp_path):
    """The first row comes before the last one is looked at."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n' * 100_000 + b"{broken\n")
    rows = read_conversations(path)
    assert next(rows).line == 1
    rows.close()


def test_columns_that_a_row_lacks_are_not_nulls_of_it(tmp_path):
    """Columns that a row lacks are not null: `parameters: null` would reach the prompt.

    A file in columns gives each struct the keys of all, and the template prints them.
    """
    bare = {"type": "function", "function": {"name": "now"}}
    full = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object"}},
        "strict": True,
    }
    rows = [{"messages": [USER], "tools": [full]}, {"messages": [USER, ANSWER], "tools": [bare]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    found = [conversation(row, Counter()) for row in hub_rows(str(tmp_path), None)]
    assert [item.tools for item in found] == [(full,), (bare,)]
