"""Two processes (gloo) train like one: same loss curve, resumable, one writer. Started by torchrun as users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
OPTIONS = ["--seq-len", "96", "--steps", "12", "--batch-size", "5", "--lr", "0.003", "--save-every", "3"]


def command(processes: int, *arguments: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), "-m", "trtspec", *arguments]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(processes: int, *arguments: str) -> None:
    done = subprocess.run(
        command(processes, *arguments), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr


def curve(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "training.jsonl").read_text().splitlines()]


def assert_same_curve(ours: Path, theirs: Path) -> None:
    for one, other in zip(curve(ours), curve(theirs), strict=True):
        assert (one["step"], one.get("tokens")) == (other["step"], other.get("tokens"))
        pair = (one.get("held_out", one), other.get("held_out", other))
        assert pair[0]["loss"] == pytest.approx(pair[1]["loss"], rel=2e-5)
        assert pair[0]["accuracy"] == pytest.approx(pair[1]["accuracy"], abs=0.02)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, target_dir, data):
    output = tmp_path_factory.mktemp("one") / "head"
    run(1, "train", str(target_dir), str(data), "-o", str(output), *OPTIONS, "--acceptance-prompts", "0")
    return output


@pytest.mark.slow
def test_two_processes_have_the_curve_of_one(tmp_path, one_process, target_dir, data):
    output = tmp_path / "head"
    arguments = ["train", str(target_dir), str(data), "-o", str(output), *OPTIONS, "--acceptance-prompts", "2"]
    run(2, *arguments)
    assert_same_curve(output, one_process)
    assert {p.name for p in output.iterdir()} == {p.name for p in one_process.iterdir()}
    assert json.loads((output / "provenance.json").read_text())["training"]["processes"] == 2
    ours, theirs = (load_file(path / "model.safetensors") for path in (output, one_process))
    worst = max(float((ours[n].float() - theirs[n].float()).abs().max()) for n in theirs)
    print(f"largest difference of a weight after 12 steps: {worst:.1e}")
    assert worst < 1e-2
    assert torch.equal(ours["d2t"], theirs["d2t"]) if "d2t" in theirs else True


@pytest.mark.slow
def test_two_processes_killed_go_on(tmp_path, one_process, target_dir, data):
    output = tmp_path / "head"
    arguments = ["train", str(target_dir), str(data), "-o", str(output), *OPTIONS, "--acceptance-prompts", "0"]
    group = subprocess.Popen(command(2, *arguments), cwd=ROOT, env=environment())
    log, deadline = output / "training.jsonl", time.monotonic() + 900
    while group.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.read_bytes().count(b"\n") >= 7:
            break
        time.sleep(0.01)
    launcher = psutil.Process(group.pid)  # its workers lead sessions of their own
    everybody = [*launcher.children(recursive=True), launcher]
    for process in everybody:
        process.kill()
    psutil.wait_procs(everybody, 20)
    group.wait()
    assert (output / ".trtspec").exists()
    run(2, *arguments)
    assert_same_curve(output, one_process)
