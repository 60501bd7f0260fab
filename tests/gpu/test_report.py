"""`make test-gpu` where there is no GPU: refused in one line, and its whole code run on the CPU."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from tests.command_line import ROOT, program, ran
from tests.json_files import read_json
from tools.gpu.checks import homogeneous

CHECKS = ["exactness", "losslessness", "distribution", "host waits", "speed", "memory"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    done = ran(sys.executable, "-m", "tools.gpu", cwd=tmp_path, env=environment(), timeout=900)
    assert done.status == 4 and not done.stdout
    assert done.stderr.startswith("test-gpu: no GPU: torch ") and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_ci_job_runs_as_it_is_written_on_a_cpu(tmp_path: Path) -> None:
    """`test-gpu` of configs/ci/gpu.yml runs all of `make test-gpu` in small and in bfloat16."""
    job = yaml.safe_load((ROOT / "configs/ci/gpu.yml").read_text())["jobs"]["gpu"]
    step = next(step for step in job["steps"] if step.get("name") == "test-gpu")
    shim = program(tmp_path / "bin" / "python", f'exec {sys.executable} "$@"')
    more = {
        "DEVICE": "cpu",
        "ARGS": "--tiny --dtype bfloat16",
        "PATH": f"{shim.parent}:{os.environ['PATH']}",
    }
    done = ran("bash", "-ec", step["run"], cwd=tmp_path, env=environment(**job["env"] | more))
    print(done.stdout, done.stderr)
    kept = job["steps"][-1]["with"]["path"].split()
    assert all((tmp_path / path).exists() for path in kept)
    report = read_json(tmp_path / "gpu-report.json")
    assert (
        report["machine"]["torch"] == torch.__version__ and report["machine"]["dtype"] == "bfloat16"
    )
    assert list(dict.fromkeys(row["check"] for row in report["rows"])) == CHECKS
    assert [row for row in report["rows"] if row["verdict"] == "FAILED"] == []
    assert report["ok"] and done.status == 0


@pytest.mark.slow
def test_the_test_of_distributions_tells_them_apart() -> None:
    even = Counter({token: 300 for token in range(10)})
    skewed = Counter({token: 300 + (60 if token % 2 else -60) for token in range(10)})
    assert homogeneous(even, even) == pytest.approx(1.0)
    found = homogeneous(even, skewed)
    assert found is not None and found < 1e-4
    assert homogeneous(Counter({7: 3000}), Counter({7: 2995, 8: 5})) is None
