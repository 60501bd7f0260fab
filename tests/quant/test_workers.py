"""How many workers a run starts by itself: what affinity, cgroups and memory allow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trtspec.quant import workers
from trtspec.quant.workers import usable_cores, usable_memory


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/pod/box", {"pod/cpu.max": "100000 100000", "pod/box/cpu.max": "max 100000"}, 1),
        ("0::/pod/box", {"pod/cpu.max": "max 100000", "pod/box/cpu.max": "100000 100000"}, 1),
        ("0::/../other", {"cpu.max": "100000 100000"}, 1),  # the path of another namespace
        ("0::/", {"cpu.max": "nonsense"}, None),
    ],
)  # fmt: skip
def test_cpu_quotas(tmp_path, monkeypatch, membership, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "membership").write_text(membership + "\n")
    assert usable_cores(tree(tmp_path / "cgroup", files), tmp_path / "membership") == (cores or 8)


def test_without_cgroups_the_affinity_counts(tmp_path):
    assert usable_cores(tmp_path / "none", tmp_path / "nothing") == len(os.sched_getaffinity(0))


@pytest.mark.skipif(not shutil.which("taskset"), reason="no taskset here")
def test_taskset():
    command = [sys.executable, "-c", "from trtspec.quant.workers import usable_cores; print(usable_cores())"]
    first = str(min(os.sched_getaffinity(0)))
    done = subprocess.run(["taskset", "-c", first, *command], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_memory_limits(tmp_path):
    (tmp_path / "membership").write_text("0::/box\n")
    free = psutil.virtual_memory().available
    two, gone = tmp_path / "v2", tmp_path / "gone"
    tree(two, {"box/memory.max": str(3 << 30), "box/memory.current": str(2 << 30),
               "box/memory.stat": f"anon 1\ninactive_file {1 << 30}"})  # fmt: skip
    assert usable_memory(two, tmp_path / "membership") == 2 << 30 < free
    tree(two, {"box/memory.max": "max"})
    assert usable_memory(two, tmp_path / "membership") == pytest.approx(free, rel=0.5)
    assert usable_memory(gone, gone) == pytest.approx(free, rel=0.5)


def test_a_large_source_gets_what_cores_and_memory_allow(monkeypatch):
    class Plan:
        bytes_in = 1 << 30

    plans = [Plan()] * 64
    monkeypatch.setattr(workers, "usable_cores", lambda: 16)
    monkeypatch.setattr(workers, "usable_memory", lambda: 5 << 30)
    assert workers.worker_count(0, plans) == 5  # type: ignore[arg-type]
    assert workers.worker_count(0, plans[:2]) == 2  # type: ignore[arg-type]
    assert workers.worker_count(0, plans[:1]) == 1  # type: ignore[arg-type]
    assert workers.worker_count(7, plans) == 7  # type: ignore[arg-type]
    monkeypatch.setattr(workers, "usable_memory", lambda: 0)
    assert workers.worker_count(0, plans) == 1  # type: ignore[arg-type]
