"""What continuous integration reads of a run that went wrong: its summary, its JUnit file, and an output that is free
for the next run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import yaml

from tests.bench.conftest import free_port
from tests.command_line import trtspec

ROOT = Path(__file__).resolve().parents[2]


def failures(junit: Path) -> dict[str, str]:
    """Code by message of every failed case."""
    found = ElementTree.parse(junit).iter("failure")
    return {failure.get("message", ""): failure.get("type", "") for failure in found}


def test_a_server_that_is_not_there_is_a_failed_case_and_no_obstacle(
    stand_in: Callable[..., str], dataset: Path, tmp_path: Path
) -> None:
    """One case with the reason; then the same command against a server that is there, without --force."""
    out, junit, url = tmp_path / "out", tmp_path / "results.xml", f"http://127.0.0.1:{free_port()}"
    words = ("--dataset", dataset, "--samples", 2, "--concurrency", 1, "--max-tokens", 8, "-o", out, "--junit", junit)
    dead = trtspec("bench", url, *words)
    assert dead.status == 1 and "nothing accepts connections" in dead.stderr
    (reason,) = failures(junit)
    assert url in reason and "nothing accepts connections" in reason and failures(junit)[reason] == "TS-ERROR-FAILED"
    assert ElementTree.parse(junit).getroot().get("failures") == "1"
    assert not list(out.glob("*")), "a journal without answers is nothing to continue"
    alive = trtspec("bench", stand_in(), *words)
    assert alive.status == 0, alive.stderr
    assert not failures(junit) and (out / "raw.jsonl").is_file()
    again = trtspec("bench", stand_in(), *words)
    assert again.status == 2 and "already exists" in again.stderr, "what was measured is not overwritten"
    own = tmp_path / "own.xml"
    own.write_text("<testsuite><testcase name='measurement' classname='mine'/></testsuite>")
    refused = trtspec("bench", url, "--junit", own)
    assert refused.status == 2 and "own.xml already exists" in refused.stderr


def test_the_ci_step_bench_fails_with_its_summary(stand_in: Callable[..., str], tmp_path: Path) -> None:
    """The step as configs/ci/endpoint.yml has it, on a server that fails every third request: its status is that of
    bench, and the tables are in the job's summary all the same. The check behind it is not skipped."""
    job = yaml.safe_load((ROOT / "configs/ci/endpoint.yml").read_text())["jobs"]["endpoint"]
    steps = {step.get("name"): step for step in job["steps"]}
    shim, summary = tmp_path / "bin" / "trtspec", tmp_path / "summary.md"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m trtspec "$@"\n')
    shim.chmod(0o755)
    env = {**os.environ, **job["env"], "PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"ENDPOINT": stand_in(fail_every=3), "GITHUB_STEP_SUMMARY": str(summary)}
    done = subprocess.run(
        ["bash", "-ec", steps["bench"]["run"]], cwd=tmp_path, env=env, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "TS-BENCH-ERRORS" in summary.read_text() and "## Speed" in summary.read_text()
    assert "TS-BENCH-ERRORS" in failures(tmp_path / "results.xml").values()
    assert steps["check"]["if"] == "${{ !cancelled() }}", "it judges the server whatever bench found"
