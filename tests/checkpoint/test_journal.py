from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from trtspec.checkpoint.journal import Journal
from trtspec.errors import UsageError

HEADER = {"source": "abc", "options": {"policy": "k2.5"}}


def test_a_second_run_finds_what_the_first_recorded(tmp_path):
    with Journal(tmp_path / "j", HEADER) as journal:
        journal.record("shard-1", sha256="x")
    with Journal(tmp_path / "j", HEADER) as journal:
        assert journal.done == {"shard-1": {"key": "shard-1", "sha256": "x"}}


def test_a_changed_header_is_refused_by_name(tmp_path):
    Journal(tmp_path / "j", HEADER).close()
    with pytest.raises(UsageError, match='source was "abc", now "xyz"') as caught:
        Journal(tmp_path / "j", HEADER | {"source": "xyz"})
    assert "--restart" in caught.value.remedy


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_torn_last_line_is_cut_off(tmp_path, cut):
    path = tmp_path / "j"
    with Journal(path, HEADER) as journal:
        journal.record("one", bytes=1)
        journal.record("two", bytes=2)
    path.write_bytes(path.read_bytes()[:-cut] if cut < 27 else path.read_bytes()[:-26])
    with Journal(path, HEADER) as journal:
        assert list(journal.done) == ["one"]
        journal.record("two", bytes=2)
    with Journal(path, HEADER) as journal:
        assert list(journal.done) == ["one", "two"]


def test_a_header_torn_by_a_kill_starts_afresh(tmp_path):
    (tmp_path / "j").write_bytes(b'{"header": {"sou')
    with Journal(tmp_path / "j", HEADER) as journal:
        assert journal.done == {}


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "j").write_text("hello\n")
    with pytest.raises(UsageError, match="not a journal"):
        Journal(tmp_path / "j", HEADER)


def test_two_runs_at_once_are_refused(tmp_path):
    with Journal(tmp_path / "j", HEADER), pytest.raises(UsageError, match="another run is writing"):
        Journal(tmp_path / "j", HEADER)


def test_a_killed_process_keeps_every_recorded_line_and_frees_the_lock(tmp_path):
    code = (
        "import sys, pathlib; from trtspec.checkpoint.journal import Journal\n"
        f"j = Journal(pathlib.Path({str(tmp_path / 'j')!r}), {HEADER!r})\n"
        "for i in range(10**6):\n    j.record(str(i)); print(i, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = [process.stdout.readline().strip() for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with Journal(tmp_path / "j", HEADER) as journal:
        assert set(seen) <= set(journal.done)
