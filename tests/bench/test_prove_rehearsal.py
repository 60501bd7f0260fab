"""Whole proofs with real processes: the stand-in engine, killed and resumed, the reference backend, vLLM where it is
installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.bench.test_prove import warm_line
from tests.command_line import trtspec
from tests.oracles.vllm_environment import IN_VLLM, vllm_environment
from tests.tiny import make_head, make_target
from trtspec.bench.prove import ProveSetup
from trtspec.cli.prove_run import served
from trtspec.data_files import DATA, kimi_nano_dir

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "tests" / "trtllm" / "standin" / "trtllm-serve"
ENGINE, RELEASE = ROOT / "tests" / "trtllm" / "standin_engine", "1.4.0rc1"
HEAD = DATA / "kimi-nano-eagle3"
SMALL = ("--samples", "4", "--max-tokens", "24", "--concurrency", "1,2", "--contexts", "64,128")
STEPS = {"doctor", "inspect-target", "inspect-head", "record", "bench-plain", "check", "bench-sampled", "bench-cold",
         "bench-warm", "bench-long-64", "bench-long-128", "serve-plain"}  # fmt: skip


def engine(directory: Path) -> dict[str, str]:
    """An environment in which the stand-in plays a release, with a package of the same one."""
    place = directory / "bin"
    place.mkdir()
    script = place / "trtllm-serve"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STANDIN}" "$@"\n')
    script.chmod(0o755)
    return {
        **os.environ, "PATH": f"{place}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}{os.pathsep}{ENGINE}",
        "STANDIN_VERSION": RELEASE, "STANDIN_BACKEND": "light", "STANDIN_LOAD": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def proved(pair: tuple[Path, Path], out: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtspec", "prove", str(pair[0]), "--head", str(pair[1]), "-o", str(out)]
    return subprocess.run(
        [*command, *SMALL, "--json", *words], capture_output=True, text=True, env=env, cwd=out.parent, timeout=1700
    )


def assert_whole(done: subprocess.CompletedProcess[str], out: Path, steps: set[str]) -> list[str]:
    """The keys of the journal."""
    assert done.returncode in (0, 3), done.stderr[-3000:]
    said, journal = json.loads(done.stdout), (out / "journal.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in journal[1:]]
    assert set(keys) >= steps and len(keys) == len(set(keys)), done.stdout
    assert not [r for r in said["results"] if r["name"].startswith("serve-")], said["results"]
    assert json.loads((out / "verdict.json").read_text())["results"] == said["results"]
    page = (out / "report.html").read_text()
    assert page.count("<table") >= 5 and "2 drafts" in page
    return keys


@pytest.mark.slow
def test_the_stand_in_killed_at_ten_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The proof is killed in turn with one step more done, and resumed; then it is whole."""
    target = make_target(tmp_path / "Kimi-K2.5")
    pair = target, make_head(tmp_path / "head", target, attention="mla")
    env, out = engine(tmp_path), tmp_path / "proof"
    words = ("--draft-len", "2", "--gpus", "1", "--", "--max-seq-len", "512")
    kills, seen = killed(pair, out, env, tuple(range(10)), *words)
    steps = assert_whole(
        proved(pair, out, env, *words), out, STEPS | {"lint-plain", "lint-head", "bench-k1", "bench-k2"}
    )
    with capsys.disabled():
        print(f"\nkilled with {kills} steps done, then whole: {len(steps)} steps, each once")
    assert len(kills) == 10 and (out / "journal.jsonl").read_text().startswith(seen)
    assert f"trtllm {RELEASE} on" in (out / "report.html").read_text()


def killed(
    pair: tuple[Path, Path], out: Path, env: dict[str, str], points: tuple[int, ...], *words: str
) -> tuple[list[int], str]:
    """Steps done at each kill, and the journal after the last. The kill comes when the journal has an entry more than a
    point says, and a while later the next step is under way."""
    command = [sys.executable, "-m", "trtspec", "prove", str(pair[0]), "--head", str(pair[1]), "-o", str(out), *SMALL]
    journal, kills, seen = out / "journal.jsonl", [], ""
    for entries in points:
        process = subprocess.Popen(
            [*command, *words], env=env, cwd=out.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and _entries(journal) < entries + 2:
            time.sleep(0.02)
        time.sleep(0.3 * (entries % 4))
        assert process.poll() is None, "it ended before it could be killed"
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=90)
        assert not alive, "what it started outlives it"
        text = journal.read_text()
        assert text.startswith(seen), "what was done was done again"
        seen = text[: text.rfind("\n") + 1]
        kills.append(_entries(journal))
    return kills, seen


@pytest.mark.slow
@pytest.mark.parametrize(("reuse", "status"), [("256", "pass"), ("0", "skipped")])
def test_a_real_head_over_a_reused_prefix(
    reuse: str, status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At temperature 0.6, because so small a model loops when it is greedy, and acceptance on loops is no figure; at 1,
    hardly a draft is accepted."""
    setup = ProveSetup(
        str(kimi_nano_dir()),
        str(HEAD),
        "reference",
        3,
        None,
        1,
        "nano",
        24,
        64,
        (1,),
        (64,),
        ("--prefix-cache-mib", reuse),
    )
    with served(setup, "k3", tmp_path, 300) as (_, url, _):
        line = warm_line(setup, url, tmp_path, "bench-k3", "--temperature", "0.6")
    with capsys.disabled():
        print(f"\n--prefix-cache-mib {reuse}: {line.message}")
    assert line.status == status


def _entries(journal: Path) -> int:
    return journal.read_text().count("\n") if journal.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("backend", ["reference", "vllm"])
def test_a_real_engine(backend: str, tmp_path: Path) -> None:
    """Kimi-nano: the long prompts of a proof need a tokenizer with words."""
    pair = kimi_nano_dir(), HEAD
    env, out = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}, tmp_path / "proof"
    passed: tuple[str, ...] = ()
    if backend == "vllm":
        python = os.environ.get("TRTSPEC_VLLM_PYTHON")
        if not python:
            pytest.skip("TRTSPEC_VLLM_PYTHON does not name an interpreter with vLLM")
        env = vllm_environment(Path(python), tmp_path / "plugin", env)
        pair = pair[0], tmp_path / "head"
        assert trtspec("convert", HEAD, "-o", pair[1], "--to", "vllm", "--target", pair[0]).status == 0
        passed = ("--", "--dtype", "float32", "--max-seq-len", "2048", "--max-batch-size", "8", *IN_VLLM)
    done = proved(pair, out, env, "--backend", backend, "--draft-len", "2", "--gpus", "1", *passed)
    assert_whole(done, out, STEPS | {"bench-k1", "bench-k2"})
