"""The gate of a quantized target against its source: the bound against whole distributions, and real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.bench.conftest import free_port
from tests.command_line import trtspec
from trtspec import data_files
from trtspec.bench import measure
from trtspec.bench.distribution import MOST_TOLD, QualityLimits, check_distribution, compare_distributions, kl_bound
from trtspec.bench.transcript import Recording, Token, Transcript

TRTSPEC = [sys.executable, "-m", "trtspec"]
NANO = data_files.kimi_nano_dir()


def told(logits: np.ndarray, top: int = MOST_TOLD) -> dict[str, float]:
    logs = logits - np.log(np.exp(logits).sum())
    return {str(index): float(logs[index]) for index in np.argsort(-logs)[:top]}


def test_the_bound_is_below_the_divergence_and_reaches_it_where_all_is_told() -> None:
    dice = np.random.default_rng(1)
    for scale in (0.01, 0.3, 2.0):
        p, q = (values := dice.normal(0, 3, 500)), values + dice.normal(0, scale, 500)
        logs = [side - np.log(np.exp(side).sum()) for side in (p, q)]
        exact = float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())
        bounds = [kl_bound(told(p, top), told(q, top)) for top in (5, 20, 100, 500)]
        assert all(0 <= low <= exact + 1e-6 for low, _ in bounds)
        assert bounds[-1] == (pytest.approx(exact, rel=1e-3, abs=1e-5), pytest.approx(1.0))
        assert [mass for _, mass in bounds] == sorted(mass for _, mass in bounds)
    assert kl_bound(told(p), told(p))[0] == pytest.approx(0, abs=1e-9)
    assert kl_bound({"a": -0.1}, {"b": -0.1}) == (pytest.approx(0, abs=1e-6), 0.0), "nothing in common says nothing"


def answered(question: str, rows: list[np.ndarray]) -> Transcript:
    tops = [told(row) for row in rows]
    tokens = [Token(max(top, key=lambda name: top[name]), None, None) for top in tops]
    return Transcript(question, "c", [], "".join(t.text for t in tokens), "stop", tokens, tops=tops)


def two(questions: int, noise: float, seed: int = 0) -> tuple[Recording, Recording]:
    """Recordings of a source, and of a target whose logits are so much off."""
    dice = np.random.default_rng(seed)
    source, target = [], []
    for index in range(questions):
        rows = [dice.normal(0, 3, 300) for _ in range(20)]
        source.append(answered(str(index), rows))
        target.append(answered(str(index), [row + dice.normal(0, noise, 300) for row in rows]))
    return Recording("s", {}, 20, source), Recording("t", {}, 20, target)


def test_positions_end_with_the_first_other_token() -> None:
    rows = [np.array([3.0, 0, 0]), np.array([0, 3.0, 0]), np.array([0, 0, 3.0])]
    other = [rows[0], np.array([3.0, 0, 0]), rows[2]]
    found = compare_distributions(
        [answered("a", rows), answered("b", rows)], [answered("a", other), answered("b", rows)]
    )
    assert found and found.positions == 5 and found.agreement == 0.8
    lengths = [replace(answered("a", rows), prompt_tokens=n) for n in (7, 9)]
    assert compare_distributions([lengths[0]] * 2, [lengths[1]] * 2) is None, "another context"


def test_the_gate_decides_only_where_its_interval_does() -> None:
    source, near = two(40, 0.05)
    limits = QualityLimits(max_kl=0.05, min_agreement=0.9)
    passed = check_distribution(near, source, limits)
    assert passed.status == "pass" and passed.seen == 40 and 0 < passed.detail["kl"] < 0.01
    far = check_distribution(two(40, 2.0)[1], source, limits)
    assert far.status == "fail" and far.code == "TS-CHECK-DISTRIBUTION" and far.detail["kl_interval"][0] > 0.05
    kl = passed.detail["kl"]
    assert check_distribution(near, source, replace(limits, max_kl=kl)).status == "skipped", "the interval holds it"
    assert check_distribution(*two(4, 0.05), limits).status == "skipped"
    silent = replace(near, transcripts=[replace(item, tops=None) for item in near.transcripts])
    assert check_distribution(silent, source, limits).status == "skipped"
    assert check_distribution(near, None, limits).status == check_distribution(near, source, None).status == "skipped"


@contextlib.contextmanager
def served(target: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen([*TRTSPEC, "serve", target, "--backend", "reference", "--port", url.rpartition(":")[2]])
    try:
        asyncio.run(measure.wait_ready(url, 300))
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def spoiled(directory: Path, source: Path) -> Path:
    """A copy whose activation scales are 1/4096 in place of 1: about 16 times smaller than calibrated ones (0.004)."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, directory)
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        scales = [name for name in tensors if name.endswith("input_scale")]
        save_file(tensors | {name: tensors[name] / 4096 for name in scales}, file, metadata={"format": "pt"})
    return directory


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kimi_nano_in_nvfp4_against_its_source(tmp_path: Path) -> None:
    """The same command passes an honest conversion and fails one with input scales 16 times too small."""
    command = [*TRTSPEC, "quantize", NANO, "-o", tmp_path / "nvfp4", "--policy", "k2.5", "--input-scales", "one"]
    subprocess.run(command, check=True)
    wrong, kept = spoiled(tmp_path / "wrong", tmp_path / "nvfp4"), tmp_path / "source.json"
    short = ("--contexts", 0, "--max-tokens", 16)
    with served(NANO) as source:
        done = trtspec("check", source, "--record", kept, "--quality-gate", "--samples", 10, *short)
        assert done.status == 0, done.stderr
    found = {}
    for target in (tmp_path / "nvfp4", wrong):
        with served(target) as url:
            done = trtspec("check", url, "--against", kept, "--quality-gate", "--json")
        rows = json.loads(done.stdout)["results"]
        row = next(row for row in rows if row["name"] == "distribution")
        print(
            target.name, done.status, row["message"], *(r["message"] for r in rows if r["status"] == "fail"), sep="\n"
        )
        found[target.name] = (done.status, row["status"])
    assert found["nvfp4"][1] == "pass" and found["wrong"] == (3, "fail")
