"""Whole proofs with real processes: the stand-in engine as three releases, the reference backend, vLLM where it is
installed; killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

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
RELEASES = ROOT / "tests" / "trtllm" / "standin_releases"
SECRETS = {"HF_TOKEN": "hf_notarealtoken1234", "OPENAI_API_KEY": "sk-notarealkey5678", "USER": "marguerite",
           "MY_DB_PASSWORD": "correct-horse-9", "HOSTNAME": "b200-rack7-node3"}  # fmt: skip
HEAD = DATA / "kimi-nano-eagle3"
SMALL = ("--samples", "4", "--max-tokens", "24", "--concurrency", "1,2", "--contexts", "64,128")
STEPS = {"doctor", "inspect-target", "inspect-head", "record", "bench-plain", "check", "bench-sampled", "bench-cold",
         "bench-warm", "bench-long-64", "bench-long-128", "serve-plain"}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    room = tmp_path_factory.mktemp("home-of-marguerite")
    target = make_target(room / "Kimi-K2.5")
    return target, make_head(room / "head", target, attention="mla")


@pytest.fixture(scope="module")
def older_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What releases before 1.3.0rc7 load: Kimi-K2 with a head of full attention."""
    room = tmp_path_factory.mktemp("older-home-of-marguerite")
    target = make_target(room / "Kimi-K2", nested=False)
    return target, make_head(room / "head", target, attention="mha")


def engine(directory: Path, release: str, **more: str) -> dict[str, str]:
    """An environment in which the stand-in plays this release, with a package of the same one."""
    place = directory / "bin"
    place.mkdir(exist_ok=True)
    script = place / "trtllm-serve"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STANDIN}" "$@"\n')
    script.chmod(0o755)
    return {
        **os.environ, **SECRETS, "PATH": f"{place}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{RELEASES}", "STANDIN_VERSION": release, "STANDIN_BACKEND": "light",
        "STANDIN_LOAD": "0", "HF_HUB_OFFLINE": "1", **more,
    }  # fmt: skip


def proved(pair: tuple[Path, Path], out: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtspec", "prove", str(pair[0]), "--head", str(pair[1]), "-o", str(out)]
    return subprocess.run(
        [*command, *SMALL, "--json", *words], capture_output=True, text=True, env=env, cwd=out.parent, timeout=1700
    )


def bundle_of(out: Path) -> dict[str, str]:
    with tarfile.open(out / "proof.tar.gz") as archive:
        return {m.name.partition("/")[2]: archive.extractfile(m).read().decode() for m in archive}  # type: ignore[union-attr]


def assert_nothing_private(files: dict[str, str], pair: tuple[Path, Path], out: Path) -> None:
    import socket

    private = [*SECRETS.values(), str(pair[0]), str(out), str(Path.home()), "127.0.0.1"]
    private += [socket.gethostname()] if len(socket.gethostname()) > 2 else []
    for name, text in files.items():
        for word in private:
            assert word in ("/", "/root") or word.lower() not in text.lower(), (name, word)
        assert "/home/" not in text and "/tmp/" not in text, name


def assert_whole(done: subprocess.CompletedProcess[str], out: Path, steps: set[str]) -> dict[str, Any]:
    assert done.returncode in (0, 3), done.stderr[-3000:]
    said, files = json.loads(done.stdout), bundle_of(out)
    evidence = json.loads(files["evidence.json"])
    assert {entry["key"] for entry in evidence["journal"]} >= steps, done.stdout
    assert not [r for r in said["results"] if r["name"].startswith("serve-")], said["results"]
    assert files["report.html"].count("<table") >= 5 and set(evidence["speed"]) >= {"plain", "k1"}
    return evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "points"), [("1.2.1", (0, 3, 6, 9)), ("1.3.0rc20", (1, 4, 7)), ("1.4.0rc1", (2, 5, 8))]
)
def test_the_stand_in_as_a_release_killed_at_ten_points_in_all(
    release: str,
    points: tuple[int, ...],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each release is killed in turn with one step more done, and resumed; then the proof is whole and imported."""
    pair = request.getfixturevalue("older_pair" if release == "1.2.1" else "pair")
    env, out = engine(tmp_path, release), tmp_path / "proof"
    words = ("--draft-len", "2", "--gpus", "1", "--", "--max-seq-len", "512")
    kills, seen = killed(pair, out, env, points, *words)
    done = proved(pair, out, env, *words)
    evidence = assert_whole(done, out, STEPS | {"schema", "lint-plain", "lint-head", "bench-k1", "bench-k2"})
    steps = [entry["key"] for entry in evidence["journal"]]
    with capsys.disabled():
        print(f"\n{release}: killed with {kills} steps done, then whole: {len(steps)} steps, each once")
    assert len(kills) == len(points) and len(steps) == len(set(steps))
    assert (out / "journal.jsonl").read_text().startswith(seen) and evidence["engine"] == release
    assert_nothing_private(bundle_of(out), pair, out)
    imported = subprocess.run(
        [sys.executable, "-m", "trtspec", "prove", "--import", str(out / "proof.tar.gz"), "--json"],
        capture_output=True, text=True, env=env, timeout=300,
    )  # fmt: skip
    assert imported.returncode == 0, imported.stderr
    told = json.loads(imported.stdout)
    weights = [finding["weight"] for finding in told["schemas"]]
    assert weights.count("refuted") == 0 and len(weights) > 50
    assert {finding["weight"] for finding in told["gates"]} <= {"supported", "narrowed"}


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
@pytest.mark.parametrize(("reuse", "status"), [("warm", "pass"), ("off", "skipped")])
def test_a_real_head_over_a_reused_prefix(
    reuse: str, status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At temperature 0.6, because so small a model loops when it is greedy, and acceptance on loops is no figure; at 1,
    hardly a draft is accepted."""
    setup = ProveSetup(
        str(kimi_nano_dir()), str(HEAD), "reference", 3, None, 1, "nano", 24, 64, (1,), (64,), ("--prefix-reuse", reuse)
    )
    with served(setup, "k3", tmp_path, 300) as (_, url, _):
        line = warm_line(setup, url, tmp_path, "reference", "bench-k3", "--temperature", "0.6")
    with capsys.disabled():
        print(f"\n--prefix-reuse {reuse}: {line.message}")
    assert line.status == status


def _entries(journal: Path) -> int:
    return journal.read_text().count("\n") if journal.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("backend", ["reference", "vllm"])
def test_a_real_engine(backend: str, tmp_path: Path) -> None:
    """Kimi-nano: the long prompts of a proof need a tokenizer with words."""
    pair = kimi_nano_dir(), HEAD
    env, out = {**os.environ, **SECRETS, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}, tmp_path / "proof"
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
    assert_nothing_private(bundle_of(out), pair, out)
    told = json.loads(trtspec("prove", "--import", out / "proof.tar.gz", "--json").stdout)
    gates = {finding["entry"]: finding["weight"] for finding in told["gates"]}
    borne_out = {"vllm": ("gates.kimi_k25", "gates.kimi_eagle3"), "reference": ()}[backend]
    assert gates == dict.fromkeys(borne_out, "supported")
