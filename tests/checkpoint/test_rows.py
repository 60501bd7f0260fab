"""Columns whose values are none: an error that names the file and the rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.command_line import trtspec
from trtspec.bench.datasets import load_dataset
from trtspec.checkpoint.rows import read_rows
from trtspec.errors import UsageError


@pytest.mark.parametrize("before", [0, 1500])
def test_text_that_is_not_utf8(tmp_path: Path, before: int) -> None:
    texts = pyarrow.array([b"Why?"] * before + [b"caf\xe9"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(texts), texts.buffers())
    path = tmp_path / "latin.parquet"
    parquet.write_table(pyarrow.table({"prompt": column}), path)
    rows = "rows 1025 to 2048" if before else "rows 1 to 1024"
    for read in (lambda: list(read_rows(str(path))), lambda: load_dataset(str(path))):
        with pytest.raises(UsageError, match=f"latin.parquet: one of {rows} holds text that is not UTF-8"):
            read()
    done = trtspec("bench", "http://127.0.0.1:9", "--dataset", path)
    assert done.status == 2 and "write the text as UTF-8" in done.stderr


def test_a_time_that_no_calendar_has(tmp_path: Path) -> None:
    column = pyarrow.array([2**60], pyarrow.timestamp("ms"))
    parquet.write_table(pyarrow.table({"prompt": ["Why?"], "when": column}), path := tmp_path / "late.parquet")
    with pytest.raises(UsageError, match="cannot read .*late.parquet"):
        list(read_rows(str(path)))
