"""Bundles against the gates of both engines: what a server that answered shows of its release; patches apply."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import trtspec
from trtspec.bench.prove_bundle import write_bundle
from trtspec.bench.prove_redaction import Redactor

ROOT = Path(__file__).parents[2]
TARGET = {"kind": "target", "model_type": "kimi_k25", "format": "nvfp4", "problems": []}
HEAD = {"kind": "head", "attention": "mla", "dialect": "modelopt", "eagle": "3", "problems": []}
NOT_STARTED = [{"name": "serve-plain", "status": "fail", "message": "ended with status 1"}]


def proof(
    path: Path,
    backend: str,
    engine: str | None,
    *words: str,
    started: bool = True,
    gpus: int = 4,
    accepts: float = 2.0,
    **more: Any,
) -> Path:
    """A bundle of a Kimi-K2.5 in NVFP4 with an MLA head."""
    benches = {"bench-plain": {"acceptance_length": None}, "bench-k1": {"acceptance_length": accepts}}
    evidence: dict[str, Any] = {
        "backend": backend, "engine": engine, "gpus": [{"name": "NVIDIA B200"}] * gpus, "memory": {},
        "speed": {"plain": {}, "k1": {}} if started else {}, "setup": {"serve_words": list(words), "concurrency": [1]},
        "outputs": {"inspect-target": TARGET, "inspect-head": HEAD, **(benches if started else {}), **more},
    }  # fmt: skip
    verdict = {"ok": started, "results": [] if started else NOT_STARTED}
    write_bundle(path, {"evidence.json": json.dumps(evidence), "verdict.json": json.dumps(verdict)}, Redactor({}))
    return path


def imported(*bundles: Path) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Findings by entry, and the lines that the patch adds; it applies to this repository."""
    words = [word for path in bundles for word in ("--import", path)]
    done = trtspec("prove", *words, "--json")
    assert done.status == 0, done.stderr
    told = json.loads(done.stdout)
    if told["patch"]:
        checked = subprocess.run(
            ["git", "apply", "--check"], input=told["patch"], text=True, cwd=ROOT, capture_output=True
        )
        assert checked.returncode == 0, checked.stderr
    added = [row[1:] for row in told["patch"].splitlines() if row.startswith("+") and not row.startswith("+++")]
    return {found["entry"]: (found["weight"], found["message"]) for found in told["gates"]}, added


def test_a_release_that_served_bears_out_refutes_or_moves_its_gates(tmp_path: Path) -> None:
    new = proof(tmp_path / "new.tar.gz", "trtllm", "1.3.0rc20")
    found, added = imported(new)
    assert {entry: weight for entry, (weight, _) in found.items()} == dict.fromkeys(
        ("gates.kimi_k25", "gates.kimi_nvfp4", "gates.mla_head", "gates.head_layers_prefix"), "supported"
    )
    assert added == []
    found, added = imported(proof(tmp_path / "between.tar.gz", "trtllm", "1.3.0rc6"), new)
    assert found["gates.kimi_k25"][0] == found["gates.mla_head"][0] == "narrowed"
    assert added == ["    by: 1.3.0rc6"] * 3 and found["gates.kimi_nvfp4"][0] == "supported"
    found, added = imported(proof(tmp_path / "old.tar.gz", "trtllm", "1.3.0rc5"))
    assert found["gates.kimi_k25"][0] == "refuted" and "after 1.3.0rc5, by 1.3.0rc7" in found["gates.kimi_k25"][1]
    assert added == ["    by: 1.3.0rc5"] * 2, "of the head's gates alone"


def test_a_server_that_did_not_start_is_doubted_and_changes_nothing(tmp_path: Path) -> None:
    found, added = imported(proof(tmp_path / "failed.tar.gz", "trtllm", "1.3.0rc20", started=False))
    assert found["gates.kimi_k25"][0] == found["gates.kimi_nvfp4"][0] == "doubted" and added == []
    assert "gates.mla_head" not in found, "the plain server failed, and no server with the head was tried"
    inside = proof(tmp_path / "inside.tar.gz", "trtllm", "1.3.0rc6", started=False)
    assert "gates.kimi_k25" not in imported(inside)[0]


def test_a_launch_that_failed_verifies_nothing(tmp_path: Path) -> None:
    """Our own refusal of an old release ends its launch, and so does memory: that would be a circle."""
    old = proof(tmp_path / "old.tar.gz", "trtllm", "1.3.0rc5", started=False)
    found, added = imported(old, proof(tmp_path / "new.tar.gz", "trtllm", "1.3.0rc20"))
    assert found["gates.kimi_k25"][0] == "supported" and "1.3.0rc5" not in found["gates.kimi_k25"][1] and not added


def test_a_head_whose_drafts_are_not_accepted_did_not_load(tmp_path: Path) -> None:
    """An engine that skips tensors that it does not know serves, too; and loops say nothing of drafts."""
    idle = proof(tmp_path / "idle.tar.gz", "trtllm", "1.3.0rc5", accepts=1.0)
    assert not {entry for entry in imported(idle)[0] if "head" in entry}
    loops = {"acceptance_length": 3.0, "degeneration": {"degenerate": True}}
    bench = {"bench-k1": loops, "bench-plain": loops}
    looping = proof(tmp_path / "loops.tar.gz", "vllm", "0.32.0", **bench)
    found, added = imported(looping)
    assert set(found) == {"gates.kimi_k25"} and added == []


@pytest.mark.parametrize("engine", ["1.3.0rc6.dev20260101", "1.3.0.dev0"])
def test_a_build_between_releases_is_no_end_of_an_interval(engine: str, tmp_path: Path) -> None:
    assert imported(proof(tmp_path / "a.tar.gz", "trtllm", engine)) == ({}, [])


def test_forms_that_were_kept_to_show_guided_decoding(tmp_path: Path) -> None:
    check = {"results": [{"name": "structured-output", "status": "pass", "message": "8 of 8"}]}
    found, added = imported(proof(tmp_path / "a.tar.gz", "trtllm", "1.3.0rc20", check=check))
    assert found["gates.kimi_k25_guided"][0] == "narrowed" and added == ["    by: 1.3.0rc20"]
    check["results"][0]["status"] = "skipped"
    assert "gates.kimi_k25_guided" not in imported(proof(tmp_path / "b.tar.gz", "trtllm", "1.3.0rc20", check=check))[0]


def test_of_vllm_gates_formats_and_kinds_of_options_are_weighed(tmp_path: Path) -> None:
    words = ("--trust-remote-code", "--", "--calculate-kv-scales")
    found, added = imported(proof(tmp_path / "a.tar.gz", "vllm", "0.27.1", *words))
    assert {entry: weight for entry, (weight, _) in found.items()} == {
        "formats.nvfp4": "verified", "options.calculate-kv-scales": "verified",
        "gates.kimi_k25": "supported", "gates.kimi_eagle3": "supported",
    }  # fmt: skip
    assert len(added) == 2 and all("evidence: verified" in row for row in added)
    assert imported(proof(tmp_path / "cpu.tar.gz", "vllm", "0.32.0+cpu", gpus=0))[1] == []
    shown = trtspec("prove", "--import", tmp_path / "a.tar.gz").stdout
    assert "vllm_flags.yaml formats.nvfp4: a server of 0.27.1 was started with it" in shown


@pytest.mark.parametrize("engine", [None, "", "main", 7])
def test_a_release_that_is_not_known_tells_nothing(engine: Any, tmp_path: Path) -> None:
    assert imported(proof(tmp_path / "a.tar.gz", "vllm", engine)) == ({}, [])


def test_what_is_no_proof_inside_is_refused(tmp_path: Path) -> None:
    evidence = {"backend": "vllm", "engine": "0.32.0", "gpus": [], "speed": {"plain": {}}, "memory": {}, "outputs": {},
                "setup": {}}  # fmt: skip
    wrong: list[dict[str, Any]] = [
        {"outputs": []},
        {"setup": []},
        {"gpus": 7},
        {"outputs": {"check": [1]}},
        {"outputs": {"inspect-head": HEAD, "bench-k1": 1}},
    ]
    for number, change in enumerate(wrong):
        files = {
            "evidence.json": json.dumps(copy.deepcopy(evidence) | change),
            "verdict.json": '{"ok": 1, "results": []}',
        }
        write_bundle(tmp_path / f"{number}.tar.gz", files, Redactor({}))
        done = trtspec("prove", "--import", tmp_path / f"{number}.tar.gz", "--json")
        assert done.status == 2 and "not that of a proof" in done.stderr, (change, done.stderr)
