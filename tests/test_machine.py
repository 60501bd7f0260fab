"""What of the machine a process may use: affinity, cgroup limits, memory."""

import os
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from tests.cases import table
from tests.command_line import printed
from trtspec import machine


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    table(__file__),
)
def test_cpu_quotas(tmp_path, monkeypatch, membership, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "membership").write_text(membership + "\n")
    assert machine.cores(tree(tmp_path / "cgroup", files), tmp_path / "membership") == (cores or 8)


def test_without_cgroups_the_affinity_counts(tmp_path):
    assert machine.cores(tmp_path / "none", tmp_path / "nothing") == len(os.sched_getaffinity(0))


@pytest.mark.skipif(not shutil.which("taskset"), reason="no taskset here")
def test_taskset():
    command = [sys.executable, "-c", "from trtspec.machine import cores; print(cores())"]
    first = str(min(os.sched_getaffinity(0)))
    assert printed("taskset", "-c", first, *command) == "1\n"


def test_memory_limits(tmp_path):
    (tmp_path / "membership").write_text("0::/box\n")
    free = psutil.virtual_memory().available
    two, gone = tmp_path / "v2", tmp_path / "gone"
    tree(two, {"box/memory.max": str(3 << 30), "box/memory.current": str(2 << 30),
               "box/memory.stat": f"anon 1\ninactive_file {1 << 30}"})  # fmt: skip
    assert machine.free_memory(two, tmp_path / "membership") == 2 << 30 < free
    tree(two, {"box/memory.max": "max"})
    assert machine.free_memory(two, tmp_path / "membership") == pytest.approx(free, rel=0.5)
    assert machine.free_memory(gone, gone) == pytest.approx(free, rel=0.5)
