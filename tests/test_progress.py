"""The progress bar of long commands fits a terminal of 80 columns, note included."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from trtspec.report import BLOCKS, sparkline

DRAW = """
from trtspec.report import progress_bar, sparkline
with progress_bar("training", 13300, "steps") as bar:
    bar.advance(12345, f"loss 10.02 {sparkline(range(40), 12)}  agree 0.72 0.71 0.70  2500 tok/s  held out 9.35")
"""


def test_bar_and_note_fit_eighty_columns():
    environment = os.environ | {"TRTSPEC_PROGRESS": "1", "COLUMNS": "80", "TERM": "dumb"}
    environment.pop("TRTSPEC_QUIET", None)
    done = subprocess.run([sys.executable, "-c", DRAW], capture_output=True, text=True, env=environment, check=True)
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert all(len(line) <= 80 for line in lines)
    (bar,) = [line for line in lines if line.startswith("training")][-1:]
    assert "12345/13300 steps" in bar
    assert "eta" in bar
    assert any("held out 9.35" in line for line in lines)


@given(st.lists(st.floats(-1e6, 1e6), max_size=60))
def test_a_sparkline_spans_its_values(values):
    text = sparkline(values, 16)
    assert len(text) == min(16, len(values))
    assert set(text) <= set(BLOCKS)
    if len(values) in range(2, 17) and max(values) - min(values) > 1e-6:
        assert text[values.index(max(values))] == BLOCKS[-1]
        assert text[values.index(min(values))] == BLOCKS[0]
